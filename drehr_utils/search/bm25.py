"""BM25 for many queries at once, and for one query at a time (CliniQ §4.2.1)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable

import bm25s
import numpy as np
import scipy.sparse
from rank_bm25 import BM25Okapi

from drehr_utils.errors import DataError


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores: BM25's tokens."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """Okapi BM25 (CliniQ §4.2.1): rank-bm25's statistics, its k1 = 1.5 and b = 0.75, for many queries at once.

    Document frequencies and the average length are the whole corpus's in both settings; Single-Patient Retrieval reads
    a note's columns. The weights are put into a sparse matrix, since rank-bm25 walks all texts for each query word.
    bm25.FastBM25 gives the same scores for one query at a time, by bm25s.
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


class FastBM25:
    """rank-bm25's Okapi BM25 in bm25s's index: the same scores for one query in well under a millisecond.

    bm25s's `atire` has rank-bm25's term-frequency part. None of its idfs is rank-bm25's, which gives words of more
    than half of the texts a floor (epsilon times the mean idf) in place of a negative weight: its columns are
    therefore rescaled from bm25s's idf to rank-bm25's. bm25.BM25 scores many queries at once.
    """

    def __init__(
        self, texts: Iterable[str], tokenize: Callable[[str], list[str]] = words, k1: float = 1.5, b: float = 0.75
    ) -> None:
        """Index `texts`. Raises DataError where no text has a word."""
        tokens = [tokenize(text) for text in texts]
        if not any(tokens):
            raise DataError("BM25: none of the texts has a word; check the corpus's text field")
        self.tokenize, self.n_texts = tokenize, len(tokens)
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
        ids = self._index.get_tokens_ids(self.tokenize(query))
        return self._index.get_scores_from_ids(ids) if ids else np.zeros(self.n_texts)


def best_first(scores: np.ndarray, k: int) -> np.ndarray:
    """Positions of the `k` best of `scores` [texts], best first; k is cut to their number. Ties: any order."""
    k = min(k, len(scores))
    best = np.argpartition(-scores, k - 1)[:k]
    return best[np.argsort(-scores[best], kind="stable")]
