"""Canaries in the notes and ids of a protected corpus, stages run under faults: none is found outside its folders.

All stages and faults: tests/long/canaries.py."""

import gzip
import signal
import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import planted
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from llm_server import chat_server

from drehr_utils.config import MINILM
from drehr_utils.evaluation import plots
from drehr_utils.knowledge.graph import load_bios
from drehr_utils.profiles import ROOT
from drehr_utils.search.hybrid import Hybrid, Weights
from drehr_utils.training.encoders import load_encoder

SEARCH = "drehr_utils.use.search"
HIDDEN = "RuntimeError (its message may quote a note, so it is not shown)"
# Every kind of leak at once, by one who can read the notes.
LEAKY = """
import gzip, os, pathlib, socket, sys, warnings
text = gzip.open(os.path.join(os.environ["CANARY_PLACE"], "mimic/mimic-iv-note/note/discharge.csv.gz"), "rt").read()
for folder in (os.environ["TMPDIR"], os.environ["HOME"] + "/.cache", "figures", "data/cache/other"):
    pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
pathlib.Path(os.environ["TMPDIR"], "a.log").write_text(text)
pathlib.Path(os.environ["HOME"], ".cache/b.gz").write_bytes(gzip.compress(text.encode()))
pathlib.Path("data/cache/other/c.txt").write_text(text.split(",")[8])  # a patient's id
pathlib.Path("data/cache/canaries/figures").mkdir(parents=True)
pathlib.Path("data/cache/canaries/figures/d.csv").write_text(text)
pathlib.Path("data/cache/canaries").chmod(0o755)
pathlib.Path(OUTSIDE).write_text(text)
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
    one.sendto(b"", ("192.0.2.1", 9))  # an address that belongs to nobody
raise ValueError(text[:500])
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> planted.Place:
    """With the release joined, and a hybrid for drehr-search."""
    place = planted.plant(tmp_path_factory.mktemp("canaries"))
    code, printed = place.run(*planted.release_command(place))
    assert code == 0 and place.leaks(printed) == [], printed
    hybrid = Hybrid(load_encoder(MINILM), load_bios(place.root / "mimic/bios"), Weights(0.2, 0.2))
    hybrid.save(place.root / "hybrid")
    return place


def test_the_search_finds_what_is_packed(tmp_path):
    """Or the other tests would prove nothing. A picture's letters it can't read."""
    place = planted.Place(tmp_path, "zqcanary", "12345678")
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"x ZQCANARY"))
    np.savez_compressed(tmp_path / "b.npz", np.array(["zqcanary"]))
    figure, _ = plt.subplots()
    figure.savefig(tmp_path / "c.pdf", metadata={"Title": "zqcanary"})
    figure.savefig(tmp_path / "d.png", metadata={"Comment": "of 12345678"})
    figure.suptitle("zqcanary")
    for name, font_type in (("e", 3), ("e-notebooks", 42)):  # the second as plots.set_style has it
        with plt.rc_context({"pdf.fonttype": font_type}):
            plots.save_figure(figure, name, tmp_path)
    pq.write_table(pa.table({"text": ["a", "of the zqcanary " * 9, "z"]}), tmp_path / "f.parquet", compression="brotli")
    assert b"zqcanary" not in (tmp_path / "f.parquet").read_bytes()
    (tmp_path / "zqcanary.txt").touch()
    (tmp_path / "none.gz").write_bytes(gzip.compress(b"nothing"))
    figures = ["c.pdf", "d.png", "e-notebooks.pdf", "e.pdf"]
    assert place.holding(tmp_path) == ["a.gz", "b.npz", *figures, "f.parquet", "zqcanary.txt"]


def test_leaks_are_found(tmp_path):
    """Planted on purpose: in a temporary folder, a home, a cache, a figure, git's objects, outside, sent and said."""
    place, outside = planted.plant(tmp_path / "place"), tmp_path / "outside"
    (place.checkout / "leaky.py").write_text(LEAKY.replace("OUTSIDE", repr(str(outside))))
    place.git("add", "-A")
    place.git("commit", "-qm", "with a leak")
    code, printed = place.run("leaky")
    (place.checkout / "a.txt").write_text(f"{place.word}0000")
    place.git("add", "a.txt")
    place.git("rm", "-qf", "a.txt")  # its object stays
    found = "\n".join(place.leaks(printed))
    assert code == 1
    for where in (
        "tmp/a.log in a", "home/.cache/b.gz in a", "checkout/data/cache/other/c.txt in a", "figures/d.csv holds",
        "canaries/ is open", f"wrote {outside}", "called ('192.0.2.1', 9)", "the terminal: ", "checkout/.git/objects/",
    ):  # fmt: skip
        assert where in found, (where, found)
    assert "mimic" not in found


@pytest.mark.parametrize(
    "raised, shown", [("RuntimeError(text) from ValueError(text)", HIDDEN), ("DataError('row 7')", "DataError: row 7")]
)
def test_an_error_shows_its_place_and_kind(raised, shown):
    code = f"""
from pathlib import Path
from drehr_utils.errors import DataError
from drehr_utils.files import keep_private
text = "zq" + "canary"
keep_private(Path("none"))
try:
    int(text)
finally:
    raise {raised}
"""
    said = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert said.returncode == 1 and "line 10, in <module>" in said.stderr
    assert said.stderr.splitlines()[-1] == shown and "zqcanary" not in said.stderr


def test_an_error_that_no_caller_hears_of_hides_its_message_too():
    code = (
        "from drehr_utils.files import hide_messages\nhide_messages()\n"
        "class Lost:\n    def __del__(self):\n        raise ValueError('zq' + 'canary')\nlost = Lost()\ndel lost\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert "ValueError (its message" in done.stderr and "zqcanary" not in done.stderr


def test_a_crash_leaves_no_core_file(tmp_path):
    code = (
        "import os, resource as r\nfrom drehr_utils.files import hide_messages\n"
        "r.setrlimit(r.RLIMIT_CORE, (r.getrlimit(r.RLIMIT_CORE)[1],) * 2)\nhide_messages()\nos.abort()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == -signal.SIGABRT and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_cell_that_shows_a_note_and_fails(place):
    code, printed = place.notebook("90")
    assert code == 1 and "90_careless.ipynb, cell 2 failed with ValueError" in printed, printed
    held = place.holding(place.cache)
    assert any("failed/90_careless.ipynb" in path for path in held) and any("logs/" in path for path in held)
    assert place.leaks(printed) == []


@pytest.mark.slow
def test_a_run_that_is_killed(place):
    code, printed = place.notebook("01", fault="killrun:kernel:6")
    assert code == -9 and len(place.fired()) == 1, printed
    assert place.leaks(printed) == []


@pytest.mark.slow
def test_a_server_that_quotes_the_notes_in_errors_and_in_answers(place):
    for reply, status in ((place.hostile, 1), (place.reply, 0)):
        with chat_server(reply) as server:
            code, printed = place.notebook("03", base_url=server.base_url)
            assert place.word in str(server.bodies), "the notes were asked about"
        assert code == status, printed
        assert place.leaks(printed) == []


@pytest.mark.slow
def test_drehr_search(place):
    index = ("index", str(place.root / "mimic/mimic-iv-note"), "--model", str(place.root / "hybrid"))
    at = ("--index", str(place.index))
    for fault, status in (("kill:command:4", -9), ("raise:command:20", 1), ("size:command:100000", 1)):
        code, printed = place.run(SEARCH, *index, *at, fault=fault)
        assert code == status and (HIDDEN in printed) == fault.startswith("raise"), printed
        assert place.leaks(printed) == []
    code, printed = place.run(SEARCH, *index, *at)
    assert code == 0 and "notes added" in printed and place.leaks(printed) == [], printed
    assert place.holding(place.index)
    code, printed = place.run(SEARCH, "query", "heart failure", *at)
    assert code == 0 and place.word in printed and place.leaks() == []  # a hit shows its text, and that's all


@pytest.mark.slow
def test_an_error_that_nobody_foresaw_keeps_its_message(place):
    """On the terminal it has its place in the code and its kind."""
    for command in (("drehr_utils.run", "--profile", str(place.toml), "--check"), planted.release_command(place)):
        code, printed = place.run(*command, fault="raise:command:3")
        assert code == 1 and HIDDEN in printed and ".py" in printed and place.leaks(printed) == [], printed
