"""Contrastive training of an encoder on chunks and their positive entities (DR.EHR §3.3, §4.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from sentence_transformers import SentenceTransformer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from drehr_utils import losses
from drehr_utils.corpus import Chunk, DataError
from drehr_utils.encoders import CHUNK_TOKENS, ENTITY_TOKENS, embed_buckets, has_fast_bf16, token_buckets
from drehr_utils.positives import PositiveSets, as_question, substitute_aliases


@dataclass(frozen=True)
class StageConfig:
    """One stage's hyper-parameters. The defaults are the paper's (§4.2, Table 3, DR.EHR-small, stage II)."""

    positives_per_chunk: int = 16
    sources: tuple[str, ...] | None = None  # of the positive sets (Table 1's or 2's rows); None: all of them
    batch_size: int = 32
    epochs: float = 1.0
    max_steps: int | None = None  # cuts the epochs short; None: all of them
    learning_rate: float = 1e-4
    warmup_ratio: float = 0.1
    mask_false_negatives: bool = False  # a term that is positive for a chunk is never its negative
    both_ways: bool = False  # contrast chunks for an entity as well as entities for a chunk
    substitution: float = 0.0  # probability that a mention in the chunk is replaced by another name of its concept
    complete_labels: bool = False  # a term is also positive for a chunk in which the graph finds the term's concept
    complete_hypernyms: bool = False  # ... or a narrower one
    leave_out_related: bool = False  # a term related to a concept of the chunk is no negative for it
    concepts_per_batch: int = 0  # the graph's concepts that join as anchors: one name, the others positive
    keep: float = 0.0  # weight of the pull that holds texts of other kinds where the starting encoder puts them
    kept_per_chunk: int = 1  # how many of them are drawn beside each chunk of a batch
    draw_weights: tuple[tuple[str, float], ...] = ()  # how likely a source's terms are drawn; 1 for those not named
    hard_negatives: int = 0  # names of narrower and of sibling concepts that are a chunk's own negatives
    templates: float = 0.0  # share of the entities that are put as questions (positives.as_question)
    recompute: bool = False  # encode twice instead of keeping activations: any batch in a bucket's memory
    chunks_per_note: int = 1  # chunks of one note that share a batch: hard negatives for Single-Patient search
    alpha: float = losses.ALPHA
    beta: float = losses.BETA
    lam: float = losses.LAMBDA
    epsilon: float = losses.EPSILON
    dropout: float | None = 0.0  # None: as the model was trained (0.1 for BERT); on a CPU 0 saves a third of a step
    seed: int = 0

    @property
    def uses_graph(self) -> bool:
        """Whether training itself asks the graph (the positive sets of stage I always hold it)."""
        asked = (self.substitution, self.concepts_per_batch, self.complete_labels, self.keep, self.hard_negatives)
        return any(asked)


@dataclass(frozen=True)
class Recipe:
    """Two stages in turn; None leaves one out (DR.EHR §3, Table 3)."""

    stage1: StageConfig | None = None
    stage2: StageConfig | None = None
    own_share: float = 1.0  # of the trained weights in their average with the starting ones; 1: no averaging
    read_names: bool = False  # the tokenizer reads the graph's opaque names as what they stand for (normalization)


@dataclass(frozen=True)
class GraphView:
    """What training asks of the knowledge graph, beyond the positive sets; the default knows nothing."""

    spans: Callable[[str], list[tuple[int, int, list[str]]]] = lambda text: []  # positives.alias_spans of a text
    concepts_in: Callable[[str], frozenset[str]] = lambda text: frozenset()  # ids of the concepts a text mentions
    broader: Callable[[frozenset[str]], frozenset[str]] = lambda ids: frozenset()  # than any of these concepts
    related: Callable[[frozenset[str]], frozenset[str]] = lambda ids: frozenset()  # to any of them, is_a aside
    concepts_of: Callable[[str], frozenset[str]] = lambda term: frozenset()  # ids of the concepts a term names
    confusable: Callable[[frozenset[str]], Sequence[str]] = lambda ids: ()  # terms narrower than these, or siblings
    names: list[list[str]] = field(default_factory=list)  # of the concepts that may join a batch, the usual one first


@dataclass
class TrainingSet:
    """Chunks and, for each, its positive terms. Chunks without any are left out, and counted."""

    ids: list[str]
    texts: list[str]
    positives: Callable[[int], list[str]]  # of the k-th chunk that was kept
    weights: Callable[[int], Sequence[float] | None] = lambda k: None  # how likely each of its terms is drawn
    without_positives: int = 0
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
        draw_weights: Sequence[tuple[str, float]] = (),
    ) -> TrainingSet:
        """Pairs chunks with their positive sets, of some sources only if asked (the ablations of §5.3).

        draw_weights: StageConfig's, by source.

        Raises DataError when the two don't belong together, or when no chunk has a positive."""
        if [chunk.id for chunk in chunks] != sets.ids:
            raise DataError("training set: the positive sets belong to other chunks; delete data/cache or run --fresh")
        wanted = np.isin(sets.source, [sets.sources.index(name) for name in sources or sets.sources])
        kept = np.unique(np.repeat(np.arange(len(sets)), np.diff(sets.offsets))[wanted])
        if not len(kept):
            raise DataError("training set: no chunk has a positive entity; check the matching and the LLM's answers")
        weight_of = dict(draw_weights)

        def weights(k: int) -> list[float] | None:
            source = sets.source_of(kept[k]) if weight_of else {}
            return [weight_of.get(source[term], 1.0) for term in sets.of(kept[k], sources)] if weight_of else None

        return cls(
            [chunks[i].id for i in kept],
            [chunks[i].text for i in kept],
            lambda k: sets.of(kept[k], sources),
            weights,
            len(chunks) - len(kept),
            graph or GraphView(),
            list(other_texts),
        )

    def __len__(self) -> int:
        return len(self.ids)


def draw_positives(
    terms: Sequence[str], n: int, rng: np.random.Generator, weights: Sequence[float] | None = None
) -> list[str]:
    """Exactly n of a chunk's positives: a sample when there are more, all of them and repeats when fewer (§4.2).

    weights: how likely each is to be in the sample, relative to the others; None: equally."""
    if len(terms) >= n:
        p = None if weights is None else np.divide(weights, sum(weights))
        return [terms[i] for i in rng.choice(len(terms), n, replace=False, p=p)]
    repeats = [terms[i] for i in rng.choice(len(terms), n - len(terms), replace=True)]
    return list(terms) + repeats


def batch_schedule(note_ids: Sequence[str], config: StageConfig, concepts: int = 0) -> list[list[tuple[int, int]]]:
    """Every step's batch as (epoch, chunk index) pairs, fixed by the seed; `concepts` follow the chunks' indices.

    Chunks of one note are dealt in groups of `chunks_per_note`; groups are shuffled, then cut into batches, anew each
    epoch. A last batch that is not full is dropped."""
    steps_an_epoch = max(1, len(note_ids) // config.batch_size)
    steps = max(1, round(steps_an_epoch * config.epochs))
    steps = min(steps, config.max_steps) if config.max_steps else steps
    by_note: dict[str, list[int]] = {}
    for i, note_id in enumerate(note_ids):
        by_note.setdefault(note_id, []).append(i)
    schedule: list[list[tuple[int, int]]] = []
    epoch = 0
    while len(schedule) < steps:
        rng = np.random.default_rng([config.seed, epoch])
        groups = []
        for members in by_note.values():
            members = rng.permutation(members).tolist()
            groups += [members[i : i + config.chunks_per_note] for i in range(0, len(members), config.chunks_per_note)]
        order = [i for g in rng.permutation(len(groups)) for i in groups[g]]
        size = min(config.batch_size, len(order))
        for start in range(0, len(order) - size + 1, size):
            extra = rng.choice(concepts, min(config.concepts_per_batch, concepts), replace=False) if concepts else []
            rows = order[start : start + size] + [len(note_ids) + int(c) for c in extra]
            schedule.append([(epoch, i) for i in rows])
        epoch += 1
    return schedule[:steps]


class Row(NamedTuple):
    """One anchor of a batch."""

    text: str
    drawn: list[str]  # the positives that this step contrasts
    positives: list[str]  # all of them
    mentioned: frozenset[str] = frozenset()  # ids of the graph's concepts whose terms are positive for the text
    left_out: frozenset[str] = frozenset()  # ids of those whose terms are neither positive nor negative
    others: Sequence[str] = ()  # texts of other kinds, to be kept in place
    hard: Sequence[str] = ()  # terms that are negatives of this text, and of no other for being listed here


class PositivePairs(Dataset):
    """(epoch, index) -> the row; fixed by seed, epoch and index."""

    def __init__(self, data: TrainingSet, config: StageConfig):
        self.data, self.config = data, config

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, key: tuple[int, int]) -> Row:
        epoch, i = key
        config, graph = self.config, self.data.graph
        rng = np.random.default_rng([config.seed, 1 + epoch, i])
        if i >= len(self.data):
            text, *terms = rng.permutation(graph.names[i - len(self.data)]).tolist()
            return Row(text, draw_positives(terms, config.positives_per_chunk, rng), [text, *terms])
        terms, text = self.data.positives(i), self.data.texts[i]
        drawn = draw_positives(terms, config.positives_per_chunk, rng, self.data.weights(i))
        near = graph.confusable(graph.concepts_in(text)) if config.hard_negatives else ()
        mentioned = graph.concepts_in(text) if config.complete_labels else frozenset()
        left_out = graph.related(mentioned) if config.leave_out_related else frozenset()
        if config.complete_hypernyms:
            mentioned |= graph.broader(mentioned)
        if config.substitution:
            text = substitute_aliases(text, graph.spans(text), config.substitution, rng)
        kept = config.kept_per_chunk if config.keep else 0
        others = (
            [self.data.other_texts[i] for i in rng.choice(len(self.data.other_texts), kept, replace=False)]
            if kept
            else []
        )
        near = sorted(set(near) - set(terms))
        hard = [near[i] for i in rng.permutation(len(near))[: config.hard_negatives]]
        return Row(text, drawn, terms, mentioned, left_out, others, hard)


@dataclass
class Collator:
    """Tokenises a batch; an entity that repeats in it is tokenised, and later encoded, once."""

    encoder: SentenceTransformer
    concepts_of: Callable[[str], frozenset[str]] = lambda term: frozenset()
    rows_per_bucket: int = 16
    entity_buckets: int = 8
    reference: SentenceTransformer | None = None  # StageConfig.keep's; its tokenizer may be another
    templates: float = 0.0  # StageConfig's

    def __call__(self, rows: list[Row]) -> dict:
        terms = list(dict.fromkeys(term for row in rows for term in (*row.drawn, *row.hard)))
        asked = [as_question(term, self.templates) for term in terms]
        entity_tokens = ENTITY_TOKENS + 8 * bool(self.templates)
        at = {term: u for u, term in enumerate(terms)}
        known = torch.zeros(len(rows), len(terms), dtype=torch.bool)
        left_out, hard = torch.zeros_like(known), torch.zeros_like(known)
        concepts = [self.concepts_of(term) for term in terms] if any(row.mentioned for row in rows) else []
        for b, row in enumerate(rows):
            known[b, [at[term] for term in row.positives if term in at]] = True
            hard[b, [at[term] for term in row.hard]] = True
            known[b, [u for u, ids in enumerate(concepts) if ids & row.mentioned]] = True
            left_out[b, [u for u, ids in enumerate(concepts) if ids & row.left_out]] = True
        buckets = -(-len(rows) // self.rows_per_bucket)
        others = [text for row in rows for text in row.others]
        kept = {}
        for name, model in (("others", self.encoder), ("others_before", self.reference)) if others else ():
            kept[name] = token_buckets(model, others, CHUNK_TOKENS, self.entity_buckets)
        return {
            "chunks": token_buckets(self.encoder, [row.text for row in rows], CHUNK_TOKENS, buckets),
            "entities": token_buckets(self.encoder, asked, entity_tokens, self.entity_buckets),
            "columns": torch.tensor([[at[term] for term in row.drawn] for row in rows]),  # [chunks, positives]
            "known": known,  # [chunks, unique entities]: positive for the chunk, drawn for it or not
            "left_out": left_out & ~known,  # likewise: neither positive nor negative
            "hard": hard & ~known & ~left_out,  # likewise: the chunk's own hard negatives
            **kept,
        }


def contrastive_loss(
    S: Tensor,
    columns: Tensor,
    known: Tensor,
    config: StageConfig,
    left_out: Tensor | None = None,
    hard: Tensor | None = None,
) -> Tensor:
    """A batch's loss from S [chunks, unique entities], the drawn `columns` [chunks, n] and `known` [chunks, entities].

    Chunks are anchors over all drawn entities of the batch, repeats included, as the paper has it: a chunk's own draws
    are its positives, the others' its negatives (in-batch negatives, §3.3). `mask_false_negatives` leaves out the
    others' draws that are known positives of the chunk. Pairs of `left_out` [chunks, entities] are no negatives either.
    Pairs of `hard` [chunks, entities] are, drawn or not. `both_ways` adds the same loss with each entity as anchor
    over the batch's chunks."""
    hyper = dict(alpha=config.alpha, beta=config.beta, lam=config.lam, epsilon=config.epsilon)
    n_chunks, n_drawn = columns.shape
    flat = columns.reshape(-1)
    own = torch.eye(n_chunks, dtype=torch.bool, device=S.device).repeat_interleave(n_drawn, dim=1)
    negatives = ~own
    if config.mask_false_negatives:
        negatives = negatives & ~known[:, flat]
    if left_out is not None:
        negatives = negatives & ~left_out[:, flat]
    sampled = S[:, flat]
    if hard is not None and hard.any():
        beside = hard.any(dim=0)
        sampled = torch.cat([sampled, S[:, beside]], dim=1)
        own = torch.cat([own, torch.zeros_like(hard[:, beside])], dim=1)
        negatives = torch.cat([negatives, hard[:, beside]], dim=1)
    loss = losses.multi_similarity_loss(sampled, own, negatives, **hyper)
    if config.both_ways:
        drawn = torch.zeros_like(known).scatter_(1, columns, True)
        positives = known if config.mask_false_negatives else drawn
        negatives = ~positives if left_out is None else ~positives & ~left_out
        anchors = drawn.any(dim=0)  # a term that is only a hard negative has nothing to find
        terms = (S.T[anchors], positives.T[anchors], negatives.T[anchors])
        loss = (loss + losses.multi_similarity_loss(*terms, **hyper)) / 2
    return loss


class StepBar(TrainerCallback):
    """One progress bar with the loss, instead of the Trainer's line (or table row, in a notebook) a step."""

    def __init__(self, show: bool):
        self.show = show

    def on_train_begin(self, args, state, control, **_):
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", disable=not self.show)

    def on_step_end(self, args, state, control, **_):
        self.bar.update(1)

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{float(logs['loss']):.3f}", refresh=False)

    def on_train_end(self, args, state, control, **_):
        self.bar.close()


class ContrastiveTrainer(Trainer):
    """transformers' Trainer over a fixed schedule of batches."""

    def __init__(self, *args, config: StageConfig, schedule: list, reference: SentenceTransformer | None, **kwargs):
        super().__init__(*args, **kwargs)
        self.config, self.schedule, self.reference = config, schedule, reference

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_sampler=self.schedule, collate_fn=self.data_collator)

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        chunks = embed_buckets(model, inputs["chunks"], self.config.recompute)
        entities = embed_buckets(model, inputs["entities"], self.config.recompute)
        with torch.autocast(chunks.device.type, enabled=False):  # similarities and the loss in float32
            S = chunks @ entities.T
            masks = inputs["known"], self.config, inputs["left_out"], inputs["hard"]
            loss = contrastive_loss(S, inputs["columns"], *masks)
        if "others" in inputs:
            with torch.no_grad(), self.accelerator.autocast():
                before = embed_buckets(self.reference, inputs["others_before"])
            loss = loss + self.config.keep * losses.embedding_drift(embed_buckets(model, inputs["others"]), before)
        return (loss, {}) if return_outputs else loss


def prepare_for_training(encoder: SentenceTransformer, config: StageConfig) -> None:
    """Sets the dropout, and on a CPU plain attention: its fused kernel's backward pass is slower there."""
    if config.dropout is not None:
        for module in encoder.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = config.dropout
    if encoder.device.type == "cpu":
        encoder[0].auto_model.set_attn_implementation("eager")


def training_arguments(
    output: Path, config: Any, steps: int, save_steps: int, use_cpu: bool | None = None
) -> TrainingArguments:
    """AdamW, warm-up and linear decay (§4.2) over `steps` batches that the caller's schedule fixes.

    `config` has batch_size, learning_rate, warmup_ratio and seed; `save_steps` 0: no checkpoints."""
    return TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=round(config.warmup_ratio * steps),
        optim="adamw_torch",
        bf16=has_fast_bf16(),
        use_cpu=not torch.cuda.is_available() if use_cpu is None else use_cpu,
        seed=config.seed,
        data_seed=config.seed,
        logging_steps=1,
        save_steps=save_steps or steps,
        save_total_limit=1,
        save_strategy="steps" if save_steps else "no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def fit(trainer: Trainer, model: torch.nn.Module, output: Path) -> pd.DataFrame:
    """Trains `model` in place, from the last checkpoint in `output` if there is one; returns step, loss, lr."""
    trainer.remove_callback(PrinterCallback)
    checkpoints = sorted(Path(output).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    trainer.train(resume_from_checkpoint=str(checkpoints[-1]) if checkpoints else None)
    trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # or it would go on computing in bf16
    log = pd.DataFrame([row for row in trainer.state.log_history if "loss" in row])
    return log[["step", "loss", "learning_rate"]].reset_index(drop=True)


def train_stage(
    encoder: SentenceTransformer,
    data: TrainingSet,
    config: StageConfig,
    output: Path,
    *,
    reference: SentenceTransformer | None = None,
    save_steps: int = 50,
    callbacks: Sequence[TrainerCallback] = (),
    progress: bool = True,
    use_cpu: bool | None = None,
) -> pd.DataFrame:
    """Trains `encoder` in place with AdamW, warm-up and linear decay (§4.2); returns the loss curve (step, loss, lr).

    `output` holds checkpoints: a run that was cut off goes on from the last one when called again with the same data
    and configuration. `reference`: the encoder whose embeddings of the data's other texts `config.keep` holds on to."""
    if config.keep and reference is None:
        raise ValueError("StageConfig.keep: give train_stage the reference encoder whose embeddings are kept")
    prepare_for_training(encoder, config)
    note_ids = [chunk_id.rsplit("_", 1)[0] for chunk_id in data.ids]
    schedule = batch_schedule(note_ids, config, len(data.graph.names))
    arguments = training_arguments(output, config, len(schedule), save_steps, use_cpu)
    trainer = ContrastiveTrainer(
        model=encoder,
        args=arguments,
        train_dataset=PositivePairs(data, config),
        data_collator=Collator(encoder, data.graph.concepts_of, reference=reference, templates=config.templates),
        callbacks=[StepBar(progress), *callbacks],
        config=config,
        schedule=schedule,
        reference=reference,
    )
    return fit(trainer, encoder, output)
