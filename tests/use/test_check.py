"""`--check` names all that is missing with where it comes from, and counts the whole from the first notes."""

import gzip
import re

import pytest
from mimic4_miniature import write_miniature

from drehr_utils import run
from drehr_utils.data.notes import chunk_note, read_notes
from drehr_utils.profiles import load_profile
from drehr_utils.use import check


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """A function that loads a profile on `mimic` with the miniature's folders in it."""
    for name in ("DREHR_LLM_BASE_URL", "DREHR_RETRIEVERS", "DREHR_EMBED_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    made = write_miniature(tmp_path / "mimic")

    def load(*lines: str):
        path = tmp_path / "miniature-check.toml"
        folders = [f'notes = "{made.notes}"', f'bios = "{made.bios}"']
        path.write_text("\n".join(['base = "mimic"', *(lines or folders)]))
        return load_profile(path), path

    return load


def test_everything_that_is_missing_is_named_at_once(profile, tmp_path, capsys):
    _, path = profile('notes = "none"', 'bios = "nothing"', 'encoder = "nobody/encoder"')
    assert run.main(["--profile", str(path), "--check"]) == 1
    said = capsys.readouterr().out
    for what in (
        "no discharge.csv(.gz) in DREHR_NOTES, none/; PhysioNet",
        "no prescriptions.csv(.gz) beside the notes",
        "set DREHR_BENCHMARK to CliniQ's release joined",
        "no bios.txt in DREHR_BIOS, nothing/",
        "set DREHR_LLM_BASE_URL and DREHR_LLM_MODEL",
        "model: nobody/encoder is not on this machine; huggingface.co/nobody/encoder",
        "text-embedding-3-large is left out, DREHR_EMBED_BASE_URL is not set",
        "DREHR_SNOMED is not set: HPO stands in",
        "not measured: none/: neither discharge.csv(.gz)",
    ):
        assert what in said, what


def test_a_fault_of_one_server_does_not_hide_what_the_other_lacks(profile, monkeypatch):
    monkeypatch.setenv("DREHR_LLM_BASE_URL", "http://example.org/v1")
    monkeypatch.setenv("DREHR_LLM_MODEL", "m")
    said = "\n".join(check.missing(profile()[0]))
    assert "nothing was sent" in said and "text-embedding-3-large is left out" in said


def test_a_note_that_is_not_utf8_is_left_out_of_the_count(profile):
    mine, _ = profile()
    before = check.estimate(mine)["notes"]
    path = mine.notes / "note/discharge.csv.gz"
    head, _, rows = gzip.decompress(path.read_bytes()).partition(b"\n")
    foreign = b"99-DS-1,99,1,DS,1,,,M\xfcller came in"
    path.write_bytes(gzip.compress(b"\n".join([head.rstrip(b"\r"), foreign, rows])))
    assert check.estimate(mine)["notes"] == before


def test_what_is_there_is_counted_and_nothing_is_run(profile, monkeypatch, capsys):
    mine, path = profile()
    monkeypatch.setenv("DREHR_LLM_BASE_URL", "http://localhost:9/v1")  # nobody listens, and nobody is asked
    monkeypatch.setenv("DREHR_LLM_MODEL", "m")
    assert run.main(["--profile", str(path), "--check"]) == 1
    said = capsys.readouterr().out
    assert "DREHR_NOTES" not in said and "DREHR_LLM" not in said and "in DREHR_BIOS" not in said
    notes, _ = read_notes(mine.notes)
    n_chunks = sum(len(chunk_note(note)) for note in notes)  # fewer than are measured: exact
    assert len(notes) <= check.SAMPLE
    found = dict(re.findall(r"^(\S.*?)  +(\S+)$", said, re.MULTILINE))
    assert found["notes"] == str(len(notes)) and found["chunks"] == f"{n_chunks:,}"
    assert found["language model, calls"] == f"{4 * n_chunks:,}"
    assert found["training steps, published recipe"] == f"{round(3 * n_chunks / 32) + round(n_chunks / 32):,}"
    assert not mine.cache.exists()
