"""CAPR's records: what is written is what was measured, a second run makes none again, smoke leaves the committed."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from drehr_utils.evaluation import medquad, records
from drehr_utils.papers.capr import report, runs, systems
from drehr_utils.profiles import ROOT, Profile, load_profile

COMMITTED = ROOT / "data" / runs.RECORD.name


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    """The smoke profile, its records made for CDV alone, from nothing: smoke's own in its cache stay as they are."""
    folder, path = tmp_path_factory.mktemp("records"), records.Record.path

    def own(record: records.Record, profile: Profile) -> Path:
        return folder / record.name if profile.name == "smoke" else path(record, profile)

    before = COMMITTED.read_bytes() if COMMITTED.exists() else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records.Record, "path", own)
        profile = load_profile("smoke")
        runs.main(["--profile", "smoke", "--only", systems.CDV])
        assert (COMMITTED.read_bytes() if COMMITTED.exists() else None) == before
        yield profile


def test_what_is_recorded_is_what_was_measured(smoke):
    assert runs.recorded(smoke) == [systems.CDV]
    for task, asked in systems.tasks(smoke, systems.CDV).items():
        scores = systems.scored(smoke, systems.CDV, task, *asked)
        own = medquad.recall_values(asked.data, asked.candidates, scores)
        shown = runs.values(smoke, systems.CDV, task, asked.data)
        pd.testing.assert_frame_equal(shown, own, check_dtype=False)
        if task != systems.MEDQUAD:
            shared = report.mistakes(asked.data, asked.pool, asked.candidates, scores)
            found = runs.mistakes(smoke, systems.CDV, task)
            pd.testing.assert_series_equal(found, shared, check_names=False, atol=1e-4)
    steps, pairs = runs.budgets(smoke).loc[systems.CDV, ["steps", "pairs"]]
    config = smoke.capr.system(systems.CDV).config
    assert (steps, pairs) == (config.max_steps, config.max_steps * config.batch_size)
    assert len(runs.curve(smoke, systems.CDV)) == config.max_steps
    assert runs.steps(smoke)[systems.CDV]["step"].max() == config.max_steps


def test_what_is_measured_on_the_way_starts_and_ends_as_the_systems_do(smoke):
    config = smoke.capr.system(systems.CDV_FINETUNE).config
    found = systems.on_the_way(smoke, systems.CDV_FINETUNE, config.seed, points=2)
    last = config.max_steps
    assert sorted(found["step"].unique()) == [0, *range(1, last + 1)]
    for task in (systems.HELD_OUT, systems.OTHER_NAMES):
        asked = systems.tasks(smoke, systems.CDV_FINETUNE)[task]
        for step, name in ((0, systems.CDV), (last, systems.CDV_FINETUNE)):
            scores = systems.scored(smoke, name, task, *asked)
            own = medquad.recall_values(asked.data, asked.candidates, scores)
            shown = found[(found["task"] == task) & (found["step"] == step)]
            pd.testing.assert_frame_equal(shown[own.columns].reset_index(drop=True), own, check_dtype=False)


def test_rows_are_made_once_and_known_when_out_of_date(smoke, monkeypatch):
    before = runs.RECORD.path(smoke).read_bytes()
    runs.main(["--profile", "smoke", "--only", systems.CDV])
    assert runs.RECORD.path(smoke).read_bytes() == before
    assert [line for line in runs.stale(smoke) if "not there" not in line] == []
    with monkeypatch.context() as patch:
        patch.setattr(systems, "training_passages", lambda profile: ([], "other passages"))
        changed = [line.split(":")[0] for line in runs.stale(smoke) if "not there" not in line]
        assert changed == [f"system {systems.CDV}", f"system {systems.CDV}, seed 1"]


@pytest.mark.slow
def test_a_records_digest_holds_sizes_that_its_texts_do_not_show():
    profile = load_profile("smoke")
    for field, rows in {
        "word_buckets": {systems.CDV_FASTTEXT},
        "medquad_queries": {systems.CDV_FASTTEXT, systems.BI},
    }.items():
        other = replace(profile, capr=replace(profile.capr, **{field: getattr(profile.capr, field) - 1}))
        changed = {
            row for row in (systems.CDV_FASTTEXT, systems.BI) if runs.digest(profile, row) != runs.digest(other, row)
        }
        assert changed == rows, field


def test_no_text_is_recorded(smoke):
    table = runs.RECORD.read(smoke)
    said = " ".join(table.astype(str).stack().unique())
    for asked in systems.tasks(smoke, systems.CDV).values():
        assert not any(query in said for query in asked.data.queries.values())


def test_a_profile_that_judges_by_itself_shows_no_record(smoke):
    assert runs.recorded(load_profile("full")) == runs.recorded(load_profile("mimic")) == []
