"""Tab-separated tables with a header, in which a quotation mark is a character like any other (COMETA's, CDV's)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from drehr_utils.errors import DataError
from drehr_utils.files import read_text_lines


def read_tsv(
    path: Path, columns: Sequence[str], hint: str, may_be_empty: Sequence[str] = ()
) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Row number (the header is row 1) and the cells of `columns` and of those that `may_be_empty`, stripped; `hint`
    says how a file is had.

    Raises DataError (file, row, field) for a missing file or column, a row that is cut short and an empty cell."""
    columns = (*columns, *may_be_empty)
    at, where = None, f"{path.parent.name}/{path.name}"
    for number, line in read_text_lines(path, hint):
        cells = line.rstrip("\r\n").split("\t")
        if at is None:
            if missing := [column for column in columns if column not in cells]:
                raise DataError(f"{where}, row 1: column {missing[0]} is missing; tabs stand between columns")
            at = [cells.index(column) for column in columns]
            continue
        for column, place in zip(columns, at, strict=True):
            if place >= len(cells) or not (cells[place].strip() or column in may_be_empty):
                raise DataError(f"{where}, row {number}, field {column}: empty or cut short")
        yield number, tuple(cells[place].strip() for place in at)
