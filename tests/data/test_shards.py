"""A corpus in shards against the same in memory; shards that a killed run left; Ray Data; what a process holds."""

import importlib.util
import os
import shutil
import subprocess
import sys
from dataclasses import replace

import psutil
import pyarrow.parquet as pq
import pytest

from drehr_utils import cluster, corpus
from drehr_utils.data import shards
from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.data.notes import Chunk, chunk_note, read_notes
from drehr_utils.errors import DataError
from drehr_utils.profiles import load_profile
from drehr_utils.training.positives import PositiveSets
from drehr_utils.training.sampling import TrainingSet


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The smoke profile with a cache of its own, shards of 40 chunks and 7 notes."""
    monkeypatch.setattr(corpus, "NOTES_A_SHARD", 7)
    monkeypatch.setattr(corpus, "CHUNKS_A_SHARD", 40)
    return replace(load_profile("smoke"), name=str(tmp_path / "cache"))


def test_tables_that_change_are_read_again_in_a_process_that_lives_on(own, tmp_path):
    folder = shutil.copytree(own.notes, tmp_path / "notes")
    own = replace(own, notes=folder)
    read, splits = read_notes(folder)[0], corpus.notes(own)[2]
    before = [chunk.id for chunk in corpus.chunks(own, "test")]
    (folder / "splits.csv.gz").unlink()
    lines = [
        f"{n.subject_id},{n.note_id},{'train' if splits[n.note_id] == 'test' else splits[n.note_id]}" for n in read
    ]
    (folder / "splits.csv").write_text("\n".join(["subject_id,note_id,split", *lines]))
    assert before and not len(corpus.chunks(own, "test"))


def test_patients_of_a_benchmark_that_was_made_of_other_splits_do_not_train(own, tmp_path):
    folder = shutil.copytree(own.notes, tmp_path / "notes")
    shutil.copytree(own.benchmark, own.cache / "cliniq")
    own = replace(own, notes=folder, benchmark=None)
    read, splits = read_notes(folder)[0], corpus.notes(own)[2]
    asked = {p.subject_id for split in ("dev", "test") for p in load_benchmark(own.cache / "cliniq", split).patients}
    (folder / "splits.csv.gz").unlink()
    lines = [f"{n.subject_id},{n.note_id},train" for n in read]
    (folder / "splits.csv").write_text("\n".join(["subject_id,note_id,split", *lines]))
    redrawn = corpus.notes(own)[2]
    train = {note.subject_id for note in read if redrawn[note.note_id] == "train"}
    assert "train" in splits.values() and train and not train & asked


def samples(sets: PositiveSets) -> list:
    return [(sets.ids[i], sets.samples(i)) for i in range(len(sets))]


@pytest.mark.parametrize("n", [0, 1, 6, 7])
def test_rows_are_a_list_on_disk(tmp_path, n):
    chunks = [Chunk(f"n{i // 3}_{i % 3}", f"n{i // 3}", f"café {i}\n") for i in range(n)]
    shards.write_rows(tmp_path, iter(chunks), Chunk, 3)
    rows = shards.Rows(shards.mapped(tmp_path), Chunk)
    assert len(rows) == n and list(rows) == chunks and [rows[i] for i in range(n)] == chunks
    for part in (slice(1, 4), slice(-2, None), slice(None, None, 2), slice(5, 2), slice(None, None, -1)):
        assert list(rows[part]) == chunks[part]
    with pytest.raises(IndexError):
        rows[n]
    if n:
        assert rows[-1] == chunks[-1]
    parts = [pq.read_table(path) for path in sorted(tmp_path.glob("*.parquet"))]  # any tool reads them
    assert [len(part) for part in parts] == {0: [0], 1: [1], 6: [3, 3], 7: [3, 3, 1]}[n]
    assert [row for part in parts for row in part["text"].to_pylist()] == [chunk.text for chunk in chunks]


def test_notes_and_chunks_are_those_of_the_tables(own):
    whole = replace(own, max_train_notes=None)
    read, report = read_notes(whole.notes)
    notes, again, splits = corpus.notes(whole)
    assert list(notes) == read and again == report
    for split in ("train", "dev", "test"):
        ours = [chunk for note in read if splits[note.note_id] == split for chunk in chunk_note(note)]
        assert list(corpus.chunks(whole, split)) == ours


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["stage1", "stage2"])
def test_sets_do_not_depend_on_the_shards_and_a_killed_run_goes_on(own, monkeypatch, stage):
    sets_of = {"stage1": corpus.stage1_sets, "stage2": corpus.stage2_sets}[stage]
    made, write = [], shards.write

    def counted(table, path):
        made.append(path.name)
        write(table, path)

    monkeypatch.setattr(shards, "write", counted)

    def killed(table, path):
        if "part-00002" in path.name:
            raise KeyboardInterrupt
        write(table, path)

    corpus.chunks(own)
    with monkeypatch.context() as other, pytest.raises(KeyboardInterrupt):
        other.setattr(shards, "write", killed)
        sets_of(own)
    made.clear()
    in_parts = sets_of(own)
    assert len(in_parts) > 80 and len(made) == -(-len(in_parts) // 40) - 2, "only those that were missing are made"
    monkeypatch.setattr(corpus, "CHUNKS_A_SHARD", 10_000)
    whole = sets_of(replace(own, name=f"{own.name}/whole"))
    assert samples(in_parts) == samples(whole) and in_parts.counts().equals(whole.counts())
    first, second = (TrainingSet.build(corpus.chunks(own), sets) for sets in (in_parts, whole))
    assert [first.text(i) for i in range(len(first))] == [second.text(i) for i in range(len(second))]


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs the extra `scale`")
def test_ray_makes_the_same_and_a_worker_that_is_killed_is_replaced(own, monkeypatch):
    alone = samples(corpus.stage1_sets(own))
    seen, real = [], cluster.each

    def ray_processes():
        return [p for p in psutil.Process().children(recursive=True) if "ray" in " ".join(p.cmdline())]

    def watched(*arguments):
        for part in real(*arguments):
            seen.append({c.laddr.ip for p in ray_processes() for c in p.net_connections() if c.status == "LISTEN"})
            if len(seen) == 1:
                os.kill(next(p.pid for p in ray_processes() if p.cmdline()[0].startswith("ray::MapWorker")), 9)
            yield part

    monkeypatch.setattr(cluster, "each", watched)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # of other work; the notes' text must not go there
    on_ray = corpus.stage1_sets(replace(own, name=f"{own.name}/ray", workers=2))
    assert samples(on_ray) == alone and len(seen) == -(-len(alone) // 40)
    assert {ip for of in seen for ip in of} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"} and not ray_processes()


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="needs the extra `scale`")
def test_what_fails_on_ray_is_an_error_with_its_kind():
    with pytest.raises(DataError, match="sums on Ray: ZeroDivisionError"):
        list(cluster.each(lambda: lambda part: 1 / part, [1, 0], 2, "sums"))

    def make():
        raise DataError("graph: no such file")

    with pytest.raises(DataError, match="sums on Ray: graph: no such file"):
        list(cluster.each(make, [1, 0], 2, "sums"))
    with pytest.raises(DataError, match="sums on Ray: a worker died"):
        list(cluster.each(lambda: lambda part: os._exit(1), [1, 0], 2, "sums"))


HELD = """
import sys
from pathlib import Path
from drehr_utils.data import shards
from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.data.notes import Chunk

def held() -> float:  # MB that are this process's own: not what it has mapped
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1e3

folder, n = Path(sys.argv[1]), int(sys.argv[2])
for warm in (folder / "warm", folder):
    warm.mkdir(exist_ok=True)
    before = held()
    rows = (Chunk(f"n{i}_0", f"n{i}", "word " * 120) for i in range(n if warm == folder else 2000))
    shards.write_rows(warm, rows, Chunk, 1000)
    read = sum(len(chunk.text) for chunk in shards.Rows(shards.mapped(warm), Chunk))
print(read, held() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads Linux's /proc")
def test_a_process_holds_a_shard_and_not_the_corpus(tmp_path):
    command = [sys.executable, "-c", HELD, str(tmp_path), "100000"]
    plain = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # Arrow's own keeps some 30 MB, whatever the corpus
    characters, grown = subprocess.run(command, capture_output=True, text=True, check=True, env=plain).stdout.split()
    assert int(characters) == 60_000_000 and float(grown) < 5, "MB held of 60"
