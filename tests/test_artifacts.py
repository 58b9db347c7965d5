"""The cache: a digest holds the code as it was loaded and the content of inputs; nothing is made twice or half made."""

import subprocess
import sys
import textwrap
from dataclasses import dataclass, replace

import numpy as np
import pytest

from drehr_utils import artifacts
from drehr_utils.config import StageConfig
from drehr_utils.errors import DataError
from drehr_utils.training import losses


def test_a_digest_changes_with_what_made_the_artifact(tmp_path):
    path = tmp_path / "notes.csv"
    path.write_text("a")
    first = artifacts.digest(path, StageConfig(), losses, None)
    assert first == artifacts.digest(path, StageConfig(), losses, None)
    assert first != artifacts.digest(path, replace(StageConfig(), seed=1), losses, None)
    path.write_text("b")
    assert first != artifacts.digest(path, StageConfig(), losses, None)
    assert artifacts.digest(tmp_path) != artifacts.digest(path)
    moved = path.rename(tmp_path / "elsewhere.csv")
    moved.write_text("a")
    assert first == artifacts.digest(moved, StageConfig(), losses, None), "a path is no part of a digest"
    assert artifacts.digest(np.arange(3)) != artifacts.digest(np.arange(3.0))
    with pytest.raises(TypeError):
        artifacts.digest(object())
    with pytest.raises(DataError, match="nowhere: no such file or folder in"):
        artifacts.digest(tmp_path / "nowhere")


def test_a_digest_sees_through_linked_folders(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "real/a.txt").write_text("1")
    (tmp_path / "of_links").mkdir()
    (tmp_path / "of_links/test").symlink_to(tmp_path / "real")
    first = artifacts.digest(tmp_path / "of_links")
    (tmp_path / "real/b.txt").write_text("2")
    (tmp_path / "real/back").symlink_to(tmp_path / "real")
    assert artifacts.digest(tmp_path / "of_links") != first


def test_a_new_field_with_a_default_changes_no_digest():
    @dataclass(frozen=True)
    class Before:
        steps: int = 10
        rate: float = 0.1

    @dataclass(frozen=True)
    class After:
        steps: int = 10
        rate: float = 0.1
        sources: tuple = ()

    assert artifacts.digest(Before(20)) == artifacts.digest(After(20)) != artifacts.digest(After(20, sources=("x",)))


PACKAGE = {
    "__init__.py": "from toy import artifacts",
    "deep.py": 'def base():\n    """One."""\n    return 1\n',
    "middle.py": "from toy.deep import base\n\nCONSTANT = 2\n\ndef twice():\n    return CONSTANT * base()\n",
    "top.py": """
        from toy import artifacts, middle
        OWN, OTHER = 3, 4

        def helper():
            return OWN

        def unused():
            return OTHER

        def step():
            return helper() * middle.twice()

        def lazy():
            from toy.late import late
            return late()
        """,
    "late.py": "def late():\n    return 5\n",
    "aside.py": "X = 1\n",
}


@pytest.fixture
def toy(tmp_path):
    """A copy of artifacts.py, and of what it imports, in a package of its own, whose modules can be edited; returns a
    function that runs code in a fresh interpreter and gives what it prints, by line."""
    folder = tmp_path / "toy"
    folder.mkdir()
    own = {name: (artifacts.PACKAGE / name).read_text() for name in ("artifacts.py", "files.py", "errors.py")}
    for name, text in (PACKAGE | own).items():
        (folder / name).write_text(textwrap.dedent(text).replace("drehr_utils", "toy"))

    def run(code):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.split()

    run.folder = folder
    return run


DIGESTS = "from toy import artifacts, top\nfor part in (top.step, top.lazy, top): print(artifacts.digest(part))"


@pytest.mark.parametrize(
    ("file", "old", "new", "changed"),
    [
        ("deep.py", "return 1", "return 10", (True, False, True)),  # what an imported module imports
        ("middle.py", "CONSTANT = 2", "CONSTANT = 20", (True, False, True)),
        ("top.py", "OWN, OTHER = 3, 4", "OWN, OTHER = 30, 4", (True, False, True)),
        ("top.py", "return OTHER", "return OTHER + 1", (False, False, True)),  # what the step doesn't run
        ("late.py", "return 5", "return 50", (False, True, True)),  # imported inside a function
        ("deep.py", '"""One."""', '"""Uno."""', (False, False, False)),
        ("middle.py", "CONSTANT = 2", "# a comment\nCONSTANT  =  2", (False, False, False)),
        ("aside.py", "X = 1", "X = 2", (False, False, False)),
    ],
)
def test_each_dependency_changes_the_digest_and_a_docstring_does_not(toy, file, old, new, changed):
    before = toy(DIGESTS)
    path = toy.folder / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert tuple(a != b for a, b in zip(before, toy(DIGESTS), strict=True)) == changed


def test_a_live_kernel_stores_under_the_code_that_it_ran(toy):
    edit = "p = toy.deep.__file__; t = open(p).read(); open(p, 'w').write(t.replace('return 1', 'return 7'))\n"
    first, edited, ran, reloaded, now = toy(
        "import importlib, toy.deep\nfrom toy import artifacts, top\nprint(artifacts.digest(top.step))\n"
        + edit
        + "print(artifacts.digest(top.step), top.step())\n"
        "importlib.reload(toy.deep); importlib.reload(top.middle)\nprint(artifacts.digest(top.step), top.step())"
    )
    assert first == edited != reloaded and (ran, now) == ("6", "42")
    assert toy(DIGESTS)[0] == reloaded


def test_made_once_and_nothing_half_made(tmp_path):
    made = []

    def make():
        made.append(1)
        return np.arange(3)

    path = tmp_path / "deep/value.npy"
    for _ in range(2):
        assert artifacts.cached_file(path, make).tolist() == [0, 1, 2]
    assert len(made) == 1

    def fail(partial):
        (partial / "half").write_text("half")
        raise KeyboardInterrupt

    folder = tmp_path / "deep/model"
    with pytest.raises(KeyboardInterrupt):
        artifacts.cached_folder(folder, fail)
    assert not folder.exists() and (tmp_path / "deep/partial-model/half").exists()

    def whole(partial):
        assert list(partial.iterdir()) == [], "a killed run's half is gone"
        (partial / "whole").write_text("whole")

    assert [p.name for p in artifacts.cached_folder(folder, whole).iterdir()] == ["whole"]
    assert sorted(p.name for p in folder.parent.iterdir()) == ["model", "value.npy"]


SLOW = """
import sys, time
from pathlib import Path
from drehr_utils import artifacts
def make(partial):
    with open("made", "a") as log: log.write("x")
    (partial / "a").write_text("a"); print("half", flush=True); time.sleep(float(sys.argv[1]))
    (partial / "b").write_text("b")
artifacts.cached_folder(Path("cache/model"), make)
"""


def start(tmp_path, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", SLOW, str(seconds)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_make_it_once_and_a_killed_ones_half_is_made_anew(tmp_path):
    killed = start(tmp_path, 60)
    assert killed.stdout.readline() == "half\n"
    killed.kill()
    killed.wait()
    assert not (tmp_path / "cache/model").exists()
    first = start(tmp_path, 2)
    assert first.stdout.readline() == "half\n"
    second = start(tmp_path, 2)
    assert "Waiting for process" in second.communicate()[1] and first.wait() == second.returncode == 0
    assert (tmp_path / "made").read_text() == "xx" and sorted(p.name for p in (tmp_path / "cache/model").iterdir()) == [
        "a",
        "b",
    ]


def test_sweeping_leaves_what_is_being_made(tmp_path):
    (tmp_path / "cache/partial-old").mkdir(parents=True)
    (tmp_path / "cache/partial-file.npy").write_text("half")
    busy = start(tmp_path, 3)
    assert busy.stdout.readline() == "half\n"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    of_files = [tmp_path / f"cache/partial-{pid}-a.json" for pid in (gone.pid, busy.pid)]  # files.write_atomically's
    for path in of_files:
        path.write_text("half")
    artifacts.sweep(tmp_path / "cache")
    assert [path.exists() for path in of_files] == [False, True] and not list(tmp_path.glob("cache/.*-a.json.lock"))
    of_files[1].unlink()
    assert busy.wait() == 0
    assert (tmp_path / "cache/model/a").exists() and not list((tmp_path / "cache").glob("partial-*"))


def test_a_lock_names_its_holder(tmp_path):
    with artifacts.lock(tmp_path / "x.lock", "a long run", wait=False):
        with pytest.raises(DataError, match=r"process \d+ on .*, a long run since .*; wait for it"):
            with artifacts.lock(tmp_path / "x.lock", "another", wait=False):
                pass
    with artifacts.lock(tmp_path / "x.lock", "another", wait=False):
        pass


def test_a_models_card_is_no_part_of_what_is_made_with_it(tmp_path):
    (tmp_path / "model.safetensors").write_text("weights")
    first = artifacts.digest(tmp_path)
    (tmp_path / "README.md").write_text("another sentence")
    assert artifacts.digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_text("others")
    assert artifacts.digest(tmp_path) != first
