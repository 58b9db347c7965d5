"""Discharge summaries: reading MIMIC's tables, cleaning, chunking, splits by patient (DR.EHR §3, CliniQ §3.1)."""

from __future__ import annotations

import csv
import gzip
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from drehr_utils.errors import DataError

CHUNK_WORDS = 100
OVERLAP_WORDS = 10

NOTE_COLUMNS = ("note_id", "subject_id", "hadm_id", "text")
MIMIC3_NOTE_COLUMNS = ("row_id", "subject_id", "hadm_id", "category", "text")

csv.field_size_limit(2**31 - 1)  # a note may be longer than the csv module's default of 131,072 characters


@dataclass(frozen=True)
class Note:
    note_id: str
    subject_id: str
    hadm_id: str
    text: str


@dataclass(frozen=True)
class Chunk:
    id: str
    note_id: str
    text: str


@dataclass
class ReadReport:
    """What reading a notes table kept and skipped, and why."""

    file: str
    rows: int = 0
    kept: int = 0
    skipped: list[tuple[int, str, str]] = field(default_factory=list)  # (row, field, reason)

    def skip(self, row: int, column: str, reason: str) -> None:
        self.skipped.append((row, column, reason))

    def frame(self) -> pd.DataFrame:
        """One row for each reason: how many rows it cost, and where the first is."""
        rows = [(self.file, "kept", self.kept, None, None)]
        by_reason: dict[tuple[str, str], list[int]] = {}
        for row, column, reason in self.skipped:
            by_reason.setdefault((reason, column), []).append(row)
        rows += [
            (self.file, f"skipped: {reason}", len(at), at[0], column) for (reason, column), at in by_reason.items()
        ]
        return pd.DataFrame(rows, columns=["file", "what", "rows", "first at row", "field"])


def _open_text(path: Path):
    # surrogateescape keeps bytes that are not UTF-8 visible, so that the row that holds them can be named.
    opener = gzip.open if path.suffix == ".gz" else open
    return opener(path, "rt", encoding="utf-8", errors="surrogateescape", newline="")


def _decodes(value: str) -> bool:
    return not any("\ud800" <= c <= "\udfff" for c in value) if not value.isascii() else True


def find_table(folder: Path, name: str) -> Path | None:
    """`<name>.csv.gz` or `<name>.csv` in `folder` or its usual MIMIC sub-folders; None when there is none."""
    for sub in ("", "hosp", "note"):
        for suffix in (".csv.gz", ".csv"):
            path = Path(folder) / sub / f"{name}{suffix}"
            if path.exists():
                return path
    return None


def iter_rows(path: Path, columns: Iterable[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV table as (row number in the file, the header being row 1; dict of the columns asked for).

    Column names are compared in lower case, so that MIMIC-III's and MIMIC-IV's headers both fit. Raises DataError
    for a missing file or column, a row that is cut short, or a file that is not CSV."""
    path = Path(path)
    if not path.exists():
        raise DataError(f"{path.name}: no such file in {path.parent.name}/; see data/README.md for the tables expected")
    columns = tuple(columns)
    row = 1
    try:
        with _open_text(path) as handle:
            reader = csv.reader(handle)
            header = [name.strip().lower() for name in next(reader, [])]
            missing = [name for name in columns if name not in header]
            if missing:
                raise DataError(
                    f"{path.name}, row 1: column {', '.join(missing)} is missing; the header: {', '.join(header[:20])}"
                )
            at = {name: header.index(name) for name in columns}
            for row, values in enumerate(reader, start=2):
                if not values:
                    continue
                short = [name for name, i in at.items() if i >= len(values)]
                if short:
                    raise DataError(f"{path.name}, row {row}: no value for field {short[0]} (the row is cut short)")
                yield row, {name: values[i] for name, i in at.items()}
    except (csv.Error, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path.name}, after row {row}: not a readable CSV table ({error})") from None


def read_table(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """A CSV table's columns as strings. Raises DataError as `iter_rows`, and for bytes that are not UTF-8."""
    columns = tuple(columns)
    rows = []
    for row, values in iter_rows(path, columns):
        for name, value in values.items():
            if not _decodes(value):
                raise DataError(f"{Path(path).name}, row {row}, field {name}: bytes that are not UTF-8")
        rows.append([values[name] for name in columns])
    return pd.DataFrame(rows, columns=list(columns), dtype=str)


def read_notes(folder: Path, limit: int | None = None) -> tuple[list[Note], ReadReport]:
    """Discharge summaries of a folder in MIMIC-IV's layout (`discharge`) or MIMIC-III's (`NOTEEVENTS`).

    Skipped, counted and reported: a note without text, bytes that are not UTF-8, a repeated row. Raises DataError for
    a missing table or column, a row without note id or patient, and two different texts under one note id."""
    folder = Path(folder)
    path, mimic3 = find_table(folder, "discharge"), None
    if path is None:
        mimic3 = find_table(folder, "NOTEEVENTS")
        path = mimic3
    if path is None:
        raise DataError(
            f"{folder.name}/: neither discharge.csv(.gz) (MIMIC-IV-Note) nor NOTEEVENTS.csv(.gz) (MIMIC-III) is there; "
            "point the profile's notes folder (DREHR_NOTES) at one that has it, or DREHR_ROOT at the checkout"
        )
    report, notes, seen = ReadReport(path.name), [], {}
    for row, values in iter_rows(path, MIMIC3_NOTE_COLUMNS if mimic3 else NOTE_COLUMNS):
        if mimic3:
            if values["category"].strip().lower() != "discharge summary":
                continue
            values["note_id"] = values["row_id"]
        report.rows += 1
        for name in ("note_id", "subject_id"):
            if not values[name].strip():
                raise DataError(f"{path.name}, row {row}, field {name}: empty; every note needs one")
        text = values["text"]
        digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
        if values["note_id"] in seen:
            first_row, first_digest = seen[values["note_id"]]
            if digest != first_digest:
                raise DataError(
                    f"{path.name}, row {row}, field note_id: {values['note_id']} stands in row {first_row} already, "
                    "with another text; note ids must be unique"
                )
            report.skip(row, "note_id", "repeats an earlier row")
        elif not _decodes(text):
            report.skip(row, "text", "bytes that are not UTF-8")
        elif not clean(text):
            report.skip(row, "text", "empty")
        else:
            seen[values["note_id"]] = (row, digest)
            notes.append(Note(values["note_id"], values["subject_id"], values["hadm_id"], text))
            report.kept += 1
            if limit and report.kept >= limit:
                break
    if not notes:
        raise DataError(f"{path.name}: no note with text in {report.rows} rows")
    return notes, report


_MASK = re.compile(r"\[\*\*.*?\*\*\]", re.DOTALL)
_UNDERSCORES = re.compile(r"_{2,}")
_REPEATED_PUNCTUATION = re.compile(r"([^\w\s])\1+")


def clean(text: str) -> str:
    """A note without masks and excessive punctuation, white space folded, lower-cased (DR.EHR §3, CliniQ §3.1)."""
    text = _MASK.sub(" ", text)
    text = _UNDERSCORES.sub(" ", text)
    text = _REPEATED_PUNCTUATION.sub(" ", text)
    return " ".join(text.split()).lower()


def chunk_words(words: list[str], size: int = CHUNK_WORDS, overlap: int = OVERLAP_WORDS) -> list[list[str]]:
    """Windows of `size` words that share `overlap`; the last is the first that reaches the end (DR.EHR §3)."""
    stride = size - overlap
    chunks, start = [], 0
    while start < len(words):
        chunks.append(words[start : start + size])
        if start + size >= len(words):
            break
        start += stride
    return chunks


def chunk_note(note: Note) -> list[Chunk]:
    """The cleaned note's chunks, ids `<note_id>_<k>`."""
    words = clean(note.text).split(" ")
    return [Chunk(f"{note.note_id}_{k}", note.note_id, " ".join(part)) for k, part in enumerate(chunk_words(words))]


SPLITS = ("train", "dev", "test")


def read_splits(folder: Path, notes: list[Note], dev_share: float = 0.02, test_share: float = 0.0) -> dict[str, str]:
    """note_id -> train, dev or test, by patient: from `splits.csv(.gz)`, else by a hash of the patient's id.

    The hash (first 8 hex digits of SHA-256 of subject_id) does not depend on order or on which notes are present.
    Raises DataError for an unknown split, a note without one, or a patient in two."""
    path = find_table(folder, "splits")
    if path is None:
        return {note.note_id: _hashed_split(note.subject_id, dev_share, test_share) for note in notes}
    table = read_table(path, ("subject_id", "note_id", "split"))
    for row, split in enumerate(table["split"], start=2):
        if split not in SPLITS:
            raise DataError(f"{path.name}, row {row}, field split: {split!r} is none of {', '.join(SPLITS)}")
    per_patient = table.groupby("subject_id")["split"].nunique()
    if (per_patient > 1).any():
        raise DataError(f"{path.name}, field split: patient {per_patient.idxmax()} is in more than one split")
    splits = dict(zip(table["note_id"], table["split"], strict=True))
    lost = [note.note_id for note in notes if note.note_id not in splits]
    if lost:
        raise DataError(f"{path.name}, field note_id: {len(lost)} notes have no split, {lost[0]} among them")
    return splits


def _hashed_split(subject_id: str, dev_share: float, test_share: float) -> str:
    u = int(hashlib.sha256(subject_id.encode()).hexdigest()[:8], 16) / 2**32
    return "test" if u < test_share else "dev" if u < test_share + dev_share else "train"


def chunk_frame(chunks: Iterable[Chunk], splits: dict[str, str]) -> pd.DataFrame:
    """Chunks as a table with columns id, note_id, split, words, text."""
    rows = [(c.id, c.note_id, splits[c.note_id], c.text.count(" ") + 1, c.text) for c in chunks]
    return pd.DataFrame(rows, columns=["id", "note_id", "split", "words", "text"])


def frame_chunks(frame: pd.DataFrame) -> list[Chunk]:
    """The inverse of `chunk_frame`, without the splits."""
    return [Chunk(*row) for row in frame[["id", "note_id", "text"]].itertuples(index=False, name=None)]
