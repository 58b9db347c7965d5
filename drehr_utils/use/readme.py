"""Puts the results table of figures/ into README.md, between its two markers: `python -m drehr_utils.use.readme`."""

from __future__ import annotations

from drehr_utils.errors import DataError
from drehr_utils.evaluation.tables import FOLDER, read_table
from drehr_utils.profiles import ROOT

BEGIN, END = "<!-- results: python -m drehr_utils.use.readme -->", "<!-- end of results -->"


def results_table() -> str:
    """Table 4's systems that we ran, in Markdown: ours with the 95% interval, the paper's figure in brackets."""
    table = read_table("drehr_table4", FOLDER).dropna(subset="ours")
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


def updated(text: str) -> str:
    """README's text with the table between the markers. Raises DataError where a marker is missing."""
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise DataError(f"README.md: the markers {BEGIN!r} and {END!r} must each stand in it once")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{results_table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(encoding="utf-8")), encoding="utf-8")
