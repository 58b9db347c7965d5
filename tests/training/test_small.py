"""DR.EHR-small's own size (§3.3, §4.2, Table 3): what its memory needs changes no gradient, and its step is taken."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, TrainerCallback

from drehr_utils.config import MINILM
from drehr_utils.data.notes import Chunk
from drehr_utils.profiles import load_profile
from drehr_utils.training import encoders, sampling, trainer
from drehr_utils.training.positives import STAGE2_SOURCES, PositiveSets
from drehr_utils.training.sampling import PositivePairs, TrainingSet

STAGE1 = load_profile("mimic").published.stage1


def encoder_of(folder, **size) -> SentenceTransformer:
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=30522, **size)).save_pretrained(folder)
    encoders.load_encoder(MINILM).tokenizer.save_pretrained(folder)
    transformer = Transformer(str(folder))
    dim = transformer.get_embedding_dimension()
    return SentenceTransformer(modules=[transformer, Pooling(dim, pooling_mode="cls")], device="cpu")


def data(chunks: int, terms: int) -> TrainingSet:
    """Each chunk's positives are drawn from `terms` of them, all in all."""
    made = [Chunk(f"n{i}_0", f"n{i}", f"patient {i} was given drug {i}") for i in range(chunks)]
    rng = np.random.default_rng(0)
    rows = [(c.id, [("drug", f"drug {t}") for t in rng.choice(terms, terms // 2, replace=False)]) for c in made]
    return TrainingSet.build(made, PositiveSets.build(rows, STAGE2_SOURCES))


@pytest.mark.parametrize("dropout", [0.0, None], ids=["without dropout", "dropout 0.1"])
def test_encoding_twice_gives_the_gradient_of_encoding_once(dropout, tmp_path):
    """What is dropped the first time is dropped the second, and random numbers go on as if there were none."""
    encoder = encoder_of(
        tmp_path,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    found = []
    for recompute in (False, True):
        config = replace(STAGE1, recompute=recompute, dropout=dropout)
        trainer.prepare_for_training(encoder.train(), config)
        pairs = PositivePairs(data(32, 40), config)
        batch = sampling.Collator(encoder)([pairs[0, i] for i in range(32)])
        assert batch["columns"].shape == (32, 128)
        torch.manual_seed(1)
        loss = trainer.batch_loss(encoder, batch, config)
        loss.backward()
        gradients = torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
        found.append((loss.item(), gradients, torch.rand(1)))
        encoder.zero_grad()
    assert found[0][1].abs().max() > 1e-4
    assert found[0][0] == found[1][0] and torch.equal(found[0][2], found[1][2])
    assert torch.allclose(found[0][1], found[1][1], atol=1e-6)


class Dropouts(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        self.seen = {module.p for module in model.modules() if isinstance(module, torch.nn.Dropout)}


@pytest.mark.slow
def test_two_steps_at_full_size(tmp_path):
    """bge-base's shape with random weights: 32 chunks of 128 drawn terms, dropout 0.1; few terms, for time."""
    encoder = encoder_of(tmp_path / "start")
    assert sum(p.numel() for p in encoder.parameters()) == pytest.approx(110e6, rel=0.01)
    before, dropouts = encoder[0].auto_model.encoder.layer[0].output.dense.weight.detach().clone(), Dropouts()
    config = replace(STAGE1, recompute=True, max_steps=2)
    curve = trainer.train_stage(
        encoder, data(64, 40), config, tmp_path / "work", progress=False, callbacks=[dropouts], bf16=False
    )
    assert curve["loss"].notna().all() and len(curve) == 2 and dropouts.seen == {0.1}
    assert not torch.equal(encoder[0].auto_model.encoder.layer[0].output.dense.weight, before)
