"""drehr-search's index at 10,000 notes: what it takes to make, on time, memory and disk, and how fast it answers.

    python tests/benchmarks/bench_search_index.py [--notes 10000] [--at FOLDER] [--windows] [--write]

The notes are the open ones, each copied with a tenth of its words replaced by others of the corpus, five notes a
patient, read from a CSV. `drehr-search index` makes the index whole, on one thread (a core-hour and a half for 10,000
notes on a CPU without AMX), then once more, when no note is new; its processor time and memory are the system's count.
A query is one of the open benchmark's, on one thread, in the whole index or within a patient.

`--windows`: with them, as `drehr-search index` makes it by itself; else one vector a chunk (`--no-windows`).
`--at`: keep notes and index there, and use what is there. `--write`: also figures/benchmarks/search_index.json, or
search_index_windows.json, with another number of notes in its name."""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from machine import about

ROOT = Path(__file__).resolve().parents[2]
ONE = os.environ | {"OMP_NUM_THREADS": "1"}  # two threads on a busy machine wait for each other
NOTES_PER_PATIENT, CHANGED, QUERIES, WARM = 5, 0.1, 200, 20


def write_notes(path: Path, number: int, seed: int = 0) -> None:
    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES

    rng = np.random.default_rng(seed)
    texts = [note.text for note in pipeline.notes(PROFILES["open"])[0]]
    vocabulary = np.array([word for text in texts for word in text.split()])
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("note_id", "subject_id", "hadm_id", "text"))
        for n in range(number):
            words = np.array(texts[n % len(texts)].split(), dtype=object)
            changed = rng.random(len(words)) < CHANGED
            words[changed] = rng.choice(vocabulary, changed.sum())
            table.writerow((f"n{n}", f"p{n // NOTES_PER_PATIENT}", "", " ".join(words)))


def size_mb(place: Path) -> float:
    paths = place.rglob("*") if place.is_dir() else [place]
    return round(sum(path.stat().st_size for path in paths if path.is_file()) / 1e6, 1)


def make_index(source: Path, folder: Path, windows: bool) -> tuple[float, float, float]:
    """Seconds by the clock and of the processor, and the MB that a process took, of `drehr-search index`."""
    command = [sys.executable, "-m", "drehr_utils.use.search", "index", str(source), "--index", str(folder)]
    command += [] if windows else ["--no-windows"]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env=ONE)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # its memory is that of the largest child so far
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return round(time.perf_counter() - start), round(cpu), round(after.ru_maxrss / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, default=10_000)
    parser.add_argument("--at", type=Path)
    parser.add_argument("--windows", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        result = measure(options.at or Path(place), options.notes, options.windows)
    print(json.dumps(result, indent=1))
    if options.write:
        of = "" if options.notes == parser.get_default("notes") else f"_{options.notes}"
        path = ROOT / f"figures/benchmarks/search_index{'_windows' * options.windows}{of}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def measure(place: Path, number: int, windows: bool) -> dict[str, float | int | str]:
    source, folder, counted = place / "notes.csv.gz", place / "index", place / "made.json"
    if not counted.exists():
        if folder.exists():
            raise SystemExit(f"{folder} is half made, and what it took was not counted: delete it")
        place.mkdir(parents=True, exist_ok=True)
        write_notes(source, number)
        keys = ("index_made_s", "index_cpu_s", "index_peak_mb")
        made = dict(zip(keys, make_index(source, folder, windows), strict=True))
        counted.write_text(json.dumps({"index_notes": number, "index_windows": windows} | made))
    made = json.loads(counted.read_text())
    if (made["index_notes"], made.get("index_windows", False)) != (number, windows):
        raise SystemExit(f"{place} has another index, see {counted.name} in it: name another folder")

    import torch

    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES
    from drehr_utils.search.index import NoteIndex

    torch.set_num_threads(1)
    again_s, _, _ = make_index(source, folder, windows)
    index = NoteIndex.open(folder)
    rng = np.random.default_rng(0)
    queries = list(pipeline.benchmark(PROFILES["open"], "test").queries.values())
    queries = [queries[i] for i in rng.permutation(len(queries))[:QUERIES]]
    patients = [f"p{p}" for p in rng.integers(-(-number // NOTES_PER_PATIENT), size=len(queries))]
    result = {
        **made,
        "index_chunks": index.table.count_rows(),
        "index_nothing_new_s": again_s,
        "index_mb": size_mb(folder),
        "index_model_mb": round(size_mb(folder / "hybrid") + size_mb(folder / "graph.json"), 1),  # part of it
        "index_source_mb": size_mb(source),
        "index_queries": len(queries),
    }
    for name, asked in (("all", [None] * len(queries)), ("patient", patients)):
        times = []
        for n, (query, patient) in enumerate(zip(queries[:WARM] + queries, asked[:WARM] + asked, strict=True)):
            start = time.perf_counter()
            index.search(query, patient=patient)
            if n >= WARM:
                times.append(1000 * (time.perf_counter() - start))
        result[f"index_query_{name}_median_ms"] = round(float(np.median(times)), 1)
        result[f"index_query_{name}_p95_ms"] = round(float(np.percentile(times, 95)), 1)
    peak = {"index_query_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)}
    return result | peak | about("index_")


if __name__ == "__main__":
    main()
