"""Rows without training: chance against its closed form, the hybrid's weights against a search by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drehr_utils import pipeline
from drehr_utils.data.benchmark import load_benchmark, single_patient_tasks
from drehr_utils.evaluation import metrics
from drehr_utils.papers.drehr import rivals
from drehr_utils.profiles import load_profile
from drehr_utils.search import hybrid, windows


def test_equal_scores_earn_what_a_random_order_does():
    """Expected AP of a random order of n texts, r of them relevant: H_n/n + (r - 1)/(n - 1) (1 - H_n/n)."""
    bench = load_benchmark(load_profile("open").benchmark, "test")
    expected = []
    for task in single_patient_tasks(bench):
        n, r = len(task.chunk_ids), len(task.relevant)
        first = sum(1 / i for i in range(1, n + 1)) / n
        expected.append(first + (r - 1) / max(n - 1, 1) * (1 - first))
    found = metrics.means(metrics.single_patient(bench, np.zeros((len(bench.queries), len(bench.corpus)))))
    assert found["MAP"] == pytest.approx(100 * np.mean(expected), abs=1.5)  # the mean of 2,400 draws


def test_scores_are_known_by_the_order_of_their_texts(tmp_path, monkeypatch):
    monkeypatch.setattr("drehr_utils.profiles.ROOT", tmp_path)
    profile = load_profile("smoke")
    bench = pipeline.benchmark(profile, "dev")
    turned = replace(bench, corpus=dict(reversed(bench.corpus.items())))
    for score in (lambda b: pipeline.model_scores(profile, None, b), lambda b: rivals.string_scores(profile, b)[0]):
        assert np.allclose(score(turned), score(bench)[:, ::-1], atol=1e-5)


def test_the_hybrid_takes_the_best_weights_of_the_grid_on_dev(tmp_path, monkeypatch):
    monkeypatch.setattr("drehr_utils.profiles.ROOT", tmp_path)
    profile = replace(load_profile("smoke"), max_eval_patients=3)
    grid = rivals.hybrid_grid(profile, None)
    assert set(grid) == set(hybrid.GRID)
    chosen, dev = rivals.hybrid_weights(profile, None), pipeline.benchmark(profile, "dev")
    assert grid[chosen] == max(grid.values())
    scores = rivals.hybrid_scores(profile, None, dev)
    both = metrics.single_patient(dev, scores), metrics.multi_patient(dev, scores)
    assert grid[chosen] == pytest.approx(np.mean([metrics.means(v)[metrics.AVERAGE] for v in both]))
    plain, expanded, counts = rivals.string_scores(profile, dev)
    similarity = pipeline.model_scores(profile, None, dev)
    row, column = np.argwhere(counts > 0)[0]
    by_hand = similarity[row, column] + chosen.names * np.log(1 + counts[row, column])
    by_hand += chosen.words * expanded[row, column] / (expanded[row, column] + 20)
    assert scores[row, column] == pytest.approx(by_hand)


@pytest.mark.slow
def test_windows_join_as_a_share_of_the_similarity(tmp_path, monkeypatch):
    monkeypatch.setattr("drehr_utils.profiles.ROOT", tmp_path)
    profile = replace(load_profile("smoke"), max_eval_patients=2)
    dev = pipeline.benchmark(profile, "dev")
    grid = (hybrid.Weights(0, 0, 0.5), hybrid.Weights(0.3, 0.2, 0.75))
    found = rivals.hybrid_grid(profile, None, grid)
    chosen = rivals.hybrid_weights(profile, None, grid)
    assert set(found) == set(grid) and found[chosen] == max(found.values())
    whole, best = pipeline.model_scores(profile, None, dev), rivals.window_scores(profile, None, dev)
    alone = rivals.joined_scores(profile, None, dev, grid[0])
    np.testing.assert_allclose(alone, (whole + best) / 2, rtol=1e-6)
    plain, expanded, _ = rivals.string_scores(profile, dev)
    assert (plain != expanded).any()
    words = np.maximum(plain, 0)  # weights without names ask no graph, in the expansion neither
    by_hand = whole / 4 + 3 * best / 4 + 0.4 * words / (words + 20)
    np.testing.assert_allclose(rivals.joined_scores(profile, None, dev, hybrid.Weights(0, 0.4, 0.75)), by_hand, 1e-5)
    assert not any(weights.names for weights in hybrid.WORDS_GRID)
    encoder, query, text = (
        pipeline.starting_encoder(profile),
        *(list(part.values())[3] for part in (dev.queries, dev.corpus)),
    )
    pieces = encoder.similarity(encoder.encode([query]), encoder.encode(windows.windows(text)))
    assert best[3, 3] == pytest.approx(float(pieces.max()), abs=1e-5)
