"""What CAPR's paper claims, held against our values; what wrong answers share with their queries (CAPR §4.4, §4.5)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from drehr_utils.config import Resampling
from drehr_utils.evaluation import intervals
from drehr_utils.evaluation.claims import verdict
from drehr_utils.evaluation.medquad import MedQuad, best_first
from drehr_utils.papers.capr import systems
from drehr_utils.papers.capr.passages import Passage
from drehr_utils.papers.capr.systems import Task
from drehr_utils.profiles import Profile
from drehr_utils.search.bm25 import BM25


def common(values: pd.DataFrame, others: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two systems' per-query values, cut to the searches of both."""
    both = set(values["search_id"]) & set(others["search_id"])
    return values[values["search_id"].isin(both)], others[others["search_id"].isin(both)]


def comparisons(
    values: Mapping[tuple[str, str], pd.DataFrame],
    pairs: Iterable[tuple[str, str]],
    tasks: Iterable[str],
    paper: Mapping[tuple[str, str, str], float],
    resampling: Resampling,
) -> pd.DataFrame:
    """One row a task, pair of systems and metric, of those measured there: does the first beat the second?

    `values`: per-query values (medquad.recall_values) of (system, task); `paper`: its value of (system, task, metric).
    Returns `task, first, second, metric, ours, low, high, paper, p, verdict`: differences in points, on the queries
    that both answered, with their 95% interval, and the paired randomization test's p. The verdict is on the paper's
    own finding: where its figures have `first` below `second`, that is what may hold here; where it has none, that it
    is above."""
    rows = []
    for task, (first, second) in itertools.product(tasks, pairs):
        if {(first, task), (second, task)} <= values.keys():
            both = common(values[first, task], values[second, task])
            for metric, gain in intervals.gain_rows(first, "", task, *both, resampling).set_index("metric").iterrows():
                printed = paper.get((first, task, metric), math.nan) - paper.get((second, task, metric), math.nan)
                said = verdict(gain, -1 if printed < 0 else 1)
                rows.append((task, first, second, metric, *gain[["ours", "low", "high"]], printed, gain["p"], said))
    columns = ["task", "first", "second", "metric", "ours", "low", "high", "paper", "p", "verdict"]
    return pd.DataFrame(rows, columns=columns)


def label_counts(task: Task) -> pd.DataFrame:
    """Of each query's candidates how many are `answers`, how many have its `entity`, its `aspect`, and `all`."""
    data, ids, rows = task.data, list(task.data.passages), []
    for (query_id, text), row in zip(data.queries.items(), task.candidates, strict=True):
        entity, aspect = text.rsplit(" ; ", 1)
        found = [(ids[c] in data.qrels[query_id], task.pool[c]) for c in row]
        has = [(right, entity in passage.entities, passage.aspect == aspect, True) for right, passage in found]
        rows.append(np.sum(has, axis=0))
    return pd.DataFrame(rows, columns=["answers", "entity", "aspect", "all"])


def mistakes(data: MedQuad, pool: Sequence[Passage], candidates: np.ndarray, scores: np.ndarray) -> pd.Series:
    """What the first passage has in common with the query where it is no answer (CAPR §4.5).

    The number of such queries, and of those the share, 0 to 100, with the query's aspect, its entity, or neither."""
    found = []
    for (query_id, text), at in zip(data.queries.items(), best_first(data, candidates, scores)[:, 0], strict=True):
        entity, aspect = text.rsplit(" ; ", 1)
        if pool[at].id not in data.qrels[query_id]:
            found.append((pool[at].aspect == aspect, entity in pool[at].entities))
    of = pd.DataFrame(found, columns=["same aspect", "same entity"], dtype=bool)
    of["neither"] = ~of.any(axis=1)
    return pd.concat([pd.Series({"wrong first passages": len(found)}), 100 * of.mean()])


def telling(data: MedQuad, candidates: np.ndarray, before: np.ndarray, after: np.ndarray) -> dict[str, int]:
    """What a query shows of a training -> its place: the first that the scores `after` answer at the first place and
    those `before` don't, and the first the other way round; the first of all where there is neither."""
    ids = list(data.passages)
    firsts = [best_first(data, candidates, scores)[:, 0] for scores in (before, after)]
    right = [[ids[at] in data.qrels[q] for q, at in zip(data.queries, first, strict=True)] for first in firsts]
    pairs = list(zip(*right, strict=True))
    kinds = {"first after training, not before": (False, True), "first before training, not after": (True, False)}
    told = {f"answer {said}": pairs.index(kind) for said, kind in kinds.items() if kind in pairs}
    return told or {"no query's first place was won or lost": 0}


def near(query: str, texts: Iterable[Passage], n: int = 64) -> list[Passage]:
    """`n` of the labelled passages: first those with the query's entity and aspect, then those with one of them."""
    entity, _, aspect = query.partition(" ; ")
    labelled = [p for p in texts if p.labelled]
    return sorted(labelled, key=lambda p: -((entity in p.entities) + (p.aspect == aspect)))[:n]


def scores_of(profile: Profile, names: Iterable[str], query: str, texts: Sequence[Passage]) -> dict[str, np.ndarray]:
    """Each system's scores of the passages for a query; BM25 counts its words in these passages alone."""
    found = {}
    for name in names:
        if name == "BM25":
            found[name] = BM25([p.text for p in texts]).scores([query])[0]
        else:
            with torch.no_grad():
                model = systems.trained_model(profile, name)[0].eval()
                found[name] = model([query], texts)[0].numpy(force=True)
    return found


def ranked(query: str, texts: Sequence[Passage], scores: Mapping[str, np.ndarray], k: int = 3) -> pd.DataFrame:
    """The first `k` of the passages for a query by each system's scores: ✓ where one has the query's entity
    and aspect, its heading in brackets, the entity in capitals."""
    (entity, _, aspect), found = query.partition(" ; "), {}
    for name, of in scores.items():
        best = [texts[i] for i in np.argsort(-of, kind="stable")[:k]]
        ticks = ["✓ " * (p.aspect == aspect and entity in p.entities) for p in best]
        shown = [p.text.replace(entity, entity.upper()) for p in best]
        found[name] = [f"{t}[{p.aspect}] {text}" for t, p, text in zip(ticks, best, shown, strict=True)]
    return pd.DataFrame(found, index=range(1, min(k, len(texts)) + 1))
