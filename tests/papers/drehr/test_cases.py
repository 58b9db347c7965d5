"""Case studies on a benchmark small enough to rank by hand."""

import numpy as np
import pandas as pd
import pytest

from drehr_utils.data.benchmark import Benchmark, Patient
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.knowledge.matching import EntityMatcher
from drehr_utils.papers.drehr import cases


@pytest.fixture
def kg() -> KnowledgeGraph:
    names = {
        "C1": ["hypertension", "htn"],
        "C2": ["renal hypertension"],
        "C3": ["lisinopril", "zestril"],
        "C4": ["pulmonary arterial hypertension of the newborn child"],
    }
    graph = KnowledgeGraph(cui2pt={c: n[0] for c, n in names.items()}, cui2terms=names)
    graph.term2cui = {name: [cui] for cui, terms in names.items() for name in terms}
    graph.is_a = {"C2": ["C1"], "C4": ["C2"]}
    graph.relations = {"C3": [("treats", "C1")]}
    return graph


@pytest.mark.parametrize(
    ("text", "match_type", "span"),
    [
        ("h/o hypertension, well", "string", "hypertension"),
        ("prehypertension only", "string", None),
        ("h/o (htn) well", "abbreviation", "htn"),
        ("h/o hypertension", "synonym", None),  # the query's own words explain no synonym
        ("renal hypertension, on zestril", "hyponym", "renal hypertension"),
        ("renal hypertension, on zestril", "implication", "zestril"),
        ("pulmonary arterial hypertension of the newborn child", "hyponym", None),  # seven words are not short
    ],
)
def test_the_graph_explains_a_judgment(kg, text, match_type, span):
    found = cases.relevant_span("hypertension", text, match_type, kg, EntityMatcher(kg.term2cui))
    assert (found and text[found]) == span


def test_an_abbreviation_is_one_where_the_graph_says_which_names_are(kg):
    kg.cui2terms["C1"].append("high blood pressure")
    kg.term2cui["high blood pressure"] = ["C1"]
    text, matcher = "htn, so high blood pressure", EntityMatcher(kg.term2cui)
    kg.abbreviations = {"C1": ["htn"]}
    spans = {kind: cases.relevant_span("hypertension", text, kind, kg, matcher) for kind in ("abbreviation", "synonym")}
    assert {k: text[s] for k, s in spans.items()} == {
        "abbreviation": "htn", "synonym": "high blood pressure"}  # fmt: skip


@pytest.fixture
def bench() -> Benchmark:
    chunk_ids = ["n_0", "n_1", "n_2", "n_3"]
    return Benchmark(
        corpus=dict.fromkeys(chunk_ids, "text"),
        queries={"q1": "hypertension", "q2": "gout"},
        query_types={"q1": "disease", "q2": "disease"},
        patients=[Patient("1", "n", chunk_ids, ["q1", "q2"])],
        qrels={"q1": {"n_0": 1, "n_1": 1}, "q2": {"n_3": 1}},
        match_types={"q1": {"n_0": "string", "n_1": "synonym"}, "q2": {"n_3": "synonym"}},
    )


def test_ranks_leave_out_chunks_relevant_by_another_type(bench):
    scores = {
        "a": np.array([[0.9, 0.2, 0.5, 0.4], [0.4, 0.3, 0.2, 0.1]]),
        "b": np.array([[0.9, 0.8, 0.5, 0.4], [0.4, 0.3, 0.2, 0.9]]),
    }
    found = cases.judged_ranks(bench, scores, "synonym").set_index("query_id")
    # q1: n_0 is a string match and leaves the pool, so n_1 is behind n_2 and n_3 under a, first under b
    assert found.loc["q1", ["pool", "a", "b"]].tolist() == [3, 3, 1]
    assert found.loc["q2", ["pool", "a", "b"]].tolist() == [4, 4, 1]


def test_the_largest_change_and_its_ties():
    judged = pd.DataFrame(
        {"query_id": ["q1", "q2", "q3", "q4"], "chunk_id": list("abcd"), "x": [9, 9, 2, 1], "y": [4, 2, 1, 8]}
    )
    assert cases.largest_change(judged, "x", "y")["query_id"] == "q2"
    assert cases.largest_change(judged, "x", "y", losses=True)["query_id"] == "q4"
    tied = pd.DataFrame({"query_id": ["q1", "q2"], "chunk_id": ["a", "b"], "x": [9, 6], "y": [4, 1]})
    assert cases.largest_change(tied, "x", "y")["query_id"] == "q2"
