"""Multi-similarity loss over a similarity matrix and two masks (DR.EHR §3.3, equations 1-3; Wang et al., 2019).

Twice: as the equations have it, and as the authors' public code computes it, which is not the same (notebook 05). Every
function takes S, float [anchors, samples], cosine similarities, and boolean masks of the same shape: `positives`
P(i) and `negatives` N(i) of each anchor i. A pair in neither mask is left out, which is what makes false-negative
masking and contrasting in both directions one-liners for the caller.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from drehr_utils.config import ALPHA, BETA, EPSILON, LAMBDA


def informative_positives(S: Tensor, positives: Tensor, negatives: Tensor, epsilon: float = EPSILON) -> Tensor:
    """P'(i), equation 1: the positives less similar than the hardest negative plus epsilon. Bool [anchors, samples]."""
    hardest_negative = S.masked_fill(~negatives, -torch.inf).amax(dim=1, keepdim=True)
    return positives & (S < hardest_negative + epsilon)


def informative_negatives(S: Tensor, positives: Tensor, negatives: Tensor, epsilon: float = EPSILON) -> Tensor:
    """N'(i), equation 2: the negatives more similar than the hardest positive less epsilon. Bool [anchors, samples]."""
    hardest_positive = S.masked_fill(~positives, torch.inf).amin(dim=1, keepdim=True)
    return negatives & (S > hardest_positive - epsilon)


class Hyper(NamedTuple):
    """Equation 3's: the weights alpha of the positives and beta of the negatives, the margin lambda; equations 1-2's
    epsilon."""

    alpha: float = ALPHA
    beta: float = BETA
    lam: float = LAMBDA
    epsilon: float = EPSILON


PAPER = Hyper()


@torch.no_grad()  # mining chooses pairs; no gradient flows through the choice
def _informative(S: Tensor, positives: Tensor, negatives: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return (
        informative_positives(S, positives, negatives, epsilon),
        informative_negatives(S, positives, negatives, epsilon),
    )


def _log1p_sum_exp(x: Tensor, mask: Tensor) -> Tensor:
    """log(1 + sum over mask of exp(x)) for each row, without overflow."""
    x = x.masked_fill(~mask, -torch.inf)
    return torch.logsumexp(torch.cat([torch.zeros_like(x[:, :1]), x], dim=1), dim=1)


def multi_similarity_loss(S: Tensor, positives: Tensor, negatives: Tensor, hyper: Hyper = PAPER) -> Tensor:
    """Equation 3, averaged over the anchors: mining and both logarithms are per anchor. Scalar.

    An anchor without negatives (or without positives) has nothing to contrast and gives zero."""
    alpha, beta, lam, epsilon = hyper
    P, N = _informative(S, positives, negatives, epsilon)
    pull = _log1p_sum_exp(-alpha * (S - lam), P) / alpha
    push = _log1p_sum_exp(beta * (S - lam), N) / beta
    return (pull + push).mean()


def batch_multi_similarity_loss(S: Tensor, positives: Tensor, negatives: Tensor, hyper: Hyper = PAPER) -> Tensor:
    """Equation 3 as DR.EHR's public code computes it. Scalar.

    Mining is per anchor, as in equations 1 and 2, but it sets the similarities of the pairs that it leaves out to 0
    and keeps them in the sums, where each adds exp(αλ) or exp(-βλ); and there is one logarithm over all positive pairs
    of the batch, one over all negative ones. Their sum is divided by the number of anchors."""
    alpha, beta, lam, epsilon = hyper
    P, N = _informative(S, positives, negatives, epsilon)
    pull = _log1p_sum_exp((-alpha * (S * P - lam)).reshape(1, -1), positives.reshape(1, -1)) / alpha
    push = _log1p_sum_exp((beta * (S * N - lam)).reshape(1, -1), negatives.reshape(1, -1)) / beta
    return (pull + push).squeeze() / len(S)


def embedding_drift(embeddings: Tensor, before: Tensor) -> Tensor:
    """Mean cosine distance of unit embeddings [texts, dim] to those that the starting encoder gave. Scalar, 0 to 2.

    No part of the papers: what the improved recipe adds to equation 3 so that other kinds of text stay in place."""
    return (1 - (embeddings * before).sum(dim=1)).mean()


def divergence(S: Tensor, taught: Tensor, temperature: float = 0.05) -> Tensor:
    """Mean over anchors of the KL divergence of softmax(S) from the teacher's, `taught`; both [anchors, samples]. Scalar.

    No part of the papers: distilling a ranking into an encoder."""
    own, teacher = (torch.log_softmax(scores / temperature, dim=1) for scores in (S.float(), taught.float()))
    return torch.nn.functional.kl_div(own, teacher, reduction="batchmean", log_target=True)
