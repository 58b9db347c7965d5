"""The benchmark of all papers on a slice: every retriever answers every test set, and the record's numbers by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import average_precision_score

from drehr_utils import pipeline
from drehr_utils.evaluation import records
from drehr_utils.papers.capr import systems as capr
from drehr_utils.papers.drehr import rivals
from drehr_utils.papers.kg import systems as kg
from drehr_utils.papers.radiology import systems as radiology
from drehr_utils.papers.radiology.entries import SentenceQueries
from drehr_utils.profiles import load_profile
from drehr_utils.training import encoders
from drehr_utils.use import transfer


@pytest.fixture
def smoke(monkeypatch, tmp_path, start):
    """The smoke profile on a tiny encoder, with a cache of its own but for the graph's."""
    profile = replace(load_profile("smoke"), encoder=start)
    monkeypatch.setattr(type(profile), "cache", property(lambda self: tmp_path))
    return profile


def by_hand(profile, encoder) -> dict[str, float]:
    """Some of the record's means, computed apart from its code: scikit-learn's precision, counts."""

    def cosines(asked, searched):
        sides = (encoders.encode(encoder, list(texts), bf16=True) for texts in (asked, searched))
        return torch.nn.functional.cosine_similarity(*map(torch.from_numpy, _pairs(*sides)), dim=2).numpy()

    said = SentenceQueries.of(radiology.test_entries(profile, transfer.TEST))
    found = [
        100 * average_precision_score(np.isin(np.arange(len(said.sentences)), at), row)
        for row, at in zip(cosines(said.queries, said.sentences), said.matched.values(), strict=True)
    ]
    notes = kg.test_sets(profile)[0]
    ids = np.array(list(notes.concepts))
    best = ids[cosines([m.text for m in notes.mentions], notes.concepts.values()).argmax(axis=1)]
    first = np.mean([100.0 * (c in m.concepts) for c, m in zip(best, notes.mentions, strict=True)])
    task, pool, candidates = capr.held_out(profile)
    scores = cosines(task.queries.values(), [p.text for p in pool])
    top = [row[scores[i, row].argmax()] for i, row in enumerate(candidates)]
    right = [pool[at].id in task.qrels[q] for q, at in zip(task.queries, top, strict=True)]
    return {"Radiology's sentences": np.mean(found), "OpenLinking": first, "CAPR's passages": 100 * np.mean(right)}


def _pairs(a, b):
    return np.broadcast_to(a[:, None], (len(a), len(b), a.shape[1])).copy(), np.broadcast_to(
        b, (len(a), *b.shape)
    ).copy()


@pytest.mark.slow
def test_the_start_by_hand_chance_and_the_kept_record(smoke, capsys, monkeypatch):
    monkeypatch.setattr(records, "load_profile", lambda name: smoke)
    for name in (rivals.CHANCE, "BM25", pipeline.START):
        transfer.main(["--only", name])
    record = transfer.RECORD.read(smoke)
    assert record.groupby("retriever").size().eq(7).all() and len(record) == 21
    assert (record["low"] <= record["ours"]).all() and (record["ours"] <= record["high"]).all()
    assert record["p"].isna().to_numpy().nonzero()[0].tolist() == list(range(14, 21))  # the start's own
    ours = record[record["retriever"] == pipeline.START].drop_duplicates("test set").set_index("test set")["ours"]
    expected = by_hand(smoke, pipeline.starting_encoder(smoke))
    assert ours[list(expected)].to_dict() == pytest.approx(expected, abs=0.05)
    before = transfer.RECORD.path(smoke).read_bytes()
    transfer.main(["--only", "BM25"])
    assert transfer.RECORD.path(smoke).read_bytes() == before
    with pytest.raises(SystemExit):
        transfer.main(["--only", "no such one"])
    assert "BM25" in capsys.readouterr().err


def test_two_encoders_are_kept_apart_and_the_hybrid_reads_the_graph(smoke, start):
    other = encoders.load_encoder(start)
    with torch.no_grad():
        other[0].auto_model.embeddings.word_embeddings.weight.mul_(-1)
    first = encoders.load_encoder(start)
    texts = ["chest pain", "no chest pain", "fever"]
    found = transfer.towers(first, other)(texts, texts)
    assert not np.allclose(found, found.T, atol=1e-3)
    assert np.diag(transfer.towers(first)(texts, texts)) == pytest.approx(1, abs=0.02)
    scores = transfer.retrievers(smoke)[rivals.HYBRID_WINDOWS]()(["hypertension"], ["htn was noted", "fever was noted"])
    assert scores[0, 0] > scores[0, 1] + 0.1


def test_the_committed_record_is_whole():
    profile = load_profile("open")
    record = transfer.RECORD.read(profile)
    shown = {(name, metric) for name, kept in transfer.SHOWN.items() for metric in kept}
    cells = record.groupby("retriever", sort=False)[["test set", "metric"]].apply(
        lambda f: set(map(tuple, f.to_numpy()))
    )
    assert set(cells.index) == set(transfer.retrievers(profile)) and all(found == shown for found in cells)
    start = record[record["retriever"] == pipeline.START]
    assert pd.isna(start["p"]).all() and record["p"].drop(start.index).between(0, 1).all()
