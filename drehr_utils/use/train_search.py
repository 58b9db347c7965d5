"""What `drehr-search train` does: notebooks 01 to 05 on one's own notes, by the functions that they call.

A folder that its user alone can read, and that git ignores, holds what is made on the way, notes among it; in `hybrid/`
is what `drehr-search index --model` takes. The same call goes on where one was cut off.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np

from drehr_utils import artifacts, files, pipeline
from drehr_utils.config import Recipe
from drehr_utils.data.notes import NOTE_COLUMNS, Note, note_tables
from drehr_utils.errors import DataError
from drehr_utils.knowledge import normalization, vocabularies
from drehr_utils.knowledge.graph import KnowledgeGraph, save_bios
from drehr_utils.profiles import PROFILES
from drehr_utils.search.hybrid import GRAPH_FOLDER, Hybrid
from drehr_utils.search.index import TRAINING_LOCK
from drehr_utils.training import encoders

HYBRID = "hybrid"
MOST_STEPS = 100  # unless a number is given: as the profile open, half an hour on one core


def train_on(
    source: Path,
    notes: Sequence[Note] | None,
    out: Path,
    start: Path,
    *,
    steps: int | None = None,
    batch: int = 32,
    answers: Path | None = None,
    llm: bool = False,
) -> Path:
    """The hybrid's folder, of an encoder that goes on from `start` by the improved recipe: on the entities of a
    language model (its `answers`, or asked for with `llm`: servers.server_from_env), else on stage I's positives.

    `notes`: None where `source` is a folder in MIMIC's layout, whose splits count; else all of them train. Raises
    DataError for a folder that holds something else, no match with the graph, and too few chunks for a batch."""
    if out.is_file():
        raise DataError(f"{out.name}: is a file; name a folder with --out")
    if out.exists() and any(out.iterdir()) and not (out / TRAINING_LOCK).exists():
        raise DataError(f"{out.name}/: isn't empty, and no training of ours; name a new folder with --out")
    if start.exists() and start.resolve().is_relative_to(out.resolve()):
        raise DataError(
            f"{out.name}/: has the model to go on from, which it would replace; name a new folder with --out"
        )
    before = Hybrid.load(start, KnowledgeGraph())
    out.mkdir(parents=True, exist_ok=True, mode=0o700)
    files.keep_private(out)
    files.write_atomically(out / ".gitignore", b"*\n")
    with artifacts.lock(out / TRAINING_LOCK, "training on notes", wait=False):
        asked = bool(answers or llm)
        profile = replace(
            PROFILES["full"],
            name=str(out.absolute()),  # so profile.cache is this folder
            protected=True,
            notes=source if notes is None else _as_tables(notes, out / "notes"),
            benchmark=None,
            bios=_graph_folder(start, out),
            recorded_answers=(answers,) if answers else (),
            unanswered=0.01 if asked else 1.0,
            encoder=str(start),
        )
        _forget_earlier_notes(out, profile.notes)
        before.graph = pipeline.knowledge_graph(profile)
        sets = pipeline.stage2_sets(profile) if asked else pipeline.stage1_sets(profile)
        found = np.count_nonzero(np.diff(sets.offsets))
        if not found:
            raise DataError(f"{source.name}: no name of the graph is in its {len(sets)} chunks: nothing to learn")
        if found < batch:
            said = f"{found} of {len(sets)} chunks have an entity, and a batch takes {batch}"
            raise DataError(f"{source.name}: {said}; give more notes, or --batch {found} or less")
        config = replace(profile.improved.stage2, batch_size=batch, max_steps=MOST_STEPS)
        steps = steps or config.steps(found)
        said = f"{len(sets)} chunks, {found} of them with an entity; {steps} steps of {batch} chunks"
        print(f"{said}; stopped, it goes on when called again", flush=True)
        config = replace(config, epochs=steps, max_steps=steps)
        reads = bool(normalization.names_read(before.encoder.tokenizer))
        recipe = Recipe(stage2=config, read_names=not reads) if asked else Recipe(config, read_names=not reads)
        folder, _ = pipeline.train_recipe(profile, recipe)
        trained, fresh = Hybrid(encoders.load_encoder(folder), before.graph, before.weights), out / f"new-{HYBRID}"
        artifacts.remove(fresh)
        artifacts.cached_folder(fresh, trained.save)
        artifacts.remove(out / HYBRID)  # only now: on a full disk the one before stays
        return fresh.rename(out / HYBRID)


def _forget_earlier_notes(out: Path, notes: Path) -> None:
    """Takes away what a training on other notes kept of their texts: who was taken out of NOTES isn't to stay here. A
    language model's answers, which cost more than a minute, stay."""
    now, kept = artifacts.digest(note_tables(notes)).encode(), out / "notes.sha256"
    if kept.exists() and kept.read_bytes() == now:
        return
    for made in ("corpus", "positives"):
        artifacts.remove(out / made)
    files.write_atomically(kept, now)


def _as_tables(notes: Sequence[Note], folder: Path) -> Path:
    """The notes in MIMIC-IV's layout, all of them for training."""
    tables = {"discharge": [NOTE_COLUMNS, *map(astuple, notes)]}
    tables["splits"] = [("subject_id", "note_id", "split"), *((n.subject_id, n.note_id, "train") for n in notes)]
    for name, rows in tables.items():
        file = io.StringIO(newline="")
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
        files.write_atomically(folder / f"{name}.csv.gz", file.getvalue().encode())
    return folder


def _graph_folder(start: Path, out: Path) -> Path:
    """The graph beside the encoder to start from, else the open one."""
    if (start / GRAPH_FOLDER).is_dir():
        return start / GRAPH_FOLDER
    open_kg = PROFILES["open"].open_kg
    place = out / f"graph-{artifacts.digest(vocabularies.build_open_kg, *vocabularies.made_of(open_kg))}"
    return artifacts.cached_folder(place, lambda partial: save_bios(vocabularies.build_open_kg(open_kg), partial))
