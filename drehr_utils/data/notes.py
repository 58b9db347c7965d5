"""Discharge summaries: reading MIMIC's tables, cleaning, chunking, splits by patient (DR.EHR §3, CliniQ §3.1)."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from drehr_utils.data import public_data
from drehr_utils.errors import DataError
from drehr_utils.files import is_utf8, iter_rows, naming, read_text_lines, same_characters, short_name, walk
from drehr_utils.profiles import ROOT

CHUNK_WORDS = 100
WINDOW_WORDS = 12  # chosen on dev among 12, 25 and 50 (notebook 18)
OVERLAP_WORDS = 10

NOTE_COLUMNS = ("note_id", "subject_id", "hadm_id", "text")
_REAL_COLUMNS = {"aci_bench": ("encounter_id", "note"), "mts_dialog": ("id", "section_text")}
MIMIC3_NOTE_COLUMNS = ("row_id", "subject_id", "hadm_id", "category", "text")


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
    unread: list[str] = field(default_factory=list)  # ids of notes that are there, and aren't text
    placed: bool = False  # ids are places, paths in this folder or rows of this table: another may have the same

    def frame(self) -> pd.DataFrame:
        """One row for each reason: how many rows it cost, and where the first is."""
        found: dict[tuple[str, str], list[int]] = defaultdict(list)
        for row, column, reason in self.skipped:
            found[f"skipped: {reason}", column].append(row)
        rows = [(self.file, "kept", self.kept, None, None)]
        rows += [(self.file, what, len(at), at[0], column) for (what, column), at in found.items()]
        return pd.DataFrame(rows, columns=["file", "what", "rows", "first at row", "field"])


def find_table(folder: Path, *names: str) -> Path | None:
    """The first of the names' `<name>.csv.gz` or `<name>.csv` in `folder` or its usual MIMIC sub-folders, if any; where
    both are, the later."""
    for place in (Path(folder) / sub / name for name in names for sub in ("", "hosp", "note")):
        if there := [path for end in (".csv.gz", ".csv") if (path := Path(f"{place}{end}")).exists()]:
            return max(there, key=lambda path: path.stat().st_mtime_ns)  # one unpacked and not touched has the same
    return None


def need_table(folder: Path, hint: str, *names: str) -> Path:
    """find_table's; raises DataError with `hint` where there is none."""
    if path := find_table(folder, *names):
        return path
    raise DataError(f"{Path(folder).name}/: neither {'.csv(.gz) nor '.join(names)}.csv(.gz) is there; {hint}")


def _is_noteevents(path: Path) -> bool:
    """Whether it is MIMIC-III's table of notes of all kinds, of which the discharge summaries are read."""
    return path.is_file() and path.name in ("NOTEEVENTS.csv", "NOTEEVENTS.csv.gz")


def admission_id(value: str) -> str:
    """A cell's hadm_id, which pandas writes as 20000001.0 where the column has gaps."""
    return value.strip().removesuffix(".0")


def _no_text(content: str) -> str | None:
    """Why a note's content is no text; None where it is."""
    if not is_utf8(content):
        return "bytes that are not UTF-8"
    return "NUL characters, as in UTF-16" if "\0" in content else None


def read_table(path: Path, columns: Iterable[str]) -> pd.DataFrame:
    """A CSV table's columns as strings. Raises DataError as `iter_rows`, and for bytes that are not UTF-8."""
    columns, rows = list(columns), []
    for row, values in iter_rows(path, columns):
        if bad := [name for name in columns if not is_utf8(values[name])]:
            raise DataError(f"{short_name(Path(path))}, row {row}, field {bad[0]}: bytes that are not UTF-8")
        rows.append(values)
    return pd.DataFrame(rows, columns=columns, dtype=str)


def read_notes(folder: Path) -> tuple[list[Note], ReadReport]:
    """All of iter_notes, and what it skipped."""
    report = ReadReport("")
    return list(iter_notes(folder, report)), report


def iter_notes(folder: Path, report: ReadReport) -> Iterator[Note]:
    """Discharge summaries of a folder in MIMIC-IV's layout (`discharge`) or MIMIC-III's (`NOTEEVENTS`, or this table
    itself), one by one.

    Skipped, counted and reported: a note without text, bytes that are not UTF-8, a repeated row. Raises DataError for
    a missing table or column, a row without note id or patient, and two texts or patients under one note id."""
    hint = "point the profile's notes folder (DREHR_NOTES) at one that has it, or DREHR_ROOT at the checkout"
    path = folder if _is_noteevents(folder) else need_table(folder, hint, "discharge", "NOTEEVENTS")
    mimic4 = path.name.startswith("discharge")
    where, seen, report.file = short_name(path), {}, path.name
    for row, values in iter_rows(path, NOTE_COLUMNS if mimic4 else MIMIC3_NOTE_COLUMNS):
        if not mimic4:
            if values["category"].strip().lower() != "discharge summary":
                continue
            values["note_id"] = values["row_id"]
        report.rows += 1
        for name in ("note_id", "subject_id"):
            if not values[name].strip() or not is_utf8(values[name]):
                said = "bytes that are not UTF-8" if values[name].strip() else "empty"
                raise DataError(f"{where}, row {row}, field {name}: {said}; every note needs one")
            values[name] = values[name].strip()
        values["hadm_id"] = admission_id(values["hadm_id"]).encode("utf-8", "replace").decode()  # then no admission's
        note = Note(*(values[column] for column in NOTE_COLUMNS))
        text_digest = hashlib.sha256(f"{note.subject_id}\n{note.text}".encode("utf-8", "surrogatepass")).digest()
        if note.note_id in seen:
            first_row, first_digest = seen[note.note_id]
            if text_digest != first_digest:
                raise DataError(
                    f"{where}, row {row}, field note_id: the same as in row {first_row}, with another text or patient; "
                    "note ids must be unique"
                )
            report.skipped.append((row, "note_id", "repeats an earlier row"))
        elif reason := _no_text(note.text):
            report.skipped.append((row, "text", reason))
            report.unread.append(note.note_id)
        elif not clean(note.text):
            report.skipped.append((row, "text", "empty"))
        else:
            seen[note.note_id] = (row, text_digest)
            report.kept += 1
            yield replace(note, text=same_characters(note.text))
    if not report.kept:
        raise DataError(f"{where}: no note with text in {report.rows} rows")


def read_any_notes(
    source: Path, text: str = "text", note_id: str = "note_id", patient: str = "subject_id"
) -> tuple[list[Note], ReadReport]:
    """Notes of one's own: a folder in MIMIC's layout (see read_notes), a folder of .txt files, or a CSV table.

    A table's columns are named by the other arguments; without an id, row n is `<folder>/<file>-row-n`, so that two
    tables may share an index. A text file's id is its path in the folder; links are followed, what is hidden is left
    out. What has no patient, as a file right in the folder, is a patient of its own, under the note's id; else its
    folder is one.
    Skipped, counted and reported: what has no text or isn't UTF-8. Raises DataError as read_notes does, and where the
    id of a note without a patient is a patient's."""
    source = Path(source)
    if source.is_dir() and find_table(source, "discharge", "NOTEEVENTS") or _is_noteevents(source):
        return read_notes(source)
    notes, report, seen, owners, alone = [], ReadReport(source.name, placed=source.is_dir()), {}, set(), {}
    for row, field_name, name, owner, content in _own_rows(source, text.lower(), note_id.lower(), patient.lower()):
        report.rows += 1
        report.placed |= name.endswith(f"/{source.name}-row-{row}")
        if not (is_utf8(name) and is_utf8(owner)):
            raise DataError(f"{short_name(source)}, row {row}: note id or patient has bytes that are not UTF-8")
        if name in seen:
            said = f"the same as in row {seen[name]}; note ids must be unique"
            raise DataError(f"{short_name(source)}, row {row}, field {note_id}: {said}")
        seen[name] = row
        if owner:
            owners.add(owner)
        else:
            alone[name] = row
        if reason := _no_text(content):
            report.skipped.append((row, field_name, reason))
            report.unread.append(name)
        elif not clean(content):
            report.skipped.append((row, field_name, "empty"))
        else:
            notes.append(Note(name, owner or name, "", same_characters(content)))
            report.kept += 1
    if taken := owners & alone.keys():  # two people's notes would be one's
        row = min(alone[name] for name in taken)
        said = f"empty, and the note's id, which would stand for it, is a patient's; fill it, or change field {note_id}"
        raise DataError(f"{short_name(source)}, row {row}, field {patient}: {said}")
    if not notes:
        raise DataError(f"{source.name}: no note with text in {report.rows} rows or files")
    return notes, report


def _is_model(folder: Path, notes: Path) -> bool:
    """Whether a folder below `notes` is in an encoder's or a graph's: an index made among them, say."""
    above = [folder, *folder.parents][: len(folder.relative_to(notes).parts)]
    return any((place / name).exists() for place in above for name in ("modules.json", "term2CUI.json"))


def _text_files(folder: Path) -> list[Path]:
    """The .txt files below a folder, links followed; none that is hidden, as what an editor keeps of earlier versions.
    Raises DataError for a folder that can't be read, or a link that leads nowhere, as to a disk that isn't here."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{short_name(Path(error.filename))}/: {error.strerror}; make it readable, or move it out")

    found = []
    for path in walk(folder, refuse):
        if any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue
        if path.is_symlink() and not path.exists():
            raise DataError(f"{short_name(path)}: a link that leads nowhere; mount what it leads to, or remove it")
        if path.suffix.lower() == ".txt" and path.is_file():
            found.append(path)
    return found


_MISSING = {"na", "n/a", "nan", "none", "null", "\\n"}  # as R, pandas and databases write what isn't there


def _own_rows(source: Path, text: str, note_id: str, patient: str) -> Iterator[tuple[int, str, str, str, str]]:
    """Row or number of the file, field or file, note's id, patient (may be empty), text."""
    if source.is_dir():
        paths = _text_files(source)
        ours = {folder for folder in {path.parent for path in paths} if _is_model(folder, source)}
        if not (paths := sorted(path for path in paths if path.parent not in ours)):
            raise DataError(f"{source.name}/: no discharge.csv(.gz), no NOTEEVENTS.csv(.gz) and no .txt file is there")
        for row, path in enumerate(paths, 1):
            name = path.relative_to(source).as_posix()
            with naming(path, "make it readable, or move it out"):
                content = path.read_bytes().decode("utf-8-sig", errors="surrogateescape")
            yield row, name, name, name.rpartition("/")[0], content
    else:
        asked = {"note_id": note_id, "subject_id": patient}
        named = [column for usual, column in asked.items() if column != usual]  # these must be there
        for row, values in iter_rows(source, [text, *named], [note_id, patient]):
            values = {name: "" if value.strip().lower() in _MISSING else value for name, value in values.items()}
            name = values.get(note_id, "").strip() or f"{source.absolute().parent.name}/{source.name}-row-{row}"
            yield row, text, name, values.get(patient, "").strip(), values[text]


def read_real_notes(name: str) -> list[Note]:
    """The notes of `aci_bench`, or the sections of `mts_dialog` but for those that share text with an evaluation set
    kept aside (data/mts_dialog_overlap.txt); see public_data. Raises DataError where they aren't at hand."""
    (output,) = public_data.SOURCES[name].outputs
    table = read_table(public_data.locate(name, missing_ok=False) / output, _REAL_COLUMNS[name])
    overlap = {tuple(line.split("\t")) for _, line in read_text_lines(ROOT / "data/mts_dialog_overlap.txt")}
    return [Note(i, i, i, text) for i, text in table.itertuples(index=False) if (name, i) not in overlap]


# Masks (of one that is never closed its opening alone), runs of underscores, repeated punctuation
_NOISE = (re.compile(r"\[\*\*(?:(?!\[\*\*).)*?\*\*\]", re.DOTALL), re.compile(r"_{2,}"), re.compile(r"([^\w\s])\1+"))


def clean(text: str) -> str:
    """A note without masks and excessive punctuation, white space folded, lower-cased (DR.EHR §3, CliniQ §3.1)."""
    for pattern in _NOISE:
        text = pattern.sub(" ", text)
    return " ".join(text.split()).lower()


def chunk_words(words: list[str], size: int = CHUNK_WORDS, overlap: int = OVERLAP_WORDS) -> list[list[str]]:
    """Windows of `size` words that share `overlap`; the last is the first that reaches the end (DR.EHR §3)."""
    starts = range(0, max(len(words) - overlap, min(len(words), 1)), size - overlap)
    return [words[start : start + size] for start in starts]


def windows(text: str, width: int = WINDOW_WORDS) -> list[str]:
    """The text's runs of so many words, one every half of them; at least one, and the last may be shorter."""
    words, step = text.split(), max(width // 2, 1)
    return [" ".join(words[at : at + width]) for at in range(0, max(len(words) - step, 1), step)]


def chunk_note(note: Note) -> list[Chunk]:
    """The cleaned note's chunks, ids `<note_id>_<k>`."""
    words = clean(note.text).split(" ")
    return [Chunk(f"{note.note_id}_{k}", note.note_id, " ".join(part)) for k, part in enumerate(chunk_words(words))]


SPLITS = ("train", "dev", "test")
KEPT_SHARE = 0.02  # of the patients, for dev and for test each, where no table says who is in which split


def note_tables(folder: Path) -> list[Path]:
    """What read_notes and read_splits read of a folder, which may hold the hospital's other tables as well."""
    found = [find_table(folder, name) for name in ("discharge", "NOTEEVENTS", "splits")]
    return [path for path in found if path]


def read_splits(folder: Path, notes: Sequence[Note]) -> dict[str, str]:
    """note_id -> train, dev or test, by patient: from `splits.csv(.gz)`, else by a hash of the patient's id (first 8
    hex digits of its SHA-256), which doesn't depend on order or on which notes are present.

    Raises DataError for an unknown split, a note without one, or a patient in two."""
    path = find_table(folder, "splits")
    if path is None:
        return {note.note_id: _hashed_split(note.subject_id) for note in notes}
    table = read_table(path, ("subject_id", "note_id", "split"))
    for row, split in enumerate(table["split"], start=2):
        if split not in SPLITS:
            raise DataError(f"{path.name}, row {row}, field split: {split!r} is none of {', '.join(SPLITS)}")
    per_patient = table.groupby("subject_id")["split"].nunique()
    if (per_patient > 1).any():
        row = table["subject_id"].map(per_patient).gt(1).idxmax() + 2
        raise DataError(f"{path.name}, row {row}, field split: the patient is in more than one split")
    splits = dict(zip(table["note_id"], table["split"], strict=True))
    if lost := sum(note.note_id not in splits for note in notes):
        raise DataError(f"{path.name}, field note_id: {lost} of {len(notes)} notes have no split")
    of_patient: dict[str, str] = {}
    for number, note in enumerate(notes, 1):  # the table's own subject_id may be another
        if of_patient.setdefault(note.subject_id, splits[note.note_id]) != splits[note.note_id]:
            said = f"the patient of note {number} of the notes' table has notes in more than one split"
            raise DataError(f"{path.name}, field split: {said}")
    return splits


def _hashed_split(subject_id: str) -> str:
    u = int(hashlib.sha256(subject_id.encode()).hexdigest()[:8], 16) / 2**32
    return "dev" if u < KEPT_SHARE else "test" if u < 2 * KEPT_SHARE else "train"
