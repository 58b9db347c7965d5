"""The authors' release joined with MIMIC-III, both in miniature: the layout of their repository, invented content."""

import json
import random

import pytest
from mimic3_miniature import OTHER, write_mimic3

from drehr_utils.data.benchmark import load_benchmark, single_patient_tasks
from drehr_utils.data.notes import chunk_words
from drehr_utils.errors import DataError
from drehr_utils.papers.cliniq.release import (
    OUT,
    Release,
    join_release,
    main,
    read_release,
    release_chunks,
    release_clean,
)
from drehr_utils.profiles import ROOT

RELEASE = {
    "test_hadm_ids.txt": "102\n101\n",
    "queries_disease.jsonl": '{"_id": "0", "text": "heart failure"}\n{"_id": "1", "text": "essential hypertension"}\n',
    "queries_procedure.jsonl": '{"_id": "2", "text": "endoscopy of small intestine"}\n',
    "queries_drug.jsonl": '{"_id": "3", "text": "aspirin"}\n{"_id": "4", "text": "furosemide"}\n',
    "qrels_disease.tsv": "0\t102_0\tstring\n1\t101_0\tabbreviation\n",
    "qrels_procedure.tsv": "2\t101_0\thyponym\n",
    "qrels_drug.tsv": "3\t101_0\tstring\n3\t102_0\tstring\n4\t102_0\tstring\n" + 2 * "4\t102_1\timplication\n",
}


def write_release(folder, **changed):
    folder.mkdir(parents=True)
    for name, text in {**RELEASE, **changed}.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


@pytest.fixture
def folders(tmp_path):
    return write_release(tmp_path / "CliniQ/benchmark").parent, write_mimic3(tmp_path / "mimic"), tmp_path / "out"


def run(release, mimic, out, *more):
    given = ["--release", release, "--mimic", mimic, "--out", out, "--dev-share", "0", *more]
    return main(list(map(str, given)))  # two admissions: all are test


def test_one_command_gives_a_benchmark_that_the_loader_reads(folders, capsys):
    (folders[2] / "dev").mkdir(parents=True)
    (folders[2] / "dev/patients.jsonl").touch()  # of an earlier division, by another share
    assert run(*folders) == 0
    assert not (folders[2] / "dev").exists() and (folders[2] / ".gitignore").read_text() == "*\n"
    benchmark = load_benchmark(folders[2], "test")
    assert [p.note_id for p in benchmark.patients] == ["101", "102"]  # NOTEEVENTS' order, as the authors' script has it
    assert len(benchmark.patients[1].chunk_ids) == len(release_chunks(release_clean(OTHER))) == 2
    assert "addendum" not in " ".join(benchmark.corpus.values())  # the first summary of the admission
    assert benchmark.corpus["101_0"].startswith("admission date: discharge date: htn,")
    assert benchmark.query_types == {"0": "disease", "1": "disease", "2": "procedure", "3": "drug", "4": "drug"}
    assert benchmark.match_types["4"] == {"102_0": "string", "102_1": "implication"}
    searches = {task.search_id for task in single_patient_tasks(benchmark)}
    assert searches == {"1@101", "2@101", "3@101", "0@102", "3@102", "4@102"}
    origin = {tuple(line.split("\t")[:2]): line.split("\t")[4] for line in qrels_of(folders[2])}
    assert origin["4", "102_0"] == "own" and origin["3", "101_0"] == "unknown"
    printed = capsys.readouterr().out
    assert (
        "77,206.0 / 7.0" in printed
        and "100.0% of the string matches" in printed
        and "1 judgments stood more" in printed
    )
    assert "htn" not in printed  # no word of a note


def qrels_of(out):
    return (out / "test/qrels/test.tsv").read_text().splitlines()[1:]


def test_searches_that_the_authors_script_skips(folders):
    assert run(*folders, "--as-evaluated") == 0
    assert single_patient_tasks(load_benchmark(folders[2], "test")) == []  # both notes have fewer than 5 chunks
    assert len(qrels_of(folders[2])) == 7  # Multi-Patient Retrieval keeps all


def test_as_evaluated_keeps_long_notes_but_for_queries_that_every_chunk_answers():
    release = Release(["1"], {"a": "x", "b": "y"}, {"a": "drug", "b": "drug"})
    release.judgments = {("a", f"1_{k}"): "string" for k in range(5)} | {("b", "1_4"): "string"}
    benchmark = join_release(release, {"1": "w " * 460}, as_evaluated=True)
    assert len(benchmark.corpus) == 5 and benchmark.patients[0].query_ids == ["b"]
    assert join_release(release, {"1": "w " * 460}).patients[0].query_ids == ["a", "b"]


def test_windows_are_the_papers_where_words_are_plain_and_pieces_stay_whole_elsewhere():
    """Against LangChain's CharacterTextSplitter, 2,000 random texts gave the same windows (it is no dependency)."""
    rng = random.Random(0)
    for n in [0, 1, 99, 100, 101, 190, 191, 280, *(rng.randrange(600) for _ in range(50))]:
        words = [f"w{i}" for i in range(n)]
        assert release_chunks(" ".join(words)) == [" ".join(part) for part in chunk_words(words)]
    chunks = release_chunks(" ".join(["a\tb", *(f"w{i}" for i in range(99))]))  # a piece of two words: 101 in all
    assert chunks == [" ".join(["a\tb", *(f"w{i}" for i in range(98))]), " ".join(f"w{i}" for i in range(88, 99))]


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("Seen [**2101-3-4**]  by Dr.\n[**Last Name**]", "seen by dr."),
        ("[HIV] test", "test"),
        ("[**two\nlines**] stay", "[**two lines**] stay"),
        ("___ and ----", "___ and ----"),
        ("a\tb", "a\tb"),
    ],
)
def test_cleaning_is_the_releases_own(text, cleaned):
    assert release_clean(text) == cleaned


BAD = {
    "no ids": ({"test_hadm_ids.txt": None}, "test_hadm_ids.txt is missing; it comes from the authors' repository"),
    "no queries": (
        {"queries_drug.jsonl": None},
        "queries_drug.jsonl is missing; .*zhao-zy15/CliniQ.*THUMedInfo/CliniQ",
    ),
    "no qrels": ({"qrels_disease.tsv": None}, "qrels_disease.tsv is missing"),
    "id": ({"test_hadm_ids.txt": "101\nx1\n"}, "test_hadm_ids.txt, row 2: 'x1'"),
    "query twice": ({"queries_drug.jsonl": '{"_id": "0", "text": "x"}\n'}, "queries_drug.jsonl, row 1, field _id: '0'"),
    "query text": ({"queries_drug.jsonl": '{"_id": "3"}\n'}, "queries_drug.jsonl, row 1, field text: missing"),
    "fields": ({"qrels_drug.tsv": "3\t101_0\n"}, "qrels_drug.tsv, row 1: 2 fields"),
    "other file's query": ({"qrels_drug.tsv": "0\t101_0\tstring\n"}, "qrels_drug.tsv, row 1, field query id: '0'"),
    "type": ({"qrels_drug.tsv": "3\t101_0\t1\n"}, "qrels_drug.tsv, row 1, field match type: '1'"),
    "chunk": ({"qrels_drug.tsv": "3\t555_0\tstring\n"}, "qrels_drug.tsv, row 1, field chunk id: '555_0'"),
}


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_bad_releases_are_named_by_file_row_and_field(tmp_path, changed, message):
    with pytest.raises(DataError, match=message):
        read_release(write_release(tmp_path / "r", **changed))


def test_missing_mimic_tables_and_notes_say_where_they_come_from(folders, tmp_path, capsys):
    release, mimic, out = folders
    (tmp_path / "empty").mkdir()
    assert run(release, tmp_path / "empty", out) == 1
    assert "nor noteevents.csv(.gz) is there; MIMIC-III's comes from PhysioNet" in capsys.readouterr().out
    (release / "benchmark/test_hadm_ids.txt").write_text("101\n102\n104\n")
    assert run(release, mimic, out) == 1
    assert "1 of the release's 3 admissions have no discharge summary, 104 among them" in capsys.readouterr().out
    assert not out.exists()


def test_judgments_beyond_the_notes_mean_another_version(folders, capsys):
    release, mimic, out = folders
    (release / "benchmark/qrels_drug.tsv").write_text("3\t101_7\tstring\n")
    assert run(release, mimic, out) == 1
    assert "1 of 4 judgments name a chunk that the notes don't have, 101_7 among them" in capsys.readouterr().out


def test_by_default_it_writes_where_git_does_not_look():
    assert OUT.is_relative_to(ROOT / "data/cache")
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert any(line.strip("/") in ("data/cache", "cache") for line in ignored)
    assert json.loads(RELEASE["queries_drug.jsonl"].splitlines()[0])["_id"] == "3"
