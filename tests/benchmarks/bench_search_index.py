"""drehr-search's index at 10,000 notes: what it takes to make, on time, memory and disk, and how fast it answers.

    python tests/benchmarks/bench_search_index.py [--notes 10000] [--encoded 200] [--write]

The notes are the open ones, each copied with a tenth of its words replaced by others of the corpus, five notes a
patient, read from a CSV. The encoder takes most of the time, and as much for one chunk as for the next: so it encodes
the first `--encoded` notes, and the others get those notes' vectors with noise added (bench_latency.py does the same).
`index_cpu_s` is one processor's time for all, the rest reckoned at the encoder's measured rate; two cores share the
encoder's. A query is one of the open
benchmark's, on one thread, in the whole index or within a patient.

`--write`: also figures/benchmarks/search_index.json."""

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


def make_index(source: Path, folder: Path, encoded: int) -> dict[str, float]:
    """Seconds of each part, the number of chunks that were encoded, and the memory that this process took."""
    from drehr_utils.data.notes import read_any_notes
    from drehr_utils.search.index import NoteIndex
    from drehr_utils.training import encoders
    from drehr_utils.use.search import hybrid_of

    start, vectors, real, rng = time.process_time(), [], encoders.encode, np.random.default_rng(0)
    found = {"encoding_s": 0.0}  # of this process's own work: others may have the processor

    def encode(*arguments, **options) -> np.ndarray:
        before = time.process_time()
        vectors.append(real(*arguments, **options))
        found["encoding_s"] += time.process_time() - before
        return vectors[-1]

    def draw(encoder, texts: list[str], **options) -> np.ndarray:
        drawn = known[rng.integers(len(known), size=len(texts))]
        drawn = drawn + rng.normal(0, 0.3 / drawn.shape[1] ** 0.5, size=drawn.shape).astype(np.float32)
        return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)

    notes, _ = read_any_notes(source)
    index = NoteIndex.create(folder, hybrid_of())
    encoders.encode = encode
    index.update(notes[:encoded])
    known = np.concatenate(vectors)
    encoders.encode = draw
    index.update(notes)
    found["other_s"] = time.process_time() - start - found["encoding_s"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found | {"encoded_chunks": len(known), "peak_mb": round(peak)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--notes", type=int, default=10_000)
    parser.add_argument("--encoded", type=int, default=200)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        source, folder = options.worker / "notes.csv.gz", options.worker / "index"
        print(json.dumps(make_index(source, folder, options.encoded)), flush=True)
        return
    with tempfile.TemporaryDirectory() as place:
        result = measure(Path(place), options.notes, options.encoded)
    print(json.dumps(result, indent=1))
    if options.write:
        path = ROOT / "figures/benchmarks/search_index.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


def measure(place: Path, number: int, encoded: int) -> dict[str, float | int | str]:
    source, folder = place / "notes.csv.gz", place / "index"
    write_notes(source, number)
    command = [sys.executable, __file__, "--worker", str(place), "--encoded", str(encoded)]
    made = json.loads(
        subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=ONE).stdout.splitlines()[-1]
    )

    import torch

    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES
    from drehr_utils.search.index import NoteIndex

    torch.set_num_threads(1)
    index = NoteIndex.open(folder)
    rng = np.random.default_rng(0)
    queries = list(pipeline.benchmark(PROFILES["open"], "test").queries.values())
    queries = [queries[i] for i in rng.permutation(len(queries))[:QUERIES]]
    patients = [f"p{p}" for p in rng.integers(-(-number // NOTES_PER_PATIENT), size=len(queries))]
    chunks, rate = index.table.count_rows(), made["encoded_chunks"] / made["encoding_s"]
    result = {
        "index_notes": number,
        "index_chunks": chunks,
        "index_encoded_chunks": made["encoded_chunks"],
        "index_encoder_chunks_per_cpu_s": round(rate, 1),
        "index_without_encoder_cpu_s": round(made["other_s"], 1),
        "index_cpu_s": round(chunks / rate + made["other_s"]),
        "index_peak_mb": made["peak_mb"],
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
    return result | {
        "index_query_peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "index_load": round(os.getloadavg()[0], 1),
        "index_date": datetime.date.today().isoformat(),
        "index_machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }


if __name__ == "__main__":
    main()
