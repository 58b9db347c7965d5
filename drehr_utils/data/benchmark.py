"""CliniQ's benchmark in BEIR's layout: loading, checking, and the Single-Patient searches (CliniQ §3.3, §4.1)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drehr_utils.errors import DataError
from drehr_utils.files import read_json_lines, read_text_lines, short_name

MATCH_TYPES = ("string", "synonym", "abbreviation", "hyponym", "implication")
QUERY_TYPES = ("disease", "procedure", "drug")
QRELS_COLUMNS = ("query-id", "corpus-id", "score", "match_type", "patient")


@dataclass(frozen=True)
class Patient:
    """One discharge summary, and the queries made of its admission's codes (Q_i of CliniQ §3.2)."""

    hadm_id: str
    note_id: str
    chunk_ids: list[str]
    query_ids: list[str]


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


@dataclass(frozen=True)
class SearchTask:
    """One Single-Patient search: rank `chunk_ids` (one note's) for `query_id`; `relevant` is never empty."""

    search_id: str
    query_id: str
    note_id: str
    chunk_ids: list[str]
    relevant: dict[str, int]


def load_benchmark(folder: str | Path, split: str) -> Benchmark:
    """Read `<folder>/<split>/`: `corpus.jsonl`, `queries.jsonl`, `patients.jsonl`, `qrels/<split>.tsv`.

    A file in BEIR's plain three-column qrels is refused: without match types there is no semantic match assessment.
    Raises DataError, naming file, row and field, for a missing file, bad JSON, a missing field, a duplicate id, an
    unknown query, chunk or match type, and a patient whose number of chunks differs from the corpus.
    """
    folder = Path(folder) / split
    corpus: dict[str, str] = {}
    note_chunks: dict[str, list[str]] = {}
    for row, where, chunk in read_json_lines(folder / "corpus.jsonl", ("_id", "text")):
        if chunk["_id"] in corpus:
            raise DataError(f"{where}, row {row}, field _id: {chunk['_id']!r} is there twice; keep one")
        corpus[chunk["_id"]] = chunk["text"]
        note_chunks.setdefault(chunk["_id"].rpartition("_")[0], []).append(chunk["_id"])

    queries: dict[str, str] = {}
    query_types: dict[str, str] = {}
    for row, where, query in read_json_lines(folder / "queries.jsonl", ("_id", "text", "type")):
        if query["_id"] in queries:
            raise DataError(f"{where}, row {row}, field _id: {query['_id']!r} is there twice; keep one")
        if query["type"] not in QUERY_TYPES:
            raise DataError(f"{where}, row {row}, field type: {query['type']!r} is none of {', '.join(QUERY_TYPES)}")
        queries[query["_id"]] = query["text"]
        query_types[query["_id"]] = query["type"]

    patients = _read_patients(folder / "patients.jsonl", note_chunks, queries)
    qrels, match_types = _read_qrels(folder / "qrels" / f"{split}.tsv", corpus, queries)
    return Benchmark(corpus, queries, query_types, patients, qrels, match_types)


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
            pool, relevant = [], {}
            for chunk_id in patient.chunk_ids:
                found = judged.get(chunk_id)
                if found is None or match_type in (None, found):
                    pool.append(chunk_id)
                    if found is not None:
                        relevant[chunk_id] = benchmark.qrels[query_id][chunk_id]
            if relevant:
                tasks.append(SearchTask(f"{query_id}@{patient.note_id}", query_id, patient.note_id, pool, relevant))
    return tasks


def subset(benchmark: Benchmark, n_patients: int) -> Benchmark:
    """The benchmark of the first `n_patients` patients: their chunks, their queries, the judgments between them."""
    patients = benchmark.patients[:n_patients]
    chunks = {chunk_id for patient in patients for chunk_id in patient.chunk_ids}
    asked = {query_id for patient in patients for query_id in patient.query_ids}
    qrels, match_types = {}, {}
    for query_id, judged in benchmark.qrels.items():
        kept = {chunk_id: score for chunk_id, score in judged.items() if chunk_id in chunks}
        if query_id in asked and kept:
            qrels[query_id] = kept
            match_types[query_id] = {chunk_id: benchmark.match_types[query_id][chunk_id] for chunk_id in kept}
    return Benchmark(
        corpus={key: text for key, text in benchmark.corpus.items() if key in chunks},
        queries={key: text for key, text in benchmark.queries.items() if key in asked},
        query_types={key: kind for key, kind in benchmark.query_types.items() if key in asked},
        patients=patients,
        qrels=qrels,
        match_types=match_types,
    )


def _read_patients(path: Path, note_chunks: dict[str, list[str]], queries: dict[str, str]) -> list[Patient]:
    patients: dict[str, Patient] = {}
    for row, where, record in read_json_lines(path, ("hadm_id", "note_id", "chunks", "queries")):
        note_id = record["note_id"]
        if note_id in patients:
            raise DataError(f"{where}, row {row}, field note_id: {note_id!r} is there twice; keep one")
        if note_id not in note_chunks:
            raise DataError(f"{where}, row {row}, field note_id: no chunk of {note_id!r} in corpus.jsonl")
        if record["chunks"] != len(note_chunks[note_id]):
            raise DataError(
                f"{where}, row {row}, field chunks: {record['chunks']!r}, but corpus.jsonl has "
                f"{len(note_chunks[note_id])} of {note_id!r}; cut the corpus again"
            )
        if not isinstance(record["queries"], list):
            raise DataError(f"{where}, row {row}, field queries: not a list of query ids")
        for position, query_id in enumerate(record["queries"]):
            if query_id not in queries:
                raise DataError(f"{where}, row {row}, field queries: {query_id!r} is not in queries.jsonl")
            if query_id in record["queries"][:position]:
                raise DataError(f"{where}, row {row}, field queries: {query_id!r} is there twice; keep one")
        patients[note_id] = Patient(str(record["hadm_id"]), note_id, note_chunks[note_id], record["queries"])
    return list(patients.values())


def _read_qrels(
    path: Path, corpus: dict[str, str], queries: dict[str, str]
) -> tuple[dict[str, dict[str, int]], dict[str, dict[str, str]]]:
    where = short_name(path)
    lines = read_text_lines(path)
    header = next(lines, (1, ""))[1].split("\t")
    missing = [column for column in QRELS_COLUMNS if column not in header]
    if missing:
        raise DataError(f"{where}, row 1, field {missing[0]}: missing column; the header is {', '.join(QRELS_COLUMNS)}")
    qrels: dict[str, dict[str, int]] = {}
    match_types: dict[str, dict[str, str]] = {}
    for row, line in lines:
        if not line:
            continue
        cells = line.split("\t")
        if len(cells) != len(header):
            raise DataError(f"{where}, row {row}: {len(cells)} fields, the header has {len(header)}; separate by tabs")
        judgment = dict(zip(header, cells, strict=True))
        query_id, chunk_id = judgment["query-id"], judgment["corpus-id"]
        if query_id not in queries:
            raise DataError(f"{where}, row {row}, field query-id: {query_id!r} is not in queries.jsonl")
        if chunk_id not in corpus:
            raise DataError(f"{where}, row {row}, field corpus-id: {chunk_id!r} is not in corpus.jsonl")
        if not judgment["score"].isdigit():
            raise DataError(f"{where}, row {row}, field score: {judgment['score']!r} is not a whole number from 0")
        if judgment["match_type"] not in MATCH_TYPES:
            raise DataError(
                f"{where}, row {row}, field match_type: {judgment['match_type']!r} is none of {', '.join(MATCH_TYPES)}"
            )
        if chunk_id in qrels.get(query_id, {}):
            raise DataError(f"{where}, row {row}, field corpus-id: {query_id!r} with {chunk_id!r} is there twice")
        if int(judgment["score"]) > 0:
            qrels.setdefault(query_id, {})[chunk_id] = int(judgment["score"])
            match_types.setdefault(query_id, {})[chunk_id] = judgment["match_type"]
    return qrels, match_types
