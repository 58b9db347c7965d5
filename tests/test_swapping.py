"""Concept swapping: text and labels change together, and nothing else does."""

import numpy as np
import pytest

from drehr_utils.kg import KnowledgeGraph
from drehr_utils.matching import EntityMatcher
from drehr_utils.swapping import a_name, swap_concepts, swap_pools


def graph() -> KnowledgeGraph:
    names = {"F": ["furosemide", "lasix"], "T": ["torsemide", "demadex"], "E": ["edema", "swelling"],
             "D": ["diuretic", "water pill"]}  # fmt: skip
    kg = KnowledgeGraph(types={"F": "drug", "T": "drug", "E": "finding", "D": "class"})
    for cui, terms in names.items():
        kg.cui2pt[cui] = terms[0]
        for term in terms:
            kg.add_term(cui, term)
    kg.is_a = {"F": ["D"], "T": ["D"]}
    kg.relations = {"F": [("treats", "E")]}
    kg.sources = {"T": ["OPEN"]}
    return kg


def swap(text: str, terms: list[str], probability: float = 1.0, seed: int = 0) -> tuple[str, list[str]]:
    kg = graph()
    pools = swap_pools(kg, types=("drug",))
    return swap_concepts(
        text, terms, EntityMatcher(kg.term2cui).find(text), kg, pools, probability, np.random.default_rng(seed)
    )


def test_a_concept_is_swapped_everywhere_and_its_labels_with_it():
    texts = [swap("lasix 40, then furosemide iv.", ["furosemide", "gout"], seed=seed) for seed in range(20)]
    assert any("demadex 40" in text or "torsemide 40" in text for text, _ in texts)
    for text, terms in texts:
        if "lasix" not in text and "furosemide" not in text:  # the pool holds furosemide itself, too
            assert {"torsemide", "demadex"} & set(terms) and "furosemide" not in terms and "gout" in terms


def test_what_may_have_followed_from_the_old_concept_is_dropped():
    for seed in range(10):
        _, terms = swap("lasix 40", ["furosemide", "edema", "diuretic", "gout"], seed=seed)
        assert "edema" not in terms and "diuretic" not in terms and "gout" in terms


def test_without_probability_or_types_nothing_changes():
    assert swap("lasix 40", ["furosemide"], probability=0.0) == ("lasix 40", ["furosemide"])
    bare = KnowledgeGraph(term2cui={"lasix": ["F"]}, cui2terms={"F": ["lasix", "furosemide"]}, cui2pt={"F": "lasix"})
    assert swap_pools(bare).every == {}


def test_draws_are_fixed_by_the_generator_and_favour_the_usual_name():
    assert swap("lasix 40", ["furosemide"], seed=3) == swap("lasix 40", ["furosemide"], seed=3)
    rng = np.random.default_rng(0)
    drawn = [a_name(graph(), "F", rng) for _ in range(600)]
    assert drawn.count("furosemide") / 600 == pytest.approx(2 / 3, abs=0.07)
