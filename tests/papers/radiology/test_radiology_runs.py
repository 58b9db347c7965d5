"""The record of notebook 14's trainings: it holds what was measured, and a profile of slices leaves it alone."""

import gzip
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from drehr_utils import profiles
from drehr_utils.config import Resampling
from drehr_utils.evaluation import records
from drehr_utils.papers.radiology import lexicon, retrieval, runs, systems
from drehr_utils.profiles import load_profile
from drehr_utils.training import weights


@pytest.fixture
def smoke(monkeypatch, tmp_path, start):
    """The smoke profile on a tiny encoder, a cache of its own, and an IU X-ray of eight reports."""
    monkeypatch.setattr(profiles.Profile, "cache", property(lambda self: tmp_path / "cache"))
    names = [finding.name for finding in lexicon.read_lexicon()[:8]]
    rows = [f'{i},{name},"Peculiar {name} today.","No peculiar {name} before."' for i, name in enumerate(names)]
    (tmp_path / "iu_xray").mkdir()
    table = "\n".join(["uid,problems,findings,impression", *rows])
    (tmp_path / "iu_xray/indiana_reports.csv.gz").write_bytes(gzip.compress(table.encode()))
    monkeypatch.setenv("DREHR_PUBLIC_DATA", str(tmp_path))
    for made in (systems.collections, systems.entries, systems.rate_search):
        made.cache_clear()
    profile = replace(load_profile("smoke"), encoder=start)
    monkeypatch.setattr(records, "load_profile", lambda name: profile)
    yield profile
    for made in (systems.collections, systems.entries, systems.rate_search):
        made.cache_clear()


@pytest.mark.slow
def test_what_is_recorded_is_what_was_measured(smoke, decoder, capsys, monkeypatch):
    monkeypatch.setattr(weights, "locate", lambda name: decoder)  # SmolLM2, tiny
    committed = runs.RECORD.path(load_profile("open"))
    before = committed.read_bytes() if committed.exists() else None
    runs.main(["--seeds", "1"])
    record = runs.RECORD.read(smoke)
    tried = lambda: runs.tried_rates(record)  # noqa: E731
    asked = [*runs.trainings(smoke, (1,), tried), *runs.from_plain(smoke, (1,))]
    assert {"SBERT (radiology)", "SBERT/HS/MB(128)", "MiniLM (MLM-tuned)", "SmolLM2 (LM-tuned)", "BM25"} <= set(
        record["system"]
    )
    assert len(record.groupby(["system", "trained", "rate", "seed"])) == len(asked)
    for training in asked:
        rows = record[(record[list(training.key)] == pd.Series(training.key)).all(axis=1)]
        measured = runs.values(smoke, training)
        np.testing.assert_allclose(rows["value"], measured["value"], atol=1e-4)
        assert rows[["query_id", "tested"]].to_numpy().tolist() == measured[["query_id", "tested"]].to_numpy().tolist()
        assert training.trained not in set(measured["tested"])
    capsys.readouterr()
    runs.main(["--seeds", "1"])
    assert "radiology.csv" not in capsys.readouterr().out  # nothing is made twice
    with pytest.raises(SystemExit) as stop:
        runs.main(["--check"])
    assert stop.value.code == 1 and capsys.readouterr().out.count("not there") == 11  # seed 2: all models, Table 1
    assert (committed.read_bytes() if committed.exists() else None) == before


def test_what_is_watched_on_its_way_starts_and_ends_as_table_1_has_it(smoke):
    sizes = smoke.radiology
    profile = replace(smoke, radiology=replace(sizes, table1=(replace(sizes.best, max_steps=3),)))
    (training,) = runs.watched(profile)
    assert training.trained == runs.FOLDS + systems.IU and training.key["seed"] == 0
    found = systems.on_the_way(profile, systems.IU, training.config, points=2)
    assert sorted(found["step"].unique()) == [0, 2, 3] and set(found["findings"]) == {"train", "kept aside"}
    aside = found[found["findings"] == "kept aside"]
    for step, config in ((0, None), (3, training.config)):
        table1 = systems.fold_values(profile, systems.IU, config).query("metric == 'mAP'")
        assert aside.loc[aside["step"] == step, "query_id"].tolist() == table1["query_id"].tolist()
        np.testing.assert_allclose(aside.loc[aside["step"] == step, "value"], table1["value"], atol=1e-6)
    trains = found[(found["findings"] == "train") & (found["step"] == 0)]
    assert len(trains) and not set(trains["query_id"]) - set(aside["query_id"])  # each half trains once, for the other


def test_without_its_weights_a_plain_start_is_left_out(smoke, capsys, monkeypatch):
    monkeypatch.setattr(weights, "locate", lambda name: None)
    monkeypatch.setattr(runs, "trainings", lambda *_: iter(()))  # which would choose the learning rate
    monkeypatch.setattr(runs, "tunings", lambda _: iter(()))
    monkeypatch.setattr(runs, "tried_rates", lambda found: None)
    monkeypatch.setattr(systems, "chosen", lambda profile, config, tried: config)
    runs.main([])
    said = capsys.readouterr().out
    assert "SmolLM2 (LM-tuned): left out" in said and "python -m drehr_utils.training.weights smollm2" in said


def test_rows_are_named_by_what_trained_them():
    rows = [
        ("SBERT/HS/MB(128)", "folds of A", 1e-5, 1, "A", 60.0),
        ("SBERT/HS/MB(128)", "folds of A", 2e-5, 1, "A", 70.0),
        ("SBERT/RS/NB(32)", "folds of A", 2e-5, 1, "A", 50.0),
        ("SBERT (radiology)", "A", 2e-5, 2, "B", 50.0),
        ("SBERT (radiology)", "IU X-ray", 2e-5, 2, "B", 50.0),
        ("SBERT (radiology)", "A", 2e-5, 4, "B", 50.0),
        ("MiniLM (MLM-tuned)", "B", 5e-5, 2, "IU X-ray", 50.0),
        ("SBERT on SmolLM2", "B", 2e-5, 2, "IU X-ray", 50.0),
    ]
    found = pd.DataFrame(rows, columns=["system", "trained", "rate", "table", "tested", "value"])
    found = found.assign(metric="mAP", query_type="positive", seed=0)
    found.loc[8] = [*rows[0][:5], 99.0, "mAP", "positive", 1]  # another seed chooses no rate
    named = runs._named(found, "SBERT/HS/MB(128)")["name"]
    assert named.isna().tolist() == [True, False, False, False, False, False, True, True, True]
    assert named[3:6].tolist() == ["SBERT (radiology)", "SBERT (trained on IU X-ray)", "SBERT (trained on A)"]


def test_negative_less_positive_by_hand():
    values = pd.DataFrame({"query_id": ["edema", "mass", "no edema", "no mass"], "value": [10.0, 20, 40, 50]})
    row = retrieval.negative_less_positive(values, Resampling(200, 2000)).iloc[0]
    assert row["ours"] == 30 and row["low"] <= 30 <= row["high"]
    assert row["p"] == pytest.approx(1 / 3)  # of the six ways to call two of them negative, two are as extreme
