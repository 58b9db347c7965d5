"""The benchmark's two steps: the same loss and gradient, batches as described, operations as torch counts them."""

import bench_training_step as bench
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from drehr_utils.config import StageConfig
from drehr_utils.training import encoders, sampling, trainer

TEXTS = ["pt with chf on lasix", "htn, lisinopril 10 mg daily; no chest pain", "edema", "dm2"]
TERMS = [["furosemide", "heart failure"], ["hypertension", "furosemide"], ["oedema", "oedema"], ["diabetes", "insulin"]]
ROWS = [sampling.Row(text, drawn, drawn) for text, drawn in zip(TEXTS, TERMS, strict=True)]


@pytest.fixture
def encoder(start):
    return encoders.load_encoder(start)


def test_both_steps_have_the_same_loss_and_gradient(encoder):
    config = StageConfig(positives_per_chunk=2, batch_size=4)
    trainer.prepare_for_training(encoder, config)
    encoder.train()
    found = []
    for inputs, loss in (
        (sampling.Collator(encoder, rows_per_bucket=2)(ROWS), lambda m, i: trainer.batch_loss(m, i, config)),
        (bench.plain_collate(ROWS, encoder), bench.plain_loss),
    ):
        encoder.zero_grad()
        value = loss(encoder, inputs)
        value.backward()
        gradient = torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
        found.append((value.item(), gradient))
    (ours, our_gradient), (plain, plain_gradient) = found
    assert ours == pytest.approx(plain, rel=1e-5)
    assert our_gradient.norm() > 1e-3
    assert (our_gradient - plain_gradient).norm() < 1e-4 * plain_gradient.norm()


def test_the_plain_step_reads_every_entity_and_pads_to_the_longest(encoder):
    inputs = bench.plain_collate(ROWS, encoder)
    lengths = [[len(encoder.tokenizer(text)["input_ids"]) for text in texts] for texts in (TEXTS, sum(TERMS, []))]
    for name, own in zip(("chunks", "entities"), lengths, strict=True):
        assert inputs[name]["input_ids"].shape == (len(own), max(own))
        assert inputs[name]["attention_mask"].sum(1).tolist() == own
    long = bench.plain_collate([sampling.Row("a " * 600, ["b " * 30], ["b"])], encoder)
    assert [long[name]["input_ids"].shape[1] for name in ("chunks", "entities")] == [512, 16]


@pytest.mark.parametrize("kind", bench.KINDS)
def test_operations_are_those_that_torch_counts(encoder, kind):
    config = StageConfig(positives_per_chunk=2, batch_size=4)
    trainer.prepare_for_training(encoder, config)
    if kind == "ours":
        inputs = sampling.Collator(encoder, rows_per_bucket=2)(ROWS)
        loss = trainer.batch_loss(encoder, inputs, config)
    else:
        inputs = bench.plain_collate(ROWS, encoder)
        loss = bench.plain_loss(encoder, inputs)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        for part in ("chunks", "entities"):
            for batch in bench.buckets(inputs[part]):
                encoder({name: batch[name] for name in ("input_ids", "attention_mask")})
    counted = (forward.get_total_flops() + backward.get_total_flops()) / 1e12
    # torch also counts the unused pooler, and the product of all chunks and entities, a hundredth here
    assert bench.work(inputs, encoder)["tflop"] == pytest.approx(counted, rel=0.04)


def test_work_by_hand(encoder):
    # 1 text of 3 tokens in a row of 5 and 2 of 2 in rows of 2; 2 layers of width 32 and inner width 64.
    chunks = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}
    entities = [{"attention_mask": torch.tensor([[1, 1]])}] * 2
    done = bench.work({"chunks": chunks, "entities": entities}, encoder)
    assert (done["tokens"], done["padded"]) == (7, 9)
    linear = 2 * (4 * 32 * 32 + 2 * 32 * 64)
    attention = 4 * 32 * (5 * 5 + 2 * 2 * 2)
    assert done["tflop"] * 1e12 == pytest.approx(3 * 2 * (9 * linear + attention))


def test_turns_wait_for_the_word_and_tell_of_each_step(encoder, monkeypatch):
    monkeypatch.setattr(bench, "PRODUCTS", (64,))
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    for kind in bench.KINDS:
        encoder.load_state_dict(before)
        said, told = [], []
        curve = bench.steps(kind, encoder, [ROWS[:2], ROWS], lambda said=said: said.append("go"), told.append)
        assert len(said) == len(told) == len(curve) == 2
        assert told[0]["tokens"] < told[1]["tokens"] and all(step["s"] > 0 for step in told)
        assert (told[0]["bf16_tflops"] > 0) is (kind == "ours")
        assert any(not torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
        if kind == "ours":
            ours = curve
    assert ours == pytest.approx(curve, rel=0.02)  # bf16, where the machine is fast at it
