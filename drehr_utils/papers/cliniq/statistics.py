"""What a benchmark holds: CliniQ's Table 1, Figure 4 (query lengths) and Figure 5 (match types by query type)."""

from __future__ import annotations

from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from drehr_utils.config import Resampling
from drehr_utils.data.benchmark import MATCH_TYPES, QUERY_TYPES, Benchmark, single_patient_tasks
from drehr_utils.evaluation.intervals import RESULT_COLUMNS, bootstrap_interval
from drehr_utils.evaluation.plots import PALETTE, SINGLE_COLUMN
from drehr_utils.evaluation.tables import paper_figures


def _long(rows: list[tuple]) -> pd.DataFrame:
    """Rows (setting, group, metric, ours, low, high) as RESULT_COLUMNS."""
    blank = [("", s, group, metric, np.nan, ours, low, high, np.nan) for s, group, metric, ours, low, high in rows]
    return pd.DataFrame(blank, columns=RESULT_COLUMNS)


def statistics_rows(benchmark: Benchmark, resampling: Resampling) -> pd.DataFrame:
    """CliniQ's Table 1 in RESULT_COLUMNS, `metric` count: averages per patient (single) and totals (multi).

    A query counts where it has a relevant chunk: of the patient's own, in the note (its Single-Patient searches);
    anywhere (multi). Judgments are relevant pairs, string matches of other patients' queries among them. Averages
    carry a 95% bootstrap interval over patients."""
    groups = ["chunk of records", "query", *QUERY_TYPES, "relevance judgment", *MATCH_TYPES]
    column = {group: i for i, group in enumerate(groups)}
    row_of = {patient.note_id: i for i, patient in enumerate(benchmark.patients)}
    owners = {chunk_id: row_of[patient.note_id] for patient in benchmark.patients for chunk_id in patient.chunk_ids}
    counts = np.zeros((len(benchmark.patients), len(groups)))
    counts[:, 0] = [len(patient.chunk_ids) for patient in benchmark.patients]
    for task in single_patient_tasks(benchmark):
        counts[row_of[task.note_id], [column["query"], column[benchmark.query_types[task.query_id]]]] += 1
    for judged in benchmark.match_types.values():
        for chunk_id, kind in judged.items():
            counts[owners[chunk_id], [column["relevance judgment"], column[kind]]] += 1
    totals = {"patient record": len(benchmark.patients), **dict(zip(groups, counts.sum(axis=0), strict=True))}
    totals["query"] = len(benchmark.qrels)
    totals.update({t: sum(benchmark.query_types[q] == t for q in benchmark.qrels) for t in QUERY_TYPES})
    low, high = bootstrap_interval(counts, resampling)
    rows = [("multi", "patient record", "count", float(totals["patient record"]), np.nan, np.nan)]
    for i, group in enumerate(groups):
        rows.append(("single", group, "count", counts[:, i].mean(), low[i], high[i]))
        rows.append(("multi", group, "count", float(totals[group]), np.nan, np.nan))
    return _long(rows)


def query_lengths(benchmark: Benchmark) -> pd.DataFrame:
    """One row a query: type, words."""
    rows = [(benchmark.query_types[q], len(text.split())) for q, text in benchmark.queries.items()]
    return pd.DataFrame(rows, columns=["type", "words"])


def length_rows(lengths: pd.DataFrame) -> pd.DataFrame:
    """The figures that CliniQ §5.1 gives of its Figure 4, in RESULT_COLUMNS: words of a query, and shares in %."""
    words = lengths["words"]
    drugs = words[lengths["type"] == "drug"]
    values = {
        ("all", "mean words"): words.mean(),
        ("all", "Q1 words"): words.quantile(0.25),
        ("all", "Q3 words"): words.quantile(0.75),
        ("all", "max words"): words.max(),
        ("all", "single-word (%)"): 100 * (words == 1).mean(),
        ("drug", "less than 4 words (%)"): 100 * (drugs < 4).mean(),
    }
    return _long([("", group, metric, float(v), np.nan, np.nan) for (group, metric), v in values.items()])


def length_plot(lengths: pd.DataFrame) -> Figure:
    """CliniQ's Figure 4: the cumulated share of queries of at most so many words, for each type."""
    fig, ax = plt.subplots(figsize=(SINGLE_COLUMN, 2.3))
    longest = int(lengths["words"].max())
    for colour, style, kind in zip(PALETTE, ("-", "--", ":"), QUERY_TYPES, strict=False):
        words = lengths.loc[lengths["type"] == kind, "words"]
        if len(words):
            shares = [100 * (words <= n).mean() for n in range(1, longest + 1)]
            ax.plot(range(1, longest + 1), shares, style, color=colour, marker="o", markersize=2.5, label=kind)
    ax.set_xlabel("Query length (words)")
    ax.set_ylabel("Queries of at most this length (%)")
    ax.set_ylim(0, 103)
    ax.legend(loc="lower right")
    return fig


def match_type_counts(benchmark: Benchmark) -> pd.DataFrame:
    """Relevant pairs by query type (rows) and match type (columns): CliniQ's Figure 5."""
    counts = Counter(
        (benchmark.query_types[query_id], kind)
        for query_id, of_q in benchmark.match_types.items()
        for kind in of_q.values()
    )
    return pd.DataFrame([[counts[t, kind] for kind in MATCH_TYPES] for t in QUERY_TYPES], QUERY_TYPES, MATCH_TYPES)


def share_rows(benchmark: Benchmark, resampling: Resampling) -> pd.DataFrame:
    """Shares (%) of each match type in the relevant pairs of a query type, and of all, with intervals over queries."""
    judged = [
        (benchmark.query_types[q], q, kind) for q, of_q in benchmark.match_types.items() for kind in of_q.values()
    ]
    table = pd.DataFrame(judged, columns=["type", "query", "kind"])
    rows = []
    for group in (*QUERY_TYPES, "all"):
        part = table if group == "all" else table[table["type"] == group]
        if part.empty:
            continue
        is_kind = 100.0 * (part["kind"].to_numpy()[:, None] == np.array(MATCH_TYPES)[None, :])
        low, high = bootstrap_interval(is_kind, resampling, part["query"].to_numpy())
        shares = is_kind.mean(axis=0)
        rows += [("", group, f"{kind} (%)", shares[i], low[i], high[i]) for i, kind in enumerate(MATCH_TYPES)]
    return _long(rows)


def shares_with_paper(shares: pd.DataFrame) -> pd.DataFrame:
    """share_rows with what the paper says: its Table 1 gives the shares of all, its §5.1 that of strings in drugs'."""
    table1 = paper_figures("cliniq", 1).query("setting == 'multi'").set_index("group")["value"]
    total = table1["relevance judgment"]
    known = {("all", f"{kind} (%)"): 100 * table1[kind] / total for kind in MATCH_TYPES}
    text = paper_figures("cliniq", "figure 5")
    known.update(zip(zip(text["group"], text["metric"], strict=True), text["value"], strict=True))
    keys = zip(shares["group"], shares["metric"], strict=True)
    return shares.assign(paper=[known.get(key, np.nan) for key in keys])
