"""The steps of notebook 14, each made once and read from the cache after: labels, folds, models, retrieval tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer

from drehr_utils import artifacts, encoders, evaluation, negation, pipeline, radiology, triplets
from drehr_utils.negation import PolarityPools
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.radiology import Encode, Entry, Report, SentenceQueries
from drehr_utils.retrieval import BM25
from drehr_utils.triplets import TripletConfig

MLM, OURS = "MiniLM (MLM-tuned)", "SBERT (radiology)"
IN_PAPER = {pipeline.START: "BioClinicalBERT", MLM: "BERT (fine-tuned)", OURS: "SBERT (ours)"}
IU = "IU X-ray"
ROLES = {"A": "IND", "B": "NIH", IU: "IND"}  # whose published figures stand beside ours; IU X-ray is the paper's IND
SEARCH = ROOT / "data/radiology_search.csv"  # what dev said: collection A's two folds


@dataclass(frozen=True)
class Settings:
    """A profile's sizes. The best row of Table 1 trains the models of Tables 2 to 4."""

    best: TripletConfig
    table1: tuple[TripletConfig, ...]
    table1_iu: tuple[TripletConfig, ...]
    mlm: TripletConfig
    reports: int | None = None  # of each open collection; None: all
    iu_reports: int | None = None  # the first ones
    coded_minimum: int = 10  # reports that carry a coders' heading, for it to be a query


def settings(profile: Profile) -> Settings:
    """Appendix A's hyper-parameters under `mimic`; under `open` the rate that dev chose and as many steps as its
    budget allows, the same in every row of Table 1."""
    paper = TripletConfig(seed=profile.seed)
    if profile.name == "mimic":
        return _settings(paper, replace(paper, learning_rate=5e-5, epochs=5), None, None)
    base = replace(paper, learning_rate=1e-4, max_steps=30)
    mlm = replace(paper, learning_rate=5e-5, epochs=5, max_steps=80)
    if profile.name == "smoke":
        made = _settings(replace(base, max_steps=1), replace(mlm, max_steps=1), 12, 12)
        return replace(made, coded_minimum=1, table1=made.table1[:2], table1_iu=made.table1[1:2])
    return _settings(base, mlm, None, 1500)


def _settings(base: TripletConfig, mlm: TripletConfig, reports: int | None, iu_reports: int | None) -> Settings:
    rows = [replace(base, hard=False, mega_batch=32), replace(base, mega_batch=32)]
    rows += [replace(base, mega_batch=size) for size in (64, 128, 256, 512)]
    best = replace(base, mega_batch=128, max_steps=base.max_steps and 2 * base.max_steps)
    return Settings(best, tuple(rows), (rows[0], rows[1], rows[3]), mlm, reports, iu_reports)


# --- data --------------------------------------------------------------------------------------------------------


@cache
def reports(profile: Profile) -> dict[str, list[Report]]:
    """The collections by name: A, B, and IU X-ray where the user has it."""
    sizes = settings(profile)
    read = {c.upper(): radiology.read_collection(radiology.OPEN_CXR / f"collection_{c}.jsonl.gz") for c in "ab"}
    read = {name: found[: sizes.reports] for name, found in read.items()}
    iu = radiology.read_iu_xray()
    return read if iu is None else read | {IU: iu[: sizes.iu_reports]}


@cache
def entries(profile: Profile, collection: str) -> list[Entry]:
    return radiology.collection_entries(reports(profile)[collection], radiology.read_lexicon())


def training_entries(profile: Profile, train: str, test: str) -> list[Entry]:
    """A collection's entries less the sentences that the other one has too ("No pneumothorax.")."""
    return radiology.without_sentences(entries(profile, train), entries(profile, test))


def beside(figures: pd.DataFrame, roles: dict[str, str]) -> pd.DataFrame:
    """The paper's figures under our collections' names: `roles` maps ours to the paper's, which may repeat."""
    parts = [figures[figures["setting"] == theirs].assign(setting=ours) for ours, theirs in roles.items()]
    return pd.concat(parts, ignore_index=True)


# --- models ------------------------------------------------------------------------------------------------------


def _key(profile: Profile, said: Sequence[Entry] | Sequence[str], config: TripletConfig) -> str:
    text = radiology.digest_of(said) if said and isinstance(said[0], Entry) else "\n".join(said)
    return artifacts.digest(triplets, encoders, text, config, profile.encoder, profile.pooling)


def _model(profile: Profile, kind: str, key: str, make: Callable[[], SentenceTransformer]) -> SentenceTransformer:
    folder = profile.cache / "models" / f"radiology-{kind}-{key}"
    return artifacts.cached(folder, make, encoders.save_encoder, encoders.load_encoder)


def sbert(profile: Profile, train: Sequence[Entry], config: TripletConfig | None = None) -> SentenceTransformer:
    """The starting encoder trained with triplets on the entries (§2.3), kept in the cache."""
    config = config or settings(profile).best
    key = _key(profile, train, config)
    start = pipeline.starting_encoder
    return _model(profile, "sbert", key, lambda: triplets.train_triplets(start(profile), train, config))


def mlm_tuned(profile: Profile, collection: str) -> SentenceTransformer:
    """The starting encoder tuned on a collection's sentences, without labels (§3.3)."""
    said = list(dict.fromkeys(s for r in reports(profile)[collection] for s in radiology.report_sentences(r)))
    config = settings(profile).mlm
    key = _key(profile, said, config)
    return _model(profile, "mlm", key, lambda: triplets.tune_mlm(pipeline.starting_encoder(profile), said, config))


# --- Table 1 -----------------------------------------------------------------------------------------------------


def fold_values(profile: Profile, collection: str, config: TripletConfig | None) -> pd.DataFrame:
    """Two-fold cross-validation by finding (§3.2): the values of each query by a model that saw only the other half's
    findings, and none of the test half's sentences. `config` None: the starting encoder."""
    halves = radiology.split_by_finding(entries(profile, collection), profile.seed)
    frames = []
    for fold, test in enumerate(halves):
        train = radiology.without_sentences(halves[1 - fold], test)
        task = SentenceQueries.of(test)
        key = artifacts.digest(radiology.query_values, radiology.digest_of(test), _key(profile, train, config) if config
                               else f"{profile.encoder} {profile.pooling}")  # fmt: skip

        def make(train: list[Entry] = train, task: SentenceQueries = task) -> pd.DataFrame:
            model = pipeline.starting_encoder(profile)
            if config:
                triplets.train_triplets(model, train, config)
            return radiology.query_values(task, radiology.dense_query_scores(radiology.remembering(model), task))

        path = profile.cache / "radiology" / f"fold-{key}.csv"
        values = artifacts.cached(path, make, lambda frame, p: frame.to_csv(p, index=False), _read_values)
        frames.append(values)
    return pd.concat(frames, ignore_index=True)


def _read_values(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False, dtype={"search_id": str, "query_id": str})


# --- Tables 2 to 4, negation awareness ---------------------------------------------------------------------------

Score = Callable[[SentenceQueries], np.ndarray]  # a task -> scores [queries, sentences]


def separation_rows(
    system: str, collection: str, said: Sequence[Entry], values: np.ndarray, start: np.ndarray
) -> pd.DataFrame:
    """Table 3's rows of a system, times 100: the mean with its interval over findings, and the standard deviation."""

    def frame(numbers: np.ndarray) -> pd.DataFrame:
        ids = [str(i) for i in range(len(said))]
        found = [e.finding for e in said]
        return pd.DataFrame(
            {"search_id": ids, "query_id": found, "query_type": "", "metric": "separation", "value": 100 * numbers}
        )

    mean = evaluation.result_rows(system, collection, "all", frame(values), None if start is values else frame(start))
    spread = mean.assign(metric="std", ours=100 * values.std(), low=np.nan, high=np.nan, p=np.nan)
    return pd.concat([mean, spread], ignore_index=True)


def coded_values(profile: Profile, score: Score) -> pd.DataFrame:
    """IU X-ray by its coders (radiology.coded_task): a report scores as its best sentence. Values as query_values'."""
    texts, coded = radiology.coded_task(reports(profile)[IU], settings(profile).coded_minimum)
    pieces = [radiology.report_sentences(r) for r in texts]
    unique = list(dict.fromkeys(s for piece in pieces for s in piece))
    scores, at = score(SentenceQueries(unique, coded)), {s: i for i, s in enumerate(unique)}
    best = np.stack([scores[:, [at[s] for s in piece]].max(axis=1) for piece in pieces], axis=1)
    return radiology.query_values(SentenceQueries([r.uid for r in texts], coded), best)


def dense(encode: Encode) -> Score:
    return lambda task: radiology.dense_query_scores(encode, task)


def bm25(task: SentenceQueries) -> np.ndarray:
    return BM25(task.sentences).scores(task.queries)


def polarity_task(profile: Profile, asked: str = "queries") -> tuple[dict[str, str], dict[str, str], PolarityPools]:
    """Chunks of OpenCliniQ's test split that affirm or deny a disease, the queries that have both, and which does what.

    `asked`: the benchmark's own disease `queries`, which rarely are denied, or the diseases and findings of the open
    graph (`concepts`). Drugs and procedures are left out: "stop the drug" is no denial of it. A concept is found by all
    its names in the graph but those of fewer than four letters, which mean too many things. Raises ValueError for
    another `asked`."""
    bench, graph = pipeline.benchmark(profile, "test"), pipeline.knowledge_graph(profile)
    if asked == "queries":
        wanted = {q: text for q, text in bench.queries.items() if bench.query_types[q] == "disease"}
    elif asked == "concepts":
        own = (c for c, sources in graph.sources.items() if "OPEN" in sources)
        wanted = {c: graph.cui2pt[c] for c in own if graph.types.get(c) in ("disease", "finding")}
    else:
        raise ValueError(f"asked {asked!r} is neither queries nor concepts")

    def names_of(query: str) -> list[str]:
        concepts = graph.cuis(query)
        return [n for n in graph.synonyms(concepts[0]) if len(n) > 3] if len(concepts) == 1 else []

    pools = negation.polarity_pools(bench.corpus, wanted, names_of)
    ids = list(bench.corpus)
    used = sorted({int(i) for pool in (pools.affirmed, pools.denied) for rows in pool.values() for i in rows})
    at = {old: new for new, old in enumerate(used)}

    def moved(pool: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {query: np.array([at[int(i)] for i in rows]) for query, rows in pool.items()}

    corpus, queries = {ids[i]: bench.corpus[ids[i]] for i in used}, {q: wanted[q] for q in pools.affirmed}
    return corpus, queries, PolarityPools(moved(pools.affirmed), moved(pools.denied))
