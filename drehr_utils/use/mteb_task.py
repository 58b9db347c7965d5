"""CliniQ's two settings as MTEB retrieval tasks over local files; no hub is asked (`pip install '.[mteb]'`).

    import mteb

    benchmark = load_benchmark("data/open_cliniq", "test")
    results = mteb.evaluate(model, [MultiPatient(benchmark), SinglePatient(benchmark)], cache=None)
    figures(results)

`model` is a SentenceTransformer or whatever else `mteb.evaluate` takes. A name of one's own for another benchmark in
the same layout: `MultiPatient(benchmark, "test", "CliniQ")`. MTEB keeps scores and ids, never a text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pandas as pd
from datasets import Dataset
from mteb.abstasks.retrieval import AbsTaskRetrieval
from mteb.abstasks.task_metadata import TaskMetadata
from mteb.results import ModelResult

from drehr_utils import artifacts
from drehr_utils.data.benchmark import MATCH_TYPES, Benchmark, SearchTask, single_patient_tasks

# This project's metrics by MTEB's names. Its cutoff of 1000 is none within a note.
METRICS = {
    "SinglePatient": {"MRR": "mrr_at_1000", "NDCG": "ndcg_at_1000", "MAP": "map_at_1000"},
    "MultiPatient": {"MRR": "mrr_at_1000", "NDCG@10": "ndcg_at_10", "R@100": "recall_at_100"},
}


class _CliniQ(AbsTaskRetrieval):
    """What the two settings share: a subset of MTEB's is a group of searches, loaded from a benchmark in memory."""

    groups: tuple[str, ...] = ("all",)
    main_score: str
    searches: Callable[[str], Iterable[SearchTask]]  # of a group, each with its pool of chunks; a setting's method

    def __init__(self, benchmark: Benchmark, split: str = "test", name: str = "OpenCliniQ", **options) -> None:
        self.benchmark, self.split = benchmark, split
        self.metadata = TaskMetadata(
            name=f"{name}{type(self).__name__}",
            description="Which chunks of discharge summaries say that the patient has it? After CliniQ's protocol",
            reference="https://arxiv.org/abs/2502.06252",
            dataset={"path": "local", "revision": artifacts.digest(benchmark)},  # MTEB's cache goes by it
            type="Retrieval",
            category="t2t",
            eval_splits=[split],
            eval_langs={group: ["eng-Latn"] for group in self.groups},
            main_score=self.main_score,
        )
        super().__init__(**options)

    def load_data(self, *_, **__) -> None:
        corpus = Dataset.from_list([{"id": i, "text": text} for i, text in self.benchmark.corpus.items()])
        self.dataset = {}
        for group in self.hf_subsets:
            searches = list(self.searches(group))
            queries = [{"id": s.search_id, "text": self.benchmark.queries[s.query_id]} for s in searches]
            self.dataset[group] = {
                self.split: {
                    "corpus": corpus,
                    "queries": Dataset.from_list(queries),
                    "relevant_docs": {s.search_id: s.relevant for s in searches},
                    "top_ranked": {s.search_id: s.chunk_ids for s in searches},
                }
            }
        self.data_loaded = True

    def unload_data(self) -> None:
        self.dataset, self.data_loaded = {}, False  # MTEB's own also drops the metadata, here the instance's


class MultiPatient(_CliniQ):
    """Each query that has a relevant chunk, over the whole corpus (CliniQ §4.1)."""

    main_score = "ndcg_at_10"

    def searches(self, group: str) -> Iterable[SearchTask]:
        pool = list(self.benchmark.corpus)
        return (SearchTask(i, i, "", pool, relevant) for i, relevant in self.benchmark.qrels.items())


class SinglePatient(_CliniQ):
    """Each patient with each own query: MTEB's candidate lists are the note's chunks. `all`, then by match type, where
    chunks that are relevant by another type leave the list (CliniQ §4.1)."""

    groups = ("all", *MATCH_TYPES)
    main_score = "map_at_1000"

    def searches(self, group: str) -> Iterable[SearchTask]:
        return single_patient_tasks(self.benchmark, None if group == "all" else group)


def figures(results: ModelResult) -> pd.DataFrame:
    """`setting, group, metric, value` (0 to 100) of what mteb.evaluate gave, by this project's names."""
    rows = []
    for task in results.task_results:
        setting = next(name for name in METRICS if task.task_name.endswith(name))
        for found in (found for scores in task.scores.values() for found in scores):
            for metric, theirs in METRICS[setting].items():
                rows.append((setting.removesuffix("Patient").lower(), found["hf_subset"], metric, 100 * found[theirs]))
    return pd.DataFrame(rows, columns=["setting", "group", "metric", "value"])
