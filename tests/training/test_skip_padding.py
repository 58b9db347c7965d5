"""Texts end to end, with nothing of them padding (§4.2's batches of 4,096 names on a GPU with FlashAttention).

Neither `flash-attn` nor torch has a kernel for a CPU. Here the one function of each that is called for such texts is
written out, text by text: what it is handed, and what becomes of its answer, is as it would be on a GPU."""

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, MistralConfig, MistralModel, modeling_flash_attention_utils
from transformers.utils import is_flash_attn_2_available

from drehr_utils.config import MINILM, StageConfig
from drehr_utils.data.notes import Chunk
from drehr_utils.training import encoders, sampling, trainer
from drehr_utils.training.positives import STAGE2_SOURCES, PositiveSets
from drehr_utils.training.sampling import PositivePairs, TrainingSet

TASK = "find the disease: "
TEXTS = ["htn", "chf on lasix, edema of both legs", "a longer text of more than a few words, on metformin", "htn, copd"]
SIZE = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, initializer_range=0.3)


def varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False,
    window_size=(-1, -1),
):  # fmt: skip
    """[tokens, heads, dim]: each text's tokens attend to its own alone."""
    ends, out = cu_seqlens_q.tolist(), []
    assert ends == cu_seqlens_k.tolist() and max(np.diff(ends)) == max_seqlen_q == max_seqlen_k
    for start, end in zip(ends[:-1], ends[1:], strict=True):
        own = [part[start:end].transpose(0, 1)[None] for part in (q, k, v)]
        scale = {"scale": softmax_scale, "is_causal": causal, "enable_gqa": True}
        out.append(torch.nn.functional.scaled_dot_product_attention(*own, dropout_p=dropout_p, **scale)[0])
    return torch.cat(out, dim=1).transpose(0, 1)


def own_kernel(q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, causal, debug, scale):
    """torch's, as varlen_attention calls it: the output comes first of five."""
    return varlen(q, k, v, ends_q, ends_k, longest_q, longest_k, dropout, scale, causal), None, None, None, None


@pytest.fixture(params=["flash-attn", "torch"])
def flash_attn(request, monkeypatch):
    """The package, or torch's own kernels, as far as they are called, and a device that is said to be theirs."""
    monkeypatch.setattr(encoders, "has_fast_bf16", lambda: False)  # float32, unlike the kernels: to be compared closely
    if request.param == "torch":
        monkeypatch.setattr(encoders, "is_flash_attn_2_available", lambda: False)
        monkeypatch.setattr(encoders, "has_own_kernels", lambda encoder: True)
        monkeypatch.setattr(encoders, "HALF", (*encoders.HALF, torch.float32))
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", own_kernel)
        return
    package, padding = ModuleType("flash_attn"), ModuleType("flash_attn.bert_padding")
    package.flash_attn_varlen_func, package.flash_attn_func = varlen, lambda *args, **settings: pytest.fail("padded")
    package.flash_attn_with_kvcache = padding.pad_input = padding.unpad_input = None
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.bert_padding", padding)
    monkeypatch.setattr(modeling_flash_attention_utils, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    rules = modeling_flash_attention_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
    monkeypatch.setitem(rules, "general_availability_check", lambda: True)
    monkeypatch.setitem(rules, "supported_devices", ((lambda: True, "cpu"),))
    monkeypatch.setattr(encoders, "is_flash_attn_2_available", lambda: True)


def encoder_of(folder, decoder: bool, pooling: str, lora: bool = False) -> SentenceTransformer:
    """Two tiny layers with random weights: an encoder (BERT's) or a decoder (Mistral's), and the instruction TASK."""
    torch.manual_seed(0)
    model = (
        MistralModel(MistralConfig(vocab_size=30522, pad_token_id=0, num_key_value_heads=2, **SIZE))
        if decoder
        else BertModel(BertConfig(vocab_size=30522, **SIZE))
    )
    model.save_pretrained(folder)
    encoders.load_encoder(MINILM).tokenizer.save_pretrained(folder)
    plain = SentenceTransformer(modules=[Transformer(str(folder)), Pooling(32)], device="cpu")
    plain.save(str(folder / "saved"), create_model_card=False)
    encoder = encoders.load_encoder(folder / "saved", pooling, instruction=TASK, device="cpu").eval()
    if lora:
        encoders.add_lora(encoder)
    return encoder.eval()


MODELS = [(False, "cls", False), (False, "mean", False), (True, "lasttoken", False), (True, "mean", True)]
NAMES = ["BERT, [CLS]", "BERT, mean", "Mistral, last token", "Mistral with adapters, mean"]


def vectors(encoder: SentenceTransformer, buckets: int) -> list[np.ndarray]:
    """As training has them, with the instruction and without, and as evaluation has them."""
    found = [encoders.encode(encoder, TEXTS), encoders.encode(encoder, TEXTS, prompt=TASK)]
    with torch.no_grad():
        for prompt in ("", TASK):
            batches = encoders.token_buckets(encoder, TEXTS, 7, buckets, prompt)
            found.append(encoders.embed_buckets(encoder, batches).numpy())
    return found


@pytest.mark.parametrize(("decoder", "pooling", "lora"), MODELS, ids=NAMES)
def test_without_padding_a_text_has_the_vectors_it_has_with_it(decoder, pooling, lora, tmp_path, flash_attn):
    encoder = encoder_of(tmp_path, decoder, pooling, lora)
    if lora:  # adapters are nothing before they have learnt
        with torch.no_grad():
            for name, weight in encoder.named_parameters():
                weight.add_(0.1 * ("lora_B" in name))
    padded = vectors(encoder, 2)
    assert encoders.skip_padding(encoder)
    for buckets in (1, 2):
        for ours, theirs in zip(vectors(encoder, buckets), padded, strict=True):
            assert np.allclose(ours, theirs, atol=1e-5)
    (batch,) = encoders.token_buckets(encoder, TEXTS, 512, 1)
    tokens = [len(ids) for ids in encoder.tokenizer(TEXTS)["input_ids"]]
    assert batch["input_ids"].shape == (1, sum(tokens)) and "attention_mask" not in batch
    assert np.diff(batch["cu_seq_lens_q"].tolist()).tolist() == sorted(tokens)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_without_padding_has_the_gradient_of_one_with_it(recompute, tmp_path, flash_attn):
    chunks = [Chunk(f"n{i}_0", f"n{i}", text) for i, text in enumerate(TEXTS)]
    rows = [
        (chunk.id, [("drug", f"drug {i} of {'many ' * j}words") for j in range(6)]) for i, chunk in enumerate(chunks)
    ]
    config = StageConfig(positives_per_chunk=4, batch_size=4, recompute=recompute, dropout=0.0)
    pairs, found = PositivePairs(TrainingSet.build(chunks, PositiveSets.build(rows, STAGE2_SOURCES)), config), []
    encoder = encoder_of(tmp_path, False, "cls")
    trainer.prepare_for_training(encoder.train(), config)
    for _ in range(2):
        batch = sampling.Collator(encoder, rows_per_bucket=2)([pairs[0, i] for i in range(4)])
        loss = trainer.batch_loss(encoder, batch, config)
        loss.backward()
        found.append((loss.item(), torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])))
        encoder.zero_grad()
        encoders.skip_padding(encoder)
    assert "cu_seq_lens_q" in batch["entities"][0] and found[0][1].abs().max() > 1e-3
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5) and torch.allclose(found[0][1], found[1][1], atol=1e-5)


def test_an_encoder_that_is_trained_on_a_cpu_is_padded_again(tmp_path, flash_attn):
    """Kept on the CPU of a machine that has a GPU, say: plain attention would let texts attend to each other."""
    encoder = encoder_of(tmp_path, False, "cls")
    padded = vectors(encoder, 1)
    assert encoders.skip_padding(encoder)
    trainer.prepare_for_training(encoder, StageConfig())
    assert "attention_mask" in encoders.token_buckets(encoder, TEXTS, 512, 1)[0]
    for ours, theirs in zip(vectors(encoder, 1), padded, strict=True):
        assert np.allclose(ours, theirs, atol=1e-5)


def test_where_there_is_no_such_kernel_texts_are_padded():
    encoder = encoders.load_encoder(MINILM, device="cpu")
    if not is_flash_attn_2_available():
        assert not encoders.skip_padding(encoder)
    assert "attention_mask" in encoders.token_buckets(encoder, TEXTS, 512, 1)[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_steps_on_a_gpu(tmp_path):
    """bge-base's layers: in bf16 the vectors are the padded ones' within its rounding, and it trains."""
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=30522, num_hidden_layers=2)).save_pretrained(tmp_path / "start")
    encoders.load_encoder(MINILM).tokenizer.save_pretrained(tmp_path / "start")
    encoder = SentenceTransformer(modules=[Transformer(str(tmp_path / "start")), Pooling(768)], device="cuda")
    padded = encoders.encode(encoder, TEXTS, bf16=True)
    chunks = [Chunk(f"n{i}_0", f"n{i}", text) for i, text in enumerate(TEXTS)]
    rows = [(chunk.id, [("drug", f"drug {i}"), ("drug", "htn")]) for i, chunk in enumerate(chunks)]
    data = TrainingSet.build(chunks, PositiveSets.build(rows, STAGE2_SOURCES))
    config = replace(StageConfig(positives_per_chunk=2, batch_size=2), learning_rate=0.0, epochs=1)
    curve = trainer.train_stage(encoder, data, config, tmp_path / "work", progress=False)
    assert encoder[0].can_flatten_inputs and curve["loss"].notna().all() and len(curve) == 2
    assert (encoders.encode(encoder, TEXTS) * padded).sum(axis=1).min() > 0.999
