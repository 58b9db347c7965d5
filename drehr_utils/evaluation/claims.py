"""Verdicts on the papers' claims: one rule, four words, and the table that closes a notebook.

data/claims.csv is the ledger: each claim's id, paper, section, words, figures, and what was checked. A notebook judges
the claims that it can measure and shows `table`; figures/tables/claims_<notebook>.csv keeps what came out, and
`gathered` reads all of them. data/paper_items.csv is the ledger of the papers' tables, figures, equations and parts.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
import scipy.stats

from drehr_utils.config import Resampling
from drehr_utils.errors import DataError
from drehr_utils.evaluation.intervals import bootstrap_interval
from drehr_utils.files import committed_on, naming, write_atomically
from drehr_utils.profiles import ROOT, Profile

SIGNIFICANT = 0.01
_WIDER = float(np.divide(*scipy.stats.norm.isf([SIGNIFICANT / 2, 0.05 / 2])))  # its interval than one of 95%
HOLDS, NOT_SHOWN, REVERSED, NOT_TESTABLE = VERDICTS = ("holds", "not shown", "reversed", "not testable here")
LONGER = "a longer training"  # an untestable claim that lacks it, alone or beside others, says so in these words
LACKS = (LONGER, "a model, data or people", "both")
LEDGER, ITEMS = ROOT / "data/claims.csv", ROOT / "data/paper_items.csv"
STATUS = ("yes", "part", "no")  # of an item
PAPERS = {"drehr": "DR.EHR", "cliniq": "CliniQ", "kg": "KG retrieval", "capr": "CAPR", "radiology": "Radiology"}
COLUMNS = ["claim", "paper", "ours", "budget", "verdict"]


@dataclass(frozen=True)
class Judged:
    """A claim's verdict, what was measured for it, the budget of the training that it is about, and the p value of the
    test as a whole (NaN where there is none)."""

    verdict: str
    ours: str = ""
    budget: str = ""
    p: float = math.nan


def verdict(row: Mapping[str, float], sign: int = 1) -> str:
    """The verdict on the claim that a difference is above 0 (`sign` -1: below).

    `row` has `ours`, the difference, its `p` and, where there is none (NaN), `low` and `high` of its 95% interval, each
    half of which is widened to the test's level, 99%, as a normal distribution's would be. A significant difference of
    the other sign reverses the claim; one that isn't measured (NaN), or has neither p nor interval, can't be tested."""
    ours, p = row["ours"], row.get("p", math.nan)
    if math.isnan(ours) or math.isnan(p) and math.isnan(row["low"] + row["high"]):
        return NOT_TESTABLE
    apart = ours > _WIDER * (ours - row["low"]) or -ours > _WIDER * (row["high"] - ours)
    shown = apart if math.isnan(p) else p < SIGNIFICANT
    return NOT_SHOWN if not shown else HOLDS if ours * sign > 0 else REVERSED


def judge(rows: pd.DataFrame, sign: int | Sequence[int] = 1, budget: str = "", each: str = "") -> Judged:
    """The verdict on the claim that every one of the differences `rows` is above 0 (`sign`, one or one a row).

    That a system is the best, or a gain the largest, is such a claim: its difference to each of the others. All must
    be significant, each at the level itself, for all of them have to be (an intersection-union test). The claim is
    reversed where more of them are significant the other way than this way. `each` is what the rows are (metrics). Its
    p is the largest of theirs."""
    signs = np.broadcast_to(sign, len(rows))
    found = [verdict(row, s) for (_, row), s in zip(rows.iterrows(), signs, strict=True)]
    if not found or NOT_TESTABLE in found:
        return Judged(NOT_TESTABLE, "not measured", budget)
    up, down = found.count(HOLDS), found.count(REVERSED)
    said = HOLDS if up == len(found) else REVERSED if down > up else NOT_SHOWN
    p = float(rows["p"].max(skipna=False)) if "p" in rows else math.nan
    if len(rows) == 1:
        row = rows.iloc[0]
        sure = "" if math.isnan(row.get("p", math.nan)) else f", p {row['p']:.4f}"
        return Judged(said, f"{row['ours']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]{sure}", budget, p)
    spread = f"{rows['ours'].min():+.1f} to {rows['ours'].max():+.1f}"
    counted = f"{up} of {len(found)}{each and ' ' + each} significantly so, {down} significantly the other way"
    return Judged(said, f"{counted}; {spread}", budget, p)


def judge_most(rows: pd.DataFrame, sign: int = 1, budget: str = "", each: str = "") -> Judged:
    """The verdict on the claim that most of the differences `rows` are above 0: a sign test (two-sided, exact)."""
    if rows["ours"].isna().any():
        return Judged(NOT_TESTABLE, "not measured", budget)
    up, n = int((rows["ours"] * sign > 0).sum()), int((rows["ours"] != 0).sum())
    p = scipy.stats.binomtest(up, n).pvalue if n else 1.0
    said = NOT_SHOWN if p >= SIGNIFICANT else HOLDS if 2 * up > n else REVERSED
    return Judged(said, f"{up} of {n}{each and ' ' + each}, p {p:.4f}", budget, float(p))


def mean_rows(values: pd.DataFrame, patients: Sequence[str], resampling: Resampling) -> pd.DataFrame:
    """Each column's mean and its 95% interval, which draws `patients` (one a row of `values`): rows for `judge`."""
    low, high = bootstrap_interval(values, resampling, patients=np.asarray(patients))
    return pd.DataFrame({"ours": values.mean(), "low": low, "high": high, "p": np.nan})


def holm(p: Sequence[float]) -> np.ndarray:
    """The p values adjusted for their number (Holm, 1979): the i-th smallest of n times n - i + 1, never falling."""
    p = np.asarray(p, dtype=float)
    order, adjusted = np.argsort(p), np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1)
    return adjusted


def needs(what: str, longer: bool = False) -> Judged:
    """Not testable here, for want of `what`; `longer`: which a longer training alone would give."""
    return Judged(NOT_TESTABLE, f"needs {LONGER}: {what}" if longer else f"needs {what}")


def lacks(ours: str) -> str:
    """Which of LACKS an untestable claim needs, by what its `ours` says between "needs" and a semicolon."""
    said = (re.findall(r"(?:^|; )needs ([^;]*)", ours) or [""])[0]
    return LACKS[1] if LONGER not in said else LACKS[0] if said.startswith(LONGER) else LACKS[2]


def contradicted(ours: str) -> bool:
    """Whether a part of what was measured for a claim is significantly the other way (numbers "not judged" aside)."""
    said = ours.partition("not judged")[0]
    counted = re.findall(r"(\d+) (?:significantly the other way|the opposite)", said)
    return bool(re.search(r"\(opposite\)|the other way: (?!none)", said)) or any(map(int, counted))


def at_length(found: Judged, steps: int, enough: int, of: str = "steps") -> Judged:
    """`found`, of a training of so many steps (or of what else its length is in); no verdict where they are not
    `enough` to decide, but what they gave."""
    if steps >= enough:
        return found
    return Judged(NOT_TESTABLE, f"needs {LONGER}; {steps:,} {of}: {found.ours}", found.budget)


def judged(values: Iterable[str], rows: Iterable[str], judge: Callable[[], Judged]) -> Judged:
    """What `judge` says, where all `rows` that it is about are among those of `values`; else which record it needs."""
    missing = [f"`{row}`" for row in rows if row not in values]
    return needs(f"the record of {', '.join(missing)} (profile full)", longer=True) if missing else judge()


def ledger() -> pd.DataFrame:
    """The papers' claims, by id."""
    with naming(LEDGER):
        return pd.read_csv(LEDGER, index_col="id", keep_default_na=False)


def table(
    profile: Profile,
    notebook: str,
    judged: Mapping[str, Judged],
    rests_on: Mapping[str, str] | None = None,
    lacking: Iterable[str] = (),
) -> pd.DataFrame:
    """The claims table that closes a notebook, saved as claims_<notebook>.csv: claim id -> what came out.

    `lacking` names the claims that this run judged by a part of their data alone: of them the saved table keeps the
    rows that it had, with their date in `as_of`, so that a run never takes a committed verdict away.

    `rests_on` names the verdicts (claim id -> verdict) on which the sentences below the table rest: where one came out
    otherwise, in another profile or after a changed cell, a note says so. Raises DataError for an id that the ledger
    doesn't have, a verdict that is none of VERDICTS, and a sentence that rests on a claim that isn't judged."""
    known, rests_on = ledger(), dict(rests_on or {})
    for name, found in judged.items():
        if name not in known.index:
            raise DataError(f"{LEDGER.name}: no claim {name!r}; its ids are like {known.index[0]!r}")
        if found.verdict not in VERDICTS:
            raise DataError(f"claim {name}: the verdict {found.verdict!r} is none of {', '.join(VERDICTS)}")
    if missing := [name for name in rests_on if name not in judged]:
        raise DataError(f"the sentences rest on {', '.join(missing)}, which this notebook doesn't judge")
    of = known.loc[list(judged)]
    found = pd.DataFrame(list(judged.values()), index=of.index)[COLUMNS[2:]]
    rows = found.assign(claim=of["claim"] + " (" + of["section"] + ")", paper=of["paper_value"])[COLUMNS]
    path = profile.tables / f"claims_{notebook}.csv"
    saved = _with_kept(rows.assign(said=rows.index.map(rests_on)), path, lacking)
    write_atomically(path, saved.to_csv().encode())
    for name, said in rests_on.items():
        if (here := judged[name].verdict) != said:
            print(f"Note: the sentences below were written when {name} came out as {said!r}; here: {here!r}.")
    return rows


def dated(kept: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Rows of the committed table at `path` that outlive a run, each with the date since which it stands in `as_of`."""
    since = kept["as_of"].replace("", np.nan) if "as_of" in kept else pd.Series(np.nan, kept.index)
    return kept.assign(as_of=since.astype(object).fillna(committed_on(path)))


def _with_kept(rows: pd.DataFrame, path: Path, lacking: Iterable[str]) -> pd.DataFrame:
    """`rows` with those of the table before it for the claims `lacking`, and their date in `as_of`."""
    before = pd.read_csv(path, index_col="id", keep_default_na=False) if path.exists() else rows.head(0)
    kept = before.loc[[name for name in lacking if name in rows.index and name in before.index]]
    if kept.empty:
        return rows
    print(f"{path.stem}: {', '.join(kept.index)} stay as they were; this run judged them by a part of their data.")
    return pd.concat([rows.drop(kept.index), dated(kept, path)]).loc[rows.index]


# --- all notebooks together -------------------------------------------------------------------------------------------


def items() -> pd.DataFrame:
    """What the papers hold, by id: `status`, `where` (places for `link`, with "; " between), and what is `missing`."""
    return pd.read_csv(ITEMS, index_col="id", keep_default_na=False)


def gathered(profile: Profile) -> pd.DataFrame:
    """The ledger with `ours`, `budget` and `verdict` of each claim and `where` its notebook shows them (for `link`).

    All three are empty where the profile has no table of that notebook."""
    columns, found = ["ours", "budget", "verdict"], []
    for path in sorted((ROOT / "figures/tables").glob("claims_??.csv")):
        ids, own = pd.read_csv(path, index_col="id").index, profile.tables / path.name
        rows = pd.read_csv(own, index_col="id") if own.exists() else None
        rows = pd.DataFrame(rows, ids, columns, dtype=object)
        found.append(rows.assign(where=_closing(path.stem[-2:])))
    return ledger().join(pd.concat(found)).fillna("")


def _closing(number: str) -> str:
    """Where a notebook shows its claims: the heading above the cell that makes their table."""
    (path,), heading = (ROOT / "notebooks").glob(f"{number}_*.ipynb"), ""
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            heading = [heading, *re.findall(r"^#+ (.+)$", source, re.MULTILINE)][-1]
        elif "claims.table(" in source:
            break
    return f"notebooks/{path.name}#{heading.replace(' ', '-')}"


def counts(rows: pd.DataFrame, of: str, order: Sequence[str]) -> pd.DataFrame:
    """How many of a ledger's rows there are by paper (rows; the last is all) and by `of`, in this order (columns)."""
    table = pd.crosstab(rows["paper"].map(PAPERS), rows[of]).reindex(PAPERS.values(), axis=0, fill_value=0)
    table = table.reindex(order, axis=1, fill_value=0)
    return pd.concat([table, table.sum().to_frame("all").T]).rename_axis("paper")


@cache
def _headings(path: Path) -> dict[str, str]:
    """A notebook's headings by their anchors, each as it is written, less a number before it."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {heading.replace(" ", "-"): re.sub(r"^\d+(?: ·|\.)? (?=[A-Za-z])", "", heading) for heading in found}


def link(place: str) -> str:
    """An HTML link, for a notebook, to a place: `<file>.py:<name>`, `<file>.ipynb#<heading>` or a file of the tree."""
    path, mark, name = re.fullmatch(r"([^#:]+)([#:]?)(.*)", place).groups()
    target = f"../{path}#{quote(name)}" if mark == "#" else f"../{path}"
    stem = Path(path).stem
    heading = _headings(ROOT / path).get(name, name) if mark == "#" else ""
    said = {"#": f"{stem[:2]} {heading}", ":": f"{stem}.{name}", "": Path(path).name}[mark]
    return f'<a href="{target}">{html.escape(said)}</a>'
