"""Notes indexed on Ray against notes indexed in this process; a worker killed; who can reach it."""

import importlib.util
import os

import psutil
import pytest
from test_index import assert_same, hybrid, note, notes  # noqa: F401

from drehr_utils.errors import DataError
from drehr_utils.search import index, index_ray

# Not imported here: imported before the package says so, Ray would listen to the network.
there = all(map(importlib.util.find_spec, ("ray", "lance")))
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not there, reason="needs the extra `scale`")]


def ray_processes():
    return [p for p in psutil.Process().children(recursive=True) if "ray" in " ".join(p.cmdline())]


def test_what_ray_indexes_is_what_this_process_indexes(hybrid, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(index, "NOTES_AT_ONCE", 2)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.1:6379")  # of other work; the notes' text must not go there
    first, later = notes(12), [note(0, "only a few words"), *notes(14)[1:]]
    on_ray, seen = index.NoteIndex.create(tmp_path / "ray", hybrid), []
    real = index_ray.add_notes

    def watched(*arguments):
        for part in real(*arguments):
            seen.append([c.laddr.ip for p in ray_processes() for c in p.net_connections() if c.status == "LISTEN"])
            if len(seen) == 2:
                worker = max((p for p in ray_processes() if "ray::" in p.cmdline()[0]), key=lambda p: p.create_time())
                os.kill(worker.pid, 9)
            yield part

    monkeypatch.setattr(index_ray, "add_notes", watched)
    assert vars(on_ray.update(first, progress=False, workers=2))["new"] == 12
    assert len(seen) == 6 and {ip for of in seen for ip in of} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    alone = index.NoteIndex.create(tmp_path / "alone", hybrid)
    alone.update(first, progress=False)
    assert_same(on_ray, alone)
    done = on_ray.update(later, progress=False, workers=1)
    assert (done.new, done.changed) == (2, 1)
    alone.update(later, progress=False)
    assert_same(on_ray, alone)
    assert not ray_processes()


def test_a_part_that_fails_is_named(hybrid, tmp_path):  # noqa: F811
    made = index.NoteIndex.create(tmp_path / "mine", hybrid)

    def make():
        return lambda part: 1 / part

    with pytest.raises(DataError, match="part 1 of 1 failed .ZeroDivisionError"):
        list(index_ray.append_on_ray(made.table, make, [0], workers=1))
    assert made.table.count_rows() == 0
