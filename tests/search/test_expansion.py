"""Query expansion by hand."""

import pytest

from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.expansion import expand_query, expansion_statistics, expansion_terms


@pytest.fixture
def graph():
    kg = KnowledgeGraph()
    terms = {
        "C1": ["renal failure", "kidney failure"],
        "C2": ["acute renal failure", "arf"],
        "C3": ["hemodialysis"],
        "C4": ["dialysis-related amyloidosis"],
        "C5": ["acute tubular necrosis", "atn"],
        "C6": ["respiratory failure", "arf"],
    }
    for cui, names in terms.items():
        for name in names:
            kg.add_term(cui, name)
        kg.cui2pt[cui] = names[0]
    kg.is_a = {"C2": ["C1"], "C5": ["C2"]}
    kg.relations = {"C1": [("may_be_treated_by", "C3"), ("related_to", "C4"), ("may_be_treated_by", "C3")]}
    return kg


def test_expansion_by_hand(graph):
    # Synonyms of the concept, preferred terms of its direct hyponyms (not of theirs), then other relations.
    assert expansion_terms("Renal  Failure", graph) == [
        ("synonyms", "kidney failure"),
        ("hyponyms", "acute renal failure"),
    ]
    assert expand_query("renal failure", graph, ["synonyms", "hyponyms", "related"]) == (
        "renal failure kidney failure acute renal failure hemodialysis dialysis-related amyloidosis"
    )
    assert expand_query("renal failure", graph, ()) == "renal failure"
    assert expand_query("sepsis", graph) == "sepsis"  # no concept of that name
    # A name of two concepts brings the terms of both; a term that both bring, once.
    assert [term for _, term in expansion_terms("arf", graph, ["synonyms"])] == [
        "acute renal failure",
        "respiratory failure",
    ]
    with pytest.raises(KeyError, match="hypernyms"):
        expansion_terms("arf", graph, ["hypernyms"])


def test_expansion_finds_what_the_query_misses(graph):
    texts = ["arf on admission, hemodialysis", "acute tubular necrosis", "renal failure", "no complaints"] * 3
    bm25 = BM25(texts)
    plain, expanded = (
        bm25.scores([query])[0, :4] for query in ("kidney failure", expand_query("kidney failure", graph))
    )
    assert plain[0] == 0 and plain[1] == 0 and plain[2] > 0
    assert expanded[1] > 0 and expanded[2] > expanded[1] and expanded[3] == 0  # "acute" and "renal" come with hyponyms
    related = bm25.scores([expand_query("kidney failure", graph, ["related"])])[0, :4]
    assert related[0] > 0 and related[3] == 0


def test_expansion_statistics(graph):
    queries = {"q1": "renal failure", "q2": "sepsis", "q3": "hemodialysis"}
    kinds = {"q1": "disease", "q2": "disease", "q3": "procedure"}
    table = expansion_statistics(queries, kinds, graph)
    assert table.loc["disease"].tolist() == [2, 50.0, 0.5, 0.5, 1.0]
    assert table.loc["procedure"].tolist() == [1, 100.0, 0.0, 0.0, 0.0]
