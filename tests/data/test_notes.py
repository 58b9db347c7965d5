import gzip
import json
import os
from pathlib import Path

import pytest

from drehr_utils import pipeline
from drehr_utils.data.notes import Note, chunk_note, chunk_words, clean, read_any_notes, read_notes, read_splits
from drehr_utils.errors import DataError
from drehr_utils.files import same_characters
from drehr_utils.profiles import ROOT, load_profile

HEADER = "note_id,subject_id,hadm_id,note_type,note_seq,charttime,storetime,text\n"


def write_notes(folder: Path, rows: list[str] | bytes, name="discharge.csv") -> Path:
    folder.mkdir(exist_ok=True)
    data = rows if isinstance(rows, bytes) else (HEADER + "".join(rows)).encode()
    (folder / name).write_bytes(data)
    return folder


def row(note_id, text, subject="1"):
    return f'{note_id},{subject},2,DS,1,,,"{text}"\n'


def test_a_row_whose_text_is_cut_at_its_commas_is_named(tmp_path):
    """Unquoted, or its quotes escaped by backslashes, as some exporters do: a part of it would pass for ids."""
    backslashes = '"CC: \\"pain\\", worse, htn, gout"', r"after row 2: not a readable CSV table .*"
    commas = "Chest pain, radiating to the left arm", r"row 3: \d cells where the header has 3"
    for text, said in (commas, backslashes):
        (tmp_path / "notes.csv").write_text(f"note_id,subject_id,text\n1,10,Cough.\n2,20,{text}\n")
        with pytest.raises(DataError, match=f"notes.csv, {said}; quote a text") as error:
            read_any_notes(tmp_path / "notes.csv")
        assert "arm" not in str(error.value) and "gout" not in str(error.value)
    (tmp_path / "notes.csv").write_text("note_id,subject_id,text\n1,10,Cough.,,\n")  # of a spreadsheet
    assert [note.text for note in read_any_notes(tmp_path / "notes.csv")[0]] == ["Cough."]


@pytest.mark.parametrize("split", ["dev", "test"])
def test_rechunking_the_notes_gives_the_benchmarks_corpus_byte_for_byte(split):
    profile = load_profile("open")
    notes, _, splits = pipeline.notes(profile)
    ours = "".join(
        json.dumps({"_id": chunk.id, "title": "", "text": chunk.text}) + "\n"
        for note in sorted(notes, key=lambda note: note.note_id)
        if splits[note.note_id] == split
        for chunk in chunk_note(note)
    )
    assert ours.encode() == (profile.benchmark / split / "corpus.jsonl").read_bytes()


def test_cleaning_by_hand():
    assert (
        clean("Seen by Dr. [**Last\nName (STitle) 12**] on ___ ; BP 120/80!!! ---- a-b  C.")
        == "seen by dr. on ; bp 120/80 a-b c."
    )
    assert clean("snake_case __x__ .. ...") == "snake_case x"
    assert clean("Pain [** see addendum. PE on CT. Seen by Dr. [**Last Name**] today") == (
        "pain [ see addendum. pe on ct. seen by dr. today"  # a mask that is never closed takes no words along
    )


def test_what_r_pandas_and_databases_write_for_nothing_is_no_patient_id_or_text(tmp_path):
    rows = ["id,subject_id,text", "1,NULL,gout", "2,null,asthma", "NA,7,Crohn’s", "4,nan,NaN", "5,\\N,N/A of the hip"]
    (tmp_path / "notes.csv").write_text("\n".join(rows), encoding="utf-8")
    notes, report = read_any_notes(tmp_path / "notes.csv", note_id="id")
    of_row = f"{tmp_path.name}/notes.csv-row-4"
    assert [(n.note_id, n.subject_id) for n in notes] == [("1", "1"), ("2", "2"), (of_row, "7"), ("5", "5")]
    assert report.skipped == [(5, "text", "empty")] and notes[2].text == "Crohn's"


def test_two_columns_of_one_name_are_refused(tmp_path):
    (tmp_path / "notes.csv").write_text("TEXT,note_id,text\nraw,1,cleaned\n")
    with pytest.raises(DataError, match="row 1: two columns are named text"):
        read_any_notes(tmp_path / "notes.csv")


@pytest.mark.parametrize("size", [1, 99, 100, 101, 190, 191, 280, 50_000])
def test_chunks_cover_every_word_and_share_ten(size):
    words = [str(i) for i in range(size)]
    parts = chunk_words(words)
    assert [w for part in parts[:-1] for w in part[:90]] + parts[-1] == words
    assert all(len(part) == 100 for part in parts[:-1]) and 1 <= len(parts[-1]) <= 100
    assert all(a[90:] == b[:10] for a, b in zip(parts, parts[1:], strict=False))
    assert len(parts) == max(1, -(-(size - 10) // 90))


def test_a_one_word_and_a_fifty_thousand_word_note(tmp_path):
    folder = write_notes(tmp_path / "n", [row("a", "Stable"), row("b", "word " * 50_000)])
    notes, report = read_notes(folder)
    assert [len(chunk_note(note)) for note in notes] == [1, 556] and report.kept == 2
    assert chunk_note(notes[0])[0].text == "stable"


def test_a_missing_column_names_file_and_column(tmp_path):
    folder = write_notes(tmp_path / "n", b"note_id,subject_id,text\na,1,x\n")
    with pytest.raises(DataError, match=r"discharge\.csv, row 1: column hadm_id is missing"):
        read_notes(folder)


def test_no_table_says_what_is_expected(tmp_path):
    with pytest.raises(DataError, match="DREHR_NOTES"):
        read_notes(tmp_path)


def test_empty_notes_and_bad_bytes_are_skipped_counted_and_located(tmp_path):
    rows = HEADER.encode() + row("a", "fine").encode() + row("b", " ___ ").encode() + b'c,1,2,DS,1,,,"caf\xe9 \xff"\n'
    notes, report = read_notes(write_notes(tmp_path / "n", rows))
    assert [note.note_id for note in notes] == ["a"]
    assert report.skipped == [(3, "text", "empty"), (4, "text", "bytes that are not UTF-8")]
    assert "first at row" in report.frame().columns


def test_a_repeated_row_is_skipped_but_a_conflicting_one_is_an_error(tmp_path):
    _, report = read_notes(write_notes(tmp_path / "n", [row("a", "x y"), row("a", "x y")]))
    assert report.skipped == [(3, "note_id", "repeats an earlier row")]
    with pytest.raises(DataError, match=r"row 3, field note_id: the same as in row 2, with another text"):
        read_notes(write_notes(tmp_path / "n", [row("a", "x y"), row("a", "secret words")]))
    with pytest.raises(DataError, match="with another text or patient"):  # as if it were a repeated row, it would go
        read_notes(write_notes(tmp_path / "n", [row("a", "x y"), row("a", "x y").replace("a,1,", "a,2,")]))


def test_a_text_has_the_same_characters_from_a_table_of_mimics_layout_as_from_a_file(tmp_path):
    text = "dys\u200bpnea, Crohn’s, cafe\u0301"
    (notes, _), _ = read_notes(write_notes(tmp_path / "n", [row("a", text)])), (tmp_path / "a.txt").write_text(text)
    assert notes[0].text == read_any_notes(tmp_path)[0][0].text == same_characters(text) == "dyspnea, Crohn's, café"


def test_text_files_by_name_through_links_but_none_that_is_hidden(tmp_path):
    for name in ("b/1.txt", "a/1.txt", "a/.ipynb_checkpoints/1-checkpoint.txt", "a/.2.txt"):
        (tmp_path / "notes" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "notes" / name).write_text("Cough.")
    (tmp_path / "notes/z").symlink_to(tmp_path / "notes/a")  # what it leads to has its own name
    (tmp_path / "notes/a/up").symlink_to(tmp_path / "notes")
    assert [note.note_id for note in read_any_notes(tmp_path / "notes")[0]] == ["a/1.txt", "b/1.txt"]
    (tmp_path / "notes/c").symlink_to(tmp_path / "unmounted")
    with pytest.raises(DataError, match="notes/c: a link that leads nowhere"):  # or its notes would count as removed
        read_any_notes(tmp_path / "notes")


def test_a_cut_row_a_missing_id_and_a_damaged_gzip(tmp_path):
    with pytest.raises(DataError, match="row 2: no value for field text"):
        read_notes(write_notes(tmp_path / "n", HEADER.encode() + b"a,1,2\n"))
    with pytest.raises(DataError, match="row 2, field note_id: empty"):
        read_notes(write_notes(tmp_path / "n", [row("", "text")]))
    with pytest.raises(DataError, match="n/discharge.csv, row 2, field note_id: bytes that are not UTF-8"):
        read_notes(write_notes(tmp_path / "n", HEADER.encode() + b'a\xff,1,2,DS,1,,,"text"\n'))
    whole = gzip.compress((HEADER + row("a", "text " * 5000)).encode())
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "discharge.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match="discharge.csv.gz"):
        read_notes(tmp_path / "z")


def test_mimic3s_layout_is_read_too(tmp_path):
    (tmp_path / "NOTEEVENTS.csv").write_text(
        '"ROW_ID","SUBJECT_ID","HADM_ID","CHARTDATE","CATEGORY","DESCRIPTION","TEXT"\n'
        '7,1,2.0,2101-01-01,"Discharge summary","Report","Admission Date: [**2101-1-1**]\nCHF"\n'
        '8,1,2,2101-01-01,"Radiology","CHEST","no effusion"\n'
    )
    notes, report = read_notes(tmp_path)
    assert notes == [Note("7", "1", "2", "Admission Date: [**2101-1-1**]\nCHF")] and report.rows == 1
    assert read_any_notes(tmp_path / "NOTEEVENTS.csv")[0] == notes  # the table itself: no other kinds of notes either


@pytest.mark.parametrize("later", [".csv", ".csv.gz"])
def test_of_a_table_and_a_packed_one_the_later_is_read(tmp_path, later):
    write_notes(tmp_path, [row("a", "unpacked")])
    with gzip.open(tmp_path / "discharge.csv.gz", "wt") as file:
        file.write(HEADER + row("a", "packed"))
    for end in (".csv", ".csv.gz"):
        os.utime(tmp_path / f"discharge{end}", (2e9, 2e9) if end == later else (1e9, 1e9))
    assert read_notes(tmp_path)[0][0].text == {".csv": "unpacked", ".csv.gz": "packed"}[later]


def test_splits_are_by_patient(tmp_path):
    notes = [Note("a", "1", "2", "x"), Note("b", "1", "3", "y")]
    (tmp_path / "splits.csv").write_text("subject_id,note_id,split\n1,a,train\n1,b,test\n")
    with pytest.raises(DataError, match="splits.csv, row 2, field split: the patient is in more than one split"):
        read_splits(tmp_path, notes)
    (tmp_path / "splits.csv").write_text("subject_id,note_id,split\n1,a,trian\n")
    with pytest.raises(DataError, match="row 2, field split"):
        read_splits(tmp_path, notes)
    (tmp_path / "splits.csv").unlink()
    others = [Note(f"n{i}", str(i), "2", "x") for i in range(2, 1000)]
    hashed = read_splits(tmp_path, notes + others)  # one patient, one split, without a table too
    assert hashed["a"] == hashed["b"]
    assert all(10 <= list(hashed.values()).count(split) <= 30 for split in ("dev", "test"))
    assert read_splits(tmp_path, others[::-1][:500]) == {n.note_id: hashed[n.note_id] for n in others[::-1][:500]}
    (tmp_path / "splits.csv").write_text("subject_id,note_id,split\n1,a,train\n9,b,test\n")  # the table's slip
    with pytest.raises(DataError, match="the patient of note 2 of the notes. table has notes in more than one split"):
        read_splits(tmp_path, notes)


def test_no_patient_of_dev_or_test_reaches_training():
    profile = load_profile("open")
    notes, _, splits = pipeline.notes(profile)
    patients = {
        split: {n.subject_id for n in notes if splits[n.note_id] == split} for split in ("train", "dev", "test")
    }
    assert not patients["train"] & (patients["dev"] | patients["test"]) and not patients["dev"] & patients["test"]
    assert {split: len(p) for split, p in patients.items()} == {"train": 160, "dev": 32, "test": 96}
    patient_of = {note.note_id: note.subject_id for note in notes}
    for sets in (pipeline.chunks(profile),):
        assert {patient_of[chunk.note_id] for chunk in sets} == patients["train"]
    # what an LLM was asked about, and so every stage-II positive, is of training patients
    recorded = ROOT / "data/llm_answers/train.jsonl.gz"
    asked = {json.loads(line)["id"].rsplit("_", 1)[0] for line in gzip.open(recorded, "rt")}
    assert {patient_of[note_id] for note_id in asked} <= patients["train"]
