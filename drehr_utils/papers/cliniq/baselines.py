"""CliniQ's baselines on a benchmark, and their differences with intervals and tests (CliniQ §4.2, §5)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from drehr_utils import pipeline
from drehr_utils.config import START, Resampling
from drehr_utils.data.benchmark import Benchmark
from drehr_utils.evaluation import claims, intervals, tables
from drehr_utils.evaluation.metrics import MULTI_METRICS, SINGLE_METRICS, Scores, means, of_group
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import Profile
from drehr_utils.search import expansion
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.retrievers import RetrieverSpec, profile_retrievers, retriever_scores

SPARSE, EXPANDED, RELATED, FUSED = "BM25", "BM25 + KG", "BM25 + KG + related", "RRF"
IN_PAPER = {EXPANDED: "BM25 + UMLS", START: "bge-base-en-v1.5"}  # ours that stand beside another name of the paper's
METRICS = {"single": tuple(SINGLE_METRICS), "multi": tuple(MULTI_METRICS)}
Side = tuple[str | tuple[str, str], str, str]  # a system, or two for the first's gain on the second; setting; group
# Those that the paper's RRF joins with the expanded BM25 (§4.2.3).
_PAPERS_FUSED = ("NV-Embed-v2", "text-embedding-3-large")


@dataclass(frozen=True)
class BaselineSettings:
    """Which dense retrievers run. The first is the reference of paired tests; `fused` are those that RRF joins with
    the expanded BM25; `detailed` those that Tables 4 and 5 show: the first, the paper's choice, and all that the paper
    doesn't have. `skipped`: asked for, and what each lacks."""

    retrievers: tuple[RetrieverSpec, ...]
    reference: str
    fused: tuple[str, ...]
    detailed: tuple[str, ...]
    skipped: dict[str, str]


def settings(profile: Profile) -> BaselineSettings:
    """The profile's dense retrievers: MiniLM for the open data, the paper's list under `mimic`, or DREHR_RETRIEVERS."""
    run, skipped = profile_retrievers(profile)
    names = [spec.name for spec in run]
    theirs = set(tables.paper_figures("cliniq", 3)["system"]) - {"NV-Embed-v2"}
    fused = tuple(name for name in names if name in _PAPERS_FUSED) or tuple(names[:2])
    detailed = tuple(name for name in names if name == names[0] or name not in theirs)
    return BaselineSettings(tuple(run), names[0], fused, detailed, skipped)


def lexical_scores(benchmark: Benchmark, graph: KnowledgeGraph, expansions: Sequence[str] = ()) -> np.ndarray:
    """BM25's score matrix [queries, chunks], its queries expanded by the graph (§4.2.1)."""
    queries = [expansion.expand_query(text, graph, expansions) for text in benchmark.queries.values()]
    return BM25(benchmark.corpus.values()).scores(queries)


def system_scores(profile: Profile, benchmark: Benchmark, progress: bool = False) -> dict[str, Scores]:
    """Every baseline's scores, in Table 3's order: sparse, expanded, dense, and their fusion (§4.2)."""
    chosen, graph = settings(profile), pipeline.knowledge_graph(profile)
    scores: dict[str, Scores] = {
        SPARSE: lexical_scores(benchmark, graph),
        EXPANDED: lexical_scores(benchmark, graph, ("synonyms", "hyponyms")),
        RELATED: lexical_scores(benchmark, graph, ("synonyms", "hyponyms", "related")),
    }
    for spec in chosen.retrievers:
        scores[spec.name] = retriever_scores(spec, benchmark, profile.cache / "embeddings", progress=progress)
    return scores | {FUSED: (scores[EXPANDED], *(scores[name] for name in chosen.fused))}


# --- what is compared ---------------------------------------------------------------------------------------------


def mean(values: pd.DataFrame, setting: str, group: str, metric: str) -> float:
    """Of a metrics.per_search frame's part; NaN where there is no search."""
    return float(means(of_group(values, setting, group)).get(metric, np.nan))


def per_search(values: Mapping[str, pd.DataFrame], of: str | tuple[str, str], setting: str, group: str) -> pd.DataFrame:
    """A system's values of a setting and group, by search; of a pair of systems, what the first has over the second."""
    found = []
    for system in (of,) if isinstance(of, str) else of:
        frame = of_group(values[system], setting, group)
        keys = [key for key in frame if key not in ("value", "seed")]
        found.append(frame.groupby(keys, sort=False, dropna=False)["value"].mean())  # over trainings, where several
    return (found[0] if len(found) == 1 else found[0] - found[1]).rename("value").reset_index()


def compare(
    values: Mapping[str, pd.DataFrame], pairs: Iterable[tuple[Side, Side]], resampling: Resampling, *metrics: str
) -> pd.DataFrame:
    """A row a pair of sides and metric (default: the setting's three): `first`, `second`, `metric`, intervals.contrast.

    `values`: each system's metrics.per_search. A side is a system, or a pair of systems for the first's gain on the
    second, with a setting and a group. Sides of two settings are compared metric by metric in their order."""
    rows, none = [], pd.DataFrame()
    for first, second in pairs:
        asked = [metrics or METRICS[side[1]] for side in (first, second)]
        sides = [dict(list(per_search(values, *side).groupby("metric"))) for side in (first, second)]
        for a, b in zip(*asked, strict=True):
            found = intervals.contrast(sides[0].get(a, none), sides[1].get(b, none), resampling)
            rows.append({"first": first, "second": second, "metric": a, **found})
    return pd.DataFrame(rows)


def in_words(rows: pd.DataFrame, sign: int | Sequence[int] = 1) -> str:
    """`compare`'s rows as a claim's cell: each of up to four, with a word where it isn't significant and of this sign;
    of more, how many are, and which are significant the other way (up to three by name)."""
    signs = np.broadcast_to(sign, len(rows))
    found = [claims.verdict(row, s) for (_, row), s in zip(rows.iterrows(), signs, strict=True)]
    names = [row["metric"] if rows["metric"].is_unique else _name(row) for _, row in rows.iterrows()]
    if len(rows) <= 4:
        marks = [{claims.HOLDS: "", claims.REVERSED: " (opposite)"}.get(v, " (not significant)") for v in found]
        told = zip(names, rows["ours"], rows["low"], rows["high"], marks, strict=True)
        return "; ".join(f"{name} {ours:+.1f} [{low:+.1f}, {high:+.1f}]{mark}" for name, ours, low, high, mark in told)
    opposite = [name for name, v in zip(names, found, strict=True) if v == claims.REVERSED]
    which = f" ({'; '.join(opposite)})" if 0 < len(opposite) <= 3 else ""
    so = f"{found.count(claims.HOLDS)} of {len(found)} comparisons have the paper's sign, {len(opposite)} the opposite"
    return f"{so}{which}; from {rows['ours'].min():+.1f} to {rows['ours'].max():+.1f}"


def _name(row: pd.Series) -> str:
    """What the sides of a comparison are, and where they differ: system (or gain), setting, group; then the metric."""
    sides = zip(row["first"], row["second"], strict=True)
    sides = ([" over ".join((part,) if isinstance(part, str) else part) for part in both] for both in sides)
    parts = [a if a == b else f"{a} against {b}" for a, b in sides]
    return ", ".join([*(part for part in parts if part != "all"), row["metric"]])


def paper_means() -> pd.DataFrame:
    """CliniQ's Tables 3, 4 and 5 as one frame (tables.paper_figures' columns), with the Average of each three metrics
    that Figures 1b and 1c draw."""
    figures = pd.concat([tables.paper_figures("cliniq", table) for table in (3, 4, 5)]).query("setting != ''")
    average = figures.groupby(["system", "setting", "group"], sort=False)["value"].mean().reset_index()
    return pd.concat([figures, average.assign(metric="Average")], ignore_index=True)
