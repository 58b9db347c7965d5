"""Does a retriever notice a denial? Texts that deny a query against texts that affirm it (Radiology §3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from drehr_utils.knowledge.negation import polarity
from drehr_utils.search.fusion import tie_keys


@dataclass(frozen=True)
class PolarityPools:
    """For each query id, positions of the corpus' texts that affirm it and of those that deny it; both non-empty."""

    affirmed: dict[str, np.ndarray]
    denied: dict[str, np.ndarray]

    @property
    def pairs(self) -> int:
        return sum(len(self.affirmed[q]) * len(self.denied[q]) for q in self.affirmed)


def polarity_pools(
    corpus: Mapping[str, str], queries: Mapping[str, str], names_of: Callable[[str], Sequence[str]]
) -> PolarityPools:
    """The texts that affirm and deny each query, by the names of its concept; queries without both are left out."""
    texts = [text.lower() for text in corpus.values()]
    pools = PolarityPools({}, {})
    for query_id, query in queries.items():
        names = {query.lower(), *(name.lower() for name in names_of(query))}
        told = [(i, polarity(text, names)) for i, text in enumerate(texts) if any(name in text for name in names)]
        yes = np.array([i for i, p in told if p == "affirmed"], dtype=int)
        no = np.array([i for i, p in told if p == "denied"], dtype=int)
        if len(yes) and len(no):
            pools.affirmed[query_id], pools.denied[query_id] = yes, no
    return pools


def denial_above(
    pools: PolarityPools, query_ids: Sequence[str], chunk_ids: Sequence[str], scores: np.ndarray
) -> pd.DataFrame:
    """How often a text that denies the query ranks above one that affirms it, percent of the pairs of each query.

    `scores` [queries, texts]; equal scores are ordered as in a search (fusion.tie_keys). 50 is blindness to
    negation, 0 is never. Rows as metrics.single_patient's, so intervals.result_rows gives interval and test."""
    ties = tie_keys(query_ids, chunk_ids).astype(float)
    row_of = {query_id: row for row, query_id in enumerate(query_ids)}
    rows = []
    for query_id, yes in pools.affirmed.items():
        row, no = row_of[query_id], pools.denied[query_id]
        gap = scores[row, no][:, None] - scores[row, yes][None, :]
        tied = ties[row, no][:, None] < ties[row, yes][None, :]  # a smaller key comes first
        share = 100 * float(np.where(gap == 0, tied, gap > 0).mean())
        rows.append((query_id, query_id, "", "denial above, %", share))
    return pd.DataFrame(rows, columns=["search_id", "query_id", "query_type", "metric", "value"])
