"""Table 4's rows that no training stands behind, and the hybrid of an encoder with strings and the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from drehr_utils import artifacts, pipeline
from drehr_utils.config import Recipe
from drehr_utils.data.benchmark import Benchmark
from drehr_utils.evaluation import metrics
from drehr_utils.evaluation.metrics import Scores
from drehr_utils.profiles import Profile
from drehr_utils.search import expansion, hybrid, windows
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.hybrid import Weights
from drehr_utils.training import encoders

NAMES, UNTRAINED_HYBRID, HYBRID = "names-in-text", "MiniLM (hybrid)", "DR.EHR (hybrid)"
WINDOWS, READING_WINDOWS = "MiniLM (windows)", "MiniLM, names read (windows)"
UNTRAINED_WINDOWS, HYBRID_WINDOWS = "MiniLM (hybrid, windows)", "DR.EHR (hybrid, windows)"
GRAPHLESS = "MiniLM + BM25 (windows)"
PUBLISHED_WINDOWS, IMPROVED_WINDOWS = "DR.EHR (windows)", "DR.EHR (improved, windows)"
FUSED, CHANCE = f"RRF with {pipeline.IMPROVED}", "random order"


def string_scores(profile: Profile, bench: Benchmark) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What strings say, [queries, chunks] each: BM25 of the query, BM25 of it expanded by the graph, and how often one
    of its names in the graph stands in the chunk (hybrid.count_names)."""
    key = artifacts.digest(string_scores, pipeline.graph_digest(profile), *bench.texts)

    def make() -> np.ndarray:
        graph, queries = pipeline.knowledge_graph(profile), list(bench.queries.values())
        texts = list(bench.corpus.values())
        names = [hybrid.names_of(query, graph) for query in queries]
        index, expanded = BM25(texts), [expansion.expand_query(query, graph) for query in queries]
        return np.stack([index.scores(queries), index.scores(expanded), hybrid.count_names(names, texts)])

    plain, expanded, counts = artifacts.cached_file(profile.cache / f"scores/strings-{key}.npy", make)
    return plain, expanded, counts


def untrained_encoder(profile: Profile) -> Path:
    """The folder of the starting encoder whose tokenizer reads the graph's opaque names."""
    return pipeline.train_recipe(profile, Recipe(read_names=True))[0]


def window_scores(
    profile: Profile, model: Path | None, bench: Benchmark, width: int = windows.WINDOW_WORDS
) -> np.ndarray:
    """As pipeline.model_scores, of each chunk's best window of `width` words (windows.best_windows)."""
    made_of = model.resolve() if model else pipeline.start_digest(profile)
    key = artifacts.digest(window_scores, made_of, *bench.texts, width)

    def make() -> np.ndarray:
        encoder = encoders.load_encoder(model) if model else pipeline.starting_encoder(profile)
        asked = encoders.encode(encoder, list(bench.queries.values()), prompt=encoders.query_prompt(encoder))
        return windows.best_windows(asked, *windows.encode_windows(encoder, list(bench.corpus.values()), width=width))

    return artifacts.cached_file(profile.cache / f"scores/windows-{key}.npy", make)


def windowed(profile: Profile, improved: Path) -> dict[str, tuple[Path | None, tuple[Weights, ...]]]:
    """Row -> (model folder, grid of weights) for hybrid_scores: the untrained rows with windows, with and without the
    graph, and those of a folder by the improved recipe."""
    reading = untrained_encoder(profile)
    return {
        WINDOWS: (None, hybrid.WINDOWS_ALONE),
        READING_WINDOWS: (reading, hybrid.WINDOWS_ALONE),
        GRAPHLESS: (None, hybrid.WORDS_GRID),
        UNTRAINED_WINDOWS: (reading, hybrid.WINDOWS_GRID),
        IMPROVED_WINDOWS: (improved, hybrid.WINDOWS_ALONE),
        HYBRID_WINDOWS: (improved, hybrid.WINDOWS_GRID),
    }


def mean_of_six(bench: Benchmark, scores: np.ndarray) -> float:
    """The mean of Table 4's six metrics."""
    both = metrics.single_patient(bench, scores), metrics.multi_patient(bench, scores)
    return float(np.mean([metrics.means(values)[metrics.AVERAGE] for values in both]))


def hybrid_grid(profile: Profile, model: Path | None, grid: Sequence[Weights] = hybrid.GRID) -> dict[Weights, float]:
    """Weights -> the mean on dev of Table 4's six metrics, for an encoder joined with strings and the graph."""
    dev = pipeline.benchmark(profile, "dev")
    join, parts = _joiner(profile, model, dev, any(weights.windows for weights in grid))
    key = artifacts.digest(hybrid_grid, *parts, grid, *dev.texts, dev.qrels, dev.patients)

    found = artifacts.cached_file(
        profile.cache / f"scores/hybrid-{key}.npy",
        lambda: np.array([mean_of_six(dev, join(weights)) for weights in grid]),
    )
    return dict(zip(grid, found.tolist(), strict=True))


def hybrid_weights(profile: Profile, model: Path | None, grid: Sequence[Weights] = hybrid.GRID) -> Weights:
    """Those of the grid that are best on dev."""
    found = hybrid_grid(profile, model, grid)
    return max(found, key=found.__getitem__)


def hybrid_scores(
    profile: Profile, model: Path | None, bench: Benchmark, grid: Sequence[Weights] = hybrid.GRID
) -> np.ndarray:
    """A model folder's scores (None: the starting encoder's) joined with strings, the graph and, by the grids that have
    them, windows."""
    return joined_scores(profile, model, bench, hybrid_weights(profile, model, grid))


def joined_scores(profile: Profile, model: Path | None, bench: Benchmark, weights: Weights) -> np.ndarray:
    """hybrid_scores by these weights."""
    return _joiner(profile, model, bench, bool(weights.windows))[0](weights)


def _joiner(
    profile: Profile, model: Path | None, bench: Benchmark, with_windows: bool
) -> tuple[Callable[[Weights], np.ndarray], list[np.ndarray]]:
    """The function from weights to a hybrid's scores, and what it joins. Weights that count no names ask no graph:
    their BM25 is of the query as it is."""
    similarity, (plain, expanded, counts) = pipeline.model_scores(profile, model, bench), string_scores(profile, bench)
    best = [window_scores(profile, model, bench)] if with_windows else []

    def join(weights: Weights) -> np.ndarray:
        whole = windows.blended(similarity, *best, weights.windows) if best else similarity
        return hybrid.joined(whole, counts, expanded if weights.names else plain, weights)

    return join, [similarity, plain, expanded, counts, *best]


def untrained_scores(profile: Profile, bench: Benchmark) -> dict[str, Scores]:
    """The systems that are not trained, on the profile's test split or another: chance, BM25, plain and expanded by the
    graph, the graph's names alone, the starting encoder, with the graph's names read too, the encoder fused with each
    BM25, and joined as the hybrid is."""
    plain, expanded, counts = string_scores(profile, bench)
    reading = untrained_encoder(profile)
    start = pipeline.model_scores(profile, None, bench)
    return {
        CHANCE: np.zeros_like(plain),  # equal scores come in a random order
        "BM25": plain,
        "BM25 + KG": expanded,
        NAMES: hybrid.names_in_text(counts, plain),
        pipeline.START: start,
        pipeline.READING: pipeline.model_scores(profile, reading, bench),
        "RRF (no graph)": (plain, start),
        "RRF": (expanded, start),
        UNTRAINED_HYBRID: hybrid_scores(profile, reading, bench),
    }
