"""Agreement of two judges with each other and with the final judgments (CliniQ §5.1, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from drehr_utils.config import Resampling
from drehr_utils.evaluation.intervals import RESULT_COLUMNS, bootstrap, bootstrap_interval, percentile_interval
from drehr_utils.papers.cliniq.judging import NOT_RELEVANT, Pair


def kappa(counts: np.ndarray) -> np.ndarray:
    """Cohen's kappa [...] of 2 x 2 tables [..., 4]: pairs that both, the first only, the second only, neither accept.

    NaN where both give all pairs one answer. (scikit-learn's takes one table; the bootstrap asks for a thousand.)"""
    both, first, second, neither = np.moveaxis(np.asarray(counts, dtype=float), -1, 0)
    with np.errstate(invalid="ignore"):
        n = both + first + second + neither
        p_first, p_second = (both + first) / n, (both + second) / n
        expected = p_first * p_second + (1 - p_first) * (1 - p_second)
        return ((both + neither) / n - expected) / (1 - expected)


def agreement_rows(
    name: str, first: dict[Pair, str], second: dict[Pair, str], pairs: Sequence[Pair], resampling: Resampling
) -> pd.DataFrame:
    """Table 2's two rows of a comparison in RESULT_COLUMNS, times 100: kappa for relevance, accuracy for match types.

    `first` and `second` hold a label for relevant pairs; of the judged `pairs` a missing one is not relevant. The type
    is compared where both say relevant. 95% intervals draw whole notes, for a note's pairs aren't independent. What
    can't be measured is NaN; `why` says so."""
    first, second = ({p: t for p, t in judge.items() if t != NOT_RELEVANT} for judge in (first, second))
    notes = np.array([chunk_id.rpartition("_")[0] for _, chunk_id in pairs])
    a, b = (np.array([pair in judge for pair in pairs], dtype=bool) for judge in (first, second))
    cells = np.stack([a & b, a & ~b, ~a & b, ~a & ~b], axis=1)
    interval = percentile_interval(bootstrap(cells, kappa, resampling, patients=notes))
    relevance = (float(kappa(cells.sum(axis=0))), *interval)
    same = np.array([first[pair] == second[pair] for pair, both in zip(pairs, a & b, strict=True) if both], dtype=float)
    types = (same.mean() if len(same) else np.nan, *bootstrap_interval(same, resampling, patients=notes[a & b]))
    compared = (
        ("relevance", "kappa", relevance, "both judges give all pairs one answer"),
        ("match types", "accuracy", types, "no pair that both judges call relevant"),
    )
    rows = []
    for group, metric, values, fault in compared:
        why = "" if not np.isnan(values[0]) else fault if len(pairs) else "no pair was judged"
        rows.append((name, "", group, metric, np.nan, *(100 * np.array(values)), np.nan, why))
    return pd.DataFrame(rows, columns=[*RESULT_COLUMNS, "why"])
