"""What a benchmark holds: CliniQ's Table 1."""

from __future__ import annotations

import numpy as np
import pandas as pd

from drehr_utils.config import Resampling
from drehr_utils.data.benchmark import MATCH_TYPES, QUERY_TYPES, Benchmark, single_patient_tasks
from drehr_utils.errors import DataError
from drehr_utils.evaluation.intervals import RESULT_COLUMNS, bootstrap_interval
from drehr_utils.evaluation.metrics import patient_of


def statistics_rows(benchmark: Benchmark, resampling: Resampling) -> pd.DataFrame:
    """CliniQ's Table 1 in RESULT_COLUMNS, `metric` count: averages per patient (single) and totals (multi).

    A query counts where it has a relevant chunk: of the patient's own, in the note (its Single-Patient searches);
    anywhere (multi). Judgments are relevant pairs, string matches of other patients' queries among them. Averages
    carry a 95% bootstrap interval over patients. DataError for a judged chunk of a note that is no patient's."""
    groups = ["chunk of records", "query", *QUERY_TYPES, "relevance judgment", *MATCH_TYPES]
    column = {group: i for i, group in enumerate(groups)}
    row_of = {patient.note_id: i for i, patient in enumerate(benchmark.patients)}
    owners = {chunk_id: row_of[patient.note_id] for patient in benchmark.patients for chunk_id in patient.chunk_ids}
    if lost := min((c for judged in benchmark.match_types.values() for c in judged if c not in owners), default=""):
        raise DataError(f"qrels: {lost!r} is of a note without a line in patients.jsonl; each judged note needs one")
    counts = np.zeros((len(benchmark.patients), len(groups)))
    counts[:, 0] = [len(patient.chunk_ids) for patient in benchmark.patients]
    for task in single_patient_tasks(benchmark):
        counts[row_of[task.note_id], [column["query"], column[benchmark.query_types[task.query_id]]]] += 1
    for judged in benchmark.match_types.values():
        for chunk_id, kind in judged.items():
            counts[owners[chunk_id], [column["relevance judgment"], column[kind]]] += 1
    totals = dict(zip(groups, counts.sum(axis=0), strict=True)) | {"query": len(benchmark.qrels)}
    totals |= {kind: sum(benchmark.query_types[q] == kind for q in benchmark.qrels) for kind in QUERY_TYPES}
    patients = list(patient_of(benchmark).values())
    clusters = np.array(patients) if len(set(patients)) < len(patients) else None
    low, high = bootstrap_interval(counts, resampling, patients=clusters)
    rows = [("multi", "patient record", len(benchmark.patients), np.nan, np.nan)]
    for group, *averaged in zip(groups, counts.mean(axis=0), low, high, strict=True):
        rows += [("single", group, *averaged), ("multi", group, totals[group], np.nan, np.nan)]
    table = pd.DataFrame(rows, columns=["setting", "group", "ours", "low", "high"])
    return table.assign(system="", metric="count").reindex(columns=RESULT_COLUMNS)
