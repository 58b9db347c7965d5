"""Ranks of score matrices [queries, chunks], ties included, and their fusion (CliniQ §4.2)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np


def tie_keys(query_ids: Iterable[str], chunk_ids: Iterable[str], seed: int = 0) -> np.ndarray:
    """uint64 [queries, chunks]: the order among equal scores, a pseudo-random one for each query.

    It depends on the two ids and the seed only, so a system that gives all chunks one score gets chance's credit, not
    the file order's (the first chunks of a note hold its diagnoses).
    """
    mixed = _hash_ids(query_ids, seed)[:, None] ^ _hash_ids(chunk_ids, seed + 1)[None, :]
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):  # splitmix64's finaliser
        mixed ^= mixed >> np.uint64(shift)
        mixed *= np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def rank(scores: np.ndarray, ties: np.ndarray) -> np.ndarray:
    """Positions along the last axis from the best score down; equal scores in the order of `ties` (see tie_keys)."""
    return np.lexsort((ties, -scores), axis=-1)


def reciprocal_rank_fusion(runs: Sequence[np.ndarray], ties: np.ndarray, k: int = 60) -> np.ndarray:
    """Sum over `runs` of 1 / (k + rank), ranks from 1 along the last axis (CliniQ §4.2.3, k = 60).

    `runs` are score arrays of one shape, `ties` orders equal scores within each. Ranks belong to a pool: fuse the
    note's scores for Single-Patient Retrieval, the corpus's for Multi-Patient (evaluation.metrics does so for a tuple).
    """
    # A permutation's argsort is its inverse: the place, from 0, of each position.
    return sum(1.0 / (k + 1 + rank(np.asarray(run), ties).argsort(axis=-1)) for run in runs)


def _hash_ids(ids: Iterable[str], seed: int) -> np.ndarray:
    return np.array(
        [int.from_bytes(hashlib.blake2b(f"{seed}:{i}".encode(), digest_size=8).digest(), "little") for i in ids],
        dtype=np.uint64,
    )
