"""Windows against sentence-transformers' own encoding of the pieces, one by one."""

from __future__ import annotations

import numpy as np
import pytest

from drehr_utils.search.windows import best_windows, blended, encode_windows, packed, unpacked, windows
from drehr_utils.training.encoders import load_encoder


@pytest.mark.parametrize(("words", "expected"), [(0, [0]), (5, [5]), (12, [12]), (13, [12, 7]), (24, [12, 12, 12])])
def test_a_new_window_every_half_of_one_and_every_word_in_one(words, expected):
    text = " ".join(map(str, range(words)))
    parts = windows(text)
    assert [len(part.split()) for part in parts] == expected
    assert list(dict.fromkeys(" ".join(parts).split())) == text.split()
    assert windows("a  b\nc d", width=2) == ["a b", "b c", "c d"]


def test_the_best_window_is_the_best_of_all():
    encoder = load_encoder("minilm")
    texts = [" ".join(["knee pain after a fall"] * 5), "fever", " ".join(["no events"] * 9) + " metformin was begun"]
    queries = encoder.encode(["metformin", "fever"])
    found = best_windows(queries, *encode_windows(encoder, texts))
    for column, text in enumerate(texts):
        pieces = [encoder.similarity(queries, encoder.encode([part])).numpy() for part in windows(text)]
        np.testing.assert_allclose(found[:, column], np.concatenate(pieces, axis=1).max(axis=1), atol=1e-5)
    many = np.repeat(queries, 300, axis=0)  # more than are scored at a time
    np.testing.assert_allclose(
        best_windows(many, *encode_windows(encoder, texts)), np.repeat(found, 300, axis=0), atol=1e-5
    )


def test_windows_come_back_from_an_index():
    embeddings = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    starts = np.array([0, 1, 4])
    kept = packed(embeddings, starts)
    again, at = unpacked(kept, 8)
    assert at.tolist() == starts.tolist() and again == pytest.approx(embeddings, rel=1e-3)
    assert blended(np.array([0.2]), np.array([0.6]), 0.25) == pytest.approx([0.3])
