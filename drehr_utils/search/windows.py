"""A chunk in many vectors: windows of a few words, of which the best counts (ours; MaxP of Dai and Callan, 2019).

One vector for a hundred words says what they are about; a drug or a value among them takes up a few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from sentence_transformers import SentenceTransformer

from drehr_utils.data.notes import WINDOW_WORDS as WINDOW_WORDS
from drehr_utils.data.notes import windows as windows
from drehr_utils.search.dense import dense_scores
from drehr_utils.training.encoders import encode

_BATCH = 256  # queries at a time: bounds memory where windows are many


def encode_windows(
    encoder: SentenceTransformer, texts: Sequence[str], progress: bool = False, width: int = WINDOW_WORDS
) -> tuple[np.ndarray, np.ndarray]:
    """Unit-length embeddings of all windows, float32 [windows, dim], and where each text's begin, int64 [texts]."""
    parts = [windows(text, width) for text in texts]
    return encode(encoder, [window for part in parts for window in part], progress=progress), _starts(parts)


def best_windows(queries: np.ndarray, embeddings: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The cosine similarity of each text's best window, float32 [queries, texts]; `queries` are embeddings too."""
    some = np.array_split(queries, -(-len(queries) // _BATCH))
    return np.concatenate([np.maximum.reduceat(dense_scores(part, embeddings), starts, axis=1) for part in some])


def blended(whole: np.ndarray, best: np.ndarray, share: float) -> np.ndarray:
    """A chunk's similarity, [queries, texts]: its own and its best window's, the latter by its share, 0 to 1."""
    return (1 - share) * whole + share * best


def packed(embeddings: np.ndarray, starts: np.ndarray) -> list[bytes]:
    """Each text's windows in half precision, as an index keeps them."""
    return [part.astype(np.float16).tobytes() for part in np.split(embeddings, starts[1:])]


def unpacked(kept: Sequence[bytes], dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """What `packed` was given, to half precision."""
    parts = [np.frombuffer(part, np.float16).reshape(-1, dimension) for part in kept]
    return np.concatenate(parts).astype(np.float32), _starts(parts)


def _starts(parts: Sequence[Sequence]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts[:-1])])
