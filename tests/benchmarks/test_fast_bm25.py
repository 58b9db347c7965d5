"""bm25s's scores against rank-bm25's and the sparse matrix's."""

import numpy as np
from fast_bm25 import FastBM25, best_first
from rank_bm25 import BM25Okapi

from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.profiles import ROOT
from drehr_utils.search.bm25 import BM25, words


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
    assert FastBM25(["one word", ""]).scores("").tolist() == [0, 0]
    single = FastBM25(["w0 w1"]).scores("w0")  # one text holds every word: only the floor is left
    np.testing.assert_allclose(single, BM25Okapi([["w0", "w1"]]).get_scores(["w0"]))


def test_best_first():
    scores = np.array([0.5, 3.0, -1.0, 2.0])
    assert best_first(scores, 2).tolist() == [1, 3] and best_first(scores, 9).tolist() == [1, 3, 0, 2]
