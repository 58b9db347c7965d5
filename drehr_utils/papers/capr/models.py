"""CAPR's four architectures: CDV, Bi-, Poly- and Cross-encoder, and their training objective (CAPR §3).

Every model maps queries ("entity ; aspect") and capr.Passages to scores [queries, passages]. Those that encode the two
apart have `encode_queries`, `encode_passages` and `match`, so that passages can be encoded once; the Cross-encoder has
`pair_scores`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, PreTrainedTokenizerBase

from drehr_utils.papers.capr.passages import Passage
from drehr_utils.training.encoders import embed_buckets, token_buckets

QUERY_MARK, PASSAGE_MARK = "[QUERY]", "[PASSAGE]"
SCALE = 20.0  # of cosines before the softmax: with scores in -1..1 it could never come near the truth
BUCKETS = 4  # of similar length, in which a batch's texts are encoded
SENTENCE_TOKENS, SENTENCE_BUCKETS, LSTM_DIM = 48, 6, 256  # CDV; sentences have at most 40 words
_WORD = re.compile(r"\w+")


def listwise_loss(scores: Tensor) -> Tensor:
    """Equation 1: -1/|P| times the sum over p and q of truth(q, p) log y(q, p), y the softmax of `scores` over P.

    scores: float [queries, passages]. truth is the identity: a query's attached passage is the positive, every other
    passage of the batch a negative."""
    truth = torch.eye(*scores.shape, device=scores.device)
    return -(truth * torch.log_softmax(scores, dim=1)).sum() / scores.shape[1]


def poly_score(q: Tensor, P: Tensor, mask: Tensor, W_attn: Tensor) -> Tensor:
    """Equation 2: y = softmax(P qᵀ), s = relu(W_attn y) · q, for every query and passage; float [queries, passages].

    q: [queries, dim]; P: token embeddings [passages, tokens, dim]; mask: bool [passages, tokens], False for padding;
    W_attn: [dim, dim]. As printed, y has an entry a token and can't meet W_attn and q; the text calls it the product of
    the two embeddings, so the attention weights are applied to P (Humeau et al., 2020)."""
    logits = torch.einsum("qd,pnd->qpn", q, P).masked_fill(~mask, -torch.inf)
    y = torch.einsum("qpn,pnd->qpd", torch.softmax(logits, dim=2), P)
    return torch.einsum("qpd,qd->qp", torch.relu(y @ W_attn.T), q)


class TwoTowers(nn.Module):
    """A model whose `encode_queries` and `encode_passages` give, apart, what `match` takes."""

    def match(self, queries: Tensor, passages: Any) -> Tensor:
        """float [queries, passages]; here SCALE times the cosine of unit vectors."""
        return SCALE * queries @ passages.T

    def forward(self, queries: Sequence[str], passages: Sequence[Passage]) -> Tensor:
        encoded = self.encode_queries(queries), self.encode_passages(passages)
        with torch.autocast(encoded[0].device.type, enabled=False):  # scores in float32
            return self.match(*encoded)


class BiEncoder(TwoTowers):
    """Two encoders, or one for both with [QUERY] and [PASSAGE] before the texts (CAPR §3.2).

    CAPR trains on the dot product (§3.2) and ranks by the cosine (§4.2); with unit vectors the two are one. Pooling is
    the starting encoder's own (CAPR: [CLS])."""

    def __init__(
        self,
        *encoders: SentenceTransformer,
        marks: bool = False,
        dot: bool = False,
        query_tokens: int = 32,
        passage_tokens: int = 512,
    ):
        """`encoders`: of queries and of passages, or one whose weights they share; `marks` become tokens of its own;
        `dot`: vectors keep the length that the pooling gives them in training, whose scores are bare dot products."""
        super().__init__()
        self.encoders, self.dot = nn.ModuleList(encoders), dot
        self.query_tokens, self.passage_tokens = query_tokens, passage_tokens
        self.marks = (f"{QUERY_MARK} ", f"{PASSAGE_MARK} ") if marks else ("", "")
        for encoder in self.encoders if marks else ():
            encoder.tokenizer.add_special_tokens({"additional_special_tokens": [QUERY_MARK, PASSAGE_MARK]})
            encoder[0].auto_model.resize_token_embeddings(len(encoder.tokenizer), mean_resizing=False)

    def encode_queries(self, queries: Sequence[str]) -> Tensor:
        encoder, texts = self.encoders[0], [self.marks[0] + query for query in queries]
        return self._embed(encoder, token_buckets(encoder, texts, self.query_tokens, 1))

    def encode_passages(self, passages: Sequence[Passage]) -> Tensor | tuple[Tensor, Tensor]:
        encoder, texts = self.encoders[-1], [self.marks[1] + passage.text for passage in passages]
        return self._embed(encoder, token_buckets(encoder, texts, self.passage_tokens, BUCKETS))

    def match(self, queries: Tensor, passages: Any) -> Tensor:
        return queries @ passages.T if self.dot and self.training else super().match(queries, passages)

    def _embed(self, encoder: SentenceTransformer, batches: list[dict[str, Any]]) -> Tensor:
        if not (self.dot and self.training):
            return embed_buckets(encoder, batches)
        rows = torch.cat([batch.pop("rows") for batch in batches])
        read = [{name: tensor.to(encoder.device) for name, tensor in batch.items()} for batch in batches]
        pooled = [encoder[1](encoder[0](texts))["sentence_embedding"].float() for texts in read]
        return torch.cat(pooled)[torch.argsort(rows)]


class PolyEncoder(BiEncoder):
    """A Bi-encoder whose passages keep their tokens: the query attends to them late (CAPR §3.2, equation 2).

    `pooled`: equation 2 is given a passage's one vector in place of its tokens, which CAPR tried first."""

    def __init__(self, *encoders: SentenceTransformer, pooled: bool = False, **lengths: int):
        super().__init__(*encoders, **lengths)
        self.pooled = pooled
        self.W_attn = nn.Parameter(torch.eye(encoders[0].get_embedding_dimension()))  # at first: y as it is

    def encode_queries(self, queries: Sequence[str]) -> Tensor:
        # Unit length times sqrt(SCALE) on either side: scores in the Bi-encoder's range.
        return SCALE**0.5 * super().encode_queries(queries)

    def encode_passages(self, passages: Sequence[Passage]) -> tuple[Tensor, Tensor]:
        """Token embeddings [passages, tokens, dim] and their mask, bool [passages, tokens]; `pooled`: of one token."""
        if self.pooled:
            vectors = super().encode_passages(passages)[:, None]
            return SCALE**0.5 * vectors, torch.ones_like(vectors[..., 0], dtype=torch.bool)
        read = _token_embeddings(self.encoders[-1], [p.text for p in passages], self.passage_tokens, BUCKETS)
        tokens, masks = (nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in zip(*read, strict=True))
        return SCALE**0.5 * tokens, masks

    def match(self, queries: Tensor, passages: tuple[Tensor, Tensor]) -> Tensor:
        return poly_score(queries, *passages, self.W_attn)


class CrossEncoder(nn.Module):
    """One encoder over query and passage together, and a linear score of its output, pooled as it was trained to be
    (CAPR §3.2, where that is [CLS])."""

    def __init__(self, encoder: SentenceTransformer, *, max_tokens: int = 512):
        super().__init__()
        self.encoder, self.max_tokens = encoder, max_tokens
        self.head = nn.Linear(encoder.get_embedding_dimension(), 1)

    def pair_scores(self, pairs: Sequence[tuple[str, str]]) -> Tensor:
        """float [pairs] of (query, passage text); a pair that is too long loses the passage's end."""
        tokenizer, device = self.encoder.tokenizer, self.encoder.device
        first, second = (list(part) for part in zip(*pairs, strict=True))
        tokens = tokenizer(first, second, truncation="only_second", max_length=self.max_tokens)
        order = torch.tensor([len(ids) for ids in tokens["input_ids"]]).argsort(stable=True)
        scores = []
        for rows in order.split(-(-len(pairs) // BUCKETS)):
            batch = tokenizer.pad({k: [tokens[k][i] for i in rows] for k in tokens}, return_tensors="pt").to(device)
            read = {"token_embeddings": self.encoder[0].auto_model(**batch).last_hidden_state} | dict(batch)
            pooled = self.encoder[1](read)["sentence_embedding"]
            with torch.autocast(device.type, enabled=False):
                scores.append(self.head(pooled.float())[:, 0])
        return torch.cat(scores)[order.argsort().to(device)]

    def forward(self, queries: Sequence[str], passages: Sequence[Passage]) -> Tensor:
        pairs = [(query, passage.text) for query in queries for passage in passages]
        return self.pair_scores(pairs).reshape(len(queries), len(passages))


class WordVectors(nn.Module):
    """CDV+FastText's encoder of sentences and queries (CAPR §4.2): the mean of a text's words' vectors, each the mean
    of its n-grams' (Bojanowski et al., 2017), which are learnt from the sentences alone and then stay."""

    def __init__(self, sentences: Sequence[str], buckets: int, dimension: int = 300, epochs: int = 20, seed: int = 0):
        from gensim.models import FastText

        super().__init__()
        words = [_WORD.findall(sentence) for sentence in sentences]
        how = dict(sg=1, min_count=1, epochs=epochs, seed=seed, workers=1)  # of several no two trainings are the same
        self.vectors = FastText(words, vector_size=dimension, bucket=buckets, **how).wv

    def get_embedding_dimension(self) -> int:
        return self.vectors.vector_size

    def forward(self, texts: Sequence[str]) -> Tensor:
        """Unit vectors, float32 [texts, dimension]; zeros for a text without a word."""
        nothing = np.zeros((1, self.vectors.vector_size), np.float32)
        words = [[self.vectors[word] for word in _WORD.findall(text)] for text in texts]
        return nn.functional.normalize(torch.tensor(np.stack([np.mean(of or nothing, axis=0) for of in words])), dim=1)


class ContextualDocumentVectors(TwoTowers):
    """CDV: a bidirectional LSTM over a document's sentence embeddings (Arnold et al., 2020; CAPR §3.2).

    Each sentence is mapped to the spaces of the query's two parts, entity and aspect, which the starting encoder embeds
    and which stay as they are; a passage scores the mean cosine of its sentences (CAPR §4.2). A head adds to a
    sentence's embedding what the LSTM makes of its document, at first nothing: so a passage's first scores are the
    start's. `frozen`: sentence embeddings are computed once. Else the sentence encoder is trained too; either way it
    pools as it was trained to.
    """

    def __init__(
        self,
        encoder: SentenceTransformer | WordVectors,
        query_encoder: SentenceTransformer | WordVectors,
        *,
        frozen: bool = True,
    ):
        super().__init__()
        dim = encoder.get_embedding_dimension()
        self.encoder, self.frozen = encoder, frozen
        self.lstms = nn.ModuleList([nn.LSTM(dim, LSTM_DIM, batch_first=True) for _ in ("onward", "back")])
        self.heads = nn.ModuleList([nn.Linear(2 * LSTM_DIM, dim) for _ in ("entity", "aspect")])
        for weight in self.heads.parameters():
            nn.init.zeros_(weight)
        self.shares = (1.0, 1.0)  # of the query's entity and of its aspect in a score; trained with both
        self._query_encoder = [query_encoder.eval().requires_grad_(False)]  # in a list: no part of the trained weights
        self._known: dict[tuple[bool, str], Tensor] = {}  # embeddings that stay: of query parts and frozen sentences
        encoder.requires_grad_(not frozen)

    def train(self, mode: bool = True) -> ContextualDocumentVectors:
        super().train(mode)
        if self.frozen:
            self.encoder.eval()  # its embeddings are kept, so no dropout
        return self

    def encode_queries(self, queries: Sequence[str]) -> Tensor:
        """Unit vectors [queries, 2 dim]: the entity's embedding and the aspect's."""
        parts = zip(*(query.rsplit(" ; ", 1) for query in queries), strict=True)
        halves = [self._fixed(self._query_encoder[0], list(part), True) for part in parts]
        return torch.cat([share * half for share, half in zip(self.shares, halves, strict=True)], dim=1) / 2**0.5

    def encode_passages(self, passages: Sequence[Passage]) -> Tensor:
        """Means over sentences of unit vectors, float [passages, 2 dim]."""
        documents = list(dict.fromkeys(p.document for p in passages))
        sentences = list(dict.fromkeys(s for document in documents for s in document))
        at = {sentence: i for i, sentence in enumerate(sentences)}
        if self.frozen:
            embedded = self._fixed(self.encoder, sentences, False)
        else:
            embedded = embed_buckets(
                self.encoder, token_buckets(self.encoder, sentences, SENTENCE_TOKENS, SENTENCE_BUCKETS)
            )
        rows = [embedded[[at[s] for s in document]] for document in documents]
        read = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        with torch.autocast(embedded.device.type, enabled=False):
            hidden = torch.cat([self.lstms[0](read)[0], self._read_back(rows)], dim=2)
            halves = [nn.functional.normalize(read + head(hidden), dim=2) for head in self.heads]
            vectors = torch.cat(halves, dim=2) / 2**0.5
        of = dict(zip(documents, vectors, strict=True))
        return torch.stack([of[p.document][p.start : p.end].mean(dim=0) for p in passages])

    def _read_back(self, rows: list[Tensor]) -> Tensor:
        """The second LSTM over each document from its end, [documents, sentences, LSTM_DIM] in their order.

        (torch's bidirectional LSTM, whose documents must be packed, takes three times as long on a CPU.)"""
        hidden, _ = self.lstms[1](nn.utils.rnn.pad_sequence([row.flip(0) for row in rows], batch_first=True))
        turned = [of[: len(row)].flip(0) for of, row in zip(hidden, rows, strict=True)]
        return nn.utils.rnn.pad_sequence(turned, batch_first=True)

    @torch.no_grad()
    def _fixed(self, encoder: SentenceTransformer | WordVectors, texts: list[str], query: bool) -> Tensor:
        new = [text for text in dict.fromkeys(texts) if (query, text) not in self._known]
        if new:
            if isinstance(encoder, WordVectors):
                embedded = encoder(new).to(self.heads[0].weight.device)
            else:
                embedded = embed_buckets(encoder, token_buckets(encoder, new, SENTENCE_TOKENS, -(-len(new) // 64)))
            self._known.update(zip([(query, text) for text in new], embedded, strict=True))
        return torch.stack([self._known[query, text] for text in texts])


def _token_embeddings(
    encoder: SentenceTransformer, texts: Sequence[str], max_tokens: int, buckets: int
) -> list[tuple[Tensor, Tensor]]:
    """Of each text its tokens' unit vectors, float32 [tokens, dim], and bool [tokens], False for padding."""
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in token_buckets(encoder, texts, max_tokens, buckets):
        rows = batch.pop("rows").tolist()
        read = encoder({name: tensor.to(encoder.device) for name, tensor in batch.items()})
        tokens = nn.functional.normalize(read["token_embeddings"].float(), dim=2)
        found.update(zip(rows, zip(tokens, read["attention_mask"].bool(), strict=True), strict=True))
    return [found[i] for i in range(len(texts))]


# --- long inputs: a passage amid its document on a Longformer (CAPR §3.2), for the profile `mimic` --------------------


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
        self.query_model, self.passage_model = (AutoModel.from_pretrained(name, use_safetensors=True) for _ in range(2))
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
