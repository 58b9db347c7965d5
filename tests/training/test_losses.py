"""The multi-similarity loss against a worked example and against pytorch-metric-learning."""

import math

import pytest
import torch
from pytorch_metric_learning.distances import CosineSimilarity
from pytorch_metric_learning.losses import MultiSimilarityLoss
from pytorch_metric_learning.miners import MultiSimilarityMiner

from drehr_utils.config import StageConfig
from drehr_utils.training.losses import informative_negatives, informative_positives, multi_similarity_loss
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
    loss = multi_similarity_loss(S, P, N, beta=5000.0)
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


# Two chunks; entities a, b, c. Chunk 0 drew a and b, chunk 1 drew c and b; b is positive for both, c known for chunk 0.
COLUMNS = torch.tensor([[0, 1], [2, 1]])
KNOWN = torch.tensor([[True, True, True], [False, True, True]])
SIMILARITIES = torch.tensor([[0.6, 0.5, 0.7], [0.3, 0.45, 0.65]])


def test_published_direction_counts_a_shared_term_as_negative():
    S = SIMILARITIES[:, COLUMNS.reshape(-1)]  # a b c b
    P = torch.tensor([[True, True, False, False], [False, False, True, True]])
    expected = multi_similarity_loss(S, P, ~P)
    assert contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, StageConfig()).item() == pytest.approx(expected.item())


def test_masking_leaves_out_known_positives():
    S = SIMILARITIES[:, COLUMNS.reshape(-1)]
    P = torch.tensor([[True, True, False, False], [False, False, True, True]])
    N = torch.tensor([[False, False, False, False], [True, False, False, False]])  # only a for chunk 1
    config = StageConfig(mask_false_negatives=True)
    expected = multi_similarity_loss(S, P, N)
    assert contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, config).item() == pytest.approx(expected.item())


def test_both_ways_adds_the_entities_as_anchors():
    one_way = contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, StageConfig(mask_false_negatives=True))
    reverse = multi_similarity_loss(SIMILARITIES.T, KNOWN.T, ~KNOWN.T)
    both = contrastive_loss(SIMILARITIES, COLUMNS, KNOWN, StageConfig(mask_false_negatives=True, both_ways=True))
    assert both.item() == pytest.approx((one_way.item() + reverse.item()) / 2)
