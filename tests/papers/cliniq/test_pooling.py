"""Pooled judgments by hand: what they add, to which queries, and how much of a ranking is judged."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from drehr_utils.data.benchmark import Benchmark, Patient, load_benchmark
from drehr_utils.errors import DataError
from drehr_utils.evaluation import metrics
from drehr_utils.papers.cliniq import pooling
from drehr_utils.profiles import load_profile

BENCH = Benchmark(
    corpus={"n1_0": "copd", "n1_1": "fever", "n2_0": "smoker on tiotropium", "n2_1": "well"},
    queries={"q1": "copd", "q2": "fever"},
    query_types={"q1": "disease", "q2": "disease"},
    patients=[Patient("1", "n1", ["n1_0", "n1_1"], ["q1", "q2"]), Patient("2", "n2", ["n2_0", "n2_1"], [])],
    qrels={"q1": {"n1_0": 1}, "q2": {"n1_1": 1}},
    match_types={"q1": {"n1_0": "string"}, "q2": {"n1_1": "string"}},
)
POOLED = pd.DataFrame(
    [("q1", "n2_0", "implication", "", "implication"), ("q1", "n2_1", "", "", "")], columns=pooling.COLUMNS
)


def test_the_pool_adds_its_relevant_pairs_to_its_queries_and_no_others():
    without, with_pool = pooling.pooled_queries(BENCH, POOLED), pooling.with_pool(BENCH, POOLED)
    assert without.qrels == {"q1": {"n1_0": 1}}
    assert with_pool.qrels == {"q1": {"n1_0": 1, "n2_0": 1}}
    assert with_pool.match_types == {"q1": {"n1_0": "string", "n2_0": "implication"}}
    assert BENCH.qrels["q1"] == {"n1_0": 1}
    scores = np.array([[1.0, 0.0, 2.0, -1.0], [0.0, 1.0, 0.0, 0.0]])  # the pooled chunk first
    mrr = [metrics.means(metrics.multi_patient(bench, scores))["MRR"] for bench in (without, with_pool)]
    assert mrr == [50.0, 100.0]


def test_judged_at_k_counts_own_chunks_string_matches_and_the_pool():
    cut = pooling.pooled_queries(BENCH, POOLED)
    judged = pooling.judged_pairs(BENCH, POOLED.head(1))
    ranked = list(metrics.rankings(cut, np.array([[4.0, 3.0, 2.0, 1.0], [0.0] * 4]), "multi"))
    assert pooling.judged_share(ranked, judged, k=3) == 100.0
    assert pooling.judged_share(ranked, judged, k=4) == 75.0  # nobody judged n2_1 then


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("query-id\tcorpus-id\n", "row 1"),
        ("query-id\tcorpus-id\tjudge_a\tjudge_b\tdecided\nq1\tn2_0\tsyn\t\t\n", "row 2, field judge_a: 'syn'"),
        ("query-id\tcorpus-id\tjudge_a\tjudge_b\tdecided\n" + "q1\tn2_0\t\t\t\n" * 2, "there twice"),
    ],
)
def test_a_malformed_pool_is_named(tmp_path, text, said):
    (tmp_path / "test/judgments").mkdir(parents=True)
    (tmp_path / "test/judgments/pooled.tsv").write_text(text)
    with pytest.raises(DataError, match=said):
        pooling.read_pooled(tmp_path)


def test_the_committed_pool_fits_the_benchmark():
    folder = load_profile("open").benchmark
    bench, pooled = load_benchmark(folder, "test"), pooling.read_pooled(folder)
    assert pooled["query-id"].nunique() == 120 and set(pooled["corpus-id"]) <= set(bench.corpus)
    own = {(q, c) for patient in bench.patients for q in patient.query_ids for c in patient.chunk_ids}
    pairs = set(pooled[pooling.COLUMNS[:2]].itertuples(index=False, name=None))
    assert not pairs & own  # other patients' chunks only
    agreed = pooled[pooled["judge_a"] == pooled["judge_b"]]
    assert (agreed["decided"] == agreed["judge_a"]).all()
