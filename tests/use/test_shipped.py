"""The weights that come with the repository are those of Table 4's rows, through the index of `drehr-search`."""

from __future__ import annotations

import gzip
from collections import defaultdict

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

from drehr_utils import pipeline
from drehr_utils.evaluation import metrics
from drehr_utils.papers.drehr import rivals, runs
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.search.index import NoteIndex
from drehr_utils.use import search, ship

pytest.importorskip("lancedb")


def test_the_weights_are_halves_that_compute_in_single_precision():
    assert {t.dtype for t in load_file(search.SHIPPED / "model.safetensors").values()} == {torch.float16}
    encoder = SentenceTransformer(str(search.SHIPPED))
    assert next(encoder.parameters()).dtype == torch.float32
    near, far = encoder.similarity(encoder.encode(["keppra 500 bid"]), encoder.encode(["levetiracetam", "knee pain"]))[
        0
    ]
    assert near > far + 0.3


def test_the_model_card_shows_the_record():
    profile = load_profile("full")
    about = next(a for a in runs.abouts(profile) if (a["row"], a["seed"]) == (ship.IMPROVED, 0))
    assert (search.SHIPPED / "README.md").read_text() == ship.card(profile, about)


def recorded(setting):
    """search id -> {chunk id: score} of a committed run file."""
    found = defaultdict(dict)
    with gzip.open(ROOT / f"data/runs/{runs.slug(rivals.HYBRID)}.test.{setting}.run.gz", "rt") as file:
        for line in file:
            asked, _, chunk, _, score, _ = line.split()
            found[asked][chunk] = float(score)
    return found


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    profile = load_profile("open")
    wanted = {patient.note_id for patient in pipeline.benchmark(profile, "test").patients}
    notes = [note for note in pipeline.notes(profile)[0] if note.note_id in wanted]
    index = NoteIndex.create(tmp_path_factory.mktemp("index") / "test", search.hybrid_of())
    index.update(notes, progress=False)
    return index


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["single", "multi"])
def test_the_index_gives_the_scores_and_the_figures_of_table_4(index, setting):
    bench = pipeline.benchmark(load_profile("open"), "test")
    patients = {patient.note_id: patient for patient in bench.patients}
    notes = {note.note_id: note.subject_id for note in pipeline.notes(load_profile("open"))[0]}
    run = recorded(setting)
    asked = sorted(run)[:: len(run) // 60]
    scores, at = np.full((len(bench.queries), len(bench.corpus)), -np.inf), list(bench.corpus)
    kept, gaps = set(), []
    for name in asked:
        query_id, _, note_id = name.partition("@")
        hits = index.search(bench.queries[query_id], top=100, patient=notes[note_id] if note_id else None)
        found = {hit.chunk_id: hit.score for hit in hits}
        assert not note_id or set(found) == set(patients[note_id].chunk_ids)
        gaps += [abs(found[chunk] - score) for chunk, score in run[name].items() if chunk in found]
        for chunk, score in found.items():
            scores[list(bench.queries).index(query_id), at.index(chunk)] = score
        kept.add(name)
    assert len(kept) >= 60 and max(gaps) < 0.005  # half precision's
    values = (metrics.single_patient if setting == "single" else metrics.multi_patient)(bench, scores)
    ours = values[values["search_id"].isin(kept)].groupby("metric")["value"].mean()
    table = runs.per_search(load_profile("full"), rivals.HYBRID)
    table = table[(table["setting"] == setting) & (table["match_type"] == "all") & table["search_id"].isin(kept)]
    theirs = table.groupby("metric")["value"].mean()
    assert ours.drop(metrics.AVERAGE).to_numpy() == pytest.approx(theirs.drop(metrics.AVERAGE).to_numpy(), abs=0.2)
