"""CAPR's systems: what each is, its training on passages of the training notes, its scores and its speed (CAPR §4)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import faiss
import numpy as np
import pandas as pd
import torch
from torch import nn
from torch.utils.data import Dataset
from tqdm.auto import tqdm

from drehr_utils import artifacts, errors, pipeline
from drehr_utils.config import CaprSystem, StageConfig
from drehr_utils.evaluation.medquad import MedQuad
from drehr_utils.papers.capr import models
from drehr_utils.papers.capr.longformer import LongEncoder
from drehr_utils.papers.capr.models import BiEncoder, ContextualDocumentVectors, CrossEncoder, PolyEncoder, TwoTowers
from drehr_utils.papers.capr.passages import Passage, note_passages, query_text, retrieval_task
from drehr_utils.profiles import Profile
from drehr_utils.training import encoders, sampling, trainer

START, BI_SHARED, BI = pipeline.START, "CAPR-Bi-shared", "CAPR-Bi"
POLY, CROSS, CDV, CDV_FINETUNE = "CAPR-Poly", "CAPR-Cross", "CDV", "CDV-finetune"
IN_PAPER = {
    BI_SHARED: "CAPR-BioBERT-Bi-shared",
    BI: "CAPR-BioBERT-Bi",
    POLY: "CAPR-BioBERT-Poly",
    CROSS: "CAPR-BioBERT-Cross",
    CDV: "CDV+BioBERT",
    CDV_FINETUNE: "CDV+BioBERT-finetune",
}


@cache
def passages(profile: Profile, split: str) -> list[Passage]:
    """A split's passages, labelled or not, in the notes' order."""
    notes, _, splits = pipeline.notes(profile)
    words, find = profile.capr.passage_words, pipeline.matcher(profile)
    chosen = [note for note in notes if splits[note.note_id] == split]
    if split != "train" and profile.max_eval_patients:
        chosen = chosen[: profile.max_eval_patients]
    return [passage for note in chosen for passage in note_passages(note, find, words)]


@cache
def training_passages(profile: Profile) -> tuple[list[Passage], str]:
    """The labelled passages that the systems learn from, and a digest of their texts, labels and documents."""
    labelled = [p for p in passages(profile, "train") if p.labelled][: profile.capr.passage_rows]
    return labelled, _digest(labelled)


def held_out(profile: Profile, split: str = "test") -> tuple[MedQuad, list[Passage], np.ndarray]:
    """The task on a split's notes: queries, the pool of passages, and each query's candidates (positions in the pool).

    Raises DataError where no passage of the split is labelled."""
    size = profile.capr
    pool = [p for p in passages(profile, split) if p.labelled]
    if not pool:
        raise errors.DataError(f"CAPR: no {split} passage has an entity and an aspect; check the notes' headings")
    if size.test_passages:
        chosen = np.sort(np.random.default_rng(profile.seed).permutation(len(pool))[: size.test_passages])
        pool = [pool[i] for i in chosen]
    data, candidates = retrieval_task(pool, size.test_queries, size.n_candidates, profile.seed)
    return data, pool, candidates


def build(profile: Profile, system: CaprSystem) -> nn.Module:
    """An untrained model of `system`, from the profile's starting encoder."""
    size = profile.capr
    lengths = dict(query_tokens=size.query_tokens, passage_tokens=size.passage_tokens)

    def start(pooling: str | None = profile.pooling):
        return encoders.load_encoder(system.encoder or profile.encoder, pooling)

    torch.manual_seed(profile.seed)  # of the weights that start at random
    if system.kind.startswith("longformer"):
        poly = system.kind == "longformer-poly"
        return LongEncoder.load(system.encoder, poly=poly, query_tokens=size.query_tokens).to(_device())
    makers: dict[str, Callable[[], nn.Module]] = {
        "start": lambda: BiEncoder(start(), **lengths),
        "bi-shared": lambda: BiEncoder(start(), marks=True, **lengths),
        "bi": lambda: BiEncoder(start(), start(), **lengths),
        "poly": lambda: PolyEncoder(start(), start(), **lengths),
        "cross": lambda: CrossEncoder(start(), max_tokens=min(size.passage_tokens + 16, encoders.CHUNK_TOKENS)),
        "cdv": lambda: ContextualDocumentVectors(start("mean"), start()),
        "cdv-finetune": lambda: ContextualDocumentVectors(start(), start(), frozen=False),
    }
    return makers[system.kind]().to(_device())


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


class QueryPassagePairs(Dataset):
    """(epoch, index) -> (query, passage): one of the passage's entities at random, with its aspect (CAPR §3.1)."""

    def __init__(self, labelled: Sequence[Passage], seed: int):
        self.labelled, self.seed = labelled, seed

    def __len__(self) -> int:
        return len(self.labelled)

    def __getitem__(self, key: tuple[int, int]) -> tuple[str, Passage]:
        epoch, i = key
        passage = self.labelled[i]
        entity = np.random.default_rng([self.seed, 1 + epoch, i]).choice(len(passage.entities))
        return query_text(passage.entities[entity], passage.aspect), passage


def _collate(pairs: list[tuple[str, Passage]]) -> dict[str, list]:
    return {"queries": [query for query, _ in pairs], "passages": [passage for _, passage in pairs]}


def train(
    model: nn.Module,
    labelled: Sequence[Passage],
    config: StageConfig,
    output: Path,
    **options,
) -> pd.DataFrame:
    """trainer.train with equation 1 on labelled passages (CAPR §4.3); `options`: its own. Returns step and loss."""
    schedule = sampling.batch_schedule([p.document_id for p in labelled], config)
    pairs = QueryPassagePairs(labelled, config.seed)

    def loss(model: nn.Module, inputs: dict) -> torch.Tensor:
        return models.listwise_loss(model(inputs["queries"], inputs["passages"]).float())

    return trainer.train(model, pairs, schedule, _collate, loss, config, output, **options)[["step", "loss"]]


def trained_model(profile: Profile, name: str) -> tuple[nn.Module, pd.DataFrame | None, str]:
    """A system's model, trained where its weights aren't in the cache; its loss curve; and the key of what made it."""
    system, size = profile.capr.system(name), profile.capr
    model = build(profile, system)
    labelled, made_of = training_passages(profile)
    start = encoders.identity(system.encoder or profile.encoder)
    lengths = [size.passage_tokens, size.query_tokens]
    key = artifacts.digest(build, train, system, start, profile.pooling, profile.seed, lengths, made_of)
    if system.config is None:
        return model, None, key
    if system.after is not None:
        first, _, first_key = trained_model(profile, system.after)
        key = artifacts.digest(key, first_key)
    folder = profile.cache / "capr" / f"{system.kind}-{key}"
    work = profile.cache / "checkpoints" / f"capr-{folder.name}"

    def make(partial: Path) -> None:
        if system.after is not None:
            model.load_state_dict(first.state_dict())
        curve = train(model, labelled, system.config, work, save_steps=profile.save_steps)
        torch.save(model.state_dict(), partial / "weights.pt")
        curve.to_csv(partial / "loss.csv", index=False)

    artifacts.cached_folder(folder, make)
    artifacts.remove(work)
    weights = torch.load(folder / "weights.pt", weights_only=True, map_location=_device())
    model.load_state_dict(weights)
    return model.eval(), pd.read_csv(folder / "loss.csv"), key


def _digest(texts: Sequence[Passage]) -> str:
    documents = dict.fromkeys(p.document for p in texts)
    return artifacts.digest([(p.id, p.start, p.end, p.aspect, p.entities) for p in texts], list(documents))


@torch.no_grad()
def candidate_scores(
    model: nn.Module,
    queries: Sequence[str],
    texts: Sequence[Passage],
    candidates: np.ndarray,
    block: int = 256,
    progress: bool = False,
) -> np.ndarray:
    """The model's scores of each query's candidates, float32 [queries, candidates]; positions are into `texts`.

    A passage is encoded once, whatever the number of its queries, except by the Cross-encoder."""
    model.eval()
    scores = np.empty(candidates.shape, dtype=np.float32)
    device = next(model.parameters()).device.type
    with torch.autocast(device, torch.bfloat16, enabled=encoders.has_fast_bf16()):
        if not isinstance(model, TwoTowers):
            rows, columns = (part.ravel() for part in np.indices(candidates.shape))
            lengths = np.array([len(p.text) for p in texts])
            order = np.argsort(lengths[candidates[rows, columns]], kind="stable")
            for start in tqdm(range(0, len(order), block), unit="block", disable=not progress):
                r, c = rows[order[start : start + block]], columns[order[start : start + block]]
                pairs = [(queries[i], texts[candidates[i, j]].text) for i, j in zip(r, c, strict=True)]
                scores[r, c] = model.pair_scores(pairs).float().cpu().numpy()
            return scores
        encoded = model.encode_queries(queries)
        used = np.unique(candidates)
        for start in tqdm(range(0, len(used), block), unit="block", disable=not progress):
            part = used[start : start + block]
            passages_part = model.encode_passages([texts[i] for i in part])
            with torch.autocast(device, enabled=False):
                matched = [model.match(q, passages_part) for q in encoded.split(block)]
            rows, columns = np.nonzero((candidates >= part[0]) & (candidates <= part[-1]))
            at = np.searchsorted(part, candidates[rows, columns])
            scores[rows, columns] = torch.cat(matched).float().cpu().numpy()[rows, at]
    return scores


def scored(
    profile: Profile, name: str, task: str, data: MedQuad, texts: Sequence[Passage], candidates: np.ndarray
) -> np.ndarray:
    """`candidate_scores` of a trained system on a task, from the cache where they are there."""
    model, _, key = trained_model(profile, name)
    asked = list(data.queries.values())
    key = artifacts.digest(candidate_scores, key, asked, _digest(texts), candidates)
    return artifacts.cached_file(
        profile.cache / f"capr/scores/{task}-{profile.capr.system(name).kind}-{key}.npy",
        lambda: candidate_scores(model, asked, texts, candidates, progress=True),
    )


def passage_tokens(profile: Profile, texts: Sequence[Passage]) -> list[int]:
    """Each passage's number of tokens, special ones not counted, before anything is cut off."""
    tokenizer = pipeline.starting_encoder(profile).tokenizer
    ids = tokenizer([p.text for p in texts], add_special_tokens=False, truncation=False, verbose=False)["input_ids"]
    return [len(row) for row in ids]


@torch.no_grad()
def latency(model: nn.Module, query: str, texts: Sequence[Passage], n: int, repeats: int = 3) -> float:
    """Median seconds to rank `n` passages for one query (CAPR, Figure 3); `texts` are repeated to make `n`.

    Passages are encoded beforehand where the model can: into a FAISS index (Bi), as token embeddings (Poly). The
    Cross-encoder reads them all with the query."""
    model.eval()
    many = [texts[i % len(texts)] for i in range(n)]
    device = next(model.parameters()).device
    with torch.autocast(device.type, torch.bfloat16, enabled=encoders.has_fast_bf16()):
        if isinstance(model, TwoTowers):
            ready = _encode_all(model, texts[:n], n)
            if torch.is_tensor(ready):
                index = faiss.IndexFlatIP(ready.shape[1])
                index.add(ready.float().cpu().numpy())

        def search() -> None:
            if not isinstance(model, TwoTowers):
                for start in range(0, n, 64):
                    model.pair_scores([(query, p.text) for p in many[start : start + 64]]).cpu()
                return
            encoded = model.encode_queries([query])
            if torch.is_tensor(ready):
                index.search(encoded.float().cpu().numpy(), min(n, 10))
            else:
                with torch.autocast(device.type, enabled=False):
                    model.match(encoded, ready).topk(min(n, 10)).indices.cpu()

        search()  # not timed: the first run sets up threads and buffers
        times = []
        for _ in range(repeats):
            begun = time.perf_counter()
            search()
            times.append(time.perf_counter() - begun)
    return float(np.median(times))


def _encode_all(model: TwoTowers, texts: Sequence[Passage], n: int) -> torch.Tensor | tuple[torch.Tensor, ...]:
    parts = model.encode_passages(texts)
    rows = torch.arange(n) % len(texts)
    return parts[rows] if torch.is_tensor(parts) else tuple(part[rows] for part in parts)


def measured_latency(profile: Profile, texts: Sequence[Passage]) -> pd.DataFrame:
    """`system, passages, seconds` of Bi, Poly and Cross on this machine; measured once, then read from the cache."""
    size = profile.capr
    key = artifacts.digest(measured_latency, list(size.latency_passages), size.latency_limit, size.passage_tokens)

    def measure() -> pd.DataFrame:
        query, rows = query_text("chest pain", "history of present illness"), []
        for name in (BI, POLY, CROSS):
            model = trained_model(profile, name)[0]
            for n in size.latency_passages:
                if name != CROSS or n <= size.latency_limit:
                    rows.append((name, n, latency(model, query, texts, n, repeats=3 if name == CROSS else 30)))
        return pd.DataFrame(rows, columns=["system", "passages", "seconds"])

    return artifacts.cached_file(profile.cache / f"capr/latency-{key}.parquet", measure)
