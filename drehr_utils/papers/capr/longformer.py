"""CAPR's long inputs: a passage amid its document on a Longformer (CAPR §3.2), for the profile `mimic`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from drehr_utils.papers.capr.models import SCALE, TwoTowers, poly_score
from drehr_utils.papers.capr.passages import Passage


def passage_amid_document(
    passage: Passage, tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> tuple[list[int], slice]:
    """Token ids of the passage with as much of its document around it as fits, and where in them the passage's stand.

    Sentences join in turn, from before and after; the first that doesn't fit ends its side. A passage that is too long
    by itself loses its end. The two special tokens at the ends are not the passage's."""
    ids = [tokenizer(sentence, add_special_tokens=False)["input_ids"] for sentence in passage.document]
    own = [i for sentence in ids[passage.start : passage.end] for i in sentence][: max_tokens - 2]
    room, before, after = max_tokens - 2 - len(own), [], []
    next_at = {-1: passage.start - 1, 1: passage.end}  # the sentence that would join before, and after
    while next_at:
        for side, i in list(next_at.items()):
            if not (0 <= i < len(ids) and len(ids[i]) <= room):
                del next_at[side]
                continue
            before, after = (ids[i] + before, after) if side < 0 else (before, after + ids[i])
            room, next_at[side] = room - len(ids[i]), i + side
    first = 1 + len(before)
    return [tokenizer.cls_token_id, *before, *own, *after, tokenizer.sep_token_id], slice(first, first + len(own))


class LongEncoder(TwoTowers):
    """Bi- or Poly-encoder on two Longformers.

    Bi: global attention on the first token, which is the passage's embedding. Poly: local attention on the passage's
    tokens, global on the surrounding ones; equation 2 sees the passage's tokens alone, so that the context speaks
    through them."""

    def __init__(self, name: str, *, poly: bool, query_tokens: int = 32, max_tokens: int = 4096):
        """`name`: a hub's or a folder's, such as `allenai/longformer-base-4096`."""
        super().__init__()
        self.query_model, self.passage_model = (AutoModel.from_pretrained(name) for _ in range(2))
        for model in (self.query_model, self.passage_model):
            model.activation_checkpointing_enable()  # a batch of 32 long passages would not fit otherwise
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.poly, self.query_tokens, self.max_tokens = poly, query_tokens, max_tokens
        self.W_attn = nn.Parameter(torch.eye(self.query_model.config.hidden_size)) if poly else None

    def encode_queries(self, queries: Sequence[str]) -> Tensor:
        options = dict(truncation=True, max_length=self.query_tokens, padding=True, return_token_type_ids=False)
        batch = self.tokenizer(list(queries), return_tensors="pt", **options).to(self.query_model.device)
        first = _first_token(batch["input_ids"])
        hidden = self.query_model(**batch, global_attention_mask=first).last_hidden_state[:, 0]
        return (SCALE**0.5 if self.poly else 1.0) * nn.functional.normalize(hidden.float(), dim=1)

    def encode_passages(self, passages: Sequence[Passage]) -> Tensor | tuple[Tensor, Tensor]:
        rows, spans = zip(*(passage_amid_document(p, self.tokenizer, self.max_tokens) for p in passages), strict=True)
        batch = self.tokenizer.pad({"input_ids": rows}, return_tensors="pt").to(self.passage_model.device)
        own = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for row, span in enumerate(spans):
            own[row, span] = True
        everywhere = batch["attention_mask"] * ~own if self.poly else _first_token(own)
        hidden = self.passage_model(**batch, global_attention_mask=everywhere).last_hidden_state.float()
        if self.poly:
            return SCALE**0.5 * nn.functional.normalize(hidden, dim=2), own
        return nn.functional.normalize(hidden[:, 0], dim=1)

    def match(self, queries: Tensor, passages: Tensor | tuple[Tensor, Tensor]) -> Tensor:
        return poly_score(queries, *passages, self.W_attn) if self.poly else super().match(queries, passages)


def _first_token(like: Tensor) -> Tensor:
    mask = torch.zeros_like(like, dtype=torch.long)
    mask[:, 0] = 1
    return mask
