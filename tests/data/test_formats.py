"""OpenCliniQ and the committed runs through the field's own readers; data/README.md shows the same lines."""

import csv
import hashlib
import json

import ir_measures
import pandas as pd
import pytest

from drehr_utils.data.benchmark import load_benchmark, single_patient_tasks
from drehr_utils.evaluation.metrics import MULTI_METRICS, SINGLE_METRICS
from drehr_utils.profiles import ROOT

FOLDER = ROOT / "data/open_cliniq"
CARD = FOLDER / "croissant.json"
RUN = ROOT / "data/runs/bm25.test.{}.run.gz"
NOT_LOCKED = "{} isn't in requirements.lock: pip install '.[formats]'"


@pytest.fixture(scope="module")
def test_split():
    return load_benchmark(FOLDER, "test")


@pytest.fixture(scope="module")
def qrels(test_split):
    single = {task.search_id: task.relevant for task in single_patient_tasks(test_split)}
    return {"multi": test_split.qrels, "single": single}


def printed(setting, system="BM25"):
    """Table 4's cells: metric -> value in 0..100."""
    table = pd.read_csv(ROOT / "figures/tables/drehr_table4.csv").query("system == @system and setting == @setting")
    return dict(zip(table["metric"], table["ours"], strict=True))


@pytest.mark.parametrize(("setting", "metrics"), [("multi", MULTI_METRICS), ("single", SINGLE_METRICS)])
def test_a_committed_run_gives_table_4s_cells(qrels, setting, metrics):
    run = list(ir_measures.read_trec_run(str(RUN).format(setting)))
    found = ir_measures.calc_aggregate(metrics.values(), qrels[setting], run)
    # The runs end at rank 100, and round scores to five digits.
    assert {name: 100 * found[m] for name, m in metrics.items()} == pytest.approx(printed(setting), abs=0.1)


# --- Croissant -------------------------------------------------------------------------------------------------------


def test_croissant_names_every_file_with_its_size_and_sum():
    card = json.loads(CARD.read_text(encoding="utf-8"))
    files = {file["contentUrl"]: file for file in card["distribution"]}
    kinds = {"corpus", "queries", "patients"}
    assert set(files) == {f"{s}/{k}.jsonl" for s in ("test", "dev") for k in kinds} | {
        f"{s}/qrels/{s}.tsv" for s in ("test", "dev")
    }
    for name, file in files.items():
        content = (FOLDER / name).read_bytes()
        assert file["sha256"] == hashlib.sha256(content).hexdigest(), f"{name} isn't what croissant.json describes"
        assert file["contentSize"] == f"{len(content)} B"


def test_croissants_fields_are_the_files_columns():
    card = json.loads(CARD.read_text(encoding="utf-8"))
    for record_set in card["recordSet"]:
        fields = {field["source"]["extract"]["column"] for field in record_set["field"]}
        (name,) = {field["source"]["fileObject"]["@id"] for field in record_set["field"]}
        with (FOLDER / name).open(encoding="utf-8", newline="") as file:
            if name.endswith(".tsv"):
                columns = set(next(csv.reader(file, delimiter="\t")))
            else:
                columns = set(json.loads(next(file))) - {"title"}  # always empty, for BEIR's reader
        assert fields == columns, record_set["name"]


@pytest.mark.slow
def test_mlcroissant_finds_no_fault_and_reads_the_benchmark(test_split):
    mlcroissant = pytest.importorskip("mlcroissant", reason=NOT_LOCKED.format("mlcroissant"))
    data = mlcroissant.Dataset(jsonld=CARD)  # raises on a fault in the card
    assert not data.metadata.ctx.issues.errors and not data.metadata.ctx.issues.warnings

    def rows(name):
        for record in data.records(f"test_{name}"):
            yield [value.decode() if isinstance(value, bytes) else value for value in record.values()]

    assert dict(rows("corpus")) == test_split.corpus
    assert {i: text for i, text, _ in rows("queries")} == test_split.queries
    assert {(q, c): kind for q, c, _, kind, _ in rows("judgments")} == {
        (q, c): kind for q, judged in test_split.match_types.items() for c, kind in judged.items()
    }
    own = {note_id: [i.decode() for i in ids] for _, note_id, _, ids in rows("patients")}
    assert own == {patient.note_id: patient.query_ids for patient in test_split.patients}


# --- ir_datasets, ranx -----------------------------------------------------------------------------------------------


def test_ir_datasets_reads_chunks_queries_judgments_and_runs(test_split, tmp_path):
    pytest.importorskip("ir_datasets", reason=NOT_LOCKED.format("ir_datasets"))
    from ir_datasets.datasets.beir import BeirQrels
    from ir_datasets.formats import JsonlDocs, JsonlQueries, TrecScoredDocs
    from ir_datasets.util import GzipExtract, LocalDownload

    folder = FOLDER / "test"
    docs = JsonlDocs(LocalDownload(folder / "corpus.jsonl"), mapping={"doc_id": "_id", "text": "text"})
    queries = JsonlQueries(LocalDownload(folder / "queries.jsonl"), mapping={"query_id": "_id", "text": "text"})
    run = TrecScoredDocs(GzipExtract(LocalDownload(str(RUN).format("multi"))))
    assert dict(docs.docs_iter()) == test_split.corpus
    assert dict(queries.queries_iter()) == test_split.queries
    ours = [tuple(row) for row in ir_measures.read_trec_run(str(RUN).format("multi"))]
    assert [tuple(row) for row in run.scoreddocs_iter()] == ours and len(ours) > 70_000

    lines = (folder / "qrels/test.tsv").read_text(encoding="utf-8").splitlines()
    three = tmp_path / "test.tsv"  # `cut -f1-3`: ir_datasets' reader takes BEIR's columns and no others
    three.write_text("".join("\t".join(line.split("\t")[:3]) + "\n" for line in lines), encoding="utf-8")
    found = {(row.query_id, row.doc_id): row.relevance for row in BeirQrels(LocalDownload(three), {}).qrels_iter()}
    assert found == {(q, c): n for q, judged in test_split.qrels.items() for c, n in judged.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "names"),
    [("multi", ("mrr", "ndcg@10", "recall@100")), ("single", ("mrr", "ndcg", "map"))],
)
def test_ranx_gives_table_4s_cells(qrels, setting, names):
    ranx = pytest.importorskip("ranx", reason=NOT_LOCKED.format("ranx"))
    run = ranx.Run.from_file(str(RUN).format(setting), kind="gz")
    found = ranx.evaluate(ranx.Qrels.from_dict(qrels[setting]), run, list(names), make_comparable=True)
    assert [100 * found[name] for name in names] == pytest.approx(list(printed(setting).values()), abs=0.1)
