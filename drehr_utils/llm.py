"""A resumable client for a local LLM server, and its answers on disk (DR.EHR §3.1, §3.2).

An answer belongs to a prompt and a chunk's text. It's looked for in the recorded files, then in the store of our own
earlier answers; only what is missing is asked of an OpenAI-compatible server (vLLM, llama.cpp, Ollama)."""

from __future__ import annotations

import gzip
import ipaddress
import json
import logging
import os
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple

import anyio
import openai
import pandas as pd
from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from drehr_utils.corpus import DataError
from drehr_utils.prompts import PAPER_PROMPT_SHA256, Key, Request, prompt_sha256

log = logging.getLogger(__name__)

ALLOW_REMOTE = "yes-send-patient-text-off-this-machine"
GIVE_UP_AFTER = 20  # requests in a row that the server, not the request, made fail

# --- answers on disk -------------------------------------------------------------------------------------------------


class AnswerKey(NamedTuple):
    task: str
    entity_type: str | None
    id: str
    text_sha256: str
    prompt_sha256: str


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    model: str | None = None  # None: recorded, the file doesn't say
    finish_reason: str | None = None

    @property
    def truncated(self) -> bool:
        return self.finish_reason == "length"

    @property
    def whole_lines(self) -> str:
        """The text without the line at which the token limit cut it: half a name is a wrong name."""
        return self.text.rpartition("\n")[0] if self.truncated else self.text


def _parse_line(raw: bytes) -> tuple[AnswerKey, Answer]:
    """Raises ValueError with a reason that holds nothing of the line."""
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(row, dict):
        raise ValueError("not an object")
    for name in ("task", "id", "text_sha256", "answer"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"field {name} is missing or not a string")
    few = {}  # values that repeat over millions of lines are kept once
    for name in ("task", "entity_type", "prompt_sha256", "model", "finish_reason"):
        if not isinstance(value := row.get(name), str | None):
            raise ValueError(f"field {name} is not a string")
        few[name] = value if value is None else sys.intern(value)
    prompt = few["prompt_sha256"] or PAPER_PROMPT_SHA256.get(few["task"], "")
    key = AnswerKey(few["task"], few["entity_type"], row["id"], row["text_sha256"], prompt)
    return key, Answer(row["answer"], few["model"], few["finish_reason"])


def read_answers(path: Path, counts: Counter[str] | None = None) -> dict[AnswerKey, Answer]:
    """Answers of a `.jsonl` or `.jsonl.gz` file. A line that can't be used (bad JSON, a field missing or of another
    type, not UTF-8, cut short) is skipped, logged by number and added to `counts["malformed_lines"]`; of two different
    answers to one question by one model the last wins and `counts["conflicting"]` grows.

    Raises DataError when there is no such file."""
    path, counts = Path(path), Counter() if counts is None else counts
    if not path.is_file():
        raise DataError(f"{path.name}: no such file in {path.parent.name}/; recorded answers are JSON lines")
    answers: dict[AnswerKey, Answer] = {}
    number = malformed = conflicting = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            for number, raw in enumerate(lines, start=1):
                if not raw.strip():
                    continue
                try:
                    key, answer = _parse_line(raw)
                except ValueError as reason:
                    malformed += 1
                    if malformed <= 5:
                        log.warning("%s, line %d: skipped, %s", path.name, number, reason)
                    continue
                earlier = answers.get(key)
                conflicting += earlier is not None and earlier.model == answer.model and earlier.text != answer.text
                answers[key] = answer
    except (EOFError, zlib.error, gzip.BadGzipFile):
        malformed += 1
        log.warning("%s, after line %d: the gzip stream is damaged; the rest of the file is lost", path.name, number)
    if malformed or conflicting:
        log.warning("%s: %d malformed lines, %d conflicting answers", path.name, malformed, conflicting)
    counts["malformed_lines"] += malformed
    counts["conflicting"] += conflicting
    return answers


def _open_store(path: Path | None) -> AbstractContextManager[BinaryIO | None]:
    if path is None:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open(path, "ab+")
    if handle.seek(0, os.SEEK_END):
        handle.seek(-1, os.SEEK_END)
        if handle.read(1) != b"\n":  # a killed run left half a line: end it, or it spoils the next
            handle.write(b"\n")
    return handle


def _append(store: BinaryIO | None, request: Request, row: dict) -> None:
    """One line, flushed, so that a kill costs at most the answer being written."""
    if store is None:
        return
    kind = {"entity_type": request.entity_type} if request.entity_type else {}
    row = {"task": request.task, **kind, "id": request.id, "text_sha256": request.text_sha256, **row}
    store.write(json.dumps(row | {"prompt_sha256": prompt_sha256(request.task)}).encode("ascii") + b"\n")
    store.flush()


# --- the server ------------------------------------------------------------------------------------------------------

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
    """An OpenAI-compatible server; `timeout_s` in seconds, `max_tokens` of an answer.

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
        if not self.allow_remote and not _is_private(match["host"]):
            raise DataError(
                f"llm: the server's host, {match['host']}, is not this machine or a private address (localhost, 127/8, "
                "10/8, 172.16/12, 192.168/16, *.local), so nothing was sent: note text would leave. If your data use "
                f"agreement allows that, set DREHR_LLM_ALLOW_REMOTE={ALLOW_REMOTE}"
            )
        for name, least in {"concurrency": 1, "max_retries": 0, "max_tokens": 1}.items():
            if getattr(self, name) < least:
                raise DataError(f"llm: Server.{name} is {getattr(self, name)}; it must be at least {least}")
        if not self.model:
            raise DataError("llm: no model named; set DREHR_LLM_MODEL to the name under which the server serves it")


def server_from_env() -> Server | None:
    """The server of DREHR_LLM_BASE_URL, DREHR_LLM_MODEL and OPENAI_API_KEY; None when no base URL is set."""
    base_url = os.environ.get("DREHR_LLM_BASE_URL", "").strip()
    if not base_url:
        return None
    allow = os.environ.get("DREHR_LLM_ALLOW_REMOTE") == ALLOW_REMOTE
    return Server(base_url, os.environ.get("DREHR_LLM_MODEL", "").strip(), allow_remote=allow)


@dataclass
class Answers:
    """Answer texts by `Request.key` (a request that failed has none), and how they came about.

    Counted in answers: `recorded`, `stored` and `asked` (where each came from), `truncated` (cut at the token limit;
    the last line is dropped). In requests: `failed` (`errors` says of what; a later run asks again) and those whose
    earlier answer didn't apply: `stale_text`, `stale_prompt`, `other_model`. In lines of answer files:
    `malformed_lines` (skipped) and `conflicting` (replaced another answer to the same question). In tokens, as the
    server counts them: `prompt_tokens`, `completion_tokens`."""

    texts: dict[Key, str] = field(default_factory=dict)
    recorded: int = 0
    stored: int = 0
    asked: int = 0
    truncated: int = 0
    failed: int = 0
    stale_text: int = 0
    stale_prompt: int = 0
    other_model: int = 0
    malformed_lines: int = 0
    conflicting: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def report(self) -> pd.DataFrame:
        """One row a counter: columns `what`, `count`."""
        rows = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self) if f.type == "int"]
        rows += [(f"failed: {kind}", count) for kind, count in sorted(self.errors.items())]
        return pd.DataFrame(rows, columns=["what", "count"])


class _Known:
    """Recorded and stored answers, and why a request has none among them."""

    def __init__(self, recorded: Sequence[Path], store: Path | None, server: Server | None):
        self.counts: Counter[str] = Counter()
        self.recorded: dict[AnswerKey, Answer] = {}
        for path in recorded:
            for key, answer in read_answers(path, self.counts).items():
                self.counts["conflicting"] += self.recorded.setdefault(key, answer).text != answer.text
                self.recorded[key] = answer
        self.stored = read_answers(store, self.counts) if store is not None and store.exists() else {}
        self.model = server.model if server else None

    @cached_property
    def text_hashes(self) -> dict[Key, set[str]]:
        hashes: dict[Key, set[str]] = {}
        for key in chain(self.recorded, self.stored):
            hashes.setdefault(key[:3], set()).add(key.text_sha256)
        return hashes

    def find(self, request: Request) -> tuple[str, Answer | None]:
        """Where the request's answer is from and the answer, or why there's none and None; both name a counter."""
        key = AnswerKey(*request.key, request.text_sha256, prompt_sha256(request.task))
        if key in self.recorded:
            return "recorded", self.recorded[key]
        if key in self.stored:
            answer = self.stored[key]
            return ("stored", answer) if self.model in (None, answer.model) else ("other_model", None)
        hashes = self.text_hashes.get(request.key)
        if hashes is None:
            return "never_recorded", None
        return "stale_prompt" if key.text_sha256 in hashes else "stale_text", None


def answer_all(
    requests: Iterable[Request],
    *,
    recorded: Sequence[Path] = (),
    store: Path | None = None,
    server: Server | None = None,
    progress: bool = True,
) -> Answers:
    """Answers to `requests`: from `recorded` files, else from `store`, else asked of `server` and appended to `store`.

    `requests` is read lazily, at most `server.concurrency` are in flight, and each answer is on disk before the next
    is asked, so a run that was stopped goes on where it was. A request that fails after its retries is counted. A
    stored answer of another model than the server's is not used. Works inside a running event loop. Raises DataError
    when answers are missing and there is no server, when the server can't be reached, or for a repeated request."""
    store = Path(store) if store is not None else None
    if store is not None and store.suffix == ".gz":
        raise DataError(f"{store.name}: the store is appended to; give it a name in .jsonl, without .gz")
    known = _Known(recorded, store, server)
    answers = Answers(malformed_lines=known.counts["malformed_lines"], conflicting=known.counts["conflicting"])
    total = len(requests) if isinstance(requests, Sized) else None
    with tqdm(total=total, desc="LLM answers", unit="answer", delay=1, disable=not progress) as bar:
        missing = _missing(requests, known, answers, bar)
        if server is None:
            _refuse_if_any(missing, answers)
        elif (first := next(missing, None)) is not None:
            # A thread with its own loop: notebooks run one already. Leaving the block cancels what's in flight.
            with start_blocking_portal() as portal:
                portal.call(_ask_all, chain([first], missing), server, store, answers, bar)
    return answers


def _missing(requests: Iterable[Request], known: _Known, answers: Answers, bar: tqdm) -> Iterator[tuple[Request, str]]:
    """Requests without an answer, and why; the others' answers go to `answers` on the way."""
    seen: set[Key] = set()
    for request in requests:
        if request.key in seen:
            raise DataError(f"llm: request {request.id} ({_label(request)}) comes twice; ids must be unique in a run")
        seen.add(request.key)
        counter, answer = known.find(request)
        if counter != "never_recorded":
            setattr(answers, counter, getattr(answers, counter) + 1)
        if answer is None:
            yield request, counter
        else:
            answers.truncated += answer.truncated
            answers.texts[request.key] = answer.whole_lines
            bar.update()


def _label(request: Request) -> str:
    return f"{request.task}, {request.entity_type}" if request.entity_type else request.task


def _refuse_if_any(missing: Iterator[tuple[Request, str]], answers: Answers) -> None:
    reasons = {"never_recorded": "never recorded", "stale_text": "text changed", "stale_prompt": "prompt changed"}
    count: Counter[tuple[str, str]] = Counter()
    edited = set()
    for request, why in missing:
        count[_label(request), reasons[why]] += 1
        if prompt_sha256(request.task) != PAPER_PROMPT_SHA256.get(request.task):
            edited.add(request.task)
    if not count:
        return
    detail = "; ".join(f"{label}: {n} ({why})" for (label, why), n in sorted(count.items()))
    prompts = f" The prompt of {' and '.join(sorted(edited))} is not the one of the recorded answers." if edited else ""
    n = count.total()
    raise DataError(
        f"llm: {n} of {n + len(answers.texts)} answers are missing and no LLM server is set. {detail}.{prompts} Set "
        "DREHR_LLM_BASE_URL (such as http://localhost:8000/v1), DREHR_LLM_MODEL and, if the server wants one, "
        "OPENAI_API_KEY"
    )


class _NoBodies(logging.Filter):
    """Some versions of openai log whole requests at level DEBUG, note text included."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno > logging.DEBUG


_NO_BODIES = _NoBodies()


def _is_servers_fault(error: Exception) -> bool:
    return isinstance(error, openai.APIConnectionError) or (
        isinstance(error, openai.APIStatusError) and error.status_code not in (400, 413, 422)
    )


async def _ask_all(
    requests: Iterator[tuple[Request, str]], server: Server, path: Path | None, answers: Answers, bar: tqdm
) -> None:
    logging.getLogger("openai._base_client").addFilter(_NO_BODIES)
    in_a_row = 0

    def gone(kind: str) -> DataError:
        kept = f"; {answers.asked} answers of this run are in {path.name}" if path and answers.asked else ""
        return DataError(
            f"llm: the server at {server.base_url} does not answer ({kind}){kept}. Check that it is running and serves "
            f"{server.model} (e.g. `vllm serve {server.model}`) and DREHR_LLM_BASE_URL, then run again"
        )

    def fail(kind: str) -> None:
        answers.failed += 1
        answers.errors[kind] += 1

    async def work(client: openai.AsyncOpenAI, store: BinaryIO | None) -> None:
        nonlocal in_a_row
        for request, _ in requests:  # one iterator, shared by all workers: nothing is queued ahead
            messages = [{"role": "user", "content": request.prompt()}]
            try:
                response = await client.chat.completions.create(
                    model=server.model,
                    messages=messages,
                    temperature=server.temperature,
                    max_tokens=server.max_tokens,
                    seed=server.seed,
                )
                answer, usage = _read_completion(response)
            except (openai.OpenAIError, ValueError) as error:
                # Never the error's own text: servers quote the prompt in it.
                kind = f"HTTP {error.status_code}" if isinstance(error, openai.APIStatusError) else type(error).__name__
                fail(kind)
                in_a_row = in_a_row + 1 if _is_servers_fault(error) else 0
                if in_a_row >= GIVE_UP_AFTER:
                    raise gone(f"{kind}, {in_a_row} requests in a row") from None
            else:
                in_a_row = 0
                answers.prompt_tokens += usage["prompt_tokens"] or 0
                answers.completion_tokens += usage["completion_tokens"] or 0
                if answer.text.strip():
                    row = {"answer": answer.text, "model": server.model, "finish_reason": answer.finish_reason}
                    _append(store, request, row | usage)
                    answers.asked += 1
                    answers.truncated += answer.truncated
                    answers.texts[request.key] = answer.whole_lines
                else:
                    fail("empty answer")
            bar.update()

    timeout = openai.Timeout(server.timeout_s, connect=min(10.0, server.timeout_s))
    direct = {} if server.allow_remote else {"trust_env": False}  # a proxy may be anywhere
    client = openai.AsyncOpenAI(
        base_url=server.base_url,
        api_key=server.api_key,
        max_retries=server.max_retries,
        timeout=timeout,
        http_client=openai.DefaultAsyncHttpxClient(follow_redirects=False, timeout=timeout, **direct),
    )
    async with client:
        try:  # a question without a note: says in a second what the first requests' retries would say in a minute
            await client.with_options(max_retries=1).models.list()
        except openai.APIConnectionError as error:
            raise gone(type(error).__name__) from None
        except (openai.OpenAIError, ValueError):
            pass  # it answers; not every server lists its models
        with _open_store(path) as store:
            try:
                async with anyio.create_task_group() as workers:
                    for _ in range(server.concurrency):
                        workers.start_soon(work, client, store)
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None
    if not answers.asked and in_a_row and in_a_row == answers.failed:
        raise gone(f"{', '.join(sorted(answers.errors))}; all {in_a_row} requests failed")


def _read_completion(response: object) -> tuple[Answer, dict[str, int | None]]:
    """The answer and its token counts; ValueError if it's no completion, for openai doesn't validate what it gets."""
    choices = getattr(response, "choices", None)
    message = getattr(choices[0], "message", None) if isinstance(choices, list) and choices else None
    if message is None:
        raise ValueError("not a chat completion")

    def typed(owner: object, name: str, kind: type):
        value = getattr(owner, name, None)
        return value if isinstance(value, kind) else None

    usage = typed(response, "usage", object)
    tokens = {name: typed(usage, name, int) for name in ("prompt_tokens", "completion_tokens")}
    return Answer(typed(message, "content", str) or "", finish_reason=typed(choices[0], "finish_reason", str)), tokens


@dataclass(frozen=True)
class Cost:
    calls: int
    prompt_chars: int
    prompt_tokens: int  # estimated


def cost_estimate(requests: Iterable[Request], chars_per_token: float = 4) -> Cost:
    """What asking all of `requests` would send: calls, characters, and tokens at `chars_per_token`."""
    lengths = [len(request.prompt()) for request in requests]
    return Cost(len(lengths), sum(lengths), round(sum(lengths) / chars_per_token))
