"""What a search for "M" or "no M" finds: tasks, systems and their values (Radiology §3.3 to §3.5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import ir_measures
import numpy as np
import pandas as pd
import scipy.stats
from ir_measures import AP, Rprec
from sentence_transformers import SentenceTransformer

from drehr_utils.config import Resampling
from drehr_utils.errors import DataError
from drehr_utils.evaluation import intervals
from drehr_utils.evaluation.metrics import NO_PATIENT
from drehr_utils.papers.radiology.entries import Entry, SentenceQueries, is_negative, unique_sentences
from drehr_utils.papers.radiology.reports import Report
from drehr_utils.search.bm25 import BM25, words
from drehr_utils.search.fusion import rank, tie_keys
from drehr_utils.training import encoders

METRICS = {AP: "mAP", Rprec: "mR"}  # §3.3's recall is R-precision: correct among as many as there are to find
Encode = Callable[[Sequence[str]], np.ndarray]  # texts -> unit-length embeddings [texts, dim]
Score = Callable[[Sequence[str], Sequence[str]], np.ndarray]  # queries, sentences -> scores [queries, sentences]


def query_values(task: SentenceQueries, scores: np.ndarray) -> pd.DataFrame:
    """Average precision and recall (R-precision) of each query, 0 to 100, for scores [queries, sentences].

    Rows as metrics.single_patient's; `query_type` is positive or negative."""
    ids = [str(i) for i in range(len(task.sentences))]
    rows, order = [], rank(scores, tie_keys(task.queries, ids))
    for (query, matched), best_first in zip(task.matched.items(), order, strict=True):
        run = {query: {ids[i]: -float(place) for place, i in enumerate(best_first)}}
        kind = "negative" if is_negative(query) else "positive"
        for value in ir_measures.iter_calc(METRICS, {query: {ids[i]: 1 for i in matched}}, run):
            rows.append((query, query, kind, METRICS[value.measure], 100 * value.value))
    return pd.DataFrame(rows, columns=NO_PATIENT)


def result_rows(
    system: str, setting: str, values: pd.DataFrame, resampling: Resampling, start: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Long-form rows (intervals.RESULT_COLUMNS) for positive, negative and all queries; p against `start`."""
    frames = []
    for group in ("positive", "negative", "all"):
        part, base = (f if f is None or group == "all" else f[f["query_type"] == group] for f in (values, start))
        if len(part):
            frames.append(intervals.result_rows(system, setting, group, part, resampling, base))
    none = pd.DataFrame(columns=[*intervals.RESULT_COLUMNS, intervals.DIFFERENCE])
    return pd.concat(frames, ignore_index=True) if frames else none


def negative_less_positive(values: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """How far the mean over negative queries is above that over positive ones, one row for claims.judge.

    `values` of one metric, of a system or of what it gains on another. The interval draws findings, with both queries
    that one may have; p is the permutation test's, of which queries are the negative ones."""
    mean = values.groupby("query_id", as_index=False)["value"].mean()
    negative, finding = mean["query_id"].map(is_negative), mean["query_id"].str.removeprefix("no ")
    groups = [mean.assign(query_id=finding)[part] for part in (negative, ~negative)]
    test = scipy.stats.permutation_test(
        [group["value"] for group in groups],
        lambda a, b, axis: a.mean(axis=axis) - b.mean(axis=axis),
        n_resamples=resampling.randomizations,
        rng=resampling.seed,
    )
    return pd.DataFrame([intervals.contrast(*groups, resampling) | {"p": test.pvalue}])


# --- systems -----------------------------------------------------------------------------------------------------


def remembering(encoder: SentenceTransformer) -> Encode:
    """The encoder as a function that encodes a text once, however many tables ask for it; bfloat16 where that is fast,
    as in training."""
    known: dict[str, np.ndarray] = {}

    def encode(texts: Sequence[str]) -> np.ndarray:
        if not texts:
            return np.zeros((0, encoder.get_embedding_dimension()), np.float32)
        if fresh := [text for text in dict.fromkeys(texts) if text not in known]:
            known.update(zip(fresh, encoders.encode(encoder, fresh, bf16=True), strict=True))
        return np.stack([known[text] for text in texts])

    return encode


def dense(encode: Encode) -> Score:
    """Cosine similarities, float32."""
    return lambda queries, sentences: encode(queries) @ encode(sentences).T


def bm25(queries: Sequence[str], sentences: Sequence[str]) -> np.ndarray:
    return BM25(sentences).scores(queries)


def separations(encode: Encode, entries: Sequence[Entry]) -> np.ndarray:
    """§3.4, of each entry: similarity of its sentence with its query, less that with the query of opposite negation."""
    opposite = [Entry(e.sentence, not e.present, e.finding).query for e in entries]
    own, other = encode([e.query for e in entries]), encode(opposite)
    return ((own - other) * encode([e.sentence for e in entries])).sum(axis=1)


def separation_values(encode: Encode, entries: Sequence[Entry]) -> pd.DataFrame:
    """`separations` times 100, rows as query_values' with an entry's number for the search and its finding for the
    query: entries of a finding are no independent sample."""
    about = [(str(i), e.finding, "positive" if e.present else "negative", "separation") for i, e in enumerate(entries)]
    values = pd.DataFrame(about, columns=NO_PATIENT[:-1])
    return values.assign(value=(100 * separations(encode, entries)).round(2))


# --- §3.5: labels that no lexicon made ---------------------------------------------------------------------------


def judged_task(reports: Sequence[Report], judgments: tuple[list[str], dict[str, list[str]]]) -> SentenceQueries:
    """The task on those of `reports` that were judged: all their unique sentences are candidates, labelled or not.

    Raises DataError where a judgment names a sentence that isn't there."""
    here = {r.uid for r in reports} & set(judgments[0])
    said = {f"{r.uid}#{k}": s for r in reports if r.uid in here for k, s in enumerate(r.sentences)}
    unique = unique_sentences(said.values())
    at, matched = {key: i for i, key in enumerate(unique)}, {}
    for query, ids in judgments[1].items():
        ids = [i for i in ids if i.partition("#")[0] in here]
        if unknown := [i for i in ids if i not in said]:
            raise DataError(f"sentence_judgments.tsv, query {query!r}: no sentence {unknown[0]}; judge the text again")
        if ids:
            matched[query] = np.array(sorted({at[tuple(words(said[i]))] for i in ids}))
    return SentenceQueries(list(unique.values()), matched)


def coded_values(reports: Sequence[Report], minimum: int, score: Score) -> pd.DataFrame:
    """IU X-ray by its human coders, where a report with text scores as its best sentence. Values as query_values'.

    Queries are the coders' headings, put in reading order ("Hernia, Hiatal"), that name a finding and that at least
    `minimum` of the reports carry."""
    texts = [r for r in reports if r.sentences]
    carried: dict[str, list[int]] = defaultdict(list)
    for i, report in enumerate(texts):
        for problem in report.problems:
            carried[" ".join(reversed(problem.lower().split(", ")))].append(i)
    coded = {q: np.array(rows) for q, rows in carried.items() if len(rows) >= minimum and q not in NOT_A_FINDING}
    at = {s: i for i, s in enumerate(dict.fromkeys(s for r in texts for s in r.sentences))}
    scores = score(list(coded), list(at))
    best = np.stack([scores[:, [at[s] for s in r.sentences]].max(axis=1) for r in texts], axis=1)
    return query_values(SentenceQueries([r.uid for r in texts], coded), best)


# Headings of IU X-ray's coders that name a place or the image, or nothing: no query for a finding.
NOT_A_FINDING = frozenset(
    "normal,no indexing,lung,thoracic vertebrae,spine,aorta,diaphragm,thoracic aorta,markings,density,deformity,"
    "costophrenic angle,technical quality of image unsatisfactory,cardiac shadow,thickening,mediastinum,shoulder,"
    "medical device,pulmonary artery,trachea,ribs,bone and bones,humerus,clavicle,pleura,lucency,heart,hilum,neck,"
    "breast,abdomen,thorax,lumbar vertebrae,cervical vertebrae,lower lobe,blood vessels,heart ventricles,heart atria,"
    "surgical instruments,foreign bodies,funnel chest,bronchi,lung volumes".split(",")
)
