"""What a step of training sees: chunks, their positive entities, and the batches of a schedule (DR.EHR §3.3, §4.2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from sentence_transformers import SentenceTransformer

from drehr_utils.config import StageConfig
from drehr_utils.data.notes import Chunk, windows
from drehr_utils.errors import DataError
from drehr_utils.training.encoders import CHUNK_TOKENS, ENTITY_TOKENS, query_prompt, token_buckets
from drehr_utils.training.positives import PositiveSets, substitute_aliases


@dataclass(frozen=True)
class GraphView:
    """What training asks of the knowledge graph, beyond the positive sets; the default knows nothing."""

    spans: Callable[[str], list[tuple[int, int, list[str]]]] = lambda text: []  # positives.alias_spans of a text
    concepts_in: Callable[[str], frozenset[str]] = lambda text: frozenset()  # ids of the concepts a text mentions
    broader: Callable[[frozenset[str]], frozenset[str]] = lambda ids: frozenset()  # than any of these concepts
    related: Callable[[frozenset[str]], frozenset[str]] = lambda ids: frozenset()  # to any of them, is_a aside
    concepts_of: Callable[[str], frozenset[str]] = lambda term: frozenset()  # ids of the concepts a term names


@dataclass
class TrainingSet:
    """Chunks and, for each, its positive terms. Chunks without any are left out."""

    chunks: Sequence[Chunk]
    kept: np.ndarray  # int64: which of the chunks
    positives: Callable[[int], list[str]]  # of the k-th chunk that was kept
    graph: GraphView = field(default_factory=lambda: GraphView())
    other_texts: list[str] = field(default_factory=list)  # those that StageConfig.keep holds in place

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        sets: PositiveSets,
        sources: Sequence[str] | None = None,
        graph: GraphView | None = None,
        other_texts: Sequence[str] = (),
    ) -> TrainingSet:
        """Pairs chunks with their positive sets, of some sources only if asked (the ablations of §5.3).

        Raises DataError when the two don't belong together, or when no chunk has a positive."""
        if len(chunks) != len(sets) or any(c.id != i for c, i in zip(chunks, sets.ids, strict=True)):
            raise DataError("training set: the positive sets belong to other chunks; delete data/cache or run --fresh")
        if sources is not None and (not sources or set(sources) - set(sets.sources)):
            raise DataError(f"training set: sources {list(sources)}, where there are {', '.join(sets.sources)}")
        kept = np.flatnonzero(sets.counts()[list(sources or sets.sources)].any(axis=1))
        if not len(kept):
            raise DataError("training set: no chunk has a positive entity; check the matching and the LLM's answers")
        positives = lambda k: sets.of(int(kept[k]), sources)  # noqa: E731
        return cls(chunks, kept, positives, graph or GraphView(), list(other_texts))

    def __len__(self) -> int:
        return len(self.kept)

    def text(self, k: int) -> str:
        return self.chunks[int(self.kept[k])].text

    @property
    def note_ids(self) -> list[str]:
        return [self.chunks[i].note_id for i in self.kept.tolist()]


def draw_positives(terms: Sequence[str], n: int, rng: np.random.Generator) -> list[str]:
    """Exactly n of a chunk's positives: a sample when there are more, all of them and repeats when fewer (§4.2)."""
    if len(terms) >= n:
        return [terms[i] for i in rng.choice(len(terms), n, replace=False)]
    repeats = [terms[i] for i in rng.choice(len(terms), n - len(terms), replace=True)]
    return list(terms) + repeats


@dataclass(frozen=True)
class Batches(Sequence[list]):
    """`number` batches, each made when it is asked for: those of the paper's scale would take gigabytes."""

    number: int
    batch: Callable[[int], list]

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, at):
        chosen = range(self.number)[at]
        return [self.batch(step) for step in chosen] if isinstance(at, slice) else self.batch(chosen)


def batch_schedule(note_ids: Sequence[str], config: StageConfig) -> Batches:
    """Every step's batch as (epoch, chunk index) pairs, fixed by the seed.

    Chunks of one note are dealt in groups of `chunks_per_note`; groups are shuffled, then cut into batches, anew each
    epoch. A last batch that is not full is dropped."""
    if not note_ids:
        raise DataError("training set: nothing to train on; check the notes, and what is looked for in them")
    steps = config.steps(len(note_ids))
    by_note: dict[str, list[int]] = {}
    for i, note_id in enumerate(note_ids):
        by_note.setdefault(note_id, []).append(i)
    size = min(config.batch_size, len(note_ids))
    an_epoch = len(note_ids) // size
    orders = []
    for epoch in range(-(-steps // an_epoch)):
        rng = np.random.default_rng([config.seed, epoch])
        groups = []
        for members in by_note.values():
            members = rng.permutation(members).tolist()
            groups += [members[i : i + config.chunks_per_note] for i in range(0, len(members), config.chunks_per_note)]
        orders.append(np.array([i for g in rng.permutation(len(groups)) for i in groups[g]], np.int32))

    def batch(step: int) -> list[tuple[int, int]]:
        epoch, at = divmod(step, an_epoch)
        return [(epoch, i) for i in orders[epoch][at * size : (at + 1) * size].tolist()]

    return Batches(steps, batch)


def deal(schedule: Sequence[list], rank: int, world: int, joint: bool = False) -> Sequence[list]:
    """The batches of process `rank` among `world`: the schedule's, dealt out in turn, so that every process has as
    many; with `joint`, a round's batches as one, which is every process's. Alone, the schedule as it is.

    Raises DataError when there are fewer batches than processes. What is left after the last full round is dropped."""
    if len(schedule) < world:
        raise DataError(f"training set: {len(schedule)} batches for {world} processes; start fewer, or cut batch_size")

    def batch(step: int) -> list:
        if joint:
            return [key for part in schedule[step * world : (step + 1) * world] for key in part]
        return schedule[step * world + rank]

    return Batches(len(schedule) // world, batch)


class Row(NamedTuple):
    """One anchor of a batch."""

    text: str
    drawn: list[str]  # the positives that this step contrasts
    positives: list[str]  # all of them
    mentioned: frozenset[str] = frozenset()  # ids of the graph's concepts whose terms are positive for the text
    left_out: frozenset[str] = frozenset()  # ids of those whose terms are neither positive nor negative
    others: Sequence[str] = ()  # texts of other kinds, to be kept in place


@dataclass
class PositivePairs:
    """(epoch, index) -> the row; fixed by seed, epoch and index."""

    data: TrainingSet
    config: StageConfig

    def __getitem__(self, key: tuple[int, int]) -> Row:
        epoch, i = key
        config, graph = self.config, self.data.graph
        rng = np.random.default_rng([config.seed, 1 + epoch, i])
        terms, text = self.data.positives(i), self.data.text(i)
        drawn = draw_positives(terms, config.positives_per_chunk, rng)
        mentioned = graph.concepts_in(text) if config.complete_labels else frozenset()
        left_out = graph.related(mentioned) if config.leave_out_related else frozenset()
        if config.complete_hypernyms:
            mentioned |= graph.broader(mentioned)
        if config.substitution:
            text = substitute_aliases(text, graph.spans(text), config.substitution, rng)
        other_texts = self.data.other_texts
        kept = rng.choice(len(other_texts), config.kept_per_chunk, replace=False) if config.keep else ()
        return Row(text, drawn, terms, mentioned, left_out, [other_texts[k] for k in kept])


@dataclass
class Collator:
    """Tokenises a batch; an entity that repeats in it is tokenised, and later encoded, once."""

    encoder: SentenceTransformer
    concepts_of: Callable[[str], frozenset[str]] = lambda term: frozenset()
    rows_per_bucket: int = 8  # on average: buckets are cut where the least is padding
    entity_buckets: int = 4
    most: int | None = None  # tokens of a bucket, padding included
    before: Mapping[str, np.ndarray] = field(default_factory=dict)  # other text -> where StageConfig.keep keeps it
    windows: bool = False  # of the chunks, too
    share: tuple[int, int] = (0, 1)  # (rank, world): which of a joint batch's texts are this process's to encode

    def own(self, texts: Sequence[str]) -> Sequence[str]:
        """Every world-th text. Of fewer than there are processes, some process has the first, which nobody reads."""
        rank, world = self.share
        return texts[rank::world] or texts[:1]

    def __call__(self, rows: list[Row]) -> dict:
        terms = list(dict.fromkeys(term for row in rows for term in row.drawn))
        at = {term: u for u, term in enumerate(terms)}
        known = torch.zeros(len(rows), len(terms), dtype=torch.bool)
        left_out = torch.zeros_like(known)
        concepts = [self.concepts_of(term) for term in terms] if any(row.mentioned for row in rows) else []
        for b, row in enumerate(rows):
            known[b, [at[term] for term in row.positives if term in at]] = True
            known[b, [u for u, ids in enumerate(concepts) if ids & row.mentioned]] = True
            left_out[b, [u for u, ids in enumerate(concepts) if ids & row.left_out]] = True
        texts = self.own([row.text for row in rows])
        others = self.own([text for row in rows for text in row.others])
        kept = {}
        if others:
            kept["others"] = token_buckets(self.encoder, others, CHUNK_TOKENS, self.entity_buckets, most=self.most)
            kept["before"] = torch.from_numpy(np.stack([self.before[text] for text in others]))  # [others, dim]
        if self.windows:
            parts = [windows(text) for text in texts]
            every = [window for part in parts for window in part]
            kept["windows"] = token_buckets(self.encoder, every, CHUNK_TOKENS, self.entity_buckets, most=self.most)
            kept["of_chunk"] = torch.tensor([b for b, part in enumerate(parts) for _ in part])  # [windows]
        buckets = -(-len(texts) // self.rows_per_bucket)
        return {
            "chunks": token_buckets(self.encoder, texts, CHUNK_TOKENS, buckets, most=self.most),
            "entities": token_buckets(
                self.encoder, self.own(terms), ENTITY_TOKENS, self.entity_buckets, query_prompt(self.encoder), self.most
            ),
            "columns": torch.tensor([[at[term] for term in row.drawn] for row in rows]),  # [chunks, positives]
            "known": known,  # [chunks, unique entities]: positive for the chunk, drawn for it or not
            "left_out": left_out & ~known,  # likewise: neither positive nor negative
            **kept,
        }
