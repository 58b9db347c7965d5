"""Dense retrievers by name or path: each with its own pooling, prefixes and similarity (CliniQ §4.2.2).

A baseline of your own is one entry of REGISTRY, with what the model's card says and RetrieverSpec's fields explain:

    RetrieverSpec(
        "my-encoder", "owner/my-encoder",  # its name in the tables; a hub's name, or Path("/its/folder")
        pooling="cls", query_prefix="query: ", passage_prefix="passage: ", similarity="dot", query_tokens=64,
    ),

and its name in the profile's `cliniq.retrievers`, or in DREHR_RETRIEVERS="MiniLM (start),my-encoder". A hub's name or
a folder there needs no entry, where cosine, no prefixes and the pooling saved with the model are right.

The registry's settings are those that each model's authors document. `as_in_cliniq` makes of CliniQ's own retrievers
what its public evaluation script does: cosine similarity and 512 tokens for all, and bge without its instruction.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from tokenizers.processors import TemplateProcessing

from drehr_utils import artifacts
from drehr_utils.config import MINILM
from drehr_utils.data.benchmark import Benchmark
from drehr_utils.errors import DataError
from drehr_utils.profiles import PROFILES, Profile
from drehr_utils.search import embedding_api
from drehr_utils.search.dense import SIMILARITIES, dense_scores, unit_length
from drehr_utils.training.encoders import CHUNK_TOKENS, identity, load_encoder

# What instruction-tuned retrievers are told, as in the authors' public code; the templates are the models'.
TASK = "Given the medical entity, retrieve relevant paragraphs of patients' medical records"
INSTRUCT = f"Instruct: {TASK}\nQuery: "


@dataclass(frozen=True)
class RetrieverSpec:
    """One dense retriever. `name` is the paper's, `model` a hub name, a folder (Path), or the API's model name."""

    name: str
    model: str | Path
    query_model: str | Path | None = None  # where queries have an encoder of their own
    pooling: str | None = None  # cls, mean or lasttoken; None: the modules saved with the model
    query_prefix: str = ""
    passage_prefix: str = ""
    similarity: str = "cosine"
    query_tokens: int = CHUNK_TOKENS
    passage_tokens: int = CHUNK_TOKENS
    append_eos: bool = False  # the tokenizer doesn't add the end-of-text token whose state is pooled
    padding_side: str | None = None  # None: the tokenizer's own
    trust_remote_code: bool = False  # the model's own code is needed: bidirectional attention, latent pooling
    token_states: str | None = None  # what that code calls the states that are pooled, if not last_hidden_state
    dtype: str = "float32"
    api: bool = False  # asked of an OpenAI-compatible server, see embedding_api.py

    def __post_init__(self) -> None:
        if self.similarity not in SIMILARITIES:
            raise ValueError(f"{self.name}: similarity {self.similarity!r} is none of {', '.join(SIMILARITIES)}")


REMOTE_CODE = "DREHR_TRUST_REMOTE_CODE"  # what the environment says for retrievers whose code comes from a hub
_GTE = RetrieverSpec(  # its tokenizer, also remote code, ends every text with the token that is pooled
    "gte-Qwen2-1.5B-Instruct", "Alibaba-NLP/gte-Qwen2-1.5B-instruct", pooling="lasttoken", query_prefix=INSTRUCT,
    trust_remote_code=True,
)  # fmt: skip
_BMRETRIEVER = RetrieverSpec(
    "BMRetriever-410M", "BMRetriever/BMRetriever-410M", pooling="lasttoken", query_prefix=f"{TASK}\nQuery: ",
    passage_prefix="Represent this passage\npassage: ", similarity="dot", append_eos=True,
)  # fmt: skip
_NV_EMBED = RetrieverSpec(  # its pooling, a latent attention layer that skips the instruction, is in its own code
    "NV-Embed-v2", "nvidia/NV-Embed-v2", query_prefix=INSTRUCT, append_eos=True, padding_side="right",
    trust_remote_code=True, token_states="sentence_embeddings", dtype="bfloat16",
)  # fmt: skip
REGISTRY = {
    spec.name: spec
    for spec in (
        # The packaged all-MiniLM-L6-v2; 512 tokens as everywhere in this project (its card cuts at 256).
        RetrieverSpec("MiniLM (start)", MINILM),
        RetrieverSpec(
            "bge-base-en-v1.5", "BAAI/bge-base-en-v1.5", pooling="cls",
            query_prefix="Represent this sentence for searching relevant passages: ",
        ),
        _GTE,
        replace(_GTE, name="gte-Qwen2-7B-Instruct", model="Alibaba-NLP/gte-Qwen2-7B-instruct", dtype="bfloat16"),
        _NV_EMBED,
        RetrieverSpec(  # trained with dot products; chunks have no title to pair with
            "MedCPT", "ncbi/MedCPT-Article-Encoder", query_model="ncbi/MedCPT-Query-Encoder", pooling="cls",
            similarity="dot", query_tokens=64,
        ),
        _BMRETRIEVER,
        replace(_BMRETRIEVER, name="BMRetriever-2B", model="BMRetriever/BMRetriever-2B", dtype="bfloat16"),
        replace(_BMRETRIEVER, name="BMRetriever-7B", model="BMRetriever/BMRetriever-7B", dtype="bfloat16"),
        RetrieverSpec(
            "text-embedding-3-large", "text-embedding-3-large", query_tokens=8191, passage_tokens=8191, api=True
        ),
        # DR.EHR's released weights: pooling and instruction as in the training code of github.com/zhao-zy15/DR.EHR.
        RetrieverSpec("DR.EHR-small", "THUMedInfo/DR.EHR-small", pooling="cls"),
        replace(_NV_EMBED, name="DR.EHR-large", model="THUMedInfo/DR.EHR-large"),
        RetrieverSpec(  # as its card has it: no space after the query's colon; the tokenizer ends each text by itself
            "Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-0.6B", pooling="lasttoken",
            query_prefix=f"Instruct: {TASK}\nQuery:", padding_side="left",
        ),
    )
}  # fmt: skip


IN_CLINIQ = PROFILES["mimic"].cliniq.retrievers


def find_retriever(name_or_path: str | Path) -> RetrieverSpec:
    """The registry's entry of that name; else a folder, or a hub name with a slash, with its own pooling and cosine.

    Raises DataError where it is none of the three.
    """
    if str(name_or_path) in REGISTRY:
        return REGISTRY[str(name_or_path)]
    path = Path(name_or_path)
    if path.is_dir():
        return RetrieverSpec(path.name, path.resolve())
    if isinstance(name_or_path, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", name_or_path):
        return RetrieverSpec(path.name, name_or_path)
    raise DataError(
        f"retriever {path.name!r}: no folder, no hub name (owner/model), and none of {', '.join(REGISTRY)}; "
        "correct DREHR_RETRIEVERS"
    )


def as_in_cliniq(spec: RetrieverSpec) -> RetrieverSpec:
    """`spec` as CliniQ's public evaluation script runs it: cosine, 512 tokens, no instruction for bge; one that isn't
    in CliniQ as its entry has it."""
    if spec.name not in IN_CLINIQ:
        return spec
    prefix = "" if spec.name.startswith("bge") else spec.query_prefix
    tokens = {} if spec.api else {"query_tokens": CHUNK_TOKENS, "passage_tokens": CHUNK_TOKENS}
    return replace(spec, similarity="cosine", query_prefix=prefix, **tokens)


def load_retriever(spec: RetrieverSpec, device: str | None = None) -> tuple[SentenceTransformer, SentenceTransformer]:
    """(query encoder, passage encoder) of a local model: the same object twice unless the spec names two.

    Raises DataError for a folder or hub model that isn't on this machine and can't be fetched."""
    passage = _load(spec, spec.model, spec.passage_tokens, device)
    query = passage if spec.query_model is None else _load(spec, spec.query_model, spec.query_tokens, device)
    return query, passage


def _load(spec: RetrieverSpec, model: str | Path, max_tokens: int, device: str | None) -> SentenceTransformer:
    settings = {"trust_remote_code": spec.trust_remote_code, "model_kwargs": {"dtype": spec.dtype}}
    try:
        encoder = load_encoder(model, spec.pooling, max_tokens, device=device, **settings)
    except OSError:  # transformers' text names the cache's folders
        raise DataError(
            f"{spec.name}: {Path(model).name} is not in the hub's cache, and could not be fetched; download it, give "
            "its folder in DREHR_RETRIEVERS, or leave it out"
        ) from None
    if spec.pooling or spec.token_states:  # the texts as they are, also where the tokenizer has a chat template
        states = spec.token_states or "last_hidden_state"
        encoder[0].modality_config = {"text": {"method": "forward", "method_output_name": states}}
    tokenizer = encoder.tokenizer
    if spec.padding_side:
        tokenizer.padding_side = spec.padding_side
    if spec.append_eos:
        _end_with_eos(tokenizer)
    return encoder


def _end_with_eos(tokenizer) -> None:
    """Makes the tokenizer end each text with its end-of-text token, which truncation then leaves room for."""
    before = tokenizer("")["input_ids"]  # what it adds by itself: nothing, or a token at the start
    if before[-1:] == [tokenizer.eos_token_id]:
        return
    tokens = [*tokenizer.convert_ids_to_tokens(before), tokenizer.eos_token]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*tokens[:-1], "$A", tokens[-1]],
        special_tokens=list(zip(tokens, [*before, tokenizer.eos_token_id], strict=True)),
    )


def embed_texts(
    spec: RetrieverSpec,
    queries: Sequence[str],
    passages: Sequence[str],
    progress: bool = False,
    store: Path | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of queries [queries, dim] and passages [passages, dim], float32; unit length under cosine.

    An API's embeddings are kept in the folder `store` as they come, so that a stopped run goes on where it was.
    """
    texts = ((spec.query_prefix, list(queries)), (spec.passage_prefix, list(passages)))
    if spec.api:
        server = embedding_api.server_from_env(str(spec.model))
        found = [
            embedding_api.embed([prefix + text for text in part], server, store, progress=progress)
            for prefix, part in texts
        ]
    else:
        found = [
            _encode(encoder, part, prefix, progress)
            for encoder, (prefix, part) in zip(load_retriever(spec), texts, strict=True)
        ]
    if spec.similarity == "cosine":
        found = map(unit_length, found)
    queries, passages = found
    return queries, passages


def _encode(encoder: SentenceTransformer, texts: list[str], prefix: str, progress: bool) -> np.ndarray:
    encoder.eval()
    # The prefix goes in as a prompt, so that a pooling that skips instructions (NV-Embed's) knows its length.
    found = encoder.encode(texts, prompt=prefix or None, batch_size=64, show_progress_bar=progress)
    return found.astype(np.float32)


def retriever_scores(spec: RetrieverSpec, benchmark: Benchmark, folder: Path, progress: bool = False) -> np.ndarray:
    """The retriever's score matrix of the benchmark [queries, chunks]; embeddings are kept in `folder`.

    They are found again by the spec, the texts and, for a model folder, its files' bytes."""
    queries, passages = list(benchmark.queries.values()), list(benchmark.corpus.values())
    models = [identity(model) for model in (spec.model, spec.query_model) if model is not None]
    settings = replace(spec, model="", query_model=None)  # by content, not by path
    device_kind = "cuda" if torch.cuda.is_available() else "cpu"
    key = artifacts.digest(embed_texts, settings, models, queries, passages, device_kind)
    slug = re.sub(r"[^\w.-]+", "-", spec.name).strip("-")
    sides = artifacts.cached_file(
        folder / f"{slug}-{key}.npz",
        lambda: embed_texts(spec, queries, passages, progress=progress, store=folder / "api"),
    )
    return dense_scores(*sides, spec.similarity)


def profile_retrievers(profile: Profile) -> tuple[list[RetrieverSpec], dict[str, str]]:
    """The profile's dense retrievers, run as in CliniQ, and what those that are left out lack, by name: a server, or
    leave to run the hub's code in a process that reads protected notes (REMOTE_CODE).

    DREHR_RETRIEVERS, names or folders with commas between, replaces the profile's list. Raises DataError where two have
    one name, and where none is left."""
    asked = [name.strip() for name in os.environ.get("DREHR_RETRIEVERS", "").split(",") if name.strip()]
    specs = list(dict.fromkeys(as_in_cliniq(find_retriever(name)) for name in asked or profile.cliniq.retrievers))
    names = [spec.name for spec in specs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(
            f"DREHR_RETRIEVERS: two retrievers are called {twice[0]!r}; rename a folder, for tables go by name"
        )
    server = embedding_api.BASE_URL
    lacking = {spec.name: server for spec in specs if spec.api and not os.environ.get(server, "").strip()}
    if profile.protected and os.environ.get(REMOTE_CODE) != "yes":
        lacking |= {spec.name: f"{REMOTE_CODE}=yes" for spec in specs if spec.trust_remote_code}
    run = [spec for spec in specs if spec.name not in lacking]
    if not run:
        raise DataError("no dense retriever is left to run; name one in DREHR_RETRIEVERS")
    return run, lacking


def extra_scores(profile: Profile, benchmark: Benchmark, progress: bool = False) -> dict[str, np.ndarray]:
    """The score matrices of the profile's retrievers but the starting encoder's: rows for any table of systems."""
    folder = profile.cache / "embeddings"
    return {
        spec.name: retriever_scores(spec, benchmark, folder, progress=progress)
        for spec in profile_retrievers(profile)[0]
        if str(spec.model) != str(profile.encoder)
    }
