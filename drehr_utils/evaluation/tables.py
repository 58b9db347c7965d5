"""Results tables: one long form, printed as the paper prints it with the published figure beside ours.

A cell is `paper / ours [low, high] ▲`: 95% interval; ▲ or ▼ where p < 0.01 and ours is above or below the system that
p is against; the best of ours bold. Each table is saved as CSV (the long form, intervals.RESULT_COLUMNS, `difference`
and `budget`, the chunks or pairs that a training was shown), Markdown and LaTeX.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from drehr_utils.errors import DataError
from drehr_utils.evaluation.claims import SIGNIFICANT, dated
from drehr_utils.evaluation.intervals import DIFFERENCE, RESULT_COLUMNS
from drehr_utils.files import naming, write_atomically
from drehr_utils.profiles import ROOT

PAPERS = ROOT / "data/papers.csv"
FOLDER = ROOT / "figures/tables"
PAPER_COLUMNS = ["paper", "table", "system", "setting", "group", "metric", "value"]
KEYS = ["system", "setting", "group", "metric"]


@dataclass(frozen=True)
class Layout:
    """How a long form is laid out: key columns that name the rows and those that head the columns, outermost first.

    DR.EHR's Table 4 is rows ("system",), columns ("setting", "metric"); CliniQ's Table 4 rows ("system", "group"),
    columns ("metric",). Rows and columns keep the order in which they first appear."""

    rows: Sequence[str] = ("system",)
    columns: Sequence[str] = ("setting", "metric")
    caption: str = ""
    decimals: int = 2
    whole: Sequence[str] = ()  # metrics that are counts: without decimals
    bold: bool = True  # the largest of the systems' own values of a setting, group and metric; off for counts
    labels: dict[str, str] = field(default_factory=dict)  # a key's value -> what the table prints


def paper_figures(paper: str, table: int | str, path: Path = PAPERS) -> pd.DataFrame:
    """The published figures of a paper's table: `system, setting, group, metric, value` as in data/papers.csv.

    Papers: `drehr`, `cliniq`, `kg`, `capr`, `radiology`. Raises DataError for a malformed file or a missing table."""
    with naming(path):
        text = pd.read_csv(path, dtype=str, keep_default_na=False)
    if list(text.columns) != PAPER_COLUMNS:
        raise DataError(f"{path.name}, row 1: not the header {', '.join(PAPER_COLUMNS)}; restore it")
    values = pd.to_numeric(text["value"], errors="coerce")
    if values.isna().any():
        row = int(np.flatnonzero(values.isna())[0]) + 2
        raise DataError(f"{path.name}, row {row}, field value: not a number; copy the figure as the paper prints it")
    chosen = (text["paper"] == paper) & (text["table"] == str(table))
    if not chosen.any():
        raise DataError(f"{path.name}: no table {table} of {paper!r}; add its rows")
    return text[chosen].assign(value=values)[[*KEYS, "value"]].reset_index(drop=True)


def with_paper(
    long: pd.DataFrame, figures: pd.DataFrame, names: dict[str, str] | None = None, append: bool = True
) -> pd.DataFrame:
    """`long` with `paper` filled from `figures` (paper_figures) where system, setting, group and metric agree.

    `names` maps our systems to the paper's (`MiniLM (start)` to `bge-base-en-v1.5`). `append` adds the paper's systems
    that have no row of ours, below, for the metrics that ours has."""
    published = figures.set_index(KEYS)["value"]
    theirs = long["system"].replace(names or {})
    keys = pd.MultiIndex.from_arrays([theirs, *(long[key] for key in KEYS[1:])])
    filled = long.assign(paper=published.reindex(keys).to_numpy())
    rest = figures[~figures["system"].isin(theirs) & figures["metric"].isin(long["metric"])]
    if not append or rest.empty:
        return filled
    rest = rest.rename(columns={"value": "paper"}).assign(**dict.fromkeys(["ours", "low", "high", "p"], np.nan))
    return pd.concat([filled, rest.reindex(columns=filled.columns)], ignore_index=True)


def statistics_rows(statistics: pd.DataFrame, figures: pd.DataFrame) -> pd.DataFrame:
    """positives.positive_statistics as a long form, with the figures of DR.EHR's Table 1 or 2 (paper_figures) beside.

    `sum` is in samples: the paper prints millions."""
    blank = {"system": "", "setting": ""}
    ours = statistics.drop(columns="None").melt(id_vars="source", var_name="metric", value_name="ours")
    ours = ours.rename(columns={"source": "group"}).assign(**blank, low=np.nan, high=np.nan, p=np.nan)
    published = figures.assign(
        **blank,
        group=figures["group"].str.removeprefix("KG ").replace("all", "overall"),
        metric=figures["metric"].replace({"average": "Avg", "max": "Max", "sum (M)": "Sum"}),
        value=figures["value"].where(figures["metric"] != "sum (M)", figures["value"] * 1e6),
    )
    return with_paper(ours, published, append=False)[RESULT_COLUMNS]


def save_table(
    long: pd.DataFrame, name: str, layout: Layout | None = None, folder: Path = FOLDER, lacking: str = ""
) -> pd.DataFrame:
    """Write `<name>.csv`, `.md` and `.tex` in `folder`, the same bytes for the same input; returns the printed cells.

    `lacking`, a query, names the rows that this run had no data for: those of the table before it stay, with a dagger
    and their date in `as_of`, so that a run never takes a committed number away.
    Raises ValueError where a column of the long form is missing or two of its rows share a cell of the table."""
    long = _with_kept(long, name, lacking, folder) if lacking else long
    layout = layout or Layout()
    cells = show_table(long, layout)
    columns = [*RESULT_COLUMNS, "budget", *(name for name in (DIFFERENCE, "as_of") if name in long)]
    table = long.reindex(columns=columns).round(4).to_csv(index=False, lineterminator="\n")
    for kind, text in (("csv", table), ("md", _markdown(long, layout)), ("tex", _latex(long, layout, name))):
        write_atomically(folder / f"{name}.{kind}", text.encode())
    return cells


def read_table(name: str, folder: Path = FOLDER) -> pd.DataFrame:
    """The long form that save_table wrote. Raises DataError where it isn't there or lacks a column."""
    path = folder / f"{name}.csv"
    if not path.exists():
        raise DataError(f"{path.name}: no such table; run the notebook that makes it")
    numbers = [column for column in [*RESULT_COLUMNS, "budget", DIFFERENCE, "as_of"] if column not in KEYS]
    blank = dict.fromkeys(numbers, [""])  # only numbers may be missing: a blank setting is a setting
    with naming(path, "run the notebook that makes it again"):
        table = pd.read_csv(path, dtype=dict.fromkeys(KEYS, str), keep_default_na=False, na_values=blank)
    if missing := [column for column in RESULT_COLUMNS if column not in table]:
        raise DataError(f"{path.name}, row 1, field {missing[0]}: missing column; run the notebook that makes it again")
    return table


def _with_kept(long: pd.DataFrame, name: str, lacking: str, folder: Path) -> pd.DataFrame:
    """`long`, and below it the rows of the folder's table that match `lacking`, ours with their date in `as_of`."""
    path = folder / f"{name}.csv"
    kept = read_table(name, folder).query(lacking) if path.exists() else long.head(0)
    if not (ours := kept["ours"].notna()).any():
        return long
    kept = dated(kept, path)
    kept["as_of"] = kept["as_of"].where(ours)  # the paper's alone are of no date of ours
    since, lacked = kept.loc[ours, "as_of"].iloc[0], "data (./run_all.sh --public) or a record"
    print(f"{name}: {ours.sum()} values with a † are of {since}; for them this run lacked {lacked}.")
    own = ~pd.MultiIndex.from_frame(long[KEYS]).isin(pd.MultiIndex.from_frame(kept[KEYS]))  # not the paper's alone
    return pd.concat([long[own], kept], ignore_index=True)


def marked(text: str, words: Sequence[str]) -> str:
    """`text` as HTML, each of `words` in bold, in any case."""
    pattern = rf"((?<!\w)(?:{'|'.join(map(re.escape, words))})(?!\w))" if words else "((?!))"
    parts = [html.escape(part, quote=False) for part in re.split(pattern, text, flags=re.IGNORECASE)]
    return "".join(f"<b>{part}</b>" if i % 2 else part for i, part in enumerate(parts))


def show_table(long: pd.DataFrame, layout: Layout | None = None) -> pd.DataFrame:
    """The printed cells as a frame for a notebook: the layout's rows and columns, plain text, nothing bold."""
    return _grid(long, layout or Layout(), _PLAIN)


def gains_table(rows: pd.DataFrame, index: Sequence[str], columns: Sequence[str]) -> pd.DataFrame:
    """Differences (intervals.gain_rows) as `+1.2 [+0.4, +2.0] ▲`; ▲ and ▼ where p < 0.01. Rows and columns in the order
    in which their keys first appear."""
    arrows = np.where(rows["p"] < SIGNIFICANT, np.where(rows["ours"] > 0, " ▲", " ▼"), "")
    numbers = zip(rows["ours"], rows["low"], rows["high"], arrows, strict=True)
    cells = pd.Series([f"{gain:+.1f} [{low:+.1f}, {high:+.1f}]{arrow}" for gain, low, high, arrow in numbers])
    keys = rows[[*index, *columns]].reset_index(drop=True)
    return pd.Series(cells.to_numpy(), pd.MultiIndex.from_frame(keys)).unstack(list(columns), sort=False)


@dataclass(frozen=True)
class _Flavour:
    """What a printed cell looks like in one format."""

    none: str
    bold: str
    above: str = " ▲"
    below: str = " ▼"
    star: str = "*"  # neither: of a table that says nothing of the difference
    kept: str = "†"

    def cell(self, row: pd.Series, decimals: int, both: bool, best: bool) -> str:
        def number(value: float) -> str:
            return self.none if pd.isna(value) else f"{value:,.{decimals}f}"

        ours = number(row["ours"])
        if best:
            ours = self.bold.format(ours)
        if not (pd.isna(row["low"]) or pd.isna(row["high"])):
            ours += f" [{row['low']:.1f}, {row['high']:.1f}]"
        if row["p"] < SIGNIFICANT:
            difference = row.get(DIFFERENCE, np.nan)
            ours += self.above if difference > 0 else self.below if difference < 0 else self.star
        if "as_of" in row and pd.notna(row["as_of"]):  # with_kept
            ours += self.kept
        return f"{number(row['paper'])} / {ours}" if both else ours


_PLAIN = _Flavour(none="–", bold="{}")
_MARKDOWN = _Flavour(none="–", bold="**{}**", star="\\*")
_LATEX = _Flavour("--", "\\textbf{{{}}}", r"$^{\uparrow}$", r"$^{\downarrow}$", "$^{*}$", r"$^{\dagger}$")


def _grid(long: pd.DataFrame, layout: Layout, flavour: _Flavour) -> pd.DataFrame:
    if missing := [column for column in RESULT_COLUMNS if column not in long]:
        raise ValueError(f"the long form lacks the column {missing[0]}; it needs {', '.join(RESULT_COLUMNS)}")
    rows, columns = list(layout.rows), list(layout.columns)
    double = long.duplicated(rows + columns)
    if double.any():
        at = dict(long.loc[double, rows + columns].iloc[0])
        raise ValueError(f"two rows of the long form for {at}; lay out more keys or choose rows first")
    both = bool(long["paper"].notna().any())
    rivals = long.groupby(KEYS[1:], sort=False)["ours"]
    best = rivals.transform("max").where(rivals.transform("count") > 1)
    bold = layout.bold & (long["ours"].round(layout.decimals) == best.round(layout.decimals))
    cells = [
        flavour.cell(row, 0 if row["metric"] in layout.whole else layout.decimals, both, is_best)
        for (_, row), is_best in zip(long.iterrows(), bold, strict=True)
    ]
    sides = [pd.MultiIndex.from_frame(long[names]) for names in (rows, columns)]
    row, column = (side.unique() for side in sides)
    grid = np.full((len(row), len(column)), "", dtype=object)
    grid[row.get_indexer(sides[0]), column.get_indexer(sides[1])] = cells
    table = pd.DataFrame(grid.tolist(), row, column).rename(index=layout.labels, columns=layout.labels)
    for axis, names in (("index", rows), ("columns", columns)):
        if len(names) == 1:
            table = table.set_axis(getattr(table, axis).get_level_values(0), axis=axis)
    return table


def _with_heads(grid: pd.DataFrame, layout: Layout) -> pd.DataFrame:
    """The grid with the rows' names as columns in front, named beside the last of the columns' levels."""
    heads = [layout.labels.get(name, name.capitalize()) for name in layout.rows]
    return grid.reset_index(names=heads, col_level=-1)


def _markdown(long: pd.DataFrame, layout: Layout) -> str:
    table = _with_heads(_grid(long, layout, _MARKDOWN), layout)
    head = [column if isinstance(column, str) else " ".join(filter(None, column)) for column in table]
    rule = ["---"] * len(layout.rows) + ["---:"] * (len(head) - len(layout.rows))
    lines = [[str(cell).replace("|", "\\|") for cell in line] for line in (head, rule, *table.to_numpy())]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{layout.caption}\n\n{text}" if layout.caption else text


def _escape(text: str) -> str:
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "–": "--"}
    return "".join(special.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in str(text))


def _latex(long: pd.DataFrame, layout: Layout, name: str) -> str:
    keys, grid = len(layout.rows), _grid(long, layout, _LATEX)
    table = _with_heads(grid.rename(index=_escape), layout).rename(columns=_escape)
    if keys > 1:  # a system's name is printed once for its group of rows, as the papers do
        table.iloc[:, 0] = table.iloc[:, 0].where(table.iloc[:, 0] != table.iloc[:, 0].shift(), "")
    captioned = {"caption": _escape(layout.caption), "label": f"tab:{name}", "position_float": "centering"}
    return table.style.hide(axis="index").to_latex(
        hrules=True,
        column_format="l" * keys + "r" * grid.shape[1],
        multicol_align="c",
        **(captioned if layout.caption else {}),
    )
