"""Records of trained rows: what is written is what was measured, by another reader; smoke leaves the committed ones."""

import gzip
import json
import re
from dataclasses import replace

import ir_measures
import numpy as np
import pandas as pd
import pytest
from ir_measures import AP, RR, R, nDCG

from drehr_utils import pipeline
from drehr_utils.data import public_data
from drehr_utils.data.benchmark import single_patient_tasks
from drehr_utils.evaluation import claims, metrics, tables
from drehr_utils.papers.drehr import ablations, rivals, runs, systems
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.training.positives import positive_statistics

MEASURES = {
    "single": {"MRR": RR, "NDCG": nDCG, "MAP": AP},
    "multi": {"MRR": RR, "NDCG@10": nDCG @ 10, "R@100": R @ 100},
}
NAMES = {"single": "all", "multi": "all"}


def measured_by_ir_measures(bench, path, setting) -> dict[str, dict[str, float]]:
    """Metric -> search -> value of a TREC run file, its judgments from the benchmark's own files."""
    qrels = {t.search_id: t.relevant for t in single_patient_tasks(bench)} if setting == "single" else bench.qrels
    run = list(ir_measures.read_trec_run(gzip.open(path, "rt").read()))
    names = {measure: name for name, measure in MEASURES[setting].items()}
    found: dict[str, dict[str, float]] = {name: {} for name in names.values()}
    for value in ir_measures.iter_calc(names, qrels, run):
        found[names[value.measure]][value.query_id] = 100 * value.value
    return found


@pytest.fixture
def smoke(monkeypatch, tmp_path, tiny_smoke):
    """The smoke profile with records of its own; models and the rest stay in its cache."""
    monkeypatch.setattr(runs, "folder", lambda profile: tmp_path / "runs")
    return tiny_smoke


def test_a_row_of_dev_alone_takes_no_row_of_another_away(smoke):
    index = {"setting": "single", "match_type": "all", "search_id": ["q@a", "q@b"], "metric": "MAP"}
    dev, test = (pd.DataFrame(index | {"value": [a, b]}) for a, b in ((1.0, 2.0), (3.0, 4.0)))
    path = runs.scores_file(smoke, "DR.EHR")
    runs.add_scores(path, "candidate", {"dev": dev})
    runs.add_scores(path, "row", {"dev": dev, "test": test})
    runs.add_scores(path, "candidate", {"dev": dev.assign(value=9.0)})
    table = pd.read_csv(path, index_col=runs.KEYS)
    assert table.loc["test", "row"].tolist() == [3, 4] and table.loc["dev", "row"].tolist() == [1, 2]
    assert table.loc["dev", "candidate"].tolist() == [9, 9] and table.loc["test", "candidate"].isna().all()


def test_a_family_of_rows_has_a_file_of_its_own(smoke):
    rows = ["DR.EHR", "+ String Match", systems.on("DR.EHR", "MiniLM"), systems.with_notes("DR.EHR (hybrid)", 40)]
    files = ["scores.csv.gz", "scores-ablations.csv.gz", "scores-sizes.csv.gz", *2 * ["scores-notes.csv.gz"]]
    rows += [systems.REAL["DR.EHR"], *systems.as_short(smoke), "2. both ways", "DR.EHR (by windows)"]
    rows += [systems.REAL[systems.BY_WINDOWS], systems.with_notes(systems.HYBRID_BY_WINDOWS, 20)]
    files += [*2 * ["scores-short.csv.gz"], "scores-search.csv.gz", "scores-windows.csv.gz"]
    files += 2 * ["scores-notes.csv.gz"]
    rows, files = [*rows, *systems.OTHER_GRAPHS], [*files, *3 * ["scores-graphs.csv.gz"]]
    rows, files = [*rows, ablations.DEPARTED_CLS], [*files, "scores-departures.csv.gz"]
    assert [runs.scores_file(smoke, row).name for row in rows] == files


def test_run_files_give_the_per_search_scores_and_ties_keep_our_order(smoke):
    bench = pipeline.benchmark(smoke, "dev")
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (len(bench.queries), len(bench.corpus))).astype(float)  # many ties
    found = metrics.per_search(bench, scores)
    runs.add_scores(runs.scores_file(smoke, "x"), "x-seed0", {"dev": found})
    runs.write_runs(smoke, "x", bench, scores, "dev")
    for setting in runs.SETTINGS:
        theirs = measured_by_ir_measures(bench, runs.folder(smoke) / f"x.dev.{setting}.run.gz", setting)
        ours = found[(found["setting"] == setting) & (found["match_type"] == "all")]
        for name, values in theirs.items():
            expected = ours[ours["metric"] == name].set_index("search_id")["value"]
            assert values.keys() == set(expected.index)
            assert pd.Series(values)[expected.index].to_numpy() == pytest.approx(expected.to_numpy())
    for kind in ("all", "synonym"):  # places are scores, of a note's part too
        again = metrics.single_patient(bench, runs.places(smoke, "x", bench, "dev"), None if kind == "all" else kind)
        expected = metrics.of_group(found, "single", kind).reset_index(drop=True)
        pd.testing.assert_frame_equal(again, expected)
    tops = metrics.multi_patient(bench, runs.places(smoke, "x", bench, "dev", "multi"))
    expected = metrics.of_group(found, "multi").reset_index(drop=True)
    pd.testing.assert_frame_equal(tops, expected)  # no metric looks below the first hundred
    assert runs.places(smoke, "no such row", bench) is None


def test_a_claim_on_a_row_without_a_record_says_which_it_needs():
    found = claims.judged(["a"], ["a", "b"], lambda: pytest.fail("judged without its rows"))
    assert found.verdict == claims.NOT_TESTABLE and "record of `b`" in found.ours
    assert claims.judged(["a", "b"], ["a"], lambda: claims.Judged(claims.HOLDS)).verdict == claims.HOLDS


@pytest.mark.slow
def test_a_row_is_trained_recorded_read_and_found_out_of_date(smoke, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv(public_data.DATA_VARIABLE, str(tmp_path))  # four guards on MedQuAD would take minutes
    before = {path: path.read_bytes() for path in (ROOT / "data/runs").glob("*")}
    row, other = "DR.EHR w/o stage I", "1. the code's loss, masked"
    runs.main(["--profile", "smoke", "--only", row, other, "--seeds", "0", "1"])
    assert {path: path.read_bytes() for path in (ROOT / "data/runs").glob("*")} == before
    model, curves = runs.train(smoke, row, 0)
    bench = pipeline.benchmark(smoke, "test")
    expected = metrics.per_search(bench, pipeline.model_scores(smoke, model, bench))
    found = runs.per_search(smoke, row)
    assert set(found["seed"]) == {0, 1} and runs.per_search(smoke, "DR.EHR") is None
    keys = ["setting", "match_type", "search_id", "query_id", "query_type", "patient", "metric"]
    both = found[found["seed"] == 0].merge(expected, on=keys)
    assert len(both) == len(expected) and np.allclose(both["value_x"], both["value_y"], atol=1e-4)
    about = json.loads((runs.folder(smoke) / f"{runs.slug(row, 0)}.json").read_text())
    assert about["steps"] == {"stage2": 4} and about["chunks"] == 4 * 8 == runs.budgets(smoke)[row]
    assert about["first losses"] == pytest.approx(curves["stage2"]["loss"].head(5).tolist(), abs=1e-5)
    assert about["dev"]["stage2"]["step"] == [4] and not list(runs.folder(smoke).glob("1-*.run.gz"))
    assert set(runs.stale(smoke)) == {f"{name}: not there" for name in systems.rows(smoke) if name not in (row, other)}
    changed = json.loads(json.dumps(about)) | {"recipe": "another"}
    (runs.folder(smoke) / f"{runs.slug(row, 0)}.json").write_text(json.dumps(changed))
    with pytest.raises(SystemExit, match="1"):
        runs.main(["--profile", "smoke", "--check"])
    assert "another recipe" in capsys.readouterr().out


@pytest.mark.slow
def test_the_committed_run_files_give_the_scores_beside_them_and_those_table_4():
    """Every step by another reader: run file -> ir-measures -> scores.csv.gz -> figures/tables/drehr_table4.csv."""
    profile, table4 = load_profile("open"), tables.read_table("drehr_table4").set_index(["system", "setting", "metric"])
    shown = systems.table4(profile) | systems.by_windows(profile)
    recorded = [about for about in runs.abouts(profile) if about["row"] in shown and about["seed"] == 0]
    assert recorded
    for about in recorded:
        scores = pd.read_csv(runs.scores_file(profile, about["row"]))
        name = runs.slug(about["row"], 0)
        for split in runs.SPLITS:
            bench = pipeline.benchmark(profile, split)
            for setting in runs.SETTINGS:
                path = runs.folder(profile) / f"{runs.slug(about['row'])}.{split}.{setting}.run.gz"
                part = scores.query("split == @split and setting == @setting and match_type == 'all'")
                for metric, values in measured_by_ir_measures(bench, path, setting).items():
                    expected = part[part["metric"] == metric].set_index("search_id")[name]
                    if (setting, metric) == ("multi", "MRR"):  # a run file ends at rank 100, where it is 1 of 100
                        expected = expected.where(expected >= 100 / runs.DEPTH, 0)
                    assert pd.Series(values)[expected.index].to_numpy() == pytest.approx(expected.to_numpy(), abs=2e-4)
        seeds = [runs.slug(a["row"], a["seed"]) for a in runs.abouts(profile) if a["row"] == about["row"]]
        test = scores[(scores["split"] == "test") & (scores["match_type"] == "all")]
        for (setting, metric), values in test.groupby(["setting", "metric"]):
            cell = table4.loc[(about["row"], setting, metric)]
            assert cell["ours"] == pytest.approx(values[seeds].mean(axis=1).mean(), abs=0.05)
            assert cell["budget"] == about["chunks"] or not about["chunks"] and np.isnan(cell["budget"])
    row_of = {runs.slug(row): row for row in table4.index.unique("system")}
    ours = table4[table4["ours"].notna()].index.unique("system")
    kept = {runs.slug(row) for row in ours if row != rivals.CHANCE and "short" not in row}
    files = {f"{row}.{split}.{setting}.run.gz" for row in kept for split in runs.SPLITS for setting in runs.SETTINGS}
    assert {path.name for path in runs.folder(profile).glob("*.run.gz")} == files
    assert sum(path.stat().st_size for path in runs.folder(profile).glob("*.run.gz")) < 32e6
    for path in runs.folder(profile).glob("*.test.*.run.gz"):
        system, _, setting = path.name.removesuffix(".run.gz").split(".")
        if not (runs.folder(profile) / f"{system}-seed0.json").exists():
            found = measured_by_ir_measures(pipeline.benchmark(profile, "test"), path, setting)
            for metric, values in found.items():
                ours, theirs = table4.loc[(row_of[system], setting, metric), "ours"], np.array(list(values.values()))
                beyond = np.mean(theirs == 0) * 100 / (runs.DEPTH + 1) if (setting, metric) == ("multi", "MRR") else 0
                assert theirs.mean() - 0.05 <= ours <= theirs.mean() + beyond + 0.05  # first found below rank 100


@pytest.mark.slow
def test_the_committed_records_are_of_todays_recipes_and_data():
    profile = load_profile("full")
    known = systems.rows(profile)
    for about in runs.abouts(profile):
        recipe = runs.ablations.with_seed(known[about["row"]], about["seed"])
        assert runs.artifacts.digest(recipe) == about["recipe"], about["row"]
        if about["row"] not in systems.REAL.values() or public_data.locate("aci_bench"):
            assert runs.data_digest(systems.profile_of(profile, about["row"]), recipe) == about["data"], about["row"]
    assert sum(path.stat().st_size for path in runs.folder(profile).glob("*.run.gz")) < 32_000_000


def test_real_notes_are_cut_as_their_recorded_answers_are_and_leave_out_the_overlap():
    for name in ("aci_bench", "mts_dialog"):
        if public_data.locate(name) is None:
            pytest.skip(f"{name} isn't at hand (DREHR_PUBLIC_DATA)")
    profile = systems.profile_of(load_profile("open"), systems.REAL["DR.EHR"])
    own, real = pipeline.chunks(load_profile("open")), pipeline.chunks(profile)
    assert real[: len(own)] == list(own) and len(real) - len(own) == 1060
    assert pipeline.answers(profile, "entity_generation", progress=False).recorded == 3 * len(real)
    overlap = {line.split("\t")[1] for line in (ROOT / "data/mts_dialog_overlap.txt").read_text().splitlines()[1:]}
    more = pipeline.chunks(profile, stage="stage1")[len(real) :]
    assert len(overlap) == 59 and not overlap & {chunk.note_id for chunk in more}
    assert len({chunk.note_id for chunk in more}) > 1600
    rows = systems.rows(load_profile("full"))  # as many steps as on the open notes alone
    recipe = rows[systems.REAL["DR.EHR"]]
    assert (recipe.stage1.max_steps, recipe.stage2.max_steps) == (510, 510)
    by_windows = [row for row in rows if row in systems.REAL.values() and "windows" in row]
    assert len(by_windows) == 2 and {rows[row].stage2.max_steps for row in by_windows} == {612}


def test_fewer_notes_are_the_first_of_all_for_as_many_epochs():
    profile = load_profile("open")
    whole, found = pipeline.chunks(profile), systems.fewer_notes(profile)
    for row, recipe in found.items():
        own = pipeline.chunks(systems.profile_of(profile, row))
        assert len({chunk.note_id for chunk in own}) == int(re.search(r"(\d+) notes$", row)[1])
        windows = systems.by_windows(profile)[systems.BY_WINDOWS]
        assert list(own) == list(whole[: len(own)]) and recipe == (windows if "windows" in row else profile.improved)
    assert len(found) == 12 and sum(map(systems.is_hybrid, found)) == 6


def test_short_rows_are_the_long_ones_with_an_epoch_for_each_stage():
    full = load_profile("full")
    equations, without = systems.as_short(full).values()
    assert equations == systems.table4(full)[systems.EQUATIONS].each(lambda stage: replace(stage, epochs=1))
    assert without == load_profile("open").without_stage1() and without.stage2.epochs == 2


def test_rows_of_other_graphs_differ_in_the_graph_alone():
    full = load_profile("full")
    known, more = systems.rows(full), systems.profile_of(full, systems.MORE_TERMS)
    assert known[systems.MORE_TERMS] == known["+ KG-Related"] and known[systems.MORE_TERMS].stage1.max_steps == 255
    assert pipeline.stage2_sets(more).table.equals(pipeline.stage2_sets(full).table)
    found = (positive_statistics(pipeline.stage1_sets(profile)) for profile in (full, more))
    plain, more = (of.set_index("source")["Sum"] for of in found)
    assert plain["overall"] < more["overall"] and (more == plain)[["string match", "abbreviation"]].all()
    for row in systems.PUBLIC.values():
        graph = pipeline.knowledge_graph(systems.profile_of(full, row))
        assert known[row] == full.improved and not any("OPEN" in sources for sources in graph.sources.values())
        assert not {"cat", "gas"} & set(graph.term2cui)  # of rare diseases' codes, which mean something else in a note


def test_rows_of_other_sizes_differ_in_the_encoder_alone(tmp_path, monkeypatch):
    full = load_profile("full")
    found = systems.sizes(full)
    rows = [systems.on("DR.EHR", size) for size in ("MiniLM", systems.MPNET, systems.SMOLLM2)]
    assert found[rows[0]] == found[rows[1]] == found[rows[2]]
    for row, recipe in found.items():
        shown = sum(stage.batch_size * stage.max_steps for stage in (recipe.stage1, recipe.stage2) if stage)
        assert shown == (204 * 16 if " on " in row else 0)
    plain, larger, decoder = (systems.profile_of(full, row) for row in rows)
    assert plain == systems.profile_of(full, "DR.EHR") == full
    assert larger == replace(full, encoder="mpnet") == systems.profile_of(full, systems.MPNET)
    assert decoder.lora and (decoder.encoder, decoder.pooling) == ("smollm2", "lasttoken")
    monkeypatch.setattr(systems.weights, "FOLDER", tmp_path)
    assert "weights mpnet" in systems.lacking(full, rows[1]) and systems.lacking(full, rows[0]) is None
