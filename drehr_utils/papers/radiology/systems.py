"""The steps of notebook 14, each made once and read from the cache after: labels, folds, models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pandas as pd
from sentence_transformers import SentenceTransformer

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
from drehr_utils.papers.radiology.reports import OPEN_CXR, Report, read_collection, read_iu_xray
from drehr_utils.papers.radiology.retrieval import dense, query_values, remembering
from drehr_utils.profiles import Profile
from drehr_utils.training import encoders

IU = "IU X-ray"


@cache
def collections(profile: Profile) -> dict[str, list[Report]]:
    """The reports by collection: A, B, and IU X-ray where the user has it."""
    sizes = profile.radiology
    read = {c.upper(): read_collection(OPEN_CXR / f"collection_{c}.jsonl.gz")[: sizes.reports] for c in "ab"}
    iu = read_iu_xray()
    return read if iu is None else read | {IU: iu[: sizes.iu_reports]}


@cache
def entries(profile: Profile, collection: str) -> list[Entry]:
    sentences = (s for report in collections(profile)[collection] for s in report.sentences)
    return label_entries(sentences, FindingMatcher(read_lexicon()))


def training_entries(profile: Profile, train: str, test: str) -> list[Entry]:
    """A collection's entries less the sentences that the other one has too ("No pneumothorax.")."""
    return without_sentences(entries(profile, train), entries(profile, test))


def test_entries(profile: Profile, collection: str) -> list[Entry]:
    """What Tables 2 and 3 test on. Of IU X-ray, the sentences that A's model was trained on are left out here, not from
    training, so that the model is the same with and without IU X-ray."""
    found = entries(profile, collection)
    return without_sentences(found, training_entries(profile, "A", "B")) if collection == IU else found


# --- models ------------------------------------------------------------------------------------------------------


def _trained(
    profile: Profile, kind: str, train: Callable[..., SentenceTransformer], data: Sequence, config: TripletConfig
) -> SentenceTransformer:
    """The starting encoder after `train` on the data, kept in the cache."""
    key = artifacts.digest(train, data, config, pipeline.start_digest(profile))

    def make(partial: Path) -> None:
        encoders.save_encoder(train(pipeline.starting_encoder(profile), data, config), partial)

    return encoders.load_encoder(artifacts.cached_folder(profile.cache / f"models/radiology-{kind}-{key}", make))


def sbert(profile: Profile, train: Sequence[Entry]) -> SentenceTransformer:
    """The starting encoder trained with triplets on the entries (§2.3)."""
    return _trained(profile, "sbert", triplets.train_triplets, train, chosen(profile, profile.radiology.best))


def mlm_tuned(profile: Profile, collection: str) -> SentenceTransformer:
    """The starting encoder tuned on a collection's sentences, without labels (§3.3)."""
    said = list(dict.fromkeys(s for report in collections(profile)[collection] for s in report.sentences))
    return _trained(profile, "mlm", triplets.tune_mlm, said, profile.radiology.mlm)


# --- Table 1 -----------------------------------------------------------------------------------------------------


def fold_values(profile: Profile, collection: str, config: TripletConfig | None) -> pd.DataFrame:
    """Two-fold cross-validation by finding (§3.2): the values of each query by a model that saw only the other half's
    findings, and none of the test half's sentences. `config` None: the starting encoder."""
    a, b = split_by_finding(entries(profile, collection), profile.seed)
    folds = ((without_sentences(b, a), a), (without_sentences(a, b), b))
    return pd.concat([_fold_values(profile, *fold, config) for fold in folds], ignore_index=True)


def _fold_values(profile: Profile, train: list[Entry], test: list[Entry], config: TripletConfig | None) -> pd.DataFrame:
    def make() -> pd.DataFrame:
        model, task = pipeline.starting_encoder(profile), SentenceQueries.of(test)
        if config:
            triplets.train_triplets(model, train, config, progress=False)
        return query_values(task, dense(remembering(model))(task.queries, task.sentences))

    start = pipeline.start_digest(profile)
    key = artifacts.digest(fold_values, test, [train, config] if config else None, start)
    return artifacts.cached_file(profile.cache / f"radiology/fold-{key}.parquet", make)


@cache
def rate_search(profile: Profile) -> pd.DataFrame:
    """Dev: the mAP of HS/MB(128) on collection A's two folds, for each learning rate that the profile tries."""
    sizes, rows = profile.radiology, []
    for rate in sizes.rates:
        config = replace(sizes.best, max_steps=sizes.table1[0].max_steps, learning_rate=rate)
        values = fold_values(profile, "A", config).query("metric == 'mAP'")
        by_kind = values.groupby("query_type")["value"].mean()
        rows.append({"learning rate": rate, **by_kind, "all": values["value"].mean()})
    return pd.DataFrame(rows)


def chosen(profile: Profile, config: TripletConfig) -> TripletConfig:
    """The configuration with the learning rate that has the highest mAP over all queries in rate_search."""
    rates = rate_search(profile)
    return replace(config, learning_rate=float(rates.loc[rates["all"].idxmax(), "learning rate"]))
