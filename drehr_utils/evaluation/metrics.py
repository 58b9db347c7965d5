"""Scores of a retrieval system on CliniQ, with intervals and tests (CliniQ §4.1, §4.3; DR.EHR §4.3, §5).

A system is a score matrix [queries, chunks] in the benchmark's order, or a tuple of such matrices, which reciprocal
rank fusion joins in each search's own pool. Runs as dictionaries exist only at ir-measures' edge. Values: 0 to 100.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import ir_measures
import numpy as np
import pandas as pd
import scipy.stats
from ir_measures import AP, RR, R, nDCG

from drehr_utils.data.benchmark import MATCH_TYPES, QUERY_TYPES, Benchmark, single_patient_tasks
from drehr_utils.search.fusion import rank, reciprocal_rank_fusion, tie_keys

SINGLE_METRICS = {"MRR": RR, "NDCG": nDCG, "MAP": AP}  # without cutoff: a note has few chunks (CliniQ §4.3)
MULTI_METRICS = {"MRR": RR, "NDCG@10": nDCG @ 10, "R@100": R @ 100}
Scores = np.ndarray | tuple[np.ndarray, ...]
COLUMNS = ["search_id", "query_id", "query_type", "patient", "metric", "value"]
NO_PATIENT = [column for column in COLUMNS if column != "patient"]  # of searches that belong to none
AVERAGE = "Average"  # of the setting's three metrics: what DR.EHR's Tables 5 and 6 print

_BATCH = 256  # queries turned into dictionaries at a time: bounds memory at CliniQ's 1,246 x 16,550 scores


class Ranking(NamedTuple):
    """One search's answer."""

    search_id: str
    query_id: str
    patient: str  # in Multi-Patient Retrieval, where a query belongs to no one patient, the query itself
    chunk_ids: np.ndarray  # best first
    scores: np.ndarray
    relevant: dict[str, int]


def patient_of(benchmark: Benchmark) -> dict[str, str]:
    """Note id -> what stands for its patient: the note itself where no patient is known to have several."""
    return {patient.note_id: patient.subject_id or patient.note_id for patient in benchmark.patients}


def rankings(benchmark: Benchmark, scores: Scores, setting: str, match_type: str | None = None) -> Iterator[Ranking]:
    """Every search's ranking in a setting, `single` or `multi`; equal scores in the order of fusion.tie_keys.

    `scores` [queries, chunks] are over the whole corpus; a Single-Patient search reads its note's part."""
    matrices, ids = _checked(benchmark, scores), np.array(list(benchmark.corpus), dtype=object)
    columns = {chunk_id: column for column, chunk_id in enumerate(ids)}
    rows = {query_id: row for row, query_id in enumerate(benchmark.queries)}
    if setting == "single":
        owner = patient_of(benchmark)
        searches = (
            (t.search_id, t.query_id, owner[t.note_id], np.array([columns[c] for c in t.chunk_ids]), t.relevant)
            for t in single_patient_tasks(benchmark, match_type)
        )
    else:
        every = np.arange(len(ids))
        searches = ((q, q, q, every, benchmark.qrels[q]) for q in benchmark.queries if q in benchmark.qrels)
    ties = tie_keys(benchmark.queries, benchmark.corpus)
    for search_id, query_id, patient, pool, relevant in searches:
        row, keys = rows[query_id], ties[rows[query_id], pool]
        runs = [matrix[row, pool] for matrix in matrices]
        found = runs[0] if len(runs) == 1 else reciprocal_rank_fusion(runs, keys)
        order = rank(found, keys)
        yield Ranking(search_id, query_id, patient, ids[pool[order]], found[order], relevant)


def single_patient(benchmark: Benchmark, scores: Scores, match_type: str | None = None) -> pd.DataFrame:
    """Single-Patient Retrieval: a row (COLUMNS) for each search and metric.

    A search is a (patient, query) pair, so a query asked for many patients weighs more: the paper averages over
    searches ("nearly 28k"). Metrics: MRR, NDCG, MAP without cutoff, and their Average. `match_type` dissects (CliniQ
    §4.1, DR.EHR Table 5)."""
    return _frame(benchmark, SINGLE_METRICS, rankings(benchmark, scores, "single", match_type))


def multi_patient(benchmark: Benchmark, scores: Scores) -> pd.DataFrame:
    """Multi-Patient Retrieval: each query that has a relevant chunk, over the whole corpus; rows as single_patient's.

    Intervals draw queries, as the field does. Metrics: MRR, NDCG@10, R@100 and their Average. Chunks of patients
    without the code aren't judged beyond string matches, and count as not relevant (CliniQ §3.3, Limitations)."""
    return _frame(benchmark, MULTI_METRICS, rankings(benchmark, scores, "multi"))


def per_search(benchmark: Benchmark, scores: Scores) -> pd.DataFrame:
    """Every value that a system's tables are made of: COLUMNS after `setting` (single, multi) and `match_type` (all;
    with single, also each type)."""
    parts = {("single", "all"): single_patient(benchmark, scores), ("multi", "all"): multi_patient(benchmark, scores)}
    parts |= {("single", kind): single_patient(benchmark, scores, kind) for kind in MATCH_TYPES}
    return pd.concat(parts, names=["setting", "match_type", None]).reset_index(["setting", "match_type"])


def of_group(values: pd.DataFrame, setting: str, group: str = "all") -> pd.DataFrame:
    """The part of a per_search frame that is of a setting and of a group: all queries, a query type, a match type."""
    column, kind = ("query_type", "all") if group in QUERY_TYPES else ("match_type", group)
    wanted = (values["setting"] == setting) & (values["match_type"] == kind) & (values[column] == group)
    return values[wanted].drop(columns=["setting", "match_type"])


def means(values: pd.DataFrame) -> pd.Series:
    """The mean of each metric over the searches of single_patient's or multi_patient's frame, in the frame's order."""
    return values.groupby("metric", sort=False)["value"].mean()


def hubness(scores: np.ndarray, k: int = 10) -> pd.Series:
    """How unevenly chunks come first: a hub chunk that tops most queries ruins Multi-Patient Retrieval.

    `top1_share` of the queries, 0..1, have the most frequent first chunk; `distinct_top1` chunks come first; `skewness`
    of N_10, how often a chunk is among a query's first ten (Radovanović et al., 2010). Equal scores of the matrix
    [queries, chunks] are ordered by position here, ids being unknown."""
    chunks, k = scores.shape[1], min(k, scores.shape[1])
    first = np.bincount(scores.argmax(axis=1), minlength=chunks)
    occurrences = np.bincount(np.argpartition(-scores, k - 1, axis=1)[:, :k].ravel(), minlength=chunks)
    skewness = scipy.stats.skew(occurrences) if occurrences.std() > 0 else 0.0
    found = {"top1_share": first.max() / len(scores), "distinct_top1": (first > 0).sum(), "skewness": skewness}
    return pd.Series(found, dtype=object)


def _frame(benchmark: Benchmark, metrics: dict, ranked: Iterator[Ranking]) -> pd.DataFrame:
    names, rows = {measure: name for name, measure in metrics.items()}, []
    while batch := {ranking.search_id: ranking for ranking in itertools.islice(ranked, _BATCH)}:
        run = {at: {chunk_id: -float(place) for place, chunk_id in enumerate(r.chunk_ids)} for at, r in batch.items()}
        found: dict[str, dict[str, float]] = {search_id: {} for search_id in batch}
        for value in ir_measures.iter_calc(metrics.values(), {at: r.relevant for at, r in batch.items()}, run):
            found[value.query_id][names[value.measure]] = 100 * value.value
        for search_id, r in batch.items():
            scores = {name: found[search_id][name] for name in metrics}
            scores[AVERAGE] = sum(scores.values()) / len(scores)
            about = search_id, r.query_id, benchmark.query_types[r.query_id], r.patient
            rows += [(*about, name, score) for name, score in scores.items()]
    return pd.DataFrame(rows, columns=COLUMNS)


def _checked(benchmark: Benchmark, scores: Scores) -> list[np.ndarray]:
    matrices = [np.asarray(matrix) for matrix in (scores if isinstance(scores, tuple) else (scores,))]
    shape = (len(benchmark.queries), len(benchmark.corpus))
    for matrix in matrices:
        if matrix.shape != shape:
            raise ValueError(f"scores have shape {matrix.shape}; there are {shape[0]} queries and {shape[1]} chunks")
        if np.isnan(matrix).any():
            raise ValueError("scores hold NaN; a chunk that wasn't scored gets -inf")
    return matrices
