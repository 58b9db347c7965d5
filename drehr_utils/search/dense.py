"""Dense retrieval: score matrices [queries, chunks] of embeddings (CliniQ §4.2.2)."""

from __future__ import annotations

import numpy as np

from drehr_utils.errors import DataError

SIMILARITIES = ("cosine", "dot")


def dense_scores(query_embeddings: np.ndarray, chunk_embeddings: np.ndarray, similarity: str = "cosine") -> np.ndarray:
    """Similarities, float32 [queries, chunks], of embeddings [queries, dim] and [chunks, dim].

    Raises DataError, with its row, for an embedding that isn't finite."""
    sides = [np.ascontiguousarray(side, dtype=np.float32) for side in (query_embeddings, chunk_embeddings)]
    for side in sides:
        if len(wrong := np.flatnonzero(~np.isfinite(side).all(axis=1))):
            advice = "train the encoder at a lower learning rate, or load it in float32"
            raise DataError(f"embeddings, row {wrong[0]}: not finite; {advice}")
    queries, chunks = map(unit_length, sides) if similarity == "cosine" else sides
    return queries @ chunks.T


def unit_length(embeddings: np.ndarray) -> np.ndarray:
    """Rows divided by their lengths; a zero vector stays one."""
    return embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), np.finfo(np.float32).tiny)
