"""Records of the trained systems: what is written is what was measured; smoke leaves the committed ones alone."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from drehr_utils.evaluation import tables
from drehr_utils.evaluation.records import Record, maker
from drehr_utils.papers.kg import runs, systems
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.training import encoders, weights


@pytest.fixture
def smoke(monkeypatch, tmp_path):
    """The smoke profile with records of its own; models and the rest stay in its cache."""
    monkeypatch.setattr(Record, "path", lambda self, profile: tmp_path / self.name)
    return load_profile("smoke")


@pytest.mark.slow
def test_what_is_recorded_is_what_was_measured(smoke, capsys, monkeypatch):
    before = {path: path.read_bytes() for path in (ROOT / "data/runs").glob("*")}
    runs.main(["--profile", "smoke", "--only", "Comb", "Supervised", "--seeds", "0", "1"])
    assert {path: path.read_bytes() for path in (ROOT / "data/runs").glob("*")} == before
    found = runs.recorded(smoke)
    assert list(found) == ["Comb", "Supervised"] and runs.recorded(load_profile("full")) == {}
    for name, record in found.items():
        folder, curve = systems.train(smoke, name, 1)
        for group, test_set in runs.tested(smoke, name, 1).items():
            expected = systems.recall(smoke, test_set, folder)
            both = runs.recall(smoke, test_set, record)
            assert group == test_set.name and set(both["seed"]) == {0, 1}
            own = both[both["seed"] == 1].drop(columns="seed").reset_index(drop=True)
            pd.testing.assert_frame_equal(own, expected)
        assert set(record.values["steps"]) == {2} and set(record.values["pairs"]) == {2 * 8} == {
            systems.pairs_shown(smoke, name)
        }
    # The comb's own task on the way: the start's level, then the trained models' mean, by another encoding.
    trained = [encoders.load_encoder(systems.train(smoke, "Comb", seed)[0]) for seed in (0, 1)]
    points, own = runs.curves(smoke, {})["Comb"], systems.own_test(smoke, "Comb")
    assert points["step"].tolist() == [0, 2]
    for (_, point), models in zip(points.iterrows(), ([systems.load(smoke, "start")], trained), strict=True):
        found = pd.concat(systems.encoder_recall(encoder, own) for encoder in models)
        means = found.groupby("metric")["value"].mean()
        assert np.allclose([point["R@1"], point["R@25"]], means[["R@1", "R@25"]], atol=100 / len(own.mentions) + 1e-9)
    assert runs.live(smoke)[:2] == ["ICD-10 Syn", "ICD-10 Graph"] and "Supervised" not in runs.live(smoke)
    runs.main(["--profile", "smoke", "--only", "Comb"])  # there already: nothing is trained or written
    assert [line for line in runs.stale(smoke) if "not there" not in line] == []
    monkeypatch.setattr(systems, "training", lambda *_: load_profile("open").kg.training)
    with pytest.raises(SystemExit, match="1"):
        runs.main(["--profile", "smoke", "--check"])
    assert "Comb, seed 0: other settings" in capsys.readouterr().out


def test_a_plain_start_is_a_row_of_its_own(smoke, capsys, monkeypatch, tmp_path):
    rows = systems.plain_rows(smoke)
    assert rows[0] == systems.PLAIN and "HPO Syn on SmolLM2" in rows and len(rows) == 1 + 7
    assert systems.start_of(smoke, "HPO Syn") == (smoke, "HPO Syn")
    start, name = systems.start_of(smoke, "HPO Syn on SmolLM2")
    assert (start.kg.encoder, name) == ("smollm2", "HPO Syn") and start.kg.training.max_steps == 2
    assert systems.start_of(load_profile("full"), rows[0])[0].kg.training.max_steps == 500
    first, second = systems.test_sets(smoke)[0], runs.tested(smoke, rows[1], 0)
    assert systems.zero_shot_setting(smoke, rows[1], first) == systems.MENTIONS_ONLY and first.name in second
    own = {row: systems.own_test(smoke, row.removesuffix(" on SmolLM2")).name for row in rows[1:]}
    assert set(runs.tested(smoke, rows[0], 0)) - set(second) == set(own.values())
    assert all(set(runs.tested(smoke, row, 1)) - set(runs.tested(smoke, row, 0)) == {own[row]} for row in own)
    assert len({runs.digest(smoke, row, 0) for row in ("HPO Syn", *rows)}) == 1 + len(rows)
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    runs.main(["--profile", "smoke", "--only", "HPO Syn on SmolLM2"])
    assert "was not fetched" in capsys.readouterr().out and not (tmp_path / runs.VALUES.name).exists()


def test_a_share_row_differs_from_its_system_by_the_share_alone(smoke):
    *rows, turned = systems.share_rows(smoke)
    assert [systems.task_of(row) for row in rows] == [*systems.tasks(smoke)]
    for row in rows:
        ours, whole = systems.training(smoke, row), systems.training(smoke, systems.task_of(row))
        assert {ours.start_share, whole.start_share} == {0.0, 0.5}
        assert replace(ours, start_share=whole.start_share) == whole
        assert systems.trained_on(smoke, row) == systems.trained_on(smoke, systems.task_of(row))
    for row in (*rows, turned):
        asked = [*systems.test_sets(smoke), systems.own_test(smoke, systems.task_of(row)), systems.all_codes(smoke)]
        asked += [systems.own_test(smoke, row)] if row == turned else []
        assert list(runs.tested(smoke, row, 0)) == [found.name for found in asked]
    assert len({runs.digest(smoke, row, 0) for row in (*systems.names(smoke), *rows, turned)}) == 10 + 9


def test_the_turned_row_differs_from_its_system_by_the_side_that_is_sought_alone(smoke):
    turned = systems.share_rows(smoke)[-1]
    assert systems.training(smoke, turned) == systems.training(smoke, "ICD-10 Graph")
    (ours,), (theirs,) = systems.trained_on(smoke, turned), systems.trained_on(smoke, "ICD-10 Graph")
    assert [ours.pair(i)[::-1] for i in range(len(ours))] == [theirs.pair(i) for i in range(len(theirs))]
    asked, shown = systems.own_test(smoke, turned), {ours.pair(i) for i in range(len(ours))}
    graph = systems.whole_tasks(smoke)["ICD-10 Graph"]
    edges = {graph.pair(i)[::-1] for i in range(len(graph))}
    pairs = {(m.text, asked.concepts[c]) for m in asked.mentions for c in m.concepts}
    assert pairs and pairs <= edges - shown  # each asked child's own parents, by edges that were not trained on


def test_a_long_row_and_a_short_one_differ_from_their_system_by_the_steps_alone(smoke):
    rows, full = systems.length_rows(smoke), maker(load_profile("open"))
    long = [row for row in rows if systems.has_curve(smoke, row)]
    assert systems.FEW_STEPS == load_profile("open").kg.training.max_steps
    for row in rows:
        ours, task = systems.training(smoke, row), systems.task_of(row)
        of_task, of_full = systems.training(smoke, task), systems.training(full, row)
        assert ours.max_steps == of_task.max_steps * (4 if row in long else 1)  # smoke's are fewer than 40
        steps = 4000 if row in long else 40
        assert of_full == replace(systems.training(full, task), max_steps=steps, epochs=of_full.epochs)
        assert systems.trained_on(smoke, row) == systems.trained_on(smoke, task)
        assert set(runs.tested(smoke, row, 0)) - {systems.all_codes(smoke).name} < set(runs.tested(smoke, task, 0))
    assert [systems.task_of(row) for row in long] == ["ICD-10 Syn", "Comb"]
    assert sorted(map(systems.task_of, rows)) == sorted(set(systems.tasks(smoke)) - {systems.NAMES})
    assert systems.pairs_shown(smoke, long[0]) == 4 * systems.pairs_shown(smoke, "ICD-10 Syn")


def test_without_records_a_run_trains_all_and_a_full_one_reads_none(smoke):
    assert runs.recorded(smoke) == {} and runs.live(smoke) == systems.names(smoke)
    assert maker(smoke) == smoke and maker(load_profile("open")) == load_profile("full")


def test_the_committed_records_give_table_3_and_figure_2():
    record = runs.VALUES.read(load_profile("open"))
    means = record.groupby(["system", "group", "metric"])["value"].mean()
    shown = record.drop_duplicates("system").set_index("system")["pairs"]
    assert len(shown)
    for name in ("kg_table3", "kg_figure2"):
        table = tables.read_table(name)
        rows = table[table["system"].isin(shown.index)]
        assert len(rows) and (rows["budget"] == rows["system"].map(shown)).all()
        keys = pd.MultiIndex.from_frame(rows[["system", "group", "metric"]])
        assert rows["ours"].to_numpy() == pytest.approx(means[keys].to_numpy(), abs=1e-3)


def test_what_a_training_was_shown_is_asked_of_the_first_alone():
    values = pd.DataFrame({"search_id": ["a", "b"], "value": [1.0, 0.0], "seed": [2, 1], "group": "seen"})
    values = values.assign(query_id="q", query_type="", metric="R@1")
    found = runs.first_training(runs.Recorded(values)).recall("seen")
    assert found["search_id"].tolist() == ["b"] and "seed" not in found
    assert runs.first_training("BM25") == "BM25"
