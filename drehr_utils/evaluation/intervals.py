"""Intervals, paired tests, and the long-form rows of every results table (CliniQ §4.3; DR.EHR §4.3).

A Single-Patient search is of a patient and of a query, and neither the searches of one patient nor those of one query
(in several patients) are independent, so both are resampled:

- Interval: a draw takes patients with replacement and, by itself, queries; a search counts as often as its patient
  times as often as its query (the pigeonhole bootstrap: Owen, 2007). Such draws spread too widely, for they count what
  a search has on its own three times; so their deviations are scaled to the standard error for two-way clusters
  (V_patients + V_queries - V_searches, each by jackknife: Cameron, Gelbach and Miller, 2011; MacKinnon, Nielsen and
  Webb, 2024).
- Paired test: the signs of a patient's differences flip together, and the mean is divided by that standard error, in
  which the queries are seen (the wild cluster bootstrap: MacKinnon, Nielsen and Webb, 2021). Flipping by patient and by
  query and taking the larger p would miss that both effects add up.

Where one level holds the other (Multi-Patient Retrieval: a query is its own cluster, the field's convention of drawing
topics) there is one level: its clusters are drawn, and its signs flip, as ever.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pandas as pd
import scipy.sparse

from drehr_utils.config import Resampling
from drehr_utils.data.benchmark import MATCH_TYPES, QUERY_TYPES
from drehr_utils.evaluation.metrics import AVERAGE, of_group

Statistic = Callable[[np.ndarray], np.ndarray]  # of sums [..., columns]
Ids = np.ndarray | None  # of each search's query or patient
RESULT_COLUMNS = ["system", "setting", "group", "metric", "paper", "ours", "low", "high", "p"]
DIFFERENCE = "difference"  # beside them where there is a p: from the system that it is against


def bootstrap(
    parts: np.ndarray, statistic: Statistic, resampling: Resampling, queries: Ids = None, patients: Ids = None
) -> np.ndarray:
    """Bootstrap draws [samples, ...] of `statistic`, a function of sums [..., columns] of `parts` [searches, columns].

    `queries` and `patients` [searches] are ids; without either, searches are drawn. NaN where there are fewer than two
    clusters to draw from, or a draw of which the statistic is none (no search of one side)."""
    parts, levels = np.asarray(parts, dtype=float), _levels(len(parts), queries, patients)
    rng = np.random.default_rng(resampling.seed)
    sizes = [level.max(initial=-1) + 1 for level in levels]
    with np.errstate(invalid="ignore", divide="ignore"):
        if min(sizes) < 2:
            return np.full((resampling.samples, *statistic(parts.sum(axis=0)).shape), np.nan)
        weights = [_drawn(rng, size, resampling.samples) for size in sizes[:2]]
        if len(levels) == 1:
            return statistic(weights[0] @ _cluster_sums(parts, levels[0]))
        crossed = [((weights[0] @ _table(column, *levels)) * weights[1]).sum(axis=1) for column in parts.T]
        draws, measured = statistic(np.stack(crossed, axis=1)), statistic(parts.sum(axis=0))
        error = np.sqrt(_two_way(*(_jackknife(parts, level, statistic) for level in levels)))
        scale = error / np.nanstd(draws, axis=0)
        return measured + (draws - measured) * np.where(np.isfinite(scale), scale, 1)


def percentile_interval(draws: np.ndarray) -> np.ndarray:
    """The 95% interval [2, ...] of bootstrap draws [samples, ...]: low, high; NaN where all of them are."""
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        return np.nanpercentile(draws, [2.5, 97.5], axis=0)


def bootstrap_means(
    values: np.ndarray, resampling: Resampling, queries: Ids = None, patients: Ids = None
) -> np.ndarray:
    """Bootstrap draws [samples] or [samples, metrics] of the mean of `values` [searches] or [searches, metrics]."""
    values = np.asarray(values, dtype=float)
    parts = np.column_stack([values, np.ones(len(values))])
    draws = bootstrap(parts, lambda sums: sums[..., :-1] / sums[..., -1:], resampling, queries, patients)
    return draws.reshape(len(draws), *values.shape[1:])


def bootstrap_interval(
    values: np.ndarray, resampling: Resampling, queries: Ids = None, patients: Ids = None
) -> tuple[np.ndarray, np.ndarray]:
    """95% percentile bootstrap interval of the mean: (low, high) of `values` [searches] or [searches, metrics]."""
    low, high = percentile_interval(bootstrap_means(values, resampling, queries, patients))
    return low, high


def paired_randomization_test(
    a: np.ndarray, b: np.ndarray, resampling: Resampling, queries: Ids = None, patients: Ids = None
) -> np.ndarray:
    """Two-sided p of the paired randomization test of mean(a) = mean(b): (as extreme + 1) / (randomizations + 1).

    `a`, `b` are [searches] or [searches, metrics], aligned. (scipy.stats.permutation_test tests the same for one level
    of clusters, takes three times as long, and one metric at a time.)"""
    a, b = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if a.shape != b.shape:
        raise ValueError(f"a has shape {a.shape}, b {b.shape}; both need the same searches in the same order")
    levels, differences = _levels(len(a), queries, patients), (a - b).reshape(len(a), -1)
    if not np.isfinite(differences).all():
        raise ValueError("a difference isn't a number; leave out the searches that lack a value")
    sums = _cluster_sums(differences, levels[0])
    patient, search = (np.square(_cluster_sums(differences, levels[at])).sum(axis=0) for at in (0, -1))
    tables = [_table(column, *levels) for column in differences.T] if len(levels) > 1 else []
    products = [(table @ table.T).toarray() for table in tables]  # of patients, summed over queries

    def extremity(signs: np.ndarray) -> np.ndarray:
        """|Sum of differences| of `signs` [draws, clusters], in standard errors where two levels cross."""
        found = np.abs(signs @ sums)
        if products:
            query = np.stack([((signs @ product) * signs).sum(axis=1) for product in products], axis=1)
            spread = _two_way(patient, query, search)
            found /= np.sqrt(np.where(spread > 0, spread, 1))
        return found

    observed = extremity(np.ones((1, len(sums))))
    rng, extreme = np.random.default_rng(resampling.seed), np.zeros(differences.shape[1])
    for start in range(0, resampling.randomizations, 2000):
        draws = min(2000, resampling.randomizations - start)
        signs = rng.integers(0, 2, (draws, len(sums)), dtype=np.int8) * 2.0 - 1.0
        # The tolerance counts a draw that equals the observed sum up to rounding, as it must.
        extreme += (extremity(signs) >= observed * (1 - 1e-12) - 1e-9).sum(axis=0)
    return ((extreme + 1) / (resampling.randomizations + 1)).reshape(a.shape[1:])[()]


def contrast(one: pd.DataFrame, other: pd.DataFrame, resampling: Resampling) -> dict[str, float]:
    """The mean of one group of searches (a match type's) less that of another, as a row for claims.judge.

    `one` and `other` are frames of one metric's values by search. A draw takes patients and queries of both at once. p
    is the paired randomization test's where both hold the same searches; where they don't, none such fits, and it is
    twice the share of draws at or beyond 0, one draw counted more (0.002 at least of 1,000)."""
    if one.empty or other.empty:
        return dict.fromkeys(("ours", "low", "high", "p"), np.nan)
    both, mine = pd.concat([one, other]), np.repeat([1, 0], [len(one), len(other)])
    value = both["value"].to_numpy()
    parts = np.column_stack([value * mine, mine, value * (1 - mine), 1 - mine])

    def gap(sums: np.ndarray) -> np.ndarray:
        return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]

    draws = bootstrap(parts, gap, resampling, both["query_id"], both.get("patient"))
    low, high = map(float, percentile_interval(draws))
    draws = draws[np.isfinite(draws)]  # one that drew no search of a group has no gap
    beyond = min((draws <= 0).sum(), (draws >= 0).sum())
    p = min(1.0, 2 * (beyond + 1) / (len(draws) + 1)) if len(draws) else np.nan
    if len(draws) and "search_id" in both and set(one["search_id"]) == set(other["search_id"]):
        (a, clusters), (b, _) = (_matrix(frame.assign(metric="value"), ["value"]) for frame in (one, other))
        p = float(paired_randomization_test(a.mean(axis=(1, 2)), b.mean(axis=(1, 2)), resampling, **clusters))
    return {"ours": float(one["value"].mean() - other["value"].mean()), "low": low, "high": high, "p": p}


def result_rows(
    name: str, setting: str, group: str, values: pd.DataFrame, resampling: Resampling, start: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Per-search values as long-form rows (RESULT_COLUMNS), one a metric: mean, 95% interval, p against `start`.

    `start` holds another system's values of the same searches; p is empty without it, and `paper` always. With it the
    mean difference from it is in DIFFERENCE. Where the
    values are of several trainings (a column `seed`), the mean is over them, too, and the interval draws them."""
    metrics = list(dict.fromkeys(values["metric"]))
    seeds, clusters = _matrix(values, metrics)
    matrix = seeds.mean(axis=1)
    draws = bootstrap_means(seeds.reshape(len(seeds), -1), resampling, **clusters)
    low, high = percentile_interval(over_seeds(draws.reshape(len(draws), *seeds.shape[1:]), resampling.seed))
    p = differences = np.full(len(metrics), np.nan)
    if start is not None:
        if set(start["search_id"]) != set(values["search_id"]):
            raise ValueError(f"{name}, {setting} {group}: start has other searches; measure both on one benchmark")
        other = _matrix(start, metrics)[0].mean(axis=1)
        p = paired_randomization_test(matrix, other, resampling, **clusters)
        differences = (matrix - other).mean(axis=0)
    rows = pd.DataFrame({"metric": metrics, "ours": matrix.mean(axis=0), "low": low, "high": high, "p": p})
    rows = rows.assign(system=name, setting=setting, group=group, paper=np.nan)
    return rows.assign(**{DIFFERENCE: differences})[[*RESULT_COLUMNS, DIFFERENCE]]


def gain_rows(
    name: str, setting: str, group: str, values: pd.DataFrame, start: pd.DataFrame, resampling: Resampling
) -> pd.DataFrame:
    """What a system gains on `start`, the values of another on the same searches, as result_rows: `ours` is the mean
    difference, `low` and `high` its paired 95% bootstrap interval, `p` the paired randomization test's. Trainings are
    paired by seed where both systems have the same ones, else compared with the mean over those of `start`."""
    try:
        differences = gained(values, start)
    except ValueError as error:
        raise ValueError(f"{name}, {setting} {group}: {error}") from None
    return result_rows(name, setting, group, differences, resampling, differences.assign(value=0.0))


def gained(values: pd.DataFrame, start: pd.DataFrame) -> pd.DataFrame:
    """`values` less those of `start` on the same searches, trainings paired as gain_rows says."""
    if "seed" in start and ("seed" not in values or set(values["seed"]) != set(start["seed"])):
        start = start.groupby([c for c in start if c not in ("seed", "value")], as_index=False)["value"].mean()
    paired = values.merge(start, on=[c for c in start if c != "value"], suffixes=("", " of start"))
    if len(paired) != len(values) or set(values["search_id"]) != set(start["search_id"]):
        raise ValueError("start has other searches; measure both on one benchmark")
    return paired.assign(value=paired["value"] - paired["value of start"])


def row_gains(
    values: Mapping[str, pd.DataFrame], row: str, rival: str, resampling: Resampling, group: str = "all",
    settings: Sequence[str] = ("single", "multi"),
) -> pd.DataFrame:  # fmt: skip
    """What one row of a table gains on another in each metric but the Average, as gain_rows, with the column `rival`;
    `values`: the rows' metrics.per_search."""
    parts = []
    for setting in settings:
        pair = [of_group(values[name], setting, group) for name in (row, rival)]
        pair = [frame[frame["metric"] != AVERAGE] for frame in pair]
        parts.append(gain_rows(row, setting, group, *pair, resampling))
    return pd.concat(parts).assign(rival=rival)


def evaluate_system(
    name: str, values: pd.DataFrame, resampling: Resampling, start: pd.DataFrame | None = None
) -> pd.DataFrame:
    """A system's long-form rows (RESULT_COLUMNS) from its metrics.per_search, in both settings.

    `group` is `all`, a query type, or (Single-Patient only) a match type; `metric` includes Average. `p` is against
    `start`, another system's values (the starting encoder). A group without a search has no row."""
    groups = [(setting, group) for setting in ("single", "multi") for group in ("all", *QUERY_TYPES)]
    rows = []
    for setting, group in groups + [("single", kind) for kind in MATCH_TYPES]:
        base = None if start is None else of_group(start, setting, group)
        if not (ours := of_group(values, setting, group)).empty:
            rows.append(result_rows(name, setting, group, ours, resampling, base))
    return pd.concat(rows, ignore_index=True)


def _matrix(values: pd.DataFrame, metrics: list[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Values [searches, seeds, metrics], and the searches' queries and, where the frame has them, patients."""
    keys = [key for key in ("search_id", "query_id", "patient") if key in values]
    wide = values.assign(seed=values.get("seed", 0)).pivot(index=keys, columns=["seed", "metric"], values="value")
    seeds = list(dict.fromkeys(wide.columns.get_level_values("seed")))
    named = {"query_id": "queries", "patient": "patients"}
    matrix = np.stack([wide[seed][metrics].to_numpy() for seed in seeds], axis=1)
    return matrix, {named[key]: wide.index.get_level_values(key).to_numpy() for key in keys[1:]}


def over_seeds(draws: np.ndarray, seed: int) -> np.ndarray:
    """Draws [samples, metrics] from those of each training [samples, seeds, metrics]: trainings are drawn, too.

    What they spread is scaled by √(n / (n - 1)), for n draws out of n spread less than n trainings do."""
    (samples, n, _), mean = draws.shape, draws.mean(axis=1)
    if n == 1:
        return mean
    drawn = np.random.default_rng(seed).integers(0, n, (samples, n, 1))
    return mean + (np.take_along_axis(draws, drawn, axis=1).mean(axis=1) - mean) * np.sqrt(n / (n - 1))


def _levels(n: int, queries: Ids, patients: Ids) -> list[np.ndarray]:
    """The levels' cluster numbers [searches]: patients, queries, where they cross; or the one that holds the other."""
    given = [np.unique(np.asarray(ids, str), return_inverse=True)[1] for ids in (patients, queries) if ids is not None]
    if len(given) < 2:
        return given or [np.arange(n)]
    patient, query = given
    both = np.unique(np.stack(given), axis=1, return_inverse=True)[1].ravel()
    patients_n, queries_n, crossings = (level.max(initial=-1) + 1 for level in (patient, query, both))
    if crossings == queries_n:  # a query has one patient
        return [patient]
    return [query] if crossings == patients_n else [patient, query, both]


def _drawn(rng: np.random.Generator, clusters: int, samples: int) -> np.ndarray:
    """How often each cluster is drawn with replacement: float [samples, clusters]."""
    drawn = rng.integers(0, clusters, (samples, clusters)) + clusters * np.arange(samples)[:, None]
    return np.bincount(drawn.ravel(), minlength=samples * clusters).reshape(samples, clusters).astype(float)


def _cluster_sums(values: np.ndarray, cluster: np.ndarray) -> np.ndarray:
    sums = np.zeros((cluster.max(initial=-1) + 1, values.shape[1]))
    np.add.at(sums, cluster, values)
    return sums


def _table(column: np.ndarray, patient: np.ndarray, query: np.ndarray, *_: np.ndarray) -> scipy.sparse.csr_array:
    """The column's sums [patients, queries]."""
    return scipy.sparse.csr_array((column, (patient, query)))


def _two_way(patient: np.ndarray, query: np.ndarray, both: np.ndarray) -> np.ndarray:
    """The variance under both levels of clusters from those under each, and where they cross; never below one alone."""
    return np.maximum(np.maximum(patient, query), patient + query - both)


def _jackknife(parts: np.ndarray, cluster: np.ndarray, statistic: Statistic) -> np.ndarray:
    """Variance of a statistic of sums, by leaving out each cluster in turn."""
    total, sums = parts.sum(axis=0), _cluster_sums(parts, cluster)
    return (1 - 1 / len(sums)) * np.square(statistic(total - sums) - statistic(total)).sum(axis=0)
