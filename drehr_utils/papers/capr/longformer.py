"""CAPR's long inputs: a passage amid its document on a Longformer (CAPR §3.2), for the profile `mimic`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from drehr_utils.papers.capr.models import SCALE, TwoTowers, poly_score
from drehr_utils.papers.capr.passages import Passage


def passage_amid_document(
    passage: Passage, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[int], list[bool]]:
    """Token ids of the passage with as much of its document around it as fits, and which are the passage's.

    Sentences join in turn, from before and after; the first that doesn't fit ends its side. A passage that is too long
    by itself loses its end. The two special tokens at the ends are not the passage's."""
    ids = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in passage.document]
    own = [i for sentence in ids[passage.start : passage.end] for i in sentence][: max_tokens - 2]
    before: list[int] = []
    after: list[int] = []
    at = {"before": passage.start - 1, "after": passage.end}
    while at:
        for side in list(at):
            i = at[side]
            fits = 0 <= i < len(ids) and len(before) + len(own) + len(after) + len(ids[i]) <= max_tokens - 2
            if not fits:
                del at[side]
            elif side == "before":
                before, at[side] = ids[i] + before, i - 1
            else:
                after, at[side] = after + ids[i], i + 1
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    mask = [False] * (1 + len(before)) + [True] * len(own) + [False] * (len(after) + 1)
    return [first, *before, *own, *after, last], mask


class LongEncoder(TwoTowers):
    """Bi- or Poly-encoder on two Longformers.

    Bi: global attention on the first token, which is the passage's embedding. Poly: local attention on the passage's
    tokens, global on the surrounding ones; equation 2 sees the passage's tokens alone, so that the context speaks
    through them."""

    def __init__(
        self,
        query_model: PreTrainedModel,
        passage_model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        poly: bool,
        query_tokens: int = 32,
        max_tokens: int = 4096,
    ):
        super().__init__()
        self.query_model, self.passage_model, self.tokenizer = query_model, passage_model, tokenizer
        self.poly, self.query_tokens, self.max_tokens = poly, query_tokens, max_tokens
        self.W_attn = nn.Parameter(torch.eye(query_model.config.hidden_size)) if poly else None

    @classmethod
    def load(cls, name: str, **options) -> LongEncoder:
        """From a hub name or folder, such as `allenai/longformer-base-4096`."""
        models = [AutoModel.from_pretrained(name) for _ in range(2)]
        for model in models:
            model.activation_checkpointing_enable()  # a batch of 32 long passages would not fit otherwise
        return cls(*models, AutoTokenizer.from_pretrained(name), **options)

    def encode_queries(self, queries: Sequence[str]) -> Tensor:
        batch = self.tokenizer(
            list(queries), truncation=True, max_length=self.query_tokens, padding=True, return_tensors="pt"
        ).to(self.query_model.device)
        hidden = self.query_model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            global_attention_mask=_first_token(batch["input_ids"]),
        ).last_hidden_state[:, 0]
        return (SCALE**0.5 if self.poly else 1.0) * nn.functional.normalize(hidden.float(), dim=1)

    def encode_passages(self, passages: Sequence[Passage]) -> Tensor | tuple[Tensor, Tensor]:
        rows = [passage_amid_document(p, self.tokenizer, self.max_tokens) for p in passages]
        batch = self.tokenizer.pad({"input_ids": [ids for ids, _ in rows]}, return_tensors="pt")
        batch = batch.to(self.passage_model.device)
        ids, attended = batch["input_ids"], batch["attention_mask"]
        own = torch.zeros_like(ids, dtype=torch.bool)
        for row, (_, mask) in enumerate(rows):
            own[row, : len(mask)] = torch.tensor(mask, device=own.device)
        everywhere = attended * (~own).long() if self.poly else _first_token(ids)
        hidden = self.passage_model(
            input_ids=ids, attention_mask=attended, global_attention_mask=everywhere
        ).last_hidden_state.float()
        if self.poly:
            return SCALE**0.5 * nn.functional.normalize(hidden, dim=2), own
        return nn.functional.normalize(hidden[:, 0], dim=1)

    def match(self, queries: Tensor, passages: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return poly_score(queries, *passages, self.W_attn) if self.poly else super().match(queries, passages)


def _first_token(ids: Tensor) -> Tensor:
    mask = torch.zeros_like(ids)
    mask[:, 0] = 1
    return mask
