"""SIGKILL while answers are kept: what was committed is there, once, and the next run does the rest."""

import json
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from llm_server import chat_server

from drehr_utils.files import open_database
from drehr_utils.llm.answers import AnswerStore
from drehr_utils.llm.client import answer_all
from drehr_utils.llm.prompts import Request
from drehr_utils.llm.servers import Server
from drehr_utils.profiles import ROOT
from drehr_utils.search.embedding_api import EmbeddingStore


def drugs(n: int) -> list[Request]:
    return [Request("entity_generation", f"p_{i}", f"note {i}", "drugs") for i in range(n)]


def started(program: str, *arguments: object) -> subprocess.Popen:
    """The program in a process of its own, its standard output a pipe."""
    common = "import sys; from pathlib import Path; from drehr_utils.llm.prompts import Request\n"
    common += "drugs = lambda n: [Request('entity_generation', f'p_{i}', f'note {i}', 'drugs') for i in range(n)]\n"
    command = [sys.executable, "-c", common + program, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen) -> str:
    """Kills it, says what it had printed."""
    process.send_signal(signal.SIGKILL)
    printed = process.communicate()[0]
    assert process.returncode == -signal.SIGKILL, "it had ended by itself"
    return printed


def rows(path: Path, columns: str) -> list[tuple]:
    """Of a database that is whole."""
    with closing(open_database(path, "")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return database.execute(f"SELECT {columns}").fetchall()


ASKING = """
from drehr_utils.llm.client import answer_all
from drehr_utils.llm.servers import Server
answer_all(drugs(120), store=Path(sys.argv[1]), server=Server(sys.argv[2], "m", concurrency=8), progress=False)
"""


@pytest.mark.parametrize("after", [1, 60])
def test_a_run_killed_while_it_asks_goes_on(tmp_path, after):
    store, texts, running = tmp_path / "s.sqlite", {}, []

    def reply(prompt: str, body: dict) -> str:
        texts[prompt] = f"- answer {len(texts)}"
        if len(texts) == after + 8:  # eight are in flight
            running[0].send_signal(signal.SIGKILL)
        return texts[prompt]

    with chat_server(reply) as server:
        running.append(started(ASKING, store, server.base_url))
        assert running[0].wait() == -signal.SIGKILL
        running[0].communicate()
        kept = dict(rows(store, "id, answer FROM answers"))
        assert after <= len(kept) < 120 and set(kept.values()) <= set(texts.values())
        asked = len(server.bodies)
        answers = answer_all(drugs(120), store=store, server=Server(server.base_url, "m"), progress=False)
        assert (
            (answers.stored, answers.asked) == (len(kept), 120 - len(kept)) == (len(kept), len(server.bodies) - asked)
        )
    found = rows(store, "id, answer FROM answers")
    assert len(found) == len(dict(found)) == 120 and kept.items() <= dict(found).items()


APPENDING = """
from drehr_utils.llm.answers import AnswerStore
store = AnswerStore(Path(sys.argv[1]))
for request in drugs(1_000_000):
    store.append(request, {"answer": f"- {request.id}", "model": "m"})
    print(request.id, flush=True)
"""


@pytest.mark.slow
def test_no_answer_that_was_committed_is_lost(tmp_path):
    """Killed again and again in the middle of appending, which goes on from the first answer each time."""
    store, most = tmp_path / "s.sqlite", 0
    for patience in (0.01, 0.2):
        process = started(APPENDING, store)
        first = process.stdout.readline()
        time.sleep(patience)
        printed = (first + kill(process)).splitlines()
        found = rows(store, "id, answer FROM answers ORDER BY number")
        most = max(most, len(printed))
        assert most <= len(found) <= most + 1
        assert found == [(f"p_{i}", f"- p_{i}") for i in range(len(found))]


COPYING = """
from drehr_utils.llm import answers
print("ready", flush=True)
answers.AnswerStore(Path(sys.argv[1]), [Path(p) for p in sys.argv[2:]])
print("copied", flush=True)
"""


@pytest.mark.parametrize("name", ["s.jsonl", "recorded.jsonl"])
def test_a_file_copied_in_by_halves_is_copied_again(tmp_path, name):
    store, path, n = tmp_path / "s.sqlite", tmp_path / name, 40_000
    with open(path, "w") as file:
        for r in drugs(n):
            line = {"task": r.task, "entity_type": r.entity_type, "id": r.id, "text_sha256": r.text_sha256}
            file.write(json.dumps(line | {"answer": f"- {r.id}", "model": "m"}) + "\n")
    recorded = [path] if name == "recorded.jsonl" else []
    process = started(COPYING, store, *recorded)
    process.stdout.readline()
    wal = Path(f"{store}-wal")
    while not wal.exists() or wal.stat().st_size < 1_000_000:  # it is at it
        time.sleep(0.001)
    assert "copied" not in kill(process)
    assert rows(store, "count(*) FROM answers") == [(0,)], "all of a file or nothing"
    kept = AnswerStore(store, recorded)
    assert kept.find(drugs(n)[-1])[0] == ("recorded" if recorded else "stored")
    assert rows(store, "count(*), count(DISTINCT id) FROM answers") == [(n, n)]


def test_processes_that_open_a_new_store_at_once_copy_a_file_once(tmp_path):
    store, lines = tmp_path / "s.sqlite", []
    for r in drugs(300):
        line = {"task": r.task, "entity_type": r.entity_type, "id": r.id, "text_sha256": r.text_sha256, "answer": "-"}
        lines.append(json.dumps(line | {"model": "m"}))
    (tmp_path / "s.jsonl").write_text("\n".join(lines) + "\n")
    processes = [started(COPYING, store) for _ in range(4)]
    assert {process.communicate()[0] for process in processes} == {"ready\ncopied\n"}
    assert rows(store, "count(*) FROM answers") == [(300,)] and rows(store, "count(*) FROM files") == [(1,)]


EMBEDDING = """
import numpy as np
from drehr_utils.search.embedding_api import EmbeddingStore
store = EmbeddingStore(Path(sys.argv[1]), "m")
for i in range(100_000):
    store.append([f"{i} {k}" for k in range(4)], np.full((4, 256), i, np.float32))
    print(i, flush=True)
"""


def test_embeddings_are_kept_batch_by_batch(tmp_path):
    process = started(EMBEDDING, tmp_path)
    first = process.stdout.readline()
    time.sleep(0.1)
    printed = (first + kill(process)).splitlines()
    store = EmbeddingStore(tmp_path, "m")
    assert rows(store.path, "count(*) FROM vectors")[0][0] in (4 * len(printed), 4 * len(printed) + 4)
    for i in range(len(printed)):
        for k in range(4):
            np.testing.assert_array_equal(store.get(f"{i} {k}"), np.full(256, i, np.float32))


AT_ONCE = """
import os, sys, time
from drehr_utils.llm.answers import AnswerStore

def opened(path, at):
    while time.time() < at:
        pass
    AnswerStore(path)

for n in range(60):
    path, at, children = Path(sys.argv[1]) / str(n) / "answers", time.time() + 0.05, []
    for _ in range(6):
        if not (child := os.fork()):
            opened(path, at)
            os._exit(0)
        children.append(child)
    print(*(os.waitpid(child, 0)[1] for child in children))
"""


def test_processes_that_make_a_store_at_once_wait_for_each_other(tmp_path):
    """Going over to a write-ahead log is the one statement for which sqlite doesn't wait."""
    printed, _ = started(AT_ONCE, tmp_path).communicate(timeout=120)
    assert printed.split() == ["0"] * 360
