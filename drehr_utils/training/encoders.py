"""Text encoders: sentence-transformers models with [CLS], mean or last-token pooling (DR.EHR §3.3)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import Tensor
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AttentionMaskInterface, DataCollatorWithFlattening
from transformers.masking_utils import flash_attention_mask
from transformers.utils import is_flash_attn_2_available

from drehr_utils.errors import DataError
from drehr_utils.knowledge import normalization
from drehr_utils.training import weights

CHUNK_TOKENS, ENTITY_TOKENS = 512, 16  # DR.EHR §4.2
VARLEN, HALF = "torch_varlen", (torch.float16, torch.bfloat16)  # varlen_attention's name; what its kernels compute in
RECOMPUTED_TOKENS = 8 * CHUNK_TOKENS  # in a bucket at most, padding included, where memory is to be bounded


def has_fast_bf16() -> bool:
    """Whether bf16 autocast pays: a GPU with bf16, or a CPU with AMX, or with avx512_bf16 unless it is Intel's, whose
    products of bf16 without AMX take twice as long as float32's (83 against 159 GFLOP/s of a core)."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    info = Path("/proc/cpuinfo")  # Linux's
    known = set(info.read_text().split()) if info.exists() else set()
    return "amx_bf16" in known or ("avx512_bf16" in known and "GenuineIntel" not in known)


class RoundedTable(torch.autograd.Function):
    """An embedding's weights rounded to bf16. Their gradient comes as the rows that the texts have, a sparse tensor: a
    dense one would be the whole vocabulary's once for each bucket of texts."""

    @staticmethod
    def forward(ctx: Any, table: Tensor) -> Tensor:
        ctx.shape = table.shape
        return table.bfloat16()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if not gradient.is_sparse:  # an encoder that reads its table by other means, too
            return gradient.float()
        rows, values = gradient._indices()[0], gradient._values().float()
        return torch.zeros(ctx.shape).index_add_(0, rows, values)


class Rounded:
    """An encoder with its weights rounded to bf16 once, for all texts of a step: activations, residuals and gradients
    are bf16 too, and so are the sums of gradients over a step's buckets, but of embedding tables (RoundedTable). The
    weights themselves, and what the optimizer keeps of them, stay float32.

    What autocast does on a GPU. On a CPU that rounds the weights anew for each bucket of texts, and adds bf16 to
    float32 in each layer: a step of MiniLM takes 1.2 times as long on two threads, 1.5 times on one."""

    def __init__(self, encoder: torch.nn.Module):
        self.encoder = encoder
        self.tables = [part for part in encoder.modules() if isinstance(part, torch.nn.Embedding)]
        tables = {id(table.weight) for table in self.tables}
        self.weights = {
            name: RoundedTable.apply(weight) if id(weight) in tables else weight.bfloat16()
            for name, weight in encoder.named_parameters()
        }

    def __call__(self, texts: dict[str, Tensor]) -> dict[str, Tensor]:
        for table in self.tables:
            table.sparse = True
        try:
            return functional_call(self.encoder, self.weights, (texts,))
        finally:
            for table in self.tables:  # its own weights' gradient stays dense, as AdamW takes it
                table.sparse = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.encoder, name)

    def __getitem__(self, at: int) -> torch.nn.Module:
        return self.encoder[at]


def load_encoder(
    name_or_path: str | Path,
    pooling: str | None = None,
    max_tokens: int = CHUNK_TOKENS,
    instruction: str = "",
    **settings: Any,
) -> SentenceTransformer:
    """An encoder by hub name or folder, or one of a package: `minilm`, `mpnet`, `smollm2` (training.weights).

    pooling: `cls`, `mean` or `lasttoken`; None keeps what the weights were trained with. instruction: stands before
    each query and takes no part in pooling; it is saved with the encoder. settings: of SentenceTransformer, `device`
    among them. Raises DataError when the folder does not exist."""
    if lacking := weights.missing(str(name_or_path)):
        raise DataError(lacking)
    if weights.version(str(name_or_path)):
        name_or_path = weights.locate(str(name_or_path))
    elif isinstance(name_or_path, Path) and not name_or_path.exists():
        raise DataError(f"{name_or_path.name}: no such model folder; run notebook 05 first (./run_all.sh --only 05)")
    if instruction:
        settings["prompts"] = {"query": instruction}
    if Path(name_or_path).is_dir():  # or a hub is asked whether it has a model of the folder's name
        settings.setdefault("local_files_only", True)
    safe = {"use_safetensors": True} | settings.pop("model_kwargs", {})  # weights alone: a pickle is a program
    encoder = SentenceTransformer(str(name_or_path), model_kwargs=safe, **settings)
    normalization.read_by_pass(encoder)
    encoder.max_seq_length = max_tokens
    encoder[0].modality_config.pop("message", None)  # a chat model's: texts stay texts, no turns around them
    if pooling is not None:
        at = next(i for i, module in enumerate(encoder) if isinstance(module, Pooling))
        encoder[at] = Pooling(encoder.get_embedding_dimension(), pooling_mode=pooling)
    if instruction:
        encoder.set_pooling_include_prompt(False)
    if encoder.tokenizer.pad_token is None:  # a decoder's
        encoder.tokenizer.pad_token = encoder.tokenizer.eos_token
    return encoder


def query_prompt(encoder: SentenceTransformer) -> str:
    """What stands before each query: the encoder's own prompt of that name, mostly none."""
    return encoder.prompts.get("query") or ""


def identity(name_or_path: str | Path) -> str | Path:
    """What stands for an encoder in a digest: a folder, whose content counts, a packaged one's name with the package's
    version, or a hub's name."""
    if version := weights.version(str(name_or_path)):
        return f"{name_or_path} {version}"
    return Path(name_or_path) if Path(name_or_path).is_dir() else str(name_or_path)


def add_lora(encoder: SentenceTransformer, seed: int = 0) -> None:
    """Low-rank adapters on attention's queries and values; the rest is frozen (DR.EHR §4.2, DR.EHR-large).

    `seed`: of their first values, whatever random numbers were drawn before. Raises DataError for an encoder whose
    layers have other names."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "query", "value"]  # a decoder's names, BERT's
    adapters = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.1, target_modules=targets, bias="none")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            encoder[0].model = get_peft_model(encoder[0].model, adapters)
        except ValueError:
            kind = type(encoder[0].model).__name__
            raise DataError(f"LoRA: {kind} has no layer named {', '.join(targets)}; name its own in add_lora") from None


def varlen_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention, [1, heads, tokens, dim] in and [1, tokens, heads, dim] out, over texts end to end, by
    the FlashAttention kernels that torch itself has on CUDA: they need no package, know dropout, and compute in half
    precision. `cu_seq_lens_q` [texts + 1]: where each text begins."""
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    q, k, v = (part if part.dtype in HALF else part.bfloat16() for part in (q, k, v))
    ends, longest = (cu_seq_lens_q, cu_seq_lens_q), (max_length_q, max_length_q)
    flash = torch.ops.aten._flash_attention_forward  # torch.nn.attention.varlen's, which leaves dropout out
    return flash(q, k, v, *ends, *longest, dropout, module.is_causal, False, scale=scaling)[0][None], None


def has_own_kernels(encoder: SentenceTransformer) -> bool:
    """Whether torch brings varlen_attention's kernels for the encoder's device: NVIDIA's from Ampere on."""
    return encoder.device.type == "cuda" and torch.cuda.get_device_capability(encoder.device) >= (8, 0)


def skip_padding(encoder: SentenceTransformer) -> bool:
    """Takes FlashAttention's kernels for texts of various lengths, the package `flash-attn`'s or else torch's own,
    where there is a GPU and the model knows them; says whether. From then on the encoder reads texts end to end, with
    nothing of them padding (`token_buckets`), and computes in half precision only (`encode`); training on a CPU pads
    again, whatever this has said (trainer.prepare_for_training)."""
    text = encoder[0]
    if not text.model._supports_flash_attn:
        return False
    if is_flash_attn_2_available():
        text.model.set_attn_implementation("flash_attention_2")
        text.unpad_inputs = None  # sentence-transformers looks anew whether it can
    elif has_own_kernels(encoder):
        AttentionInterface.register(VARLEN, varlen_attention)
        AttentionMaskInterface.register(VARLEN, flash_attention_mask)
        text.model.set_attn_implementation(VARLEN)
        # What sentence-transformers sets where it finds the package.
        text.data_collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
        if text.model_forward_params is not None:
            text.model_forward_params |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        text._flatten_position_offset = text._infer_flatten_position_offset()
        text.can_flatten_inputs = True
    return text.can_flatten_inputs


def encode(
    encoder: SentenceTransformer,
    texts: Sequence[str],
    batch_size: int = 64,
    progress: bool = False,
    bf16: bool = False,
    prompt: str = "",
) -> np.ndarray:
    """Unit-length embeddings, float32 [texts, dim]. A text that repeats is encoded once.

    prompt: stands before each text, `query_prompt` before queries.

    bf16: compute in bfloat16 where the device is fast at it: a third of the time on long texts, and scores that differ
    in the third digit."""
    unique = list(dict.fromkeys(texts))
    encoder.eval()
    bf16 |= encoder[0].can_flatten_inputs  # skip_padding: its kernels have no float32
    with torch.autocast(encoder.device.type, torch.bfloat16, enabled=bf16 and has_fast_bf16()):
        embeddings = encoder.encode(
            unique, prompt=prompt or None, batch_size=batch_size, normalize_embeddings=True, show_progress_bar=progress,
            convert_to_numpy=True,
        ).astype(np.float32)  # fmt: skip
    at = {text: i for i, text in enumerate(unique)}
    return embeddings[[at[text] for text in texts]]


def bucket_ends(lengths: np.ndarray, buckets: int, most: int | None = None) -> list[int]:
    """Where to cut texts, of which `lengths` [texts] are the tokens in ascending order, into at most so many batches:
    the batches' ends, with the least padding there can be (dynamic programming over where the length changes).

    most: tokens of a batch, padding included; one that has more is cut again, evenly, into as many as it takes."""
    places = np.concatenate([[0], np.flatnonzero(np.diff(lengths)) + 1, [len(lengths)]])
    padded = places[None] - places[:, None]  # texts from one place to another [from, to]
    padded = np.where(padded > 0, padded * lengths[places - 1], np.inf)  # tokens, as the last text is the longest
    least, steps = np.where(places == 0, 0.0, np.inf), []
    for _ in range(min(buckets, len(places) - 1)):
        to = least[:, None] + padded
        steps.append(to.argmin(axis=0))
        least = to.min(axis=0)
    ends = [len(places) - 1]
    for step in reversed(steps[1:]):
        ends.append(step[ends[-1]])
    ends = places[ends[::-1]]
    if most:
        parts = [np.array_split(np.arange(start, end), -(-(end - start) // max(1, most // lengths[end - 1])))
                 for start, end in zip([0, *ends[:-1]], ends, strict=True)]  # fmt: skip
        ends = [part[-1] + 1 for bucket in parts for part in bucket]
    return [int(end) for end in ends]


def token_buckets(
    encoder: SentenceTransformer,
    texts: Sequence[str],
    max_tokens: int,
    buckets: int,
    prompt: str = "",
    most: int | None = None,
) -> list[dict[str, Any]]:
    """Tokenised texts in at most so many batches of similar length, cut so that as little as can be is padding (`most`:
    bucket_ends').

    Each batch has input_ids and attention_mask, int64 [n, length], and `rows`, int64 [n]: where its texts stood. With a
    `prompt` before each text, which `max_tokens` doesn't count, also `prompt_length`, its tokens. After `skip_padding`,
    instead of the mask, input_ids [1, tokens] of all texts, and where each of them begins."""
    tokenizer = encoder.tokenizer
    before = encoder.preprocess(["x"], prompt=prompt)["prompt_length"] if prompt else 0
    given = [prompt + text for text in texts]
    ids = tokenizer(given, truncation=True, max_length=before + max_tokens, padding=False)["input_ids"]
    order = sorted(range(len(ids)), key=lambda i: len(ids[i]))
    batches, flat = [], encoder[0].can_flatten_inputs
    # End to end nothing is padded, however the lengths differ: one batch, whose kernels are started once.
    ends = bucket_ends(np.array([len(ids[i]) for i in order]), 1 if flat else buckets, most)
    for part in np.split(np.array(order), ends[:-1]):
        if flat:
            batch = _end_to_end([ids[i] for i in part], encoder[0]._flatten_position_offset)
        else:
            batch = tokenizer.pad({"input_ids": [ids[i] for i in part]}, return_tensors="pt")
        length = {"prompt_length": torch.tensor([before])} if prompt else {}
        batches.append(dict(batch) | {"rows": torch.from_numpy(part)} | length)
    return batches


def _end_to_end(ids: list[list[int]], first: int) -> dict[str, Any]:
    """What transformers' DataCollatorWithFlattening makes of such texts, a tenth of its time; `first`: the position of
    a text's first token."""
    lengths = torch.tensor([len(part) for part in ids])
    ends, longest = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)), int(lengths.max())
    places = torch.arange(int(ends[-1])) - torch.repeat_interleave(ends[:-1], lengths)
    cu_seq_lens = ends.to(torch.int32)
    return {
        "input_ids": torch.tensor(list(chain.from_iterable(ids)))[None], "position_ids": places[None] + first,
        "cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens, "max_length_q": longest, "max_length_k": longest,
    }  # fmt: skip


def embed_buckets(encoder: SentenceTransformer, batches: list[dict[str, Any]], recompute: bool = False) -> Tensor:
    """Unit-length embeddings of `token_buckets`' texts in their first order, float32 [texts, dim], with gradient.

    recompute: only embeddings are kept for the backward pass, which encodes each bucket a second time. So the memory
    is the largest bucket's (token_buckets' `most` bounds it), and the gradient the same: what gradient caching (Gao et
    al., 2021) is for."""
    parts, device = [], next(encoder.parameters()).device

    def embed(texts: dict[str, Any]) -> Tensor:
        return encoder(dict(texts))["sentence_embedding"].float()  # a copy, for the encoder adds to it

    for batch in batches:
        texts = {name: part for name, part in batch.items() if name != "rows"}
        texts |= {name: part.to(device) for name, part in texts.items() if isinstance(part, Tensor)}
        parts.append(checkpoint(embed, texts, use_reentrant=False) if recompute else embed(texts))
    embeddings = torch.nn.functional.normalize(torch.cat(parts), dim=1)
    return embeddings[torch.argsort(torch.cat([batch["rows"] for batch in batches]))]


def save_encoder(encoder: SentenceTransformer, folder: Path) -> None:
    """Saves in sentence-transformers' layout with safetensors, adapters merged, so that any tool loads it."""
    if hasattr(encoder[0].model, "merge_and_unload"):
        encoder[0].model = encoder[0].model.merge_and_unload()
    if backend := getattr(encoder.tokenizer, "backend_tokenizer", None):
        # It would be saved as the last texts were cut and padded: in a run that went on at its end there were none.
        backend.no_padding()
        backend.no_truncation()
    encoder.save(str(folder), create_model_card=False)


def describe_device() -> str:
    """The device that training uses, in words."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f"CPU, {torch.get_num_threads()} threads, {'bf16' if has_fast_bf16() else 'fp32'}"
