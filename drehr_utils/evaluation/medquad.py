"""MedQuAD's test split (Abacha and Demner-Fushman, 2019; split by Arnold et al., 2020), for CAPR's Table 3.

The data are public but not ours to pass on: they are read from a folder outside the repository.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import ir_measures
import numpy as np
import pandas as pd
from ir_measures import Success
from sklearn.feature_extraction.text import TfidfVectorizer

from drehr_utils.data import public_data
from drehr_utils.evaluation.metrics import NO_PATIENT
from drehr_utils.files import read_json_lines, refuse
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.dense import dense_scores
from drehr_utils.search.fusion import rank, tie_keys

METRICS = {"R@1": Success @ 1, "R@5": Success @ 5}  # a query is answered by any of its passages; 97% have just one


@dataclass
class MedQuad:
    """Queries ("entity aspect"), their aspects, passages and qrels; insertion order is the score matrices' order."""

    queries: dict[str, str]
    aspects: dict[str, str]
    passages: dict[str, str]
    qrels: dict[str, dict[str, int]]

    def part(self, rows: Sequence[int], columns: Sequence[int]) -> MedQuad:
        """The queries and passages at these places of a score matrix."""
        ids, kept = list(self.queries), list(self.passages)
        queries, aspects, qrels = ({ids[i]: d[ids[i]] for i in rows} for d in (self.queries, self.aspects, self.qrels))
        return MedQuad(queries, aspects, {kept[i]: self.passages[kept[i]] for i in columns}, qrels)

    def head(self, n: int) -> MedQuad:
        """The first n queries and the first passages up to the last one that answers them; for quick runs."""
        answers = {p for query in list(self.queries)[:n] for p in self.qrels[query]}
        last = max((i for i, p in enumerate(self.passages) if p in answers), default=0)
        return self.part(range(len(self.queries))[:n], range(len(self.passages))[: max(last + 1, 64)])

    def every(self, n: int) -> MedQuad:
        """Every n-th query, all passages."""
        return self.part(range(0, len(self.queries), n), range(len(self.passages)))

    def without_every(self, n: int) -> MedQuad:
        """The queries that `every` leaves out, all passages."""
        return self.part([i for i in range(len(self.queries)) if i % n], range(len(self.passages)))


def load_medquad(folder: str | Path | None = None) -> MedQuad | None:
    """Read `medquad/queries.jsonl.gz` and `passages.jsonl.gz` from public_data.locate's folder; None without them.

    Queries without an answer among the passages are left out. Raises DataError (file, row, field) for a malformed line
    and an id that is there twice."""
    root = public_data.locate("medquad", folder)
    if root is None:
        return None
    data, asked = MedQuad({}, {}, {}, {}), set()
    for row, where, passage in read_json_lines(root / "medquad/passages.jsonl.gz", ("id", "text")):
        refuse(where, row, {"field id: there twice": passage["id"] in data.passages})
        data.passages[passage["id"]] = passage["text"]
    for row, where, query in read_json_lines(root / "medquad/queries.jsonl.gz", ("id", "entity", "aspect", "relevant")):
        no_list = not isinstance(query["relevant"], list)
        refuse(where, row, {"field relevant: no list of ids": no_list, "field id: there twice": query["id"] in asked})
        asked.add(query["id"])
        found = {passage_id: 1 for passage_id in query["relevant"] if passage_id in data.passages}
        if found:
            data.queries[query["id"]] = f"{query['entity']} {query['aspect']}"
            data.aspects[query["id"]] = query["aspect"]
            data.qrels[query["id"]] = found
    return data


def term_scores(data: MedQuad, method: str) -> np.ndarray:
    """CAPR's term-based baselines: float [queries, passages] of `BM25` or `TF-IDF` (cosine) over the passages' text."""
    if method == "BM25":
        return BM25(data.passages.values()).scores(data.queries.values())
    if method != "TF-IDF":
        raise ValueError(f"method {method!r} is neither BM25 nor TF-IDF")
    vectorizer = TfidfVectorizer()
    passages = vectorizer.fit_transform(data.passages.values())
    return (vectorizer.transform(data.queries.values()) @ passages.T).toarray()


def medquad_candidates(data: MedQuad, bm25: np.ndarray, n: int = 64) -> np.ndarray:
    """Passage positions [queries, n] that every method re-ranks: BM25's best `n` (CAPR §4.2), best first.

    CAPR doesn't say whether an answer that BM25 misses joins the candidates. It must: BM25's best 64 hold 91% of the
    answers here, and its Table 3 has R@5 of up to 97.95. So an answer that is missing takes the last places;
    among 16 candidates that is another answer's place for 3 of the 3,289 queries, among 64 for none."""
    order = rank(bm25, tie_keys(data.queries, data.passages))[:, :n]
    position = {passage_id: i for i, passage_id in enumerate(data.passages)}
    for best, query_id in zip(order, data.queries, strict=True):
        if missing := [position[i] for i in data.qrels[query_id] if position[i] not in best]:
            best[-len(missing) :] = missing
    return order


def best_first(data: MedQuad, candidates: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """Each query's candidates, passage positions [queries, n], in the order of their `scores` [queries, n]."""
    ties = np.take_along_axis(tie_keys(data.queries, data.passages), candidates, axis=1)
    return np.take_along_axis(candidates, rank(scores, ties), axis=1)


def recall_values(data: MedQuad, candidates: np.ndarray, scores: np.ndarray) -> pd.DataFrame:
    """R@1 and R@5 (0 or 100) of each query for `scores` [queries, n] of its candidates.

    Rows as metrics.single_patient's (`query_type` is the aspect), so intervals.result_rows gives means, intervals
    and the paired test."""
    ids, best = list(data.passages), best_first(data, candidates, scores)[:, :5]
    run = {q: {ids[p]: float(-i) for i, p in enumerate(row)} for q, row in zip(data.queries, best, strict=True)}
    names = {measure: name for name, measure in METRICS.items()}
    rows = [
        (q, q, data.aspects[q], names[measure], 100.0 * value)
        for q, measure, value in ir_measures.iter_calc(METRICS.values(), data.qrels, run)
    ]
    frame = pd.DataFrame(rows, columns=NO_PATIENT)
    return frame.sort_values(["metric", "search_id"], ignore_index=True)


def zero_shot(encode: Callable[[list[str]], np.ndarray], data: MedQuad, candidates: np.ndarray) -> pd.DataFrame:
    """recall_values of a dense encoder that saw none of these data (CAPR's cross-domain setting).

    `encode` maps texts to embeddings [texts, dim] and truncates long passages (CAPR: 512 tokens)."""
    used, places = np.unique(candidates, return_inverse=True)  # a passage that is nobody's candidate isn't encoded
    texts = list(data.passages.values())
    scores = dense_scores(encode(list(data.queries.values())), encode([texts[i] for i in used]))
    return recall_values(data, candidates, np.take_along_axis(scores, places.reshape(candidates.shape), axis=1))
