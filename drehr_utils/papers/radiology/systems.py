"""The steps of notebook 14, each made once and read from the cache after: labels, folds, models, retrieval tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer

from drehr_utils import artifacts, pipeline
from drehr_utils.config import TripletConfig
from drehr_utils.evaluation import intervals, tables
from drehr_utils.papers.radiology import awareness, triplets
from drehr_utils.papers.radiology.awareness import PolarityPools
from drehr_utils.papers.radiology.reports import (
    OPEN_CXR,
    Encode,
    Entry,
    Report,
    SentenceQueries,
    coded_task,
    collection_entries,
    dense_query_scores,
    query_values,
    read_collection,
    read_iu_xray,
    read_lexicon,
    remembering,
    report_sentences,
    split_by_finding,
    without_sentences,
)
from drehr_utils.profiles import Profile
from drehr_utils.search.bm25 import BM25
from drehr_utils.training import encoders

MLM, OURS = "MiniLM (MLM-tuned)", "SBERT (radiology)"
IN_PAPER = {pipeline.START: "BioClinicalBERT", MLM: "BERT (fine-tuned)", OURS: "SBERT (ours)"}
IU = "IU X-ray"
ROLES = {"A": "IND", "B": "NIH", IU: "IND"}  # whose published figures stand beside ours; IU X-ray is the paper's IND


# --- data --------------------------------------------------------------------------------------------------------


@cache
def reports(profile: Profile) -> dict[str, list[Report]]:
    """The collections by name: A, B, and IU X-ray where the user has it."""
    sizes = profile.radiology
    read = {c.upper(): read_collection(OPEN_CXR / f"collection_{c}.jsonl.gz") for c in "ab"}
    read = {name: found[: sizes.reports] for name, found in read.items()}
    iu = read_iu_xray()
    return read if iu is None else read | {IU: iu[: sizes.iu_reports]}


@cache
def entries(profile: Profile, collection: str) -> list[Entry]:
    return collection_entries(reports(profile)[collection], read_lexicon())


def training_entries(profile: Profile, train: str, test: str) -> list[Entry]:
    """A collection's entries less the sentences that the other one has too ("No pneumothorax.")."""
    return without_sentences(entries(profile, train), entries(profile, test))


def test_entries(profile: Profile, collection: str) -> list[Entry]:
    """What Tables 2 and 3 test on. Of IU X-ray, the sentences that A's model was trained on are left out here, not from
    training, so that the model is the same with and without IU X-ray."""
    found = entries(profile, collection)
    return without_sentences(found, training_entries(profile, "A", "B")) if collection == IU else found


def beside(figures: pd.DataFrame, roles: dict[str, str]) -> pd.DataFrame:
    """The paper's figures under our collections' names: `roles` maps ours to the paper's, which may repeat."""
    parts = [figures[figures["setting"] == theirs].assign(setting=ours) for ours, theirs in roles.items()]
    return pd.concat(parts, ignore_index=True)


# --- models ------------------------------------------------------------------------------------------------------


def _model(
    profile: Profile, kind: str, made_of: Sequence[object], make: Callable[[], SentenceTransformer]
) -> SentenceTransformer:
    folder = profile.cache / "models" / f"radiology-{kind}-{artifacts.digest(*made_of, _start(profile))}"
    return encoders.load_encoder(artifacts.cached_folder(folder, lambda p: encoders.save_encoder(make(), p)))


def _start(profile: Profile) -> list[object]:
    """What stands for the starting encoder in a digest."""
    return [encoders.identity(profile.encoder), profile.pooling]


def sbert(profile: Profile, train: Sequence[Entry], config: TripletConfig | None = None) -> SentenceTransformer:
    """The starting encoder trained with triplets on the entries (§2.3), kept in the cache."""
    config = config or chosen(profile, profile.radiology.best)
    start, made_of = pipeline.starting_encoder, (triplets.train_triplets, list(train), config)
    return _model(profile, "sbert", made_of, lambda: triplets.train_triplets(start(profile), train, config))


def mlm_tuned(profile: Profile, collection: str) -> SentenceTransformer:
    """The starting encoder tuned on a collection's sentences, without labels (§3.3)."""
    said = list(dict.fromkeys(s for r in reports(profile)[collection] for s in report_sentences(r)))
    start, config = pipeline.starting_encoder, profile.radiology.mlm
    made_of = (triplets.tune_mlm, said, config)
    return _model(profile, "mlm", made_of, lambda: triplets.tune_mlm(start(profile), said, config))


# --- Table 1 -----------------------------------------------------------------------------------------------------


def fold_values(profile: Profile, collection: str, config: TripletConfig | None) -> pd.DataFrame:
    """Two-fold cross-validation by finding (§3.2): the values of each query by a model that saw only the other half's
    findings, and none of the test half's sentences. `config` None: the starting encoder."""
    halves = split_by_finding(entries(profile, collection), profile.seed)
    frames = []
    for fold, test in enumerate(halves):
        train = without_sentences(halves[1 - fold], test)
        task = SentenceQueries.of(test)
        made_of = [train, config] if config else []
        key = artifacts.digest(fold_values, test, *made_of, _start(profile))

        def make(train: list[Entry] = train, task: SentenceQueries = task) -> pd.DataFrame:
            model = pipeline.starting_encoder(profile)
            if config:
                triplets.train_triplets(model, train, config, progress=False)
            return query_values(task, dense_query_scores(remembering(model), task))

        frames.append(artifacts.cached_file(profile.cache / f"radiology/fold-{key}.parquet", make))
    return pd.concat(frames, ignore_index=True)


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


def training_plan(profile: Profile, collection: str = "A") -> pd.DataFrame:
    """What each row of Table 1 trains on: entries of the first fold, epochs of them, entries of a pool, and how often
    unmatched sentences are chosen. A pool can't be larger than the fold, nor chosen from twice within its steps."""
    halves = split_by_finding(entries(profile, collection), profile.seed)
    n, rows = len(without_sentences(halves[1], halves[0])), {}
    for config in profile.radiology.table1:
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
    """Mean difference of a metric over the same queries, and its p (intervals.paired_randomization_test)."""
    ours, theirs = (frame[frame["metric"] == metric] for frame in (values, base))
    p = intervals.result_rows("", "", "", ours, theirs)["p"].item()
    return ours["value"].mean() - theirs["value"].mean(), p


def verdict(difference: float, p: float) -> str:
    """Of the claim that the difference is positive."""
    if p >= tables.SIGNIFICANT:
        return "is not shown"
    return "holds" if difference > 0 else "fails"


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

    mean = intervals.result_rows(system, collection, "all", frame(values), None if start is values else frame(start))
    spread = mean.assign(metric="std", ours=100 * values.std(), low=np.nan, high=np.nan, p=np.nan)
    return pd.concat([mean, spread], ignore_index=True)


def coded_values(profile: Profile, score: Score) -> pd.DataFrame:
    """IU X-ray by its coders (reports.coded_task): a report scores as its best sentence. Values as query_values'."""
    texts, coded = coded_task(reports(profile)[IU], profile.radiology.coded_minimum)
    pieces = [report_sentences(r) for r in texts]
    unique = list(dict.fromkeys(s for piece in pieces for s in piece))
    scores, at = score(SentenceQueries(unique, coded)), {s: i for i, s in enumerate(unique)}
    best = np.stack([scores[:, [at[s] for s in piece]].max(axis=1) for piece in pieces], axis=1)
    return query_values(SentenceQueries([r.uid for r in texts], coded), best)


def dense(encode: Encode) -> Score:
    return lambda task: dense_query_scores(encode, task)


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

    pools = awareness.polarity_pools(bench.corpus, wanted, names_of)
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
    """awareness.denial_above for the queries as they are (X), with "no" before them, and what the "no" changes."""
    values = {}
    for group, texts in {X: list(queries.values()), NO_X: [f"no {text}" for text in queries.values()]}.items():
        task = SentenceQueries(list(corpus.values()), {text: np.array([], dtype=int) for text in texts})
        scores = score(task)[[task.queries.index(text) for text in texts]]
        values[group] = awareness.denial_above(pools, list(queries), list(corpus), scores)
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
            frames.append(intervals.result_rows(system, setting, group, found, start))
    return pd.concat(frames, ignore_index=True)
