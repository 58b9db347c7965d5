"""The benchmark's loader against the files themselves, and its Single-Patient searches against a hand-worked note."""

import json
from collections import Counter

import pytest

from drehr_utils.data.benchmark import MATCH_TYPES, load_benchmark, single_patient_tasks, subset
from drehr_utils.errors import DataError
from drehr_utils.profiles import ROOT

OPEN_CLINIQ = ROOT / "data/open_cliniq"

CORPUS = [
    {"_id": f"{note}_{k}", "title": "", "text": f"secret words of {note} {k}"}
    for note, n in (("A", 4), ("B", 2))
    for k in range(n)
]
QUERIES = [
    {"_id": "q1", "text": "fever", "type": "disease"},
    {"_id": "q2", "text": "aspirin", "type": "drug"},
    {"_id": "q3", "text": "biopsy", "type": "procedure"},
]
PATIENTS = [
    {"hadm_id": 1, "note_id": "A", "chunks": 4, "queries": ["q1", "q3"]},
    {"hadm_id": 2, "note_id": "B", "chunks": 2, "queries": ["q2", "q1"]},
]
QRELS = [
    "query-id\tcorpus-id\tscore\tmatch_type\tpatient",
    "q1\tA_0\t1\tstring\town",
    "q1\tA_2\t1\tsynonym\town",
    "q2\tB_0\t1\tsynonym\town",
    "q2\tA_1\t1\tstring\tother",
    "q1\tB_1\t0\tstring\town",
]


def write(folder, corpus=CORPUS, queries=QUERIES, patients=PATIENTS, qrels=QRELS):
    (folder / "toy/qrels").mkdir(parents=True)
    for name, records in (("corpus", corpus), ("queries", queries), ("patients", patients)):
        lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
        (folder / "toy" / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "toy/qrels/toy.tsv").write_text("\n".join(qrels) + "\n")
    return folder


@pytest.fixture
def toy(tmp_path):
    return load_benchmark(write(tmp_path), "toy")


def test_searches_of_a_hand_worked_benchmark(toy):
    # q3 has no relevant chunk in A; q2 is relevant in A only as another patient's; q1's judgment in B is a 0.
    searches = {task.search_id: (task.chunk_ids, task.relevant) for task in single_patient_tasks(toy)}
    assert searches == {
        "q1@A": (["A_0", "A_1", "A_2", "A_3"], {"A_0": 1, "A_2": 1}),
        "q2@B": (["B_0", "B_1"], {"B_0": 1}),
    }


def test_other_match_types_leave_the_pool(toy):
    synonym = {task.search_id: (task.chunk_ids, task.relevant) for task in single_patient_tasks(toy, "synonym")}
    assert synonym == {"q1@A": (["A_1", "A_2", "A_3"], {"A_2": 1}), "q2@B": (["B_0", "B_1"], {"B_0": 1})}
    string = [(task.search_id, task.chunk_ids) for task in single_patient_tasks(toy, "string")]
    assert string == [("q1@A", ["A_0", "A_1", "A_3"])]
    assert single_patient_tasks(toy, "hyponym") == []
    with pytest.raises(ValueError, match="match_type 'paraphrase'"):
        single_patient_tasks(toy, "paraphrase")


def test_subset_keeps_one_patient_whole(toy):
    part = subset(toy, toy.patients[:1])
    assert list(part.corpus) == ["A_0", "A_1", "A_2", "A_3"] and list(part.queries) == ["q1", "q3"]
    assert part.qrels == {"q1": {"A_0": 1, "A_2": 1}}  # q2's string match in A: not asked for this patient
    assert part.match_types == {"q1": {"A_0": "string", "A_2": "synonym"}}
    assert [t.relevant for t in single_patient_tasks(part)] == [t.relevant for t in single_patient_tasks(toy)][:1]


@pytest.mark.parametrize(
    "split, chunks, queries, judgments, patients", [("dev", 331, 445, 2835, 32), ("test", 1056, 793, 8700, 96)]
)
def test_open_cliniq_has_what_its_readme_says(split, chunks, queries, judgments, patients):
    benchmark = load_benchmark(OPEN_CLINIQ, split)
    assert (len(benchmark.corpus), len(benchmark.qrels), len(benchmark.patients)) == (chunks, queries, patients)
    types = Counter(kind for judged in benchmark.match_types.values() for kind in judged.values())
    assert sum(types.values()) == judgments and set(types) == set(MATCH_TYPES)
    by_type = {kind: {t.search_id for t in single_patient_tasks(benchmark, kind)} for kind in MATCH_TYPES}
    assert set().union(*by_type.values()) == {t.search_id for t in single_patient_tasks(benchmark)}


MALFORMED = {
    "not JSON": ({"corpus": [CORPUS[0], '{"_id": "A_1", secret']}, "toy/corpus.jsonl, row 2, column 16"),
    "not an object": ({"queries": ["[1]"]}, "toy/queries.jsonl, row 1: not a JSON object"),
    "duplicate chunk": ({"corpus": [*CORPUS, CORPUS[1]]}, "toy/corpus.jsonl, row 7, field _id: 'A_1'"),
    "missing text": ({"corpus": [{"_id": "A_0"}]}, "toy/corpus.jsonl, row 1, field text: missing"),
    "number for text": ({"corpus": [{"_id": "A_0", "text": 3}]}, "toy/corpus.jsonl, row 1, field text: not a string"),
    "duplicate query": ({"queries": [*QUERIES, QUERIES[0]]}, "toy/queries.jsonl, row 4, field _id: 'q1'"),
    "query type": ({"queries": [{"_id": "q", "text": "", "type": "lab"}]}, "row 1, field type: 'lab'"),
    "patient's query": ({"patients": [{**PATIENTS[0], "queries": ["q9"]}]}, "row 1, field queries: 'q9'"),
    "query twice": ({"patients": [{**PATIENTS[0], "queries": ["q1", "q1"]}]}, "row 1, field queries: 'q1'"),
    "queries no list": ({"patients": [{**PATIENTS[0], "queries": "q1"}]}, "row 1, field queries: not a list"),
    "patient twice": ({"patients": [*PATIENTS, PATIENTS[0]]}, "toy/patients.jsonl, row 3, field note_id: 'A'"),
    "no such note": ({"patients": [{**PATIENTS[0], "note_id": "C"}]}, "row 1, field note_id: no chunk of 'C'"),
    "number of chunks": ({"patients": [{**PATIENTS[0], "chunks": 5}]}, "row 1, field chunks: 5"),
    "three-column qrels": ({"qrels": ["query-id\tcorpus-id\tscore"]}, "qrels/toy.tsv, row 1, field match_type"),
    "empty qrels": ({"qrels": []}, "qrels/toy.tsv, row 1, field query-id: missing"),
    "none relevant": ({"qrels": QRELS[:1]}, "toy/qrels/toy.tsv: no relevant chunk in it"),
    "short row": ({"qrels": [*QRELS, "q1\tA_1\t1"]}, "toy/qrels/toy.tsv, row 7: 3 fields"),
    "unknown query": ({"qrels": [*QRELS, "q9\tA_1\t1\tstring\town"]}, "row 7, field query-id: 'q9'"),
    "unknown chunk": ({"qrels": [*QRELS, "q1\tA_9\t1\tstring\town"]}, "row 7, field corpus-id: 'A_9'"),
    "score": ({"qrels": [*QRELS, "q1\tA_1\t-1\tstring\town"]}, "row 7, field score: '-1'"),
    "score, a digit and no number": ({"qrels": [*QRELS, "q1\tA_1\t²\tstring\town"]}, "row 7, field score: '²'"),
    "score, a number too long": ({"qrels": [*QRELS, f"q1\tA_1\t{'9' * 5000}\tstring\town"]}, "row 7, field score: "),
    "score, a grade too high": ({"qrels": [*QRELS, "q1\tA_1\t100\tstring\town"]}, "row 7, field score: '100'"),
    "match type": ({"qrels": [*QRELS, "q1\tA_1\t1\tfuzzy\town"]}, "row 7, field match_type: 'fuzzy'"),
    "judged twice": ({"qrels": [*QRELS, QRELS[1]]}, "row 7, field corpus-id: 'q1' with 'A_0'"),
}


@pytest.mark.parametrize("files, message", MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_named_by_file_row_and_field(tmp_path, files, message):
    with pytest.raises(DataError) as error:
        load_benchmark(write(tmp_path, **files), "toy")
    assert message in str(error.value)
    assert "secret" not in str(error.value) and str(tmp_path) not in str(error.value)
    assert error.value.__cause__ is None


def test_missing_file_and_wrong_encoding(tmp_path):
    folder = write(tmp_path)
    (folder / "toy/queries.jsonl").write_bytes(b'{"_id": "q1", "text": "caf\xe9", "type": "drug"}\n')
    with pytest.raises(DataError, match="toy/queries.jsonl, row 1: not UTF-8"):
        load_benchmark(folder, "toy")
    (folder / "toy/queries.jsonl").unlink()
    with pytest.raises(DataError, match="^toy/queries.jsonl: no such file"):
        load_benchmark(folder, "toy")
