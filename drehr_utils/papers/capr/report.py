"""What CAPR's paper claims, held against our values: differences, paired tests and the sentences that say so (§4.4)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.stats

from drehr_utils.config import Resampling
from drehr_utils.evaluation import intervals
from drehr_utils.evaluation.medquad import MedQuad
from drehr_utils.evaluation.tables import SIGNIFICANT
from drehr_utils.papers.capr.passages import Passage
from drehr_utils.search.fusion import rank, tie_keys


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same queries of a task."""

    task: str
    better: str  # by the paper's claim
    than: str
    ours: float  # difference of the means, points
    p: float  # two-sided, paired randomization test
    paper: float  # its difference; NaN where it has none

    @property
    def verdict(self) -> str:
        """Of the paper's own finding: where its figures have `better` below `than`, that is what may hold here."""
        if self.p >= SIGNIFICANT:
            return "not shown"
        return "the reverse" if (self.ours > 0) == (self.paper < 0) else "holds"

    def __str__(self) -> str:
        paper = "" if pd.isna(self.paper) else f", the paper's {self.paper:+.1f}"
        return f"{self.better} against {self.than} {self.ours:+.1f} (p = {self.p:.4f}{paper}): {self.verdict}"


@dataclass
class Report:
    """Per-query values (medquad.recall_values) of every system and task, and the paper's figures of one setting.

    `in_paper` maps our systems to the paper's. The metric of all comparisons is R@1."""

    values: dict[tuple[str, str], pd.DataFrame]
    figures: pd.DataFrame
    in_paper: dict[str, str]
    resampling: Resampling
    metric: str = "R@1"

    def mean(self, system: str, task: str) -> float:
        """R@1 of a system on a task, 0 to 100."""
        frame = self.values[system, task]
        return float(frame.loc[frame["metric"] == self.metric, "value"].mean())

    def compare(self, better: str, than: str, task: str) -> Comparison:
        """The claim that `better` beats `than` on a task, on the queries that both answered."""
        ours, base = common(self.values[better, task], self.values[than, task])
        rows = intervals.gain_rows(better, "", task, ours, base, self.resampling).set_index("metric")
        ours = rows.loc[self.metric, "ours"]
        paper = self._printed(better, task) - self._printed(than, task)
        return Comparison(task, better, than, float(ours), float(rows.loc[self.metric, "p"]), paper)

    def table(self, pairs: Sequence[tuple[str, str]], tasks: Sequence[str]) -> pd.DataFrame:
        """One row a claim and task, for those that both systems were measured on."""
        claims = [self.compare(a, b, t) for t in tasks for a, b in pairs if {(a, t), (b, t)} <= self.values.keys()]
        rows = [
            (c.task, c.better, c.than, f"{c.ours:+.1f}", f"{c.paper:+.1f}", f"{c.p:.4f}", c.verdict) for c in claims
        ]
        return pd.DataFrame(rows, columns=["task", "better", "than", "ours", "paper", "p", "the paper's finding"])

    def gains(self, systems: Sequence[str], start: str, task: str) -> str:
        """The sentence that says which systems beat the starting encoder."""
        compared = [self.compare(name, start, task) for name in systems]
        won = [c.better for c in compared if c.verdict == "holds"]
        lost = [f"{c.better} ({c.ours:+.1f}, p = {c.p:.4f})" for c in compared if c.verdict != "holds"]
        said = f"{len(won)} of {len(compared)} trained systems beat {start} with p < {SIGNIFICANT}"
        return f"{said} ({', '.join(won) or 'none'})" + (f"; not so {', '.join(lost)}." if lost else ".")

    def ranking(self, systems: Sequence[str], task: str) -> str:
        """The systems with their R@1 on the queries that all of them answered, best first, and how many those are.

        Where none or all of them are right, the bootstrap's interval has no width; Clopper and Pearson's is given."""
        both = set.intersection(*(set(self.values[name, task]["search_id"]) for name in systems))
        mean, n = {}, len(both)
        for name in systems:
            frame = self.values[name, task].query("metric == @self.metric and search_id in @both")
            mean[name] = float(frame["value"].mean())
        said = ", ".join(f"{name} {mean[name]:.1f}" for name in sorted(systems, key=lambda name: -mean[name]))
        said += f" ({n} queries"
        for right, percent in ((0, 0.0), (n, 100.0)):
            if percent in mean.values():
                low, high = scipy.stats.binomtest(right, n).proportion_ci(0.95)
                said += f"; {right} of {n} right is compatible with {100 * low:.0f}% to {100 * high:.0f}%"
        return said + ")"

    def _printed(self, system: str, task: str) -> float:
        of = self.figures
        found = of[(of["system"] == self.in_paper.get(system, system)) & (of["group"] == task)]
        found = found.loc[found["metric"] == self.metric, "value"]
        return float(found.iloc[0]) if len(found) else float("nan")


def common(values: pd.DataFrame, others: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Two systems' per-query values, cut to the searches of both."""
    both = set(values["search_id"]) & set(others["search_id"])
    return values[values["search_id"].isin(both)], others[others["search_id"].isin(both)]


def latency_sentence(latency: pd.DataFrame, bi: str, poly: str, cross: str) -> str:
    """How much longer Cross takes than the others at the most passages that it ran on, and at how many of its sizes the
    order is the paper's (Figure 3). `latency`: `system, passages, seconds`."""
    wide = latency.pivot(index="passages", columns="system", values="seconds").dropna()
    at, seconds = wide.index[-1], wide.iloc[-1]
    holds = int(((wide[bi] < wide[poly]) & (wide[poly] < wide[cross])).sum())
    return (
        f"For {at} passages {cross} takes {seconds[cross]:.2f} s a query, {seconds[cross] / seconds[bi]:,.0f} times "
        f"{bi}'s time and {seconds[cross] / seconds[poly]:,.0f} times {poly}'s; the paper's order, Bi under Poly under "
        f"Cross, holds at {holds} of {len(wide)} numbers of passages."
    )


def worth_it(report: Report, interacting: Sequence[str], bi: str, task: str) -> str:
    """Whether interaction between query and passage pays on a task: the answer to the notebook's question."""
    won = [name for name in interacting if (c := report.compare(name, bi, task)).ours > 0 and c.p < SIGNIFICANT]
    if won:
        return f"So interaction pays here, with {' and '.join(won)}."
    return "So interaction is not shown to be worth its time here."


def mistakes_sentence(wrong: Mapping[str, pd.Series], systems: Sequence[str]) -> str:
    """What the wrong first passages of some systems share with the query (`mistakes`); who learnt headings alone."""
    said = [
        f"{name}'s {wrong[name]['wrong first passages']:.0f} wrong first passages have the query's aspect in "
        f"{wrong[name]['same aspect']:.0f}% and its entity in {wrong[name]['same entity']:.0f}%"
        for name in systems
    ]
    headings = [n for n in systems if wrong[n]["same aspect"] >= 80 and wrong[n]["same entity"] < 10]
    told = f" {' and '.join(headings)}: the mistakes share the aspect alone." if headings else ""
    return "; ".join(said) + "." + told


def exchanged_columns(ours: pd.Series, figures: pd.DataFrame, tolerance: float = 0.01) -> str:
    """Which data set of the paper's Table 1 (tables.paper_figures) is as large as our MedQuAD (passages.properties).

    As large: documents and passages differ by no more than `tolerance`, relative to the paper's."""
    metrics = ["documents", "passages"]
    printed = figures[figures["metric"].isin(metrics)].pivot(index="group", columns="metric", values="value")[metrics]
    differ = (ours[metrics].to_numpy() / printed - 1).abs().max(axis=1)
    said = "It has {:,.0f} documents with {:,.0f} passages".format(*ours[metrics])
    if differ.min() > tolerance:
        return f"{said}; the paper's Table 1 has no data set of that size."
    group = differ.idxmin()
    if group == "MedQuAD":
        return f"{said}, as the paper's Table 1 has it."
    sizes = ["{} {:,.0f} and {:,.0f}".format(name, *printed.loc[name]) for name in ("MedQuAD", group)]
    said += f"; the paper's Table 1 prints {' and '.join(sizes)}, so its columns for these two seem exchanged"
    return f"{said}. Against that, its §4.1 has 1,060 queries for MedQuAD, the number that Table 1 has as passages."


def progress_sentence(curves: Mapping[str, pd.DataFrame], batch_sizes: Mapping[str, int], last: int = 10) -> str:
    """How far each system's loss (equation 1; `step, loss`) fell, beside ln(batch size), what guessing costs."""
    said = []
    for name, curve in curves.items():
        end = curve["loss"].tail(last).mean()
        said.append(f"{name} {end:.2f} after {len(curve)} (guessing {math.log(batch_sizes[name]):.2f})")
    return f"Mean loss of the last {last} steps: {', '.join(said)}."


def mistakes(data: MedQuad, pool: Sequence[Passage], candidates: np.ndarray, scores: np.ndarray) -> pd.Series:
    """What the first passage has in common with the query where it is no answer (CAPR §4.5).

    The number of such queries, and of those the share, 0 to 100, with the query's aspect, its entity, or neither."""
    ties = np.take_along_axis(tie_keys(data.queries, data.passages), candidates, axis=1)
    first = np.take_along_axis(candidates, rank(scores, ties)[:, :1], axis=1)[:, 0]
    found = []
    for (query_id, text), at in zip(data.queries.items(), first, strict=True):
        entity, aspect = text.rsplit(" ; ", 1)
        if pool[at].id not in data.qrels[query_id]:
            found.append((pool[at].aspect == aspect, entity in pool[at].entities))
    same_aspect, same_entity = np.array(found, dtype=bool).reshape(-1, 2).T
    shares = {"same aspect": same_aspect, "same entity": same_entity, "neither": ~same_aspect & ~same_entity}
    percent = {name: 100 * kind.mean() if len(kind) else math.nan for name, kind in shares.items()}
    return pd.Series({"wrong first passages": len(found)} | percent)
