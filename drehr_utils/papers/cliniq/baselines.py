"""CliniQ's baselines on a benchmark, and its findings as differences with intervals (CliniQ §4.2, §5)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd

from drehr_utils import pipeline
from drehr_utils.config import START, Resampling
from drehr_utils.data.benchmark import MATCH_TYPES, Benchmark, single_patient_tasks
from drehr_utils.errors import DataError
from drehr_utils.evaluation import tables
from drehr_utils.evaluation.intervals import RESULT_COLUMNS, bootstrap, paired_randomization_test, percentile_interval
from drehr_utils.evaluation.metrics import Scores, means, multi_patient, single_patient
from drehr_utils.knowledge import graph as graph_module
from drehr_utils.knowledge import vocabularies
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import Profile
from drehr_utils.search import embedding_api, expansion
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.retrievers import (
    REGISTRY,
    TASK,
    RetrieverSpec,
    as_in_cliniq,
    find_retriever,
    load_retriever,
    retriever_scores,
)

SPARSE, EXPANDED, RELATED, FUSED = "BM25", "BM25 + KG", "BM25 + KG + related", "RRF"
# Those that the paper's RRF joins with the expanded BM25 (§4.2.3).
_PAPERS_FUSED = ("NV-Embed-v2", "text-embedding-3-large")


@dataclass(frozen=True)
class BaselineSettings:
    """Which dense retrievers run. The first is the reference of paired tests; `fused` are those that RRF joins with
    the expanded BM25; `detailed` those that Tables 4 and 5 show. `skipped`: asked for, but without a server."""

    retrievers: tuple[RetrieverSpec, ...]
    fused: tuple[str, ...]
    detailed: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        return self.retrievers[0].name

    @property
    def in_paper(self) -> dict[str, str]:
        """Our systems that stand beside another name of the paper's tables: MiniLM has bge-base's place."""
        return {EXPANDED: "BM25 + UMLS", START: "bge-base-en-v1.5"}


def settings(profile: Profile) -> BaselineSettings:
    """The profile's dense retrievers: MiniLM for the open data, the paper's list (run as in CliniQ) under `mimic`.

    DREHR_RETRIEVERS, names or folders with commas between, replaces the list. An API's retriever is skipped where no
    server is set."""
    asked = [name.strip() for name in os.environ.get("DREHR_RETRIEVERS", "").split(",") if name.strip()]
    names = asked or profile.cliniq.retrievers
    specs = [as_in_cliniq(find_retriever(name)) for name in names]
    run = tuple(spec for spec in specs if not spec.api or embedding_api.is_configured())
    if not run:
        raise DataError("no dense retriever is left to run; name one in DREHR_RETRIEVERS")
    fused = tuple(spec.name for spec in run if spec.name in _PAPERS_FUSED) or tuple(spec.name for spec in run[:2])
    detailed = tuple(dict.fromkeys([run[0].name, *(spec.name for spec in run if spec.name == "NV-Embed-v2")]))
    return BaselineSettings(run, fused, detailed, tuple(spec.name for spec in specs if spec not in run))


def lexical_scores(
    benchmark: Benchmark, graph: graph_module.KnowledgeGraph, expansions: Sequence[str] = ()
) -> np.ndarray:
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
        folder = profile.cache / "embeddings"
        scores[spec.name] = retriever_scores(spec, benchmark, folder, progress=progress)
    scores[FUSED] = (scores[EXPANDED], *(scores[name] for name in chosen.fused))
    return scores


def registry_table(chosen: BaselineSettings) -> pd.DataFrame:
    """The registry as a frame, one row a retriever, and which of them run under these settings."""
    running = {spec.name: spec for spec in chosen.retrievers}
    rows = {}
    for name, listed in (REGISTRY | running).items():
        spec = running.get(name, listed)
        prefix = "instruction" if TASK in spec.query_prefix else "fixed" if spec.query_prefix else ""
        rows[name] = {
            "runs here": "yes" if name in running else "no server" if name in chosen.skipped else "",
            "query encoder": "its own" if spec.query_model else "shared",
            "pooling": "the server's" if spec.api else spec.pooling or "as saved",
            "query prefix": prefix,
            "passage prefix": "fixed" if spec.passage_prefix else "",
            "similarity": spec.similarity,
            "tokens": f"{spec.query_tokens} / {spec.passage_tokens}",
        }
    return pd.DataFrame(rows).T


def size_labels(chosen: BaselineSettings) -> dict[str, str]:
    """System -> its name with parameters and dimension, Table 3's second and third column; ours are counted."""
    published = tables.paper_figures("cliniq", 3).query("setting == ''").set_index(["system", "metric"])["value"]
    labels = {}
    for name in dict.fromkeys(published.index.get_level_values("system")):
        size = published.get((name, "size (M)"))
        parts = [] if size is None else [f"{size / 1000:g}B" if size >= 1000 else f"{size:g}M"]
        parts.append(f"{published[name, 'dimension']:g}")
        labels[name] = f"{name} ({', '.join(parts)})"
    for spec in chosen.retrievers:
        if spec.name not in labels and not spec.api:
            models = {id(m): m for m in load_retriever(spec, "cpu")}.values()
            millions = sum(p.numel() for m in models for p in m.parameters()) / 1e6
            labels[spec.name] = f"{spec.name} ({millions:.0f}M, {next(iter(models)).get_embedding_dimension()})"
    return labels


@cache
def public_graph(profile: Profile) -> KnowledgeGraph:
    """The open graph from the public vocabularies alone, without the concepts that were written for the open notes."""
    return vocabularies.open_graph(profile.cache.parent / "kg", None)


def trivial_searches(benchmark: Benchmark, least_chunks: int = 5) -> set[str]:
    """Single-Patient searches that CliniQ's public evaluation script leaves out: those where every chunk of the note
    is relevant, so that any order is perfect, and those in notes of fewer than `least_chunks` chunks."""
    return {
        task.search_id
        for task in single_patient_tasks(benchmark)
        if len(task.chunk_ids) < least_chunks or len(task.relevant) == len(task.chunk_ids)
    }


# --- the paper's findings ----------------------------------------------------------------------------------------


class Measured:
    """Per-search values of every system, measured once: `values(system, setting, group)`, a frame of evaluation's."""

    def __init__(self, benchmark: Benchmark, scores: Mapping[str, Scores]) -> None:
        self.benchmark, self.scores = benchmark, dict(scores)
        self._frames: dict[tuple[str, str, str | None], pd.DataFrame] = {}

    def values(self, system: str, setting: str, group: str = "all") -> pd.DataFrame:
        """`setting` is `single` or `multi`; `group` is `all`, a query type, or (single) a match type."""
        match_type = group if group in MATCH_TYPES else None
        key = (system, setting, match_type)
        if key not in self._frames:
            scores = self.scores[system]
            self._frames[key] = (
                single_patient(self.benchmark, scores, match_type)
                if setting == "single"
                else multi_patient(self.benchmark, scores)
            )
        frame = self._frames[key]
        return frame if group == "all" or match_type else frame[frame["query_type"] == group]

    def mean(self, system: str, setting: str, group: str, metric: str) -> float:
        values = means(self.values(system, setting, group))
        return float(values[metric]) if len(values) else float("nan")


def difference(a: pd.DataFrame, b: pd.DataFrame, metric: str, resampling: Resampling) -> dict[str, float]:
    """`ours` = mean(a) - mean(b) of a metric, its 95% bootstrap interval (`low`, `high`), and `p`.

    `a` and `b` are evaluation's per-search frames. A draw is the same for both, so they may hold different searches
    (two match types); p, of the paired randomization test, is then NaN.
    """
    keys = ["search_id", "query_id", "patient"]
    a, b = (frame[frame["metric"] == metric].set_index(keys)["value"] for frame in (a, b))
    found = dict.fromkeys(("ours", "low", "high", "p"), float("nan"))
    if a.empty or b.empty:
        return found
    found["ours"] = float(a.mean() - b.mean())
    both = pd.concat([a, b], axis=1, keys=["a", "b"]).sort_index()
    clusters = {"queries": both.index.get_level_values("query_id"), "patients": both.index.get_level_values("patient")}
    parts = np.column_stack([both["a"].fillna(0), both["a"].notna(), both["b"].fillna(0), both["b"].notna()])
    draws = bootstrap(
        parts, lambda sums: sums[..., 0] / sums[..., 1] - sums[..., 2] / sums[..., 3], resampling, **clusters
    )
    found["low"], found["high"] = map(float, percentile_interval(draws))
    if both.notna().all(axis=None) and not np.isnan(found["low"]):
        found["p"] = float(paired_randomization_test(both["a"], both["b"], resampling, **clusters))
    return found


@dataclass(frozen=True)
class Finding:
    """A claim of the paper: `a` scores above (`sign` +1) or below (-1) `b` in a setting, group and metric.

    `b` None: the best of the other systems of Table 5, in the paper's table and in ours each. `b_group`: another
    match type to compare with, `hardest other`: that with the lowest mean among the other four."""

    claim: str
    a: str
    b: str | None
    setting: str
    group: str
    metric: str
    sign: int = 1
    b_group: str | None = None


def paper_findings(chosen: BaselineSettings) -> list[Finding]:
    """What CliniQ says of its baselines (§4.2.1, §5.2-§5.4), each claim as comparisons that can be computed."""
    dense = chosen.reference
    hardest = [
        Finding("implication is the hardest match", system, system, "single", "implication", "MRR", -1, "hardest other")
        for system in (SPARSE, EXPANDED, *chosen.detailed, FUSED)
    ]
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
        *hardest,
        Finding("dense beats BM25 within a note", dense, SPARSE, "single", "all", "MRR"),
        Finding("dense does not beat BM25 across patients", dense, SPARSE, "multi", "all", "MRR", -1),
        Finding("dense gains on synonyms", dense, SPARSE, "single", "synonym", "MRR"),
    ]


def paper_means() -> pd.DataFrame:
    """CliniQ's Tables 3, 4 and 5 as one frame (tables.paper_figures' columns), with the Average of each three metrics
    that Figures 1b and 1c draw."""
    figures = pd.concat([tables.paper_figures("cliniq", table) for table in (3, 4, 5)])
    figures = figures[figures["setting"] != ""]
    average = figures.groupby(["system", "setting", "group"], sort=False)["value"].mean().reset_index()
    return pd.concat([figures, average.assign(metric="Average")], ignore_index=True)


def findings_table(
    findings: Sequence[Finding],
    measured: Measured,
    names: Mapping[str, str],
    resampling: Resampling,
) -> pd.DataFrame:
    """One row a finding: RESULT_COLUMNS with the claim, what is compared, its sign and our verdict.

    `paper` is the paper's own difference (NaN where it prints none), `names` maps our systems to the paper's. The
    rivals of a `b` of None are the systems measured, and in the paper those of the same table.
    """
    published = paper_means().set_index(["system", "setting", "group", "metric"])["value"]

    def theirs(system: str, setting: str, group: str, metric: str) -> float:
        return float(published.get((names.get(system, system), setting, group, metric), float("nan")))

    rows = []
    for f in findings:
        b, b_paper, b_group = f.b, f.b, f.group
        paper_b = theirs(f.b, f.setting, f.group, f.metric) if f.b else float("nan")
        if f.b is None:
            others = [system for system in measured.scores if system not in (f.a, RELATED)]
            b = max(others, key=lambda s: measured.mean(s, f.setting, f.group, f.metric))
            rivals = published.xs((f.setting, f.group, f.metric), level=("setting", "group", "metric"))
            rivals = rivals.drop(names.get(f.a, f.a), errors="ignore")
            b_paper, paper_b = rivals.idxmax(), rivals.max()
        elif f.b_group:
            types = [m for m in MATCH_TYPES if m != f.group and len(measured.values(b, f.setting, m))]
            b_group = min(types, key=lambda m: measured.mean(b, f.setting, m, f.metric), default=f.group)
            b_paper = min((m for m in MATCH_TYPES if m != f.group), key=lambda m: theirs(f.b, f.setting, m, f.metric))
            paper_b = theirs(f.b, f.setting, b_paper, f.metric)
        ours = difference(
            measured.values(f.a, f.setting, f.group), measured.values(b, f.setting, b_group), f.metric, resampling
        )
        compared = f"{f.a} − {b}" if not f.b_group else f"{f.a}: {f.group} − {b_group}"
        row = {"system": compared, "setting": f.setting, "group": f.group, "metric": f.metric, **ours}
        row["paper"] = theirs(f.a, f.setting, f.group, f.metric) - paper_b
        rows.append({"claim": f.claim, **row, "sign": f.sign, "verdict": verdict(ours, f.sign)})
    return pd.DataFrame(rows)[["claim", *RESULT_COLUMNS, "sign", "verdict"]]


def verdict(ours: Mapping[str, float], sign: int) -> str:
    """`holds` or `reversed` where the interval lies on one side of 0, else `undecided`; `not measured` for NaN."""
    low, high = sorted((sign * ours["low"], sign * ours["high"]))
    if np.isnan(low):
        return "not measured"
    return "holds" if low > 0 else "reversed" if high < 0 else "undecided"


def sentence(row: Mapping[str, object], decimals: Callable[[float], str] = "{:+.1f}".format) -> str:
    """A finding in words, every number computed."""
    where = {"single": "Single-Patient", "multi": "Multi-Patient"}[row["setting"]]
    paper = f", the paper's {decimals(row['paper'])}" if row["paper"] == row["paper"] else ""
    return (
        f"{row['system']}, {where} {row['group']} {row['metric']}: {decimals(row['ours'])} "
        f"[{decimals(row['low'])}, {decimals(row['high'])}]{paper}"
    )
