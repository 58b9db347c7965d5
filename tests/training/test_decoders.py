"""DR.EHR-large's path (§3.3, §4.2) on a Mistral of two tiny layers, with the tokenizer at hand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import GPT2Config, GPT2Model, MistralConfig, MistralModel, TrainerCallback

from drehr_utils.config import MINILM, StageConfig
from drehr_utils.data.notes import Chunk
from drehr_utils.errors import DataError
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.search.retrievers import INSTRUCT
from drehr_utils.training import encoders, trainer
from drehr_utils.training.positives import STAGE2_SOURCES, PositiveSets
from drehr_utils.training.sampling import TrainingSet

# The equations' loss: from random weights it falls to nothing, where the code's, of one logarithm a batch, stays.
CONFIG = StageConfig(positives_per_chunk=4, batch_size=4, epochs=20, learning_rate=1e-2, dropout=None, per_anchor=True)
TASK = "find the disease: "
TEXTS = ["htn", "chf on lasix, edema of both legs", "a longer text of more than a few words, on metformin"]


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    MistralModel(MistralConfig(vocab_size=30522, pad_token_id=0, initializer_range=0.2, **size)).save_pretrained(folder)
    encoders.load_encoder(MINILM).tokenizer.save_pretrained(folder)
    modules = [Transformer(str(folder)), Pooling(32, pooling_mode="mean")]
    encoders.save_encoder(SentenceTransformer(modules=modules, device="cpu"), folder.with_name("saved"))
    return folder.with_name("saved")


def decoder(start: Path, instruction: str = "", lora: bool = True) -> SentenceTransformer:
    encoder = encoders.load_encoder(start, "lasttoken", instruction=instruction, device="cpu")
    if lora:
        encoders.add_lora(encoder)
    return encoder


def trained(encoder: SentenceTransformer, output: Path, **options) -> list[float]:
    texts = ["chf on lasix", "htn on lisinopril", "dm2 on metformin", "copd on albuterol"]
    names = ["heart failure", "hypertension", "diabetes", "chronic obstructive pulmonary disease"]
    chunks = [Chunk(f"n{i}_0", f"n{i}", text) for i, text in enumerate(texts)]
    rows = [(c.id, [("disease", n), ("drug", c.text.split()[-1])]) for c, n in zip(chunks, names, strict=True)]
    data = TrainingSet.build(chunks, PositiveSets.build(rows, STAGE2_SOURCES))
    return trainer.train_stage(encoder, data, CONFIG, output, progress=False, **options)["loss"].tolist()


class Dropouts(TrainerCallback):
    def on_step_end(self, args, state, control, model=None, **_):
        adapters = [module for name, module in model.named_modules() if name.endswith("lora_dropout.default")]
        self.seen = {(module.p, module.training) for module in adapters}


@pytest.mark.slow
def test_only_adapters_train_with_their_dropout_and_merged_equals_unmerged(start, tmp_path):
    encoder = decoder(start, TASK)
    learns = {name for name, p in encoder.named_parameters() if p.requires_grad}
    assert len(learns) == 8 and all("lora" in name and ("q_proj" in name or "v_proj" in name) for name in learns)
    before, dropouts = {name: p.detach().clone() for name, p in encoder.named_parameters()}, Dropouts()
    losses = trained(encoder, tmp_path / "c", activation_checkpointing=True, callbacks=[dropouts])
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) / 2 and dropouts.seen == {(0.1, True)}
    assert {name for name, p in encoder.named_parameters() if not torch.equal(p, before[name])} == learns
    expected = encoders.encode(encoder, TEXTS, prompt=TASK)
    encoders.save_encoder(encoder, tmp_path / "merged")
    merged = encoders.load_encoder(tmp_path / "merged", device="cpu")  # as stage II and the evaluation do
    assert np.allclose(encoders.encode(merged, TEXTS, prompt=encoders.query_prompt(merged)), expected, atol=1e-4)
    untrained = dict(decoder(start, lora=False).named_parameters())
    changed = {name for name, p in merged.named_parameters() if not torch.equal(p, untrained[name])}
    assert changed and {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj"}


@pytest.mark.slow
def test_checkpoints_of_the_gradient_change_no_weight(start, tmp_path):
    """In float32: in bf16 a CPU's step rounds the weights once, and with checkpoints it can't (trainer)."""
    plain, kept = decoder(start), decoder(start)
    losses = trained(kept, tmp_path / "b", bf16=False, activation_checkpointing=True)
    assert trained(plain, tmp_path / "a", bf16=False) == losses
    assert kept[0].auto_model.is_activation_checkpointing and not plain[0].auto_model.is_activation_checkpointing
    assert all(torch.equal(p, kept.state_dict()[name]) for name, p in plain.state_dict().items())


@pytest.mark.parametrize("instruction", ["", TASK])
def test_padding_on_either_side_gives_the_same_vectors(instruction, start):
    """In training, where texts of several lengths share a bucket, and in evaluation."""
    found = []
    for side in ("left", "right"):
        encoder = decoder(start, instruction, lora=False).eval()
        encoder.tokenizer.padding_side = side
        found.append(encoders.encode(encoder, TEXTS, prompt=instruction))
        with torch.no_grad():
            buckets = encoders.token_buckets(encoder, TEXTS, 512, 1, encoders.query_prompt(encoder))
            found.append(encoders.embed_buckets(encoder, buckets).numpy())
    alone = np.concatenate([encoders.encode(encoder, [text], prompt=instruction) for text in TEXTS])
    assert all(np.allclose(vectors, alone, atol=1e-5) for vectors in found)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_instruction_is_read_and_not_pooled(side, start):
    encoder = encoders.load_encoder(start, "mean", instruction=TASK, device="cpu").eval()
    encoder.tokenizer.padding_side = side
    model, tokenizer = encoder[0].auto_model, encoder.tokenizer
    with torch.no_grad():
        buckets = encoders.token_buckets(encoder, TEXTS, 4, 1, TASK)  # at most four tokens, and the instruction's
        ours = encoders.embed_buckets(encoder, buckets)
        for text, vector in zip(TEXTS, ours, strict=True):
            n = len(tokenizer(TASK)["input_ids"]) - 1  # without what ends a text
            ids = tokenizer(TASK + text, truncation=True, max_length=n + 4)["input_ids"]
            states = model(torch.tensor([ids])).last_hidden_state[0]
            by_hand = torch.nn.functional.normalize(states[n:].mean(dim=0), dim=0)
            assert len(states) <= n + 4 and torch.allclose(vector, by_hand, atol=1e-5)


def test_two_builds_of_the_adapters_are_equal_and_disturb_no_random_numbers(start):
    def adapters(seed: int) -> torch.Tensor:
        torch.rand(3)  # whatever was drawn before
        encoder = decoder(start, lora=False)
        before = torch.random.get_rng_state()
        encoders.add_lora(encoder, seed)
        assert torch.equal(torch.random.get_rng_state(), before)
        return torch.cat([p.detach().flatten() for name, p in encoder.named_parameters() if "lora_A" in name])

    assert torch.equal(adapters(0), adapters(0)) and not torch.equal(adapters(0), adapters(1))


def test_a_chat_models_texts_are_read_as_texts(tmp_path, start):
    """With a template, sentence-transformers would put turns of a conversation around each text, and pool those."""
    folder = start.with_name("model")  # as transformers has it, which says nothing of how it is read
    plain = encoders.load_encoder(folder, "lasttoken", instruction=TASK, device="cpu").eval()
    chat = shutil.copytree(folder, tmp_path / "chat")
    turns = "{% for message in messages %}user: {{ message['content'] }}\n{% endfor %}"
    (chat / "chat_template.jinja").write_text(turns)
    assert "message" in SentenceTransformer(str(chat), device="cpu")[0].modality_config
    read = encoders.load_encoder(chat, "lasttoken", instruction=TASK, device="cpu").eval()
    encoders.save_encoder(read, tmp_path / "saved")
    for encoder in (read, encoders.load_encoder(tmp_path / "saved")):
        assert np.array_equal(encoders.encode(encoder, TEXTS, prompt=TASK), encoders.encode(plain, TEXTS, prompt=TASK))
        assert torch.equal(
            encoders.token_buckets(encoder, TEXTS, 16, 1, TASK)[0]["prompt_length"],
            encoders.token_buckets(plain, TEXTS, 16, 1, TASK)[0]["prompt_length"],
        )


def test_layers_of_other_names_are_named(tmp_path, start):
    GPT2Model(GPT2Config(vocab_size=30522, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    encoders.load_encoder(MINILM).tokenizer.save_pretrained(tmp_path)
    encoder = SentenceTransformer(modules=[Transformer(str(tmp_path)), Pooling(32)], device="cpu")
    with pytest.raises(DataError, match="GPT2Model has no layer named q_proj, v_proj"):
        encoders.add_lora(encoder)


def test_the_large_profile_is_table_3s():
    large, small = load_profile(ROOT / "data/profiles/mimic-large.toml"), load_profile("mimic")
    for stage, values in (("stage1", (32, 16, 1)), ("stage2", (16, 16, 1))):
        config = getattr(large.published, stage)
        assert (config.positives_per_chunk, config.batch_size, config.epochs) == values
        assert (config.learning_rate, config.warmup_ratio) == (1e-4, 0.1)  # §4.2
        assert config.gather_negatives  # as in the authors' modeling_nv.py
    assert large.protected and large.notes == small.notes and large.instruction == INSTRUCT
    assert (large.pooling, large.lora, large.gradient_checkpointing, large.processes) == ("lasttoken", True, True, 8)
    assert json.loads(large.deepspeed.read_text())["zero_optimization"]["stage"] == 2
