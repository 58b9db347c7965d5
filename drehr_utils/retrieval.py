"""Sparse and dense retrieval as score matrices [queries, chunks], and their fusion (CliniQ §4.2)."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import faiss
import numpy as np
import scipy.sparse
from rank_bm25 import BM25Okapi

from drehr_utils.corpus import DataError


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores: BM25's tokens."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """Okapi BM25 (CliniQ §4.2.1): rank-bm25's statistics, its k1 = 1.5 and b = 0.75, for many queries at once.

    Document frequencies and the average length are the whole corpus's in both settings; Single-Patient Retrieval reads
    a note's columns. The weights are put into a sparse matrix, since rank-bm25 walks all texts for each query word.
    lexical.FastBM25 gives the same scores for one query at a time, by bm25s.
    """

    def __init__(
        self, texts: Iterable[str], tokenize: Callable[[str], list[str]] = words, k1: float = 1.5, b: float = 0.75
    ) -> None:
        """Index `texts`. Raises DataError where no text has a word."""
        tokens = [tokenize(text) for text in texts]
        if not any(tokens):
            raise DataError("BM25: none of the texts has a word; check the corpus's text field")
        self.tokenize = tokenize
        model = BM25Okapi(tokens, k1=k1, b=b)
        self._row = {word: row for row, word in enumerate(model.idf)}
        lengths = k1 * (1 - b + b * np.array(model.doc_len) / model.avgdl)
        entries = [(self._row[word], text, n) for text, f in enumerate(model.doc_freqs) for word, n in f.items()]
        rows, columns, n = (np.array(part) for part in zip(*entries, strict=True))
        idf = np.array([model.idf[word] for word in self._row])
        weights = idf[rows] * n * (k1 + 1) / (n + lengths[columns])
        self._weights = scipy.sparse.csr_array((weights, (rows, columns)), shape=(len(self._row), len(tokens)))

    def scores(self, queries: Iterable[str]) -> np.ndarray:
        """float64 [queries, texts]; a word that a query repeats counts each time, an unknown one nothing."""
        counts = [Counter(word for word in self.tokenize(query) if word in self._row) for query in queries]
        entries = [(query, self._row[word], n) for query, found in enumerate(counts) for word, n in found.items()]
        rows, columns, n = zip(*entries, strict=True) if entries else ((), (), ())
        asked = scipy.sparse.csr_array((n, (rows, columns)), shape=(len(counts), len(self._row)), dtype=float)
        return (asked @ self._weights).toarray()


def dense_scores(query_embeddings: np.ndarray, chunk_embeddings: np.ndarray) -> np.ndarray:
    """Cosine similarities, float32 [queries, chunks], of embeddings [queries, dim] and [chunks, dim]."""
    return _normalised(query_embeddings) @ _normalised(chunk_embeddings).T


def dense_search(query_embeddings: np.ndarray, chunk_embeddings: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best chunks of each query by exact search: (cosine similarities, chunk positions), both [queries, k].

    For corpora whose score matrix doesn't fit memory; k is cut to the number of chunks.
    """
    chunks = _normalised(chunk_embeddings)
    index = faiss.IndexFlatIP(chunks.shape[1])
    index.add(chunks)
    return index.search(_normalised(query_embeddings), min(k, len(chunks)))


def tie_keys(query_ids: Iterable[str], chunk_ids: Iterable[str], seed: int = 0) -> np.ndarray:
    """uint64 [queries, chunks]: the order among equal scores, a pseudo-random one for each query.

    It depends on the two ids and the seed only, so a system that gives all chunks one score gets chance's credit, not
    the file order's (the first chunks of a note hold its diagnoses).
    """
    mixed = _hash_ids(query_ids, seed)[:, None] ^ _hash_ids(chunk_ids, seed + 1)[None, :]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's finaliser
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def rank(scores: np.ndarray, ties: np.ndarray) -> np.ndarray:
    """Positions along the last axis from the best score down; equal scores in the order of `ties` (see tie_keys)."""
    return np.lexsort((ties, -scores), axis=-1)


def reciprocal_rank_fusion(runs: Sequence[np.ndarray], ties: np.ndarray, k: int = 60) -> np.ndarray:
    """Sum over `runs` of 1 / (k + rank), ranks from 1 along the last axis (CliniQ §4.2.3, k = 60).

    `runs` are score arrays of one shape, `ties` orders equal scores within each. Ranks belong to a pool: fuse the
    note's scores for Single-Patient Retrieval, the corpus's for Multi-Patient (evaluation.py does so for a tuple).
    """
    fused = 0.0
    for run in runs:
        order = rank(np.asarray(run), ties)
        places = np.empty(order.shape)
        np.put_along_axis(places, order, np.arange(1.0, order.shape[-1] + 1), axis=-1)  # the inverse permutation
        fused = fused + 1.0 / (k + places)
    return fused


def as_run(
    scores: np.ndarray, query_ids: Sequence[str], chunk_ids: Sequence[str], k: int | None = None, seed: int = 0
) -> dict[str, dict[str, float]]:
    """A score matrix as BEIR's `{query: {chunk: score}}`, each query's `k` best (all: None), best first."""
    order = rank(scores, tie_keys(query_ids, chunk_ids, seed))[:, :k]
    return {
        query_id: {chunk_ids[column]: float(scores[row, column]) for column in order[row]}
        for row, query_id in enumerate(query_ids)
    }


def _hash_ids(ids: Iterable[str], seed: int) -> np.ndarray:
    return np.array(
        [int.from_bytes(hashlib.blake2b(f"{seed}:{i}".encode(), digest_size=8).digest(), "little") for i in ids],
        dtype=np.uint64,
    )


def _normalised(embeddings: np.ndarray) -> np.ndarray:
    embeddings = np.ascontiguousarray(embeddings, dtype=np.float32)
    if not np.isfinite(embeddings).all():
        row = int(np.flatnonzero(~np.isfinite(embeddings).all(axis=1))[0])
        raise DataError(f"embeddings, row {row}: not finite; the encoder diverged, train it at a lower learning rate")
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.maximum(norms, np.finfo(np.float32).tiny)
