"""Sparse baselines: knowledge-graph query expansion, and BM25 for one query at a time (CliniQ §4.2.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd

from drehr_utils.knowledge.graph import KnowledgeGraph, normalize_term

EXPANSIONS = ("synonyms", "hyponyms", "related")


def expansion_terms(
    query: str, kg: KnowledgeGraph, expansions: Sequence[str] = EXPANSIONS[:2]
) -> list[tuple[str, str]]:
    """(expansion, term) for every term that the graph adds to `query`, each term once, never the query itself.

    The query is looked up whole, in any case; one that names no concept gets nothing, one that names several gets the
    terms of all. `synonyms` are the concept's other names, `hyponyms` the preferred terms of its directly narrower
    concepts (UMLS's reverse_is_a), `related` those of every other relation (may_treat, ...). Raises KeyError for
    another expansion.
    """
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


def expand_query(query: str, kg: KnowledgeGraph, expansions: Sequence[str] = EXPANSIONS[:2]) -> str:
    """`query` with the terms of expansion_terms appended: a longer bag of words for BM25 (CliniQ's "naive QE").

    A word counts as often as it stands there, so the words that a concept's names share weigh more.
    """
    return " ".join([query, *(term for _, term in expansion_terms(query, kg, expansions))])


def expansion_statistics(queries: Mapping[str, str], kinds: Mapping[str, str], kg: KnowledgeGraph) -> pd.DataFrame:
    """By query type: queries, the share that the graph knows in %, and the mean number of terms of each expansion.

    `queries` and `kinds` map query ids to texts and to types (benchmark.Benchmark's `queries` and `query_types`).
    """
    frame = pd.DataFrame({"type": kinds[i], "in the graph, %": 100.0 * bool(kg.cuis(t))} for i, t in queries.items())
    found = [Counter(name for name, _ in expansion_terms(text, kg, EXPANSIONS)) for text in queries.values()]
    groups = frame.assign(**{name: [n[name] for n in found] for name in EXPANSIONS}).groupby("type", sort=False)
    return pd.concat([groups.size().rename("queries"), groups.mean().round(1)], axis=1)
