"""CliniQ's baselines on a benchmark, and its findings as differences with intervals (CliniQ §4.2, §5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from drehr_utils import pipeline
from drehr_utils.config import START, Resampling
from drehr_utils.data.benchmark import MATCH_TYPES, Benchmark
from drehr_utils.evaluation import tables
from drehr_utils.evaluation.claims import verdict
from drehr_utils.evaluation.intervals import RESULT_COLUMNS, bootstrap, paired_randomization_test, percentile_interval
from drehr_utils.evaluation.metrics import Scores, means, of_group
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import Profile
from drehr_utils.search import expansion
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.retrievers import RetrieverSpec, profile_retrievers, retriever_scores

SPARSE, EXPANDED, RELATED, FUSED = "BM25", "BM25 + KG", "BM25 + KG + related", "RRF"
IN_PAPER = {EXPANDED: "BM25 + UMLS", START: "bge-base-en-v1.5"}  # ours that stand beside another name of the paper's
# Those that the paper's RRF joins with the expanded BM25 (§4.2.3).
_PAPERS_FUSED = ("NV-Embed-v2", "text-embedding-3-large")


@dataclass(frozen=True)
class BaselineSettings:
    """Which dense retrievers run. The first is the reference of paired tests; `fused` are those that RRF joins with
    the expanded BM25; `detailed` those that Tables 4 and 5 show: the first, the paper's choice, and all that the paper
    doesn't have. `skipped`: asked for, but without a server."""

    retrievers: tuple[RetrieverSpec, ...]
    reference: str
    fused: tuple[str, ...]
    detailed: tuple[str, ...]
    skipped: tuple[str, ...]


def settings(profile: Profile) -> BaselineSettings:
    """The profile's dense retrievers: MiniLM for the open data, the paper's list under `mimic`, or DREHR_RETRIEVERS."""
    run, skipped = profile_retrievers(profile)
    names = [spec.name for spec in run]
    theirs = set(tables.paper_figures("cliniq", 3)["system"]) - {"NV-Embed-v2"}
    fused = tuple(name for name in names if name in _PAPERS_FUSED) or tuple(names[:2])
    detailed = tuple(name for name in names if name == names[0] or name not in theirs)
    return BaselineSettings(tuple(run), names[0], fused, detailed, tuple(skipped))


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


# --- the paper's findings ----------------------------------------------------------------------------------------


def mean(values: pd.DataFrame, setting: str, group: str, metric: str) -> float:
    """Of a metrics.per_search frame's part; NaN where there is no search."""
    return float(means(of_group(values, setting, group)).get(metric, np.nan))


def difference(a: pd.DataFrame, b: pd.DataFrame, metric: str, resampling: Resampling) -> dict[str, float]:
    """`ours` = mean(a) - mean(b) of a metric, its 95% bootstrap interval (`low`, `high`), and `p`.

    `a` and `b` are evaluation's per-search frames. A draw is the same for both, so they may hold different searches
    (two match types); p, of the paired randomization test, is then NaN.
    """
    keys = ["search_id", "query_id", "patient"]
    a, b = (frame[frame["metric"] == metric].set_index(keys)["value"] for frame in (a, b))
    if a.empty or b.empty:
        return dict.fromkeys(("ours", "low", "high", "p"), np.nan)
    both = pd.concat([a, b], axis=1, keys=["a", "b"]).sort_index()
    queries, patients = (both.index.get_level_values(key) for key in keys[1:])
    parts = np.column_stack([both["a"].fillna(0), both["a"].notna(), both["b"].fillna(0), both["b"].notna()])

    def gap(sums: np.ndarray) -> np.ndarray:
        return sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3]

    low, high = map(float, percentile_interval(bootstrap(parts, gap, resampling, queries, patients)))
    found = {"ours": float(a.mean() - b.mean()), "low": low, "high": high, "p": np.nan}
    if both.notna().all(axis=None) and not np.isnan(low):
        found["p"] = float(paired_randomization_test(both["a"], both["b"], resampling, queries, patients))
    return found


@dataclass(frozen=True)
class Finding:
    """A claim of the paper: `a` scores above (`sign` +1) or below (-1) `b` in a setting, group and metric.

    `b` None: the best of the other systems, in the paper's table and in ours each. `b` the same as `a`: not two systems
    but two match types, `group` and that with the lowest mean of the other four."""

    claim: str
    a: str
    b: str | None
    setting: str
    group: str
    metric: str
    sign: int = 1


def paper_findings(chosen: BaselineSettings) -> list[Finding]:
    """What CliniQ says of its baselines (§4.2.1, §5.2-§5.4), each claim as comparisons that can be computed."""
    dense = chosen.reference
    return [
        Finding("BM25 beats dense on Multi-Patient drugs", SPARSE, dense, "multi", "drug", "MRR"),
        Finding("BM25 leads on Multi-Patient drugs", SPARSE, None, "multi", "drug", "MRR"),
        Finding("BM25 leads on Multi-Patient drugs", SPARSE, None, "multi", "drug", "NDCG@10"),
        Finding("expansion helps synonyms", EXPANDED, SPARSE, "single", "synonym", "MRR"),
        Finding("expansion helps hyponyms", EXPANDED, SPARSE, "single", "hyponym", "MRR"),
        Finding("expansion helps Single-Patient Retrieval", EXPANDED, SPARSE, "single", "all", "MRR"),
        Finding("expansion costs Multi-Patient precision", EXPANDED, SPARSE, "multi", "all", "MRR", -1),
        Finding("expansion helps Multi-Patient recall", EXPANDED, SPARSE, "multi", "all", "R@100"),
        Finding("related entities add noise", RELATED, EXPANDED, "single", "all", "MRR", -1),
        Finding("related entities reach implications", RELATED, EXPANDED, "single", "implication", "MRR"),
        Finding("RRF is best overall", FUSED, None, "single", "all", "Average"),
        Finding("RRF is best overall", FUSED, None, "multi", "all", "Average"),
        *(
            Finding("implication is the hardest match", system, system, "single", "implication", "MRR", -1)
            for system in (SPARSE, EXPANDED, *chosen.detailed, FUSED)
        ),
        Finding("dense beats BM25 within a note", dense, SPARSE, "single", "all", "MRR"),
        Finding("dense does not beat BM25 across patients", dense, SPARSE, "multi", "all", "MRR", -1),
        Finding("dense gains on synonyms", dense, SPARSE, "single", "synonym", "MRR"),
    ]


def paper_means() -> pd.DataFrame:
    """CliniQ's Tables 3, 4 and 5 as one frame (tables.paper_figures' columns), with the Average of each three metrics
    that Figures 1b and 1c draw."""
    figures = pd.concat([tables.paper_figures("cliniq", table) for table in (3, 4, 5)]).query("setting != ''")
    average = figures.groupby(["system", "setting", "group"], sort=False)["value"].mean().reset_index()
    return pd.concat([figures, average.assign(metric="Average")], ignore_index=True)


def findings_table(
    findings: Sequence[Finding], values: Mapping[str, pd.DataFrame], resampling: Resampling
) -> pd.DataFrame:
    """One row a finding: RESULT_COLUMNS with the claim, what is compared, its sign and our verdict.

    `values`: each system's metrics.per_search. `paper` is the paper's own difference (NaN where it prints none)."""
    published = paper_means().set_index(["system", "setting", "group", "metric"])["value"]

    def theirs(f: Finding, system: str, group: str) -> float:
        return published.get((IN_PAPER.get(system, system), f.setting, group, f.metric), np.nan)

    def ours(f: Finding, system: str, group: str) -> float:
        return mean(values[system], f.setting, group, f.metric)

    rows = []
    for f in findings:
        b, b_group = f.b, f.group
        if b is None:
            rivals = {s: ours(f, s, f.group) for s in values if s not in (f.a, RELATED)}
            b = pd.Series(rivals).fillna(-np.inf).idxmax()
            printed = published.xs((f.setting, f.group, f.metric), level=("setting", "group", "metric"))
            paper = printed.drop(IN_PAPER.get(f.a, f.a)).max()
        elif b == f.a:
            others = [kind for kind in MATCH_TYPES if kind != f.group]
            b_group = pd.Series({kind: ours(f, b, kind) for kind in others}).fillna(np.inf).idxmin()
            paper = min(theirs(f, b, kind) for kind in others)
        else:
            paper = theirs(f, b, f.group)
        sides = of_group(values[f.a], f.setting, f.group), of_group(values[b], f.setting, b_group)
        found = difference(*sides, f.metric, resampling)
        compared = f"{f.a}: {f.group} − {b_group}" if b == f.a else f"{f.a} − {b}"
        row = (f.claim, compared, f.setting, f.group, f.metric, theirs(f, f.a, f.group) - paper, *found.values())
        rows.append((*row, f.sign, verdict(found, f.sign)))
    return pd.DataFrame(rows, columns=["claim", *RESULT_COLUMNS, "sign", "verdict"])
