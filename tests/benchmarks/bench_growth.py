"""How processor time and memory grow with the number of notes and with that of terms; exponents of power laws.

    python tests/benchmarks/bench_growth.py [--notes 1 5 25] [--terms 50000 200000 1000000] [--write]

Notes are the open ones, so many times each, with a tenth of the words changed (bench_search_index.py). Of the notes:
cleaning and chunking, matching of the open graph's terms in all chunks, stage I's positive sets without abbreviations,
and an update of drehr-search's index, where random vectors stand for the encoder's (whose time is the chunks', by its
rate). Of the terms, a part of the open graph's or also new ones of their words (bench_matching.py): building the
matcher, and a pass over the open chunks.

Every size of every step is a process of its own, on one thread. Memory is the peak while the step works less what the
process had before it, so that libraries and inputs are no part of it. An exponent is the slope of a least-squares line
through the logarithms: 1 is growth in proportion. `--write`: also figures/benchmarks/growth.json."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_matching import label, terms_up_to
from bench_search_index import ONE, write_notes
from machine import about

ROOT = Path(__file__).resolve().parents[2]
OF_NOTES, OF_TERMS = ("clean", "match", "positives", "index"), ("terms",)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of the least-squares line through log size and log value."""
    return round(float(np.polyfit(np.log(sizes), np.log(np.maximum(values, 1e-3)), 1)[0]), 3)


def memory_mb(name: str) -> float:
    """VmRSS or VmHWM, what the process has or had at its peak, as Linux tells."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1e3


def measured(work: Callable[[], object]) -> dict[str, float]:
    """Processor seconds, and the peak of memory above what there was before, in MB; `number` of what came out."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work let go would else be taken up again, and seem nothing
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = memory_mb("VmRSS"), time.process_time()
    result = work()
    found = {"cpu_s": round(time.process_time() - start, 3), "mb": round(memory_mb("VmHWM") - before, 1)}
    return found | {"number": len(result)} if isinstance(result, list) else found


def worker(step: str, source: Path, place: Path) -> dict[str, dict[str, float]]:
    """Of a step on the notes, or on the terms, in the file `source`: step -> what it took."""
    from drehr_utils import pipeline
    from drehr_utils.data.notes import SPLITS, chunk_note, read_any_notes
    from drehr_utils.knowledge.matching import EntityMatcher
    from drehr_utils.profiles import PROFILES

    profile = PROFILES["open"]
    if step == "terms":
        terms = source.read_text(encoding="utf-8").split("\n")
        texts = [chunk.text for split in SPLITS for chunk in pipeline.chunks(profile, split)]
        made = []
        found = {"build": measured(lambda: made.append(EntityMatcher(terms)))}
        return found | {"match": measured(lambda: made[0].find_all(texts))}
    if step in ("match", "positives"):
        matcher = pipeline.matcher(profile)  # before the notes, which fill what its making let go
    notes, _ = read_any_notes(source)
    if step == "index":
        return {step: measured_index(notes, place)}
    cut = lambda: [chunk for note in notes for chunk in chunk_note(note)]  # noqa: E731
    if step == "clean":
        return {step: measured(cut)}
    chunks = cut()
    if step == "match":
        texts = [chunk.text for chunk in chunks]
        return {step: measured(lambda: matcher.find_all(texts))}
    from drehr_utils.training.positives import stage1_positives

    graph = pipeline.knowledge_graph(profile)
    return {step: measured(lambda: stage1_positives(chunks, graph, matcher, {}))}


def measured_index(notes: list, place: Path) -> dict[str, float]:
    from drehr_utils.search.index import NoteIndex
    from drehr_utils.training import encoders
    from drehr_utils.use.search import hybrid_of

    def drawn(encoder, texts: Sequence[str], **_) -> np.ndarray:
        vectors = rng.standard_normal((len(texts), encoder.get_embedding_dimension()), np.float32)
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)

    rng = np.random.default_rng(0)
    hybrid = hybrid_of()
    hybrid.weights = replace(hybrid.weights, windows=0.0)  # one vector a chunk, as `--no-windows` has it
    index, encoders.encode = NoteIndex.create(place / "index", hybrid), drawn
    return measured(lambda: index.update(notes, progress=False))


def run_worker(step: str, source: Path) -> dict[str, dict[str, float]]:
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, "--worker", step, "--source", str(source), "--place", place]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=ONE).stdout
    found = json.loads(output.splitlines()[-1])
    print(f"{step}, {source.name}: {found}", file=sys.stderr, flush=True)
    return found


def keys(
    prefix: str, rows: Mapping[int, Mapping[str, Mapping[str, float]]], names: Mapping[int, str]
) -> dict[str, float]:
    """Flat: every size's values, and each step's exponents over the sizes, if there are several."""
    found = {
        f"{prefix}_{names[size]}_{step}_{key}": value
        for size, row in rows.items()
        for step, values in row.items()
        for key, value in values.items()
    }
    for step in next(iter(rows.values())):
        for key, short in (("cpu_s", "cpu"), ("mb", "mb")):
            if len(rows) > 1:
                values = [row[step][key] for row in rows.values()]
                found[f"{prefix}_{step}_{short}_exponent"] = exponent(list(rows), values)
    return found


def measure(times: Sequence[int], numbers: Sequence[int]) -> dict[str, float | int | str]:
    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES

    profile, by_notes, by_terms = PROFILES["open"], {}, {}
    base = len(pipeline.notes(profile)[0])
    real = sorted(pipeline.knowledge_graph(profile).term2cui)
    with tempfile.TemporaryDirectory() as place:
        for factor in times:
            source = Path(place, f"x{factor}.csv.gz")
            write_notes(source, factor * base)
            by_notes[factor * base] = {}
            for step in OF_NOTES:
                by_notes[factor * base] |= run_worker(step, source)
        for number in numbers:
            source = Path(place, f"{label(number)}.txt")
            source.write_text("\n".join(terms_up_to(real, number)), encoding="utf-8")
            by_terms[number] = run_worker(*OF_TERMS, source)
    result = keys("growth_notes", by_notes, {factor * base: f"x{factor}" for factor in times})
    result |= {f"growth_notes_x{factor}": factor * base for factor in times}
    result |= keys("growth_terms", by_terms, {number: label(number) for number in numbers})
    return result | about("growth_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, nargs="+", default=[1, 5, 25], help="times the open corpus")
    parser.add_argument("--terms", type=int, nargs="+", default=[50_000, 200_000, 1_000_000])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", choices=OF_NOTES + OF_TERMS, help=argparse.SUPPRESS)
    parser.add_argument("--source", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker, options.source, options.place)), flush=True)
        return
    result = measure(options.notes, options.terms)
    print(json.dumps(result, indent=1))
    if options.write:
        path = ROOT / "figures/benchmarks/growth.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
