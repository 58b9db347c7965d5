"""The Siamese encoder of KG entity retrieval: inner product, softmax over in-batch negatives, training (§3, §6.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from drehr_utils.config import PairConfig
from drehr_utils.errors import DataError
from drehr_utils.papers.kg.tasks import Task, text_key
from drehr_utils.training.encoders import embed_buckets, token_buckets
from drehr_utils.training.trainer import train

TERM_TOKENS = 32  # an ICD-10-CM description has 13 tokens in the middle, 29 at the 99th percentile


def similarity(mentions: Tensor, concepts: Tensor) -> Tensor:
    """S(m, c) = <e_m, e_c> (§3): float [mentions, concepts] of embeddings [mentions, dim], [concepts, dim]."""
    return mentions @ concepts.T


def log_probability(S: Tensor, left_out: Tensor | None = None) -> Tensor:
    """log P((m_i, c_i) | θ) of a batch, float [B], from S [B, B], S[i, j] = S(m_i, c_j) (§3).

    The softmax runs over the concepts of the batch: c_j, j != i, are m_i's negatives. The paper prints S(m_j, c_j) in
    the denominator, the other pairs' own similarities, in which no negative occurs (log_probability_as_printed); its
    words, "in-batch negatives", ask for this. `left_out`, bool [B, B]: entries that are no negatives."""
    if left_out is not None:
        S = S.masked_fill(left_out & ~torch.eye(len(S), dtype=torch.bool, device=S.device), -torch.inf)
    return torch.log_softmax(S, dim=1).diagonal()


def log_probability_as_printed(S: Tensor) -> Tensor:
    """The equation of §3 letter by letter: a softmax over the pairs' own similarities. Its mean is largest where all
    are equal."""
    return torch.log_softmax(S.diagonal(), dim=0)


def mean_negative_log_likelihood(S: Tensor, left_out: Tensor | None = None) -> Tensor:
    """L = -1/B sum_i log P((m_i, c_i) | θ) (§3). Scalar, from S float [B, B]."""
    return -log_probability(S, left_out).mean()


def pair_schedule(sizes: Sequence[int], config: PairConfig) -> list[list[tuple[int, int]]]:
    """Every step's (task, pair) keys: a batch of each task, pairs shuffled anew each epoch of the task.

    The first task's epochs and `max_steps` say how many steps there are; a last batch that is not full is dropped."""
    if not min(sizes):
        raise DataError("pair training: a task without a pair; check the graph that it is made of")
    batch = [min(config.batch_size, size) for size in sizes]
    steps = max(1, round(config.epochs * (sizes[0] // batch[0])))
    steps = min(steps, config.max_steps) if config.max_steps else steps
    schedule: list[list[tuple[int, int]]] = [[] for _ in range(steps)]
    for task, (size, n) in enumerate(zip(sizes, batch, strict=True)):
        per_epoch = size // n
        for step in range(steps):
            epoch, place = divmod(step, per_epoch)
            if place == 0:
                order = np.random.default_rng([config.seed, task, epoch]).permutation(size)
            schedule[step] += [(task, int(i)) for i in order[place * n : (place + 1) * n]]
    return schedule


def known_false_negatives(mentions: np.ndarray, concepts: np.ndarray) -> np.ndarray:
    """Pairs of a batch that speak of one thing, bool [B, B], the diagonal among them, of both sides' keys [B].

    They share a text, on whichever side, or each shares one with a third."""
    share = np.zeros((len(mentions), len(mentions)), dtype=bool)
    for one in (mentions, concepts):
        for other in (mentions, concepts):
            share |= one[:, None] == other
    return share @ share


@dataclass
class PairCollator:
    """Tokenises a step's (task, pair) keys, each task's apart: negatives are of the same task.

    A task's mentions and concepts go through the encoder together (it is one encoder): fewer passes, less padding."""

    encoder: SentenceTransformer
    tasks: Sequence[Task]
    buckets: int = 4

    def __call__(self, keys: list[tuple[int, int]]) -> dict:
        parts = []
        for task in sorted({task for task, _ in keys}):
            pairs = [self.tasks[task].pair(i) for of, i in keys if of == task]
            sides = [[pair[side] for pair in pairs] for side in (0, 1)]
            same = known_false_negatives(*(np.array([text_key(text) for text in side]) for side in sides))
            texts = token_buckets(self.encoder, sides[0] + sides[1], TERM_TOKENS, self.buckets)
            parts.append({"texts": texts, "same": torch.from_numpy(same)})
        return {"parts": parts}


def pair_loss(model: SentenceTransformer, inputs: dict, config: PairConfig) -> Tensor:
    """The loss of §3 on a step's pairs; those of several tasks are summed (§6.3, auxiliary task)."""
    losses = []
    for part in inputs["parts"]:
        m, c = (config.scale**0.5 * embed_buckets(model, part["texts"])).chunk(2)
        left_out = part["same"] if config.mask_false_negatives else None
        losses.append(mean_negative_log_likelihood(similarity(m, c), left_out))
    return sum(losses)


def train_pairs(
    encoder: SentenceTransformer, tasks: Sequence[Task], config: PairConfig, output: Path, **options
) -> pd.DataFrame:
    """trainer.train on one task, or on several with their losses summed (§6.1); `options`: its own."""
    schedule = pair_schedule([len(task) for task in tasks], config)
    loss = partial(pair_loss, config=config)
    return train(encoder, schedule, PairCollator(encoder, tasks), loss, config, output, **options)
