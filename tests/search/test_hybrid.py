"""Names in text against regular expressions; the hybrid against its formula, saved, loaded and asked."""

from __future__ import annotations

import math
import random
import re

import numpy as np
import pytest

from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.hybrid import HALF, Hybrid, Weights, count_names, joined, names_in_text, names_of
from drehr_utils.training.encoders import load_encoder

TEXTS = ["Hx of MI, old mi; takes ASA.", "Acute myocardial  infarction (MI)", "mild cough", "nothing"]


@pytest.fixture(scope="module")
def graph():
    graph = KnowledgeGraph(cui2pt={"1": "myocardial infarction", "2": "aspirin", "3": "acute myocardial infarction"})
    for cui, term in [("1", "myocardial infarction"), ("1", "mi"), ("2", "aspirin"), ("2", "asa")]:
        graph.add_term(cui, term)
    graph.add_term("3", "acute myocardial infarction")
    graph.is_a["3"] = ["1"]
    return graph


def test_names_are_counted_whole_by_hand(graph):
    assert names_of("MI", graph) == {"mi", "myocardial infarction"}
    assert names_of("no such thing", graph) == {"no such thing"}
    counts = count_names([names_of("MI", graph), names_of("aspirin", graph)], TEXTS)
    assert counts.tolist() == [[2, 2, 0, 0], [1, 0, 0, 0]]  # not the mi of "mild"; white space is folded


def _by_regex(names, text):
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    return len(re.findall(rf"(?<![^\W_])(?:{pattern})(?![^\W_])", " ".join(text.lower().split())))


def test_names_are_counted_as_a_regular_expression_does():
    rng = random.Random(0)
    for _ in range(300):
        drawn = [["".join(rng.choices("ab -", k=rng.randint(1, 4))) for _ in range(4)] for _ in range(3)]
        names = [{" ".join(name.split()) for name in group if name.strip()} or {"a"} for group in drawn]
        texts = ["".join(rng.choices("aab -(", k=25)) for _ in range(3)]
        expected = [[_by_regex(group, text) for text in texts] for group in names]
        assert count_names(names, texts).tolist() == expected, (names, texts)


def test_bm25_only_breaks_ties_of_names():
    assert names_in_text(np.array([2, 1, 1]), np.array([0.0, 99.0, 1.0])).tolist() == [2.0, 1.99, 1.5]


def test_words_that_most_texts_have_cost_nothing(graph):
    """BM25's weight of such a word can be below 0 in a few texts, and k / (k + 20) has a pole at -20."""
    texts = ["pain in the back, pain in the leg, pain in the arm"] * 3 + ["rash"]
    bm25 = BM25(texts).scores(["pain in the"])
    assert bm25.min() < -0.5
    counts = count_names([["pain"]], texts)
    scores = joined(np.zeros_like(bm25), counts, bm25, Weights())
    assert np.isfinite(scores).all() and scores[0, :3].min() > scores[0, 3] >= 0
    assert names_in_text(counts, bm25).tolist() == [[3, 3, 3, 0]]


def test_a_score_is_the_same_whatever_else_is_in_the_list():
    similarity, counts, expanded = np.array([[0.5, 0.1]]), np.array([[3, 0]]), np.array([[20.0, 60.0]])
    scores = joined(similarity, counts, expanded, Weights(names=0.2, words=0.4))
    assert scores[0] == pytest.approx([0.5 + 0.2 * math.log(4) + 0.4 * 20 / (20 + HALF), 0.1 + 0.4 * 60 / (60 + HALF)])
    alone = joined(similarity[:, 1:], counts[:, 1:], expanded[:, 1:], Weights(names=0.2, words=0.4))
    assert alone[0, 0] == scores[0, 1]


def test_the_hybrid_saves_loads_and_searches_in_three_lines(graph, tmp_path):
    Hybrid(load_encoder("minilm"), graph, Weights(0.1, 0.4, 0.25)).save(tmp_path / "hybrid")
    hybrid = Hybrid.load(tmp_path / "hybrid").index(TEXTS)
    found = hybrid.search("heart attack", top=2)
    assert len(found) == 2 and found[0][1] in TEXTS[:2]
    assert hybrid.weights == Weights(0.1, 0.4, 0.25)
    best, text = hybrid.search("myocardial infarction")[0]
    assert text == TEXTS[1] and best == pytest.approx(float(hybrid.scores(["myocardial infarction"])[0, 1]))
    with pytest.raises(ValueError, match="empty"):
        hybrid.search(" ")


def test_weights_without_windows_read_none_and_an_encoder_alone_reads_them(graph, tmp_path):
    hybrid = Hybrid(load_encoder("minilm"), graph)
    hybrid.save(tmp_path / "older")
    (tmp_path / "older/hybrid.json").write_text('{"names": 0.3, "words": 0.2}')  # as it was before there were windows
    assert Hybrid.load(tmp_path / "older").weights == Weights(0.3, 0.2, 0.0)
    (tmp_path / "older/hybrid.json").unlink()
    assert Hybrid.load(tmp_path / "older", graph).weights.windows > 0


def test_the_hybrid_adds_a_share_of_the_best_window(graph):
    encoder = load_encoder("minilm")
    text = (
        "retired teacher, lives alone, walks daily, no smoking. knee pain after a fall, x-ray negative, brace given. "
        "mood stable, sleeps well. cough resolved without antibiotics. appetite good, weight stable. "
        "flu vaccine given, eye exam normal. metformin was begun"
    )
    scores = [
        float(Hybrid(encoder, graph, Weights(0, 0, share)).index([text]).scores(["metformin"])[0, 0])
        for share in (0, 0.25, 1)
    ]
    assert scores[1] == pytest.approx(0.75 * scores[0] + 0.25 * scores[2]) and scores[2] > scores[0] + 0.1
