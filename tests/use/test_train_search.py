"""drehr-search train: from notes to a hybrid that indexes them, what it says where it can't, and a kill on the way."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from llm_server import chat_server
from safetensors.torch import load_file

from drehr_utils import pipeline
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.search.hybrid import Hybrid, Weights
from drehr_utils.training.encoders import load_encoder
from drehr_utils.training.trainer import is_whole
from drehr_utils.use import search

pytest.importorskip("lancedb")
NAMES = (("dyspnea", "shortness of breath", "sob"), ("hypertension", "htn"), ("furosemide", "lasix"))


@pytest.fixture(scope="module")
def model(start, tmp_path_factory):
    """A tiny encoder with a tiny graph: what the open graph's names take to read is another test's."""
    graph = KnowledgeGraph(cui2pt={str(i): names[0] for i, names in enumerate(NAMES)})
    for i, names in enumerate(NAMES):
        for name in names:
            graph.add_term(str(i), name)
    folder = tmp_path_factory.mktemp("model") / "hybrid"
    Hybrid(load_encoder(start), graph, Weights(0.2, 0.1)).save(folder)
    return folder


@pytest.fixture(scope="module")
def notes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("notes")
    for i, text in enumerate(("SOB on exertion, HTN.", "Takes Lasix for dyspnea.", 'HTN, on "furosemide".\r\nNo sob.')):
        (folder / f"{i}.txt").write_text(text)
    return folder


def trained(notes: Path, model: Path, out: Path, *more: str) -> list[str]:
    return ["train", str(notes), "--from", str(model), "--out", str(out), "--batch", "2", *more]


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "hybrid/model.safetensors")


def test_three_notes_train_an_encoder_that_indexes_them(notes, model, tmp_path, capfd):
    out, at = tmp_path / "own", ["--index", str(tmp_path / "index")]
    search.main(trained(notes, model, out, "--steps", "6"))
    printed = capfd.readouterr()
    assert "3 chunks, 3 of them with an entity; 6 steps of 2 chunks" in printed.out and "/6 [" in printed.err
    assert "exertion" not in printed.out + printed.err  # no text of a note
    assert {path.stat().st_mode & 0o077 for path in out.rglob("*")} == {0} and out.stat().st_mode & 0o777 == 0o700
    assert (out / ".gitignore").read_text() == "*\n" and not list(out.rglob("partial-*"))
    before, after = load_file(model / "model.safetensors"), weights(out)
    assert not torch.equal(*(w["encoder.layer.0.output.dense.weight"] for w in (before, after)))
    hybrid = Hybrid.load(out / "hybrid")
    assert hybrid.weights == Weights(0.2, 0.1) and hybrid.graph.cuis("lasix") == ["2"]
    assert load_encoder(out / "hybrid").tokenizer.tokenize("lasix") == ["fur", "##ose", "##mide"]  # the graph is read
    search.main(["index", str(notes), "--model", str(out), *at])
    search.main(["query", "shortness of breath", "--json", *at])
    hits = json.loads(capfd.readouterr().out.splitlines()[-1])["hits"]
    assert [bool(hit["names"]) for hit in hits] == [True] * 3


def test_it_goes_on_from_what_it_trained_and_reads_names_once(notes, model, tmp_path, capfd):
    search.main(trained(notes, model, tmp_path / "first", "--steps", "1"))
    search.main(trained(notes, tmp_path / "first", tmp_path / "second"))
    assert "6 steps of 2 chunks" in capfd.readouterr().out  # six times three chunks, where no number is given
    rules = [(tmp_path / out / "hybrid/tokenizer.json").read_text().count('"Replace"') for out in ("first", "second")]
    assert rules[0] == rules[1] > 0


def test_what_was_kept_of_notes_that_are_gone_goes(notes, model, tmp_path):
    source, out = tmp_path / "notes", tmp_path / "own"
    shutil.copytree(notes, source)
    (source / "gone.txt").write_text("HTN and zephyrine.")

    def kept() -> list[Path]:
        assert list(out.rglob("rows.arrow"))
        return [path for path in out.rglob("rows.arrow") if b"zephyrine" in path.read_bytes()]

    search.main(trained(source, model, out, "--steps", "1"))
    assert kept()
    (source / "gone.txt").unlink()
    search.main(trained(source, model, out, "--steps", "1"))
    assert not kept()


def test_a_language_models_entities_are_trained_on_where_one_is_asked(notes, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DREHR_LLM_MODEL", "m")
    monkeypatch.setenv("DREHR_LLM_BASE_URL", "")
    with chat_server(lambda prompt, body: "- hypertension\n- dyspnea") as server:
        search.main(trained(notes, model, tmp_path / "own", "--steps", "1", "--llm", server.base_url))
        assert len(server.bodies) == 9  # three chunks, three kinds of entities
    assert [path.name.split("-")[0] for path in (tmp_path / "own/models").iterdir()] == ["stage2"]
    with pytest.raises(SystemExit):
        search.main(trained(notes, model, tmp_path / "far", "--llm", "http://example.org/v1"))
    assert "not this machine or a private address" in capsys.readouterr().err


@pytest.mark.slow
def test_tables_of_mimics_and_recorded_answers(model, tmp_path, capsys):
    profile = load_profile("open")
    answers = ["--answers", str(*profile.recorded_answers)]
    search.main(trained(profile.notes, model, tmp_path / "own", "--steps", "1", *answers))
    chunks = len(pipeline.chunks(profile))  # dev's and test's patients stay out
    assert f"{chunks} chunks, " in capsys.readouterr().out


@pytest.mark.parametrize(
    "make, more, said",
    [
        (lambda f: None, [], "no .txt file"),
        (lambda f: (f / "a.txt").write_text("Ankle sprain."), [], "no name of the graph is in its 1 chunks"),
        (
            lambda f: (f / "a.txt").write_text("HTN."),
            [],
            "1 of 1 chunks have an entity, and a batch takes 2;",
        ),
        (lambda f: (f / "a.txt").write_text("HTN."), ["--steps", "0"], "at least 1"),
        (lambda f: (f / "a.txt").write_text("HTN."), ["--from", "gone"], "gone: no such model folder"),
        (lambda f: (f / "a.txt").write_text("HTN."), ["--out", str(ROOT / "tests")], "tests/: isn't empty"),
    ],
)
def test_what_cannot_be_trained_on_is_named(make, more, said, model, tmp_path, capsys):
    folder = tmp_path / "notes"
    folder.mkdir()
    make(folder)
    with pytest.raises(SystemExit) as stopped:
        search.main([*trained(folder, model, tmp_path / "own"), *more])
    printed = capsys.readouterr().err
    assert stopped.value.code and said in printed and "Traceback" not in printed
    assert not (tmp_path / "own/hybrid").exists()


@pytest.mark.slow
def test_killed_it_goes_on_and_ends_with_the_same_weights(notes, model, tmp_path):
    command = [sys.executable, "-m", "drehr_utils.use.search"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start(out: Path) -> subprocess.Popen:
        run = [*command, *trained(notes, model, out, "--steps", "60")]
        return subprocess.Popen(run, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def first_step(process: subprocess.Popen) -> int:
        """That the bar shows."""
        return min(int(n) for n in re.findall(r"(\d+)/60 \[", process.communicate(timeout=300)[1]) if int(n))

    assert first_step(start(tmp_path / "whole")) < 25
    process = start(tmp_path / "killed")
    while not any(map(is_whole, (tmp_path / "killed").glob("checkpoints/*/checkpoint-25"))):
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "killed/hybrid").exists()
    assert first_step(start(tmp_path / "killed")) > 25  # it goes on from the checkpoint
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-6) for name in theirs)
    (log,) = (tmp_path / "killed/models").glob("*/loss.csv")
    assert len(log.read_text().splitlines()) == 61


def test_an_index_and_a_training_are_not_taken_for_one_another(notes, model, tmp_path, capsys):
    """A training in an index's folder would change the encoder under its vectors."""
    index, own = tmp_path / "index", tmp_path / "own"
    search.main(["index", str(notes), "--model", str(model), "--index", str(index)])
    for said, command in (
        ("index/: isn't empty, and no training of ours", trained(notes, model, index)),
        ("hybrid.json: is a file", trained(notes, model, model / "hybrid.json")),
        ("own/: is what `drehr-search train` made", ["index", str(notes), "--index", str(own)]),
        ("own/: is what `drehr-search train` made", ["query", "pain", "--index", str(own)]),
    ):
        if "own" in said and not own.exists():
            search.main(trained(notes, model, own, "--steps", "1"))
        capsys.readouterr()
        with pytest.raises(SystemExit):
            search.main(command)
        assert said in capsys.readouterr().err


def test_a_server_that_other_work_names_is_not_asked(notes, model, tmp_path, monkeypatch):
    """Not even about notes: its address alone would stop a training that asks no server."""
    monkeypatch.setenv("DREHR_LLM_BASE_URL", "https://api.example.com/v1")
    search.main(trained(notes, model, tmp_path / "own", "--steps", "1"))
    assert (tmp_path / "own/hybrid").is_dir()
