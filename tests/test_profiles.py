from pathlib import Path

import pytest

from drehr_utils.errors import DataError
from drehr_utils.profiles import PROFILES, ROOT, load_profile


def test_an_unknown_profile_is_named_with_what_there_is():
    with pytest.raises(DataError, match="profile 'opne': there is none; use open, smoke, mimic"):
        load_profile("opne")


def test_mimic_is_placed_by_environment_variables_and_the_others_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv("DREHR_NOTES", str(tmp_path))
    monkeypatch.setenv("DREHR_ENCODER", "a/decoder")
    monkeypatch.setenv("DREHR_LORA", "1")
    mimic = load_profile("mimic")
    assert (mimic.notes, mimic.encoder, mimic.pooling, mimic.lora) == (tmp_path, "a/decoder", "cls", True)
    assert load_profile("open") is PROFILES["open"]


def test_text_under_a_data_use_agreement_stays_in_ignored_folders():
    ignored = (ROOT / ".gitignore").read_text().split()
    mimic = load_profile("mimic")
    assert "data/cache/" in ignored and "data/mimic*/" in ignored
    for path in (mimic.cache, mimic.figures):
        assert Path("data/cache") in path.relative_to(ROOT).parents
    assert mimic.recorded_answers == ()
