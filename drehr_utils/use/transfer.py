"""One benchmark for all five papers: each retriever on each test set, and its committed record.

    python -m drehr_utils.use.transfer                      # the retrievers that the record lacks
    python -m drehr_utils.use.transfer --remake             # all of them again, in their place (an hour of a core)
    python -m drehr_utils.use.transfer --remake --only Comb

The models are those of a run of the profile; one that its cache lacks is trained first. Each is asked as it is: no
weight is chosen here. Notebook 16 shows data/transfer.csv.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
from sentence_transformers import SentenceTransformer

from drehr_utils import pipeline
from drehr_utils.evaluation import intervals, medquad, metrics, records
from drehr_utils.evaluation.records import Record
from drehr_utils.papers.capr import systems as capr
from drehr_utils.papers.drehr import rivals
from drehr_utils.papers.kg import linking
from drehr_utils.papers.kg import systems as kg
from drehr_utils.papers.radiology import systems as radiology
from drehr_utils.papers.radiology.entries import SentenceQueries
from drehr_utils.papers.radiology.retrieval import Score, bm25, query_values, remembering
from drehr_utils.profiles import Profile
from drehr_utils.search.hybrid import Hybrid
from drehr_utils.training import encoders
from drehr_utils.use.search import IMPROVED

RECORD = Record("transfer.csv")
SBERT = "SBERT (radiology)"
TRAIN, TEST = "A", "B"  # radiology's collections: the learning rate was chosen on A
SHOWN = {  # test set -> its metrics in the record
    "OpenCliniQ, in a patient": ["MAP"],
    "OpenCliniQ, all patients": ["MRR"],
    "OpenLinking": ["R@1", "R@25"],
    "CAPR's passages": ["R@1", "R@5"],
    "Radiology's sentences": ["mAP"],
}


# --- retrievers -----------------------------------------------------------------------------------------------------


def towers(*models: SentenceTransformer | Path) -> Score:
    """Cosines of an encoder's embeddings, up to 512 tokens; of two encoders, the first is the queries'."""
    encode = [remembering(encoders.load_encoder(model) if isinstance(model, Path) else model) for model in models]
    return lambda asked, searched: encode[0](asked) @ encode[-1](searched).T


def _hybrid(profile: Profile) -> Score:
    hybrid = Hybrid.load(IMPROVED, pipeline.knowledge_graph(profile))
    return lambda asked, searched: hybrid.index(searched).scores(asked)


def retrievers(profile: Profile) -> dict[str, Callable[[], Score]]:
    """Name -> what loads it. A Poly- or a Cross-encoder, or CDV, has no embedding of a text to compare, and isn't here;
    nor are Figure 2's systems of KG, which were trained on notes of the test split."""
    found: dict[str, Callable[[], Score]] = {
        rivals.CHANCE: lambda: lambda asked, searched: np.zeros((len(asked), len(searched))),  # ties: a random order
        "BM25": lambda: bm25,
        pipeline.START: lambda: towers(pipeline.starting_encoder(profile)),
    }
    for system in (pipeline.PUBLISHED, pipeline.IMPROVED):
        found[pipeline.row_name(profile, system)] = lambda s=system: towers(pipeline.trained_model(profile, s)[0])
    found |= {pipeline.IMPROVED: lambda: towers(IMPROVED), rivals.HYBRID_WINDOWS: lambda: _hybrid(profile)}
    single = [f"{graph} {kind}" for graph in (kg.ICD10, *kg.graphs(profile)) for kind in ("Syn", "Graph")]
    for name in (*single, kg.COMB):
        found[name] = lambda n=name: towers(kg.train(profile, n)[0])
    found[capr.BI] = lambda: towers(*capr.trained_model(profile, capr.BI)[0].encoders)
    return found | {SBERT: lambda: towers(radiology.sbert(profile, TRAIN))}


# --- test sets ------------------------------------------------------------------------------------------------------


def per_search(profile: Profile, score: Score) -> dict[str, pd.DataFrame]:
    """Test set -> each search's values of its SHOWN metrics, as the papers' notebooks (08, 12, 13, 14) have them."""
    bench, notes = pipeline.benchmark(profile, "test"), kg.test_sets(profile)[0]
    task, _, candidates = capr.held_out(profile)
    said = SentenceQueries.of(radiology.test_entries(profile, TEST))
    chunks = score(list(bench.queries.values()), list(bench.corpus.values()))
    passages = score(list(task.queries.values()), list(task.passages.values()))
    found = (
        metrics.single_patient(bench, chunks),
        metrics.multi_patient(bench, chunks),
        linking.recall_values(notes, lambda mentions: score(mentions, list(notes.concepts.values()))),
        medquad.recall_values(task, candidates, np.take_along_axis(passages, candidates, axis=1)),
        query_values(said, score(said.queries, said.sentences)),
    )
    return {
        test_set: values[values["metric"].isin(SHOWN[test_set])] for test_set, values in zip(SHOWN, found, strict=True)
    }


def rows(profile: Profile, values: Mapping[str, pd.DataFrame], start: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """A row a test set and metric: the mean, its 95% interval, p against the values of `start`, how many searches."""
    frames = []
    for test_set, part in values.items():
        found = intervals.result_rows("", "", test_set, part, profile.resampling, start[test_set])
        frames.append(found.assign(searches=part["search_id"].nunique()).rename(columns={"group": "test set"}))
    return pd.concat(frames, ignore_index=True)[["test set", "metric", "ours", "low", "high", "p", "searches"]]


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__, "open", ["--remake"])
    parser.add_argument("--only", metavar="RETRIEVER", help="this one")
    options, profile = records.parse(parser, arguments)
    found = retrievers(profile)
    records.refuse_unknown(parser, "retriever", options.only and [options.only], found)
    start = cache(lambda: per_search(profile, found[pipeline.START]()))
    for name in [options.only] if options.only else found:

        def make(name: str = name) -> pd.DataFrame:
            values = start() if name == pipeline.START else per_search(profile, found[name]())
            made = rows(profile, values, start())
            return made.assign(p=np.nan) if name == pipeline.START else made

        RECORD.add(profile, {"retriever": name}, make, options.remake)


if __name__ == "__main__":
    main()
