"""Notebook 14's steps: no test sentence in training, the same steps for every row of Table 1."""

import gzip
import itertools
from dataclasses import replace

import pandas as pd
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
    for train, test in itertools.permutations(("A", "B", steps.IU), 2):
        trained = {tuple(words(e.sentence)) for e in steps.training_entries(open_profile, train)}
        tested = {tuple(words(e.sentence)) for e in steps.test_entries(open_profile, test)}
        assert trained and tested and not trained & tested
    assert len(steps.test_entries(open_profile, steps.IU)) < len(steps.entries(open_profile, steps.IU))


def test_every_row_of_table_1_takes_the_same_steps():
    for name in ("open", "full", "mimic"):
        sizes = load_profile(name).radiology
        rows = [replace(row, hard=True, mega_batch=32) for row in sizes.table1]
        assert len(sizes.table1) == 6 and len(set(rows)) == 1
    for name in ("full", "mimic"):
        paper = load_profile(name).radiology.best
        assert (paper.epochs, paper.warmup_steps, paper.weight_decay, paper.max_steps) == (10, 100, 0.01, None)
    assert load_profile("mimic").radiology.best.learning_rate == 2e-5 in load_profile("full").radiology.rates


def test_the_rate_is_chosen_by_the_best_row_over_all_queries():
    profile = load_profile("full")
    best, check, *_ = (row[0].label for row in steps.searched(profile))
    tried = pd.DataFrame({"row": [best, best, check], "learning rate": [1e-5, 2e-5, 1e-4], "all": [70.0, 71, 90]})
    assert steps.chosen(profile, profile.radiology.table1[0], tried).learning_rate == 2e-5
    assert steps.chosen(load_profile("open"), profile.radiology.best).learning_rate == 5e-5  # tries none
