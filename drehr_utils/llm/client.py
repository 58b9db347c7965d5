"""Asks a language model, resumably: answers that are on disk count, a server gives the rest (DR.EHR §3.1, §3.2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain
from pathlib import Path

import anyio
import openai
from anyio.from_thread import start_blocking_portal
from tqdm import tqdm

from drehr_utils.errors import DataError
from drehr_utils.llm.answers import Answers, AnswerStore
from drehr_utils.llm.prompts import Request, without_thinking
from drehr_utils.llm.servers import ANSWER_ERRORS, Server, kind_of, model_from_env

GIVE_UP_AFTER = 20  # requests in a row that the server, not the request, made fail
HOPELESS_AFTER = 200  # requests without one answer, whoever made them fail, of a model that never answered
CHOKED = {"HTTP 500", "APITimeoutError", "TimeoutError"}  # what a single request may make of a server that is well
LONGEST_PAUSE = 60  # seconds that openai waits between two attempts, where a server asks for it
LONGEST_TOKEN = 100  # characters; an answer of more than that for each token it may have is not a model's


def answer_all(
    requests: Iterable[Request],
    *,
    recorded: Sequence[Path] = (),
    store: Path | None = None,
    server: Server | None = None,
    progress: bool = True,
) -> Answers:
    """Answers to `requests`: from `recorded` files, else from the database `store`, else of `server` (vLLM, llama.cpp,
    Ollama or another that speaks OpenAI's protocol), kept in `store`.

    `requests` is read lazily, at most `server.concurrency` are in flight, and each answer is on disk before the next is
    asked, so a run that was stopped goes on where it was. A request that fails after its retries is counted. A stored
    answer of another model than the server's, or without one DREHR_LLM_MODEL, is not used. Works inside a running event
    loop. Raises DataError when answers are missing and there is no server, when the server can't be reached, or for a
    repeated request."""
    answers = Answers(AnswerStore(store, recorded))
    total = len(requests) if isinstance(requests, Sized) else None
    with tqdm(total=total, desc="LLM answers", unit="answer", delay=1, disable=not progress) as bar:
        missing = _missing(requests, server.model if server else model_from_env(), answers, bar)
        if server is None:
            _refuse_if_any(missing, answers)
        elif (first := next(missing, None)) is not None:
            # A thread with its own loop: notebooks run one already. Leaving the block cancels what's in flight.
            with start_blocking_portal() as portal:
                portal.call(_ask_all, chain([first], missing), server, answers, bar)
    answers.store.database.execute("PRAGMA wal_checkpoint")  # the file is whole without its log, as one copies it
    return answers


def _missing(
    requests: Iterable[Request], model: str | None, answers: Answers, bar: tqdm
) -> Iterator[tuple[Request, str]]:
    """Requests without an answer, and why; the others are entered in `answers` on the way."""
    for request in requests:
        counter, found = answers.store.find(request, model)
        number, finish_reason = found or (None, None)
        answers.enter(request, number)
        answers.truncated += finish_reason == "length"
        if counter != "never_recorded":
            setattr(answers, counter, getattr(answers, counter) + 1)
        if found is None:
            yield request, counter
        else:
            bar.update()


def _refuse_if_any(missing: Iterator[tuple[Request, str]], answers: Answers) -> None:
    reasons = {"never_recorded": "never recorded", "stale_text": "text changed", "stale_prompt": "prompt changed"}
    reasons["other_model"] = "another model's"
    count = Counter((request.label, reasons[why]) for request, why in missing)
    if count:
        detail = "; ".join(f"{label}: {n} ({why})" for (label, why), n in sorted(count.items()))
        n = count.total()
        raise DataError(
            f"llm: {n} of {n + len(answers.texts)} answers are missing and no LLM server is set. {detail}. Set "
            "DREHR_LLM_BASE_URL (such as http://localhost:8000/v1), DREHR_LLM_MODEL and, if the server wants one, "
            "OPENAI_API_KEY"
        )


def _is_servers_fault(error: Exception) -> bool:
    return isinstance(error, openai.APIConnectionError | TimeoutError) or (
        isinstance(error, openai.APIStatusError) and error.status_code not in (400, 413, 422)
    )


async def _ask_all(requests: Iterator[tuple[Request, str]], server: Server, answers: Answers, bar: tqdm) -> None:
    in_a_row, patience = 0, server.timeout_s + LONGEST_PAUSE

    def gone(kind: str) -> DataError:
        path = answers.store.path
        kept = f"; {answers.asked} answers of this run are in {path.name}" if path and answers.asked else ""
        return DataError(
            f"llm: the server at {server.base_url} does not answer ({kind}){kept}. Check that it is running and serves "
            f"{server.model} (e.g. `vllm serve {server.model}`) and DREHR_LLM_BASE_URL, then run again"
        )

    def fail(kind: str) -> None:
        answers.failed += 1
        answers.errors[kind] += 1
        if answers.failed >= HOPELESS_AFTER and not answers.asked and not answers.store.has_any_of(server.model):
            kinds = ", ".join(f"{kind}: {n}" for kind, n in answers.errors.most_common())
            raise DataError(
                f"llm: {server.model} at {server.base_url} has answered none of {answers.failed} requests ({kinds}). "
                "What the server logs will say more: a context too short for a prompt, a parameter that it doesn't "
                "know, an answer that is all thinking"
            )

    async def work() -> None:
        nonlocal in_a_row
        for request, _ in requests:  # one iterator, shared by all workers: nothing is queued ahead
            messages = [{"role": "user", "content": request.prompt()}]  # a bad request is no failed answer
            try:
                with anyio.fail_after(patience * (server.max_retries + 1)):
                    response = await client.chat.completions.create(
                        model=server.model, messages=messages,
                        temperature=server.temperature, max_tokens=server.max_tokens, seed=server.seed,
                    )  # fmt: skip
                answer = _read_completion(response)
            except ANSWER_ERRORS as error:
                fail(kind_of(error))
                in_a_row = in_a_row + 1 if _is_servers_fault(error) else 0
                if in_a_row >= GIVE_UP_AFTER:
                    raise gone(f"{kind_of(error)}, {in_a_row} requests in a row") from None
            else:
                in_a_row = 0
                answers.prompt_tokens += answer["prompt_tokens"] or 0
                answers.completion_tokens += answer["completion_tokens"] or 0
                if not without_thinking(answer["answer"]):  # which a longer answer, or another attempt, may get over
                    fail("empty answer")
                elif len(answer["answer"]) > LONGEST_TOKEN * server.max_tokens:
                    fail("endless answer")
                else:
                    answers.keep(request, answer | {"model": server.model})
            bar.update()

    async with server.client(openai.AsyncOpenAI, openai.DefaultAsyncHttpxClient) as client:
        try:  # a question without a note: says in a second what the first requests' retries would say in a minute
            with anyio.fail_after(2 * patience):
                await client.with_options(max_retries=1).models.list()
        except (openai.APIConnectionError, TimeoutError) as error:
            raise gone(kind_of(error)) from None
        except ANSWER_ERRORS:
            pass  # it answers; not every server lists its models
        try:
            async with anyio.create_task_group() as workers:
                for _ in range(server.concurrency):
                    workers.start_soon(work)
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
    if not answers.asked and in_a_row and in_a_row == answers.failed:
        # A server that has answered before may choke on the few requests that are left: they failed, it isn't gone.
        if not set(answers.errors) <= CHOKED or not answers.store.has_any_of(server.model):
            raise gone(f"{', '.join(sorted(answers.errors))}; all {in_a_row} requests failed")


def _read_completion(response: object) -> dict[str, str | int | None]:
    """The answer as it is stored; ValueError if it's no completion, for openai doesn't validate what it gets."""

    def typed(owner: object, name: str, kind: type):
        value = getattr(owner, name, None)
        return value if isinstance(value, kind) else None

    choices = typed(response, "choices", list)
    message = typed(choices[0], "message", object) if choices else None
    if message is None:
        raise ValueError("not a chat completion")
    answer = {"answer": typed(message, "content", str) or "", "finish_reason": typed(choices[0], "finish_reason", str)}
    usage = typed(response, "usage", object)
    counts = {name: typed(usage, name, int) for name in ("prompt_tokens", "completion_tokens")}
    return answer | {name: n if n is not None and 0 <= n < 2**31 else None for name, n in counts.items()}
