"""From a table of notes to what training reads, on disk in shards: speed, and memory, which should not grow.

    python tests/benchmarks/bench_corpus.py [--copies 10 25 50] [--terms 5000000] [--ray 2] [--write]

Notes are the open ones, so many times each, with a tenth of the words changed (bench_search_index.py); each chunk has a
recorded answer to each prompt, drawn from the open ones. The steps are those of a run: the notes' table read, cleaned
and cut, the answers looked up, both stages' positive sets, and the pairs of 2,000 random chunks as training draws them.
With the open graph; the smallest size again with so many terms, new ones of the open graph's words (bench_matching.py),
each a concept of its own, and on so many processes of Ray Data, where only what this one holds is measured.

Each size is a process of its own, on one thread. Memory is what the process itself holds (RssAnon) at a step's peak, a
sample every 5 ms, less what it held before the first step, with graph and matcher loaded: pages of a mapped file are
the system's, which drops them when it needs the room. `--write`: also figures/benchmarks/corpus.json."""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from bench_growth import exponent
from bench_matching import label, terms_up_to
from bench_search_index import ONE, write_notes
from machine import about

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 2000
STEPS = ("notes", "chunks", "answers", "stage1", "stage2", "pairs")


def held_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3


def measured(work: Callable[[], object], before: float) -> dict[str, float]:
    """Seconds of this process's own work, and the peak of memory above `before`."""
    peaks, done = [held_mb()], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            peaks.append(held_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    cpu = time.process_time()
    work()
    found = {"cpu_s": round(time.process_time() - cpu, 2)}
    done.set()
    watcher.join()
    return found | {"mb": round(max(peaks) - before, 1)}


def write_answers(source: Path, path: Path) -> None:
    """For each chunk of the notes an answer to each prompt, one of those to the open chunks."""
    from drehr_utils import corpus
    from drehr_utils.data.notes import ReadReport, chunk_note, iter_notes
    from drehr_utils.llm import prompts
    from drehr_utils.profiles import PROFILES

    known: dict[tuple[str, str | None], list[str]] = {}
    for task in corpus.TASKS.values():
        for (_, kind, _), text in corpus.answers(PROFILES["open"], task, progress=False).texts.items():
            known.setdefault((task, kind), []).append(text)
    rng = np.random.default_rng(0)
    with gzip.open(path, "wt", encoding="utf-8", compresslevel=1) as file:
        for note in iter_notes(source, ReadReport("")):
            for chunk in chunk_note(note):
                for (task, kind), texts in known.items():
                    asked = prompts.Request(task, chunk.id, chunk.text, kind)
                    line = {"task": task, "entity_type": kind, "id": chunk.id, "text_sha256": asked.text_sha256}
                    file.write(json.dumps(line | {"answer": texts[rng.integers(len(texts))]}) + "\n")


def with_terms(number: int) -> None:
    """The open graph for this process with more concepts, of one name each, up to so many terms."""
    from drehr_utils import corpus
    from drehr_utils.profiles import PROFILES

    graph = corpus.knowledge_graph(PROFILES["open"])
    for n, term in enumerate(terms_up_to(list(graph.term2cui), number)[len(graph.term2cui) :]):
        graph.term2cui[term], graph.cui2terms[f"new{n}"], graph.cui2pt[f"new{n}"] = [f"new{n}"], [term], term
    corpus.knowledge_graph = lambda profile: graph
    corpus.graph_digest = lambda profile: str(number)


def worker(place: Path, terms: int, workers: int) -> dict[str, float | dict[str, float]]:
    from drehr_utils import corpus
    from drehr_utils.config import StageConfig
    from drehr_utils.profiles import PROFILES
    from drehr_utils.training.sampling import PositivePairs, TrainingSet

    if terms:
        with_terms(terms)
    profile = replace(
        PROFILES["open"], name=str(place / "cache"), in_place=False, notes=place, benchmark=None, workers=workers,
        recorded_answers=(place / "answers.jsonl.gz",),
    )  # fmt: skip
    if workers == 1:  # else each worker makes its own
        corpus.matcher(profile)
    before = held_mb()

    made = {}

    def draw() -> None:
        data = TrainingSet.build(corpus.chunks(profile), made["stage1"])
        pairs = PositivePairs(data, StageConfig(positives_per_chunk=128))
        for i in np.random.default_rng(0).permutation(len(data))[:PAIRS].tolist():
            pairs[0, i]

    steps = {
        "notes": lambda: corpus.notes(profile),
        "chunks": lambda: corpus.chunks(profile),
        "answers": lambda: [corpus.answers(profile, task, progress=False).digest() for task in corpus.TASKS.values()],
        "stage1": lambda: made.update(stage1=corpus.stage1_sets(profile)),
        "stage2": lambda: made.update(stage2=corpus.stage2_sets(profile)),
        "pairs": draw,
    }
    found = {step: measured(work, before) for step, work in steps.items()}
    samples = [int(sets.offsets[-1]) for sets in made.values()]
    size = sum(path.stat().st_size for path in (place / "cache").rglob("*") if path.is_file())
    n = {
        "n_notes": len(corpus.notes(profile)[0]),
        "n_chunks": len(corpus.chunks(profile)),
        "n_samples": sum(samples),
    }
    return found | n | {"disk_mb": round(size / 1e6, 1)}


def run_worker(source: Path, answers: Path, terms: int = 0, workers: int = 1) -> dict:
    with tempfile.TemporaryDirectory() as place:
        Path(place, "discharge.csv.gz").symlink_to(source)
        Path(place, answers.name).symlink_to(answers)
        command = [sys.executable, __file__, "--worker", place, "--terms", str(terms), "--ray", str(workers)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=ONE).stdout
    print(output.splitlines()[-1], file=sys.stderr, flush=True)
    return json.loads(output.splitlines()[-1])


def keys(prefix: str, row: dict) -> dict[str, float]:
    flat = {}
    for name, value in row.items():
        flat |= {f"{name}_{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return {f"{prefix}_{name}": value for name, value in flat.items()}


def measure(copies: Sequence[int], terms: int, workers: int) -> dict[str, float | int | str]:
    from drehr_utils import corpus
    from drehr_utils.profiles import PROFILES

    base, rows, result = len(corpus.notes(PROFILES["open"])[0]), {}, {}
    with tempfile.TemporaryDirectory() as place:
        for times in sorted(copies):
            source, answers = Path(place, f"x{times}", "discharge.csv.gz"), Path(place, f"x{times}", "answers.jsonl.gz")
            source.parent.mkdir()
            write_notes(source, times * base)
            write_answers(source.parent, answers)
            rows[times] = run_worker(source, answers)
            result |= keys(f"corpus_x{times}", rows[times])
            if times == min(copies) and terms:
                result |= keys(f"corpus_x{times}_{label(terms)}", run_worker(source, answers, terms))
            if times == min(copies) and workers > 1:
                row = run_worker(source, answers, workers=workers)
                made = {key: value for key, value in keys(f"corpus_x{times}_ray", row).items() if "cpu" not in key}
                result |= made | {"corpus_ray_workers": workers}
    for step in STEPS if len(rows) > 1 else ():
        for key in ("cpu_s", "mb"):
            values = [row[step][key] for row in rows.values()]
            result[f"corpus_{step}_{key}_exponent"] = exponent([row["n_chunks"] for row in rows.values()], values)
    return result | about("corpus_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, nargs="+", default=[10, 25, 50], help="of the open corpus")
    parser.add_argument("--terms", type=int, default=5_000_000, help="of the larger graph; 0: without")
    parser.add_argument("--ray", type=int, default=2, metavar="WORKERS", help="1: without")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        print(json.dumps(worker(options.worker, options.terms, options.ray)), flush=True)
        return
    result = measure(options.copies, options.terms, options.ray)
    print(json.dumps(result, indent=1))
    if options.write:
        path = ROOT / "figures/benchmarks/corpus.json"
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
