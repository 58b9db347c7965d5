"""A training that is killed goes on, and ends with the weights and the loss curve of one that nothing disturbed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import TrainerCallback, TrainerState

from drehr_utils.config import StageConfig
from drehr_utils.data.notes import Chunk
from drehr_utils.profiles import ROOT
from drehr_utils.training import trainer
from drehr_utils.training.positives import STAGE2_SOURCES, PositiveSets
from drehr_utils.training.sampling import TrainingSet

# Twelve steps, four an epoch, a checkpoint every third. Dropout: the state of the random numbers must come back too.
CONFIG = StageConfig(positives_per_chunk=2, batch_size=4, epochs=3, learning_rate=1e-3, both_ways=True, dropout=None)
SAVE_STEPS = 3


class At(TrainerCallback):
    """Does something at the end of a step."""

    def __init__(self, step: int, do):
        self.step, self.do = step, do

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            self.do(control)


def die(*_) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(start: Path, output: Path, *callbacks) -> tuple[dict[str, torch.Tensor], pd.DataFrame]:
    """Weights and loss curve of a training that starts, or goes on, with what `output` holds."""
    encoder = SentenceTransformer(modules=[Transformer(str(start)), Pooling(32)], device="cpu")
    chunks = [Chunk(f"n{i // 2}_{i % 2}", f"n{i // 2}", f"patient {i} on drug {i}") for i in range(16)]
    rows = [(c.id, [("disease", f"illness {i}"), ("drug", f"drug {i}")]) for i, c in enumerate(chunks)]
    data = TrainingSet.build(chunks, PositiveSets.build(rows, STAGE2_SOURCES))
    options = dict(save_steps=SAVE_STEPS, callbacks=callbacks, progress=False)
    curve = trainer.train_stage(encoder, data, CONFIG, output, **options)
    return encoder.state_dict(), curve


@pytest.fixture(scope="module")
def undisturbed(start, tmp_path_factory):
    output = tmp_path_factory.mktemp("undisturbed")
    weights, curve = run(start, output)
    assert curve["step"].tolist() == list(range(1, 13))
    assert [path.name for path in output.iterdir()] == ["checkpoint-12"]
    return weights, curve


def same(ours, theirs) -> bool:
    return ours[1].equals(theirs[1]) and all(torch.equal(ours[0][name], theirs[0][name]) for name in theirs[0])


@pytest.fixture(scope="module")
def two_checkpoints(start, tmp_path_factory) -> Path:
    """What is there while the checkpoint of step 6 is written: it and the one before."""
    output = tmp_path_factory.mktemp("two")

    def stop(control):
        control.should_training_stop = True

    run(start, output, At(3, stop))
    shutil.copytree(output / "checkpoint-3", output / "kept")
    run(start, output, At(6, stop))
    assert not (output / "checkpoint-3").exists()
    (output / "kept").rename(output / "checkpoint-3")
    return output


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json")


@pytest.mark.parametrize("kept", [None, 0.0, 0.6], ids=["missing", "empty", "cut off"])
@pytest.mark.parametrize("file", FILES)
def test_a_torn_checkpoint_is_passed_over_for_the_one_before(file, kept, start, undisturbed, two_checkpoints, tmp_path):
    output = tmp_path / "output"
    shutil.copytree(two_checkpoints, output)
    torn = output / "checkpoint-6" / file
    if kept is None:
        torn.unlink()
    else:
        os.truncate(torn, int(kept * torn.stat().st_size))
    first = []
    result = run(start, output, At(4, first.append))  # is only reached from step 3
    assert first and same(result, undisturbed)


def test_the_newest_whole_checkpoint_is_gone_on_from(start, undisturbed, two_checkpoints, tmp_path):
    shutil.copytree(two_checkpoints, tmp_path / "output")
    first = []
    result = run(start, tmp_path / "output", At(6, first.append))
    assert not first and same(result, undisturbed)


def test_with_no_whole_checkpoint_training_starts_anew(start, undisturbed, tmp_path):
    (tmp_path / "checkpoint-9").mkdir()
    (tmp_path / "checkpoint-9/trainer_state.json").write_text('{"global_step": 9')
    assert same(run(start, tmp_path), undisturbed)


def child(start: Path, output: Path, when: str) -> subprocess.Popen:
    command = [sys.executable, __file__, str(start), str(output), when]
    return subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)


def killed_at(process: subprocess.Popen) -> None:
    assert process.wait(timeout=300) == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(("when", "found"), [("step", ["checkpoint-3"]), ("save", ["checkpoint-3", "checkpoint-6"])])
def test_killed_in_an_epoch_or_before_a_checkpoint_is_whole(when, found, start, undisturbed, tmp_path):
    killed_at(child(start, tmp_path, when))
    assert sorted(path.name for path in tmp_path.iterdir()) == found
    assert [trainer.is_whole(tmp_path / name) for name in found] == [True, False][: len(found)]
    assert same(run(start, tmp_path), undisturbed)


@pytest.mark.slow
def test_killed_from_outside_while_a_checkpoint_is_written(start, undisturbed, tmp_path):
    process = child(start, tmp_path, "never")
    while not (tmp_path / "checkpoint-6").exists() and process.poll() is None:
        time.sleep(0.0005)
    process.kill()
    killed_at(process)
    assert trainer.newest_checkpoint(tmp_path)  # the one before stays until the next is whole
    assert same(run(start, tmp_path), undisturbed)


@pytest.mark.slow
def test_killed_again_and_again(start, undisturbed, tmp_path):
    for when in ("step", "save", "last"):
        killed_at(child(start, tmp_path, when))
    assert same(run(start, tmp_path), undisturbed)


if __name__ == "__main__":  # what `child` runs, and kills
    start_folder, output_folder, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    write = TrainerState.save_to_json

    def write_or_die(state: TrainerState, path: str) -> None:
        if when == "save" and state.global_step == 6:
            die()  # everything but the state is there
        write(state, path)
        if when == "last" and state.global_step == 12:
            die()  # the training is done, its model not saved

    TrainerState.save_to_json = write_or_die
    run(start_folder, output_folder, At(5 if when == "step" else 0, die))
