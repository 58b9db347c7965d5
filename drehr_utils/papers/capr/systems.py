"""CAPR's systems: what each is, its training on passages of the training notes, its scores and its speed (CAPR §4)."""

from __future__ import annotations

import tempfile
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import faiss
import numpy as np
import pandas as pd
import safetensors.torch
import torch
from torch import nn
from torch.func import functional_call
from tqdm.auto import tqdm

from drehr_utils import artifacts, errors, pipeline
from drehr_utils.config import CaprSystem, StageConfig
from drehr_utils.data.notes import clean
from drehr_utils.evaluation import medquad
from drehr_utils.evaluation.medquad import MedQuad
from drehr_utils.papers.capr import models
from drehr_utils.papers.capr.passages import (
    Passage,
    medquad_passages,
    note_passages,
    other_names_task,
    query_text,
    retrieval_task,
)
from drehr_utils.profiles import Profile
from drehr_utils.training import encoders, sampling, trainer

START, BI_SHARED, BI = pipeline.START, "CAPR-Bi-shared", "CAPR-Bi"
POLY, CROSS, CDV, CDV_FINETUNE = "CAPR-Poly", "CAPR-Cross", "CDV", "CDV-finetune"
CDV_FASTTEXT = "CDV+FastText"
TRAINED = (CDV_FASTTEXT, CDV, CDV_FINETUNE, BI_SHARED, BI, POLY, CROSS)  # in Table 3's order
CDV_JOINT, POLY_POOLED, BI_DOT = "CDV-joint", "CAPR-Poly-pooled", "CAPR-Bi-dot"
TRIED = (CDV_JOINT, POLY_POOLED, BI_DOT)  # of §3.2, which gives no figures
WHOLE, WHOLE_START = (f"{name}, whole sections" for name in (BI, START))  # of whole_sections
_COSTLY = (CROSS, CDV_FASTTEXT, CDV, CDV_FINETUNE, CDV_JOINT)  # they read pairs, or whole documents
HELD_OUT, OTHER_NAMES, MEDQUAD = "MIMIC-III", "other names", "MedQuAD"  # tasks; the first stands for the paper's
HALVES = ("entity alone", "aspect alone")  # of the held-out task's queries
HEADS = ("entity head", "aspect head")  # of CDV, each by itself


def whole_sections(profile: Profile) -> Profile:
    """The profile with passages as the paper has them: whole sections, of which 512 tokens are read (§4.1, §4.5)."""
    return replace(profile, capr=replace(profile.capr, passage_words=None, passage_tokens=512))


@cache
def passages(profile: Profile, split: str) -> list[Passage]:
    """A split's passages, labelled or not, in the notes' order."""
    notes, _, splits = pipeline.notes(profile)
    words, find = profile.capr.passage_words, pipeline.matcher(profile)
    chosen = [note for note in notes if splits[note.note_id] == split]
    if split != "train" and profile.max_eval_patients:
        chosen = chosen[: profile.max_eval_patients]
    return [passage for note in chosen for passage in note_passages(note, find, words)]


@cache
def training_passages(profile: Profile) -> tuple[list[Passage], str]:
    """The labelled passages that the systems learn from, and a digest of their texts, labels and documents."""
    labelled = [p for p in passages(profile, "train") if p.labelled][: profile.capr.passage_rows]
    return labelled, _digest(labelled)


def _digest(texts: Sequence[Passage]) -> str:
    documents = dict.fromkeys(p.document for p in texts)  # each once, not with each of its passages
    return artifacts.digest([replace(p, document=()) for p in texts], list(documents))


class Task(NamedTuple):
    """Queries, the pool of passages, and each query's candidates (positions in the pool, [queries, candidates])."""

    data: MedQuad
    pool: list[Passage]
    candidates: np.ndarray

    def sample(self, n: int, seed: int) -> Task:
        """n random queries and the passages that are candidates of theirs."""
        rows = np.sort(np.random.default_rng(seed).permutation(len(self.data.queries))[:n])
        used, places = np.unique(self.candidates[rows], return_inverse=True)
        places = places.reshape(len(rows), -1)
        return Task(self.data.part(rows, used), [self.pool[i] for i in used], places)


def _labelled_test_passages(profile: Profile) -> list[Passage]:
    pool = [p for p in passages(profile, "test") if p.labelled]
    if not pool:
        raise errors.DataError("CAPR: no test passage has an entity and an aspect; check the notes' headings")
    return pool


def held_out(profile: Profile) -> Task:
    """The task on the test notes, of a random sample of their labelled passages.

    Raises DataError where none of their passages is labelled."""
    size, pool = profile.capr, _labelled_test_passages(profile)
    chosen = np.sort(np.random.default_rng(profile.seed).permutation(len(pool))[: size.test_passages])
    pool = [pool[i] for i in chosen]
    data, candidates = retrieval_task(pool, size.test_queries, size.n_candidates, profile.seed)
    return Task(data, pool, candidates)


@cache
def other_names(profile: Profile) -> Task:
    """The harder task on the same notes, of all their labelled passages (passages.other_names_task).

    Raises DataError where none of their entities has another name."""
    size, pool = profile.capr, _labelled_test_passages(profile)
    graph = pipeline.knowledge_graph(profile)
    found = Task(*other_names_task(pool, graph, size.other_names, size.n_candidates, profile.seed))
    if not len(found.candidates):
        raise errors.DataError("CAPR: no test passage has an entity with another name; take more notes")
    return found


@cache
def medquad_data(profile: Profile) -> MedQuad | None:
    """MedQuAD's test split with queries in CAPR's form, "entity ; aspect"; None where the data aren't at hand."""
    data = medquad.load_medquad()
    if data is None:
        return None
    if profile.max_eval_patients:
        data = data.head(20 * profile.max_eval_patients)
    entity_of = {q: clean(text.removesuffix(f" {data.aspects[q]}")) for q, text in data.queries.items()}
    return replace(data, queries={q: query_text(e, data.aspects[q]) for q, e in entity_of.items()})


@cache
def medquad_task(profile: Profile) -> Task | None:
    """A random sample of MedQuAD's queries, with BM25's candidates and what the encoders read of their passages."""
    data, size = medquad_data(profile), profile.capr
    if data is None:
        return None
    candidates = medquad.medquad_candidates(data, medquad.term_scores(data, "BM25"), size.n_candidates)
    cut = medquad_passages(data, size.passage_words)  # amid their whole documents
    return Task(data, cut, candidates).sample(size.medquad_queries, profile.seed)


def tasks(profile: Profile, name: str) -> dict[str, Task]:
    """What a system is asked: fewer queries of the long tasks where it reads pairs or, of MedQuAD, whole documents."""
    size, found = profile.capr, {HELD_OUT: held_out(profile), OTHER_NAMES: other_names(profile)}
    if name == CROSS:
        found[OTHER_NAMES] = found[OTHER_NAMES].sample(size.costly_names, profile.seed)
    if (task := medquad_task(profile)) is not None:
        found[MEDQUAD] = task.sample(size.costly_queries, profile.seed) if name in _COSTLY else task
    return found


def halves(task: Task) -> dict[str, Task]:
    """The task with half of each query, the entity or the aspect."""
    asked = {q: text.rsplit(" ; ", 1) for q, text in task.data.queries.items()}
    entities = {q: query_text(entity, "") for q, (entity, _) in asked.items()}
    aspects = {q: query_text("", aspect) for q, (_, aspect) in asked.items()}
    parts = zip(HALVES, (entities, aspects), strict=True)
    return {half: task._replace(data=replace(task.data, queries=queries)) for half, queries in parts}


@cache
def word_vectors(profile: Profile, others: tuple[Passage, ...] = ()) -> models.WordVectors:
    """FastText's vectors, learnt from the sentences of the documents that the systems learn from, `others` or notes."""
    documents = dict.fromkeys(passage.document for passage in others or training_passages(profile)[0])
    return models.WordVectors(list(chain.from_iterable(documents)), profile.capr.word_buckets, seed=profile.seed)


def build(profile: Profile, system: CaprSystem, others: Sequence[Passage] = ()) -> nn.Module:
    """An untrained model of `system`, from the profile's starting encoder, or from word_vectors (of `others`)."""
    size = profile.capr
    lengths = dict(query_tokens=size.query_tokens, passage_tokens=size.passage_tokens)

    def start():
        return encoders.load_encoder(system.encoder or profile.encoder, profile.pooling)

    torch.manual_seed(profile.seed)  # of the weights that start at random
    vectors = partial(word_vectors, profile, tuple(others))
    makers: dict[str, Callable[[], nn.Module]] = {
        "start": lambda: models.BiEncoder(start(), **lengths),
        "bi-shared": lambda: models.BiEncoder(start(), marks=True, **lengths),
        "bi": lambda: models.BiEncoder(start(), start(), **lengths),
        "bi-dot": lambda: models.BiEncoder(start(), start(), dot=True, **lengths),
        "poly": lambda: models.PolyEncoder(start(), start(), **lengths),
        "poly-pooled": lambda: models.PolyEncoder(start(), start(), pooled=True, **lengths),
        "cross": lambda: models.CrossEncoder(start(), max_tokens=min(size.passage_tokens + 16, encoders.CHUNK_TOKENS)),
        "cdv": lambda: models.ContextualDocumentVectors(start(), start()),
        "cdv-fasttext": lambda: models.ContextualDocumentVectors(vectors(), vectors()),
        "cdv-finetune": lambda: models.ContextualDocumentVectors(start(), start(), frozen=False),
        "longformer-bi": lambda: models.LongEncoder(system.encoder, poly=False, query_tokens=size.query_tokens),
        "longformer-poly": lambda: models.LongEncoder(system.encoder, poly=True, query_tokens=size.query_tokens),
    }
    return makers[system.kind]().to("cuda" if torch.cuda.is_available() else "cpu")


@dataclass
class QueryPassagePairs:
    """Passages and a query for each: one of its entities at random, with its aspect (CAPR §3.1)."""

    labelled: Sequence[Passage]
    seed: int

    def query(self, epoch: int, i: int) -> str:
        passage = self.labelled[i]
        entity = np.random.default_rng([self.seed, 1 + epoch, i]).choice(len(passage.entities))
        return query_text(passage.entities[entity], passage.aspect)

    def __call__(self, keys: list[tuple[int, int]]) -> dict[str, list]:
        """A batch, of (epoch, index) keys."""
        return {"queries": [self.query(*key) for key in keys], "passages": [self.labelled[i] for _, i in keys]}


def train(model: nn.Module, labelled: Sequence[Passage], config: StageConfig, output: Path, **options) -> pd.DataFrame:
    """trainer.train with equation 1 on labelled passages (CAPR §4.3); `options`: its own. Returns step and loss."""
    schedule = sampling.batch_schedule([p.document_id for p in labelled], config)
    rounds = encoders.has_fast_bf16() and not torch.cuda.is_available()

    def loss(model: nn.Module, inputs: dict) -> torch.Tensor:
        # On a CPU trained encoders' weights are rounded once a step, as encoders.Rounded does: two thirds of the time.
        named = [(n, w) for n, w in model.named_parameters() if n.startswith("encoder") and w.requires_grad]
        rounded = {name: weight.bfloat16() for name, weight in named if rounds}
        scores = functional_call(model, rounded, (inputs["queries"], inputs["passages"]))
        return models.listwise_loss(scores.float())

    pairs = QueryPassagePairs(labelled, config.seed)
    return trainer.train(model, schedule, pairs, loss, config, output, **options)[["step", "loss"]]


def start_of(profile: Profile, name: str, others: Sequence[Passage] = ()) -> tuple[nn.Module, str]:
    """The model that a system's training goes on from, an untrained one or that of the system it comes `after`, and the
    key of what made that one, or ""."""
    system, key = profile.capr.system(name), ""
    model = build(profile, system, others)
    if system.after is not None:
        first, _, key = trained_model(profile, system.after, others)
        model.load_state_dict(first.state_dict())
    return model, key


def trained_model(
    profile: Profile, name: str, others: Sequence[Passage] = ()
) -> tuple[nn.Module, pd.DataFrame | None, str]:
    """A system's model, trained where its weights aren't in the cache; its loss curve; and the key of what made it.
    `others`: labelled passages to learn from in place of the notes'."""
    system, size = profile.capr.system(name), profile.capr
    model, first_key = start_of(profile, name, others)
    labelled, made_of = (others, _digest(others)) if others else training_passages(profile)
    start = encoders.identity(system.encoder or profile.encoder)
    lengths = [size.passage_tokens, size.query_tokens, *([size.word_buckets] if name == CDV_FASTTEXT else [])]
    key = artifacts.digest(build, train, system, start, profile.pooling, profile.seed, lengths, made_of)
    if system.config is None:
        return model, None, key
    key = artifacts.digest(key, first_key) if first_key else key
    folder = profile.cache / "capr" / f"{system.kind}-{key}"
    work = profile.cache / "checkpoints" / f"capr-{folder.name}"

    def make(partial: Path) -> None:
        curve = train(model, labelled, system.config, work, save_steps=profile.save_steps)
        safetensors.torch.save_model(model, str(partial / "model.safetensors"))
        curve.to_csv(partial / "loss.csv", index=False)

    artifacts.cached_folder(folder, make)
    artifacts.remove(work)
    safetensors.torch.load_model(model, folder / "model.safetensors")
    return model.eval(), pd.read_csv(folder / "loss.csv"), key


def on_the_way(profile: Profile, name: str, seed: int, points: int = 10) -> pd.DataFrame:
    """medquad.recall_values of a system on the way of a training with `seed` (of its batches and queries), on the tasks
    of the notes, with `task` and `step` (0: what it goes on from)."""
    found, config = [], replace(profile.capr.system(name).config, seed=seed)
    asked_of = {task: asked for task, asked in tasks(profile, name).items() if task != MEDQUAD}

    def measure(model: nn.Module, step: int) -> None:
        for task, asked in asked_of.items():
            scores = candidate_scores(model, [*asked.data.queries.values()], asked.pool, asked.candidates)
            values = medquad.recall_values(asked.data, asked.candidates, scores)
            found.append(values.assign(task=task, step=step))

    with tempfile.TemporaryDirectory() as folder:
        callbacks = [trainer.OnTheWay(measure, points)]
        train(start_of(profile, name)[0], training_passages(profile)[0], config, Path(folder), callbacks=callbacks)
    return pd.concat(found, ignore_index=True)


def candidate_scores(
    model: nn.Module, queries: Sequence[str], texts: Sequence[Passage], candidates: np.ndarray, block: int = 256
) -> np.ndarray:
    """The model's scores of each query's candidates, float32 [queries, candidates]; positions are into `texts`.

    A passage is encoded once, whatever the number of its queries, except by the Cross-encoder."""
    scores = np.empty(candidates.shape, dtype=np.float32)
    with _inference(model):
        if isinstance(model, models.CrossEncoder):
            order = np.argsort([len(texts[i].text) for i in candidates.flat], kind="stable")
            for part in tqdm(_blocks(order, block), unit="block"):
                pairs = [(queries[k // candidates.shape[1]], texts[candidates.flat[k]].text) for k in part]
                scores.flat[part] = model.pair_scores(pairs).float().cpu().numpy()
            return scores
        encoded = model.encode_queries(queries).split(block)
        for part in tqdm(_blocks(np.unique(candidates), block), unit="block"):
            passages_part = model.encode_passages([texts[i] for i in part])
            with torch.autocast(encoded[0].device.type, enabled=False):
                matched = torch.cat([model.match(q, passages_part) for q in encoded]).float().cpu().numpy()
            rows, columns = ((part[0] <= candidates) & (candidates <= part[-1])).nonzero()
            scores[rows, columns] = matched[rows, np.searchsorted(part, candidates[rows, columns])]
    return scores


def head_values(model: models.ContextualDocumentVectors, task: Task) -> dict[str, pd.DataFrame]:
    """What CDV finds by each of its heads alone, which is asked its own part of the query: medquad.recall_values."""
    found, queries = {}, list(task.data.queries.values())
    for head, model.shares in zip(HEADS, ((1.0, 0.0), (0.0, 1.0)), strict=True):
        scores = candidate_scores(model, queries, task.pool, task.candidates)
        found[head] = medquad.recall_values(task.data, task.candidates, scores)
    model.shares = (1.0, 1.0)
    return found


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    model.eval()
    device = next(model.parameters()).device.type
    with torch.no_grad(), torch.autocast(device, torch.bfloat16, enabled=encoders.has_fast_bf16()):
        yield


def _blocks(places: np.ndarray, size: int) -> list[np.ndarray]:
    return np.split(places, range(size, len(places), size))


def scored(
    profile: Profile, name: str, task: str, data: MedQuad, texts: Sequence[Passage], candidates: np.ndarray,
    others: Sequence[Passage] = (),
) -> np.ndarray:  # fmt: skip
    """`candidate_scores` of a trained system on a task, from the cache where they are there; `others` as there."""
    model, _, key = trained_model(profile, name, others)
    asked = list(data.queries.values())
    key = artifacts.digest(candidate_scores, key, asked, _digest(texts), candidates)
    return artifacts.cached_file(
        profile.cache / f"capr/scores/{task}-{profile.capr.system(name).kind}-{key}.npy",
        lambda: candidate_scores(model, asked, texts, candidates),
    )


def latency(model: nn.Module, query: str, texts: Sequence[Passage], n: int, repeats: int = 3) -> float:
    """Median seconds to rank `n` passages for one query (CAPR, Figure 3); `texts` are repeated to make `n`.

    Passages are encoded beforehand where the model can: into a FAISS index (Bi), as token embeddings (Poly). The
    Cross-encoder reads them all with the query."""
    rows = np.arange(n) % len(texts)
    with _inference(model):
        if isinstance(model, models.CrossEncoder):
            blocks = [[(query, texts[i].text) for i in part] for part in _blocks(rows, 64)]
        elif torch.is_tensor(ready := model.encode_passages(texts[:n])):
            index = faiss.IndexFlatIP(ready.shape[1])
            index.add(ready[rows].float().cpu().numpy())
        else:
            ready = tuple(part[rows] for part in ready)

        def search() -> None:
            if isinstance(model, models.CrossEncoder):
                for pairs in blocks:
                    model.pair_scores(pairs).cpu()
                return
            encoded = model.encode_queries([query])
            if torch.is_tensor(ready):
                index.search(encoded.float().cpu().numpy(), min(n, 10))
            else:
                with torch.autocast(encoded.device.type, enabled=False):
                    model.match(encoded, ready).topk(min(n, 10)).indices.cpu()

        search()  # not timed: the first run sets up threads and buffers
        return float(np.median(timeit.repeat(search, number=1, repeat=repeats)))


def measured_latency(profile: Profile, texts: Sequence[Passage]) -> pd.DataFrame:
    """`system, passages, seconds` of Bi, Poly and Cross on this machine; measured once, then read from the cache."""
    size = profile.capr
    sizes = size.latency_passages, size.latency_limit, size.passage_tokens
    key = artifacts.digest(measured_latency, sizes, encoders.identity(profile.encoder), encoders.describe_device())

    def measure() -> pd.DataFrame:
        query, rows = query_text("chest pain", "history of present illness"), []
        for name in (BI, POLY, CROSS):
            kind = name.removeprefix("CAPR-").lower()  # untrained: time doesn't depend on the weights' values
            model, repeats = build(profile, CaprSystem(name, kind)), 3 if name == CROSS else 30
            for n in size.latency_passages:
                if name != CROSS or n <= max(size.latency_limit, min(size.latency_passages)):
                    rows.append((name, n, latency(model, query, texts, n, repeats)))
        return pd.DataFrame(rows, columns=["system", "passages", "seconds"])

    return artifacts.cached_file(profile.cache / f"capr/latency-{key}.parquet", measure)
