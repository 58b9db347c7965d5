"""Query expansion by hand; bm25s's scores against rank-bm25's and the sparse matrix's."""

import numpy as np
import pytest
from rank_bm25 import BM25Okapi

from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import ROOT
from drehr_utils.search.bm25 import BM25, FastBM25, best_first, words
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
    with pytest.raises(ValueError, match="expansion 'hypernyms' is none of"):
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


def skewed_texts(n=60):
    rng = np.random.default_rng(0)
    vocabulary = [f"w{i}" for i in range(40)]
    # A skewed draw puts some words into more than half of the texts, where rank-bm25 floors a negative idf.
    texts = [" ".join(rng.choice(vocabulary, rng.integers(0, 30), p=np.arange(40, 0, -1) / 820)) for _ in range(n)]
    return texts, [" ".join(rng.choice(vocabulary, 6)) for _ in range(30)] + ["w0 w0 w39", "unknown", "", "W1 unknown"]


def test_bm25s_equals_rank_bm25_with_its_floor_for_frequent_words():
    texts, queries = skewed_texts()
    model = BM25Okapi([words(text) for text in texts], k1=1.5, b=0.75)
    assert model.epsilon * model.average_idf in model.idf.values()  # the floor is at work
    fast, matrix = FastBM25(texts), BM25(texts).scores(queries)
    for i, query in enumerate(queries):
        expected = model.get_scores(words(query))
        np.testing.assert_allclose(fast.scores(query), expected, atol=1e-12)
        np.testing.assert_allclose(matrix[i], expected, atol=1e-12)
    others = FastBM25(texts, k1=0.9, b=0.4)
    np.testing.assert_allclose(
        others.scores("w0 w39"),
        BM25Okapi([words(t) for t in texts], k1=0.9, b=0.4).get_scores(["w0", "w39"]),
        atol=1e-12,
    )


def test_bm25s_equals_the_sparse_matrix_on_the_open_benchmark():
    dev = load_benchmark(ROOT / "data/open_cliniq", "dev")
    fast, queries = FastBM25(dev.corpus.values()), list(dev.queries.values())
    expected = BM25(dev.corpus.values()).scores(queries)
    np.testing.assert_allclose(np.stack([fast.scores(query) for query in queries]), expected, atol=1e-10)


def test_bm25s_edges():
    with pytest.raises(DataError, match="none of the texts has a word"):
        FastBM25(["", "..."])
    assert FastBM25(["one word", ""]).scores("").tolist() == [0, 0]
    single = FastBM25(["w0 w1"]).scores("w0")  # one text holds every word: only the floor is left
    np.testing.assert_allclose(single, BM25Okapi([["w0", "w1"]]).get_scores(["w0"]))


def test_best_first():
    scores = np.array([0.5, 3.0, -1.0, 2.0])
    assert best_first(scores, 2).tolist() == [1, 3] and best_first(scores, 9).tolist() == [1, 3, 0, 2]
