"""Does a retriever notice a denial? Texts that deny a query against texts that affirm it (Radiology §3.4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from drehr_utils import pipeline
from drehr_utils.config import Resampling
from drehr_utils.evaluation import intervals
from drehr_utils.evaluation.metrics import NO_PATIENT
from drehr_utils.knowledge.negation import polarity
from drehr_utils.papers.radiology.retrieval import Score
from drehr_utils.profiles import Profile
from drehr_utils.search.fusion import tie_keys

X, NO_X, SHIFT = "X", "no X", "no X less X"  # the query as it is, with "no" before it, and what the "no" changes


@dataclass(frozen=True)
class PolarityTask:
    """Queries that some texts affirm and others deny, those texts, and for each query id the positions of either."""

    corpus: dict[str, str]
    queries: dict[str, str]
    affirmed: dict[str, np.ndarray]
    denied: dict[str, np.ndarray]

    @classmethod
    def of(
        cls, corpus: Mapping[str, str], queries: Mapping[str, str], names_of: Callable[[str], Sequence[str]]
    ) -> PolarityTask:
        """By the names of each query's concept; queries without both, and texts without a query, are left out."""
        lowered = [text.lower() for text in corpus.values()]
        found: dict[str, dict[str, list[int]]] = {}
        for query_id, query in queries.items():
            names = {query.lower(), *(name.lower() for name in names_of(query))}
            told = [(i, polarity(text, names)) for i, text in enumerate(lowered) if any(name in text for name in names)]
            pools = {kind: [i for i, said in told if said == kind] for kind in ("affirmed", "denied")}
            if all(pools.values()):
                found[query_id] = pools
        used = sorted({i for pools in found.values() for rows in pools.values() for i in rows})
        affirmed, denied = (
            {query_id: np.searchsorted(used, pools[kind]) for query_id, pools in found.items()}
            for kind in ("affirmed", "denied")
        )
        ids = list(corpus)
        return cls({ids[i]: corpus[ids[i]] for i in used}, {q: queries[q] for q in found}, affirmed, denied)

    @property
    def pairs(self) -> int:
        return sum(len(self.affirmed[q]) * len(self.denied[q]) for q in self.queries)


def polarity_task(profile: Profile, asked: str) -> PolarityTask:
    """Of chunks of OpenCliniQ's test split.

    `asked`: the benchmark's own disease `queries`, which rarely are denied, or the diseases and findings of the open
    graph (`concepts`). Drugs and procedures are left out: "stop the drug" is no denial of it. A concept is found by all
    its names in the graph but those of fewer than four letters, which mean too many things. Raises ValueError for
    another `asked`."""
    bench, graph = pipeline.benchmark(profile, "test"), pipeline.knowledge_graph(profile)
    if asked == "queries":
        wanted = {q: text for q, text in bench.queries.items() if bench.query_types[q] == "disease"}
    elif asked == "concepts":
        own = (c for c, sources in graph.sources.items() if "OPEN" in sources)
        wanted = {c: graph.cui2pt[c] for c in own if graph.types.get(c) in ("disease", "finding")}
    else:
        raise ValueError(f"asked {asked!r} is neither queries nor concepts")

    def names_of(query: str) -> list[str]:
        concepts = graph.cuis(query)
        return [n for n in graph.synonyms(concepts[0]) if len(n) > 3] if len(concepts) == 1 else []

    return PolarityTask.of(bench.corpus, wanted, names_of)


def denial_above(task: PolarityTask, scores: np.ndarray) -> pd.DataFrame:
    """How often a text that denies the query ranks above one that affirms it, percent of the pairs of each query.

    `scores` [queries, texts]; equal scores are ordered as in a search (fusion.tie_keys). 50 is blindness to
    negation, 0 is never. Rows as metrics.single_patient's, so intervals.result_rows gives interval and test."""
    ties = tie_keys(task.queries, task.corpus).astype(float)
    rows = []
    for row, query_id in enumerate(task.queries):
        yes, no = task.affirmed[query_id], task.denied[query_id]
        gap = scores[row, no][:, None] - scores[row, yes][None, :]
        tied = ties[row, no][:, None] < ties[row, yes][None, :]  # a smaller key comes first
        share = 100 * float(np.where(gap == 0, tied, gap > 0).mean())
        rows.append((query_id, query_id, "", "denial above, %", share))
    return pd.DataFrame(rows, columns=NO_PATIENT)


def awareness_rows(task: PolarityTask, setting: str, systems: dict[str, Score], resampling: Resampling) -> pd.DataFrame:
    """Long-form rows of denial_above for X, NO_X and SHIFT; p against the starting encoder, which must be among the
    systems."""
    values: dict[str, dict[str, pd.DataFrame]] = {}
    for system, score in systems.items():
        plain, negated = (
            denial_above(task, score([no + query for query in task.queries.values()], list(task.corpus.values())))
            for no in ("", "no ")
        )
        shift = negated.assign(value=negated["value"] - plain["value"])
        values[system] = {X: plain, NO_X: negated, SHIFT: shift}
    frames = []
    for system, by_group in values.items():
        for group, found in by_group.items():
            start = None if system == pipeline.START else values[pipeline.START][group]
            frames.append(intervals.result_rows(system, setting, group, found, resampling, start))
    return pd.concat(frames, ignore_index=True)
