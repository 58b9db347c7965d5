"""A real HTTP server on this machine that speaks the OpenAI API's chat completions, for the tests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar

Reply = str | int | Callable[[BaseHTTPRequestHandler], None]


class ChatServer(ThreadingHTTPServer):
    """`reply(prompt, body)` gives the answer's text, a whole number (an HTTP status), or a function that gets the
    handler and sends what it likes."""

    daemon_threads = True

    def __init__(self, reply: Callable[[str, dict], Reply]):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply, self.bodies, self.lock = reply, [], threading.Lock()
        self.base_url = f"http://127.0.0.1:{self.server_port}/v1"

    def handle_error(self, request, client_address) -> None:
        pass  # a client that has gone


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        self._send(404, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.bodies.append(body)
        prompt = body["messages"][0]["content"] if "messages" in body else ""  # of a request for embeddings
        text = self.server.reply(prompt, body)
        if callable(text):
            self.close_connection = True
            text(self)
            return
        if isinstance(text, int):
            self._send(text, {"error": {"message": "no"}})
            return
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
        self._send(
            200,
            {"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage},
        )

    def _send(self, status: int, payload: dict) -> None:
        data = json.dumps(payload).encode()
        self.send_response(status)
        for name, value in {
            "content-type": "application/json",
            "content-length": len(data),
            "retry-after-ms": 1,
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(data)


Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Serves in a thread of its own until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def chat_server(reply: Callable[[str, dict], Reply]) -> AbstractContextManager[ChatServer]:
    return running(ChatServer(reply))
