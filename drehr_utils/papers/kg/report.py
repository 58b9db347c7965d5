"""Rows of notebook 12's tables: systems beside one another and beside the paper's figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from drehr_utils.config import PairConfig
from drehr_utils.evaluation import intervals, tables
from drehr_utils.papers.kg import pair_training
from drehr_utils.papers.kg.linking import TestSet
from drehr_utils.papers.kg.runs import Model, recall
from drehr_utils.papers.kg.systems import graphs, load, zero_shot_setting
from drehr_utils.papers.kg.tasks import Task, icd10_parent, icd10_sections, text_key
from drehr_utils.profiles import Profile
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.fusion import rank, tie_keys
from drehr_utils.training import encoders

PAPER_PERCENT = 100  # the paper prints recall as a fraction, our tables run from 0 to 100


def compare(
    profile: Profile, systems: Mapping[str, Model], test_sets: Mapping[str, TestSet], against: str
) -> pd.DataFrame:
    """Long-form rows (intervals.RESULT_COLUMNS) of systems (name -> recall's `model`) on test sets (group -> set).

    `setting` is the zero-shot scenario; p is against the system named `against`."""
    frames = []
    for group, test_set in test_sets.items():
        values = {name: recall(profile, test_set, model) for name, model in systems.items()}
        for name in systems:
            setting = zero_shot_setting(profile, name, test_set)
            base = None if name == against else values[against]
            frames.append(intervals.result_rows(name, setting, group, values[name], profile.resampling, base))
    return pd.concat(frames, ignore_index=True)


def gains(
    profile: Profile, systems: Mapping[str, Model], test_sets: Mapping[str, TestSet], against: Model
) -> pd.DataFrame:
    """What each system gains on the model `against`, as intervals.gain_rows; `setting` as in `compare`."""
    return pd.concat(
        intervals.gain_rows(name, zero_shot_setting(profile, name, test_set), group, *values, profile.resampling)
        for group, test_set in test_sets.items()
        for name, model in systems.items()
        for values in [[recall(profile, test_set, m) for m in (model, against)]]
    )


def ranked(
    profile: Profile, test_set: TestSet, systems: Mapping[str, str | Path], mentions: Sequence[str], k: int = 5
) -> pd.DataFrame:
    """The gold concepts of each mention, and the first `k` that each system finds for it; ✓ marks the gold ones."""
    searched, ties = list(test_set.concepts.values()), tie_keys(mentions, test_set.concepts)
    gold = {text: {c for m in test_set.mentions if text_key(m.text) == text_key(text) for c in m.concepts}
            for text in mentions}  # fmt: skip
    frames: dict[str, dict[str, list[str]]] = {}
    for text, concepts in gold.items():
        known = [f"{c} {test_set.concepts[c]}" for c in sorted(concepts)]
        frames[text] = {"gold": [*(known or [f"not one of {test_set.name}'s mentions"]), *[""] * k][:k]}
    for name, model in systems.items():
        if model == "BM25":
            scores = BM25(searched).scores(mentions)
        else:
            vectors = encoders.encode(load(profile, model), [*mentions, *searched], bf16=True)
            scores = vectors[: len(mentions)] @ vectors[len(mentions) :].T
        for mention, order in zip(mentions, rank(scores, ties), strict=True):
            shown = [f"{'✓ ' * (c in gold[mention])}{c} {text}" for c, text in test_set.concepts.items()]
            frames[mention][name] = [shown[i] for i in order[:k]]
    return pd.concat({m: pd.DataFrame(columns, index=range(1, k + 1)) for m, columns in frames.items()})


def gain_draws(
    profile: Profile, systems: Mapping[str, Model], test_sets: Mapping[str, TestSet], against: Model
) -> pd.DataFrame:
    """Bootstrap draws of every cell's gain over the model `against`, in points: [samples, (system, group, metric)].

    A draw takes gold concepts with repetition, each with all its mentions in every test set (one may be part of
    another) and the same for every system and metric, and trainings, the same for all where all have the same seeds. So
    any statistic over cells has its interval: take it draw by draw."""
    frames = []
    for group, test_set in test_sets.items():
        base = recall(profile, test_set, against)
        for name, model in systems.items():
            gains = intervals.gained(recall(profile, test_set, model), base)
            frames.append(gains.assign(system=name, group=group))
    found = pd.concat(frames, ignore_index=True).assign(seed=lambda rows: rows.get("seed", 0))  # NaN: of one training
    keys = {"index": ["query_id", "group", "search_id"], "columns": ["system", "metric"], "values": "value"}
    seeds = [part.pivot(**keys) for _, part in found.groupby("seed", dropna=False)]
    if not all(part.columns.equals(seeds[0].columns) for part in seeds):
        seeds = [found.pivot_table(**keys)]  # the systems have different trainings: the means over them
    cells, groups = np.stack(seeds, axis=1), seeds[0].index.get_level_values("group")  # [searches, seeds, cells]
    of = np.stack([groups == g for g in test_sets], axis=1).astype(float)
    sums = np.einsum("iv,ig->igv", cells.reshape(len(cells), -1), of).reshape(len(cells), -1)

    def means(sums: np.ndarray) -> np.ndarray:
        parts, n = sums[..., : -len(test_sets)], sums[..., -len(test_sets) :, None]
        return parts.reshape(*parts.shape[:-1], len(test_sets), -1) / n

    concepts = seeds[0].index.get_level_values("query_id")
    draws = intervals.bootstrap(np.hstack([sums, of]), means, profile.resampling, concepts.to_numpy())
    draws = draws.reshape(len(draws), len(test_sets), *cells.shape[1:])
    drawn = {g: intervals.over_seeds(draws[:, i], profile.resampling.seed) for i, g in enumerate(test_sets)}
    table = pd.concat({g: pd.DataFrame(part, columns=seeds[0].columns) for g, part in drawn.items()}, axis=1)
    return table.rename_axis(columns=["group", "system", "metric"]).reorder_levels([1, 0, 2], axis=1).sort_index(axis=1)


def naming_the_parent(test_set: TestSet) -> pd.DataFrame:
    """Of a test set against ICD-10-CM the mentions that name the code above their gold one, and not the gold one too:
    search_id, mention, gold, parent. What edges are to be good for (§6.3): mention and concept stand in is-a."""

    def named(code: str) -> set[str]:
        return {text_key(text) for texts in icd10_sections(code).values() for text in texts}

    rows = []
    for mention in test_set.mentions:
        gold, text = min(mention.concepts), text_key(mention.text)
        parent = icd10_parent(gold)
        if parent and text in named(parent) and text not in named(gold):
            rows.append((mention.id, mention.text, gold, parent))
    return pd.DataFrame(rows, columns=["search_id", "mention", "gold", "parent"])


def known_false_negatives(train: Task, config: PairConfig) -> dict[str, int]:
    """The negatives in the batches of a training on one task, and how many `mask_false_negatives` would leave out:
    the other pairs that pair_training.known_false_negatives finds."""
    keys = pd.factorize(np.array([text_key(text) for text in train.texts], dtype=object))[0]
    found = {"negatives": 0, "known to be false": 0}
    for step in pair_training.pair_schedule([len(train)], config):
        mention, concept = (keys[side[[i for _, i in step]]] for side in (train.mention, train.concept))
        found["negatives"] += len(step) * (len(step) - 1)
        found["known to be false"] += int(pair_training.known_false_negatives(mention, concept).sum()) - len(step)
    return found


# --- the paper's figures --------------------------------------------------------------------------------------------


def paper_names(profile: Profile) -> dict[str, str]:
    """Our names -> the paper's, where ours take the place of what we cannot have: graphs, and test sets."""
    pairs = zip(graphs(profile), ("SNOMED", "UMLS"), strict=True)
    systems = {f"{ours} {kind}": f"{theirs} {kind}" for ours, theirs in pairs for kind in ("Syn", "Graph")}
    return systems | {"OpenLinking": "3DNotes-ICD", "NCBI Disease": "MedMentions"}


def counts(profile: Profile, sizes: Mapping[str, Mapping[str, int]], table: int) -> pd.DataFrame:
    """Row -> column -> count as a long form, beside the paper's figures of Table 1 or 2."""
    ours = pd.DataFrame(sizes).T.astype(float).rename_axis(index="system", columns="metric").stack()
    long = ours.rename("ours").reset_index().assign(setting="", group="").reindex(columns=intervals.RESULT_COLUMNS)
    return tables.with_paper(long, tables.paper_figures("kg", table), paper_names(profile))
