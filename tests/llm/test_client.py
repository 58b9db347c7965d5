"""The LLM client against a real HTTP server on this machine, and the parsers on hand-written and recorded answers."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import logging
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from llm_server import running

from drehr_utils.errors import DataError
from drehr_utils.llm import client, servers
from drehr_utils.llm.answers import Answers, AnswerStore
from drehr_utils.llm.client import answer_all
from drehr_utils.llm.prompts import (
    ENTITY_PROMPT,
    ENTITY_TYPES,
    PAPER_PROMPT_SHA256,
    PROMPTS,
    Request,
    estimated_tokens,
    parse_abbreviations,
    parse_entities,
    prompt_sha256,
)
from drehr_utils.llm.servers import Server
from drehr_utils.profiles import ROOT

RECORDED = ROOT / "data/llm_answers/train.jsonl.gz"

FIGURE_2 = """Replace the abbreviations of medical entities with their full names in the
clinical note below. For one abbreviation, only output once unless it refers
to different full names in the note. If no abbreviation is found in the note,
please output "NA". Otherwise, output in the following format (only output
the terms and nothing else):
###[abbreviation]
**[full name]
...

For example:
###ct
**computed tomography

###wbc
**white blood cell

Now the task begins. Here is the note:
%s"""

FIGURE_3 = """%s

Briefly summarize the %s explicitly mentioned or that can be
implicitly inferred from the medical record above. Only output the entity
names (in their standardized terms) in a list. Do not output the reasons.

Output format:
- Entity 1
- Entity 2
..."""


def completion(text: str | None, finish_reason: str = "stop") -> dict:
    message = {"role": "assistant", "content": text}
    return {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": finish_reason, "message": message}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


Reply = Callable[[int, dict], tuple[int, dict | bytes]]


class FakeServer(ThreadingHTTPServer):
    """Speaks POST /v1/chat/completions; `reply(n, body)` gets the number of the call, from 1, and the request."""

    daemon_threads = True

    def __init__(self, reply: Reply, headers: dict[str, str]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply, self.headers, self.bodies = reply, headers, []
        self.lock, self.two_at_once = threading.Lock(), threading.Event()
        self.in_flight = self.most_in_flight = self.done = 0
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"

    def prompts(self) -> list[str]:
        return [body["messages"][0]["content"] for body in self.bodies]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet, or each answer waits 40 ms for an acknowledgement
    server: FakeServer

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self.answer(404, {"error": {"message": "no list of models here"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            number = len(self.server.bodies)
            self.server.in_flight += 1
            self.server.most_in_flight = max(self.server.most_in_flight, self.server.in_flight)
            if self.server.in_flight > 1:
                self.server.two_at_once.set()
        status, payload = self.server.reply(number, body)
        with self.server.lock:
            self.server.in_flight -= 1
            self.server.done += 1
        self.answer(status, payload)

    def answer(self, status: int, payload: dict | bytes) -> None:
        data = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        headers = {"content-type": "application/json", "content-length": str(len(data)), "retry-after-ms": "1"}
        for name, value in (headers | self.server.headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def serving(reply: Reply = lambda n, body: (200, completion(f"- entity {n}")), **headers: str) -> Iterator[FakeServer]:
    with running(FakeServer(reply, headers)) as server:
        yield server


def dead_url() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/v1"


def drugs(n: int, note: str = "note") -> list[Request]:
    return [Request("entity_generation", f"p_{i}", f"{note} {i}", "drugs") for i in range(n)]


def ask(requests, server: FakeServer, store: Path | None = None, recorded=(), **options) -> Answers:
    options = {"concurrency": 4, "max_retries": 0} | options
    return answer_all(
        requests, recorded=recorded, store=store, server=Server(server.base_url, "m", **options), progress=False
    )


def line(request: Request, answer: str, **more) -> str:
    row = {"task": request.task, "entity_type": request.entity_type, "id": request.id}
    return json.dumps(row | {"text_sha256": hashlib.sha256(request.text.encode()).hexdigest(), "answer": answer} | more)


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def rows(path: Path | None, recorded=(), columns: str = "id") -> list[tuple]:
    """What a store's database holds, in the order in which it came."""
    database = AnswerStore(path, recorded).database
    return database.execute(f"SELECT {columns} FROM answers ORDER BY number").fetchall()


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts_are_sent_as_printed_and_the_note_survives():
    note = "braces {} {note} {entity_type} {0!r} %s \\1 \\g<0>\nlactate 2.1 \u2028 é 😀"
    requests = [Request("abbreviation_reduction", "a_0", note)]
    requests += [Request("entity_generation", "a_0", note, kind) for kind in ENTITY_TYPES]
    with serving() as server:
        ask(requests, server, concurrency=1, temperature=0.0, max_tokens=99, seed=5)
    assert server.prompts() == [FIGURE_2 % note] + [FIGURE_3 % (note, kind) for kind in ENTITY_TYPES]
    assert len(ENTITY_TYPES) == 3
    body = server.bodies[0]
    assert (body["model"], body["temperature"], body["max_tokens"], body["seed"]) == ("m", 0.0, 99, 5)


def test_prompt_hashes_are_the_papers():
    assert {task: prompt_sha256(task) for task in PAPER_PROMPT_SHA256} == PAPER_PROMPT_SHA256
    as_template = FIGURE_3 % ("{note}", "{entity_type}")
    assert PAPER_PROMPT_SHA256["entity_generation"] == hashlib.sha256(as_template.encode()).hexdigest()


def test_bad_requests_are_named():
    with pytest.raises(DataError, match="no prompt for task 'translation'"):
        Request("translation", "a_0", "x").prompt()
    with pytest.raises(DataError, match="a_0, field entity_type: .* needs an"):
        Request("entity_generation", "a_0", "x").prompt()
    with pytest.raises(DataError, match="takes no"):
        Request("abbreviation_reduction", "a_0", "x", "drugs").prompt()
    with serving() as server, pytest.raises(DataError, match="p_0 .* twice"):
        ask(drugs(2) + drugs(1), server)


def test_a_new_task_is_one_more_template(monkeypatch):
    monkeypatch.setitem(PROMPTS, "drug_name_cleaning", "Clean: {note}")
    with serving() as server:
        answers = ask([Request("drug_name_cleaning", "d1", "ASPIRIN 81MG TAB")], server)
    assert server.prompts() == ["Clean: ASPIRIN 81MG TAB"]
    assert answers.texts == {("drug_name_cleaning", None, "d1"): "- entity 1"}


def test_tokens_are_estimated_from_the_prompts():
    requests = drugs(3, note="x" * 100)
    assert estimated_tokens(requests) == round(sum(len(FIGURE_3 % (r.text, "drugs")) for r in requests) / 4)


# --- recorded answers and the store ----------------------------------------------------------------------------------


def test_recorded_answers_need_no_server(tmp_path):
    requests = drugs(3)
    path = write(tmp_path / "r.jsonl", *(line(r, f"- {r.id}") for r in requests))
    expected = {r.key: f"- {r.id}" for r in requests}
    assert answer_all(requests, recorded=[path], progress=False).texts == expected
    # A server that is set but isn't there doesn't matter either: nobody calls it.
    answers = answer_all(requests, recorded=[path], server=Server(dead_url(), "m"), progress=False)
    assert (answers.texts, answers.recorded, answers.asked) == (expected, 3, 0)


def test_the_recorded_file_answers_its_own_chunks():
    prompts = rows(None, [RECORDED], "prompt_sha256")
    assert len(prompts) == 4 * 1652 and {prompt for (prompt,) in prompts} == set(PAPER_PROMPT_SHA256.values())


def test_edited_prompt_needs_a_server_and_is_named(tmp_path, monkeypatch):
    requests = drugs(2) + [Request("abbreviation_reduction", "p_0", "note 0")]
    path = write(tmp_path / "r.jsonl", *(line(r, "- x") for r in requests))
    monkeypatch.setitem(PROMPTS, "entity_generation", ENTITY_PROMPT.replace("Briefly", "Thoroughly"))
    with pytest.raises(DataError) as error:
        answer_all(requests, recorded=[path], progress=False)
    message = str(error.value)
    assert "2 of 3 answers are missing" in message
    assert "entity_generation, drugs: 2 (prompt changed)" in message
    assert "abbreviation_reduction" not in message
    for name in ("DREHR_LLM_BASE_URL", "DREHR_LLM_MODEL", "OPENAI_API_KEY"):
        assert name in message
    store = tmp_path / "ours.sqlite"
    with serving() as server:
        answers = ask(requests, server, store, [path])
        assert (answers.recorded, answers.stale_prompt, answers.asked) == (1, 2, 2)
        assert all("Thoroughly" in prompt for prompt in server.prompts())
    # Ours are kept for the edited prompt, the recorded ones come back with the paper's.
    assert answer_all(requests, recorded=[path], store=store, progress=False).stored == 2
    monkeypatch.undo()
    assert answer_all(requests, recorded=[path], store=store, progress=False).recorded == 3


def test_changed_text_is_stale(tmp_path):
    old = drugs(3)
    path = write(tmp_path / "r.jsonl", *(line(r, "- old") for r in old))
    requests = [old[0], Request("entity_generation", "p_1", "another text", "drugs"), old[2], *drugs(4)[3:]]
    with pytest.raises(DataError, match=r"2 of 4 .*1 \(never recorded\); .*1 \(text changed\)") as error:
        answer_all(requests, recorded=[path], progress=False)
    assert "another text" not in str(error.value)
    with serving() as server:
        answers = ask(requests, server, recorded=[path])
    assert (answers.stale_text, answers.recorded, answers.asked) == (1, 2, 2)
    assert answers.texts[requests[1].key] != "- old"
    report = answers.report().set_index("what")["count"]
    assert report["stale text"] == 1 and report["recorded"] == 2 and report["failed"] == 0


def test_damaged_lines_are_counted_and_logged_without_text(tmp_path, caplog):
    r = drugs(5)
    path = tmp_path / "r.jsonl"
    secret = "SECRETNOTE"
    bad = [
        b'{"task": "' + secret.encode(),
        b"[1, 2]",
        line(r[1], "x").replace('"answer": "x"', '"answer": 3').encode(),
        line(r[1], "x").replace('"id"', '"idd"').encode(),
        line(r[1], "x", model=[secret]).encode(),
        b'{"task": "\xff\xfe"}',
        b"[" * 100_000,
    ]
    good = [line(r[0], "- first").encode(), b"", line(r[0], "- last").encode(), line(r[2], "- two").encode()]
    path.write_bytes(b"\n".join(good[:2] + bad + good[2:] + [line(r[3], "- cut").encode()[:-20]]))
    answers = answer_all([r[0], r[2]], recorded=[path], progress=False)
    assert answers.texts == {r[0].key: "- last", r[2].key: "- two"}
    assert (answers.malformed_lines, answers.conflicting) == (len(bad) + 1, 1)
    assert "r.jsonl, row 3, column 10: not JSON" in caplog.text
    assert secret not in caplog.text and str(tmp_path) not in caplog.text


def test_gzip_cut_short_keeps_what_can_be_read(tmp_path):
    requests = drugs(2000)
    data = gzip.compress("".join(line(r, "- x") + "\n" for r in requests).encode())
    path = tmp_path / "r.jsonl.gz"
    path.write_bytes(data[: len(data) // 2])
    kept = AnswerStore(None, [path])
    assert kept.counts["malformed_lines"] == 1
    assert 0 < kept.database.execute("SELECT count(*) FROM answers").fetchone()[0] < 2000
    path.write_bytes(b"no gzip at all")
    assert rows(None, [path]) == []


def test_missing_recorded_file_and_a_store_that_is_no_database_are_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl: no such file") as error:
        answer_all(drugs(1), recorded=[tmp_path / "nowhere.jsonl"], progress=False)
    assert str(tmp_path) not in str(error.value)
    write(tmp_path / "s.sqlite", line(drugs(1)[0], "- x"))
    with pytest.raises(DataError, match="s.sqlite: file is not a database"):
        answer_all(drugs(1), store=tmp_path / "s.sqlite", progress=False)


def test_an_earlier_versions_store_is_taken_over(tmp_path, caplog):
    """JSON lines, the last cut by a kill; answers that were paid for are asked for no more."""
    requests, store = drugs(5), tmp_path / "answers.sqlite"
    mine = dict(model="m", finish_reason="stop", prompt_tokens=7, completion_tokens=3)
    lines = [line(r, f"- {r.id}", prompt_sha256=prompt_sha256(r.task), **mine) for r in requests]
    lines[4] = lines[4].replace('"prompt_tokens": 7', f'"prompt_tokens": {10**30}')  # no count of anything
    earlier = write(tmp_path / "answers.jsonl", *lines[:2], lines[2][:-40])
    for _ in range(2):
        with serving() as server:
            answers = ask(requests[:2], server, store)
            assert (answers.stored, answers.asked, answers.malformed_lines, len(server.bodies)) == (2, 0, 1, 0)
        assert answers.texts == {r.key: f"- {r.id}" for r in requests[:2]}
    assert caplog.text.count("answers.jsonl, row 3") == 1 and caplog.text.count("1 malformed lines") == 2
    assert rows(store, columns="prompt_tokens, completion_tokens") == [(7, 3)] * 2
    write(earlier, *lines)  # a backup is put back: what it has more is taken over too
    assert answer_all(requests, store=store, progress=False).stored == 5
    assert len(rows(store)) == 5


def test_recorded_files_are_read_once_and_again_when_they_change(tmp_path, monkeypatch):
    requests, store = drugs(3), tmp_path / "s.sqlite"
    path = write(tmp_path / "r.jsonl", *(line(r, "- old") for r in requests))
    assert answer_all(requests, recorded=[path], store=store, progress=False).recorded == 3
    with monkeypatch.context() as closed:
        closed.setattr("drehr_utils.llm.answers.read_json_lines", None)
        store_again = AnswerStore(store)
        assert store_again.find(requests[0]) == ("never_recorded", None), "whoever doesn't name the file hasn't it"
    write(path, *(line(r, "- new") for r in requests[:2]))
    with pytest.raises(DataError, match="1 of 3 answers are missing"):
        answer_all(requests, recorded=[path], store=store, progress=False)
    answers = answer_all(requests[:2], recorded=[path], store=store, progress=False)
    assert set(answers.texts.values()) == {"- new"}


def test_what_a_store_keeps_of_an_answer(tmp_path):
    request, store = Request("entity_generation", "p_0", "note {} \ud7ff", "drugs"), tmp_path / "new" / "s.sqlite"
    with serving(lambda n, body: (200, completion("- café\u2028x"))) as server:
        ask([request], server, store)
    text_sha256 = hashlib.sha256(request.text.encode()).hexdigest()
    assert rows(store, columns="*") == [
        (1, "entity_generation", "drugs", "p_0", text_sha256, PAPER_PROMPT_SHA256["entity_generation"], "", "m",
         "- café\u2028x", "stop", 7, 3)
    ]  # fmt: skip


def test_half_a_character_is_kept_as_a_question_mark(tmp_path):
    """A model may stop within an emoji; JSON can say so, a database and a tokenizer can't."""
    store = tmp_path / "s.sqlite"
    with serving(lambda n, body: (200, json.dumps(completion("- gout \ud83d")).encode())) as server:
        assert ask(drugs(1), server, store).texts == {drugs(1)[0].key: "- gout ?"}
    assert answer_all(drugs(1), store=store, progress=False).stored == 1


def test_the_digest_is_of_the_answers_and_not_of_their_order(tmp_path):
    requests = drugs(30)
    digests = set()
    for name, order in (("a", requests), ("b", requests[::-1])):
        path = write(tmp_path / f"{name}.jsonl", *(line(r, f"- {r.id}") for r in order))
        answers = answer_all(order, recorded=[path], progress=False)
        digests.add(answers.digest())
        assert list(answers.texts) == sorted(r.key for r in requests) and len(answers.texts) == 30
    assert len(digests) == 1
    path = write(
        tmp_path / "c.jsonl", *(line(r, "- another" if i == 7 else f"- {r.id}") for i, r in enumerate(requests))
    )
    digests.add(answer_all(requests, recorded=[path], progress=False).digest())
    digests.add(answer_all(requests[:29], recorded=[path], progress=False).digest())
    assert len(digests) == 3


def test_another_models_answers_are_not_taken_for_this_ones(tmp_path, monkeypatch):
    store = tmp_path / "s.sqlite"
    with serving() as server:
        first = ask(drugs(2), server, store)
        other = Server(server.base_url, "other", concurrency=1)
        answers = answer_all(drugs(2), store=store, server=other, progress=False)
        assert (answers.other_model, answers.stored, answers.asked) == (2, 0, 2)
        with pytest.raises(DataError, match="s.sqlite has answers of m, other; set DREHR_LLM_MODEL to the one whose"):
            answer_all(drugs(2), store=store, progress=False)
        monkeypatch.setenv("DREHR_LLM_MODEL", "other")
        assert answer_all(drugs(2), store=store, progress=False).texts == answers.texts
        monkeypatch.setenv("DREHR_LLM_MODEL", "third")
        with pytest.raises(DataError, match="2 of 2 answers are missing .* drugs: 2 .another model's"):
            answer_all(drugs(2), store=store, progress=False)
        again = ask(drugs(2), server, store)
    assert again.stored == 2 and again.texts == first.texts, "the first model's are still there"


# --- the client ------------------------------------------------------------------------------------------------------


def test_concurrency_is_used_and_limited_and_requests_are_drawn_lazily():
    drawn, leads = 0, []

    def requests() -> Iterator[Request]:
        nonlocal drawn
        for request in drugs(60):
            drawn += 1
            yield request

    def reply(n: int, body: dict) -> tuple[int, dict]:
        server.two_at_once.wait(5)
        leads.append(drawn - server.done)
        return 200, completion("- x")

    with serving(reply) as server:
        answers = ask(requests(), server, concurrency=3)
    assert answers.asked == len(answers.texts) == 60
    assert 1 < server.most_in_flight <= 3
    assert max(leads) <= 3  # never more out of the iterator than in flight


@pytest.mark.parametrize("status", [429, 500, 503])
def test_transient_errors_are_retried(status):
    seen: dict[str, int] = {}

    def reply(n: int, body: dict) -> tuple[int, dict]:
        prompt = body["messages"][0]["content"]
        seen[prompt] = seen.get(prompt, 0) + 1
        return (status, {"error": {"message": "later"}}) if seen[prompt] <= 2 else (200, completion("- x"))

    with serving(reply) as server:
        answers = ask(drugs(3), server, concurrency=1, max_retries=2)
    assert (answers.asked, answers.failed, len(server.bodies)) == (3, 0, 9)


def test_failures_are_counted_not_stored_and_the_run_goes_on(tmp_path):
    replies = {
        1: (400, {"error": {"message": "too long"}}),
        2: (200, completion("")),
        3: (200, completion(None)),
        4: (200, {"object": "something else"}),
        5: (200, b"{not json"),
        6: (200, completion("- aspirin\n- metopro", finish_reason="length")),
        7: (200, completion("  \n")),
        8: (200, {"choices": []}),
        9: (500, {}),
        10: (200, completion("<think>\nThe note says that", finish_reason="length")),
    }
    store = tmp_path / "s.sqlite"
    with serving(lambda n, body: replies.get(n, (200, completion("- x")))) as server:
        answers = ask(drugs(13), server, store, concurrency=1)
    assert (answers.asked, answers.failed, answers.truncated) == (4, 9, 1)
    assert answers.errors["HTTP 400"] == 1 and answers.errors["empty answer"] == 4 and answers.errors["HTTP 500"] == 1
    assert answers.errors.total() == answers.failed
    assert answers.texts[drugs(6)[5].key] == "- aspirin"  # half a name is no name
    assert len(rows(store)) == 4
    assert "failed: HTTP 400" in set(answers.report()["what"])
    with serving() as server:
        again = ask(drugs(13), server, store)
    assert (again.stored, again.asked, again.truncated) == (4, 9, 1)
    assert again.texts[drugs(6)[5].key] == "- aspirin"


def test_many_400s_are_no_reason_to_stop():
    with serving(lambda n, body: (400, {}) if n <= 40 else (200, completion("- x"))) as server:
        answers = ask(drugs(50), server)
    assert (answers.failed, answers.asked) == (40, 10)


@pytest.mark.parametrize(
    ("reply", "said"), [((400, {}), "HTTP 400: 200"), ((200, completion(" ")), "empty answer: 200")]
)
def test_a_model_that_never_answers_is_asked_two_hundred_times(tmp_path, reply, said):
    store = tmp_path / "s.sqlite"
    with serving(lambda n, body: reply) as server:
        with pytest.raises(DataError, match=f"has answered none of 200 requests .{said}"):
            ask(drugs(1000), server, store)
        assert client.HOPELESS_AFTER <= len(server.bodies) < client.HOPELESS_AFTER + 20
    with serving(lambda n, body: (200, completion("- x"))) as server:
        ask(drugs(1), server, store)
    with serving(lambda n, body: reply) as server:  # it has answered before: it chokes on what is left
        assert ask(drugs(300), server, store).failed == 299


def test_no_server_there_is_said_at_once():
    with pytest.raises(DataError, match=r"127.0.0.1:\d+/v1 does not answer .*is running and serves m"):
        answer_all(drugs(1000), server=Server(dead_url(), "m"), progress=False)


@pytest.mark.parametrize("n", [5, 1000])
def test_wrong_key_or_model_stops_the_run(n):
    with serving(lambda k, body: (404, {"error": {"message": "no such model"}})) as server:
        with pytest.raises(DataError, match="does not answer .HTTP 404"):
            ask(drugs(n), server)
    assert len(server.bodies) <= client.GIVE_UP_AFTER + 4


def test_resumes_after_the_server_died(tmp_path):
    requests, store = drugs(100), tmp_path / "s.sqlite"
    with serving(lambda n, body: (200, completion(f"- {n}")) if n <= 30 else (503, {})) as server:
        with pytest.raises(DataError, match="HTTP 503.*30 answers of this run are in s.sqlite"):
            ask(requests, server, store)
    kept = {at for (at,) in rows(store)}
    assert len(kept) == 30
    with serving() as server:
        answers = ask(requests, server, store)
    assert (answers.stored, answers.asked, len(answers.texts)) == (30, 70, 100)
    asked = {prompt.split("\n")[0] for prompt in server.prompts()}
    assert asked == {r.text for r in requests if r.id not in kept}


def test_a_request_that_always_fails_does_not_stop_a_server_that_has_answered(tmp_path):
    """Or a run could never end in which a share of the answers may be missing; a wrong key still stops it."""
    store = tmp_path / "s.sqlite"
    with serving(lambda n, body: (500, {}) if "note 3" in str(body) else (200, completion("- x"))) as server:
        for stored, asked in ((0, 4), (4, 0)):
            answers = ask(drugs(5), server, store)
            assert (answers.stored, answers.asked, answers.failed) == (stored, asked, 1)
        with pytest.raises(DataError, match="HTTP 500; all 1 requests failed"):
            ask(drugs(4)[3:], server)
    with serving(lambda n, body: (401, {})) as server, pytest.raises(DataError, match="HTTP 401; all 1 requests"):
        ask(drugs(5), server, store)


def test_a_request_that_always_times_out_does_not_stop_a_server_that_has_answered(tmp_path):
    store, hang = tmp_path / "s.sqlite", threading.Event()

    def reply(n: int, body: dict) -> tuple[int, dict]:
        if "note 3" in str(body):
            hang.wait(20)
        return 200, completion("- x")

    with serving(reply) as server:
        for stored, asked in ((0, 4), (4, 0)):
            answers = ask(drugs(5), server, store, timeout_s=0.5)
            assert (answers.stored, answers.asked, answers.failed) == (stored, asked, 1)
        hang.set()


def test_interrupt_leaves_a_store_that_can_be_continued(tmp_path):
    requests, store = drugs(60), tmp_path / "s.sqlite"
    hang = threading.Event()

    def reply(n: int, body: dict) -> tuple[int, dict]:
        if n == 25:
            os.kill(os.getpid(), signal.SIGINT)
        if n >= 25:
            hang.wait(20)
        return 200, completion(f"- {n}")

    with serving(reply) as server:
        with pytest.raises(KeyboardInterrupt):
            ask(requests, server, store)
        hang.set()
    kept = len(rows(store))
    assert 20 <= kept <= 24
    with serving() as server:
        answers = ask(requests, server, store)
    assert (answers.stored, answers.asked) == (kept, 60 - kept)


def test_each_answer_is_on_disk_before_the_next_is_asked(tmp_path):
    store, on_disk = tmp_path / "s.sqlite", []

    def reply(n: int, body: dict) -> tuple[int, dict]:
        on_disk.append(len(rows(store)))
        return 200, completion("- x")

    with serving(reply) as server:
        ask(drugs(5), server, store, concurrency=1)
    assert on_disk == [0, 1, 2, 3, 4]


def test_works_inside_a_running_loop():
    async def cell() -> Answers:
        with serving() as server:
            return ask(drugs(5), server)

    assert asyncio.run(cell()).asked == 5


def test_error_in_the_requests_comes_through():
    def requests() -> Iterator[Request]:
        yield from drugs(10)
        raise DataError("chunks.csv, row 11: broken")

    with serving() as server, pytest.raises(DataError, match="row 11: broken"):
        ask(requests(), server)


def test_a_request_that_cannot_be_put_is_no_failed_answer():
    nameless = Request("entity_generation", "p_0", "note")
    with serving() as server, pytest.raises(DataError, match="needs an entity type"):
        ask([nameless], server)


# --- patients first --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "https://api.openai.com/v1",
        "http://8.8.8.8/v1",
        "http://172.32.0.1/v1",
        "http://localhost.example.com/v1",
        "http://127.0.0.1.example.com/v1",
        "http://[2001:4860:4860::8888]/v1",
        "http://[::ffff:8.8.8.8]/v1",
        "http://local/v1",
        "http://example.com#.local",
        "http://localhost@example.com/v1",
        "http://localhost\\@example.com/v1",
        "http://example.com?localhost",
        "ftp://localhost/v1",
        "localhost:8000/v1",
        "",
    ],
)
def test_remote_or_odd_addresses_are_refused(url):
    with pytest.raises(DataError, match="note text would leave|not a plain http"):
        Server(url, "m")


@pytest.mark.parametrize(
    "url",
    [
        "http://localhost:8000/v1",
        "http://127.0.0.9/v1",
        "http://[::1]:8000/v1",
        "https://10.1.2.3:443/v1/",
        "http://172.31.255.255/v1",
        "http://192.168.1.2",
        "http://GPU-1.local:8000/v1",
    ],
)
def test_private_addresses_are_accepted(url):
    assert Server(url, "m").base_url == url


def test_server_from_env(monkeypatch):
    for name in ("DREHR_LLM_BASE_URL", "DREHR_LLM_MODEL", "DREHR_LLM_ALLOW_REMOTE", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert servers.server_from_env() is None
    monkeypatch.setenv("DREHR_LLM_BASE_URL", "http://localhost:8000/v1")
    with pytest.raises(DataError, match="DREHR_LLM_MODEL"):
        servers.server_from_env()
    monkeypatch.setenv("DREHR_LLM_MODEL", "llama")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    server = servers.server_from_env()
    assert (server.model, server.api_key, server.allow_remote) == ("llama", "sk-hidden", False)
    assert "sk-hidden" not in repr(server)
    monkeypatch.setenv("DREHR_LLM_BASE_URL", "https://api.example.com/v1")
    monkeypatch.setenv("DREHR_LLM_ALLOW_REMOTE", "1")
    with pytest.raises(DataError, match="yes-send-patient-text-off-this-machine"):
        servers.server_from_env()
    monkeypatch.setenv("DREHR_LLM_ALLOW_REMOTE", "yes-send-patient-text-off-this-machine")
    assert servers.server_from_env().allow_remote


@pytest.mark.parametrize("model", ["gpt-oss:120b-cloud", "glm-4.6:cloud", "GPT-OSS:120B-Cloud", "glm-4.6:cloud "])
def test_a_model_that_ollama_asks_of_its_own_hosts_is_refused(model):
    with pytest.raises(
        DataError, match=f"{model} runs on Ollama's machines.*so nothing was sent.*DREHR_LLM_ALLOW_REMOTE"
    ):
        Server("http://localhost:11434/v1", model)
    assert Server("http://localhost:11434/v1", model, allow_remote=True).model == model
    assert Server("http://localhost:11434/v1", "cloud-bert").model


def test_neither_redirects_nor_proxies_carry_notes_away(monkeypatch):
    with serving() as elsewhere:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{elsewhere.server_port}")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        with serving() as server:
            assert ask(drugs(2), server).asked == 2
        with serving(lambda n, body: (307, {}), location=f"{elsewhere.base_url}/chat/completions") as server:
            with pytest.raises(DataError, match="HTTP 307"):
                ask(drugs(2), server)
        assert elsewhere.bodies == []


def test_no_text_in_logs_or_errors(caplog):
    secret = "SECRETNOTE"

    def reply(n: int, body: dict) -> tuple[int, dict]:
        return (400, {"error": {"message": f"bad: {body}"}}) if n % 2 else (200, completion(secret))

    with caplog.at_level(logging.DEBUG), serving(reply) as server:
        for name in ("openai", "openai._base_client", "httpx", "httpx2", "httpcore"):
            caplog.set_level(logging.DEBUG, logger=name)
        answers = ask(drugs(4, note=secret), server)
    assert answers.failed == 2 and secret not in caplog.text and secret not in str(answers.errors)
    assert not [r for r in caplog.records if r.name == "openai._base_client" and r.levelno <= logging.DEBUG]


# --- parsers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "pairs", "malformed"),
    [
        (
            "###ct\n**computed tomography\n\n###wbc\n**white blood cell",
            [("ct", "computed tomography"), ("wbc", "white blood cell")],
            0,
        ),
        ("NA", [], 0),
        ('"NA".', [], 0),
        ("", [], 0),
        ("###[CT]\n**[Computed  Tomography]", [("ct", "computed tomography")], 0),
        ("### p.o.\n**by mouth**.", [("p.o.", "by mouth")], 0),
        (
            "###ms\n**multiple sclerosis\n**morphine sulfate",
            [("ms", "multiple sclerosis"), ("ms", "morphine sulfate")],
            0,
        ),
        ("###ct **computed tomography", [("ct", "computed tomography")], 0),
        ("###CD\n**Crohn’s disease", [("cd", "crohn's disease")], 0),  # as the graph writes it
        ("###ct\n**computed tomography\n###ct\n**computed tomography", [("ct", "computed tomography")], 0),
        ("Here you are:\n###ct\n**computed tomography", [("ct", "computed tomography")], 1),
        ("###ct\n###wbc\n**white blood cell", [("wbc", "white blood cell")], 1),
        ("###ct", [], 1),
        ("###ct\n**", [], 1),
        ("**orphan", [], 1),
        ("###ct\n**computed tomography\nNA", [("ct", "computed tomography")], 1),
        ("<think>\n###a\n**wrong\n</think>\n###ct\n**computed tomography", [("ct", "computed tomography")], 0),
    ],
)
def test_parse_abbreviations(answer, pairs, malformed):
    assert parse_abbreviations(answer) == (pairs, malformed)


@pytest.mark.parametrize(
    ("answer", "entities", "malformed"),
    [
        ("- Heart failure\n- Anemia", ["heart failure", "anemia"], 0),
        (
            "* Heart failure\n• anemia\n1. Melena\n2) gout\n-copd",
            ["heart failure", "anemia", "melena", "gout", "copd"],
            0,
        ),
        ("- a\n- b\n- A.", ["a", "b"], 0),
        ("NA", [], 0),
        ("None.", [], 0),
        ("", [], 0),
        ("Here are the diseases:\n\n- gout", ["gout"], 1),
        (
            "- **Hypertension**: elevated\n- **Gout:** a flare\n- **Aspirin** 81 mg\n- **CHF** - diastolic\n- a**b",
            ["hypertension", "gout", "aspirin 81 mg", "chf", "ab"],
            0,
        ),
        ("**Diseases:**\n* **Gout**\n* Inferred:\n\t+ sepsis", ["gout", "sepsis"], 2),
        (
            "- antihemophilic factor (recombinant)\n- rho(d) immune globulin",
            ["antihemophilic factor (recombinant)", "rho(d) immune globulin"],
            0,
        ),
        (
            "- diabetes mellitus (implied by metformin (po))\n- gout - inferred from allopurinol",
            ["diabetes mellitus", "gout"],
            0,
        ),
        (
            "- myocardial infarction (inferior wall)\n- non-st-elevation mi\n- t-cell lymphoma",
            ["myocardial infarction (inferior wall)", "non-st-elevation mi", "t-cell lymphoma"],
            0,
        ),
        ("- no-reflow phenomenon\n- vitamin b12;\n- `aspirin`", ["no-reflow phenomenon", "vitamin b12", "aspirin"], 0),
        (
            "- NA\n- none mentioned\n- No drugs are mentioned\n- There are no procedures documented.\n- \n- ...",
            [],
            6,
        ),
        ("- " + "word " * 17 + "\n- " + "word " * 16, [" ".join(["word"] * 16)], 1),
        ("<think>- wrong</think>- right", ["right"], 0),
        ("so - wrong\n</think>\n- right", ["right"], 0),
        ("- right\n<think>- cut", ["right"], 0),
    ],
)
def test_parse_entities(answer, entities, malformed):
    assert parse_entities(answer) == (entities, malformed)


def test_parsers_lose_nothing_of_the_recorded_answers():
    """The recorded file is clean, so reading it by its plain format is an independent oracle."""
    malformed = 0
    for task, answer in rows(None, [RECORDED], "task, answer"):
        if task == "abbreviation_reduction":
            parsed, bad = parse_abbreviations(answer)
            blocks = [] if answer == "NA" else [block.split("\n") for block in answer.split("\n\n")]
            expected = [(short[3:], full[2:]) for short, full in blocks]
        else:
            parsed, bad = parse_entities(answer)
            expected = [] if answer == "NA" else [item[2:] for item in answer.split("\n")]
        assert parsed == expected
        malformed += bad
    print(f"{malformed} malformed pieces in the recorded file")
    assert malformed == 0


def test_parsers_are_total():
    rng = random.Random(0)
    pieces = [
        "###",
        "**",
        "- ",
        "* ",
        "• ",
        "1. ",
        "NA",
        "none",
        "(",
        ")",
        "[",
        "]",
        "<think>",
        "</think>",
        "\n",
        "\r",
        "\x0b",
        "\u2028",
        " ",
        "\t",
        ":",
        " - ",
        "implied",
        "no x mentioned",
        "gout",
        "é",
        "😀",
        "\ud800",
        "\0",
        "\u0130",
        "`",
    ]
    for _ in range(20_000):
        text = "".join(rng.choices(pieces, k=rng.randrange(25)))
        text += "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randrange(4)))
        pairs, bad = parse_abbreviations(text)
        assert bad >= 0 and all(short and full for short, full in pairs) and len(set(pairs)) == len(pairs)
        entities, bad = parse_entities(text)
        assert bad >= 0 and all(e and len(e.split()) <= 16 for e in entities) and len(set(entities)) == len(entities)
    for text in (
        "(" * 100_000,
        "- " + "(" * 50_000 + ")" * 50_000,
        "<think>" * 20_000,
        "- no " + "x " * 50_000,
        "#" * 100_000,
        " *" * 50_000,
    ):
        parse_abbreviations(text)
        parse_entities(text)
