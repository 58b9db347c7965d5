"""Sparse baselines: knowledge-graph query expansion, and BM25 for one query at a time (CliniQ §4.2.1)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import bm25s
import numpy as np
import pandas as pd
from rank_bm25 import BM25Okapi

from drehr_utils.corpus import DataError
from drehr_utils.kg import KnowledgeGraph, normalize_term
from drehr_utils.retrieval import words

EXPANSIONS = ("synonyms", "hyponyms", "related")


def expansion_terms(
    query: str, kg: KnowledgeGraph, expansions: Iterable[str] = EXPANSIONS[:2]
) -> list[tuple[str, str]]:
    """(expansion, term) for every term that the graph adds to `query`, each term once, never the query itself.

    The query is looked up whole, in any case; one that names no concept gets nothing, one that names several gets the
    terms of all. `synonyms` are the concept's other names, `hyponyms` the preferred terms of its directly narrower
    concepts (UMLS's reverse_is_a), `related` those of every other relation (may_treat, ...). Raises ValueError for
    another expansion.
    """
    expansions = tuple(expansions)
    unknown = set(expansions) - set(EXPANSIONS)
    if unknown:
        raise ValueError(f"expansion {sorted(unknown)[0]!r} is none of {', '.join(EXPANSIONS)}")
    found: dict[str, str] = {}
    for cui in kg.cuis(query):
        terms = {
            "synonyms": kg.synonyms(cui),
            "hyponyms": [kg.cui2pt[narrower] for narrower in kg.hyponyms(cui)],
            "related": [kg.cui2pt[other] for _, other in kg.related(cui)],
        }
        for expansion in expansions:
            for term in terms[expansion]:
                found.setdefault(term, expansion)
    found.pop(normalize_term(query), None)
    return [(expansion, term) for term, expansion in found.items()]


def expand_query(query: str, kg: KnowledgeGraph, expansions: Iterable[str] = EXPANSIONS[:2]) -> str:
    """`query` with the terms of expansion_terms appended: a longer bag of words for BM25 (CliniQ's "naive QE").

    A word counts as often as it stands there, so the words that a concept's names share weigh more.
    """
    return " ".join([query, *(term for _, term in expansion_terms(query, kg, expansions))])


def expansion_statistics(
    queries: Mapping[str, str], kinds: Mapping[str, str], kg: KnowledgeGraph, expansions: Iterable[str] = EXPANSIONS
) -> pd.DataFrame:
    """By query type: queries, the share that the graph knows in %, and the mean number of terms of each expansion.

    `queries` and `kinds` map query ids to texts and to types (cliniq.Benchmark's `queries` and `query_types`).
    """
    expansions = tuple(expansions)
    rows = []
    for query_id, text in queries.items():
        counts = Counter(expansion for expansion, _ in expansion_terms(text, kg, expansions))
        known = 100.0 * bool(kg.cuis(text))
        rows.append({"type": kinds[query_id], "in the graph, %": known, **{name: counts[name] for name in expansions}})
    frame = pd.DataFrame(rows)
    groups = frame.groupby("type", sort=False)
    return pd.concat([groups.size().rename("queries"), groups.mean().round(1)], axis=1)


class FastBM25:
    """rank-bm25's Okapi BM25 in bm25s's index: the same scores for one query in well under a millisecond.

    bm25s's `atire` has rank-bm25's term-frequency part. None of its idfs is rank-bm25's, which gives words of more
    than half of the texts a floor (epsilon times the mean idf) in place of a negative weight: its columns are
    therefore rescaled from bm25s's idf to rank-bm25's. retrieval.BM25 scores many queries at once.
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
