"""The steps of notebook 14, each made once and read from the cache after: labels, folds, models, retrieval tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer

from drehr_utils import artifacts, encoders, evaluation, negation, pipeline, radiology, tables, triplets
from drehr_utils.negation import PolarityPools
from drehr_utils.profiles import Profile
from drehr_utils.radiology import Encode, Entry, Report, SentenceQueries
from drehr_utils.retrieval import BM25
from drehr_utils.triplets import TripletConfig

MLM, OURS = "MiniLM (MLM-tuned)", "SBERT (radiology)"
IN_PAPER = {pipeline.START: "BioClinicalBERT", MLM: "BERT (fine-tuned)", OURS: "SBERT (ours)"}
IU = "IU X-ray"
ROLES = {"A": "IND", "B": "NIH", IU: "IND"}  # whose published figures stand beside ours; IU X-ray is the paper's IND
RATES, FOLD_STEPS, MLM_STEPS = (5e-5, 1e-4, 2e-4), 18, 60  # of the open profile: what 12 minutes on two cores allow


@dataclass(frozen=True)
class Settings:
    """A profile's sizes. `best`, the best row of the paper's Table 1, trains the models of Tables 2 to 4."""

    best: TripletConfig
    rates: tuple[float, ...]  # learning rates tried on dev, collection A's folds; see chosen
    table1: tuple[TripletConfig, ...]
    table1_iu: tuple[TripletConfig, ...]
    mlm: TripletConfig
    reports: int | None = None  # of each open collection; None: all
    iu_reports: int | None = None  # the first ones
    coded_minimum: int = 10  # reports that carry a coders' heading, for it to be a query


def settings(profile: Profile) -> Settings:
    """Appendix A's hyper-parameters under `mimic`; under `open` as many steps as its budget allows, the same in every
    row of Table 1 and twice as many for Tables 2 to 4, which train on twice the entries."""
    paper = TripletConfig(seed=profile.seed)
    if profile.name == "mimic":
        return _settings(paper, (paper.learning_rate,), replace(paper, learning_rate=5e-5, epochs=5), None, None)
    base, mlm = replace(paper, max_steps=FOLD_STEPS), replace(paper, learning_rate=5e-5, epochs=5, max_steps=MLM_STEPS)
    if profile.name == "smoke":
        made = _settings(replace(base, max_steps=1), RATES[:2], replace(mlm, max_steps=1), 12, 12)
        return replace(made, coded_minimum=1, table1=made.table1[:2], table1_iu=made.table1[1:2])
    return _settings(base, RATES, mlm, None, 500)


def _settings(
    base: TripletConfig, rates: tuple[float, ...], mlm: TripletConfig, reports: int | None, iu_reports: int | None
) -> Settings:
    rows = [replace(base, hard=False, mega_batch=32), replace(base, mega_batch=32)]
    rows += [replace(base, mega_batch=size) for size in (64, 128, 256, 512)]
    best = replace(base, mega_batch=128, max_steps=base.max_steps and 2 * base.max_steps)
    return Settings(best, rates, tuple(rows), (rows[0], rows[1], rows[3]), mlm, reports, iu_reports)


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


def test_entries(profile: Profile, collection: str) -> list[Entry]:
    """What Tables 2 and 3 test on. Of IU X-ray, the sentences that A's model was trained on are left out here, not from
    training, so that the model is the same with and without IU X-ray."""
    found = entries(profile, collection)
    return radiology.without_sentences(found, training_entries(profile, "A", "B")) if collection == IU else found


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
    config = config or chosen(profile, settings(profile).best)
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
                triplets.train_triplets(model, train, config, progress=False)
            return radiology.query_values(task, radiology.dense_query_scores(radiology.remembering(model), task))

        path = profile.cache / "radiology" / f"fold-{key}.csv"
        values = artifacts.cached(path, make, lambda frame, p: frame.to_csv(p, index=False), _read_values)
        frames.append(values)
    return pd.concat(frames, ignore_index=True)


@cache
def rate_search(profile: Profile) -> pd.DataFrame:
    """Dev: the mAP of HS/MB(128) on collection A's two folds, for each learning rate that the profile tries."""
    sizes, rows = settings(profile), []
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


def training_plan(profile: Profile, collection: str = "A") -> pd.DataFrame:
    """What each row of Table 1 trains on: entries of the first fold, epochs of them, entries of a pool, and how often
    unmatched sentences are chosen. A pool can't be larger than the fold, nor chosen from twice within its steps."""
    halves = radiology.split_by_finding(entries(profile, collection), profile.seed)
    n, rows = len(radiology.without_sentences(halves[1], halves[0])), {}
    for config in settings(profile).table1:
        pools, steps = triplets.mega_batches(n, config)
        used = sorted({pool for step in steps for pool, _ in step})
        rows[config.label] = {
            "entries": n,
            "steps": len(steps),
            "epochs": round(sum(map(len, steps)) / n, 1),
            "entries a pool": max(len(pools[i]) for i in used),
            "times chosen": len(used),
        }
    return pd.DataFrame(rows).T


def gain(values: pd.DataFrame, base: pd.DataFrame, metric: str = "mAP") -> tuple[float, float]:
    """Mean difference of a metric over the same queries, and its p (evaluation.paired_randomization_test)."""
    ours, theirs = (frame[frame["metric"] == metric] for frame in (values, base))
    p = evaluation.result_rows("", "", "", ours, theirs)["p"].item()
    return ours["value"].mean() - theirs["value"].mean(), p


def verdict(difference: float, p: float) -> str:
    """Of the claim that the difference is positive."""
    if p >= tables.SIGNIFICANT:
        return "is not shown"
    return "holds" if difference > 0 else "fails"


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


def drehr_models(profile: Profile) -> dict[str, SentenceTransformer]:
    """DR.EHR's models as notebook 05 left them, by system; those that aren't there are named and left out.

    They aren't trained here: that takes half an hour, and this notebook's subject is another."""
    found = {}
    for system in (pipeline.PUBLISHED, pipeline.IMPROVED):
        folder = profile.cache / "models" / pipeline.FOLDER_OF_SYSTEM[system]
        if folder.exists():
            found[system] = encoders.load_encoder(folder)
        else:
            print(f"{system} is left out: run notebook 05 first (./run_all.sh --only 05), then this one again.")
    return found


X, NO_X, SHIFT = "X", "no X", "no X less X"


def awareness_values(
    corpus: dict[str, str], queries: dict[str, str], pools: PolarityPools, score: Score
) -> dict[str, pd.DataFrame]:
    """negation.denial_above for the queries as they are (X), with "no" before them, and what the "no" changes."""
    values = {}
    for group, texts in {X: list(queries.values()), NO_X: [f"no {text}" for text in queries.values()]}.items():
        task = SentenceQueries(list(corpus.values()), {text: np.array([], dtype=int) for text in texts})
        scores = score(task)[[task.queries.index(text) for text in texts]]
        values[group] = negation.denial_above(pools, list(queries), list(corpus), scores)
    return values | {SHIFT: values[NO_X].assign(value=values[NO_X]["value"] - values[X]["value"])}


def awareness_rows(
    task: tuple[dict[str, str], dict[str, str], PolarityPools], setting: str, systems: dict[str, Score]
) -> pd.DataFrame:
    """Long-form rows of every system on a polarity_task; p against the starting encoder, which must be among them."""
    values = {system: awareness_values(*task, score) for system, score in systems.items()}
    frames = []
    for system, by_group in values.items():
        for group, found in by_group.items():
            start = None if system == pipeline.START else values[pipeline.START][group]
            frames.append(evaluation.result_rows(system, setting, group, found, start))
    return pd.concat(frames, ignore_index=True)
