"""Dense retrieval: score matrices [queries, chunks] of embeddings, and exact search (CliniQ §4.2.2)."""

from __future__ import annotations

import faiss
import numpy as np

from drehr_utils.errors import DataError


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


def _normalised(embeddings: np.ndarray) -> np.ndarray:
    embeddings = np.ascontiguousarray(embeddings, dtype=np.float32)
    if not np.isfinite(embeddings).all():
        row = int(np.flatnonzero(~np.isfinite(embeddings).all(axis=1))[0])
        raise DataError(f"embeddings, row {row}: not finite; the encoder diverged, train it at a lower learning rate")
    norms = np.linalg.norm(embeddings, axis=1, keepdims=True)
    return embeddings / np.maximum(norms, np.finfo(np.float32).tiny)
