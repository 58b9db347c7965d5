"""Notebook 14's steps: no test sentence in training, the same steps for every row of Table 1."""

import gzip
from dataclasses import replace

import pytest

from drehr_utils.papers.radiology import systems as steps
from drehr_utils.papers.radiology.reports import OPEN_CXR, read_collection
from drehr_utils.profiles import load_profile
from drehr_utils.search.bm25 import words


@pytest.fixture
def open_profile(tmp_path, monkeypatch):
    """The open profile with an IU X-ray of three reports; what it reads is forgotten afterwards."""
    table = "uid,Problems,findings,impression\n"
    shared = read_collection(OPEN_CXR / "collection_a.jsonl.gz")[0].findings  # one of A's own
    table += f'1,normal,"{shared}",\n2,Pneumothorax,"Peculiar large right pneumothorax.",\n'
    (tmp_path / "iu_xray").mkdir()
    (tmp_path / "iu_xray/indiana_reports.csv.gz").write_bytes(gzip.compress(table.encode()))
    monkeypatch.setenv("DREHR_PUBLIC_DATA", str(tmp_path))
    for made in (steps.collections, steps.entries):
        made.cache_clear()
    yield load_profile("open")
    for made in (steps.collections, steps.entries):
        made.cache_clear()


def test_no_tested_sentence_trains(open_profile):
    for train, test in (("A", "B"), ("B", "A"), ("A", steps.IU)):
        other = {"A": "B", "B": "A"}[train]
        trained = {tuple(words(e.sentence)) for e in steps.training_entries(open_profile, train, other)}
        tested = {tuple(words(e.sentence)) for e in steps.test_entries(open_profile, test)}
        assert trained and tested and not trained & tested
    assert len(steps.test_entries(open_profile, steps.IU)) < len(steps.entries(open_profile, steps.IU))


def test_every_row_of_table_1_takes_the_same_steps():
    for name in ("open", "mimic"):
        sizes = load_profile(name).radiology
        rows = [replace(row, hard=True, mega_batch=32) for row in sizes.table1]
        assert len(sizes.table1) == 6 and len(set(rows)) == 1 and set(sizes.table1_iu) <= set(sizes.table1)
    paper = load_profile("mimic").radiology.best
    assert (paper.learning_rate, paper.epochs, paper.warmup_steps, paper.weight_decay) == (2e-5, 10, 100, 0.01)
