"""MIMIC-IV-Note in miniature, with patients whom MIMIC-III and CliniQ's release have too; every word of it is invented.

The texts are the open notes'. Ids are of the releases' own ranges, so no id is in both. What is planted:
- SAME_NOTE is in the release, and the note that it is judged on stands in MIMIC-IV too, under other ids and masks;
- OTHER_NOTE is in the release, and another of its notes, of an admission without judgments, stands in MIMIC-IV;
- both have one more note in MIMIC-IV, which has no text in common with the release, but must not train either.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from mimic3_miniature import write_mimic3

from drehr_utils.data.benchmark import Benchmark, load_benchmark, single_patient_tasks, subset
from drehr_utils.data.notes import Note, read_notes, read_splits
from drehr_utils.files import iter_rows
from drehr_utils.knowledge.graph import KnowledgeGraph, save_bios
from drehr_utils.papers.cliniq.release import read_first_summaries, release_chunks, release_clean
from drehr_utils.profiles import ROOT

OPEN = ROOT / "data/open_notes"
CODED = {
    "diagnoses_icd": ("subject_id", "hadm_id", "seq_num", "icd_code", "icd_version"),
    "procedures_icd": ("subject_id", "hadm_id", "seq_num", "chartdate", "icd_code", "icd_version"),
    "prescriptions": ("subject_id", "hadm_id", "drug"),
    "d_icd_diagnoses": ("icd_code", "icd_version", "long_title"),
    "d_icd_procedures": ("icd_code", "icd_version", "long_title"),
}
NOTE_HEADER = ("note_id", "subject_id", "hadm_id", "note_type", "note_seq", "charttime", "storetime", "text")


@dataclass
class Miniature:
    """The folders, and the MIMIC-IV patients (subject ids) of each split as they should come out."""

    notes: Path
    mimic3: Path
    release: Path
    bios: Path
    patients: dict[str, set[str]] = field(default_factory=dict)  # train, dev, test, and `both`: never to train


def _subject_ids(split: str, mark: str) -> Iterator[str]:
    """Ids of MIMIC-IV's range whose hash puts the patient into the split: 2% dev, the next 2% test."""
    low, high = {"dev": (0, 0.02), "test": (0.02, 0.04), "train": (0.04, 1)}[split]
    for subject in (f"{mark}{number}" for number in itertools.count(10_000_032, 7)):
        if low <= int(hashlib.sha256(subject.encode()).hexdigest()[:8], 16) / 2**32 < high:
            yield subject


def _write(path: Path, header: tuple[str, ...], rows: list[tuple]) -> None:
    with gzip.open(path, "wt", newline="") as handle:
        csv.writer(handle).writerows([header, *rows])


def write_miniature(
    folder: Path,
    train: int = 8,
    kept: int = 2,
    judged: int = 6,
    plant: Callable[[str], str] = str,
    mark: str = "",
) -> Miniature:
    """`train` patients of MIMIC-IV beside `kept` of dev and of test each and the two planted ones; `judged` admissions
    in the release, the first of them the planted patients'. `plant` changes notes and orders; ids begin with `mark`."""
    made = Miniature(*(folder / name for name in ("mimic-iv-note", "mimiciii", "CliniQ", "bios")))
    for path in (made.notes / "note", made.notes / "hosp", made.release):
        path.mkdir(parents=True)
    read = [replace(note, text=plant(note.text)) for note in read_notes(OPEN)[0]]
    splits = read_splits(OPEN, read)
    ours = {split: iter([note for note in read if splits[note.note_id] == split]) for split in ("train", "test")}
    of_id = {note.note_id: note for note in read}
    cliniq = [of_id[patient.note_id] for patient in _open_cliniq(judged).patients]

    # MIMIC-IV: (subject, the open note whose text it has)
    ids = {split: _subject_ids(split, mark) for split in ("train", "dev", "test")}
    rows: list[tuple[str, Note]] = []
    for split, n in (("train", train), ("dev", kept), ("test", kept)):
        subjects = list(itertools.islice(ids[split], n))
        made.patients[split] = set(subjects)
        rows += [(subject, next(ours["train"])) for subject in subjects]
    same, other = itertools.islice(ids["train"], 2)
    made.patients["both"] = {same, other}
    elsewhere = next(ours["test"])  # the second patient's note in MIMIC-III that isn't in the release
    rows += [(same, cliniq[0]), (same, next(ours["test"])), (other, elsewhere), (other, next(ours["test"]))]
    hadm_of = {note.hadm_id: f"{mark}{20_000_019 + 13 * i}" for i, (_, note) in enumerate(rows)}
    subject_of = {note.hadm_id: subject for subject, note in rows}
    _write(
        made.notes / "note/discharge.csv.gz", NOTE_HEADER,
        [(f"{s}-DS-{i}", s, hadm_of[n.hadm_id], "DS", i, "", "", n.text) for i, (s, n) in enumerate(rows, 1)],
    )  # fmt: skip
    for name, header in CODED.items():
        kept_rows = []
        for _, values in iter_rows(OPEN / f"{name}.csv.gz", header):
            if "hadm_id" not in header:
                kept_rows.append(tuple(values.values()))
            elif values["hadm_id"] in hadm_of:
                values |= {"subject_id": subject_of[values["hadm_id"]], "hadm_id": hadm_of[values["hadm_id"]]}
                values |= {"drug": plant(values["drug"])} if "drug" in header else {}
                kept_rows.append(tuple(values.values()))
        _write(made.notes / f"hosp/{name}.csv.gz", header, kept_rows)

    # MIMIC-III: the release's admissions, masked in its way, and the planted note of an admission that it hasn't.
    events = [(f"{mark}{100 + i}", f"{mark}{100_001 + i}", note.text) for i, note in enumerate([*cliniq, elsewhere])]
    events[-1] = (f"{mark}101", *events[-1][1:])
    write_mimic3(
        made.mimic3,
        NOTEEVENTS=[
            (i, subject, hadm, "2101-01-01", "Discharge summary", "Report", "", text.replace("___", "[**2101-1-1**]"))
            for i, (subject, hadm, text) in enumerate(events, 1)
        ],
    )
    _write_release(made, [hadm for _, hadm, _ in events[:-1]], cliniq)
    _write_bios(made.bios)
    return made


def _open_cliniq(n: int) -> Benchmark:
    """Of OpenCliniQ's dev, patients with a disease that their note has by an abbreviation: notebook 00 shows one."""
    whole = load_benchmark(ROOT / "data/open_cliniq", "dev")
    kind, tasks = whole.query_types, single_patient_tasks(whole, "abbreviation")
    shown = {task.note_id for task in tasks if kind[task.query_id] == "disease"}
    return subset(whole, [p for p in whole.patients if p.note_id in shown][:n])


def _write_release(made: Miniature, hadm_ids: list[str], cliniq: list[Note]) -> None:
    """The authors' files, judgments from OpenCliniQ's by chunk number."""
    whole = _open_cliniq(len(cliniq))
    texts, _ = read_first_summaries(made.mimic3, hadm_ids)
    chunks = {f"{h}_{k}": c for h, text in texts.items() for k, c in enumerate(release_chunks(release_clean(text)))}
    hadm_of = {note.note_id: hadm for note, hadm in zip(cliniq, hadm_ids, strict=True)}
    number = {query_id: str(i) for i, query_id in enumerate(whole.queries)}
    lines: dict[str, list[str]] = {}
    for query_id, kind in whole.query_types.items():
        query = {"_id": number[query_id], "text": whole.queries[query_id]}
        lines.setdefault(f"queries_{kind}.jsonl", []).append(json.dumps(query))
        for chunk_id, match_type in whole.match_types.get(query_id, {}).items():
            note_id, _, k = chunk_id.rpartition("_")
            if (at := f"{hadm_of[note_id]}_{k}") in chunks:
                lines.setdefault(f"qrels_{kind}.tsv", []).append(f"{number[query_id]}\t{at}\t{match_type}")
    lines["test_hadm_ids.txt"] = hadm_ids
    for name, found in lines.items():
        (made.release / name).write_text("\n".join(found) + "\n", encoding="utf-8")


def _write_bios(folder: Path) -> None:
    """The open concepts alone, in BIOS's layout."""
    graph, columns = KnowledgeGraph(), ("name", "type", "synonyms", "abbreviations", "is_a", "treats_or_treated_by")
    with gzip.open(ROOT / "data/open_kg/concepts.tsv.gz", "rt", encoding="utf-8") as handle:
        concepts = [{c: row[c] for c in columns} for row in csv.DictReader(handle, delimiter="\t")]
    cui_of = {row["name"]: f"CN{i:06d}" for i, row in enumerate(concepts)}
    for row in concepts:
        cui = cui_of[row["name"]]
        graph.cui2pt[cui] = row["name"]
        for term in (row["name"], *filter(None, f"{row['synonyms']}; {row['abbreviations']}".split("; "))):
            graph.add_term(cui, term)
        if parents := [cui_of[name] for name in row["is_a"].split("; ") if name in cui_of and name != row["name"]]:
            graph.is_a[cui] = parents
        for name in row["treats_or_treated_by"].split("; "):
            if name in cui_of:
                graph.add_relation(cui, "may_treat", cui_of[name])
    save_bios(graph, folder)
