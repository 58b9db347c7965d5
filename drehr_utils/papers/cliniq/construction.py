"""CliniQ's construction from a corpus in MIMIC's layout to a folder in BEIR's (CliniQ §3), notebook 06's steps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd

from drehr_utils.data.benchmark import OWN_BENCHMARK, QRELS_COLUMNS, Benchmark, Patient, benchmark_folder
from drehr_utils.data.notes import Note, chunk_note, read_notes, read_splits
from drehr_utils.errors import DataError
from drehr_utils.files import write_atomically
from drehr_utils.llm.servers import server_from_env
from drehr_utils.papers.cliniq import curation, judging
from drehr_utils.papers.cliniq.curation import CodedAdmissions, Curation
from drehr_utils.papers.cliniq.judging import LABELS, Pair, own_pairs
from drehr_utils.profiles import Profile

JUDGMENT_STORE = "llm/judgments.sqlite"  # a language model's answers, so that a stopped run goes on
TYPE_OF_KIND = {"diagnosis": "disease", "procedure": "procedure", "drug": "drug"}


def split_notes(folder: Path, split: str, sample: int | None = None, seed: int = 0) -> list[Note]:
    """The notes of a split, in the table's order; `sample` of them drawn without replacement. Of an admission with
    several summaries the first, as in CliniQ's release: the others are addenda, mostly, of a few lines.

    Raises DataError for a split without a note, as a hash of few patients may leave one."""
    read, _ = read_notes(folder)
    splits = read_splits(folder, read)
    of_admission: dict[str, Note] = {}
    for note in read:
        if splits[note.note_id] == split:
            of_admission.setdefault(note.hadm_id or note.note_id, note)
    notes = list(of_admission.values())
    if not notes:
        raise DataError(
            f"{Path(folder).name}/: none of the {len(read)} notes is of the split {split}; say in a splits.csv "
            f"(subject_id,note_id,split) which patients are"
        )
    if sample is not None and sample < len(notes):
        chosen = np.sort(np.random.default_rng(seed).choice(len(notes), sample, replace=False))
        notes = [notes[i] for i in chosen]
    return notes


def draft_benchmark(notes: Iterable[Note], admissions: CodedAdmissions, made: Curation) -> Benchmark:
    """Chunks, queries and patients, not judged yet (CliniQ §3.1, §3.2). Query ids follow the texts' order.

    A patient's own id is kept where there are several notes of it, so that they are drawn together."""
    notes = list(notes)
    of_patient = Counter(note.subject_id for note in notes)
    chunks = {note: chunk_note(note) for note in notes}
    asked = {note: curation.patient_queries(note.hadm_id, admissions, made) for note in chunks}
    # A text that is both a disease's and a drug's is one query, of the kind that comes first: it is entered last.
    kinds = dict(sorted(chain(*asked.values()), key=lambda found: curation.KINDS.index(found[1]), reverse=True))
    width = max(4, len(str(max(len(kinds) - 1, 0))))
    ids = {text: f"q{i:0{width}d}" for i, text in enumerate(sorted(kinds))}
    return Benchmark(
        corpus={chunk.id: chunk.text for of_note in chunks.values() for chunk in of_note},
        queries={query_id: text for text, query_id in ids.items()},
        query_types={query_id: TYPE_OF_KIND[kinds[text]] for text, query_id in ids.items()},
        patients=[
            Patient(
                note.hadm_id,
                note.note_id,
                [chunk.id for chunk in chunks[note]],
                [ids[q] for q, _ in asked[note]],
                note.subject_id if of_patient[note.subject_id] > 1 else "",
            )
            for note in chunks
        ],
        qrels={},
        match_types={},
    )


def with_judgments(draft: Benchmark, strings: set[Pair], semantic: dict[Pair, str]) -> Benchmark:
    """The benchmark with its judgments: string matches, and the semantic types of pairs that match by no string."""
    if both := strings & semantic.keys():
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
    target, kinds = Path(folder) / split, benchmark.query_types
    corpus = ({"_id": key, "title": "", "text": text} for key, text in benchmark.corpus.items())
    queries = ({"_id": key, "text": text, "type": kinds[key]} for key, text in benchmark.queries.items())
    patients = (
        {
            "hadm_id": int(patient.hadm_id) if patient.hadm_id.isdecimal() else patient.hadm_id,
            "note_id": patient.note_id,
            "chunks": len(patient.chunk_ids),
            "queries": patient.query_ids,
        }
        | ({"subject_id": patient.subject_id} if patient.subject_id else {})
        for patient in benchmark.patients
    )
    whose = dict.fromkeys(own_pairs(benchmark), "own") | (origin or {})
    qrels = (
        (q, c, str(score), benchmark.match_types[q][c], whose.get((q, c), "other"))
        for q, judged in benchmark.qrels.items()
        for c, score in judged.items()
    )
    for name, lines in (
        ("corpus.jsonl", map(json.dumps, corpus)),
        ("queries.jsonl", map(json.dumps, queries)),
        ("patients.jsonl", map(json.dumps, patients)),
        (f"qrels/{split}.tsv", map("\t".join, (QRELS_COLUMNS, *qrels))),
    ):
        write_atomically(target / name, "".join(f"{line}\n" for line in lines).encode())
    return target


def save_dev(profile: Profile) -> Path | None:
    """Notebook 06's steps for the notes of dev, so that its benchmark has both splits (see CliniqSizes.dev_sample)."""
    if not profile.cliniq.dev_sample:
        return None
    notes = split_notes(profile.notes, "dev", profile.cliniq.dev_sample, profile.seed)
    admissions = curation.read_coded_admissions(profile.notes, [note.hadm_id for note in notes])
    draft = draft_benchmark(notes, admissions, profile_curation(profile, admissions))
    strings = judging.string_matches(draft.queries, draft.corpus)
    judges, _ = profile_judgments(profile, draft, strings)
    made = with_judgments(draft, strings, judging.combine_judgments(*judges))
    return save_benchmark(made, profile.cache / OWN_BENCHMARK, "dev")


def profile_curation(profile: Profile, admissions: CodedAdmissions) -> Curation:
    """The recorded curation; without one, titles by rule and drugs by the language model, or by rule without one."""
    if profile.cliniq.recorded:
        return curation.read_curation(benchmark_folder(profile) / "query_curation.csv.gz")
    server = server_from_env()
    if server is None:
        return curation.curate(admissions)
    orders = {order for lines in admissions.drugs.values() for order in lines}
    names, _ = curation.clean_drugs_by_llm(orders, server=server, store=profile.cache / "llm/drug_names.sqlite")
    return curation.curate(admissions, names)


def profile_judgments(
    profile: Profile, draft: Benchmark, strings: set[Pair]
) -> tuple[list[dict[Pair, str]], pd.DataFrame]:
    """Each judge's labels, then the adjudicator's where there are two: recorded, or one language model's.

    And what there is to count: pairs by judge and label; of a model also requests, malformed lines, unjudged pairs.
    Raises DataError where answers are missing and no server is set (servers.server_from_env)."""
    chosen = profile.cliniq
    folder = benchmark_folder(profile) / chosen.split / "judgments" if chosen.recorded else Path()
    files = sorted(folder.glob("judge_*.tsv")) if chosen.recorded else []
    if files:
        files += [folder / "adjudicated.tsv"] if files[1:] else []
        judges = {path.stem: judging.read_judgments(path, draft, strings) for path in files}
        counts = {name: pd.Series(list(labels.values())).value_counts() for name, labels in judges.items()}
        counted = pd.DataFrame(counts).reindex(LABELS).fillna(0).astype(int).rename_axis("what")
        return list(judges.values()), counted
    questions = judging.judgment_questions(draft, strings, chosen)
    judged = judging.judge(draft, questions, chosen, server=server_from_env(), store=profile.cache / JUDGMENT_STORE)
    return [judged.labels], judged.frame().set_index("what")
