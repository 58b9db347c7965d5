"""Puts the tables of figures/ into README.md, each between its two markers: `python -m drehr_utils.use.readme`."""

from __future__ import annotations

import argparse

import pandas as pd

from drehr_utils.errors import DataError
from drehr_utils.evaluation import claims
from drehr_utils.evaluation.tables import FOLDER, read_table
from drehr_utils.files import write_atomically
from drehr_utils.papers.drehr.systems import MAIN
from drehr_utils.profiles import ROOT, load_profile


def results_table() -> str:
    """Table 4's systems that we ran, in Markdown: the main ones, and folded all others."""
    table = read_table("drehr_table4", FOLDER).dropna(subset="ours")
    main = table["system"].isin(MAIN)
    head, end = "<details><summary>All other rows</summary>", "</details>"
    return "\n".join([_rows(table[main]), "", head, "", _rows(table[~main]), "", end])


def _rows(table: pd.DataFrame) -> str:
    """Ours with the 95% interval, the paper's figure in brackets."""
    columns = list(dict.fromkeys(zip(table["setting"], table["metric"], strict=True)))
    lines = ["| | " + " | ".join(f"{'Single' if s == 'single' else 'Multi'} {m}" for s, m in columns) + " |"]
    lines.append("| --- |" + " ---: |" * len(columns))
    for system, part in table.groupby("system", sort=False):
        cells = part.set_index(["setting", "metric"])
        shown = []
        for column in columns:
            row = cells.loc[column]
            paper = f" ({row['paper']:.1f})" if row["paper"] == row["paper"] else ""
            shown.append(f"{row['ours']:.1f} ± {(row['high'] - row['low']) / 2:.1f}{paper}")
        lines.append(f"| {system} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def counts_table() -> str:
    """The papers' claims by verdict and their items by status, in Markdown."""
    found = claims.counts(claims.gathered(load_profile("open")), "verdict", claims.VERDICTS)
    items = claims.counts(claims.items(), "status", claims.STATUS)
    heads = [*(f"claims: {verdict}" for verdict in found), "items: in", "in part", "not"]
    lines = ["| | " + " | ".join(heads) + " |", "| --- |" + " ---: |" * len(heads)]
    rows = found.join(items).itertuples()
    return "\n".join([*lines, *(f"| {paper} | {' | '.join(map(str, numbers))} |" for paper, *numbers in rows)])


BLOCKS = {  # marker that begins a block, and the one that ends it -> what stands between
    ("<!-- results: python -m drehr_utils.use.readme -->", "<!-- end of results -->"): results_table,
    ("<!-- what held: python -m drehr_utils.use.readme -->", "<!-- end of what held -->"): counts_table,
}


def between(text: str, markers: tuple[str, str], new: str) -> str:
    """The text with `new` between its two markers. Raises DataError where one is missing or there twice."""
    begin, end = markers
    if text.count(begin) != 1 or text.count(end) != 1:
        raise DataError(f"README.md: the markers {begin!r} and {end!r} must each stand in it once")
    head, rest = text.split(begin)
    return f"{head}{begin}\n{new}\n{end}{rest.split(end)[1]}"


def updated(text: str) -> str:
    """README's text with each table between its markers."""
    for markers, table in BLOCKS.items():
        text = between(text, markers, table())
    return text


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    readme = ROOT / "README.md"
    write_atomically(readme, updated(readme.read_text(encoding="utf-8")).encode())
