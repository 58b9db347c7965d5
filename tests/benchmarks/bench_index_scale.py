"""drehr-search's vectors at 10^5, 10^6 and 10^7 chunks: LanceDB in process, the same table built on Ray with a worker
killed in the middle, and faiss beside it (flat, IVF-PQ, HNSW), one variable changed at a time.

    DREHR_PUBLIC_DATA=... python tests/benchmarks/bench_index_scale.py [--sizes 100000,1000000,10000000] [--write]

50,000 vectors are embeddings of distinct windows of text (open notes, real notes, MedQuAD, IU X-ray); the rest lie
between one of them and one of its ten nearest, with noise such that the ratio of the distances to the nearest and the
second-nearest is what it is among the real ones. Queries are the open benchmark's. A table's rows have the index's
columns, with no text: what is measured is vectors. Memory is what a process owns, not the file pages that it reads.
An hour on 2 cores and 50 GB of disk at 10^7; each stage runs in a process of its own and leaves a JSON in `--work`, so
that a killed run goes on. `--write`: also figures/benchmarks/index_scale.json."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
from machine import about

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "figures/benchmarks/index_scale.json"
REAL, DIM, BLOCK, NEAR = 50_000, 384, 50_000, 10
WINDOW, STRIDE = 100, 16  # words
TOP, QUERIES, PROBES, PATIENTS, PATIENT_CHUNKS = 100, 200, 300, 50, 100
PATIENCE = 40.0  # seconds for one kind of latency
HNSW_UP_TO = 1_000_000


# --- vectors --------------------------------------------------------------------------------------------------------


def windows() -> list[str]:
    """Distinct windows of 100 words, 16 apart, of all texts at hand, in random order."""
    import pandas as pd

    from drehr_utils import pipeline
    from drehr_utils.data import public_data
    from drehr_utils.data.notes import clean, read_real_notes
    from drehr_utils.profiles import PROFILES

    texts = [note.text for note in (*pipeline.notes(PROFILES["open"])[0], *read_real_notes("aci_bench"))]
    texts += [note.text for note in read_real_notes("mts_dialog")]
    folders = {name: public_data.locate(name, missing_ok=False) for name in ("iu_xray", "medquad")}
    reports = pd.read_csv(folders["iu_xray"] / "iu_xray/indiana_reports.csv.gz")
    texts += reports[["findings", "impression"]].fillna("").agg(" ".join, axis=1).tolist()
    texts += pd.read_json(folders["medquad"] / "medquad/passages.jsonl.gz", lines=True)["text"].tolist()
    found = {}
    for words in (clean(text).split() for text in texts):
        starts = range(0, max(len(words) - WINDOW, 0) + 1, STRIDE)
        found |= dict.fromkeys(" ".join(words[start : start + WINDOW]) for start in starts if words)
    distinct = list(found)
    return [distinct[i] for i in np.random.default_rng(0).permutation(len(distinct))]


def real(work: Path) -> dict[str, float]:
    """real.npy, a block at a time, and queries.npy."""
    from tqdm import tqdm

    from drehr_utils import pipeline
    from drehr_utils.profiles import PROFILES
    from drehr_utils.training import encoders

    found = windows()
    assert len(found) >= REAL, f"{len(found):,} distinct windows: too few"
    encoder, parts = encoders.load_encoder(ROOT / "data/models/drehr-improved"), []
    for start in tqdm(range(0, REAL, 2500), unit="part"):
        path = work / f"real-{start}.npy"
        if not path.exists():
            some = found[start : min(start + 2500, REAL)]
            save(path, encoders.encode(encoder, some, batch_size=64, bf16=True))
        parts.append(np.load(path))
    save(work / "real.npy", np.concatenate(parts))
    queries = list(pipeline.benchmark(PROFILES["open"], "test").queries.values())
    queries = [queries[i] for i in np.random.default_rng(0).permutation(len(queries))[:QUERIES]]
    save(work / "queries.npy", encoders.encode(encoder, queries, prompt=encoders.query_prompt(encoder)))
    return {"windows": len(found), "real": REAL, "queries": len(queries)}


def save(path: Path, array: np.ndarray) -> None:
    partial = path.with_suffix(".partial.npy")
    np.save(partial, array)
    os.replace(partial, path)


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def nearest(queries: np.ndarray, blocks: Iterator[tuple[int, np.ndarray]], top: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact: similarities and row numbers [queries, top] over blocks (first row, unit vectors), best first."""
    import torch

    asked, best, rows = torch.from_numpy(queries), None, None
    for start, block in blocks:
        scores, at = torch.topk(asked @ torch.from_numpy(block).T, min(top, len(block)))
        at = at + start
        if best is not None:
            scores, at = torch.cat([best, scores], 1), torch.cat([rows, at], 1)
            scores, kept = torch.topk(scores, min(top, scores.shape[1]))
            at = at.gather(1, kept)
        best, rows = scores, at
    return best.numpy(), rows.numpy()


def ratios(similarities: np.ndarray) -> np.ndarray:
    """Distance to the nearest other over that to the second-nearest, of unit vectors' three best similarities [n, 3],
    the first of which is the vector itself."""
    distances = np.sqrt(np.maximum(2 - 2 * similarities[:, 1:3], 1e-12))
    return distances[:, 0] / distances[:, 1]


def between(real: np.ndarray, neighbours: np.ndarray, n: int, noise: float, seed: object) -> np.ndarray:
    """n unit vectors, each somewhere between a real one and one of its neighbours, plus noise of that length."""
    rng = np.random.default_rng(seed)
    one = rng.integers(len(real), size=n)
    other = neighbours[one, rng.integers(neighbours.shape[1], size=n)]
    share = rng.random((n, 1), dtype=np.float32)
    drawn = rng.standard_normal((n, real.shape[1]), dtype=np.float32) * np.float32(noise / real.shape[1] ** 0.5)
    return unit(real[one] * (1 - share) + real[other] * share + drawn)


def noise(work: Path) -> dict[str, float]:
    """The noise at which the ratios' median among as many drawn vectors is that of the real ones: by bisection."""
    vectors = np.load(work / "real.npy")
    _, rows = nearest(vectors, ((s, vectors[s : s + 10_000]) for s in range(0, len(vectors), 10_000)), NEAR + 1)
    save(work / "neighbours.npy", rows[:, 1:])
    probes = np.random.default_rng(1).permutation(len(vectors))[:2000]

    def of(vectors: np.ndarray) -> np.ndarray:
        return ratios(nearest(vectors[probes], iter([(0, vectors)]), 3)[0])

    target, low, high = of(vectors), 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        drawn = of(between(vectors, rows[:, 1:], len(vectors), middle, seed=0))
        low, high = (middle, high) if np.median(drawn) < np.median(target) else (low, middle)
    found = {"noise": middle}
    for name, given in (("real", target), ("drawn", drawn)):
        found |= {f"ratio_{name}_{q}": round(float(np.percentile(given, q)), 3) for q in (10, 50, 90)}
    return found


def vectors(work: Path, size: int) -> dict[str, float]:
    """vectors.f32: the real ones, then drawn ones; a smaller size is a prefix of a larger."""
    real, neighbours = np.load(work / "real.npy"), np.load(work / "neighbours.npy")
    sigma, path = json.loads((work / "noise.json").read_text())["noise"], work / "vectors.f32"
    done = path.stat().st_size // (4 * DIM * BLOCK) if path.exists() else 0
    with open(path, "r+b" if done else "wb") as file:
        file.truncate(done * 4 * DIM * BLOCK)
        file.seek(0, 2)
        for start in range(done * BLOCK, size, BLOCK):
            block = between(real, neighbours, BLOCK, sigma, [start]) if start else real[:BLOCK]
            file.write(np.ascontiguousarray(block, np.float32).tobytes())
    return {}


def rows_from(work: Path, start: int, stop: int) -> np.ndarray:
    """Read, not mapped: mapped pages would count as memory."""
    return np.fromfile(work / "vectors.f32", np.float32, (stop - start) * DIM, offset=4 * DIM * start).reshape(-1, DIM)


def blocks(work: Path, size: int) -> Iterator[tuple[int, np.ndarray]]:
    return ((start, rows_from(work, start, min(start + BLOCK, size))) for start in range(0, size, BLOCK))


def truth(work: Path, size: int) -> dict[str, float]:
    queries = np.load(work / "queries.npy")
    probes = np.random.default_rng(2).integers(size, size=PROBES)
    asked = np.concatenate([queries, *(rows_from(work, p, p + 1) for p in probes)])
    similarities, rows = nearest(asked, blocks(work, size), TOP)
    save(work / f"truth-{size}.npy", rows[: len(queries)])
    return {"ratio_50": round(float(np.median(ratios(similarities[len(queries) :, :3]))), 3)}


# --- what is measured of each index -----------------------------------------------------------------------------------


@contextlib.contextmanager
def memory() -> Iterator[dict[str, float]]:
    """`peak_mb`: the most that this process and its children owned at a time, beyond what it did at the start."""

    def owned() -> float:
        total, me = 0, psutil.Process()
        for process in (me, *me.children(recursive=True)):
            with contextlib.suppress(psutil.Error, OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                total += sum(int(line.split()[1]) for line in status.split("\n") if line.startswith("RssAnon"))
        return total / 1024

    before, over, found = owned(), threading.Event(), {"peak_mb": 0.0}

    def watch() -> None:
        while not over.wait(0.2):
            found["peak_mb"] = max(found["peak_mb"], owned() - before)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()
        found["peak_mb"] = round(max(found["peak_mb"], owned() - before))


def asked(search: Callable[[np.ndarray], np.ndarray], queries: np.ndarray, truth: np.ndarray) -> dict[str, float]:
    """Recall of the true 100 nearest, then latency with one client and with four; `search` gives row numbers."""
    kept, until = [], time.perf_counter() + 2 * PATIENCE
    for query, right in zip(queries, truth, strict=True):  # warms up, too
        kept.append(len(np.intersect1d(search(query)[:TOP], right)) / TOP)
        if len(kept) >= 20 and time.perf_counter() > until:
            break
    result = {"recall": round(float(np.mean(kept)), 4), "recall_lowest": min(kept), "recall_queries": len(kept)}
    for clients in (1, 4):
        times, until = [], time.perf_counter() + PATIENCE

        def timed(query: np.ndarray, until: float = until, times: list[float] = times) -> None:
            if (start := time.perf_counter()) < until:
                search(query)
                times.append(1000 * (time.perf_counter() - start))

        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(timed, queries))
        for name, q in (("median", 50), ("p95", 95)):
            result[f"{name}_ms_{clients}"] = round(float(np.percentile(times, q)), 2)
        result[f"timed_{clients}"] = len(times)
    return result


def size_mb(folder: Path) -> int:
    return round(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6)


def open_index(folder: Path):
    """A NoteIndex over a table of vectors alone: its hybrid takes no part."""
    import lancedb

    from drehr_utils.search import index

    database = lancedb.connect(str(folder), read_consistency_interval=datetime.timedelta(0))
    table = database.create_table("chunks", schema=index.schema(DIM), exist_ok=True)
    return index.NoteIndex(folder, None, table)


def rows_of_block(work: str, start: int, stop: int):
    """Rows of the index's table; chunk i is of patient i // 100."""
    import pyarrow as pa

    from drehr_utils.search import index

    ids = np.arange(start, stop)
    columns = {name: pa.array([""] * len(ids)) for name in ("note_id", "note_digest", "text")}
    columns |= {"id": pa.array(ids.astype(str)), "patient": pa.array((ids // PATIENT_CHUNKS).astype(str))}
    flat = pa.array(rows_from(Path(work), start, stop).ravel())
    columns["vector"] = pa.FixedSizeListArray.from_arrays(flat, DIM)
    return pa.table(columns, schema=index.schema(DIM))


def indexed(found, took: dict[str, float]) -> None:
    from lancedb.index import BTree

    start = time.perf_counter()
    found.index_vectors()
    found.table.create_index("patient", config=BTree())
    took["index_s"] = round(time.perf_counter() - start, 1)


def lance(work: Path, size: int) -> dict[str, float]:
    folder, took = work / f"lance-{size}", {}
    shutil.rmtree(folder, ignore_errors=True)
    with memory() as found:
        opened, start = open_index(folder), time.perf_counter()
        for at in range(0, size, BLOCK):
            opened.table.add(rows_of_block(str(work), at, min(at + BLOCK, size)))
        took["write_s"] = round(time.perf_counter() - start, 1)
        indexed(opened, took)
    return took | found | {"build_s": round(sum(took.values()), 1), "disk_mb": size_mb(folder)}


def ray(work: Path, size: int) -> dict[str, float]:
    """The same on Ray; a third of the way its newest worker is killed."""
    from drehr_utils.search.index_ray import append_on_ray

    folder, took, killed = work / f"ray-{size}", {}, 0
    shutil.rmtree(folder, ignore_errors=True)
    spans = [(at, min(at + BLOCK, size)) for at in range(0, size, BLOCK)]
    # Where a worker finds this file by its name
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

    def maker(place: str = str(work)):
        return lambda span: rows_of_block(place, *span)

    with memory() as found:
        opened, start = open_index(folder), time.perf_counter()
        for done, _ in enumerate(append_on_ray(opened.table, maker, spans, workers=2), 1):
            if not killed and done >= len(spans) // 3:
                workers = [p for p in psutil.Process().children(recursive=True) if "ray::" in " ".join(p.cmdline())]
                os.kill(max(workers, key=lambda p: p.create_time()).pid, 9)
                killed += 1
        took["write_s"] = round(time.perf_counter() - start, 1)
        assert opened.table.count_rows() == size, opened.table.count_rows()
        indexed(opened, took)
    build = {"build_s": round(sum(took.values()), 1), "disk_mb": size_mb(folder), "killed": killed}
    return took | found | build


def of_table(work: Path, size: int, kind: str) -> dict[str, float]:
    """A fresh process asks; within a patient, ids are compared with the exact ones."""
    opened, queries = open_index(work / f"{kind}-{size}"), np.load(work / "queries.npy")

    def search(query: np.ndarray) -> np.ndarray:
        rows = opened.nearest(query).select(["id", "_distance"]).to_arrow()
        return rows["id"].to_numpy(zero_copy_only=False).astype(int)

    with memory() as found:
        result = asked(search, queries, np.load(work / f"truth-{size}.npy"))
        same, times = 0, []
        for i, patient in enumerate(np.random.default_rng(3).integers(size // PATIENT_CHUNKS, size=PATIENTS)):
            start = time.perf_counter()
            rows = opened.of_patient(str(patient))
            times.append(1000 * (time.perf_counter() - start))
            span = range(patient * PATIENT_CHUNKS, (patient + 1) * PATIENT_CHUNKS)
            held = rows["vector"].combine_chunks().flatten().to_numpy().reshape(-1, DIM)
            own, ids = rows_from(work, span.start, span.stop), rows["id"].to_numpy(zero_copy_only=False).astype(int)
            scores, right = held @ queries[i % len(queries)], own @ queries[i % len(queries)]
            at = np.argsort(ids)
            same += ids[at].tolist() == list(span) and bool(np.allclose(scores[at], right, atol=1e-6))
    result |= {"patients": PATIENTS, "patients_same": same, "patient_p95_ms": round(float(np.percentile(times, 95)), 2)}
    return result | {"query_mb": found["peak_mb"]}


def lance_query(work: Path, size: int) -> dict[str, float]:
    return of_table(work, size, "lance")


def ray_query(work: Path, size: int) -> dict[str, float]:
    found = of_table(work, size, "ray")
    shutil.rmtree(work / f"ray-{size}")
    return found


def of_faiss(work: Path, size: int, make: Callable[[], object], search: Callable) -> dict[str, float]:
    with memory() as found:
        start = time.perf_counter()
        index = make()
        build = round(time.perf_counter() - start, 1)
        result = asked(lambda query: search(index, query), np.load(work / "queries.npy"),
                       np.load(work / f"truth-{size}.npy"))  # fmt: skip
    return {"build_s": build} | result | found


def plain(index, query: np.ndarray) -> np.ndarray:
    return index.search(query[None], TOP)[1][0]


def flat(work: Path, size: int) -> dict[str, float]:
    import faiss

    def make():
        index = faiss.IndexFlatIP(DIM)
        index.add(np.memmap(work / "vectors.f32", np.float32, "r", shape=(size, DIM)))  # at once: no room to spare
        return index

    return of_faiss(work, size, make, plain)


def ivfpq(work: Path, size: int) -> dict[str, float]:
    """Partitions, probes and rescoring as the index's, the vectors to rescore read from the file."""
    import faiss

    from drehr_utils.search.index import CODED, PARTITION, PROBES, REFINED

    mapped = np.memmap(work / "vectors.f32", np.float32, "r", shape=(size, DIM))

    def make():
        lists = max(size // PARTITION, 1)
        sample = np.random.default_rng(0).choice(size, min(size, 64 * lists + 10_000), replace=False)
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(DIM), DIM, lists, DIM // CODED, 8, faiss.METRIC_INNER_PRODUCT)
        index.train(mapped[np.sort(sample)])
        for _, block in blocks(work, size):
            index.add(block)
        index.nprobe = PROBES
        return index

    def search(index, query: np.ndarray) -> np.ndarray:
        rows = np.sort(index.search(query[None], REFINED)[1][0])
        rows = rows[rows >= 0]
        return rows[np.argsort(-(mapped[rows] @ query), kind="stable")[:TOP]]

    return of_faiss(work, size, make, search)


def hnsw(work: Path, size: int) -> dict[str, float]:
    import faiss

    def make():
        index = faiss.IndexHNSWFlat(DIM, 16)  # L2: the same order, of unit vectors
        index.hnsw.efConstruction, index.hnsw.efSearch = 100, 600
        for _, block in blocks(work, size):
            index.add(block)
        return index

    return of_faiss(work, size, make, plain)


# --- the run ----------------------------------------------------------------------------------------------------------

ONCE = (real, noise)
SIZED = (vectors, truth, lance, lance_query, flat, ivfpq, hnsw, ray, ray_query)
STAGES = {stage.__name__: stage for stage in (*ONCE, *SIZED)}


def plan(sizes: list[int]) -> list[tuple[str, int | None]]:
    """What is run, in order: small sizes first."""
    sized = [(stage.__name__, size) for size in sorted(sizes) for stage in SIZED]
    left_out = {("hnsw", size) for size in sizes if size > HNSW_UP_TO}
    return [(stage.__name__, None) for stage in ONCE] + [step for step in sized if step not in left_out]


def kept(work: Path, stage: str, size: int | None) -> Path:
    return work / (f"{stage}-{size}.json" if size else f"{stage}.json")


def gathered(work: Path, sizes: list[int]) -> dict[str, object]:
    """One flat table: index_<system>_<size>_<what>, and the product's own at the largest size."""
    result: dict[str, object] = {"index_vectors": max(sizes)}
    for stage, size in plan(sizes):
        system = stage.removesuffix("_query")
        start = f"index_{system}_{size}_" if size else "index_"
        if not kept(work, stage, size).exists():
            result[f"{start}not_run"] = 1
            continue
        found = json.loads(kept(work, stage, size).read_text())
        result |= {start + key: value for key, value in found.items() if key != "load"}
        result["index_load_highest"] = max(result.get("index_load_highest", 0), found["load"])
    result["index_recall"] = result[f"index_lance_{max(sizes)}_recall"]
    result["index_p95_ms"] = result[f"index_lance_{max(sizes)}_p95_ms_1"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="100000,1000000,10000000")
    parser.add_argument("--work", type=Path, default=ROOT / "data/cache/index_scale")
    parser.add_argument("--only", help="these stages alone, separated by commas; `none` gathers what there is")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.stage:
        load = round(os.getloadavg()[0], 1)
        arguments = [options.work] if options.size is None else [options.work, options.size]
        found = STAGES[options.stage](*arguments) | {"load": load}
        kept(options.work, options.stage, options.size).write_text(json.dumps(found) + "\n")
        return
    sizes = [int(size) for size in options.sizes.split(",")]
    for stage, size in plan(sizes):
        if kept(options.work, stage, size).exists() or (options.only and stage not in options.only.split(",")):
            continue
        command = [sys.executable, __file__, "--work", str(options.work), "--stage", stage]
        start = time.monotonic()
        subprocess.run(command + (["--size", str(size)] if size else []), check=True)
        print(f"{stage} {size or ''} {time.monotonic() - start:.0f} s: {kept(options.work, stage, size).read_text()}",
              flush=True)  # fmt: skip
    if options.only not in (None, "none"):
        return
    memory = {"index_scale_memory_gb": round(psutil.virtual_memory().total / 2**30)}
    result = gathered(options.work, sizes) | about("index_scale_") | memory
    print(json.dumps(result, indent=1))
    if options.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
