"""Retrieval against rank-bm25, sentence-transformers' cosine and hand-worked fusion; MedQuAD's candidates."""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from rank_bm25 import BM25Okapi
from sentence_transformers.util import cos_sim

from drehr_utils.errors import DataError
from drehr_utils.evaluation.medquad import load_medquad, medquad_candidates, recall_values, term_scores, zero_shot
from drehr_utils.search.bm25 import BM25, words
from drehr_utils.search.dense import dense_scores
from drehr_utils.search.fusion import rank, reciprocal_rank_fusion, tie_keys

TEXTS = ["Heart failure, EF 20%.", "no failure", "the heart rate: 80", "", "heart heart HTN"]


def test_bm25_equals_rank_bm25_on_random_texts_and_repeated_query_words():
    rng = np.random.default_rng(0)
    vocabulary = [f"w{i}" for i in range(40)]
    # A skewed draw puts some words into more than half of the texts, where rank-bm25 floors a negative idf.
    texts = [" ".join(rng.choice(vocabulary, rng.integers(1, 30), p=np.arange(40, 0, -1) / 820)) for _ in range(60)]
    queries = [" ".join(rng.choice(vocabulary, 6)) for _ in range(30)] + ["w0 w0 w39", "unknown", ""]
    model = BM25Okapi([words(text) for text in texts], k1=1.5, b=0.75)
    assert model.epsilon * model.average_idf in model.idf.values()
    expected = np.stack([model.get_scores(words(query)) for query in queries])
    np.testing.assert_allclose(BM25(texts).scores(queries), expected, atol=1e-12)


def test_bm25_by_hand():
    # 5 texts of 4, 2, 4, 0 and 3 words; "htn" is in one: idf = ln(4.5 / 1.5); tf 1, length 3, mean length 2.6.
    expected = np.log(4.5 / 1.5) * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 3 / 2.6))
    np.testing.assert_allclose(BM25(TEXTS).scores(["HTN?"]), [[0, 0, 0, 0, expected]])
    assert BM25(TEXTS).scores([]).shape == (0, 5)


def test_bm25_without_words():
    with pytest.raises(DataError, match="none of the texts has a word"):
        BM25(["", "..."])


def test_dense_scores():
    rng = np.random.default_rng(1)
    queries, chunks = rng.normal(size=(7, 16)), rng.normal(size=(50, 16)) * 9
    scores = dense_scores(queries, chunks)
    np.testing.assert_allclose(scores, cos_sim(queries, chunks).numpy(), atol=1e-6)
    np.testing.assert_allclose(dense_scores(queries, chunks, "dot"), queries @ chunks.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dense_scores(np.zeros((1, 16)), chunks), 0)  # a zero vector is near nothing, not NaN
    chunks[3, 2] = np.nan
    with pytest.raises(DataError, match="embeddings, row 3: not finite"):
        dense_scores(queries, chunks)


def test_ties_are_broken_by_ids_alone():
    queries, chunks = ["q1", "q2"], [f"n_{k}" for k in range(40)]
    scores = np.zeros((2, 40))
    order = [[chunks[i] for i in row] for row in rank(scores, tie_keys(queries, chunks))]
    shuffled = np.random.default_rng(0).permutation(40)
    other = [chunks[i] for i in shuffled]
    assert [[other[i] for i in row] for row in rank(scores, tie_keys(queries, other))] == order
    assert order[0] != order[1] and order[0] != chunks and order[0] != chunks[::-1]
    assert [chunks[i] for i in rank(scores, tie_keys(queries, chunks, seed=1))[0]] != order[0]
    assert rank(np.array([1.0, 3.0, 3.0, -np.inf]), np.array([0, 9, 8, 0])).tolist() == [2, 1, 0, 3]


def test_tie_order_is_uniform():
    keys = tie_keys([f"q{i}" for i in range(2000)], [f"n_{k}" for k in range(5)])
    first = np.bincount(keys.argmin(axis=1), minlength=5)
    assert abs(first - 400).max() < 4 * np.sqrt(2000 * 0.2 * 0.8)


def test_ties_do_not_depend_on_the_hash_seed():
    code = "from drehr_utils.search.fusion import tie_keys; print(tie_keys(['q1'], ['n_0', 'n_1']).tolist())"
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert printed == {f"{tie_keys(['q1'], ['n_0', 'n_1']).tolist()}\n"}


def test_fusion_by_hand():
    first, second = np.array([0.9, 0.5, 0.1]), np.array([1.0, 7.0, 3.0])  # ranks 1 2 3 and 3 1 2
    fused = reciprocal_rank_fusion([first, second], ties=np.arange(3))
    np.testing.assert_allclose(fused, [1 / 61 + 1 / 63, 1 / 62 + 1 / 61, 1 / 63 + 1 / 62])
    runs = [np.stack([first, second]), np.stack([second, first])]
    both = reciprocal_rank_fusion(runs, ties=np.arange(6).reshape(2, 3))
    np.testing.assert_allclose(both, [fused, fused])


@pytest.fixture
def medquad_folder(tmp_path):
    (tmp_path / "medquad").mkdir()
    passages = [{"id": f"p{i}", "text": f"gout treatment text {i}"} for i in range(8)]
    passages += [{"id": "gold", "text": "a cure without the words"}]
    queries = [
        {"id": "m0", "entity": "gout", "aspect": "treatment", "relevant": ["gold"]},
        {"id": "m1", "entity": "text", "aspect": "3", "relevant": ["p3", "elsewhere"]},
        {"id": "m2", "entity": "rash", "aspect": "symptoms", "relevant": ["elsewhere"]},
    ]
    for name, records in (("passages", passages), ("queries", queries)):
        with gzip.open(tmp_path / "medquad" / f"{name}.jsonl.gz", "wt") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    return tmp_path


def test_medquad_candidates_and_recall(medquad_folder):
    data = load_medquad(medquad_folder)
    assert data.queries == {"m0": "gout treatment", "m1": "text 3"}  # m2's document isn't there
    bm25 = term_scores(data, "BM25")
    plain = rank(bm25, tie_keys(data.queries, data.passages))[:, :4]
    assert 8 not in plain[0] and plain[1, 0] == 3
    candidates = medquad_candidates(data, bm25, n=4)
    assert candidates[0, 3] == 8 and candidates[0, :3].tolist() == plain[0, :3].tolist()
    assert candidates[1].tolist() == plain[1].tolist()

    def of(scores):
        frame = recall_values(data, candidates, scores)
        return frame.pivot(index="query_id", columns="metric", values="value").loc[["m0", "m1"]].to_numpy().tolist()

    assert of(np.take_along_axis(bm25, candidates, axis=1)) == [[0, 100], [100, 100]]
    assert of(np.arange(8).reshape(2, 4)) == [[100, 100], [0, 100]]

    def encode(texts):  # one axis a passage number, and one for what gold and m0 share
        shared = ["cure" in text or text == "gout treatment" for text in texts]
        return np.array([[s, *(str(i) in t for i in range(8)), 0.1] for s, t in zip(shared, texts, strict=True)])

    assert zero_shot(encode, data, candidates)["value"].tolist() == [100.0] * 4


def test_medquad_absent_prints_a_hint(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("DREHR_PUBLIC_DATA", str(tmp_path))
    assert load_medquad() is None
    printed = capsys.readouterr().out
    assert "DREHR_PUBLIC_DATA" in printed and str(tmp_path) not in printed
