"""Agreement of two judges with each other and with the final judgments (CliniQ §5.1, Table 2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from sklearn.metrics import accuracy_score, cohen_kappa_score

from drehr_utils.config import Resampling
from drehr_utils.evaluation.intervals import RESULT_COLUMNS, bootstrap, bootstrap_interval, percentile_interval
from drehr_utils.evaluation.tables import paper_figures
from drehr_utils.papers.cliniq.judging import NOT_RELEVANT, Pair, combine_judgments


def relevance_kappa(a: Sequence[bool], b: Sequence[bool]) -> float:
    """Cohen's kappa of two judges' relevance, -1 to 1 (scikit-learn's)."""
    return float(cohen_kappa_score(np.asarray(a, dtype=int), np.asarray(b, dtype=int)))


def kappa_from_counts(counts: np.ndarray) -> np.ndarray:
    """Cohen's kappa [...] of 2 x 2 tables [..., 4]: pairs that both, the first only, the second only, neither accept.

    For the bootstrap, where scikit-learn's would be asked a thousand times."""
    both, first, second, neither = np.moveaxis(np.asarray(counts, dtype=float), -1, 0)
    n = both + first + second + neither
    p_first, p_second = (both + first) / n, (both + second) / n
    expected = p_first * p_second + (1 - p_first) * (1 - p_second)
    return ((both + neither) / n - expected) / (1 - expected)


def kappa_interval(
    a: Sequence[bool], b: Sequence[bool], notes: Sequence[str], resampling: Resampling
) -> tuple[float, float]:
    """95% percentile bootstrap interval of kappa; whole notes are drawn, for a note's pairs aren't independent."""
    a, b = np.asarray(a, dtype=bool), np.asarray(b, dtype=bool)
    cells = np.stack([a & b, a & ~b, ~a & b, ~a & ~b], axis=1)
    low, high = percentile_interval(bootstrap(cells, kappa_from_counts, resampling, patients=np.asarray(notes)))
    return float(low), float(high)


def agreement_rows(
    name: str, first: dict[Pair, str], second: dict[Pair, str], pairs: Sequence[Pair], resampling: Resampling
) -> pd.DataFrame:
    """Table 2's two rows of a comparison in RESULT_COLUMNS, times 100: kappa for relevance, accuracy for match types.

    `first` and `second` hold a label for relevant pairs; of the judged `pairs` a missing one is not relevant. The type
    is compared where both say relevant. Intervals draw whole notes."""
    first, second = ({p: t for p, t in judge.items() if t != NOT_RELEVANT} for judge in (first, second))
    notes = np.array([chunk_id.rpartition("_")[0] for _, chunk_id in pairs])
    a, b = (np.array([pair in judge for pair in pairs]) for judge in (first, second))
    kappa = (relevance_kappa(a, b), *kappa_interval(a, b, notes, resampling))
    types = [(first[pair], second[pair]) for pair, both in zip(pairs, a & b, strict=True) if both]
    same = np.array([float(x == y) for x, y in types])
    low, high = bootstrap_interval(same, resampling, patients=notes[a & b])
    accuracy = (float(accuracy_score(*zip(*types, strict=True))), float(low), float(high))
    rows = [
        (name, "", group, metric, np.nan, *(100 * value for value in values), np.nan)
        for group, metric, values in (("relevance", "kappa", kappa), ("match types", "accuracy", accuracy))
    ]
    return pd.DataFrame(rows, columns=RESULT_COLUMNS)


def table2(judges: Sequence[dict[Pair, str]], pairs: Sequence[Pair], resampling: Resampling) -> pd.DataFrame:
    """CliniQ's Table 2 times 100: two judges with each other, each with the final judgments, and the paper's figures.

    `judges` are the first, the second and the adjudicator's labels (judging.combine_judgments); of a single judge
    nothing can be said, and only the paper's rows are there."""
    frames = []
    if len(judges) > 1:
        first, second = judges[:2]
        final = combine_judgments(*judges)
        for name, a, b in (
            ("Judge A with judge B", first, second),
            ("Judge A with the final", first, final),
            ("Judge B with the final", second, final),
        ):
            frames.append(agreement_rows(name, a, b, pairs, resampling))
    paper = paper_figures("cliniq", 2)
    frames.append(paper.assign(paper=100 * paper["value"]).reindex(columns=RESULT_COLUMNS))
    return pd.concat(frames, ignore_index=True)
