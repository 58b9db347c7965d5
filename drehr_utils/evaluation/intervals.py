"""Intervals, paired tests, and the long-form rows of every results table (CliniQ §4.3; DR.EHR §4.3)."""

from __future__ import annotations

import numpy as np
import pandas as pd
import scipy.stats

from drehr_utils.data.benchmark import MATCH_TYPES, QUERY_TYPES, Benchmark
from drehr_utils.evaluation.metrics import Scores, multi_patient, single_patient

RESULT_COLUMNS = ["system", "setting", "group", "metric", "paper", "ours", "low", "high", "p"]


def bootstrap_interval(
    values: np.ndarray, groups: np.ndarray | None = None, n: int = 1000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile bootstrap interval of the mean: (low, high) of `values` [searches] or [searches, metrics].

    `groups` [searches] are query ids: queries are drawn, each with all its searches, since a query's searches in
    several patients aren't independent. NaN where there are fewer than two queries to draw from.
    """
    sums, counts = _cluster_sums(values, groups)
    if len(counts) < 2:
        nan = np.full(sums.shape[1:], np.nan)
        return nan, nan
    counts = np.broadcast_to(counts.reshape(-1, *[1] * (sums.ndim - 1)), sums.shape)
    interval = scipy.stats.bootstrap(
        (sums, counts),
        lambda s, c, axis: s.sum(axis=axis) / c.sum(axis=axis),
        n_resamples=n,
        paired=True,
        axis=0,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return interval.low, interval.high


def paired_randomization_test(
    a: np.ndarray, b: np.ndarray, groups: np.ndarray | None = None, n: int = 10_000, seed: int = 0
) -> np.ndarray:
    """Two-sided p of the paired randomization test of mean(a) = mean(b): (as extreme + 1) / (n + 1).

    `a`, `b` are [searches] or [searches, metrics], aligned; the signs of a query's differences (`groups`) flip
    together. (scipy.stats.permutation_test tests the same, takes three times as long, and one metric at a time.)
    """
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"a has shape {a.shape}, b {b.shape}; both need the same searches in the same order")
    differences, _ = _cluster_sums(a - b, groups)
    observed = np.abs(differences.sum(axis=0))
    rng = np.random.default_rng(seed)
    extreme = np.zeros_like(observed)
    for start in range(0, n, 2000):
        draws = min(2000, n - start)
        signs = rng.integers(0, 2, (draws, len(differences)), dtype=np.int8) * 2.0 - 1.0
        # The tolerance counts a draw that equals the observed sum up to rounding, as it must.
        extreme += (np.abs(signs @ differences) >= observed * (1 - 1e-12) - 1e-9).sum(axis=0)
    return (extreme + 1) / (n + 1)


def result_rows(
    name: str, setting: str, group: str, values: pd.DataFrame, start: pd.DataFrame | None = None, seed: int = 0
) -> pd.DataFrame:
    """Per-search values as long-form rows (RESULT_COLUMNS), one a metric: mean, 95% interval, p against `start`.

    `start` holds another system's values of the same searches; p is empty without it. `paper` is left empty.
    """
    metrics = list(dict.fromkeys(values["metric"]))
    groups, matrix = _matrix(values, metrics)
    low, high = bootstrap_interval(matrix, groups, seed=seed)
    p = np.full(len(metrics), np.nan)
    if start is not None:
        if set(start["search_id"]) != set(values["search_id"]):
            raise ValueError(f"{name}, {setting} {group}: start has other searches; measure both on one benchmark")
        p = paired_randomization_test(matrix, _matrix(start, metrics)[1], groups, seed=seed)
    return pd.DataFrame(
        {
            "system": name,
            "setting": setting,
            "group": group,
            "metric": metrics,
            "paper": np.nan,
            "ours": matrix.mean(axis=0),
            "low": low,
            "high": high,
            "p": p,
        }
    )[RESULT_COLUMNS]


def gain_rows(
    name: str, setting: str, group: str, values: pd.DataFrame, start: pd.DataFrame, seed: int = 0
) -> pd.DataFrame:
    """What a system gains on `start`, the values of another on the same searches, as result_rows: `ours` is the mean
    difference, `low` and `high` its paired 95% bootstrap interval, `p` the paired randomization test's."""
    paired = values.merge(start, on=["search_id", "query_id", "query_type", "metric"], suffixes=("", " of start"))
    if len(paired) != len(values) or len(paired) != len(start):
        raise ValueError(f"{name}, {setting} {group}: start has other searches; measure both on one benchmark")
    differences = paired.assign(value=paired["value"] - paired["value of start"])
    rows = result_rows(name, setting, group, differences, seed=seed)
    return rows.assign(p=result_rows(name, setting, group, values, start, seed)["p"].to_numpy())


def evaluate_system(
    name: str, benchmark: Benchmark, scores: Scores, start: Scores | None = None, seed: int = 0
) -> pd.DataFrame:
    """A system's long-form rows (RESULT_COLUMNS): both settings, all queries and each query type, each match type.

    `group` is `all`, a query type, or (Single-Patient only) a match type; `metric` includes Average. `p` is against
    `start`, the scores of another system (the starting encoder). A group without a search has no row.
    """
    frames = []
    for setting, measure in (("single", single_patient), ("multi", multi_patient)):
        ours, base = measure(benchmark, scores), None if start is None else measure(benchmark, start)
        frames.append((setting, "all", ours, base))
        for kind in QUERY_TYPES:
            part = [frame if frame is None else frame[frame["query_type"] == kind] for frame in (ours, base)]
            frames.append((setting, kind, *part))
    for match_type in MATCH_TYPES:
        base = None if start is None else single_patient(benchmark, start, match_type)
        frames.append(("single", match_type, single_patient(benchmark, scores, match_type), base))
    rows = [result_rows(name, *frame, seed=seed) for frame in frames if not frame[2].empty]
    return pd.concat(rows, ignore_index=True)


def _matrix(values: pd.DataFrame, metrics: list[str]) -> tuple[np.ndarray, np.ndarray]:
    wide = values.pivot(index=["search_id", "query_id"], columns="metric", values="value")[metrics]
    return wide.index.get_level_values("query_id").to_numpy(), wide.to_numpy()


def _cluster_sums(values: np.ndarray, groups: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    values = np.asarray(values, dtype=float)
    if groups is None:
        return values, np.ones(len(values))
    _, index = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    sums = np.zeros((index.max(initial=-1) + 1, *values.shape[1:]))
    np.add.at(sums, index, values)
    return sums, np.bincount(index).astype(float)
