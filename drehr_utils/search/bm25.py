"""BM25 for many queries at once, and of candidates alone (CliniQ §4.2.1)."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import scipy.sparse
from rank_bm25 import BM25Okapi

from drehr_utils.errors import DataError

K1, B, EPSILON = 1.5, 0.75, 0.25  # rank-bm25's


def words(text: str) -> list[str]:
    """Lower-cased runs of letters, digits and underscores: BM25's tokens."""
    return re.findall(r"\w+", text.lower())


class BM25:
    """Okapi BM25 (CliniQ §4.2.1): rank-bm25's statistics, for many queries at once.

    Document frequencies and the average length are the whole corpus's in both settings; Single-Patient Retrieval reads
    a note's columns. The weights are put into a sparse matrix, since rank-bm25 walks all texts for each query word.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        """Index `texts`. Raises DataError where no text has a word."""
        tokens = [words(text) for text in texts]
        if not any(tokens):
            raise DataError("BM25: none of the texts has a word; check the corpus's text field")
        model = BM25Okapi(tokens, k1=K1, b=B, epsilon=EPSILON)
        self._row = {word: row for row, word in enumerate(model.idf)}
        lengths = K1 * (1 - B + B * np.array(model.doc_len) / model.avgdl)
        entries = [(self._row[word], text, n) for text, f in enumerate(model.doc_freqs) for word, n in f.items()]
        rows, columns, n = (np.array(part) for part in zip(*entries, strict=True))
        idf = np.array([model.idf[word] for word in self._row])
        weights = idf[rows] * n * (K1 + 1) / (n + lengths[columns])
        self._weights = scipy.sparse.csr_array((weights, (rows, columns)), shape=(len(self._row), len(tokens)))

    def scores(self, queries: Iterable[str]) -> np.ndarray:
        """float64 [queries, texts]; a word that a query repeats counts each time, an unknown one nothing."""
        counts = [Counter(word for word in words(query) if word in self._row) for query in queries]
        entries = [(query, self._row[word], n) for query, found in enumerate(counts) for word, n in found.items()]
        rows, columns, n = zip(*entries, strict=True) if entries else ((), (), ())
        asked = scipy.sparse.csr_array((n, (rows, columns)), shape=(len(counts), len(self._row)), dtype=float)
        return (asked @ self._weights).toarray()


@dataclass(frozen=True)
class WordCounts:
    """What BM25 needs to know of a corpus to score any of its texts: an index keeps it, so that candidates get the
    scores that BM25 would give them among all."""

    texts: int
    words: int
    texts_with: dict[str, int]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        count, total, texts_with = 0, 0, Counter()
        for found in map(words, texts):
            count, total = count + 1, total + len(found)
            texts_with.update(set(found))
        return cls(count, total, dict(texts_with))

    @cached_property
    def idf(self) -> dict[str, float]:
        """rank-bm25's: of a word in more than half of the texts, EPSILON times the mean."""
        found = {word: math.log((self.texts - n + 0.5) / (n + 0.5)) for word, n in self.texts_with.items()}
        floor = EPSILON * sum(found.values()) / len(found)
        return {word: idf if idf >= 0 else floor for word, idf in found.items()}

    def scores(self, query: str, texts: Sequence[str]) -> np.ndarray:
        """float64 [texts]: BM25's scores of some of the corpus's texts."""
        asked, mean = Counter(word for word in words(query) if word in self.texts_with), self.words / self.texts or 1.0
        scores = np.zeros(len(texts))
        for i, found in enumerate(map(words, texts)):
            count, length = Counter(found), K1 * (1 - B + B * len(found) / mean)
            parts = (n * self.idf[w] * count[w] * (K1 + 1) / (count[w] + length) for w, n in asked.items())
            scores[i] = sum(parts)
        return scores
