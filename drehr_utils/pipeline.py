"""The steps that several notebooks share, each made once and read from the cache after.

Any notebook can ask for any step, so that it runs by itself; the notebook that explains a step is named beside it.
Those of notebooks 01 to 04 are corpus's, and have their names here too.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback

from drehr_utils import artifacts
from drehr_utils.config import START as START
from drehr_utils.config import Recipe, StageConfig
from drehr_utils.corpus import abbreviations as abbreviations
from drehr_utils.corpus import answers as answers
from drehr_utils.corpus import chunks as chunks
from drehr_utils.corpus import generated_entities as generated_entities
from drehr_utils.corpus import graph_digest as graph_digest
from drehr_utils.corpus import knowledge_graph as knowledge_graph
from drehr_utils.corpus import matcher as matcher
from drehr_utils.corpus import notes as notes
from drehr_utils.corpus import requests as requests
from drehr_utils.corpus import stage1_sets as stage1_sets
from drehr_utils.corpus import stage2_sets as stage2_sets
from drehr_utils.corpus import stage_positives
from drehr_utils.data.benchmark import Benchmark, load_benchmark, subset
from drehr_utils.data.benchmark import benchmark_folder as benchmark_folder
from drehr_utils.errors import DataError
from drehr_utils.knowledge import normalization
from drehr_utils.profiles import Profile
from drehr_utils.search.dense import dense_scores
from drehr_utils.training import encoders, general_texts, positives, sampling, trainer
from drehr_utils.training.positives import PositiveSets
from drehr_utils.training.sampling import TrainingSet

READING = "MiniLM, names read"  # the graph's opaque names, no training
PUBLISHED, WITHOUT_STAGE1, IMPROVED = "DR.EHR", "DR.EHR w/o stage I", "DR.EHR (improved)"
FOLDER_OF_SYSTEM = {PUBLISHED: "drehr", WITHOUT_STAGE1: "drehr-without-stage1", IMPROVED: "drehr-improved"}


def systems(profile: Profile) -> tuple[str, ...]:
    """Those that a run of the profile trains; a short one leaves the row without stage I to the records."""
    return tuple(system for system in FOLDER_OF_SYSTEM if not (profile.short and system == WITHOUT_STAGE1))


def row_name(profile: Profile, system: str) -> str:
    """The row of the model that a run of the profile trains: the record has the plain name where it is a short one."""
    if not profile.short:
        return system
    return f"{system[:-1]}, short)" if system.endswith(")") else f"{system} (short)"


def recipe_of(profile: Profile, system: str) -> Recipe:
    return {
        PUBLISHED: profile.published,
        WITHOUT_STAGE1: profile.without_stage1(),
        IMPROVED: profile.improved,
    }[system]


REMEMBERED = 100_000  # texts and sets of concepts of which training remembers what the graph says


def graph_view(profile: Profile) -> sampling.GraphView:
    """What training asks of the graph."""
    graph, find = knowledge_graph(profile), matcher(profile).find
    remembered = lru_cache(maxsize=REMEMBERED)

    @remembered
    def concepts_in(text: str) -> frozenset[str]:
        return frozenset(c for match in find(text) if len(ids := graph.term2cui[match.term]) == 1 for c in ids)

    def concepts_of(term: str) -> frozenset[str]:
        ids = graph.cuis(term)
        return frozenset(ids) if len(ids) == 1 else frozenset()

    @remembered
    def broader(ids: frozenset[str]) -> frozenset[str]:
        parents = {parent for cui in ids for parent in graph.hypernyms(cui)}
        return frozenset(parents | {above for cui in parents for above in graph.hypernyms(cui)})

    @remembered
    def related(ids: frozenset[str]) -> frozenset[str]:
        return frozenset(other for cui in ids for _, other in graph.related(cui))

    return sampling.GraphView(
        spans=lambda text: positives.alias_spans(text, graph, matcher(profile)),
        concepts_in=concepts_in,
        broader=broader,
        related=related,
        concepts_of=concepts_of,
    )


# --- notebook 05 -------------------------------------------------------------------------------------------------


def starting_encoder(profile: Profile) -> SentenceTransformer:
    return encoders.load_encoder(profile.encoder, profile.pooling, instruction=profile.instruction)


def start_digest(profile: Profile) -> str:
    """Of the starting encoder: a folder's content, a package's version, a hub's name."""
    instruction = [profile.instruction] if profile.instruction else []
    return artifacts.digest(encoders.identity(profile.encoder), profile.pooling, *instruction)


def reading_names(profile: Profile) -> SentenceTransformer:
    """The starting encoder, untrained, with a tokenizer that reads the graph's opaque names (normalization)."""
    encoder = starting_encoder(profile)
    normalization.read_names(encoder, normalization.opaque_names(knowledge_graph(profile), encoder.tokenizer))
    return encoder


def _untrained(profile: Profile, recipe: Recipe) -> SentenceTransformer:
    return reading_names(profile) if recipe.read_names else starting_encoder(profile)


def _train(
    profile: Profile,
    stage: str,
    positive_sets: Callable[[], PositiveSets],
    config: StageConfig,
    start: Path | SentenceTransformer,
    folder: Path,
    callbacks: Sequence[TrainerCallback] = (),
) -> Path:
    """One trained stage's folder, made when it isn't there: the model, its loss curve in loss.csv, what a trainer.Curve
    among the callbacks measured, and in stage.json what it is made of, where, and the minutes since its last start."""
    work = profile.cache / "checkpoints" / folder.name
    rank, world = trainer.ranks()
    if world != profile.processes and not folder.exists():
        raise DataError(
            f"profile {profile.name}, field processes: it trains with {profile.processes}, and this is one of {world}; "
            f"first run torchrun --nproc-per-node {profile.processes} -m drehr_utils.use.train with this profile"
        )

    def make(partial: Path | None = None) -> None:
        encoder = encoders.load_encoder(start) if isinstance(start, Path) else start
        if profile.lora:
            encoders.add_lora(encoder, config.seed)
        sets = positive_sets()
        view = graph_view(profile) if config.uses_graph else None
        others = general_texts.general_texts(knowledge_graph(profile), seed=profile.seed) if config.keep else ()
        data = TrainingSet.build(chunks(profile, stage=stage), sets, config.sources, view, others)
        reference = starting_encoder(profile).requires_grad_(False) if config.keep else None
        begun = time.time()
        options = {"activation_checkpointing": True} if profile.gradient_checkpointing else {}
        options |= {"deepspeed": str(profile.deepspeed)} if profile.deepspeed else {}
        options |= {"dataloader_num_workers": profile.loaders} if profile.loaders else {}
        loss = trainer.train_stage(
            encoder, data, config, work, reference=reference, save_steps=profile.save_steps, callbacks=callbacks,
            **options,
        )  # fmt: skip
        if partial is None:
            return
        encoders.save_encoder(encoder, partial)
        loss.to_csv(partial / "loss.csv", index=False)
        made_of = {"start": start.name if isinstance(start, Path) else profile.encoder, "chunks": len(data)}
        made_of["minutes"] = round((time.time() - begun) / 60, 1)
        made_of["machine"] = f"{platform.machine()}, {encoders.describe_device()}"
        (partial / "stage.json").write_text(json.dumps(made_of | {"config": asdict(config)}, indent=1))

    if rank == 0:  # which alone writes
        artifacts.cached_folder(folder, make)
        artifacts.remove(work)
    elif not folder.exists():
        make()
    trainer.wait_for_all()
    return folder


def train_recipe(
    profile: Profile, recipe: Recipe, callbacks: Sequence[TrainerCallback] = ()
) -> tuple[Path, dict[str, pd.DataFrame]]:
    """The model folder that a recipe gives, trained where it isn't there, and the curve of each stage.

    Stages that two recipes share are trained once; the folder tells one with callbacks, whose curve has what a
    trainer.Curve measured, from one without, and not which they were."""
    models = profile.cache / "models"
    key = artifacts.digest(
        train_recipe, start_digest(profile), profile.lora, profile.seed, profile.processes, profile.deepspeed,
        bool(callbacks),
    )  # fmt: skip
    if recipe.read_names:
        key = artifacts.digest(key, "names read", graph_digest(profile))
    folder, curves = None, {}
    for stage, config in (("stage1", recipe.stage1), ("stage2", recipe.stage2)):
        if config is not None:
            graph = graph_digest(profile) if config.uses_graph else None
            made_of, sets = stage_positives(profile, stage)
            others = general_texts.made_of() if config.keep else None
            key = artifacts.digest(key, stage, config, made_of, graph, others)
            start = folder or _untrained(profile, recipe)
            folder = _train(profile, stage, sets, config, start, models / f"{stage}-{key}", callbacks)
            curves[stage] = pd.read_csv(folder / "loss.csv")
    if folder is None:
        folder = artifacts.cached_folder(
            models / f"untrained-{key}", lambda partial: encoders.save_encoder(_untrained(profile, recipe), partial)
        )
    return folder, curves


def trained_model(profile: Profile, system: str) -> tuple[Path, dict[str, pd.DataFrame]]:
    """A system's model folder (sentence-transformers' layout) and its loss curves; see train_recipe.

    `data/cache/<profile>/models/<system>` is a link to the folder, so that
    `SentenceTransformer("data/cache/open/models/drehr-improved")` just works."""
    folder, curves = train_recipe(profile, recipe_of(profile, system))
    link(profile.cache / "models" / FOLDER_OF_SYSTEM[system], folder)
    return folder, curves


def budget(recipe: Recipe, curves: dict[str, pd.DataFrame]) -> int:
    """How many chunks each process of a training was shown, repeats counted."""
    return sum(len(curve) * getattr(recipe, stage).batch_size for stage, curve in curves.items())


def link(name: Path, folder: Path) -> None:
    """A relative link, replaced in one step."""
    fresh = name.with_name(f"partial-{os.getpid()}-{name.name}")  # two notebooks may make the same link at once
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name, target_is_directory=True)
    os.replace(fresh, name)


# --- notebook 08 -------------------------------------------------------------------------------------------------


def benchmark(profile: Profile, split: str) -> Benchmark:
    """The benchmark's split, cut to the profile's number of patients."""
    loaded = load_benchmark(benchmark_folder(profile), split)
    return subset(loaded, loaded.patients[: profile.max_eval_patients]) if profile.max_eval_patients else loaded


def dense(encoder: SentenceTransformer, bench: Benchmark, progress: bool = False, bf16: bool = False) -> np.ndarray:
    """The encoder's score matrix, float32 [queries, chunks], cosine similarities; bf16: see encoders.encode."""
    # Small batches stay in a CPU's cache: a fifth faster there for chunks than the default of 64.
    options = {"progress": progress, "bf16": bf16} | ({"batch_size": 16} if encoder.device.type == "cpu" else {})
    queries = encoders.encode(encoder, list(bench.queries.values()), prompt=encoders.query_prompt(encoder), **options)
    return dense_scores(queries, encoders.encode(encoder, list(bench.corpus.values()), **options))


# --- notebooks 08 to 11 ------------------------------------------------------------------------------------------


def model_scores(profile: Profile, folder: Path | None, bench: Benchmark) -> np.ndarray:
    """`dense` of a trained model's folder (None: the starting encoder), computed once for all notebooks."""
    model = folder.resolve() if folder else start_digest(profile)
    key = artifacts.digest(dense, model, *bench.texts)

    def make() -> np.ndarray:
        return dense(encoders.load_encoder(folder) if folder else starting_encoder(profile), bench)

    return artifacts.cached_file(profile.cache / f"scores/{key}.npy", make)
