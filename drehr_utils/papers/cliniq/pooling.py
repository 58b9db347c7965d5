"""Judgments of other patients' chunks, pooled from many systems' tops (CliniQ §3.3 leaves all but string matches out).

data/open_cliniq/<split>/judgments/pooled*.tsv: each pair's two judges and what was decided, a match type or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pandas as pd

from drehr_utils.data.benchmark import MATCH_TYPES, Benchmark
from drehr_utils.errors import DataError
from drehr_utils.evaluation.metrics import Ranking
from drehr_utils.files import refuse, tab_rows
from drehr_utils.papers.cliniq.judging import Pair

COLUMNS = ["query-id", "corpus-id", "judge_a", "judge_b", "decided"]


def read_pooled(folder: Path, split: str = "test") -> pd.DataFrame:
    """The pooled judgments (COLUMNS) of a benchmark's folder; empty where it has none.

    Raises DataError, with file and row, for another header, an unknown match type, and a pair that is there twice."""
    rows, kinds = [], ("", *MATCH_TYPES)
    for path in sorted((folder / split / "judgments").glob("pooled*.tsv")):
        for row, where, cells in tab_rows(path, tuple(COLUMNS)):
            judged = {name: cells[name] for name in COLUMNS[2:]}
            refuse(
                where, row, {f"field {n}: {kind!r} is no match type": kind not in kinds for n, kind in judged.items()}
            )
            rows.append(cells)
    pooled = pd.DataFrame(rows, columns=COLUMNS, dtype=str)
    if (twice := pooled.duplicated(COLUMNS[:2])).any():
        raise DataError(f"pooled judgments: {tuple(pooled.loc[twice.idxmax(), COLUMNS[:2]])} is there twice; keep one")
    return pooled


def pooled_queries(bench: Benchmark, pooled: pd.DataFrame) -> Benchmark:
    """The benchmark with the judgments of the pool's queries alone, as they are without the pool."""
    asked = set(pooled["query-id"])
    return replace(
        bench,
        qrels={query: relevant for query, relevant in bench.qrels.items() if query in asked},
        match_types={query: kinds for query, kinds in bench.match_types.items() if query in asked},
    )


def with_pool(bench: Benchmark, pooled: pd.DataFrame) -> Benchmark:
    """`pooled_queries` with what the pool holds relevant."""
    cut = pooled_queries(bench, pooled)
    qrels = {query: dict(cut.qrels.get(query, {})) for query in dict.fromkeys([*cut.qrels, *pooled["query-id"]])}
    kinds = {query: dict(cut.match_types.get(query, {})) for query in qrels}
    for query, chunk, kind in pooled.loc[pooled["decided"] != "", ["query-id", "corpus-id", "decided"]].to_numpy():
        if query in bench.queries and chunk in bench.corpus:  # a slice of the benchmark has fewer
            qrels[query].setdefault(chunk, 1)
            kinds[query].setdefault(chunk, kind)
    return replace(
        bench, qrels={q: r for q, r in qrels.items() if r}, match_types={q: k for q, k in kinds.items() if k}
    )


def judged_pairs(bench: Benchmark, pooled: pd.DataFrame) -> set[Pair]:
    """All pairs that somebody or the string rule judged: the patients' own chunks, string matches, the pool."""
    own = {(query, chunk) for patient in bench.patients for query in patient.query_ids for chunk in patient.chunk_ids}
    held = {(query, chunk) for query, relevant in bench.qrels.items() for chunk in relevant}
    return own | held | set(pooled[COLUMNS[:2]].itertuples(index=False, name=None))


def judged_share(ranked: Iterable[Ranking], judged: set[Pair], k: int = 10) -> float:
    """% of the searches' first k chunks that were judged (judged@k)."""
    tops = [(r.query_id, chunk) for r in ranked for chunk in r.chunk_ids[:k]]
    return 100 * sum(pair in judged for pair in tops) / len(tops)
