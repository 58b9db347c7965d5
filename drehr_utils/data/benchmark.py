"""CliniQ's benchmark in BEIR's layout: loading, checking, and the Single-Patient searches (CliniQ §3.3, §4.1)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drehr_utils.errors import DataError
from drehr_utils.files import read_json_lines, refuse, short_name, tab_rows
from drehr_utils.profiles import Profile

MATCH_TYPES = ("string", "synonym", "abbreviation", "hyponym", "implication")
QUERY_TYPES = ("disease", "procedure", "drug")
OWN_BENCHMARK = "cliniq"  # the folder of a profile's cache in which notebook 06 puts what it makes
QRELS_COLUMNS = ("query-id", "corpus-id", "score", "match_type", "patient")


@dataclass(frozen=True)
class Patient:
    """One discharge summary, and the queries made of its admission's codes (Q_i of CliniQ §3.2)."""

    hadm_id: str
    note_id: str
    chunk_ids: list[str]
    query_ids: list[str]
    subject_id: str = ""  # known where the benchmark's tables were at hand; see overlap


@dataclass
class Benchmark:
    """Everything of one split. `corpus` and `queries` keep the files' order: row and column order of a score matrix.

    `qrels` holds positive judgments only, and only queries that have one; `match_types` has the same keys.
    """

    corpus: dict[str, str]
    queries: dict[str, str]
    query_types: dict[str, str]
    patients: list[Patient]
    qrels: dict[str, dict[str, int]]
    match_types: dict[str, dict[str, str]]

    @property
    def texts(self) -> tuple[list[str], list[str]]:
        """Of the queries and of the chunks, in the order of a score matrix (in a digest, a dict has none)."""
        return list(self.queries.values()), list(self.corpus.values())


@dataclass(frozen=True)
class SearchTask:
    """One Single-Patient search: rank `chunk_ids` (one note's) for `query_id`; `relevant` is never empty."""

    search_id: str
    query_id: str
    note_id: str
    chunk_ids: list[str]
    relevant: dict[str, int]


def benchmark_folder(profile: Profile) -> Path:
    """The profile's benchmark, else the one that notebook 06 has made of its own notes. Raises DataError if neither."""
    own = profile.cache / OWN_BENCHMARK
    if profile.benchmark is not None:
        return profile.benchmark
    if all((own / split / "qrels" / f"{split}.tsv").exists() for split in ("dev", "test")):  # which are written last
        return own
    raise DataError(
        "no benchmark: set DREHR_BENCHMARK to CliniQ's release joined with your MIMIC-III (python -m "
        "drehr_utils.papers.cliniq.release --help), or make one of your own notes with a language model: "
        "./run_all.sh --only 06 with this profile, which then is found by itself"
    )


def load_benchmark(folder: str | Path, split: str) -> Benchmark:
    """Read `<folder>/<split>/`: `corpus.jsonl`, `queries.jsonl`, `patients.jsonl`, `qrels/<split>.tsv`.

    A file in BEIR's plain three-column qrels is refused: without match types there is no semantic match assessment.
    Raises DataError, naming file, row and field, for a missing file, bad JSON, a missing field, a duplicate id, an
    unknown query, chunk or match type, and a patient whose number of chunks differs from the corpus.
    """
    folder, read = Path(folder) / split, Benchmark({}, {}, {}, [], {}, {})
    for row, where, chunk in read_json_lines(folder / "corpus.jsonl", ("_id", "text")):
        refuse(where, row, {f"field _id: {chunk['_id']!r} is there twice; keep one": chunk["_id"] in read.corpus})
        read.corpus[chunk["_id"]] = chunk["text"]
    for row, where, query in read_json_lines(folder / "queries.jsonl", ("_id", "text", "type")):
        query_id, kind = query["_id"], query["type"]
        wrong = {f"field _id: {query_id!r} is there twice; keep one": query_id in read.queries}
        wrong[f"field type: {kind!r} is none of {', '.join(QUERY_TYPES)}"] = kind not in QUERY_TYPES
        refuse(where, row, wrong)
        read.queries[query_id], read.query_types[query_id] = query["text"], kind
    _read_patients(folder / "patients.jsonl", read)
    _read_qrels(folder / "qrels" / f"{split}.tsv", read)
    return read


def single_patient_tasks(benchmark: Benchmark, match_type: str | None = None) -> list[SearchTask]:
    """The Single-Patient searches: each patient with each own query that has a relevant chunk in the note (§4.1).

    Under a match type, chunks relevant by another type leave the pool ("temporarily remove them from the corpus"),
    and a query needs a chunk relevant by this type. A search's id is `<query id>@<note id>`.
    """
    if match_type is not None and match_type not in MATCH_TYPES:
        raise ValueError(f"match_type {match_type!r} is none of {', '.join(MATCH_TYPES)}")
    tasks = []
    for patient in benchmark.patients:
        for query_id in patient.query_ids:
            judged = benchmark.match_types.get(query_id, {})
            pool = [c for c in patient.chunk_ids if match_type is None or judged.get(c, match_type) == match_type]
            relevant = {c: benchmark.qrels[query_id][c] for c in pool if c in judged}
            if relevant:
                tasks.append(SearchTask(f"{query_id}@{patient.note_id}", query_id, patient.note_id, pool, relevant))
    return tasks


def subset(benchmark: Benchmark, patients: list[Patient], asked: Iterable[str] | None = None) -> Benchmark:
    """The benchmark of some patients: their chunks, the queries `asked` (default: theirs), the judgments between."""
    chunks = {chunk_id for patient in patients for chunk_id in patient.chunk_ids}
    asked = {query_id for patient in patients for query_id in patient.query_ids} if asked is None else set(asked)

    def cut(judged: dict[str, dict]) -> dict[str, dict]:
        kept = {q: {c: found for c, found in of.items() if c in chunks} for q, of in judged.items() if q in asked}
        return {query_id: of for query_id, of in kept.items() if of}

    queries, kinds = ({q: of[q] for q in of if q in asked} for of in (benchmark.queries, benchmark.query_types))
    corpus = {chunk_id: text for chunk_id, text in benchmark.corpus.items() if chunk_id in chunks}
    return Benchmark(corpus, queries, kinds, patients, cut(benchmark.qrels), cut(benchmark.match_types))


def _read_patients(path: Path, benchmark: Benchmark) -> None:
    chunks_of, known = defaultdict(list), set()
    for chunk_id in benchmark.corpus:
        chunks_of[chunk_id.rpartition("_")[0]].append(chunk_id)
    for row, where, record in read_json_lines(path, ("hadm_id", "note_id", "chunks", "queries")):
        note_id, n, own = record["note_id"], record["chunks"], record["queries"]
        chunks = chunks_of[note_id]
        cut = f"field chunks: {n!r}, but corpus.jsonl has {len(chunks)} of {note_id!r}; cut the corpus again"
        wrong = {
            f"field note_id: {note_id!r} is there twice; keep one": note_id in known,
            f"field note_id: no chunk of {note_id!r} in corpus.jsonl": not chunks,
            cut: n != len(chunks),
            "field queries: not a list of query ids": not isinstance(own, list)
            or not all(isinstance(query_id, str) for query_id in own),
        }
        refuse(where, row, wrong)
        for at, query_id in enumerate(own):
            wrong = {f"field queries: {query_id!r} is not in queries.jsonl": query_id not in benchmark.queries}
            refuse(where, row, wrong | {f"field queries: {query_id!r} is there twice; keep one": query_id in own[:at]})
        known.add(note_id)
        subject_id = str(record.get("subject_id") or "")
        benchmark.patients.append(Patient(str(record["hadm_id"]), note_id, chunks, own, subject_id))
    if not known:
        raise DataError(f"{short_name(path)}: no patient in it; each searched note needs a line")


def _read_qrels(path: Path, benchmark: Benchmark) -> None:
    for row, where, judgment in tab_rows(path, QRELS_COLUMNS):
        query_id, chunk_id, score, kind = (judgment[column] for column in QRELS_COLUMNS[:4])
        twice = chunk_id in benchmark.qrels.get(query_id, {})
        whole = score.isdecimal() and len(score) < 3  # the metrics take time in proportion to the highest grade
        wrong = {
            f"field query-id: {query_id!r} is not in queries.jsonl": query_id not in benchmark.queries,
            f"field corpus-id: {chunk_id!r} is not in corpus.jsonl": chunk_id not in benchmark.corpus,
            f"field score: {score!r} is not a whole number from 0 to 99": not whole,
            f"field match_type: {kind!r} is none of {', '.join(MATCH_TYPES)}": kind not in MATCH_TYPES,
            f"field corpus-id: {query_id!r} with {chunk_id!r} is there twice": twice,
        }
        refuse(where, row, wrong)
        if int(score) > 0:
            benchmark.qrels.setdefault(query_id, {})[chunk_id] = int(score)
            benchmark.match_types.setdefault(query_id, {})[chunk_id] = kind
    if not benchmark.qrels:
        raise DataError(f"{short_name(path)}: no relevant chunk in it; a search needs one")
