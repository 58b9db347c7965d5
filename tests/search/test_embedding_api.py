"""The embeddings client against a real HTTP server on this machine that speaks POST /v1/embeddings."""

import base64
import hashlib
import json
import logging
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from drehr_utils.data.benchmark import Benchmark
from drehr_utils.errors import DataError
from drehr_utils.llm.servers import ALLOW_REMOTE, Server
from drehr_utils.search.embedding_api import EmbeddingStore, embed, server_from_env
from drehr_utils.search.retrievers import REGISTRY, retriever_scores

TEXTS = [f"secret note {i}" for i in range(10)]


def vector(text, dimension=8):
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
    return np.random.default_rng(seed).normal(size=dimension).astype(np.float32)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def log_message(self, *args):
        pass

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        status, answer = self.server.reply(len(self.server.bodies), body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        for name, value in (("content-type", "application/json"), ("content-length", len(data)), ("retry-after-ms", 1)):
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)


def good(number, body, dimension=8):
    def shown(text):
        row = vector(text, dimension)
        return base64.b64encode(row.tobytes()).decode() if body.get("encoding_format") == "base64" else row.tolist()

    rows = [{"object": "embedding", "index": i, "embedding": shown(text)} for i, text in enumerate(body["input"])]
    usage = {"prompt_tokens": 1, "total_tokens": 1}
    return 200, {"object": "list", "model": body["model"], "data": rows[::-1], "usage": usage}  # in any order


@contextmanager
def serving(reply=good):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.reply, server.bodies = reply, []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server, Server(f"http://127.0.0.1:{server.server_port}/v1", "embedder", max_retries=1)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_batches_order_and_no_second_question(tmp_path):
    with serving() as (server, client):
        found = embed([*TEXTS, TEXTS[3]], client, tmp_path, batch=4)
        np.testing.assert_array_equal(found, [vector(text) for text in [*TEXTS, TEXTS[3]]])
        assert [len(body["input"]) for body in server.bodies] == [4, 4, 2] and found.dtype == np.float32
        again = embed(TEXTS[::-1], client, tmp_path)
        np.testing.assert_array_equal(again, found[:10][::-1])
        more = embed(["another", TEXTS[0]], client, tmp_path)
        assert [body["input"] for body in server.bodies[3:]] == [["another"]]
        np.testing.assert_array_equal(more, [vector("another"), vector(TEXTS[0])])
    assert not [path for path in tmp_path.iterdir() if b"secret" in path.read_bytes()]


def test_a_stopped_run_goes_on(tmp_path):
    def dies(number, body):
        return good(number, body) if number <= 2 else (500, {"error": {"message": "secret note 8 is too long"}})

    with serving(dies) as (_, client):
        with pytest.raises(
            DataError, match=r"embedder at http://127.0.0.1:\d+/v1 failed \(HTTP 500\); 8 vectors"
        ) as error:
            embed(TEXTS, client, tmp_path, batch=4)
        assert "secret" not in str(error.value) and error.value.__suppress_context__
    with serving() as (server, client):
        found = embed(TEXTS, client, tmp_path, batch=4)
        assert [body["input"] for body in server.bodies] == [TEXTS[8:]]
    np.testing.assert_array_equal(found, [vector(text) for text in TEXTS])


def short(number, body):
    status, answer = good(number, body)
    return status, answer | {"data": answer["data"][1:]}


def ragged(number, body):
    status, answer = good(number, body)
    answer["data"][0]["embedding"] = [1.0]
    return status, answer


WRONG = {
    "a vector is missing": (short, "gave vectors of shape"),
    "lengths differ": (ragged, "failed \\(ValueError\\)"),
    "no vectors": (lambda n, body: (200, {"object": "list", "data": [], "model": "m"}), "failed \\(ValueError\\)"),
    "not an answer": (lambda n, body: (200, ["secret"]), "failed \\("),
    "not allowed": (lambda n, body: (401, {"error": {"message": "secret"}}), "failed \\(HTTP 401\\)"),
}


@pytest.mark.parametrize("reply, message", WRONG.values(), ids=WRONG)
def test_a_wrong_answer_is_a_clear_error(tmp_path, reply, message):
    with serving(reply) as (_, client), pytest.raises(DataError, match=message) as error:
        embed(TEXTS[:3], client, tmp_path)
    assert "secret" not in str(error.value)


def test_another_model_under_the_name_and_a_damaged_file(tmp_path):
    with serving() as (_, client):
        embed(TEXTS[:2], client, tmp_path)
    with serving(lambda n, body: good(n, body, 16)) as (_, client):
        with pytest.raises(DataError, match="gives 16 dimensions, embedder.sqlite has 8"):
            embed(TEXTS[:3], client, tmp_path)
    kept = EmbeddingStore(tmp_path, "embedder")
    assert len(kept) == 2
    assert len({EmbeddingStore(tmp_path, name).path for name in ("a-b", "a/b", "a:b")}) == 3
    (tmp_path / "damaged.sqlite").write_bytes(b"no database" * 100)
    with pytest.raises(DataError, match="damaged.sqlite: file is not a database"):
        EmbeddingStore(tmp_path, "damaged")


def test_patient_text_stays_here_unless_allowed(monkeypatch):
    monkeypatch.delenv("DREHR_LLM_ALLOW_REMOTE", raising=False)
    monkeypatch.delenv("DREHR_EMBED_BASE_URL", raising=False)
    with pytest.raises(DataError, match="text-embedding-3-large: no embedding server; set DREHR_EMBED_BASE_URL"):
        server_from_env("text-embedding-3-large")
    monkeypatch.setenv("DREHR_EMBED_BASE_URL", "https://api.openai.com/v1")
    with pytest.raises(DataError, match="api.openai.com, is not this machine .* nothing was sent"):
        server_from_env("text-embedding-3-large")
    monkeypatch.setenv("DREHR_LLM_ALLOW_REMOTE", "yes")  # not in so many words
    with pytest.raises(DataError, match="nothing was sent"):
        server_from_env("text-embedding-3-large")
    monkeypatch.setenv("DREHR_LLM_ALLOW_REMOTE", ALLOW_REMOTE)
    assert server_from_env("text-embedding-3-large").allow_remote
    monkeypatch.setenv("DREHR_EMBED_BASE_URL", "localhost:8000")
    with pytest.raises(DataError, match="DREHR_EMBED_BASE_URL is not a plain"):
        server_from_env("text-embedding-3-large")


def test_the_registrys_api_retriever_end_to_end(tmp_path, monkeypatch, caplog):
    bench = Benchmark({"a": "text a", "b": "text b"}, {"x": "asked"}, {}, [], {}, {})
    caplog.set_level(logging.DEBUG)
    with serving() as (server, client):
        monkeypatch.setenv("DREHR_EMBED_BASE_URL", client.base_url)
        scores = retriever_scores(REGISTRY["text-embedding-3-large"], bench, tmp_path)
        assert {body["model"] for body in server.bodies} == {"text-embedding-3-large"}
    unit = [v / np.linalg.norm(v) for v in map(vector, ("text a", "text b", "asked"))]
    np.testing.assert_allclose(scores, [[unit[2] @ unit[0], unit[2] @ unit[1]]], atol=1e-6)
    assert "text a" not in caplog.text
    again = retriever_scores(REGISTRY["text-embedding-3-large"], bench, tmp_path)  # the server is gone
    np.testing.assert_array_equal(again, scores)


def test_no_server_there(tmp_path):
    with pytest.raises(DataError, match="failed \\(APIConnectionError\\); 0 vectors are kept"):
        embed(["x"], Server("http://127.0.0.1:9/v1", "embedder", max_retries=0), tmp_path)
