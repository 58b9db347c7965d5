"""Two processes under torchrun: what each sees, that their gradient is one process's, that a killed run goes on."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import TrainerCallback

from drehr_utils.config import StageConfig
from drehr_utils.data.notes import Chunk
from drehr_utils.errors import DataError
from drehr_utils.profiles import ROOT
from drehr_utils.training import sampling, trainer
from drehr_utils.training.positives import STAGE2_SOURCES, PositiveSets
from drehr_utils.training.sampling import PositivePairs, TrainingSet

WORLD, SIZE, SAVE_STEPS = 2, 4, 2
PUBLISHED = StageConfig(positives_per_chunk=3, batch_size=SIZE, epochs=2, learning_rate=1e-3)
IMPROVED = replace(PUBLISHED, per_anchor=True, both_ways=True, mask_false_negatives=True, beta=20.0)
CONFIGS = {  # each process's own negatives, and all processes'
    "own": PUBLISHED,
    "own, recomputed": replace(PUBLISHED, recompute=True),
    "gathered": replace(PUBLISHED, gather_negatives=True),
    "gathered, improved": replace(IMPROVED, gather_negatives=True, recompute=True),
}
LONG = replace(IMPROVED, epochs=4, dropout=None, gather_negatives=True, recompute=True)  # 8 steps; dropout is 0.1


def encoder_of(start: Path) -> SentenceTransformer:
    return SentenceTransformer(modules=[Transformer(str(start)), Pooling(32)], device="cpu")


def data() -> TrainingSet:
    chunks = [Chunk(f"n{i // 2}_{i % 2}", f"n{i // 2}", f"patient {i} on drug {i % 5}") for i in range(16)]
    rows = [(c.id, [("disease", f"illness {i}"), ("drug", f"drug {i % 5}"), ("drug", "aspirin")])
            for i, c in enumerate(chunks)]  # fmt: skip
    return TrainingSet.build(chunks, PositiveSets.build(rows, STAGE2_SOURCES))


class Noting(PositivePairs):
    """Notes which rows were asked for."""

    seen: list[tuple[int, int]] = []

    def __getitem__(self, key):
        self.seen.append(key)
        return super().__getitem__(key)


class First(TrainerCallback):
    """The gradients of the first step."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        if state.global_step == 0:
            self.gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Killed(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        if state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


def child(start: Path, output: Path, when: str) -> None:
    """What each process of `torchrun` does, and leaves in output/<rank>.pt."""
    found, trainer.PositivePairs = {}, Noting
    options = {"progress": False, "bf16": False}
    for name, config in CONFIGS.items() if when == "gradients" else ():
        first, Noting.seen = First(), []
        curve = trainer.train_stage(
            encoder_of(start), data(), config, output / "none", callbacks=[first], max_grad_norm=0.0, **options
        )
        found[name] = {"seen": Noting.seen, "losses": curve["loss"].tolist(), "gradients": first.gradients}
    encoder, callbacks = encoder_of(start), [Killed()] if when == "killed" else []
    work = output / ("undisturbed" if when == "gradients" else "disturbed")
    curve = trainer.train_stage(encoder, data(), LONG, work, save_steps=SAVE_STEPS, callbacks=callbacks, **options)
    found["long"] = {"losses": curve["loss"].tolist(), "weights": encoder.state_dict()}
    torch.save(found, output / f"{trainer.ranks()[0]}.pt")


def torchrun(*arguments) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={WORLD}", __file__]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *map(str, arguments)], env=environment, capture_output=True).returncode


@pytest.fixture(scope="module")
def output(start, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("output")
    assert torchrun(start, folder, "gradients") == 0
    return folder


@pytest.fixture(scope="module")
def found(output) -> list[dict]:
    return [torch.load(output / f"{rank}.pt") for rank in range(WORLD)]


def alone(start: Path, config: StageConfig, keys: list) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process on one batch."""
    encoder, pairs = encoder_of(start), PositivePairs(data(), config)
    trainer.prepare_for_training(encoder, config)
    loss = trainer.batch_loss(encoder.train(), sampling.Collator(encoder)([pairs[key] for key in keys]), config)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in encoder.named_parameters() if p.grad is not None}


def batches(config: StageConfig) -> list:
    return sampling.batch_schedule([f"n{i // 2}" for i in range(16)], config)


def equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    biggest = max(gradient.abs().max() for gradient in theirs.values())
    unused = {name for name in ours if name not in theirs}  # data parallelism fills in zeros
    assert biggest > 1e-3 and not any(ours[name].any() for name in unused)
    return all(torch.allclose(ours[name], theirs[name], atol=1e-5 * biggest) for name in theirs)


def test_batches_are_dealt_out_in_turn():
    schedule = [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    dealt = lambda *how, **options: list(sampling.deal(schedule, *how, **options))  # noqa: E731
    assert dealt(0, 1) == schedule
    assert dealt(0, 2) == [[0, 1], [4, 5]] and dealt(1, 2) == [[2, 3], [6, 7]]
    assert dealt(1, 2, joint=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DataError, match="5 batches for 8 processes"):
        sampling.deal(schedule, 0, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["own", "own, recomputed"])
def test_each_process_has_batches_of_its_own_and_both_their_mean_gradient(name, start, found):
    schedule = batches(CONFIGS[name])
    for rank in range(WORLD):
        assert found[rank][name]["seen"] == [key for batch in schedule[rank::WORLD] for key in batch]
    one, other = (alone(start, PUBLISHED, schedule[rank]) for rank in range(WORLD))
    mean = {key: (one[1][key] + other[1][key]) / 2 for key in one[1]}
    for rank in range(WORLD):
        ours = found[rank][name]
        assert ours["losses"][0] == pytest.approx((one[0] + other[0]) / 2, abs=1e-5)
        assert len(ours["losses"]) == len(schedule) // WORLD and equal(ours["gradients"], mean)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gathered", "gathered, improved"])
def test_gathered_negatives_are_one_process_on_the_joint_batch(name, start, found):
    joint = replace(CONFIGS[name], batch_size=WORLD * SIZE, gather_negatives=False, recompute=False)
    loss, gradients = alone(start, joint, batches(joint)[0])
    assert not equal(gradients, found[0]["own"]["gradients"])
    for ours in (found[rank][name] for rank in range(WORLD)):
        assert ours["losses"][0] == pytest.approx(loss, abs=1e-5) and equal(ours["gradients"], gradients)


@pytest.mark.slow
def test_two_processes_killed_in_an_epoch_end_as_if_undisturbed(start, output, found):
    assert torchrun(start, output, "killed") != 0
    assert (output / "disturbed/checkpoint-4/rng_state_1.pth").exists()
    assert torchrun(start, output, "resumed") == 0
    for rank in range(WORLD):
        resumed, whole = torch.load(output / f"{rank}.pt")["long"], found[rank]["long"]
        assert resumed["losses"] == whole["losses"] and len(whole["losses"]) == 8
        assert all(torch.equal(resumed["weights"][name], p) for name, p in whole["weights"].items())


if __name__ == "__main__":
    child(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
