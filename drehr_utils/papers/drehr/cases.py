"""Case studies: single judgments, chosen by rule, with the words that make the chunk relevant (DR.EHR §5.4, Table 7).

The paper shows one success a match type, chosen by its authors. Here a rule chooses: the judgment whose rank gained
most between two systems, and likewise the one that lost most.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np
import pandas as pd

from drehr_utils.data.benchmark import Benchmark
from drehr_utils.evaluation.metrics import rankings
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.knowledge.matching import EntityMatcher

SHORT_WORDS = 4  # a relevant span of more words is no case


def relevant_span(query: str, text: str, match_type: str, kg: KnowledgeGraph, matcher: EntityMatcher) -> slice | None:
    """Where `text` first has words, SHORT_WORDS at most, that explain the judgment, as far as the graph can tell.

    String: the query itself. Synonym and abbreviation: another name of a concept that the query names, one that the
    graph has for an abbreviation or not; either where it doesn't say which of the concept's names are. Hyponym: a name
    of a narrower concept, one or two steps down. Implication: a name of a concept that the graph relates to the
    query's, in either direction. Both texts are lower-case."""
    if match_type == "string":
        found = re.search(rf"(?<!\w){re.escape(query)}(?!\w)", text)
        return slice(*found.span()) if found and len(query.split()) <= SHORT_WORDS else None
    asked = set(kg.cuis(query))
    below = {narrow for cui in asked for narrow in kg.hyponyms(cui)}
    below |= {narrow for cui in below for narrow in kg.hyponyms(cui)}
    joined = {other for cui in asked for _, other in kg.related(cui)}
    short = {name for cui in asked for name in kg.abbreviations.get(cui, ())}
    for match in matcher.find(text):
        named = set(kg.term2cui[match.term])
        explains = {
            "synonym": bool(named & asked) and match.term not in short,
            "abbreviation": bool(named & asked) and (match.term in short or not short),
            "hyponym": bool(named & below) and not named & asked,
            "implication": bool(named & joined or asked & {o for cui in named for _, o in kg.related(cui)}),
        }[match_type]
        if explains and match.term != query and len(match.term.split()) <= SHORT_WORDS:
            return slice(match.start, match.end)
    return None


def judged_ranks(benchmark: Benchmark, scores: Mapping[str, np.ndarray], match_type: str) -> pd.DataFrame:
    """Every judgment of a match type with its chunk's rank under each system, 1 the best.

    The pool is the patient's chunks without those relevant by another type, as Table 7 has it; `pool` is its size."""
    found = []
    by_system = [rankings(benchmark, matrix, "single", match_type) for matrix in scores.values()]
    for searches in zip(*by_system, strict=True):
        query_id, pool, relevant = searches[0].query_id, len(searches[0].chunk_ids), searches[0].relevant
        places = [{chunk_id: i for i, chunk_id in enumerate(search.chunk_ids, start=1)} for search in searches]
        found += [(query_id, chunk_id, pool, *(place[chunk_id] for place in places)) for chunk_id in relevant]
    return pd.DataFrame(found, columns=["query_id", "chunk_id", "pool", *scores]).assign(match_type=match_type)


def largest_change(judged: pd.DataFrame, before: str, after: str, losses: bool = False) -> pd.Series | None:
    """The judgment whose rank gained most from `before` to `after` (lost most, with `losses`); None where none did.

    Of equal changes the one that ends better (gains) or began better (losses), then the first by ids."""
    gain = (judged[before] - judged[after]) * (-1 if losses else 1)
    then = judged[before] if losses else judged[after]
    order = judged.assign(_gain=-gain, _then=then).sort_values(["_gain", "_then", "query_id", "chunk_id"])
    return judged.loc[order.index[0]] if order["_gain"].iloc[0] < 0 else None
