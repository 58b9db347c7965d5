from dataclasses import replace

import pytest

from drehr_utils import artifacts, losses
from drehr_utils.training import StageConfig


def test_a_digest_changes_with_what_made_the_artifact(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("a")
    first = artifacts.digest(path, StageConfig(), losses, None)
    assert first == artifacts.digest(path, StageConfig(), losses, None)
    assert first != artifacts.digest(path, replace(StageConfig(), seed=1), losses, None)
    path.write_text("b")
    assert first != artifacts.digest(path, StageConfig(), losses, None)
    assert artifacts.digest(tmp_path) != artifacts.digest(path)
    with pytest.raises(TypeError):
        artifacts.digest(object())


def test_cached_makes_once_and_leaves_nothing_half_made(tmp_path):
    made = []

    def make():
        made.append(1)
        return "value"

    path = tmp_path / "deep/value.txt"
    for _ in range(2):
        assert artifacts.cached(path, make, lambda value, p: p.write_text(value), lambda p: p.read_text()) == "value"
    assert len(made) == 1

    def fail(value, partial):
        partial.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        artifacts.cached(tmp_path / "x.txt", lambda: 1, fail, lambda p: p.read_text())
    assert not (tmp_path / "x.txt").exists()
