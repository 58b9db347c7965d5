"""drehr-search at the size of a hospital's ward: an index of 10,000 notes, and how long its answers take.

    python tests/benchmarks/bench_search_index.py [--notes 10000] [--folder FOLDER] [--write]

The notes are the open ones, each copied with a tenth of its words replaced by others of the corpus, five notes a
patient. They are indexed by the command line, in a process of its own, which is timed; what is in FOLDER already (a
run that was cut off) isn't indexed again, and doesn't count. Then the open benchmark's queries are asked, one at a time
on one thread, in the whole index and within a patient. `--write`: also figures/benchmarks/search_index.json."""

from __future__ import annotations

import argparse
import csv
import datetime
import gzip
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
NOTES_PER_PATIENT, CHANGED, QUERIES, WARM = 5, 0.1, 200, 20


def write_notes(path: Path, number: int, seed: int = 0) -> None:
    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES

    rng = np.random.default_rng(seed)
    texts = [note.text for note in pipeline.notes(PROFILES["open"])[0]]
    vocabulary = np.array([word for text in texts for word in text.split()])
    with gzip.open(path, "wt", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(("note_id", "subject_id", "text"))
        for n in range(number):
            words = np.array(texts[n % len(texts)].split(), dtype=object)
            changed = rng.random(len(words)) < CHANGED
            words[changed] = rng.choice(vocabulary, changed.sum())
            table.writerow((f"n{n}", f"p{n // NOTES_PER_PATIENT}", " ".join(words)))


def size_mb(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, default=10_000)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "drehr-bench-index")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()

    options.folder.mkdir(parents=True, exist_ok=True)
    source, folder = options.folder / f"notes-{options.notes}.csv.gz", options.folder / "index"
    if not source.exists():
        write_notes(source, options.notes)
    begun = time.perf_counter()
    command = [sys.executable, "-m", "drehr_utils.use.search", "index", str(source), "--index", str(folder)]
    said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    seconds, used = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    added = int(said.split(": ")[1].split(" notes added")[0])

    import torch

    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES
    from drehr_utils.search.index import NoteIndex

    torch.set_num_threads(1)
    index = NoteIndex.open(folder)
    rng = np.random.default_rng(0)
    queries = list(pipeline.benchmark(PROFILES["open"], "test").queries.values())
    queries = [queries[i] for i in rng.permutation(len(queries))[:QUERIES]]
    patients = [f"p{p}" for p in rng.integers(-(-options.notes // NOTES_PER_PATIENT), size=len(queries))]
    result = {
        "index_notes": options.notes,
        "index_chunks": index.table.count_rows(),
        "index_notes_added": added,
        "index_s": round(seconds, 1),
        "index_cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "index_notes_per_s": round(added / seconds, 2),
        "index_peak_mb": round(used.ru_maxrss / 1024),
        "index_mb": size_mb(folder),
        "index_model_mb": size_mb(folder / "hybrid"),  # the hybrid's copy, part of it
        "index_source_mb": size_mb(options.folder) - size_mb(folder),
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
    result |= {
        "index_query_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "index_load": round(os.getloadavg()[0], 1),
        "index_date": datetime.date.today().isoformat(),
        "index_machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps(result, indent=1))
    if options.write:
        path = ROOT / "figures/benchmarks/search_index.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
