"""Baselines: differences against hand-worked cases, the paired special case and simulation."""

import numpy as np
import pandas as pd
import pytest

from drehr_utils import pipeline
from drehr_utils.config import Resampling
from drehr_utils.data.benchmark import Benchmark, Patient, load_benchmark
from drehr_utils.errors import DataError
from drehr_utils.evaluation import intervals, metrics
from drehr_utils.papers.cliniq import baselines
from drehr_utils.papers.cliniq.baselines import (
    EXPANDED,
    FUSED,
    SPARSE,
    compare,
    in_words,
    mean,
    paper_means,
    settings,
)
from drehr_utils.profiles import ROOT, load_profile

A, B = [f"A_{i}" for i in range(6)], ["B_0", "B_1"]


@pytest.fixture
def toy():
    return Benchmark(
        corpus=dict.fromkeys([*A, *B], ""),
        queries={"q1": "", "q2": ""},
        query_types={"q1": "disease", "q2": "drug"},
        patients=[Patient("1", "A", A, ["q1", "q2"]), Patient("2", "B", B, ["q2"])],
        qrels={"q1": {"A_0": 1, "A_2": 1}, "q2": {"A_1": 1, "A_3": 1, "B_0": 1}},
        match_types={
            "q1": {"A_0": "string", "A_2": "implication"},
            "q2": {"A_1": "string", "A_3": "implication", "B_0": "synonym"},
        },
    )


SCORES = np.array([[6, 5, 4, 3, 2, 1, 0, 0], [6, 5, 4, 3, 2, 1, 7, 8]], dtype=float)


def frame(values, metric="MRR"):
    rows = [(f"{q}@{n}", q, "drug", n, metric, v) for (q, n), v in values.items()]
    return pd.DataFrame(rows, columns=["search_id", "query_id", "query_type", "patient", "metric", "value"])


def test_match_type_pools_by_hand(toy):
    values = metrics.per_search(toy, SCORES)
    # q1 in A: A_0*, A_1, A_2*, ...; without A_0 the implication match A_2 is second, not third.
    # q2 in A: A_0, A_1*, A_2, A_3*, ...; without A_1 the implication match A_3 is third, not fourth.
    assert mean(values, "single", "implication", "MRR") == pytest.approx(100 * (1 / 2 + 1 / 3) / 2)
    assert mean(values, "single", "string", "MRR") == pytest.approx(100 * (1 + 1 / 2) / 2)
    assert mean(values, "single", "all", "MRR") == pytest.approx(100 * (1 + 1 / 2 + 1 / 2) / 3)
    assert mean(values, "single", "drug", "MRR") == 50
    assert mean(values, "multi", "drug", "MRR") == 50  # B_1, B_0*
    assert np.isnan(mean(values, "single", "hyponym", "MRR"))


def test_fusion_of_systems_that_rank_nothing_gets_chance():
    notes = {f"N{i}": [f"N{i}_{k}" for k in range(10)] for i in range(300)}
    bench = Benchmark(
        corpus={c: "" for chunks in notes.values() for c in chunks},
        queries={f"q{n}": "" for n in notes},
        query_types={f"q{n}": "drug" for n in notes},
        patients=[Patient(n, n, chunks, [f"q{n}"]) for n, chunks in notes.items()],
        qrels={f"q{n}": {chunks[0]: 1} for n, chunks in notes.items()},  # always the file's first
        match_types={f"q{n}": {chunks[0]: "string"} for n, chunks in notes.items()},
    )
    ties = np.zeros((300, 3000))
    values = metrics.single_patient(bench, (ties, ties + 1)).query("metric == 'MRR'")["value"]
    chance = 100 * sum(1 / k for k in range(1, 11)) / 10
    assert values.mean() == pytest.approx(chance, abs=4 * values.std() / 300**0.5)


def test_a_paired_difference_is_the_bootstrap_of_differences():
    rng = np.random.default_rng(0)
    keys = [(f"q{i:02}", n) for i in range(40) for n in range(1 + i % 3)]
    a = frame(dict(zip(keys, rng.normal(60, 10, len(keys)), strict=True)))
    b = frame(dict(zip(keys, rng.normal(55, 10, len(keys)), strict=True)))
    found = intervals.contrast(a, b.sample(frac=1, random_state=0), Resampling(1000, 2000))
    gaps = a["value"].to_numpy() - b["value"].to_numpy()
    assert found["ours"] == pytest.approx(gaps.mean())
    low, high = intervals.bootstrap_interval(gaps, Resampling(), a["query_id"], a["patient"])
    np.testing.assert_allclose([found["low"], found["high"]], [low, high], atol=1e-9)
    p = intervals.paired_randomization_test(
        a["value"], b["value"], Resampling(randomizations=2000), a["query_id"], a["patient"]
    )
    assert found["p"] == p and intervals.contrast(a, a, Resampling())["p"] == 1


def test_an_unpaired_difference_covers_and_its_p_errs_as_often_as_it_says():
    rng = np.random.default_rng(1)
    inside = rejected = 0
    for _ in range(150):  # queries with an own level; each side has some of them, many both
        level = rng.normal(size=60)
        a = frame({(f"q{i:02}", f"{i}a"): level[i] + rng.normal() for i in range(45)})
        b = frame({(f"q{i:02}", f"{i}b"): level[i] + rng.normal() for i in range(15, 60)})
        found = intervals.contrast(a, b, Resampling(300))
        inside += found["low"] <= 0 <= found["high"]
        rejected += found["p"] < 0.05
    assert 0.88 < inside / 150 < 0.99 and 0.01 < rejected / 150 < 0.12
    one = frame({("q1", 0): 1.0})
    assert np.isnan(intervals.contrast(one, one, Resampling())["low"])
    assert np.isnan(intervals.contrast(one, frame({}), Resampling())["ours"])


def test_comparisons_by_hand(toy):
    better = SCORES.copy()
    better[1, 1] = 9  # q2 in A: A_1* first
    scores = {SPARSE: SCORES, EXPANDED: better}
    values = {name: metrics.per_search(toy, matrix) for name, matrix in scores.items()}
    gain = (EXPANDED, SPARSE)
    pairs = [
        ((EXPANDED, "single", "all"), (SPARSE, "single", "all")),
        ((gain, "single", "string"), (gain, "single", "implication")),
    ]
    systems, types = (row for _, row in compare(values, pairs, Resampling(50, 50), "MRR").iterrows())
    assert systems["ours"] == pytest.approx(50 / 3) and systems["p"] > 0
    assert types["ours"] == 25 and np.isnan(types["p"])  # strings: 0 and 1 - 1/2; implications: nothing; one patient
    settings_apart = compare(values, [((gain, "multi", "all"), (gain, "single", "all"))], Resampling(50, 50))
    assert list(settings_apart["metric"]) == ["MRR", "NDCG@10", "R@100"]  # against MRR, NDCG, MAP
    in_multi = mean(values[EXPANDED], "multi", "all", "MRR") - mean(values[SPARSE], "multi", "all", "MRR")
    assert settings_apart["ours"][0] == pytest.approx(in_multi - 50 / 3)
    average = paper_means().query("system == 'RRF' and setting == 'multi' and group == 'all' and metric == 'Average'")
    assert average["value"].item() == pytest.approx((67.04 + 68.74 + 61.92) / 3)


def test_comparisons_in_words():
    sides = {"first": ("RRF", "multi", "all"), "second": ("BM25", "multi", "all"), "low": 1.0, "high": 3.0}
    rows = pd.DataFrame([sides | {"metric": m, "ours": 2.0, "p": p} for m, p in [("MRR", 0.001), ("MAP", 0.5)]])
    mrr, map_ = "MRR +2.0 [+1.0, +3.0]", "MAP +2.0 [+1.0, +3.0] (not significant)"
    assert in_words(rows) == f"{mrr}; {map_}" and in_words(rows, [-1, 1]) == f"{mrr} (opposite); {map_}"
    gain = (("RRF", "BM25"), "single", "drug"), (("RRF", "BM25"), "single", "disease")
    other = dict(zip(("first", "second"), gain, strict=True)) | {"metric": "MRR", "ours": -3.0, "p": 0.001}
    assert in_words(pd.concat([rows, rows, pd.DataFrame([other])])) == (
        "2 of 5 comparisons have the paper's sign, 1 the opposite "
        "(RRF over BM25, single, drug against disease, MRR); from -3.0 to +2.0"
    )


def test_settings(monkeypatch, tmp_path):
    monkeypatch.delenv("DREHR_RETRIEVERS", raising=False)
    monkeypatch.delenv("DREHR_EMBED_BASE_URL", raising=False)
    small = settings(load_profile("open"))
    assert small == settings(load_profile("smoke")) and small.skipped == {}
    assert [spec.name for spec in small.retrievers] == ["MiniLM (start)"] == list(small.fused) == list(small.detailed)
    careful = settings(load_profile("mimic"))  # no code of a hub's beside the notes, unless one says so
    assert careful.fused == ("bge-base-en-v1.5", "MedCPT") and len(careful.retrievers) == 5
    assert {spec.trust_remote_code for spec in careful.retrievers} == {False}
    assert careful.skipped["NV-Embed-v2"] == "DREHR_TRUST_REMOTE_CODE=yes"
    monkeypatch.setenv("DREHR_TRUST_REMOTE_CODE", "yes")
    large = settings(load_profile("mimic"))
    assert large.skipped == {"text-embedding-3-large": "DREHR_EMBED_BASE_URL"} and large.fused == ("NV-Embed-v2",)
    assert large.detailed == ("bge-base-en-v1.5", "NV-Embed-v2")  # the paper's Tables 4 and 5
    assert len(large.retrievers) == 8 and large.reference == "bge-base-en-v1.5"
    assert {spec.similarity for spec in large.retrievers} == {"cosine"}  # as CliniQ's script
    monkeypatch.setenv("DREHR_EMBED_BASE_URL", "http://localhost:8000/v1")
    assert settings(load_profile("mimic")).fused == ("NV-Embed-v2", "text-embedding-3-large")
    monkeypatch.setenv("DREHR_RETRIEVERS", f"bge-base-en-v1.5, MedCPT, {tmp_path}, MedCPT")
    mine = settings(load_profile("mimic"))
    assert [spec.name for spec in mine.retrievers] == ["bge-base-en-v1.5", "MedCPT", tmp_path.name]
    assert mine.detailed == ("bge-base-en-v1.5", tmp_path.name)  # one that the paper doesn't know is in every table
    monkeypatch.setenv("DREHR_RETRIEVERS", "text-embedding-3-large")
    monkeypatch.delenv("DREHR_EMBED_BASE_URL")
    with pytest.raises(DataError, match="no dense retriever is left"):
        settings(load_profile("open"))


def test_expansion_on_dev_with_the_open_graph():
    dev, graph = load_benchmark(ROOT / "data/open_cliniq", "dev"), pipeline.knowledge_graph(load_profile("open"))
    plain = baselines.lexical_scores(dev, graph)
    np.testing.assert_array_equal(plain, baselines.BM25(dev.corpus.values()).scores(dev.queries.values()))
    scores = {SPARSE: plain, EXPANDED: baselines.lexical_scores(dev, graph, ("synonyms", "hyponyms"))}
    scores[FUSED] = (scores[SPARSE], scores[EXPANDED])
    values = {name: metrics.per_search(dev, matrices) for name, matrices in scores.items()}
    assert mean(values[EXPANDED], "single", "synonym", "MAP") > mean(values[SPARSE], "single", "synonym", "MAP") + 10
    for group in ("all", "string", "drug"):
        low, fused, high = sorted(mean(values[s], "single", group, "MAP") for s in scores)
        assert low <= fused <= high
