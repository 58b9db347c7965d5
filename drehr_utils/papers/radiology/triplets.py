"""Training a sentence encoder with triplets (Radiology §2.3, Appendix A), and as a language model.

A triplet is a query, a sentence that matches it and one that doesn't. Hard sampling takes the unmatched sentence most
similar to the query; mega-batching (Wieting and Gimpel, 2018) looks for it in a larger pool than the batch of a step.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.nn import Module
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    DataCollatorForLanguageModeling,
    Trainer,
)
from transformers.utils import logging

from drehr_utils.config import MARGIN, TripletConfig
from drehr_utils.errors import DataError
from drehr_utils.papers.radiology.entries import Entry
from drehr_utils.training import encoders
from drehr_utils.training.encoders import embed_buckets, token_buckets
from drehr_utils.training.trainer import OnTheWay, fit, prepare_for_training, train, training_arguments

SENTENCE_TOKENS = 48


def cosine_distance(a: Tensor, b: Tensor) -> Tensor:
    """1 - cos of the rows of a and b, [n, dim] each: [n], from 0 to 2."""
    return 1 - torch.nn.functional.cosine_similarity(a, b, dim=-1)


def triplet_loss(q: Tensor, m: Tensor, u: Tensor, margin: float = MARGIN) -> Tensor:
    """Equation 1, averaged: max(|e_q - e_m| - |e_q - e_u| + margin, 0), |.| the cosine distance; inputs [n, dim]."""
    return torch.relu(cosine_distance(q, m) - cosine_distance(q, u) + margin).mean()


def sample_unmatched(
    similarities: Tensor, matched: Tensor, hard: bool, generator: torch.Generator | None = None
) -> Tensor:
    """For each query the column of an unmatched sentence: the most similar one (hard), or any; -1 where all match.

    `similarities` [queries, sentences], `matched` bool of the same shape."""
    scores = similarities if hard else torch.rand(similarities.shape, generator=generator).to(similarities.device)
    best = scores.masked_fill(matched, -torch.inf).argmax(dim=1)
    return torch.where(matched.all(dim=1), -1, best)


@dataclass
class TripletSet:
    """Entries as positions, [entries], in the unique queries and sentences; `matched` bool [queries, sentences]."""

    queries: list[str]
    sentences: list[str]
    query_of: Tensor
    sentence_of: Tensor
    matched: Tensor

    @classmethod
    def build(cls, entries: Sequence[Entry]) -> TripletSet:
        """Raises DataError where there is nothing to contrast."""
        query_of, queries = pd.factorize(pd.Series([entry.query for entry in entries]))
        sentence_of, sentences = pd.factorize(pd.Series([entry.sentence for entry in entries]))
        if len(queries) < 2 or len(sentences) < 2:
            raise DataError("triplets: fewer than two queries or sentences; check the lexicon and the reports")
        matched = torch.zeros(len(queries), len(sentences), dtype=torch.bool)
        matched[query_of, sentence_of] = True
        return cls(list(queries), list(sentences), torch.tensor(query_of), torch.tensor(sentence_of), matched)

    def __len__(self) -> int:
        return len(self.query_of)


def mega_batches(entries: int, config: TripletConfig) -> tuple[list[list[int]], list[list[tuple[int, int]]]]:
    """The pools of all epochs, and the steps: batches of (pool, entry) pairs, fixed by the seed.

    Entries are shuffled anew each epoch and cut into pools of `mega_batch`, these into batches of `batch_size`; what is
    left over of fewer than two entries is dropped. Settings whose pools are whole batches see the same entries in the
    same order and steps."""
    pools, steps = [], []
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.seed, epoch]).permutation(entries).tolist()
        size = max(config.mega_batch, config.batch_size)
        for pool in (order[i : i + size] for i in range(0, entries, size)):
            batches = [pool[i : i + config.batch_size] for i in range(0, len(pool), config.batch_size)]
            steps += [[(len(pools), entry) for entry in batch] for batch in batches if len(batch) > 1]
            pools.append(pool)
    return pools, steps[: config.max_steps]


@dataclass
class TripletLoss:
    """Equation 1 on a batch of a pool's entries; the pool's unmatched sentences are chosen at its first batch."""

    data: TripletSet
    pools: list[list[int]]
    config: TripletConfig
    _mined: tuple[int, Tensor | None] = field(default=(-1, None), init=False)

    def __call__(self, model: SentenceTransformer, inputs: dict[str, Tensor]) -> Tensor:
        data, rows = self.data, inputs["entries"].cpu()
        unmatched = self._unmatched(model, int(inputs["pool"]))[rows]
        rows, unmatched = rows[unmatched >= 0], unmatched[unmatched >= 0]
        if not len(rows):  # every sentence of the batch matches every query of it: nothing to learn
            return torch.zeros((), device=model.device, requires_grad=True)
        q = _embed(model, data.queries, data.query_of[rows])
        m, u = _embed(model, data.sentences, torch.cat([data.sentence_of[rows], unmatched])).chunk(2)
        return triplet_loss(q, m, u, self.config.margin)

    def _unmatched(self, model: SentenceTransformer, pool: int) -> Tensor:
        """The positions of the pool's entries' unmatched sentences, int64 [entries]. Random sampling needs no model."""
        if self._mined[0] != pool:
            entries = self.pools[pool]
            query, columns = self.data.query_of[entries], self.data.sentence_of[entries].unique()
            matched = self.data.matched[query][:, columns]
            S = torch.zeros(matched.shape)
            if self.config.hard:
                with torch.no_grad():
                    said = _embed(model, self.data.sentences, columns)
                    S = (_embed(model, self.data.queries, query) @ said.T).float().cpu()
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + pool)
            best = sample_unmatched(S, matched, self.config.hard, generator)
            self._mined = pool, torch.full_like(self.data.query_of, -1)
            self._mined[1][entries] = torch.where(best >= 0, columns[best.clamp(min=0)], -1)
        return self._mined[1]


def _embed(model: SentenceTransformer, texts: list[str], positions: Tensor) -> Tensor:
    """Embeddings, float32 [positions, dim]; a text that repeats is encoded once."""
    unique, back = positions.unique(return_inverse=True)
    buckets = token_buckets(model, [texts[i] for i in unique.tolist()], SENTENCE_TOKENS, -(-len(unique) // 32))
    return embed_buckets(model, buckets)[back]


def _collate(keys: list[tuple[int, int]]) -> dict[str, Tensor]:
    return {"pool": torch.tensor(keys[0][0]), "entries": torch.tensor([entry for _, entry in keys])}


def _settings(config: TripletConfig, steps: int) -> dict[str, float]:
    """What Appendix A asks of the optimizer beside training_arguments."""
    return {"weight_decay": config.weight_decay, "warmup_steps": min(config.warmup_steps, steps // 10)}


def train_triplets(
    encoder: SentenceTransformer, entries: Sequence[Entry], config: TripletConfig, **options
) -> SentenceTransformer:
    """Trains `encoder` in place on the entries with AdamW, warm-up and linear decay (Appendix A); returns it.
    `options`: trainer.train's.

    Takes minutes, on all of IU X-ray an hour of one core, and keeps no checkpoints: what calls it caches the result."""
    data = TripletSet.build(entries)
    pools, steps = mega_batches(len(data), config)
    loss, settings = TripletLoss(data, pools, config), _settings(config, len(steps))
    with tempfile.TemporaryDirectory() as folder:
        train(encoder, steps, _collate, loss, config, Path(folder), **options, **settings)
    return encoder


def lm_steps(sentences: int, config: TripletConfig) -> int:
    steps = max(1, config.epochs * sentences // config.batch_size)
    return min(steps, config.max_steps or steps)


def tune_lm(
    encoder: SentenceTransformer,
    sentences: Sequence[str],
    config: TripletConfig,
    progress: bool = True,
    head_first: bool = False,
    measure: Callable[[Module, int], None] | None = None,
) -> SentenceTransformer:
    """The baseline "BERT (fine-tuned)": masked language modelling on the sentences, no labels (§3.3, Appendix A); of a
    decoder, which predicts the next word, that.

    A sentence encoder has lost its prediction head; a new one is trained along, on top of the encoder in place, or with
    `head_first` before it as well, alone, for as many steps. A decoder's is its table of tokens. `measure`: OnTheWay's,
    called with the language model when `encoder` has its weights."""
    ids = encoder.tokenizer(list(sentences), truncation=True, max_length=SENTENCE_TOKENS)["input_ids"]
    steps = lm_steps(len(ids), config)
    masked = type(encoder[0].auto_model.config) in MODEL_FOR_MASKED_LM_MAPPING
    kind = AutoModelForMaskedLM if masked else AutoModelForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        encoders.save_encoder(encoder, Path(folder, "start"))
        torch.manual_seed(config.seed)  # of the new head
        level = logging.get_verbosity()
        logging.set_verbosity_error()  # says at length that the head is new
        model = kind.from_pretrained(Path(folder, "start"), attn_implementation="eager")
        logging.set_verbosity(level)
        prepare_for_training(model, config)
        body = getattr(model, model.base_model_prefix)

        def measured(model: Module, step: int) -> None:
            _take_weights(encoder, body)
            measure(model, step)

        for whole in (False, True) if head_first else (True,):
            body.requires_grad_(whole)
            trainer = Trainer(
                model=model,
                args=training_arguments(Path(folder), config, steps, **_settings(config, steps)),
                train_dataset=[{"input_ids": row} for row in ids],
                data_collator=DataCollatorForLanguageModeling(encoder.tokenizer, mlm=masked, seed=config.seed),
                callbacks=[OnTheWay(measured)] if measure and whole else [],
            )
            fit(trainer, progress)
    _take_weights(encoder, body)
    return encoder


def _take_weights(encoder: SentenceTransformer, body: Module) -> None:
    missing = encoder[0].auto_model.load_state_dict(body.state_dict(), strict=False).missing_keys
    if any(not key.startswith("pooler") for key in missing):
        raise DataError(f"LM tuning: {missing[0]} is not in the language model; use an encoder of its family")


@torch.no_grad()
def masked_loss(model: Module, tokenizer: Any, sentences: Sequence[str], seed: int = 0) -> pd.Series:
    """A masked language model's loss on each sentence: the mean over its masked tokens, which the seed draws; without
    those sentences in which none is masked."""
    collate = DataCollatorForLanguageModeling(tokenizer, seed=seed)
    ids = tokenizer(list(sentences), truncation=True, max_length=SENTENCE_TOKENS)["input_ids"]
    training, losses = model.training, []
    model.eval()
    for start in range(0, len(ids), 64):
        batch = collate([{"input_ids": row} for row in ids[start : start + 64]]).to(model.device)
        labels = batch.pop("labels")
        loss = torch.nn.functional.cross_entropy(model(**batch).logits.mT, labels, reduction="none")  # 0 if not masked
        losses += (loss.sum(1) / (labels != -100).sum(1)).tolist()
    model.train(training)
    return pd.Series(losses, index=list(sentences)).dropna()
