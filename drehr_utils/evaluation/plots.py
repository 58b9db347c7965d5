"""Figures for the notebooks and the paper: one style, vector PDF and PNG, the same bytes on every run."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from drehr_utils.evaluation.claims import HOLDS, NOT_SHOWN, NOT_TESTABLE, PAPERS, REVERSED
from drehr_utils.profiles import ROOT

FIGURES = ROOT / "figures"
# Okabe and Ito's colours, told apart with any colour vision; yellow comes last, being faint on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")
GREY = "#888888"
BROWN, VIOLET = "#60300C", "#6000C0"  # where the palette has none left; told apart from it with any colour vision
_SBERT = (  # one system's variants
    "RS/NB(32)", "HS/NB(32)", "HS/MB(64)", "HS/MB(128)", "HS/MB(256)", "HS/MB(512)",
)  # fmt: skip
# A system has one colour in all figures; there are too few, so those share one that have little to be compared for.
SYSTEMS = {
    "MiniLM (start)": PALETTE[0], "MiniLM, names read": PALETTE[5], "BM25": PALETTE[6], "BM25 + KG": PALETTE[4],
    "RRF": PALETTE[3], "DR.EHR": PALETTE[1], "DR.EHR (improved)": PALETTE[2], "DR.EHR w/o stage I": PALETTE[3],
    "DR.EHR (equations)": PALETTE[4],
    "ICD-10 Syn": PALETTE[1], "ICD-10 Graph": PALETTE[4], "HPO Syn": PALETTE[2], "HPO Graph": BROWN,
    "MeSH Syn": PALETTE[3], "MeSH Graph": PALETTE[5], "ICD-10 Names": VIOLET, "Comb": GREY, "Supervised": PALETTE[2],
    "Supervised + Comb": PALETTE[3], "TF-IDF": GREY, "CAPR-Bi": PALETTE[2], "CAPR-Bi-shared": PALETTE[5],
    "CAPR-Poly": PALETTE[4], "CAPR-Cross": PALETTE[1], "CDV": PALETTE[3], "CDV-finetune": BROWN, "CDV+FastText": VIOLET,
    "MiniLM (MLM-tuned)": PALETTE[4], "SBERT (radiology)": PALETTE[2],
} | {f"SBERT/{kind}": PALETTE[2] for kind in _SBERT}  # fmt: skip
SINGLE_COLUMN, DOUBLE_COLUMN = 3.3, 6.8  # inches, a two-column paper's


def set_style() -> None:
    """Set matplotlib's defaults: Okabe-Ito colours, embedded TrueType fonts (text stays text in PDF), light grid."""
    plt.rc("font", family="DejaVu Sans", size=8)  # comes with matplotlib: the same letters on every machine
    plt.rc("axes", prop_cycle=plt.cycler(color=PALETTE), labelsize=8, titlesize=9, grid=True, axisbelow=True)
    plt.rc("axes.spines", top=False, right=False)
    plt.rc(("xtick", "ytick"), labelsize=7)
    plt.rc("legend", fontsize=7, frameon=False)
    plt.rc("grid", color="#DDDDDD", linewidth=0.5)
    plt.rc("lines", linewidth=1.2)
    plt.rc("figure", dpi=110)
    plt.rc("figure.constrained_layout", use=True)
    plt.rc("savefig", dpi=300)
    plt.rc("pdf", fonttype=42)
    plt.rc("svg", hashsalt="drehr")


def colours(systems: Iterable[str]) -> dict[str, str]:
    """A colour for each system: SYSTEMS', a `short` row's being its system's, and for others those that are free."""
    systems = list(dict.fromkeys(systems))
    known = {s: SYSTEMS.get(re.sub(r" \(short\)$|, short(?=\)$)", "", s)) for s in systems}
    free = cycle([c for c in PALETTE if c not in known.values()] or PALETTE)
    return {s: colour or next(free) for s, colour in known.items()}


def save_figure(fig: Figure, name: str, folder: Path = FIGURES) -> None:
    """Write `<name>.pdf` (vector) and `<name>.png` (300 dpi) in `folder`, without time stamps."""
    folder.mkdir(parents=True, exist_ok=True)
    fig.savefig(folder / f"{name}.pdf", metadata={"CreationDate": None})
    fig.savefig(folder / f"{name}.png", dpi=300, metadata={"Software": None})


def dot_interval_plot(
    long: pd.DataFrame,
    by: str = "group",
    columns: int = 5,
    xlabel: str | None = None,
    blocks: Mapping[str, str] | None = None,
    chance: Mapping[str, float] | None = None,
) -> Figure:
    """Systems (rows) with ours and its 95% interval, and the paper's value as an open diamond; a panel for each `by`.

    `long` has intervals.RESULT_COLUMNS with one row a system and panel, else ValueError: filter metric and setting
    first (the axis is named after them). `xlabel` names it for differences, which get a line at 0. `blocks` says which
    systems belong together (system -> block's name): one colour a block, and a rule between two. `chance` (panel ->
    score) is what a random order has: a dotted line."""
    metrics = " / ".join(dict.fromkeys(long["metric"]))
    if long.duplicated(["system", by]).any():
        raise ValueError(f"several rows for one system and {by}; filter setting, group and metric first")
    systems, panels = list(dict.fromkeys(long["system"])), list(dict.fromkeys(long[by]))
    block = [blocks[s] if blocks else s for s in systems]
    colour_of = dict(zip(dict.fromkeys(block), cycle(PALETTE), strict=False)) if blocks else colours(systems)
    diamond = {"marker": "D", "markerfacecolor": "none", "markeredgecolor": "#666666", "markersize": 5}
    across = min(columns, len(panels))
    down = math.ceil(len(panels) / across)
    width = SINGLE_COLUMN if across == 1 else DOUBLE_COLUMN
    size = (width, down * (0.75 + 0.22 * len(systems)))
    fig, axes = plt.subplots(down, across, figsize=size, sharey=True, sharex=True, squeeze=False)
    for ax, panel in zip(axes.flat, panels, strict=False):
        part = long[long[by] == panel].set_index("system").reindex(systems)
        for y, (_, row) in enumerate(part.iterrows()):
            if blocks and y and block[y] != block[y - 1]:
                ax.axhline(y - 0.5, color="#999999", linewidth=0.6, linestyle="--", zorder=0)
            ax.plot([row["low"], row["high"]], [y, y], color=colour_of[block[y]])
            ax.plot(row["ours"], y, "o", color=colour_of[block[y]], markersize=4)
            ax.plot(row["paper"], y, linestyle="", **diamond)
        if xlabel:
            ax.axvline(0, color="#666666", linewidth=0.8, zorder=0)
        if chance:
            ax.axvline(chance[panel], color="#666666", linewidth=0.8, linestyle=":", zorder=0)
        ax.set_title(str(panel))
        ax.set_yticks(range(len(systems)), systems)
        ax.set_ylim(len(systems) - 0.5, -0.5)
        ax.grid(axis="y", visible=False)
    for ax in axes.flat[len(panels) :]:
        ax.set_visible(False)
    label = fig.supxlabel(xlabel or (f"{metrics} (0-100)" if "metric" != by else "Score (0-100)"), fontsize=8)
    labels = colour_of if blocks else {"ours, 95% interval": "#333333"}
    shown = [plt.Line2D([], [], color=c, marker="o", markersize=4, label=name) for name, c in labels.items()]
    if long["paper"].notna().any():
        shown.append(plt.Line2D([], [], linestyle="", label="paper", **diamond))
    if chance:
        shown.append(plt.Line2D([], [], color="#666666", linestyle=":", label="chance"))
    fig.legend(handles=shown, loc="outside upper right", ncols=len(shown))
    fig.draw_without_rendering()  # lays the panels out; the label belongs in the middle of them, where it has the room
    middle = (axes[0, 0].get_position().x0 + axes[0, -1].get_position().x1) / 2
    half = label.get_window_extent().width / fig.bbox.width / 2
    label.set_x(max(half, min(middle, 0.995 - half)))
    return fig


def loss_curve_plot(histories: Mapping[str, pd.DataFrame], smooth: int) -> Figure:
    """Loss against the step for each name of `histories`: frames with `step` and `loss` (trainer.train_stage's curve).

    A running mean of `smooth` logged values lies over the faint raw curve."""
    fig, ax = plt.subplots(figsize=(SINGLE_COLUMN, 2.2))
    for (name, colour), history in zip(colours(histories).items(), histories.values(), strict=True):
        ax.plot(history["step"], history["loss"], color=colour, alpha=0.25, linewidth=0.7)
        running = history["loss"].rolling(smooth, min_periods=1, center=True).mean()
        ax.plot(history["step"], running, color=colour, label=name)
    ax.set(xlabel="Step", ylabel="Loss")
    # Over the curves it would hide one of them.
    fig.legend(loc="outside upper center", ncols=1 + (len(histories) > 4))
    return fig


def steps_plot(curves: Mapping[str, pd.DataFrame], ylabel: str, columns: int = 4, sharex: bool = True) -> Figure:
    """A panel for each of `curves`: what was measured (a column each) by `step`; where it began is a dotted line."""
    measures = [c for c in next(iter(curves.values())) if c != "step"]
    columns = min(columns, len(curves))
    down = math.ceil(len(curves) / columns)
    size = (DOUBLE_COLUMN, 0.5 + 1.4 * down)
    fig, axes = plt.subplots(down, columns, figsize=size, sharex=sharex, sharey=True, squeeze=False)
    for ax, (name, curve) in zip(axes.flat, curves.items(), strict=False):
        for measure, colour, marker in zip(measures, PALETTE, "os^D", strict=False):
            ax.plot(curve["step"], curve[measure], color=colour, marker=marker, markersize=3, label=measure)
            ax.axhline(curve[measure].iloc[0], color=colour, linewidth=0.8, linestyle=":")
        ax.set_title(name)
    for ax in axes.flat[len(curves) :]:
        ax.set_visible(False)
    dotted = plt.Line2D([], [], color="#666666", linestyle=":", linewidth=0.8, label="the start")
    fig.legend(handles=[*axes[0, 0].lines[::2], dotted], loc="outside upper right", ncols=len(measures) + 1)
    fig.supxlabel("Step", fontsize=8)
    fig.supylabel(ylabel, fontsize=8)
    return fig


def counts_bar_plot(counts: pd.DataFrame, ylabel: str, share: bool = False) -> Figure:
    """Stacked bars: one bar an index entry, one colour a column, the totals above; `share` draws parts of 100%."""
    values = 100 * counts.div(counts.sum(axis=1), axis=0) if share else counts
    fig, ax = plt.subplots(figsize=(SINGLE_COLUMN, 2.4))
    bottom = pd.Series(0.0, index=counts.index)
    positions = range(len(counts))
    for i, column in enumerate(counts):
        look = {"width": 0.7, "color": PALETTE[i % len(PALETTE)], "edgecolor": "white", "linewidth": 0.4}
        ax.bar(positions, values[column], bottom=bottom, label=str(column), **look)
        bottom += values[column]
    for x, (top, total) in enumerate(zip(bottom, counts.sum(axis=1), strict=True)):
        ax.annotate(f"{total:,.0f}", (x, top), xytext=(0, 2), textcoords="offset points", ha="center", fontsize=7)
    ax.set_xticks(positions, [str(label) for label in counts.index])
    ax.set_ylabel(ylabel)
    ax.grid(axis="x", visible=False)
    if len(counts.columns) > 1:
        fig.legend(loc="outside right center", reverse=True)
    return fig


def stages_plot(text: str, stages: Mapping[str, Mapping[str, Sequence[str]]]) -> Figure:
    """A chunk between two stages' positives, stage -> source -> terms: a box for each source, a colour a stage."""
    fig, ax = plt.subplots(figsize=(DOUBLE_COLUMN, 2.9))
    ax.set_axis_off()
    look = {"ha": "center", "va": "center", "fontsize": 6, "zorder": 3}
    box = {"boxstyle": "round,pad=0.5", "facecolor": "white"}
    ax.text(0.5, 0.5, textwrap.fill(text, 44), bbox=box | {"edgecolor": "#666666"}, **look | {"zorder": 4})
    sides = zip(PALETTE, (0.14, 0.86), (1, 0), stages.items(), strict=False)
    for colour, x, inner, (stage, sources) in sides:
        ax.text(x, 1.04, stage, ha="center", weight="bold", color=colour)
        told = [f"{source}\n{textwrap.fill('; '.join(terms) or 'none', 32)}" for source, terms in sources.items()]
        heights = [part.count("\n") + 2.4 for part in told]
        # From the middle of the chunk's box, which hides where it begins, to the near edge of the source's.
        arrow = {"arrowstyle": "<-", "color": colour, "relpos": (inner, 0.5), "shrinkA": 1}
        for i, part in enumerate(told):
            y = 1 - (sum(heights[:i]) + heights[i] / 2) / sum(heights)
            ax.annotate(part, (0.5, 0.5), (x, y), arrowprops=arrow, bbox=box | {"edgecolor": colour}, **look)
    return fig


def diagram(
    boxes: Mapping[str, tuple[float, float, str]],
    arrows: Iterable[tuple[str, str]],
    height: float = 2.0,
    style: str = "->",
) -> Figure:
    """Boxes by name, each with the place of its middle (0 to 1, from the left and from below) and its text, and arrows
    between them. `style`: of the arrows, as matplotlib spells it."""
    fig, ax = plt.subplots(figsize=(DOUBLE_COLUMN, height))
    ax.set_axis_off()
    ax.set(xlim=(0, 1), ylim=(0, 1))
    own = {"ha": "center", "va": "center", "fontsize": 7}
    own["bbox"] = {"boxstyle": "round", "facecolor": "white", "edgecolor": PALETTE[0]}
    drawn = {name: ax.text(x, y, text, **own) for name, (x, y, text) in boxes.items()}
    fig.draw_without_rendering()  # an arrow ends at a box's edge, which is known once its text is laid out
    for a, b in arrows:
        ends = {"patchA": drawn[a].get_bbox_patch(), "patchB": drawn[b].get_bbox_patch(), "shrinkA": 1, "shrinkB": 1}
        ax.annotate("", boxes[b][:2], boxes[a][:2], arrowprops={"arrowstyle": style, "color": "#666666", **ends})
    return fig


def verdicts_plot(verdicts: pd.DataFrame, across: int = 7) -> Figure:
    """One mark a claim, its number in it: papers down, verdicts across, `across` marks a line.

    `verdicts` (claims.gathered) has `paper` and `verdict` by claim id. Place, shape and colour say the same thing, so
    that none of them is needed alone; a claim without a verdict has no mark."""
    white, dark = "white", "#333333"
    looks = {  # marker, face, edge, and the number's colour
        HOLDS: ("o", PALETTE[0], PALETTE[0], white),
        NOT_SHOWN: ("s", PALETTE[4], PALETTE[4], dark),
        REVERSED: ("D", PALETTE[1], PALETTE[1], white),
        NOT_TESTABLE: ("o", white, "#999999", dark),
    }
    size = verdicts.groupby(["paper", "verdict"]).size()
    fig, ax = plt.subplots(figsize=(DOUBLE_COLUMN, 3.6))
    top = 0.0
    for paper, name in PAPERS.items():
        lines = max(math.ceil(size.get((paper, verdict), 0) / across) for verdict in looks)
        if top:
            ax.axhline(top - 0.9, color="#DDDDDD", linewidth=0.6)
        ax.text(-1.2, top, name, ha="right", va="center", fontsize=8, weight="bold")
        for column, (verdict, (marker, face, edge, colour)) in enumerate(looks.items()):
            ids = verdicts.index[(verdicts["paper"] == paper) & (verdicts["verdict"] == verdict)]
            for i, claim in enumerate(ids):
                at = column * (across + 1.4) + i % across, top + i // across
                ax.plot(
                    *at, marker, markersize={"o": 9.5, "s": 8.5, "D": 7.2}[marker], color=face, markeredgecolor=edge
                )
                ax.text(*at, claim.rpartition("-")[2], ha="center", va="center_baseline", fontsize=5, color=colour)
        top += lines + 0.8
    for column, verdict in enumerate(looks):
        said = f"{verdict}: {(verdicts['verdict'] == verdict).sum()}"
        ax.text(column * (across + 1.4) - 0.5, -1.5, said, ha="left", va="center", fontsize=8)
    ax.set(xlim=(-5.6, 4 * (across + 1.4) - 1.2), ylim=(top - 1, -2.2))
    ax.set_axis_off()
    return fig
