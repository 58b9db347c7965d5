"""CliniQ's construction from a corpus in MIMIC's layout to a folder in BEIR's (CliniQ §3), notebook 06's steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from drehr_utils.data.benchmark import QRELS_COLUMNS, Benchmark, Patient
from drehr_utils.data.notes import Note, chunk_note, read_notes, read_splits
from drehr_utils.errors import DataError
from drehr_utils.llm import servers, strict
from drehr_utils.papers.cliniq import curation
from drehr_utils.papers.cliniq.curation import CodedAdmissions, Curation
from drehr_utils.papers.cliniq.judging import (
    LABELS,
    Pair,
    Question,
    judge,
    judgment_questions,
    own_pairs,
    read_judgments,
)
from drehr_utils.profiles import Profile

TYPE_OF_KIND = {"diagnosis": "disease", "procedure": "procedure", "drug": "drug"}


def split_notes(folder: Path, split: str, sample: int | None = None, seed: int = 0) -> list[Note]:
    """The notes of a split (`all`: every note), in the table's order; `sample` of them drawn without replacement."""
    notes, _ = read_notes(folder)
    if split != "all":
        splits = read_splits(folder, notes)
        notes = [note for note in notes if splits[note.note_id] == split]
    if sample is not None and sample < len(notes):
        chosen = np.sort(np.random.default_rng(seed).choice(len(notes), sample, replace=False))
        notes = [notes[i] for i in chosen]
    return notes


def draft_benchmark(notes: Iterable[Note], admissions: CodedAdmissions, made: Curation) -> Benchmark:
    """Chunks, queries and patients, not judged yet (CliniQ §3.1, §3.2). Query ids follow the texts' order."""
    chunks = {note: chunk_note(note) for note in notes}
    asked = {note: curation.patient_queries(note.hadm_id, admissions, made) for note in chunks}
    kinds: dict[str, str] = {}
    for kind in curation.KINDS:  # a text that is both a disease's and a drug's is one query, of the first kind
        for found in asked.values():
            kinds.update((query, k) for query, k in found if k == kind and query not in kinds)
    width = max(4, len(str(max(len(kinds) - 1, 0))))
    ids = {text: f"q{i:0{width}d}" for i, text in enumerate(sorted(kinds))}
    return Benchmark(
        corpus={chunk.id: chunk.text for of_note in chunks.values() for chunk in of_note},
        queries={query_id: text for text, query_id in ids.items()},
        query_types={query_id: TYPE_OF_KIND[kinds[text]] for text, query_id in ids.items()},
        patients=[
            Patient(note.hadm_id, note.note_id, [chunk.id for chunk in chunks[note]], [ids[q] for q, _ in asked[note]])
            for note in chunks
        ],
        qrels={},
        match_types={},
    )


def with_judgments(draft: Benchmark, strings: set[Pair], semantic: dict[Pair, str]) -> Benchmark:
    """The benchmark with its judgments: string matches, and the semantic types of pairs that match by no string."""
    both = strings & semantic.keys()
    if both:
        raise DataError(f"judgments: {min(both)} is a string match; only other pairs have a semantic type")
    match_types: dict[str, dict[str, str]] = {}
    for (query_id, chunk_id), kind in sorted({**dict.fromkeys(strings, "string"), **semantic}.items()):
        match_types.setdefault(query_id, {})[chunk_id] = kind
    qrels = {query_id: dict.fromkeys(judged, 1) for query_id, judged in match_types.items()}
    return replace(draft, qrels=qrels, match_types=match_types)


def save_benchmark(benchmark: Benchmark, folder: Path, split: str, origin: dict[Pair, str] | None = None) -> Path:
    """Write `<folder>/<split>/` as benchmark.load_benchmark and BEIR's reader read it; returns that folder.

    The qrels' last column is `own` (a query of the chunk's patient) or `other`; `origin` says it for pairs where the
    patients' queries don't. The same benchmark gives the same bytes."""
    target = Path(folder) / split
    (target / "qrels").mkdir(parents=True, exist_ok=True)
    kinds = benchmark.query_types
    _write_lines(target / "corpus.jsonl", ({"_id": i, "title": "", "text": t} for i, t in benchmark.corpus.items()))
    _write_lines(
        target / "queries.jsonl", ({"_id": i, "text": t, "type": kinds[i]} for i, t in benchmark.queries.items())
    )
    patients = (
        {
            "hadm_id": int(p.hadm_id) if p.hadm_id.isdecimal() else p.hadm_id,
            "note_id": p.note_id,
            "chunks": len(p.chunk_ids),
            "queries": p.query_ids,
        }
        for p in benchmark.patients
    )
    _write_lines(target / "patients.jsonl", patients)
    own, origin = set(own_pairs(benchmark)), origin or {}
    lines = ["\t".join(QRELS_COLUMNS)]
    for query_id, judged in benchmark.qrels.items():
        for chunk_id, score in judged.items():
            pair = (query_id, chunk_id)
            whose = origin.get(pair, "own" if pair in own else "other")
            lines.append("\t".join((*pair, str(score), benchmark.match_types[query_id][chunk_id], whose)))
    (target / "qrels" / f"{split}.tsv").write_bytes(("\n".join(lines) + "\n").encode())
    return target


def _write_lines(path: Path, records: Iterable[dict]) -> None:
    path.write_bytes("".join(json.dumps(record) + "\n" for record in records).encode())


# --- the steps for a profile -----------------------------------------------------------------------------------------


def profile_notes(profile: Profile) -> tuple[list[Note], CodedAdmissions]:
    """The profile's notes for the benchmark, and their admissions' codes and orders."""
    chosen = profile.cliniq
    notes = split_notes(profile.notes, chosen.split, chosen.sample, profile.seed)
    return notes, curation.read_coded_admissions(profile.notes, (note.hadm_id for note in notes))


def profile_curation(profile: Profile, admissions: CodedAdmissions) -> Curation:
    """The recorded curation; without one, titles by rule and drugs by the language model, or by rule without one."""
    if profile.cliniq.recorded:
        return curation.read_curation(profile.benchmark / "query_curation.csv.gz")
    server = servers.server_from_env()
    if server is None:
        return curation.curate(admissions)
    orders = {order for lines in admissions.drugs.values() for order in lines}
    names, _ = curation.clean_drugs_by_llm(orders, server=server, store=profile.cache / "cliniq/drug_names.jsonl")
    return curation.curate(admissions, names)


def judge_files(profile: Profile) -> list[Path]:
    """The recorded judges' tables, in order; empty where the profile has none."""
    if not profile.cliniq.recorded:
        return []
    return sorted((profile.benchmark / profile.cliniq.split / "judgments").glob("judge_*.tsv"))


def profile_judgments(
    profile: Profile, draft: Benchmark, strings: set[Pair]
) -> tuple[list[dict[Pair, str]], pd.DataFrame]:
    """Each judge's labels, then the adjudicator's where there are two: recorded, or one language model's.

    And what there is to count: pairs by judge and label; of a model also requests, malformed lines, unjudged pairs.
    Raises DataError where answers are missing and no server is set (servers.server_from_env)."""
    files = judge_files(profile)
    if files:
        third = files[0].with_name("adjudicated.tsv")
        files = [*files, *([third] if files[1:] else [])]
        judges = [read_judgments(path, draft, strings) for path in files]
        counts = {
            path.stem: pd.Series(list(judge.values())).value_counts() for path, judge in zip(files, judges, strict=True)
        }
        return judges, pd.DataFrame(counts).reindex(LABELS).fillna(0).astype(int).rename_axis("what")
    chosen = profile.cliniq
    questions = judgment_questions(draft, strings, chosen)
    judged = judge(draft, questions, chosen, server=servers.server_from_env(), store=judgment_store(profile))
    return [judged.labels], judged.frame().set_index("what")


def judgment_store(profile: Profile) -> Path:
    """Where a language model's answers of the judging are kept, so that a stopped run goes on."""
    return profile.cache / "cliniq/judgments.jsonl"


def unanswered_questions(profile: Profile, questions: Iterable[Question]) -> list[Question]:
    """Those of the questions that the store doesn't answer yet: what judging would send now."""
    questions = list(questions)
    open_ones = strict.unanswered((q.request for q in questions), store=judgment_store(profile))
    ids = {request.id for request in open_ones}
    return [question for question in questions if question.request.id in ids]
