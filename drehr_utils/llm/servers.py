"""Which servers text may be sent to: this machine's and its private network's, others only in so many words.

PhysioNet's rule of 24 September 2025 on language models asks for zero data retention, and recommends local models, for
its credentialed data. An address that is allowed in so many words is the user's to answer for: nothing here can tell
whether a host keeps what it is sent. What comes back is not trusted either: it is bounded in size and time."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import openai

from drehr_utils.errors import DataError

MOST_BYTES = 1 << 25  # of a response; an answer has thousands, a batch of embeddings a few million
ALLOW_REMOTE = "yes-send-patient-text-off-this-machine"

# What openai raises, and what its reading of JSON of any shape and depth may.
ANSWER_ERRORS = (
    openai.OpenAIError, ValueError, TypeError, AttributeError, LookupError, RecursionError, TimeoutError,
)  # fmt: skip
# One pattern for all of the address, so that no two URL parsers can disagree about which host it names.
_BASE_URL = re.compile(r"https?://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::\d{1,5})?(?:/[\w./~-]*)?", re.ASCII)
_PRIVATE = [
    ipaddress.ip_network(n) for n in "127.0.0.0/8 ::1/128 10.0.0.0/8 172.16.0.0/12 192.168.0.0/16 fc00::/7".split()
]


def _is_private(host: str) -> bool:
    name = host.lower().strip("[]").rstrip(".")
    if name == "localhost" or name.endswith(".local"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return any(address in network for network in _PRIVATE)


@dataclass(frozen=True)
class Server:
    """An OpenAI-compatible server; `timeout_s` is of a pause and of a whole response, `max_tokens` of an answer.

    Raises DataError for an address outside this machine and its private network unless `allow_remote`: notes under a
    data use agreement must not leave by accident. Proxies and redirects are off for the same reason."""

    base_url: str
    model: str
    api_key: str = field(default_factory=lambda: os.environ.get("OPENAI_API_KEY") or "none", repr=False)
    concurrency: int = 16
    max_retries: int = 5
    timeout_s: float = 120
    temperature: float = 0.0
    max_tokens: int = 512
    seed: int = 0
    allow_remote: bool = False

    def __post_init__(self) -> None:
        match = _BASE_URL.fullmatch(self.base_url)
        if not match:
            raise DataError("llm: DREHR_LLM_BASE_URL is not a plain http(s) address such as http://localhost:8000/v1")
        elsewhere = ""
        if not _is_private(match["host"]):
            elsewhere = (
                f"the server's host, {match['host']}, is not this machine or a private address (localhost, 127/8, "
                "10/8, 172.16/12, 192.168/16, *.local)"
            )
        elif re.search(r"(?i)[:-]cloud\s*\Z", self.model):  # Ollama here passes on what such a model is asked
            elsewhere = f"the model {self.model} runs on Ollama's machines, whatever the server's address"
        if elsewhere and not self.allow_remote:
            raise DataError(
                f"llm: {elsewhere}, so nothing was sent: note text would leave. If your data use agreement allows "
                f"that, set DREHR_LLM_ALLOW_REMOTE={ALLOW_REMOTE}"
            )
        if not self.model:
            raise DataError("llm: no model named; set DREHR_LLM_MODEL to the name under which the server serves it")

    def client(self, kind: type = openai.OpenAI, http: type = openai.DefaultHttpxClient) -> Any:
        """openai's client of this server, or its `kind` for asyncio; it logs no text, and reads no endless response."""

        def bound(response: httpx2.Response) -> None:
            if response.headers.get("content-encoding", "identity") != "identity":  # a little may unpack to a lot
                raise ValueError("a packed response")
            response.stream = _Bounded(response.stream, time.monotonic() + self.timeout_s)

        async def bound_async(response: httpx2.Response) -> None:
            bound(response)

        logging.getLogger("openai._base_client").addFilter(_no_bodies)
        timeout = openai.Timeout(self.timeout_s, connect=min(10.0, self.timeout_s))
        direct = {} if self.allow_remote else {"trust_env": False}  # a proxy may be anywhere
        return kind(
            base_url=self.base_url, api_key=self.api_key, max_retries=self.max_retries, timeout=timeout,
            default_headers={"Accept-Encoding": "identity"},
            http_client=http(
                follow_redirects=False, timeout=timeout, **direct,
                event_hooks={"response": [bound_async if issubclass(http, httpx2.AsyncClient) else bound]},
            ),
        )  # fmt: skip


class _Bounded(httpx2.SyncByteStream, httpx2.AsyncByteStream):
    """A response's body, read up to MOST_BYTES and up to a point in time: a server that drips never times out."""

    def __init__(self, stream: Any, until: float):
        self.stream, self.until, self.left = stream, until, MOST_BYTES

    def _checked(self, part: bytes) -> bytes:
        self.left -= len(part)
        if self.left < 0 or time.monotonic() > self.until:
            raise ValueError("an endless response")
        return part

    def __iter__(self) -> Iterator[bytes]:
        return map(self._checked, self.stream)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self.stream:
            yield self._checked(part)

    def close(self) -> None:
        self.stream.close()

    async def aclose(self) -> None:
        await self.stream.aclose()


def _no_bodies(record: logging.LogRecord) -> bool:
    """Some versions of openai log whole requests at level DEBUG, note text included."""
    return record.levelno > logging.DEBUG


def kind_of(error: Exception) -> str:
    """What went wrong, without the error's own text: servers quote the prompt in it."""
    return f"HTTP {error.status_code}" if isinstance(error, openai.APIStatusError) else type(error).__name__


def model_from_env() -> str | None:
    """DREHR_LLM_MODEL: whose stored answers count, with a server or without; None where it isn't set."""
    return os.environ.get("DREHR_LLM_MODEL", "").strip() or None


def server_from_env(variable: str = "DREHR_LLM_BASE_URL", model: str | None = None) -> Server | None:
    """The server of the variable and OPENAI_API_KEY, for `model` or DREHR_LLM_MODEL; None when no address is set."""
    if not (base_url := os.environ.get(variable, "").strip()):
        return None
    allow = os.environ.get("DREHR_LLM_ALLOW_REMOTE") == ALLOW_REMOTE
    model = model_from_env() or "" if model is None else model
    try:
        return Server(base_url, model, allow_remote=allow)
    except DataError as error:
        raise DataError(str(error).replace("DREHR_LLM_BASE_URL", variable)) from None
