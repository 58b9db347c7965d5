"""Concept swapping: a training chunk in which some concepts of the graph have taken the place of others.

160 notes name a few hundred drugs and diseases; the graph knows seventy thousand concepts and their names. Where a
chunk says "lasix 40 mg", the swapped chunk says "demadex 40 mg" and its positives say "torsemide": the sentence stays
clinical, the label stays true, and the encoder meets the graph's names in context, which expanding positives (DR.EHR
§3.1) cannot give it. No part of the paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from drehr_utils.kg import KnowledgeGraph
from drehr_utils.matching import Match

OWN_SHARE = 0.7  # of the draws that come from the open concepts; the rest from the whole graph


@dataclass(frozen=True)
class SwapPools:
    """Concept ids that may take another's place, by type: the clinical concepts written for this project, and all."""

    own: Mapping[str, Sequence[str]]
    every: Mapping[str, Sequence[str]]


def swap_pools(kg: KnowledgeGraph, types: Sequence[str] = ("drug", "disease", "finding", "procedure")) -> SwapPools:
    """The graph's concepts with more than one name, by type. A graph without types has no pools: nothing is swapped."""
    own: dict[str, list[str]] = {}
    every: dict[str, list[str]] = {}
    for cui, kind in kg.types.items():
        if kind in types and len(kg.synonyms(cui)) > 1:
            every.setdefault(kind, []).append(cui)
            if "OPEN" in kg.sources.get(cui, ()):
                own.setdefault(kind, []).append(cui)
    return SwapPools(own, every)


def a_name(kg: KnowledgeGraph, cui: str, rng: np.random.Generator) -> str:
    """One of the concept's names, the n-th with weight 1 / n: graphs list the usual names first."""
    names = kg.synonyms(cui)
    weights = 1 / np.arange(1, len(names) + 1)
    return names[rng.choice(len(names), p=weights / weights.sum())]


def swap_concepts(
    text: str,
    terms: Sequence[str],
    matches: Sequence[Match],
    kg: KnowledgeGraph,
    pools: SwapPools,
    probability: float,
    rng: np.random.Generator,
) -> tuple[str, list[str]]:
    """`text` and its positive `terms` with some of the concepts in it swapped, each with the given probability.

    A concept is swapped everywhere in the chunk, for one of its type. Terms that name it become names of the new one;
    terms that the graph joins to it (broader or related) may have followed from it, and are dropped."""
    concept_of = {m.term: ids[0] for m in matches if len(ids := kg.term2cui.get(m.term, [])) == 1}
    new: dict[str, str] = {}
    for cui in dict.fromkeys(concept_of.values()):
        pool = pools.own if rng.random() < OWN_SHARE else pools.every
        candidates = pool.get(kg.types.get(cui, ""), ())
        if len(candidates) and rng.random() < probability:
            new[cui] = candidates[rng.integers(len(candidates))]
    if not new:
        return text, list(terms)
    pieces, at = [], 0
    for match in matches:
        cui = concept_of.get(match.term)
        if cui in new:
            pieces += [text[at : match.start], a_name(kg, new[cui], rng)]
            at = match.end
    followed = {other for cui in new for other in (*kg.hypernyms(cui), *(target for _, target in kg.related(cui)))}
    kept = []
    for term in terms:
        ids = kg.cuis(term)
        cui = ids[0] if len(ids) == 1 else None
        if cui not in new and cui not in followed:
            kept.append(term)
    added = [a_name(kg, other, rng) for other in new.values()]
    return "".join(pieces) + text[at:], list(dict.fromkeys(added + kept))
