"""The authors' own CliniQ, joined with a local MIMIC-III (CliniQ §1, §3.1, §5.1).

    python -m drehr_utils.papers.cliniq.release --release DIR --mimic DIR --out DIR

The release holds no notes: a user who may read MIMIC-III cuts them anew. Its layout, as the README and the scripts of
the authors' repository say (RELEASE; this project has no copy):

- `test_hadm_ids.txt`: an admission's id a line;
- `queries_disease.jsonl`, `queries_procedure.jsonl`, `queries_drug.jsonl`: `_id` (unique over the three), `text`;
- `qrels_disease.tsv`, `qrels_procedure.tsv`, `qrels_drug.tsv`: no header; query id, chunk id, match type. A chunk's
  id is `<hadm_id>_<k>`, k from 0.

The judgments point into chunks by number, so the notes are cut as the authors' script cuts them, not as notes.clean
does: the first discharge summary of an admission in NOTEEVENTS; all that stands in square brackets on a line goes; 100
words with 10 shared. Letters are lower-cased, as the paper says; that changes no chunk's bounds.

The release is all one set. Its patients are divided here: a tenth, by a hash of their ids, is dev, the rest is test.
Beside them lie the patients' other discharge summaries, by which data.overlap finds them in MIMIC-IV under other ids.

The release doesn't say which queries are a patient's own. A patient's searches are the queries that have a relevant
chunk in the note (§4.1), which gives the paper's 27.9 a patient; in the qrels' last column a query that has a semantic
judgment in the note is `own` (only own codes were judged), one with string matches alone `unknown`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from drehr_utils.config import Resampling
from drehr_utils.data.benchmark import MATCH_TYPES, QUERY_TYPES, Benchmark, Patient, subset
from drehr_utils.data.notes import CHUNK_WORDS, OVERLAP_WORDS, admission_id, iter_rows, need_table
from drehr_utils.data.overlap import OTHER_NOTES
from drehr_utils.errors import DataError
from drehr_utils.evaluation import tables
from drehr_utils.files import (
    hide_messages,
    is_utf8,
    keep_private,
    naming,
    read_json_lines,
    read_text_lines,
    refuse,
    write_atomically,
)
from drehr_utils.papers.cliniq.construction import save_benchmark, with_judgments
from drehr_utils.papers.cliniq.judging import Pair
from drehr_utils.papers.cliniq.statistics import statistics_rows
from drehr_utils.profiles import ROOT

RELEASE = "the authors' repository, github.com/zhao-zy15/CliniQ (folder benchmark), or Hugging Face, THUMedInfo/CliniQ"
PHYSIONET = "PhysioNet, physionet.org/content/mimiciii/1.4 (credentialed access)"
OUT = ROOT / "data/cache/cliniq_release"  # git-ignored: it holds notes under a data use agreement
DEV_SHARE = 0.1  # of the patients
MIN_CHUNKS = 5  # the authors' evaluation script leaves shorter notes out of Single-Patient Retrieval


@dataclass
class Release:
    """The files of the authors' release: admissions, query texts and types, match types by (query, chunk) pair.

    `repeated` counts pairs that stand more than once, of which the first counts."""

    hadm_ids: list[str]
    queries: dict[str, str] = field(default_factory=dict)
    query_types: dict[str, str] = field(default_factory=dict)
    judgments: dict[Pair, str] = field(default_factory=dict)
    repeated: int = 0


def _release_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / "benchmark" / name):
        if path.is_file():
            return path
    raise DataError(f"{folder.name}/: {name} is missing; it comes from {RELEASE}")


def read_release(folder: Path) -> Release:
    """Read a release (its folder, or the repository's root). Raises DataError, naming file, row and field."""
    folder = Path(folder)
    path = _release_file(folder, "test_hadm_ids.txt")
    ids = [(row, line.strip()) for row, line in read_text_lines(path) if line.strip()]
    for row, hadm_id in ids:
        if not hadm_id.isdecimal():
            raise DataError(f"{path.name}, row {row}: {hadm_id!r} is no hadm_id; one number a line")
    release = Release(list(dict.fromkeys(hadm_id for _, hadm_id in ids)))
    known = set(release.hadm_ids)
    for kind in QUERY_TYPES:
        for row, where, query in read_json_lines(_release_file(folder, f"queries_{kind}.jsonl"), ("_id", "text")):
            key, wrong = query["_id"], "is a query already; ids must be unique"
            refuse(where, row, {f"field _id: {key!r} {wrong}": key in release.queries})
            release.queries[key], release.query_types[key] = query["text"], kind
    for kind in QUERY_TYPES:
        path = _release_file(folder, f"qrels_{kind}.tsv")
        for row, line in read_text_lines(path):
            cells = line.split("\t")
            if len(cells) != 3:
                raise DataError(f"{path.name}, row {row}: {len(cells)} fields; query id, chunk id, match type are 3")
            query_id, chunk_id, match_type = cells
            hadm_id, _, number = chunk_id.rpartition("_")
            is_chunk, is_query = hadm_id in known and number.isdecimal(), release.query_types.get(query_id) == kind
            wrong = {
                f"field query id: {query_id!r} is not in queries_{kind}.jsonl": not is_query,
                f"field match type: {match_type!r} is none of {MATCH_TYPES}": match_type not in MATCH_TYPES,
                f"field chunk id: {chunk_id!r} is no <hadm_id>_<k> of test_hadm_ids.txt": not is_chunk,
            }
            refuse(path.name, row, wrong)
            release.repeated += (query_id, chunk_id) in release.judgments
            release.judgments.setdefault((query_id, chunk_id), match_type)
    return release


_BRACKETED = re.compile(r"\[.*?\]")  # on one line, as the authors' script has it


def release_clean(text: str) -> str:
    """A note without what stands in brackets, blanks and line ends folded, lower case; other characters stay."""
    return re.sub(r"[ \n]+", " ", _BRACKETED.sub("", text)).strip().lower()


def release_chunks(text: str, size: int = CHUNK_WORDS, overlap: int = OVERLAP_WORDS) -> list[str]:
    """Windows of at most `size` words that share at most `overlap`, as the authors' splitter (LangChain's) cuts them.

    It splits at blanks, but counts words at any white space: a piece with a tab inside is two words that stay
    together. Where no piece is like that, these are notes.chunk_words."""
    windows: list[list[str]] = [[]]
    total = 0
    for piece in filter(None, text.split(" ")):
        words = len(piece.split())
        if windows[-1] and total + words > size:
            window = list(windows[-1])
            while total > overlap or (total and total + words > size):
                total -= len(window.pop(0).split())
            windows.append(window)
        windows[-1].append(piece)
        total += words
    return [chunk for window in windows if (chunk := " ".join(window).strip())]


def _note_events(folder: Path) -> Path:
    return need_table(folder, f"MIMIC-III's comes from {PHYSIONET}", "NOTEEVENTS", "noteevents")


def _summaries(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    for row, values in iter_rows(path, ("row_id", "subject_id", "hadm_id", "category", "text")):
        if values["category"].strip().lower() == "discharge summary":
            yield row, values | {"hadm_id": admission_id(values["hadm_id"])}


def read_first_summaries(folder: Path, hadm_ids: Sequence[str]) -> tuple[dict[str, str], dict[str, str]]:
    """The first discharge summary's text of each admission, in NOTEEVENTS' order, and the admission's patient.

    Raises DataError for a missing table and for admissions without a summary."""
    path = _note_events(folder)
    wanted, found, patient_of = set(hadm_ids), {}, {}
    for row, values in _summaries(path):
        hadm_id, text = values["hadm_id"], values["text"]
        if hadm_id in wanted and hadm_id not in found:
            wrong = {"field text: bytes that are not UTF-8; take MIMIC-III 1.4's own file": not is_utf8(text)}
            refuse(path.name, row, wrong)
            found[hadm_id], patient_of[hadm_id] = text, values["subject_id"].strip()
    if lost := [hadm_id for hadm_id in hadm_ids if hadm_id not in found]:
        raise DataError(
            f"{path.name}, field hadm_id: {len(lost)} of the release's {len(hadm_ids)} admissions have no discharge "
            f"summary, {lost[0]} among them; take the whole NOTEEVENTS of MIMIC-III 1.4 from {PHYSIONET}"
        )
    return found, patient_of


def save_other_notes(mimic: Path, patient_of: Mapping[str, str], folder: Path) -> int:
    """Writes the patients' discharge summaries of other admissions, and addenda, to `folder` (see data.overlap);
    returns their number."""
    patients, first, lines = set(patient_of.values()), set(patient_of), []
    for _, values in _summaries(_note_events(mimic)):
        is_first = values["hadm_id"] in first
        first.discard(values["hadm_id"])
        if values["subject_id"].strip() in patients and not is_first and is_utf8(values["text"]):
            lines.append(json.dumps({"note_id": values["row_id"], "text": values["text"]}) + "\n")
    write_atomically(folder / OTHER_NOTES, "".join(lines).encode())
    return len(lines)


def divide(benchmark: Benchmark, dev_share: float = DEV_SHARE) -> dict[str, Benchmark]:
    """dev and test by patient: the first share of the patients in the order of their ids' SHA-256 is dev, at least one
    (none for a share of 0). A split has the queries that are judged relevant in it; test alone has them all."""
    ids = {p.subject_id or p.hadm_id for p in benchmark.patients}
    ids = sorted(ids, key=lambda i: hashlib.sha256(i.encode()).hexdigest())
    dev = set(ids[: max(1, round(dev_share * len(ids)))]) if dev_share else set()
    if not dev:
        return {"test": benchmark}
    parts = {"dev": [], "test": []}
    for patient in benchmark.patients:
        parts["dev" if (patient.subject_id or patient.hadm_id) in dev else "test"].append(patient)
    whole = {split: subset(benchmark, patients, benchmark.queries) for split, patients in parts.items()}
    return {split: subset(part, part.patients, part.qrels) for split, part in whole.items()}


def join_release(
    release: Release, notes: dict[str, str], as_evaluated: bool = False, patient_of: Mapping[str, str] | None = None
) -> Benchmark:
    """The release's benchmark over the notes' chunks; note ids are hadm_ids, `patient_of` gives their patients.

    `as_evaluated` leaves out the searches that the authors' evaluation script skips: notes of fewer than MIN_CHUNKS
    chunks, and queries to which every chunk of the note is relevant. Raises DataError where judgments name chunks
    that the notes don't have."""
    corpus, patients = {}, []
    relevant = Counter((chunk_id.rpartition("_")[0], query_id) for query_id, chunk_id in release.judgments)
    for hadm_id, text in notes.items():
        chunks = {f"{hadm_id}_{k}": chunk for k, chunk in enumerate(release_chunks(release_clean(text)))}
        corpus.update(chunks)
        most = len(chunks)
        if as_evaluated:
            most = len(chunks) - 1 if len(chunks) >= MIN_CHUNKS else 0
        asked = [query_id for query_id in release.queries if 0 < relevant[hadm_id, query_id] <= most]
        patients.append(Patient(hadm_id, hadm_id, list(chunks), asked, (patient_of or {}).get(hadm_id, "")))
    if lost := [pair for pair in release.judgments if pair[1] not in corpus]:
        raise DataError(
            f"qrels: {len(lost)} of {len(release.judgments)} judgments name a chunk that the notes don't have, "
            f"{lost[0][1]} among them; NOTEEVENTS is another version's than MIMIC-III 1.4, from {PHYSIONET}"
        )
    draft = Benchmark(corpus, dict(release.queries), dict(release.query_types), patients, {}, {})
    return with_judgments(draft, set(), release.judgments)


def origins(release: Release) -> dict[Pair, str]:
    """`own` for pairs whose query has a semantic judgment in the note, `unknown` for the others."""
    judged = {(q, c.rpartition("_")[0]) for (q, c), kind in release.judgments.items() if kind != "string"}
    return {(q, c): "own" if (q, c.rpartition("_")[0]) in judged else "unknown" for q, c in release.judgments}


def string_share(release: Release, benchmark: Benchmark) -> float:
    """Share of the release's string matches whose query stands in the chunk: near 1 where ours are the authors'."""
    hits = [release.queries[q] in benchmark.corpus[c] for (q, c), kind in release.judgments.items() if kind == "string"]
    return sum(hits) / len(hits) if hits else float("nan")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: join, write `<out>/dev` and `<out>/test`, the patients' other notes and Table 1, print counts; 1 and
    a message where something is missing."""
    parser = argparse.ArgumentParser(prog="python -m drehr_utils.papers.cliniq.release", description=main.__doc__)
    parser.add_argument("--release", type=Path, required=True, help=f"the release's folder; from {RELEASE}")
    parser.add_argument("--mimic", type=Path, required=True, help=f"MIMIC-III's folder; from {PHYSIONET}")
    parser.add_argument("--out", type=Path, default=OUT, help="default: data/cache/cliniq_release (git-ignored)")
    parser.add_argument("--as-evaluated", action="store_true", help="skip the searches that the authors' script skips")
    share = "of the patients that become dev (default: 0.1; 0: all are test, as in the paper; notebooks need a dev)"
    parser.add_argument("--dev-share", type=float, default=DEV_SHARE, metavar="SHARE", help=share)
    given = parser.parse_args(arguments)
    hide_messages()
    try:
        release = read_release(given.release)
        notes, patient_of = read_first_summaries(given.mimic, release.hadm_ids)
        benchmark = join_release(release, notes, given.as_evaluated, patient_of)
        parts, origin = divide(benchmark, given.dev_share), origins(release)
        with naming(given.out, "give another folder as --out"):
            keep_private(given.out)
            if not (given.out / ".gitignore").exists():
                write_atomically(given.out / ".gitignore", b"*\n")
            for split in {"dev", "test"} - parts.keys():  # of an earlier division, whose patients are elsewhere now
                if (given.out / split / "patients.jsonl").exists():
                    shutil.rmtree(given.out / split)
            for split, part in parts.items():
                of_part = {pair: whose for pair, whose in origin.items() if pair[1] in part.corpus}
                save_benchmark(part, given.out, split, of_part)
            others = save_other_notes(given.mimic, patient_of, given.out)
    except DataError as error:
        print(error)
        return 1
    layout = tables.Layout(rows=("group",), columns=("setting",), decimals=1, bold=False)
    ours, theirs = statistics_rows(benchmark, Resampling()), tables.paper_figures("cliniq", 1)
    table1 = tables.with_paper(ours, theirs, append=False)
    print(tables.save_table(table1, "cliniq_release_table1", layout, given.out).to_string())
    print(f"{release.repeated} judgments stood more than once; the first counts.")
    print(f"{100 * string_share(release, benchmark):.1f}% of the string matches stand in the chunk as it was cut here.")
    print(f"{', '.join(f'{split}: {len(part.patients)} notes' for split, part in parts.items())}.")
    print(f"{others} other notes of the same patients are kept beside them, so that none of them trains.")
    print(f"Then run the notebooks under the profile mimic with DREHR_BENCHMARK={given.out.resolve()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
