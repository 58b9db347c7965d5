"""Asks a language model, resumably: answers that are on disk count, a server gives the rest (DR.EHR §3.1, §3.2).

An answer belongs to a prompt and a chunk's text. It's looked for in the recorded files, then in the store of our own
earlier answers; only what is missing is asked of an OpenAI-compatible server (vLLM, llama.cpp, Ollama)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO

import anyio
import openai
import pandas as pd
from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from drehr_utils.errors import DataError
from drehr_utils.llm.answers import Answer, AnswerKey, append, open_store, read_answers
from drehr_utils.llm.prompts import PAPER_PROMPT_SHA256, Key, Request, prompt_sha256
from drehr_utils.llm.servers import Server

GIVE_UP_AFTER = 20  # requests in a row that the server, not the request, made fail


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
                    append(store, request, row | usage)
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
        with open_store(path) as store:
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
