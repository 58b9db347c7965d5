"""The index of one's own notes against the hybrid that it keeps, BM25 over the whole, and itself undisturbed."""

from __future__ import annotations

import gzip
import hashlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
import unicodedata
from dataclasses import replace

import numpy as np
import pytest
import torch

from drehr_utils import artifacts
from drehr_utils.data.notes import Note, chunk_note
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import ROOT
from drehr_utils.search.bm25 import BM25, WordCounts
from drehr_utils.search.hybrid import Hybrid, Weights, count_names, name_spans
from drehr_utils.search.index import NoteIndex
from drehr_utils.training.encoders import load_encoder

pytest.importorskip("lancedb")
QUERIES = ("myocardial infarction", "MI", "cough", "aspirin")


@pytest.fixture(scope="module")
def hybrid():
    graph = KnowledgeGraph(cui2pt={"1": "myocardial infarction", "2": "aspirin"})
    for cui, term in [("1", "myocardial infarction"), ("1", "mi"), ("2", "aspirin"), ("2", "asa")]:
        graph.add_term(cui, term)
    return Hybrid(load_encoder("minilm"), graph, Weights(0.2, 0.4, 0.5))


def note(i, words, patient=None):
    return Note(f"n{i}", patient or f"p{i % 3}", "", words)


VOCABULARY = (
    "the patient had an old mi with cough and fever on asa aspirin stopped myocardial infarction in o'brien".split()
)


def notes(n, words=130):
    rng = random.Random(0)
    return [note(i, " ".join(rng.choices(VOCABULARY, k=words))) for i in range(n)]


@pytest.fixture(scope="module")
def index(hybrid, tmp_path_factory):
    index = NoteIndex.create(tmp_path_factory.mktemp("index") / "mine", hybrid)
    index.update(notes(9), progress=False)
    return index


def contents(index):
    rows = sorted(index.table.search().to_arrow().to_pylist(), key=lambda row: row["id"])
    return [(row["id"], row["note_id"], row["patient"], row["text"]) for row in rows], np.array(
        [r["vector"] for r in rows]
    )


def assert_same(index, other):
    (rows, vectors), (others, other_vectors) = contents(index), contents(other)
    assert rows == others
    np.testing.assert_allclose(vectors, other_vectors, atol=1e-5)  # a batch's padding moves the last digits
    assert_found_alike(index.search("mi cough", 99), other.search("mi cough", 99))


def assert_found_alike(hits, others):
    scores, other_scores = ({hit.chunk_id: hit.score for hit in found} for found in (hits, others))
    assert scores == pytest.approx(other_scores, abs=1e-4)  # windows are kept in half precision


def test_candidates_get_the_bm25_scores_that_they_have_among_all():
    rng = random.Random(1)
    texts = [" ".join(rng.choices("a b c d e f the The x_1 o'brien".split(), k=rng.randint(1, 30))) for _ in range(40)]
    counts = WordCounts.of(texts)
    for query in ("a b b", "the o'brien unknown", "unknown"):
        assert counts.scores(query, texts[5:15]) == pytest.approx(BM25(texts).scores([query])[0][5:15])
    assert WordCounts.of(["?", "!"]).scores("a", ["?"]).tolist() == [0]  # no text has a word


def test_spans_are_what_is_counted():
    names, text = ["mi", "old mi", "a"], "Hx of  MI, old mi; a mild A"
    spans = name_spans(names, text)
    assert [" ".join(text.lower().split())[a:b] for a, b in spans] == ["mi", "old mi", "a", "a"]
    assert count_names([names], [text])[0, 0] == len(spans)


def test_the_whole_index_and_a_patient_are_scored_as_the_hybrid_scores_them(index, hybrid):
    chunks = {chunk.id: chunk.text for n in notes(9) for chunk in chunk_note(n)}
    expected = dict(zip(chunks, hybrid.index(chunks.values()).scores(QUERIES).T, strict=True))
    for i, query in enumerate(QUERIES):
        hits = index.search(query, top=100)
        assert {hit.chunk_id for hit in hits} == set(chunks)
        assert [hit.score for hit in hits] == pytest.approx([expected[hit.chunk_id][i] for hit in hits], abs=1e-4)
        assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
        own = index.search(query, top=100, patient="p1")
        assert_found_alike(own, [hit for hit in hits if hit.patient == "p1"])
        assert len(own) == len(chunks) / 3
    assert sum(hits[0].names.values()) == len(hits[0].spans) > 0
    assert {hits[0].text[a:b] for a, b in hits[0].spans} == set(hits[0].names) <= {"aspirin", "asa"}


def test_an_index_keeps_windows_if_its_hybrid_reads_them(index, hybrid, tmp_path):
    assert "windows" in index.table.schema.names
    plain = Hybrid(hybrid.encoder, hybrid.graph, Weights(0.2, 0.4))
    without = NoteIndex.create(tmp_path / "plain", plain)
    without.update(notes(9), progress=False)
    assert "windows" not in without.table.schema.names
    chunks = {chunk.id: chunk.text for n in notes(9) for chunk in chunk_note(n)}
    expected = dict(zip(chunks, plain.index(chunks.values()).scores(["cough"])[0], strict=True))
    found = {hit.chunk_id: hit.score for hit in NoteIndex.open(without.folder).search("cough", top=99)}
    assert found == pytest.approx(expected, abs=1e-5)
    with_windows = {hit.chunk_id: hit.score for hit in index.search("cough", top=99)}
    assert max(abs(with_windows[chunk] - found[chunk]) for chunk in found) > 0.05


def test_an_index_that_was_made_before_there_were_windows_goes_on_as_it_was(hybrid, tmp_path):
    older = NoteIndex.create(tmp_path / "older", Hybrid(hybrid.encoder, hybrid.graph, Weights(0.2, 0.4)))
    older.update(notes(2), progress=False)
    weights = older.folder / "hybrid/hybrid.json"
    weights.write_text('{"names": 0.2, "words": 0.4}')
    index = NoteIndex.open(older.folder)
    assert vars(index.update(notes(3), progress=False)) == {"new": 1, "changed": 0, "unchanged": 2, "gone": 0}
    assert len({hit.note_id for hit in index.search("cough", top=99)}) == 3
    weights.write_text('{"names": 0.2, "words": 0.4, "windows": 0.5}')
    with pytest.raises(DataError, match="older/hybrid/hybrid.json, field windows"):
        NoteIndex.open(older.folder)


def test_an_index_with_windows_may_be_asked_without(hybrid, tmp_path):
    index = NoteIndex.create(tmp_path / "mine", hybrid)
    index.update(notes(2), progress=False)
    (index.folder / "hybrid/hybrid.json").write_text('{"names": 0.2, "words": 0.4, "windows": 0}')
    plain = NoteIndex.open(index.folder)
    plain.update(notes(3), progress=False)
    assert plain.table.search().to_arrow()["windows"].null_count == 0
    hits = plain.search("cough", top=99)
    assert {hit.chunk_id: hit.similarity for hit in hits} != {
        h.chunk_id: h.similarity for h in index.search("cough", 99)
    }


def test_a_candidate_has_the_score_that_it_has_among_all(index):
    whole = {hit.chunk_id: hit.score for hit in index.search("MI", top=99)}
    assert len(replace(index, depth=1).search("MI", top=4)) == 4
    few = replace(index, depth=4).search("MI", top=4)  # of an index that has been asked
    assert len(few) == 4 < len(whole) and few[0].score == pytest.approx(max(whole.values()))
    assert {hit.chunk_id: hit.score for hit in few} == pytest.approx({i: whole[i] for i in (h.chunk_id for h in few)})


def test_only_new_and_changed_notes_are_indexed_again(hybrid, tmp_path):
    index = NoteIndex.create(tmp_path / "mine", hybrid)
    first = notes(5)
    assert vars(index.update(first, progress=False)) == {"new": 5, "changed": 0, "unchanged": 0, "gone": 0}
    later = [
        note(0, "only a few words of o'brien"),
        *first[1:3],
        note(3, first[3].text, "o'brien"),
        note(7, "new cough"),
    ]
    assert vars(index.update(later, progress=False)) == {"new": 1, "changed": 2, "unchanged": 2, "gone": 1}
    unread = {"unread": [first[4].note_id], "remove_gone": True, "progress": False}  # there still, but no text now
    assert vars(index.update(later, **unread))["gone"] == 0 and first[4].note_id in index.notes()
    assert vars(index.update(later, remove_gone=True, progress=False))["gone"] == 1
    fresh = NoteIndex.create(tmp_path / "fresh", hybrid)
    fresh.update(later, progress=False)
    assert_same(index, fresh)
    assert_same(NoteIndex.open(index.folder), fresh)
    assert {hit.note_id for hit in index.search("cough", patient="o'brien")} == {"n3"}
    assert on_disk(index, later[1])  # so that what is searched for can be found
    assert not on_disk(index, first[0]) and not on_disk(index, first[4])  # changed and gone: off the disk, too


def on_disk(index, note):
    return any(note.text.encode()[:60] in path.read_bytes() for path in index.folder.rglob("*") if path.is_file())


def rare(n):
    """Notes that share no word, too short for Lance to compress."""
    return [note(i, " ".join(hashlib.sha256(f"{i} {j}".encode()).hexdigest()[:12] for j in range(9))) for i in range(n)]


@pytest.mark.slow
def test_one_deleted_note_among_many_leaves_the_disk_as_do_its_words(hybrid, tmp_path):
    index, given = NoteIndex.create(tmp_path / "mine", hybrid), rare(60)
    index.update(given, progress=False)
    index.update(given, progress=False)
    later = [*given[:10], note(10, "now a cough"), *given[11:-1]]
    assert on_disk(index, given[10]) and on_disk(index, given[-1])
    index.update(later, remove_gone=True, progress=False)
    assert on_disk(index, given[9]) and not on_disk(index, given[10]) and not on_disk(index, given[-1])
    counted = gzip.decompress((index.folder / "words.json.gz").read_bytes()).decode()
    assert given[9].text.split()[0] in counted and given[10].text.split()[0] not in counted
    fresh = NoteIndex.create(tmp_path / "fresh", hybrid)
    fresh.update(later, progress=False)
    assert_same(index, fresh)
    (words,) = (found for found in index.table.list_indices() if found.columns == ["text"])
    assert (words.num_indexed_rows, words.num_unindexed_rows) == (59, 0)


KILLED = """
import os, sys
from drehr_utils.data.notes import Note
from drehr_utils.search.index import NoteIndex
setattr(NoteIndex, sys.argv[2], lambda self: os.kill(os.getpid(), 9))
index = NoteIndex.open(sys.argv[1])
index.update([Note("n0", "p0", "", "now a cough")], remove_gone=True, progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("within", ["_finish", "_count_words"])
def test_what_a_kill_left_to_do_the_next_update_does_though_no_note_is_new(hybrid, tmp_path, within):
    index, given = NoteIndex.create(tmp_path / "mine", hybrid), rare(4)
    index.update(given, progress=False)
    before = index.search("cough", top=99)
    command = [sys.executable, "-c", KILLED, str(index.folder), within]
    assert subprocess.run(command, cwd=ROOT, capture_output=True).returncode == -signal.SIGKILL
    assert_found_alike(NoteIndex.open(index.folder).search("cough", top=99), before)  # the last whole state
    assert on_disk(index, given[0])  # so that what comes isn't true already
    (index.folder / "partial-1-words.json.gz").write_bytes(given[0].text.encode())
    later = [note(0, "now a cough", "p0")]
    assert vars(index.update(later, progress=False)) == {"new": 0, "changed": 0, "unchanged": 1, "gone": 0}
    assert not any(on_disk(index, old) for old in given)
    fresh = NoteIndex.create(tmp_path / "fresh", hybrid)
    fresh.update(later, progress=False)
    assert_same(index, fresh)
    version = index.table.version
    index.update(later, progress=False)
    assert index.table.version == version  # and then nothing is left to do


def test_an_open_index_searches_what_another_process_left(hybrid, tmp_path):
    index, given = NoteIndex.create(tmp_path / "mine", hybrid), notes(12)
    index.update(given[:3], progress=False)
    reader = NoteIndex.open(index.folder)
    reader.search("mi cough")
    index.update([*given[2:], note(0, "cough")], remove_gone=True, progress=False)
    assert_found_alike(reader.search("mi cough", 99), NoteIndex.open(index.folder).search("mi cough", 99))


def test_a_search_whose_files_an_update_takes_away_goes_on_with_the_new_ones(hybrid, tmp_path):
    index, given = NoteIndex.create(tmp_path / "mine", hybrid), notes(12)
    index.update(given[:3], progress=False)
    updates = [given[:6], given[3:9], given[4:]]

    class Late(NoteIndex):
        def nearest(self, *asked):
            """In the middle of a search."""
            if updates:
                index.update(updates.pop(0), remove_gone=True, progress=False)
            return super().nearest(*asked)

    reader = Late.open(index.folder)
    hits = reader.search("mi cough", top=99)
    assert not updates
    assert_found_alike(hits, NoteIndex.open(index.folder).search("mi cough", 99))
    for path in (index.folder / "chunks.lance/data").iterdir():
        path.unlink()
    with pytest.raises(DataError, match=r"^mine/: can't be read .*; if nothing indexes just now, index the notes anew"):
        NoteIndex.open(index.folder).search("cough")


def test_a_second_writer_is_told_of_the_first(index):
    with artifacts.lock(index.folder / ".lock", "indexing notes"), pytest.raises(DataError, match="indexing notes sin"):
        index.update([], progress=False)


ON_A_SMALL_DISK = """
import os, subprocess, sys
from pathlib import Path
from drehr_utils.data.notes import Note
from drehr_utils.errors import DataError
from drehr_utils.search.hybrid import Hybrid
from drehr_utils.search.index import NoteIndex

def mount(options):
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", sys.argv[2]], check=True)

def fails(do):
    try:
        do()
    except DataError as error:
        print(error)

hybrid, folder = Hybrid.load(sys.argv[1]), Path(sys.argv[2]) / "mine"
notes = [Note(f"n{i}", "p", "", text) for i, text in enumerate(Path(sys.argv[3]).read_text().splitlines())]
mount("size=1g")
index = NoteIndex.create(folder, hybrid)
index.update(notes[:2], progress=False)
before = index.search("cough", top=99)
mount("remount,ro")
fails(lambda: index.update(notes, progress=False))
assert NoteIndex.open(folder).search("cough", top=99) == before
fails(lambda: NoteIndex.create(folder.parent / "other", hybrid))
disk = os.statvfs(folder)
mount(f"remount,rw,size={(disk.f_blocks - disk.f_bfree) * disk.f_bsize + 65_536}")
fails(lambda: index.update(notes, progress=False))
assert index.search("cough", top=99) == before
fails(lambda: NoteIndex.create(folder.parent / "other", hybrid))
mount("remount,size=1g")
index.update(notes, progress=False)
assert len(index.search("cough", top=99)) == 2 * len(notes)
NoteIndex.create(folder.parent / "other", hybrid)
"""


@pytest.mark.slow
def test_a_disk_that_cannot_be_written_is_named_and_takes_nothing_along(hybrid, tmp_path):
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no mounts of one's own here")
    hybrid.save(tmp_path / "hybrid")
    (tmp_path / "disk").mkdir()
    (tmp_path / "texts").write_text("\n".join(n.text for n in notes(24)))
    places = [str(tmp_path / name) for name in ("hybrid", "disk", "texts")]
    done = subprocess.run(
        [*alone, sys.executable, "-c", ON_A_SMALL_DISK, *places], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    full = "the disk is full; make room, then run this again; what is in the index stays whole"
    said = [line.split(" (")[0] for line in done.stdout.splitlines()]
    assert said == ["mine/: can't be written to", "other/: can't be written to", f"mine/: {full}", f"other/: {full}"]


def test_the_folder_is_the_owners_alone_and_no_git_sees_it(index):
    assert stat.S_IMODE(os.stat(index.folder).st_mode) == 0o700
    assert (index.folder / ".gitignore").read_text() == "*\n"


def test_a_query_that_cannot_be_encoded_is_not_the_indexs_fault(index, monkeypatch):
    def full(self, queries):
        raise torch.OutOfMemoryError("of a graphics card")

    monkeypatch.setattr(Hybrid, "embed_queries", full)
    with pytest.raises(torch.OutOfMemoryError):
        index.search("dyspnea")


def test_a_note_that_comes_twice_is_named_and_nothing_added(hybrid, tmp_path):
    made = NoteIndex.create(tmp_path / "index", hybrid)
    with pytest.raises(DataError, match="notes: number 1 has an id that comes again; note ids must be unique"):
        made.update([note(1, "cough"), note(2, "fever"), note(1, "cough")])
    assert made.table.count_rows() == 0


def test_what_cannot_be_done_says_so(index, hybrid, tmp_path):
    for query, patient, said in [(" ", None, "empty"), ("\u200b\u00ad", None, "empty"), ("mi", "nobody", "nobody")]:
        with pytest.raises(DataError, match=said):
            index.search(query, patient=patient)
    with pytest.raises(DataError, match="drehr-search index"):
        NoteIndex.open(tmp_path)
    with pytest.raises(DataError, match="isn't empty"):
        NoteIndex.create(index.folder, hybrid)
    (tmp_path / "away").symlink_to(tmp_path / "unmounted")
    (tmp_path / "file").write_text("")
    for place, said in [("away", "away: a link that leads nowhere"), ("file/index", "index: is a file, or lies below")]:
        with pytest.raises(DataError, match=said):
            NoteIndex.create(tmp_path / place, hybrid)
    with pytest.raises(DataError, match="index is empty"):
        NoteIndex.create(tmp_path / "none", hybrid).search("mi")


def test_a_patient_is_found_however_accents_are_composed(hybrid, tmp_path):
    """A folder `Jose` with an accent, named on macOS (taken apart) or elsewhere, is one patient to whoever types it."""
    composed, apart = (unicodedata.normalize(form, "José") for form in ("NFC", "NFD"))
    for i, kept in enumerate((composed, apart)):
        made = NoteIndex.create(tmp_path / str(i), hybrid)
        made.update([Note("n", kept, "", "mi and chf")], progress=False)
        assert [len(made.search("mi", patient=asked)) for asked in (composed, apart)] == [1, 1]


INDEXING = """
import sys
from drehr_utils.data.notes import Note
from drehr_utils.search import index
index.NOTES_AT_ONCE = 2
texts = open(sys.argv[2]).read().splitlines()
notes = [Note(f"n{i}", f"p{i % 3}", "", text) for i, text in enumerate(texts)]
print("begins", flush=True)
index.NoteIndex.open(sys.argv[1]).update(notes, progress=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("notes_in", [2, 6])
def test_a_killed_run_goes_on_and_ends_as_an_undisturbed_one(hybrid, tmp_path, notes_in):
    given = notes(12)
    (tmp_path / "texts").write_text("\n".join(n.text for n in given))
    index = NoteIndex.create(tmp_path / "mine", hybrid)
    command = [sys.executable, "-c", INDEXING, str(index.folder), str(tmp_path / "texts")]
    process = subprocess.Popen(command, cwd=ROOT)
    while process.poll() is None and len(index.notes()) < notes_in:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    held = index.notes()
    assert len(held) >= notes_in
    assert len(contents(index)[0]) == 2 * len(held)  # notes are whole: of two chunks each
    assert index.search("cough", top=1)  # before it is whole
    done = index.update(given, progress=False)
    assert (done.new, done.unchanged) == (12 - len(held), len(held))
    fresh = NoteIndex.create(tmp_path / "fresh", hybrid)
    fresh.update(given, progress=False)
    assert_same(index, fresh)
