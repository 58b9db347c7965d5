"""The multi-similarity losses of `losses` for sentence-transformers' own trainer: any number of positives an anchor.

rows = positive_columns(chunks, entities)  # entities: each chunk's positive terms, as many as it has
trainer = SentenceTransformerTrainer(model, args, Dataset.from_dict(rows), loss=MultiSimilarityLoss(model))
trainer.train()
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor

from drehr_utils.errors import DataError
from drehr_utils.training import losses


def positive_columns(anchors: Sequence[str], positives: Sequence[Sequence[str]]) -> dict[str, list]:
    """Columns of a dataset: `anchor`, `positive_1` to `positive_n` (n: the most that one has; shorter rows repeat
    their last), and `label`, how many of a row's positives count.

    Raises DataError for an anchor without a positive, which has nothing to be pulled to."""
    for row, own in enumerate(positives):
        if not own:
            raise DataError(f"positives, row {row}: none; leave this anchor out")
    longest = max(map(len, positives), default=0)
    columns = {f"positive_{k + 1}": [own[min(k, len(own) - 1)] for own in positives] for k in range(longest)}
    return {"anchor": list(anchors), **columns, "label": [len(own) for own in positives]}


class MultiSimilarityLoss(torch.nn.Module):
    """DR.EHR §3.3 over a batch of sentence-transformers' trainer: the first column's texts are anchors, the other
    columns' their positives, all positives of the other rows their negatives.

    `label` says how many of a row's positives count, the rest is left out of every sum (positive_columns makes both);
    a dataset without labels counts all. With `per_anchor` the loss is equation 3 (losses.multi_similarity_loss), else
    what the authors' code computes (losses.batch_multi_similarity_loss). A text that two rows share is a negative of
    both, as published: BatchSamplers.NO_DUPLICATES keeps such rows apart."""

    def __init__(
        self, model: SentenceTransformer, per_anchor: bool = False, hyper: losses.Hyper = losses.PAPER
    ) -> None:
        super().__init__()
        self.model, self.per_anchor, self.hyper = model, per_anchor, hyper

    def forward(self, sentence_features: Sequence[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        anchors, *positives = (self.model(features)["sentence_embedding"] for features in sentence_features)
        return self.compute_loss_from_embeddings([anchors, *positives], labels)

    def compute_loss_from_embeddings(self, embeddings: Sequence[Tensor], labels: Tensor | None) -> Tensor:
        """Scalar, of embeddings float [rows, dim] of each column and labels int [rows]."""
        anchors, *positives = (torch.nn.functional.normalize(side.float(), dim=1) for side in embeddings)
        rows, n = len(anchors), len(positives)
        S = anchors @ torch.stack(positives, dim=1).flatten(0, 1).T  # [rows, rows * n], a row's positives side by side
        own = torch.eye(rows, dtype=torch.bool, device=S.device).repeat_interleave(n, dim=1)
        filled = torch.ones_like(own)
        if labels is not None:
            filled = (torch.arange(n, device=S.device) < labels[:, None]).flatten().expand_as(own)
        multi_similarity = losses.multi_similarity_loss if self.per_anchor else losses.batch_multi_similarity_loss
        return multi_similarity(S, own & filled, ~own & filled, self.hyper)

    def get_config_dict(self) -> dict[str, bool | float]:
        """What the model card of a training says of it."""
        return {"per_anchor": self.per_anchor, **self.hyper._asdict()}
