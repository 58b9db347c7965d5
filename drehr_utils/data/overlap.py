"""Patients of a benchmark among the notes that one trains on: found, so that none of their notes trains.

MIMIC-III and MIMIC-IV share the patients of 2008 to 2012 under different ids. A patient is found by the ids where the
two tables share them, else by a note that both tables hold. What can't be known from them: a patient of the benchmark
whose admissions in MIMIC-III all lie before 2008, and who came again after 2012.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ahocorasick_rs import AhoCorasick

from drehr_utils.data.notes import Note, clean
from drehr_utils.errors import DataError
from drehr_utils.files import read_json_lines, short_name

OTHER_NOTES = "other_notes.jsonl.gz"  # of the benchmark's patients, beside its splits: note_id, text
PROBE_WORDS, EVERY = 12, 25
SAME_TEXT = 0.5  # of a note's probes; masks and cut-out ids break some of them
LEAST = 4  # of them: an addendum of a few lines begins as every summary does, "Name: Unit No: Admission Date:"
_WORD = re.compile(r"[a-z]{2,}")  # dates, ages and numbers are masked in one release and shifted in the other


def _words(text: str) -> list[str]:
    return _WORD.findall(clean(text))


def _of_splits(folder: Path, name: str, fields: tuple[str, ...]) -> Iterator[dict]:
    """The rows of a file that each of the benchmark's splits has, packed (.gz) or not.

    Raises DataError where none has it: nobody would be found, and all would train."""
    if not (found := sorted({path.with_name(name) for end in ("", ".gz") for path in folder.glob(f"*/{name}{end}")})):
        raise DataError(
            f"{short_name(folder)}: no dev/{name} or test/{name}; a benchmark is the folder above its splits"
        )
    for path in found:
        yield from (row for _, _, row in read_json_lines(path, fields))


def _texts(folder: Path) -> Iterator[tuple[str, str]]:
    """(note id, a part of its text) of the benchmark's chunks and its patients' other notes."""
    for chunk in _of_splits(folder, "corpus.jsonl", ("_id", "text")):
        yield chunk["_id"].rpartition("_")[0], chunk["text"]
    if (folder / OTHER_NOTES).exists():
        for _, _, note in read_json_lines(folder / OTHER_NOTES, ("note_id", "text")):
            yield f"other {note['note_id']}", note["text"]


class SameText:
    """Finds notes of which one has the texts: (note id, part of its text). Fewer than LEAST probes of a note, some 90
    words, say nothing."""

    def __init__(self, texts: Iterable[tuple[str, str]]):
        owners: dict[str, set[str]] = defaultdict(set)
        for note_id, text in texts:
            words = _words(text)
            for start in range(0, len(words) - PROBE_WORDS + 1, EVERY):
                owners[f" {' '.join(words[start : start + PROBE_WORDS])} "].add(note_id)
        self.owners = list(owners.values())
        self.probes_of = Counter(note_id for found in self.owners for note_id in found)
        self.automaton = AhoCorasick(list(owners))

    def __contains__(self, text: str) -> bool:
        spaced = f" {' '.join(_words(text))} "
        found = {probe for probe, *_ in self.automaton.find_matches_as_indexes(spaced, overlapping=True)}
        hits = Counter(note_id for probe in found for note_id in self.owners[probe])
        return any(n >= max(LEAST, SAME_TEXT * self.probes_of[note_id]) for note_id, n in hits.items())


def of_benchmark(notes: Sequence[Note], folder: Path) -> dict[str, str]:
    """note_id -> by what its patient was found among those of the benchmark in `folder`: `subject_id`, `hadm_id` or
    `text`, each of a patient's notes alike."""
    known: dict[str, set[str]] = {"subject_id": set(), "hadm_id": set()}
    for patient in _of_splits(folder, "patients.jsonl", ("hadm_id",)):
        for field, values in known.items():
            values.update({str(patient.get(field) or "")} - {""})
    same = SameText(_texts(folder))
    how: dict[str, str] = {}
    for note in notes:
        if note.subject_id not in how:
            by = next((field for field, values in known.items() if getattr(note, field) in values), None)
            if by or note.text in same:
                how[note.subject_id] = by or "text"
    return {note.note_id: how[note.subject_id] for note in notes if note.subject_id in how}
