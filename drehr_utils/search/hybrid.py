"""Names in text, and the hybrid: an encoder's similarity joined with what the graph's names and BM25 find (ours).

    hybrid = Hybrid.load("data/cache/open/models/drehr-hybrid")
    hybrid.index(texts)
    hybrid.search("shortness of breath", top=10)

A chunk's score needs the chunk, the query and what an index keeps anyway (BM25's word statistics), never the other
chunks' scores, so that it is the same in a note, in a list of candidates, and in the whole corpus.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Self

import numpy as np
from ahocorasick_rs import AhoCorasick, MatchKind
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer

from drehr_utils.errors import DataError
from drehr_utils.files import naming
from drehr_utils.knowledge.graph import KnowledgeGraph, load_bios, normalize_term, save_bios
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.dense import dense_scores
from drehr_utils.search.expansion import expand_query
from drehr_utils.search.windows import best_windows, blended, encode_windows
from drehr_utils.training.encoders import load_encoder, query_prompt

HALF = 20.0  # the BM25 score of an expanded query that counts half
WEIGHTS_FILE, GRAPH_FOLDER = "hybrid.json", "graph"


@dataclass(frozen=True)
class Weights:
    """Of the logarithm of names found, and of BM25's share, beside a cosine similarity: the chunk's own and, by the
    share `windows` (0: none is looked for), its best window's."""

    names: float = 0.3
    words: float = 0.2
    windows: float = 0.0


GRID = tuple(Weights(*pair) for pair in product((0.1, 0.2, 0.3, 0.4, 0.6, 0.8), (0.0, 0.1, 0.2, 0.4, 0.8, 1.2)))
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
WINDOWS_ALONE = tuple(Weights(0, 0, share) for share in SHARES)
WINDOWS_GRID = tuple(replace(weights, windows=share) for weights in GRID for share in SHARES)
WORDS_GRID = tuple(Weights(0, *pair) for pair in product((0.0, 0.1, 0.2, 0.4, 0.8, 1.2), SHARES))  # no names, no graph
UNTUNED = Weights(windows=0.5)  # of an encoder that no dev split has been asked about


def names_of(query: str, graph: KnowledgeGraph) -> set[str]:
    """The query itself, and every name that the graph has for the concepts that it names."""
    return {normalize_term(query), *(term for cui in graph.cuis(query) for term in graph.synonyms(cui))}


def count_names(names: Sequence[Iterable[str]], texts: Sequence[str]) -> np.ndarray:
    """How often any of a query's `names` stands in a text, int32 [queries, texts].

    Lower-cased, white space folded, no letter or digit before or after; from the left, the longest of the query's names
    first, without overlaps."""
    of_name: dict[str, list[int]] = defaultdict(list)
    for query, group in enumerate(names):
        for name in group:
            of_name[name].append(query)
    patterns, counts = list(of_name), np.zeros((len(names), len(texts)), np.int32)
    automaton = AhoCorasick(patterns, matchkind=MatchKind.Standard)
    for column, text in enumerate(map(normalize_term, texts)):
        free_from: dict[int, int] = defaultdict(int)
        for start, end, i in _whole(automaton, text):
            for query in of_name[patterns[i]]:
                if start >= free_from[query]:
                    free_from[query] = end
                    counts[query, column] += 1
    return counts


def name_spans(names: Iterable[str], text: str) -> list[tuple[int, int]]:
    """Where one query's names stand in a text, by the rule of count_names: (start, end) in normalize_term(text)."""
    spans: list[tuple[int, int]] = []
    for start, end, _ in _whole(AhoCorasick(list(names), matchkind=MatchKind.Standard), normalize_term(text)):
        if not spans or start >= spans[-1][1]:
            spans.append((start, end))
    return spans


def _whole(automaton: AhoCorasick, text: str) -> list[tuple[int, int, int]]:
    """(start, end, pattern) of every pattern that stands in the text whole, from the left, the longest first."""
    hits = automaton.find_matches_as_indexes(text, overlapping=True)
    whole = [(a, b, i) for i, a, b in hits if not (text[a - 1 : a].isalnum() or text[b : b + 1].isalnum())]
    return sorted(whole, key=lambda hit: (hit[0], -hit[1], hit[2]))


def names_in_text(counts: np.ndarray, bm25: np.ndarray) -> np.ndarray:
    """Scores [queries, texts] of the names alone: count_names, BM25 of the plain query breaking ties."""
    bm25 = np.maximum(bm25, 0)  # as in `joined`
    return counts + bm25 / (1 + bm25)


def joined(similarity: np.ndarray, counts: np.ndarray, expanded: np.ndarray, weights: Weights) -> np.ndarray:
    """The hybrid's scores [queries, texts] of cosine similarities, count_names, and BM25 of the expanded query."""
    expanded = np.maximum(expanded, 0)  # it is below 0 where most of a few texts have the query's words
    return similarity + weights.names * np.log1p(counts) + weights.words * expanded / (expanded + HALF)


@dataclass
class Hybrid:
    """One thing that loads, indexes texts, and searches them."""

    encoder: SentenceTransformer
    graph: KnowledgeGraph
    weights: Weights = Weights()
    texts: list[str] = field(default_factory=list)

    def index(self, texts: Iterable[str]) -> Self:
        self.texts = list(texts)
        self._bm25 = BM25(self.texts)
        long = len(self.texts) > 1000
        self._embeddings = self.encoder.encode(self.texts, batch_size=16, show_progress_bar=long)
        self._windows = encode_windows(self.encoder, self.texts, long) if self.weights.windows else None
        return self

    def scores(self, queries: Sequence[str]) -> np.ndarray:
        """[queries, texts]; an empty query is a ValueError."""
        if not all(query.strip() for query in queries):
            raise ValueError("the query is empty; give a term, as in 'shortness of breath'")
        counts = count_names([names_of(query, self.graph) for query in queries], self.texts)
        expanded = self._bm25.scores([expand_query(query, self.graph) for query in queries])
        vectors = self.embed_queries(queries)
        similarity = dense_scores(vectors, self._embeddings)
        if self.weights.windows:
            similarity = blended(similarity, best_windows(vectors, *self._windows), self.weights.windows)
        return joined(similarity, counts, expanded, self.weights)

    def embed_queries(self, queries: Sequence[str]) -> np.ndarray:
        """[queries, dim], with the encoder's own query prompt before each, if it has one."""
        return self.encoder.encode(list(queries), prompt=query_prompt(self.encoder) or None)

    def search(self, query: str, top: int = 10) -> list[tuple[float, str]]:
        """(score, text) of the best `top` texts, best first."""
        scores = self.scores([query])[0]
        return [(float(scores[i]), self.texts[i]) for i in np.argsort(-scores, kind="stable")[:top]]

    def save(self, folder: str | Path) -> None:
        """The encoder (sentence-transformers' layout), the graph (BIOS's) and the weights, without the texts."""
        self.encoder.save(str(folder))
        save_bios(self.graph, Path(folder) / GRAPH_FOLDER)
        (Path(folder) / WEIGHTS_FILE).write_text(json.dumps(asdict(self.weights)))

    @classmethod
    def load(cls, folder: str | Path, graph: KnowledgeGraph | None = None) -> Self:
        """What `save` wrote; given a `graph`, an encoder's folder will do, with the weights UNTUNED where it has none.
        Raises DataError for a folder that isn't there and a graph that can't be read."""
        folder, weights = Path(folder), UNTUNED
        if (beside := folder / WEIGHTS_FILE).exists():
            with naming(beside, "write it again, as Hybrid.save does"):
                weights = Weights(**json.loads(beside.read_text()))
        try:
            with naming(folder, "a model is a folder in sentence-transformers' layout"):
                encoder = load_encoder(folder)
        except SafetensorError as error:
            raise DataError(f"{folder.name}/model.safetensors: torn ({error}); copy the model again") from None
        return cls(encoder, load_bios(folder / GRAPH_FOLDER) if graph is None else graph, weights)
