"""Notebook 14's steps: no test sentence in training, differences by hand, what a "no" changes, what is left out."""

import gzip
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from drehr_utils import pipeline
from drehr_utils.papers.radiology import reports
from drehr_utils.papers.radiology import systems as steps
from drehr_utils.papers.radiology.awareness import PolarityPools
from drehr_utils.profiles import load_profile


@pytest.fixture
def open_profile(tmp_path, monkeypatch):
    """The open profile with an IU X-ray of three reports; what it reads is forgotten afterwards."""
    table = "uid,Problems,findings,impression\n"
    shared = reports.read_collection(reports.OPEN_CXR / "collection_a.jsonl.gz")[0].findings  # one of A's own
    table += f'1,normal,"{shared}",\n2,Pneumothorax,"Peculiar large right pneumothorax.",\n'
    (tmp_path / "iu_xray").mkdir()
    (tmp_path / "iu_xray/indiana_reports.csv.gz").write_bytes(gzip.compress(table.encode()))
    monkeypatch.setenv("DREHR_PUBLIC_DATA", str(tmp_path))
    for made in (steps.reports, steps.entries):
        made.cache_clear()
    yield load_profile("open")
    for made in (steps.reports, steps.entries):
        made.cache_clear()


def test_no_tested_sentence_trains(open_profile):
    for train, test in (("A", "B"), ("B", "A"), ("A", steps.IU)):
        other = {"A": "B", "B": "A"}[train]
        trained = {reports.normalise(e.sentence) for e in steps.training_entries(open_profile, train, other)}
        tested = {reports.normalise(e.sentence) for e in steps.test_entries(open_profile, test)}
        assert trained and tested and not trained & tested
    assert len(steps.test_entries(open_profile, steps.IU)) < len(steps.entries(open_profile, steps.IU))


def test_every_row_of_table_1_takes_the_same_steps():
    for name in ("open", "mimic"):
        sizes = load_profile(name).radiology
        rows = [replace(row, hard=True, mega_batch=32) for row in sizes.table1]
        assert len(sizes.table1) == 6 and len(set(rows)) == 1 and set(sizes.table1_iu) <= set(sizes.table1)
    paper = load_profile("mimic").radiology.best
    assert (paper.learning_rate, paper.epochs, paper.warmup_steps, paper.weight_decay) == (2e-5, 10, 100, 0.01)


def values(numbers: list[float]) -> pd.DataFrame:
    ids = [str(i) for i in range(len(numbers))]
    return pd.DataFrame(
        {"search_id": ids, "query_id": ids, "query_type": "positive", "metric": "mAP", "value": numbers}
    )


def test_gain_and_verdict_by_hand():
    difference, p = steps.gain(values([30.0] * 12), values([20.0] * 12))
    assert difference == 10 and p < 0.01 and steps.verdict(difference, p) == "holds"  # 2 of 2^12 sign patterns
    difference, p = steps.gain(values([10.0, 20, 31]), values([20.0, 10, 30]))
    assert difference == pytest.approx(1 / 3) and p > 0.5 and steps.verdict(difference, p) == "is not shown"
    assert steps.verdict(-1, 0.001) == "fails" and steps.verdict(-1, 0.4) == "is not shown"


def test_awareness_of_a_system_that_heeds_no_and_of_one_that_is_blind():
    corpus = {"a": "gout", "b": "no gout", "c": "denies gout"}
    task = (corpus, {"q": "gout"}, PolarityPools({"q": np.array([0])}, {"q": np.array([1, 2])}))

    def heeds(asked: reports.SentenceQueries) -> np.ndarray:
        return np.array([[0.0, 1, 1] if query.startswith("no ") else [1.0, 0, 0] for query in asked.queries])

    def blind(asked: reports.SentenceQueries) -> np.ndarray:
        return np.array([[1.0, 0, 2]] * len(asked.queries))

    rows = steps.awareness_rows(task, "queries", {pipeline.START: blind, "heeds": heeds})
    found = rows.set_index(["system", "group"])["ours"]
    assert found["heeds"].to_dict() == {steps.X: 0, steps.NO_X: 100, steps.SHIFT: 100}
    assert found[pipeline.START].to_dict() == {steps.X: 50, steps.NO_X: 50, steps.SHIFT: 0}
    assert rows.loc[rows["system"] == pipeline.START, "p"].isna().all()


def test_drehr_models_that_are_not_made_are_named_and_not_trained(capsys):
    assert steps.drehr_models(replace(load_profile("smoke"), name="no-such-profile")) == {}
    printed = capsys.readouterr().out
    assert pipeline.PUBLISHED in printed and pipeline.IMPROVED in printed and "run notebook 05" in printed


def test_polarity_task_refuses_another_kind():
    with pytest.raises(ValueError, match="neither queries nor concepts"):
        steps.polarity_task(load_profile("smoke"), "drugs")
