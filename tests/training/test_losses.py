"""Both multi-similarity losses against worked examples, pytorch-metric-learning, and sums in plain Python."""

import math
from dataclasses import replace

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner

from drehr_utils.config import StageConfig
from drehr_utils.training.losses import (
    Hyper,
    batch_multi_similarity_loss,
    informative_negatives,
    informative_positives,
    multi_similarity_loss,
)
from drehr_utils.training.trainer import contrastive_loss


def test_hand_worked_example():
    # One anchor; positives at 0.9 and 0.4, negatives at 0.35 and 0.1; epsilon 0.1.
    # Eq. 1: hardest negative 0.35, so positives below 0.45 stay: 0.4.
    # Eq. 2: hardest positive 0.4, so negatives above 0.3 stay: 0.35.
    S = torch.tensor([[0.9, 0.4, 0.35, 0.1]])
    P = torch.tensor([[True, True, False, False]])
    assert informative_positives(S, P, ~P).tolist() == [[False, True, False, False]]
    assert informative_negatives(S, P, ~P).tolist() == [[False, False, True, False]]
    # Eq. 3: log(1 + exp(-2 (0.4 - 0.5))) / 2 + log(1 + exp(50 (0.35 - 0.5))) / 50
    expected = math.log(1 + math.exp(0.2)) / 2 + math.log(1 + math.exp(-7.5)) / 50
    assert multi_similarity_loss(S, P, ~P).item() == pytest.approx(expected, abs=1e-6)


def test_anchors_are_averaged_and_an_anchor_with_nothing_informative_gives_zero():
    S = torch.tensor([[0.9, 0.4, 0.35, 0.1], [0.95, 0.9, 0.0, 0.1]])
    P = torch.tensor([[True, True, False, False]] * 2)
    alone = multi_similarity_loss(S[:1], P[:1], ~P[:1])
    assert multi_similarity_loss(S, P, ~P).item() == pytest.approx(alone.item() / 2)


def test_no_overflow_and_no_nan_gradient_where_a_side_is_empty():
    S = torch.tensor([[1.0, 1.0], [-1.0, 1.0]], requires_grad=True)
    P = torch.tensor([[True, True], [True, False]])
    N = torch.tensor([[False, False], [False, True]])
    loss = multi_similarity_loss(S, P, N, Hyper(beta=5000.0))
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(S.grad).all()


@pytest.mark.parametrize("seed", range(5))
def test_equals_pytorch_metric_learning(seed):
    generator = torch.Generator().manual_seed(seed)
    anchors = torch.randn(12, 8, generator=generator, dtype=torch.float64, requires_grad=True)
    samples = torch.randn(40, 8, generator=generator, dtype=torch.float64)
    anchor_labels = torch.arange(12) % 5
    sample_labels = torch.randint(0, 5, (40,), generator=generator)
    miner = MultiSimilarityMiner(epsilon=0.1, distance=CosineSimilarity())
    theirs = MultiSimilarityLoss(alpha=2, beta=50, base=0.5, distance=CosineSimilarity())
    pairs = miner(anchors, anchor_labels, samples, sample_labels)
    expected = theirs(anchors, anchor_labels, pairs, samples, sample_labels)
    (expected_gradient,) = torch.autograd.grad(expected, anchors)

    S = torch.nn.functional.normalize(anchors, dim=1) @ torch.nn.functional.normalize(samples, dim=1).T
    P = anchor_labels[:, None] == sample_labels[None, :]
    ours = multi_similarity_loss(S, P, ~P)
    (gradient,) = torch.autograd.grad(ours, anchors)
    assert ours.item() == pytest.approx(expected.item(), abs=1e-9)
    assert torch.allclose(gradient, expected_gradient, atol=1e-9)


def test_the_codes_loss_by_hand():
    # As above, and a second anchor: positives 0.8 and 0.7, negatives 0.65 and 0.3. Its hardest negative 0.65 keeps 0.7
    # (below 0.75), its hardest positive 0.7 keeps 0.65 (above 0.6). All else is in the sums with a similarity of 0.
    S = torch.tensor([[0.9, 0.4, 0.35, 0.1], [0.8, 0.7, 0.65, 0.3]])
    P = torch.tensor([[True, True, False, False]] * 2)
    pull = math.log(1 + math.exp(0.2) + math.exp(-0.4) + 2 * math.exp(1)) / 2
    push = math.log(1 + math.exp(-7.5) + math.exp(7.5) + 2 * math.exp(-25)) / 50
    assert batch_multi_similarity_loss(S, P, ~P).item() == pytest.approx((pull + push) / 2, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_the_codes_loss_equals_sums_in_plain_python_and_no_unmined_pair_has_a_gradient(seed):
    generator = torch.Generator().manual_seed(seed)
    S = (2 * torch.rand(6, 18, generator=generator, dtype=torch.float64) - 1).requires_grad_()
    P = torch.eye(6, dtype=torch.bool).repeat_interleave(3, dim=1)
    N = ~P & (torch.rand(6, 18, generator=generator) < 0.9)  # some pairs are in neither mask: masked, not unmined
    pulls, pushes, mined = [], [], set()
    for i in range(6):
        own, others = P[i].nonzero().flatten().tolist(), N[i].nonzero().flatten().tolist()
        for j in own:
            informative = S[i, j] < max(S[i, k] for k in others) + 0.1
            mined |= {(i, j)} if informative else set()
            pulls.append(math.exp(-2 * ((S[i, j].item() if informative else 0) - 0.5)))
        for k in others:
            informative = S[i, k] > min(S[i, j] for j in own) - 0.1
            mined |= {(i, k)} if informative else set()
            pushes.append(math.exp(50 * ((S[i, k].item() if informative else 0) - 0.5)))
    loss = batch_multi_similarity_loss(S, P, N)
    assert loss.item() == pytest.approx((math.log(1 + sum(pulls)) / 2 + math.log(1 + sum(pushes)) / 50) / 6, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss, S)
    assert set(map(tuple, gradient.nonzero().tolist())) == mined


# Two chunks; entities a, b, c. Chunk 0 drew a and b, chunk 1 drew c and b; b is positive for both, c known for chunk 0.
COLUMNS = torch.tensor([[0, 1], [2, 1]])
KNOWN = torch.tensor([[True, True, True], [False, True, True]])
SIMILARITIES = torch.tensor([[0.6, 0.5, 0.7], [0.3, 0.45, 0.65]])


@pytest.mark.parametrize("per_anchor", [False, True])
def test_published_direction_counts_a_shared_term_as_negative(per_anchor):
    S = SIMILARITIES[:, COLUMNS.reshape(-1)]  # a b c b
    P = torch.tensor([[True, True, False, False], [False, False, True, True]])
    expected = (multi_similarity_loss if per_anchor else batch_multi_similarity_loss)(S, P, ~P)
    found = contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, StageConfig(per_anchor=per_anchor))
    assert found.item() == pytest.approx(expected.item())


@pytest.mark.parametrize("per_anchor", [False, True])
def test_masking_leaves_out_known_positives(per_anchor):
    S = SIMILARITIES[:, COLUMNS.reshape(-1)]
    P = torch.tensor([[True, True, False, False], [False, False, True, True]])
    N = torch.tensor([[False, False, False, False], [True, False, False, False]])  # only a for chunk 1
    config = StageConfig(per_anchor=per_anchor, mask_false_negatives=True)
    expected = (multi_similarity_loss if per_anchor else batch_multi_similarity_loss)(S, P, N)
    assert contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, config).item() == pytest.approx(expected.item())


@pytest.mark.parametrize("per_anchor", [False, True])
def test_both_ways_adds_the_entities_as_anchors(per_anchor):
    config = StageConfig(per_anchor=per_anchor, mask_false_negatives=True)
    one_way = contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, config)
    if per_anchor:
        reverse = multi_similarity_loss(SIMILARITIES.T, KNOWN.T, ~KNOWN.T)
    else:  # divided by the two chunks in both directions, not by the three entities
        reverse = batch_multi_similarity_loss(SIMILARITIES.T, KNOWN.T, ~KNOWN.T) * 3 / 2
    both = contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, replace(config, both_ways=True))
    assert both.item() == pytest.approx((one_way.item() + reverse.item()) / 2)
