"""Canary words in the notes of a protected corpus, notebooks run under faults: no canary outside the profile's folder.

The run has a checkout, a home and a temporary folder of its own, so that all it leaves behind can be searched."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import numpy as np
import pytest
from llm_server import chat_server
from nbformat.v4 import new_code_cell, new_notebook

from drehr_utils.data.notes import read_table
from drehr_utils.evaluation import plots
from drehr_utils.profiles import ROOT

CANARY = "zqcanary"  # then four digits: lower-case letters, which cleaning leaves alone
NAME = "protected-canaries"
# What a careless cell does with a note; each of them must stay in the profile's folder.
CARELESS = """
import logging, os, sys, warnings
from drehr_utils import pipeline
from drehr_utils.evaluation import plots
from drehr_utils.profiles import load_profile
import matplotlib.pyplot as plt
profile = load_profile(profile)
text = pipeline.notes(profile)[0][0].text
canary = "zq" + "canary"  # this notebook holds it only once it has run
assert canary in text
print(text)
warnings.warn(text)
logging.getLogger("drehr_utils").error(text)
os.system(f"echo {canary} >&2")
figure, axes = plt.subplots()
axes.set_title(text[:400])
plots.save_figure(figure, "fig_careless", profile.figures)
raise ValueError(text)
"""
# Every connection that the run's processes make is written down.
SITE = """
import sys
def hook(event, arguments, log={log!r}):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        with open(log, "a") as file:
            file.write(str(arguments[1][0]) + "\\n")
sys.addaudithook(hook)
"""


def texts(path: Path) -> Iterator[bytes]:
    """What a file holds: its bytes and, of a gzip, a zip, a PDF or a PNG, what is packed in it."""
    data = path.read_bytes()
    yield path.name.encode()
    yield data
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from (archive.read(name) for name in archive.namelist())
    # Compressed pieces of any format: gzip's members, a PDF's streams, a PNG's text chunks, git's objects.
    for start in re.finditer(rb"\x1f\x8b\x08|\x78[\x01\x5e\x9c\xda]", data):
        unpack = zlib.decompressobj(31 if data[start.start()] == 0x1F else 15)
        try:
            yield unpack.decompress(data[start.start() :])
        except zlib.error:
            continue


KERNED = re.compile(rb"\)\s*-?[\d.]+\s*\(")  # between two letters of a word in a PDF


def holding(folder: Path, word: str, but: tuple[Path, ...] = ()) -> list[str]:
    """The files under `folder`, those in `but` aside, that hold the word in any case: bytes, UTF-16, UTF-32 (numpy's)
    or a PDF's text."""
    forms = [word.encode(encoding) for encoding in ("ascii", "utf-16-le", "utf-32-le")]

    def found(path: Path) -> bool:
        parts = [part.lower() for part in texts(path)]
        return any(form in part for form in forms for part in [*parts, *(KERNED.sub(b"", part) for part in parts)])

    return [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not any(path.is_relative_to(other) for other in but) and found(path)
    ]


def test_the_search_finds_what_is_packed(tmp_path):
    """Or the other tests would prove nothing. A picture's letters it can't read."""
    (tmp_path / "a.gz").write_bytes(gzip.compress(f"x {CANARY.upper()}".encode()))
    np.savez_compressed(tmp_path / "b.npz", np.array([CANARY]))
    figure, _ = plt.subplots()
    figure.savefig(tmp_path / "c.pdf", metadata={"Title": CANARY})
    figure.savefig(tmp_path / "d.png", metadata={"Comment": CANARY})
    figure.suptitle(CANARY)
    figure.savefig(tmp_path / "e.svg")  # in a comment beside the letters' outlines
    plots.save_figure(figure, "f", tmp_path)
    (tmp_path / f"{CANARY}.txt").touch()
    (tmp_path / "none.gz").write_bytes(gzip.compress(b"nothing"))
    assert holding(tmp_path, CANARY) == ["a.gz", "b.npz", "c.pdf", "d.png", "e.svg", "f.pdf", f"{CANARY}.txt"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with `checkout` (a git repository of the files as they are), `notes`, `home`, `tmp` and a profile."""
    place = tmp_path_factory.mktemp("canaries")
    listed = ["git", "ls-files", "-co", "--exclude-standard", "drehr_utils", "notebooks", "data", ".gitignore"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).exists():
            (target := place / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    careless = new_notebook(cells=[
        new_code_cell('profile = "open"', metadata={"tags": ["parameters"]}), new_code_cell(CARELESS)
    ])  # fmt: skip
    nbformat.write(careless, place / "checkout/notebooks/90_careless.ipynb")
    if (ROOT / "data/cache/kg").is_dir():  # the graph is of no note, and takes a while to make
        shutil.copytree(ROOT / "data/cache/kg", place / "checkout/data/cache/kg")
    for name in ("notes", "home", "tmp", "site"):
        (place / name).mkdir()
    git(place, "init", "-q")
    git(place, "add", "-A")
    git(place, "-c", "user.name=x", "-c", "user.email=x", "commit", "-qm", "all")
    table = read_table(ROOT / "data/open_notes/discharge.csv.gz", ("note_id", "subject_id", "hadm_id", "text"))[:12]
    for row, note in table.iterrows():
        words = note["text"].split(" ")
        for at in range(0, len(words), 40):  # in every chunk
            words[at] += f" {CANARY}{row:04d}"
        table.loc[row, "text"] = " ".join(words)
    table.to_csv(place / "notes/discharge.csv.gz", index=False)
    splits = table[["subject_id", "note_id"]].assign(split=["train"] * 8 + ["dev"] * 2 + ["test"] * 2)
    splits.to_csv(place / "notes/splits.csv", index=False)
    (place / f"{NAME}.toml").write_text(
        f'base = "smoke"\nnotes = "notes"\nrecorded_answers = []\nunanswered = 0.9\nlanes = 1\nname = "{NAME}"\n'
    )
    (place / "site/sitecustomize.py").write_text(SITE.format(log=str(place / "connections")))
    return place


def git(place: Path, *arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=place / "checkout", capture_output=True, text=True, check=True).stdout


def start(place: Path, notebooks: str, base_url: str) -> subprocess.Popen:
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(place / "home"), "TMPDIR": str(place / "tmp"), "LANG": "C.UTF-8",
        "DREHR_ROOT": str(place / "checkout"), "PYTHONPATH": f"{place / 'checkout'}:{place / 'site'}",
        "DREHR_LLM_BASE_URL": base_url, "DREHR_LLM_MODEL": "m", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "drehr_utils.run", "--profile", str(place / f"{NAME}.toml"), "--only", notebooks]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=place / "checkout", env=environment, **options)


def assert_contained(place: Path, printed: str) -> None:
    own = place / "checkout/data/cache" / NAME
    assert CANARY not in printed.lower(), "on the terminal"
    assert holding(own, CANARY), "the run read the notes"
    assert holding(place, CANARY, but=(own, place / "notes")) == [], "git's objects are searched too"
    assert git(place, "status", "--porcelain") == "", "nothing of the checkout changed, nothing is left to be added"
    connected = (place / "connections").read_text().split() if (place / "connections").exists() else []
    assert set(connected) <= {"127.0.0.1", "::1", "localhost"}


def hostile(prompt: str, body: dict):
    """Quotes the note as its answer or obeys it; of the later notes it quotes them in errors, or says nothing."""
    note, kind, quoted = re.search(rf"{CANARY}(\d+)", prompt), zlib.crc32(prompt.encode()) % 3, prompt[:2000]
    if note and int(note[1]) > 4:
        return (lambda h: error(h, 400, quoted), lambda h: error(h, 200, quoted), "")[kind]
    return quoted if kind == 0 else f"- gout\n- {note and note[0]} gout"


def error(handler, status: int, text: str) -> None:
    data = json.dumps({"error": {"message": text}}).encode()
    handler.send_response(status, text[:20].replace("\n", " "))
    handler.send_header("content-length", str(len(data)))
    handler.send_header("x-echo", re.sub(r"[^ -~]", " ", text[:200]))
    handler.end_headers()
    handler.wfile.write(data)


@pytest.mark.slow
def test_four_notebooks_with_a_server_that_quotes_the_notes(place):
    with chat_server(hostile) as server:
        run = start(place, "01,02,03,04", server.base_url)
        printed = run.communicate(timeout=900)[0]
    assert run.returncode == 0, printed
    assert server.bodies and CANARY in str(server.bodies), "the notes were asked about"
    assert_contained(place, printed)


@pytest.mark.slow
def test_a_cell_that_quotes_a_note_and_fails(place):
    run = start(place, "90", "")
    printed = run.communicate(timeout=300)[0]
    assert run.returncode == 1 and "90_careless.ipynb, cell 2 failed with ValueError" in printed, printed
    assert_contained(place, printed)


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_asks(place):
    shutil.rmtree(place / "checkout/data/cache" / NAME / "llm", ignore_errors=True)
    asked, never = threading.Event(), threading.Event()

    def reply(prompt: str, body: dict) -> str:
        asked.set()
        never.wait(60)
        return prompt

    with chat_server(reply) as server:
        run = start(place, "03", server.base_url)
        assert asked.wait(300), run.poll()
        run.send_signal(signal.SIGKILL)
        printed = run.communicate(timeout=60)[0]
        never.set()
    assert run.returncode == -signal.SIGKILL
    assert_contained(place, printed)
