"""BM25 for one query at a time, by bm25s: what a search engine would answer with, timed by bench_latency."""

from __future__ import annotations

import math
from collections.abc import Iterable

import bm25s
import numpy as np
from rank_bm25 import BM25Okapi

from drehr_utils.search.bm25 import K1, B, words


class FastBM25:
    """rank-bm25's Okapi BM25 in bm25s's index: the same scores for one query in well under a millisecond.

    bm25s's `atire` has rank-bm25's term-frequency part. None of its idfs is rank-bm25's, which gives words of more
    than half of the texts a floor (epsilon times the mean idf) in place of a negative weight: its columns are
    therefore rescaled from bm25s's idf to rank-bm25's. search.bm25.BM25 scores many queries at once.
    """

    def __init__(self, texts: Iterable[str], k1: float = K1, b: float = B) -> None:
        tokens = [words(text) for text in texts]
        self.n_texts = len(tokens)
        self._index = bm25s.BM25(k1=k1, b=b, method="atire", idf_method="lucene", dtype="float64")
        self._index.index(tokens, show_progress=False)
        model = BM25Okapi(tokens, k1=k1, b=b)
        starts, data = self._index.scores["indptr"], self._index.scores["data"]
        for word, idf in model.idf.items():
            column = self._index.vocab_dict[word]
            start, end = starts[column], starts[column + 1]
            # bm25s's "lucene" idf, which is never 0, so that it can be divided out.
            data[start:end] *= idf / math.log(1 + (self.n_texts - (end - start) + 0.5) / (end - start + 0.5))

    def scores(self, query: str) -> np.ndarray:
        """float64 [texts]; a word that the query repeats counts each time, an unknown one nothing."""
        ids = self._index.get_tokens_ids(words(query))
        return self._index.get_scores_from_ids(ids) if ids else np.zeros(self.n_texts)


def best_first(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions of the `k` best of `scores` [texts], best first; k is cut to their number. Ties: any order."""
    k = min(k, len(scores))
    best = np.argpartition(-scores, k - 1)[:k]
    return best[np.argsort(-scores[best], kind="stable")]
