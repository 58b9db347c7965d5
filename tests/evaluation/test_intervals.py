"""Intervals and paired tests against scipy and simulation; the long-form rows."""

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from drehr_utils.config import Resampling
from drehr_utils.data.benchmark import Benchmark, Patient, load_benchmark, subset
from drehr_utils.evaluation.intervals import (
    DIFFERENCE,
    RESULT_COLUMNS,
    bootstrap_interval,
    contrast,
    evaluate_system,
    gain_rows,
    paired_randomization_test,
    result_rows,
    row_gains,
)
from drehr_utils.evaluation.metrics import AVERAGE, means, multi_patient, per_search, single_patient
from drehr_utils.profiles import ROOT
from drehr_utils.search.bm25 import BM25

ONE = Resampling()


def crossed(rng, patient_effect, query_effect, patients=40, queries=120, each=12):
    """Differences of searches around 0 with effects of their patients and queries: values, queries, patients."""
    patient = np.repeat(np.arange(patients), each)
    query = np.concatenate([rng.choice(queries, each, replace=False) for _ in range(patients)])
    effects = patient_effect * rng.normal(size=patients)[patient] + query_effect * rng.normal(size=queries)[query]
    return effects + rng.normal(size=len(patient)), query, patient


@pytest.mark.parametrize("effects", [(0.0, 0.0), (0.5, 0.5), (0.5, 0.0), (0.0, 0.8)])
def test_patients_and_queries_are_both_resampled(effects):
    """Intervals cover, and pure noise is significant, as often as they should be; by queries alone they aren't."""
    rng, budget = np.random.default_rng(0), Resampling(samples=300, randomizations=199)
    inside, claimed, inside_by_query, claimed_by_query = np.zeros(4)
    for _ in range(300):
        values, query, patient = crossed(rng, *effects)
        low, high = bootstrap_interval(values, budget, query, patient)
        inside += low <= 0 <= high
        claimed += paired_randomization_test(values, 0 * values, budget, query, patient) < 0.05
        low, high = bootstrap_interval(values, budget, query)
        inside_by_query += low <= 0 <= high
        claimed_by_query += paired_randomization_test(values, 0 * values, budget, query) < 0.05
    assert 0.91 <= inside / 300 <= 0.98 and claimed / 300 <= 0.075  # 0.95 and 0.05, give or take two standard errors
    if effects[0]:
        assert inside_by_query / 300 < 0.85 and claimed_by_query / 300 > 0.15


def test_both_levels_see_a_difference_and_nested_levels_are_one():
    values, query, patient = crossed(np.random.default_rng(1), 0.5, 0.5)
    shifted = np.stack([values + 1, values], axis=1)
    assert paired_randomization_test(shifted, 0 * shifted, ONE, query, patient)[0] < 0.001
    low, high = bootstrap_interval(shifted, ONE, query, patient)
    assert low[0] > 0 and np.allclose([low[0] - low[1], high[0] - high[1]], 1)
    own = np.arange(len(values))  # every query asked for one patient: patients hold queries
    assert bootstrap_interval(values, ONE, own, patient) == bootstrap_interval(values, ONE, patients=patient)
    assert bootstrap_interval(values, ONE, query, own) == bootstrap_interval(values, ONE, query)
    same = [paired_randomization_test(values, 0 * values, ONE, query, p) for p in (query, None)]
    assert same[0] == same[1]
    assert np.isnan(bootstrap_interval(values[:12], ONE, query[:12], patient[:12])).all()  # one patient


def test_the_profiles_budget_reaches_the_tables():
    """It never did: 1000 samples and 10,000 randomizations under every profile."""
    values, query, patient = crossed(np.random.default_rng(2), 0.5, 0.5)
    frame = pd.DataFrame({"search_id": [f"{q}@{p}" for q, p in zip(query, patient, strict=True)], "query_id": query,
                          "query_type": "drug", "patient": patient, "metric": "MAP", "value": values + 3})  # fmt: skip
    start = frame.assign(value=0.0)
    rows = [result_rows("x", "single", "all", frame, Resampling(50, n), start) for n in (9, 99)]
    assert [row["p"].item() for row in rows] == [0.1, 0.01]
    assert gain_rows("x", "single", "all", frame, start, Resampling(50, 99))["p"].item() == 0.01
    widths = {n: result_rows("x", "single", "all", frame, Resampling(n, 9))[["low", "high"]] for n in (50, 1000)}
    assert not np.allclose(widths[50], widths[1000])


def test_trainings_of_one_row_gain_on_a_rival_that_was_not_trained():
    """The mean over the trainings; the pairs are of searches. Either side may have several."""
    rng = np.random.default_rng(3)
    one = pd.DataFrame({"search_id": [f"q{i}" for i in range(40)], "query_id": [f"q{i}" for i in range(40)],
                        "query_type": "drug", "metric": "MRR", "value": rng.normal(50, 5, 40)})  # fmt: skip
    three = pd.concat([one.assign(seed=seed, value=one["value"] + seed) for seed in (1, 2, 3)])
    gain = gain_rows("x", "multi", "all", three, one, Resampling(200, 99))
    loss = gain_rows("x", "multi", "all", one, three, Resampling(200, 99))
    assert gain["ours"].item() == pytest.approx(2) and loss["ours"].item() == pytest.approx(-2)
    assert gain["low"].item() < 1.5 < 2.5 < gain["high"].item(), "trainings that differ by a point widen the interval"
    assert gain_rows("x", "multi", "all", three, three, ONE)["ours"].item() == pytest.approx(0)
    with pytest.raises(ValueError, match="other searches"):
        gain_rows("x", "multi", "all", three, one[:-1], ONE)


@pytest.fixture(scope="module")
def dev():
    return load_benchmark(ROOT / "data/open_cliniq", "dev")


def test_a_row_s_gains_are_the_differences_of_the_means_metric_by_metric(dev):
    texts, queries = list(dev.corpus.values()), list(dev.queries.values())
    scores = {"BM25": BM25(texts).scores(queries), "chance": np.zeros((len(queries), len(texts)))}
    values = {row: per_search(dev, of_row) for row, of_row in scores.items()}
    found = row_gains(values, "BM25", "chance", Resampling(20, 20))
    assert len(found) == 6 and set(found["rival"]) == {"chance"} and AVERAGE not in set(found["metric"])
    for setting, measure in (("single", single_patient), ("multi", multi_patient)):
        expected = means(measure(dev, scores["BM25"])) - means(measure(dev, scores["chance"]))
        ours = found[found["setting"] == setting].set_index("metric")["ours"]
        pd.testing.assert_series_equal(ours, expected.drop(AVERAGE), check_names=False)
    strings = row_gains(values, "BM25", "chance", Resampling(20, 20), "string", ("single",))
    only = [means(single_patient(dev, scores[row], "string"))["MAP"] for row in ("BM25", "chance")]
    assert strings.set_index("metric")["ours"]["MAP"] == pytest.approx(only[0] - only[1])


def test_bootstrap_against_a_loop_and_theory():
    rng = np.random.default_rng(0)
    values = rng.normal(50, 20, 300)
    low, high = bootstrap_interval(values, Resampling(samples=2000))
    drawn = [values[rng.integers(0, 300, 300)].mean() for _ in range(4000)]
    np.testing.assert_allclose([low, high], np.percentile(drawn, [2.5, 97.5]), atol=0.3)
    np.testing.assert_allclose([low, high], values.mean() + np.array([-1.96, 1.96]) * 20 / 300**0.5, atol=0.5)
    assert bootstrap_interval(values, Resampling(samples=2000)) == (low, high)
    columns = bootstrap_interval(np.stack([values, 2 * values], axis=1), Resampling(samples=2000))
    np.testing.assert_allclose(columns, [[low, 2 * low], [high, 2 * high]])


def test_bootstrap_draws_whole_queries():
    values = np.random.default_rng(1).normal(size=100)
    groups = np.array([f"q{i:03}" for i in range(100)])
    alone = bootstrap_interval(values, ONE)
    # Copies of a search say nothing new: the interval stays. Drawn one by one, they'd narrow it.
    copies = bootstrap_interval(np.repeat(values, 4), ONE, np.repeat(groups, 4))
    np.testing.assert_allclose(copies, alone)
    narrow = bootstrap_interval(np.repeat(values, 4), ONE)
    assert narrow[1] - narrow[0] < 0.6 * (alone[1] - alone[0])
    assert np.isnan(bootstrap_interval(values[:3], ONE, ["q", "q", "q"])).all()


def test_bootstrap_covers():
    rng = np.random.default_rng(2)
    inside = 0
    for _ in range(200):  # 40 queries of 1 to 5 correlated searches around 0
        sizes = rng.integers(1, 6, 40)
        values = np.repeat(rng.normal(size=40), sizes) + rng.normal(scale=0.3, size=sizes.sum())
        low, high = bootstrap_interval(values, Resampling(samples=400), np.repeat(np.arange(40), sizes))
        inside += low <= 0 <= high
    assert 0.88 < inside / 200 < 0.99


def test_randomization_against_the_exact_test():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.4, 1, 12), rng.normal(0, 1, 12)
    many = Resampling(randomizations=20_000)
    exact = scipy.stats.permutation_test((a - b,), np.mean, permutation_type="samples", n_resamples=np.inf)
    p = paired_randomization_test(a, b, many)
    assert p == pytest.approx(exact.pvalue, abs=0.012)
    assert paired_randomization_test(b, a, many) == p
    both = paired_randomization_test(np.stack([a, 3 * a], 1), np.stack([b, 3 * b], 1), many)
    np.testing.assert_array_equal(both, p)


def test_randomization_is_uniform_under_the_null_and_sees_a_difference():
    rng = np.random.default_rng(4)
    null, shifted, naive = [], [], []
    for _ in range(200):
        sizes = rng.integers(1, 6, 40)
        groups = np.repeat(np.arange(40), sizes)
        start = rng.normal(size=sizes.sum())
        difference = rng.normal(size=40)[groups]
        null.append(paired_randomization_test(start + difference, start, Resampling(randomizations=499), groups))
        naive.append(paired_randomization_test(start + difference, start, Resampling(randomizations=499)))
        shifted.append(paired_randomization_test(start + difference + 1, start, Resampling(randomizations=499), groups))
    assert scipy.stats.kstest(null, "uniform").pvalue > 0.01
    assert np.mean(np.array(naive) < 0.05) > 0.15  # what ignoring the queries would claim
    assert np.mean(np.array(shifted) < 0.01) > 0.9


def test_a_value_that_is_no_number_has_no_p():
    values = np.random.default_rng(0).normal(size=50)
    with pytest.raises(ValueError, match="isn't a number"):
        paired_randomization_test(values, np.where(np.arange(50) == 3, np.nan, 0), ONE)


def test_randomization_edges():
    a = np.arange(20.0)
    assert paired_randomization_test(a, a, Resampling(randomizations=99)) == 1
    assert paired_randomization_test(a + 1, a, Resampling(randomizations=999)) == 1 / 1000  # never 0
    with pytest.raises(ValueError, match="same searches"):
        paired_randomization_test(a, a[:3], ONE)


def test_evaluate_system_rows(dev):
    part = subset(dev, dev.patients[:16])
    start = BM25(part.corpus.values()).scores(part.queries.values())
    better = start.copy()
    column = {chunk_id: i for i, chunk_id in enumerate(part.corpus)}
    for row, query_id in enumerate(part.queries):
        for chunk_id in part.qrels.get(query_id, {}):
            better[row, column[chunk_id]] += 100
    rows = evaluate_system("oracle", per_search(part, better), ONE, per_search(part, start))
    assert list(rows.columns) == [*RESULT_COLUMNS, DIFFERENCE] and not rows.duplicated(RESULT_COLUMNS[:4]).any()
    assert len(rows) == 4 * (2 * 4 + 5) and set(rows["setting"]) == {"single", "multi"}
    one = rows.set_index(["setting", "group", "metric"])
    assert one.loc[("single", "all", "MAP"), "ours"] == 100 and one.loc[("multi", "all", "MRR"), "ours"] == 100
    by = means(single_patient(part, better))["MAP"] - means(single_patient(part, start))["MAP"]
    assert one.loc[("single", "all", "MAP"), DIFFERENCE] == pytest.approx(by)
    assert one.loc[("single", "all", "MAP"), "p"] < 0.001 and one.loc[("single", "string", "MAP"), "p"] == 1
    alone = evaluate_system("BM25", per_search(part, start), ONE)
    assert alone["p"].isna().all() and (alone["low"] <= alone["ours"]).all() and (alone["ours"] <= alone["high"]).all()
    expected = means(single_patient(part, start).query("query_type == 'drug'"))
    drug = alone.query("setting == 'single' and group == 'drug'").set_index("metric")["ours"]
    np.testing.assert_allclose(drug[expected.index], expected)
    pd.testing.assert_frame_equal(alone, evaluate_system("BM25", per_search(part, start), ONE))
    values = single_patient(part, start)
    shuffled = values.sample(frac=1, random_state=0)
    tested = result_rows("x", "single", "all", single_patient(part, better), ONE, shuffled)
    np.testing.assert_allclose(tested["p"], rows.query("setting == 'single' and group == 'all'")["p"])
    with pytest.raises(ValueError, match="start has other searches"):
        result_rows("x", "single", "all", values, ONE, values.query("query_id != @values.query_id[0]"))


def test_a_draw_without_one_of_the_groups_is_no_draw_of_their_contrast():
    """Two patients, each all of a group: half of the draws are one of them twice; the rest all have the same gap."""
    one, other = (
        pd.DataFrame({"value": [value] * 4, "query_id": list("abcd"), "patient": who})
        for who, value in (("x", 1.0), ("y", 0.0))
    )
    found = contrast(one, other, Resampling(samples=1000))
    assert (found["ours"], found["low"], found["high"]) == (1, 1, 1) and 2 / 600 < found["p"] < 2 / 400


def test_groups_without_a_search_have_no_row():
    chunks = ["A_0", "A_1", "A_2", "B_0", "B_1"]
    toy = Benchmark(
        corpus=dict.fromkeys(chunks, ""),
        queries={"q1": "", "q2": ""},
        query_types={"q1": "disease", "q2": "drug"},
        patients=[Patient("1", "A", chunks[:3], ["q1"]), Patient("2", "B", chunks[3:], ["q1", "q2"])],
        qrels={"q1": {"A_0": 1, "A_2": 1, "B_1": 1}, "q2": {"B_0": 1}},
        match_types={"q1": {"A_0": "string", "A_2": "synonym", "B_1": "string"}, "q2": {"B_0": "string"}},
    )
    scores = np.array([[0.1, 0.9, 0.5, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2, 0.1]])
    rows = evaluate_system("x", per_search(toy, scores), ONE, per_search(toy, scores))
    assert set(rows["group"]) == {"all", "disease", "drug", "string", "synonym"} and rows["ours"].notna().all()
    assert rows.query("group == 'synonym'")["low"].isna().all()  # one query: nothing to draw from
