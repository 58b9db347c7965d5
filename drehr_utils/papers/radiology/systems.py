"""The steps of notebook 14, each made once and read from the cache after: labels, folds, models."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
from sentence_transformers import SentenceTransformer
from torch.nn import Module

from drehr_utils import artifacts, pipeline
from drehr_utils.config import TripletConfig
from drehr_utils.papers.radiology import triplets
from drehr_utils.papers.radiology.entries import (
    Entry,
    SentenceQueries,
    label_entries,
    split_by_finding,
    without_sentences,
)
from drehr_utils.papers.radiology.lexicon import FindingMatcher, read_lexicon
from drehr_utils.papers.radiology.reports import OPEN_CXR, Report, read_collection, read_iu_xray, read_judgments
from drehr_utils.papers.radiology.retrieval import (
    Encode,
    Score,
    coded_values,
    dense,
    judged_task,
    query_values,
    remembering,
    separation_values,
)
from drehr_utils.profiles import Profile, cached_by
from drehr_utils.training import encoders, weights
from drehr_utils.training.trainer import OnTheWay

OPEN, IU = ("A", "B"), "IU X-ray"
PLAIN = "SmolLM2"  # a language model: it never learnt to embed, as the paper's BERTs had not


SIZES = "radiology.reports", "radiology.iu_reports"  # what collections reads of a profile


@cached_by(*SIZES)
def collections(profile: Profile) -> dict[str, list[Report]]:
    """The reports by collection: A, B, and IU X-ray where the user has it."""
    sizes = profile.radiology
    read = {c: read_collection(OPEN_CXR / f"collection_{c.lower()}.jsonl.gz")[: sizes.reports] for c in OPEN}
    iu = read_iu_xray()
    return read if iu is None else read | {IU: iu[: sizes.iu_reports]}


@cached_by(*SIZES)
def entries(profile: Profile, collection: str) -> list[Entry]:
    sentences = (s for report in collections(profile)[collection] for s in report.sentences)
    return label_entries(sentences, FindingMatcher(read_lexicon()))


def training_entries(profile: Profile, collection: str) -> list[Entry]:
    """A collection's entries less the sentences that another open one has too ("No pneumothorax.").

    What A and B share with IU X-ray is left out of IU X-ray, for training and for tests, so that their models are the
    same with and without it."""
    others = [entry for other in OPEN if other != collection for entry in entries(profile, other)]
    return without_sentences(entries(profile, collection), others)


def test_entries(profile: Profile, collection: str) -> list[Entry]:
    """What Tables 2 and 3 test on."""
    return training_entries(profile, IU) if collection == IU else entries(profile, collection)


# --- models ------------------------------------------------------------------------------------------------------


def start_of(profile: Profile, system: str) -> Profile:
    """The profile with the encoder that the system starts from: PLAIN (last states, mean) where its name says so."""
    return replace(profile, encoder=weights.SMOLLM2, pooling="mean") if PLAIN in system else profile


def _trained(
    profile: Profile, kind: str, train: Callable[..., SentenceTransformer], data: Sequence, config: TripletConfig
) -> SentenceTransformer:
    """The starting encoder after `train` on the data, kept in the cache."""
    key = artifacts.digest(train, data, config, pipeline.start_digest(profile))

    def make(partial: Path) -> None:
        encoders.save_encoder(train(pipeline.starting_encoder(profile), data, config), partial)

    return encoders.load_encoder(artifacts.cached_folder(profile.cache / f"models/radiology-{kind}-{key}", make))


def sbert(profile: Profile, collection: str, config: TripletConfig | None = None) -> SentenceTransformer:
    """The starting encoder trained with triplets on a collection's entries (§2.3); default: the chosen best row."""
    config = config or chosen(profile, profile.radiology.best)
    return _trained(profile, "sbert", triplets.train_triplets, training_entries(profile, collection), config)


def lm_tuned(profile: Profile, collection: str, config: TripletConfig) -> SentenceTransformer:
    """The starting encoder tuned on a collection's sentences, without labels (§3.3)."""
    return _trained(profile, "lm", triplets.tune_lm, said_in(profile, collection), config)


def said_in(profile: Profile, collection: str) -> list[str]:
    """Every sentence of a collection, labelled or not, once."""
    return list(dict.fromkeys(s for report in collections(profile)[collection] for s in report.sentences))


# --- Table 1 -----------------------------------------------------------------------------------------------------


def folds(profile: Profile, collection: str) -> list[tuple[list[Entry], list[Entry]]]:
    """Two-fold cross-validation by finding (§3.2), each fold's entries to train and to test with: the test half's
    sentences are left out of training."""
    a, b = split_by_finding(entries(profile, collection), profile.seed)
    return [(without_sentences(b, a), a), (without_sentences(a, b), b)]


def fold_values(profile: Profile, collection: str, config: TripletConfig | None) -> pd.DataFrame:
    """The values of each query by a model that saw only the other half's findings. `config` None: the starting
    encoder."""
    return pd.concat([_fold_values(profile, *f, config) for f in folds(profile, collection)], ignore_index=True)


def _fold_values(profile: Profile, train: list[Entry], test: list[Entry], config: TripletConfig | None) -> pd.DataFrame:
    def make() -> pd.DataFrame:
        model, task = pipeline.starting_encoder(profile), SentenceQueries.of(test)
        if config:
            triplets.train_triplets(model, train, config, progress=False)
        return query_values(task, dense(remembering(model))(task.queries, task.sentences))

    start = pipeline.start_digest(profile)
    key = artifacts.digest(fold_values, test, [train, config] if config else None, start)
    return artifacts.cached_file(profile.cache / f"radiology/fold-{key}.parquet", make)


def on_the_way(profile: Profile, collection: str, config: TripletConfig, points: int = 9) -> pd.DataFrame:
    """The mAP of each query on the way of `fold_values`' trainings, with its `step` (the start's: 0) and whether its
    finding is one of those that `train`, asked of the sentences trained on, or was `kept aside`."""
    found = []

    def measure(model: SentenceTransformer, step: int) -> None:
        for findings, task in asked.items():
            values = query_values(task, dense(remembering(model))(task.queries, task.sentences))
            found.append(values[values["metric"] == "mAP"].assign(findings=findings, step=step))

    for train, test in folds(profile, collection):
        asked = {"train": SentenceQueries.of(train), "kept aside": SentenceQueries.of(test)}
        callbacks = [OnTheWay(measure, points)]
        triplets.train_triplets(pipeline.starting_encoder(profile), train, config, callbacks=callbacks)
    return pd.concat(found, ignore_index=True)


def tuning_on_the_way(profile: Profile, collection: str, tested: str, head_first: bool = False) -> pd.DataFrame:
    """What MLM tuning on a collection makes of the encoder, with its `step`: the mAP of each query of another
    collection, and its own task there, the masked-language-modelling `loss` on each sentence that `collection` lacks
    (`search_id`: the sentence's place among these)."""
    encoder, found = pipeline.starting_encoder(profile), []
    task, own = SentenceQueries.of(test_entries(profile, tested)), said_in(profile, collection)
    known = set(own)
    new = [sentence for sentence in said_in(profile, tested) if sentence not in known]

    def measure(model: Module, step: int) -> None:
        values = query_values(task, dense(remembering(encoder))(task.queries, task.sentences))
        loss = triplets.masked_loss(model, encoder.tokenizer, new)
        at = pd.Index(new).get_indexer(loss.index).astype(str)
        losses = pd.DataFrame({"search_id": at, "query_id": at, "query_type": "", "metric": "loss", "value": loss})
        found.append(pd.concat([values[values["metric"] == "mAP"], losses]).assign(step=step))

    triplets.tune_lm(encoder, own, profile.radiology.mlm, True, head_first, measure)
    return pd.concat(found, ignore_index=True)


def searched(profile: Profile) -> list[list[TripletConfig]]:
    """Table 1's rows, each at all learning rates, where the profile has several: first the paper's best, which chooses
    the rate for all; the others, to see whether they would choose another."""
    sizes = profile.radiology
    others = [row for row in sizes.table1 if row.label != sizes.best.label]
    rows = [replace(sizes.table1[0], hard=True, mega_batch=sizes.best.mega_batch), *others]
    tried = [[replace(row, learning_rate=rate) for rate in sizes.rates] for row in rows]
    return tried if len(sizes.rates) > 1 else []


@cache
def rate_search(profile: Profile) -> pd.DataFrame:
    """Dev: the `rates` of the paper's best row on collection A's two folds."""
    best = searched(profile)[0]
    found = [fold_values(profile, "A", c).assign(system=c.label, rate=c.learning_rate) for c in best]
    return rates(pd.concat(found, ignore_index=True))


def rates(values: pd.DataFrame) -> pd.DataFrame:
    """The mAP of each learning rate that was tried for a row, from its values with the columns `system` and `rate`."""
    ap = values[values["metric"] == "mAP"].groupby(["system", "rate"])["value"]
    by_kind = values[values["metric"] == "mAP"].groupby(["system", "rate", "query_type"])["value"].mean().unstack()
    return by_kind.assign(all=ap.mean()).reset_index().rename(columns={"system": "row", "rate": "learning rate"})


def chosen(profile: Profile, config: TripletConfig, tried: pd.DataFrame | None = None) -> TripletConfig:
    """The configuration with the learning rate at which the paper's best row has the highest mAP over all queries in
    `tried` (default: rate_search)."""
    if not (rows := searched(profile)):
        return replace(config, learning_rate=profile.radiology.rates[0])
    tried = rate_search(profile) if tried is None else tried
    best = tried[tried["row"] == rows[0][0].label]
    return replace(config, learning_rate=float(best.loc[best["all"].idxmax(), "learning rate"]))


# --- Tables 2 to 4 -----------------------------------------------------------------------------------------------


def across_values(profile: Profile, tests: Iterable[str], score: Score, encode: Encode | None = None) -> pd.DataFrame:
    """A system's values on the collections `tests`: those of query_values with the columns `table` and `tested`;
    Table 3's only where there is an encoder (`encode`), a row an entry."""
    parts, judgments = [], read_judgments()
    for tested in tests:
        reports = collections(profile)[tested]
        said = test_entries(profile, tested)
        task = SentenceQueries.of(said)
        parts.append(query_values(task, score(task.queries, task.sentences)).assign(table=2, tested=tested))
        if encode:
            parts.append(separation_values(encode, said).assign(table=3, tested=tested))
        if tested == IU:
            by_hand = coded_values(reports, profile.radiology.coded_minimum, score)
        else:
            by_read = judged_task(reports, judgments)
            by_hand = query_values(by_read, score(by_read.queries, by_read.sentences))
        parts.append(by_hand.assign(table=4, tested=tested))
    return pd.concat(parts, ignore_index=True)
