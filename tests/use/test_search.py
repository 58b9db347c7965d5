"""drehr-search as it is called: its three kinds of notes, its answers, and what it says of bad input."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from drehr_utils.data.notes import read_any_notes
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.search.hybrid import Hybrid, Weights
from drehr_utils.search.index import TRAINING_LOCK, Hit, NoteIndex
from drehr_utils.training.encoders import load_encoder
from drehr_utils.use import search

pytest.importorskip("lancedb")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    graph = KnowledgeGraph(cui2pt={"1": "dyspnea"})
    for term in ("dyspnea", "shortness of breath", "sob"):
        graph.add_term("1", term)
    folder = tmp_path_factory.mktemp("model") / "hybrid"
    Hybrid(load_encoder("minilm"), graph, Weights(0.2, 0.2)).save(folder)
    return folder


@pytest.fixture
def folder(tmp_path):
    notes = tmp_path / "notes"
    (notes / "ann").mkdir(parents=True)
    (notes / "ann/1.txt").write_text("Dyspnea on exertion, no SOB at rest.")
    (notes / "ann/2.txt").write_text("Knee pain after a fall.")
    (notes / "b.txt").write_bytes("\ufeffAnkle sprain.".encode())
    return notes


def test_three_text_files_two_commands_a_ranked_list(folder, model, tmp_path, capsys):
    at = ["--index", str(tmp_path / "index")]
    search.main(["index", str(folder), "--model", str(model), *at])
    assert "3 notes added, 0 changed, 0 as they were; 3 chunks" in capsys.readouterr().out
    search.main(["query", "shortness of breath", "--top", "2", *at])
    first, text = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert first.startswith(" 1  ") and first.endswith("patient ann, chunk ann/1.txt_0: dyspnea, sob")
    assert text == "    *dyspnea* on exertion, no ~sob~ at rest."
    search.main(["query", "sob", "--json", "--patient", "b.txt", *at])
    (hit,) = json.loads(capsys.readouterr().out)["hits"]
    assert hit["text"] == "ankle sprain." and hit["names"] == {} and hit["patient"] == "b.txt"


def test_a_notes_control_characters_reach_no_terminal_and_no_letter_stops_it(monkeypatch):
    text = "chf \x1b]0;owned\x07 ≥ 2, copd"
    hit = Hit(1.0, 1.0, {"copd": 1}, [(text.index("copd"), len(text))], [False], "p\x1b1", "n", "n_0", text)
    monkeypatch.setenv("COLUMNS", "6")  # narrower than the margin
    assert search.show(hit, 1).split() == [*" 1 1.000 patient p 1, chunk n_0: copd chf ]0;owned ≥ 2, *copd*".split()]
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    with pytest.raises(SystemExit):
        search.main(["query", "chf", "--index", "no such index"])
    print("≥", file=out, flush=True)
    assert out.buffer.getvalue() == b"?\n"


def test_a_training_does_not_replace_the_model_that_it_goes_on_from(folder, tmp_path, capsys):
    (tmp_path / "own/hybrid").mkdir(parents=True)
    (tmp_path / "own" / TRAINING_LOCK).touch()
    with pytest.raises(SystemExit, match="1"):
        search.main(["train", str(folder), "--from", str(tmp_path / "own"), "--out", str(tmp_path / "own")])
    assert "own/: has the model to go on from, which it would replace" in capsys.readouterr().err


def test_an_index_of_an_encoder_has_windows_unless_told(folder, model, tmp_path, capsys):
    model = shutil.copytree(model, tmp_path / "model")
    (model / "hybrid.json").write_text('{"names": 0.2, "words": 0.2, "windows": 0.5}')
    for name, more in (("with", []), ("without", ["--no-windows"])):
        search.main(["index", str(folder), "--model", str(model), "--index", str(tmp_path / name), *more])
    kept = [NoteIndex.open(tmp_path / name) for name in ("with", "without")]
    assert ["windows" in index.table.schema.names for index in kept] == [True, False]
    assert [index.hybrid.weights.windows for index in kept] == [0.5, 0]
    with pytest.raises(SystemExit):
        search.main(["index", str(folder), "--index", str(tmp_path / "with"), "--no-windows"])
    assert "has windows already" in capsys.readouterr().err


@pytest.mark.slow
def test_one_vector_a_chunk_is_of_the_encoder_for_whole_texts(folder, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(search, "IMPROVED", model)
    monkeypatch.setattr(search, "SHIPPED", tmp_path / "trained-on-windows")
    search.main(["index", str(folder), "--index", str(tmp_path / "whole"), "--no-windows"])
    with pytest.raises(SystemExit):
        search.main(["index", str(folder), "--index", str(tmp_path / "windows")])
    assert "trained-on-windows" in capsys.readouterr().err


def test_an_index_among_the_notes_is_no_note(folder, model, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "C.TXT").write_text("Wrist pain.")
    search.main(["index", ".", "--model", str(model)])
    shutil.copytree(model, folder / "mine/graph-1")  # what `train` leaves
    search.main(["index", "."])
    said = capsys.readouterr().out.splitlines()
    assert (folder / "drehr-index/hybrid/graph/bios.txt").exists()
    assert "4 notes added" in said[0] and "0 notes added, 0 changed, 4 as they were; 4 chunks" in said[1]


@pytest.mark.slow
def test_a_program_may_ask_and_wait_for_its_answer(folder, model, tmp_path):
    index = str(tmp_path / "index:1")  # no address, though it has a colon
    search.main(["index", str(folder), "--model", str(model), "--index", index])
    command = [sys.executable, "-m", "drehr_utils.use.search", "query", "--json", "--index", index]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1, "env": environment}
    with subprocess.Popen(command, **pipes) as program:
        watch = threading.Timer(120, program.kill)
        watch.start()
        for query in ("sob", "knee"):
            program.stdin.write(f"{query}\n\n")
            assert json.loads(program.stdout.readline())["query"] == query
        program.stdin.close()
        watch.cancel()


def test_queries_come_from_stdin_too(folder, model, tmp_path, capsys, monkeypatch):
    at = ["--index", str(tmp_path / "index")]
    search.main(["index", str(folder), "--model", str(model), *at])
    capsys.readouterr()
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfsob\r\n\nknee\nM\xfcller\n"), encoding="utf-8")
    )
    with pytest.raises(SystemExit):
        search.main(["query", "--json", *at])
    said = capsys.readouterr()
    assert "a query has bytes that are not UTF-8" in said.err
    asked = [json.loads(line) for line in said.out.splitlines()]
    assert [found["query"] for found in asked] == ["sob", "knee"]
    assert asked[1]["hits"][0]["text"].startswith("knee pain")


def test_another_users_index_is_named_without_a_word_of_a_note(folder, model, tmp_path, capsys, monkeypatch):
    at = tmp_path / "index"

    def refused(path):  # root may read all, so nothing that root does is refused
        raise PermissionError(13, "Permission denied", str(path / "chunks.lance/a note"))

    monkeypatch.setattr(NoteIndex, "open", refused)
    with pytest.raises(SystemExit):
        search.main(["query", "sob", "--index", str(at)])
    said = f"{at}: Permission denied (another user's?); name another, or get its rights, then run this again"
    assert capsys.readouterr().err == f"drehr-search: {said}\n"


def test_a_file_is_no_index(folder, model, tmp_path, capsys):
    (tmp_path / "mine").touch()
    for command in (["index", str(folder), "--model", str(model)], ["query", "sob"]):
        with pytest.raises(SystemExit):
            search.main([*command, "--index", str(tmp_path / "mine")])
        assert "mine: is a file, or lies below one; name a folder" in capsys.readouterr().err


def test_a_note_without_a_patient_is_nobody_elses(tmp_path):
    (tmp_path / "mine.csv").write_text("note_id,subject_id,text\n7,,knee pain\n8,7,chest pain\n")
    with pytest.raises(DataError, match=r"mine.csv, row 2, field subject_id: empty, and the note's id, which would"):
        read_any_notes(tmp_path / "mine.csv")


def test_spaces_around_an_id_are_no_part_of_it(tmp_path):
    (tmp_path / "mine.csv").write_text("note_id,subject_id,text\n1, 7,chf\n 2 ,7 ,copd\n3,  ,asthma\n4, ,gout\n")
    notes, _ = read_any_notes(tmp_path / "mine.csv")
    assert [(n.note_id, n.subject_id) for n in notes] == [("1", "7"), ("2", "7"), ("3", "3"), ("4", "4")]


@pytest.mark.parametrize("rows", ['1,7,"chf\n2,8,"asthma severe"\n3,9,copd\n', '1,7,"chf on lasix\n2,8,diabetes\n'])
def test_a_quote_that_nothing_closes_takes_in_nobody_elses_note(rows, tmp_path):
    (tmp_path / "mine.csv").write_text("note_id,subject_id,text\n" + rows)
    with pytest.raises(DataError, match=r"mine.csv, after row 1: not a readable CSV table .*; quote a text that has"):
        read_any_notes(tmp_path / "mine.csv")


@pytest.mark.parametrize(
    "content, said",
    [
        (b"note_id;text\n1;chf\n", "separate cells by commas"),
        (b"note_id\ttext\n1\tchf\n", "separate cells by commas"),
        ("note_id,text\n1,chf\n".encode("utf-16"), "save the table as UTF-8"),
    ],
)
def test_a_table_of_another_kind_is_told_what_it_is_to_be(content, said, tmp_path):
    (tmp_path / "mine.csv").write_bytes(content)
    with pytest.raises(DataError, match=f"row 1: column text is missing; .*; {said}$"):
        read_any_notes(tmp_path / "mine.csv")


def test_text_files_behind_links_are_read_and_what_is_no_text_is_named(tmp_path):
    notes, elsewhere = tmp_path / "notes", tmp_path / "elsewhere"
    for folder in (notes / "p1", elsewhere):
        folder.mkdir(parents=True)
    (notes / "p1/a.txt").write_text("chf")
    (elsewhere / "b.txt").write_text("copd")
    (notes / "p1/utf16.txt").write_bytes("asthma".encode("utf-16-le"))
    (notes / "p1/latin.txt").write_bytes("Jos\xe9".encode("latin-1"))
    (notes / "p2").symlink_to(elsewhere)
    (elsewhere / "back").symlink_to(notes)
    found, report = read_any_notes(notes)
    assert sorted(n.note_id for n in found) == ["p1/a.txt", "p2/b.txt"]
    assert report.unread == ["p1/latin.txt", "p1/utf16.txt"]
    assert {reason for *_, reason in report.skipped} == {"bytes that are not UTF-8", "NUL characters, as in UTF-16"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read all")
def test_what_may_not_be_read_is_named(tmp_path):
    (tmp_path / "notes/p1").mkdir(parents=True)
    (tmp_path / "notes/a.txt").write_text("chf")
    for place, name in ((tmp_path / "notes/p1", "notes/p1/: Permission"), (tmp_path / "notes/a.txt", "a.txt")):
        place.chmod(0)
        with pytest.raises(DataError, match=name):
            read_any_notes(tmp_path / "notes")
        place.chmod(0o700)


def test_a_table_is_read_by_the_columns_that_it_has(tmp_path):
    table = tmp_path / "mine.csv.gz"
    with gzip.open(table, "wt") as file:
        file.write('Text,mrn\n"two\nlines",7\n  ,8\nthird,\n')
    notes, report = read_any_notes(table, patient="mrn")
    assert [(n.note_id, n.subject_id, n.text) for n in notes] == [
        (f"{tmp_path.name}/mine.csv.gz-row-2", "7", "two\nlines"),
        (f"{tmp_path.name}/mine.csv.gz-row-4", f"{tmp_path.name}/mine.csv.gz-row-4", "third"),
    ]
    assert report.skipped == [(3, "text", "empty")]
    for wrong in ({"text": "words"}, {"patient": "words"}, {"note_id": "words"}):
        with pytest.raises(DataError, match=r"mine.csv.gz, row 1: column words is missing; the header: text, mrn"):
            read_any_notes(table, **wrong)
    table.write_bytes(gzip.compress(b"chest pain,fever,smith\nknee pain,none,jones\n"))  # the first row is a note
    with pytest.raises(DataError, match=r"mine.csv.gz, row 1: column text is missing; cells in row 1: 3, not shown"):
        read_any_notes(table)
    table.write_bytes(gzip.compress(b""))
    with pytest.raises(DataError, match=r"mine.csv.gz, row 1: column text is missing; the file is empty"):
        read_any_notes(table)
    table.write_bytes(gzip.compress(b"text,subject_id\nchest pain,M\xfcller\n"))
    with pytest.raises(DataError, match=r"mine.csv.gz, row 2: note id or patient has bytes that are not UTF-8"):
        read_any_notes(table)


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda f: None, "no such file"),
        (lambda f: f.mkdir(), "no .txt file"),
        (lambda f: f.write_text("text,note_id\na,1\nb,1\n"), "row 3, field note_id: the same as in row 2"),
        (lambda f: f.write_text("text\n\n"), "no note with text in 0 rows"),
        (lambda f: f.write_bytes(b"text\n\xff\n"), "no note with text in 1 rows"),
    ],
)
def test_bad_notes_are_named_and_no_traceback_is_shown(make, said, tmp_path, capsys):
    make(tmp_path / "notes.csv")
    with pytest.raises(SystemExit) as stopped:
        search.main(["index", str(tmp_path / "notes.csv"), "--index", str(tmp_path / "index")])
    printed = capsys.readouterr().err
    assert stopped.value.code == 1 and said in printed and printed.startswith("drehr-search: ")
    assert not (tmp_path / "index").exists()


def test_notes_of_another_folder_or_table_do_not_replace_those_of_the_same_place(folder, model, tmp_path, capsys):
    def index(notes, name, *more):
        search.main(["index", str(notes), "--index", str(tmp_path / name), *more])
        return capsys.readouterr().out

    other = tmp_path / "ward/notes"
    shutil.copytree(folder, other)
    assert "3 notes added" in index(folder, "index", "--model", str(model))
    (folder / "b.txt").write_text("Ankle sprain, better.")
    (tmp_path / "link").symlink_to(folder)
    assert "1 changed" in index(tmp_path / "link", "index")
    (folder / "b.txt").write_text("Ankle sprain.")
    assert "1 changed" in index(folder / "ann/..", "index")
    assert "3 as they were" in index(other, "index")  # a copy replaces nothing
    (other / "b.txt").write_text("Another ankle.")  # both folders are known
    (tmp_path / "fourth").mkdir()
    (tmp_path / "fourth/d.txt").write_text("Wrist pain.")
    said = index(tmp_path / "fourth", "index", "--remove-gone")
    assert "1 notes added, 0 changed, 0 as they were; 4 chunks" in said  # the first folder's aren't gone
    tables = [tmp_path / place / "2020/all.csv" for place in ("east", "west")]
    for table in tables:
        table.parent.mkdir(parents=True)
        table.write_text(f"text\nSOB of {table}\n")
    assert "1 notes added" in index(tables[0], "rows", "--model", str(model))
    (tmp_path / "third/ann").mkdir(parents=True)
    (tmp_path / "third/ann/1.txt").write_text("Another Ann.")
    for notes, name, said in (
        (
            tmp_path / "third",
            "index",
            f"third: 1 of its notes would replace those of the same paths or rows in {folder};",
        ),
        (
            other,
            "index",
            f"notes: 1 of its notes would replace those of the same paths or rows in {folder};",
        ),
        (tables[1], "rows", f"all.csv: 1 of its notes would replace those of the same paths or rows in {tables[0]};"),
    ):
        before = NoteIndex.open(tmp_path / name).notes()
        with pytest.raises(SystemExit):
            index(notes, name)
        assert said in capsys.readouterr().err and NoteIndex.open(tmp_path / name).notes() == before
    shutil.move(tables[0], tables[1])  # the same table, in another place
    tables[1].write_text("text\nSOB corrected\n")
    assert "0 notes added, 1 changed" in index(tables[1], "rows")
    for table, number in zip(tables, (7, 8), strict=True):
        table.write_text(f"text,note_id\nSOB of {table},{number}\n")
        assert "1 notes added" in index(table, "ids", *(() if number == 8 else ("--model", str(model))))


def test_an_index_keeps_its_model(folder, model, tmp_path, capsys):
    command = ["index", str(folder), "--model", str(model), "--index", str(tmp_path / "index")]
    search.main(command)
    with pytest.raises(SystemExit):
        search.main(command)
    assert "has its model already" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    (tmp_path / "other/.DS_Store").touch()
    with pytest.raises(SystemExit):
        search.main([*command[:5], str(tmp_path / "other")])
    assert "other/: isn't empty, and no index; name another folder" in capsys.readouterr().err
    (folder / "b.txt").unlink()
    search.main([*command[:2], *command[4:], "--remove-gone"])
    assert "0 notes added, 0 changed, 2 as they were, 1 removed; 2 chunks" in capsys.readouterr().out
    assert "b.txt" not in (tmp_path / "index/places.json").read_text()  # a path may hold a patient's name
    for note in [*folder.rglob("*.txt")]:
        note.unlink()
    with pytest.raises(SystemExit):
        search.main([*command[:2], *command[4:], "--remove-gone"])
    assert "nothing was removed (an index's last notes go with its folder)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "broken, said",
    [
        (lambda f: (f / "hybrid.json").write_text('{"names": 0.3'), "hybrid.json, row 1, column 14: not JSON"),
        (lambda f: (f / "hybrid.json").write_text('{"name": 0.3}'), "hybrid.json: not what it should hold"),
        (lambda f: (f / "model.safetensors").write_bytes(b"torn"), "model.safetensors: torn"),
        (lambda f: (f / "graph/is_a.json").unlink(), "is_a.json: no such file"),
        (shutil.rmtree, "no such model folder"),
    ],
)
def test_a_broken_model_is_named(broken, said, folder, model, tmp_path, capsys):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    broken(copy)
    with pytest.raises(SystemExit) as stopped:
        search.main(["index", str(folder), "--model", str(copy), "--index", str(tmp_path / "index")])
    assert stopped.value.code == 1 and said in capsys.readouterr().err


def test_a_torn_index_is_named(folder, model, tmp_path, capsys):
    at = ["--index", str(tmp_path / "index")]
    search.main(["index", str(folder), "--model", str(model), *at])
    (tmp_path / "index/words.json.gz").write_bytes(b"torn")
    for arguments, said in ((["--top", "0"], "at least 1"), ([], "words.json.gz: broken gzip")):
        with pytest.raises(SystemExit):
            search.main(["query", "sob", *arguments, *at])
        assert said in capsys.readouterr().err
    (tmp_path / "index/words.json.gz").unlink()
    (tmp_path / "index/graph.json").write_text("{")
    with pytest.raises(SystemExit):
        search.main(["query", "sob", *at])
    assert "graph.json, row 1, column 2: not JSON" in capsys.readouterr().err
    (tmp_path / "index/graph.json").unlink()
    search.main(["query", "shortness of breath", *at])  # the hybrid's folder has the graph, too
    assert "dyspnea, sob" in capsys.readouterr().out
