"""Query latency of each search method at CliniQ's size, 16,550 chunks, one query at a time on one thread.

python tests/benchmarks/bench_latency.py [--write]     # --write: also figures/benchmarks/latency.json

The corpus is the open benchmark's chunks, repeated: each copy has a tenth of its words replaced by others of the
corpus, and its embedding has noise added (exact search takes the same time whatever the vectors hold). A search is
from the query to its 100 best chunks. Dense and hybrid times start from the query's embedding; encoding a query with
MiniLM is timed by itself, since it depends on the model and the machine, not on the corpus.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path

from machine import about

os.environ["OMP_NUM_THREADS"] = "1"  # before any library reads it: two threads on a busy machine wait for each other

CHUNKS, K, WARM = 16_550, 100, 20


def enlarged(texts: list[str], vectors, size: int, seed: int = 0):
    """`size` texts and unit vectors: the given ones, then copies with a tenth of the words and the vectors changed."""
    import numpy as np

    rng = np.random.default_rng(seed)
    vocabulary = np.array([word for text in texts for word in text.split()])
    made, rows = list(texts[:size]), np.resize(np.arange(len(texts)), size)
    for row in rows[len(made) :]:
        words = np.array(texts[row].split(), dtype=object)
        changed = rng.random(len(words)) < 0.1
        words[changed] = rng.choice(vocabulary, changed.sum())
        made.append(" ".join(words))
    copies = vectors[rows] + np.where(np.arange(size) < len(texts), 0, 0.3 / vectors.shape[1] ** 0.5)[:, None] * (
        rng.normal(size=(size, vectors.shape[1]))
    )
    copies = copies.astype(np.float32)
    return made, copies / np.linalg.norm(copies, axis=1, keepdims=True)


def timed(search, queries: list) -> dict[str, list[float]]:
    """Milliseconds a query, after a few that aren't counted: on the clock, and of this thread's own work.

    With one thread the two are the same, unless other processes have the processor."""
    for query in queries[:WARM]:
        search(query)
    times = {"": [], "_cpu": []}
    for query in queries:
        start, own = time.perf_counter(), time.thread_time()
        search(query)
        times["_cpu"].append(1000 * (time.thread_time() - own))
        times[""].append(1000 * (time.perf_counter() - start))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--queries", type=int, default=400)
    options = parser.parse_args()

    import faiss
    import numpy as np
    import torch
    from fast_bm25 import FastBM25, best_first
    from rank_bm25 import BM25Okapi

    from drehr_utils import pipeline
    from drehr_utils.profiles import load_profile
    from drehr_utils.search import expansion
    from drehr_utils.search.bm25 import words
    from drehr_utils.search.fusion import reciprocal_rank_fusion
    from drehr_utils.training import encoders

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    profile = load_profile("open")
    bench, graph = pipeline.benchmark(profile, "test"), pipeline.knowledge_graph(profile)
    encoder = pipeline.starting_encoder(profile)
    queries = list(bench.queries.values())[: options.queries]
    embedded = encoders.encode(encoder, queries)
    # A quarter of the chunks, encoded, is enough to draw the vectors from; the texts are all there.
    base = list(bench.corpus.values())
    known = encoders.encode(encoder, base[: len(base) // 4])
    texts, vectors = enlarged(base, np.resize(known, (len(base), known.shape[1])), CHUNKS)

    start = time.perf_counter()
    bm25 = FastBM25(texts)
    bm25_index_s = time.perf_counter() - start
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    ties = np.arange(CHUNKS)
    row = {query: embedded[i : i + 1] for i, query in enumerate(queries)}

    def sparse(query: str) -> np.ndarray:
        return best_first(bm25.scores(query), K)

    def expanded(query: str) -> np.ndarray:
        return best_first(bm25.scores(expansion.expand_query(query, graph)), K)

    def dense(query: str) -> np.ndarray:
        return index.search(row[query], K)[1][0]

    def hybrid(query: str) -> np.ndarray:
        found, at = index.search(row[query], CHUNKS)  # all of them: exact fusion needs every rank
        scores = np.empty(CHUNKS, np.float32)
        scores[at[0]] = found[0]
        runs = [bm25.scores(expansion.expand_query(query, graph)), scores]
        return best_first(reciprocal_rank_fusion(runs, ties), K)

    okapi = BM25Okapi([words(text) for text in texts])
    few = queries[:: max(1, len(queries) // 40)]
    for query in few:
        np.testing.assert_allclose(bm25.scores(query), okapi.get_scores(words(query)), atol=1e-9)
    methods = {
        "bm25": timed(sparse, queries),
        "bm25_kg": timed(expanded, queries),
        "dense_flat": timed(dense, queries),
        "hybrid": timed(hybrid, queries),
        "rank_bm25": timed(lambda query: best_first(okapi.get_scores(words(query)), K), few),
        "encode_query": timed(lambda query: encoders.encode(encoder, [query]), queries[:100]),
    }
    result = {"latency_chunks": CHUNKS, "latency_queries": len(queries), "latency_threads": 1,
              "latency_dim": vectors.shape[1], "latency_bm25_index_s": round(bm25_index_s, 2)}  # fmt: skip
    for name, kinds in methods.items():
        for kind, times in kinds.items():
            result[f"latency_{name}{kind}_median_ms"] = round(float(np.median(times)), 3)
            result[f"latency_{name}{kind}_p95_ms"] = round(float(np.percentile(times, 95)), 3)
    result |= about("latency_")
    print(json.dumps(result, indent=1))
    if options.write:
        folder = Path(__file__).resolve().parents[2] / "figures/benchmarks"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "latency.json").write_text(json.dumps(result, indent=1) + "\n")
    late = [m for m in ("bm25", "bm25_kg", "dense_flat", "hybrid") if result[f"latency_{m}_p95_ms"] > 10]
    if late:
        print(f"over 10 ms at p95: {', '.join(late)} (other processes on the machine count)", file=sys.stderr)


if __name__ == "__main__":
    main()
