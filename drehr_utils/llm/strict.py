"""Strict answers of a language model on top of the client: parse, ask again what was malformed, then count it.

client.answer_all keeps whatever the model said. Here an answer counts only as far as its parser accepts it; what it
doesn't is asked again, under another request id, so that every attempt has its own line in the store and a run that
was stopped goes through the same attempts.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from drehr_utils.llm import client
from drehr_utils.llm.answers import AnswerStore
from drehr_utils.llm.prompts import Request
from drehr_utils.llm.servers import Server

log = logging.getLogger(__name__)

RETRY_TEMPERATURE = 0.5  # the first attempt is greedy; the same greedy answer again would be as malformed


@dataclass
class Parsed:
    """What a parser made of one answer: `rest` asks for what it could not use, None when nothing is missing.

    `problems` name what was malformed, without the answer's words (they may be a patient's)."""

    rest: Request | None
    problems: list[str] = field(default_factory=list)


@dataclass
class AskReport:
    """Requests by attempt, what was malformed, and what was given up after the last attempt."""

    asked: list[int] = field(default_factory=list)  # requests of each attempt
    problems: Counter[str] = field(default_factory=Counter)
    failed: int = 0  # requests without an answer (server errors, empty answers), asked again too
    given_up: list[Request] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def frame(self) -> pd.DataFrame:
        """One row a counter: columns `what`, `count`."""
        rows = [(f"requests, attempt {i}", n) for i, n in enumerate(self.asked, start=1)]
        rows += [("requests without an answer", self.failed)]
        rows += [(f"malformed: {kind}", n) for kind, n in sorted(self.problems.items())]
        rows += [("requests given up", len(self.given_up))]
        rows += [("prompt tokens, this run", self.prompt_tokens), ("answer tokens, this run", self.completion_tokens)]
        return pd.DataFrame(rows, columns=["what", "count"])


def ask_strictly(
    requests: Sequence[Request],
    parse: Callable[[Request, str], Parsed],
    *,
    attempts: int = 3,
    recorded: Sequence[Path] = (),
    store: Path | None = None,
    server: Server | None = None,
    max_tokens: int | None = None,
    progress: bool = True,
) -> AskReport:
    """Ask `requests`, hand each answer to `parse`, and ask what it leaves over again, `attempts` times at most.

    `parse(request, answer)` keeps what is good itself. Attempts after the first use another seed and a temperature.
    Raises DataError as client.answer_all does."""
    report, pending = AskReport(), list(requests)
    for attempt in range(1, attempts + 1):
        if not pending:
            break
        if server is not None:
            server = replace(server, seed=server.seed + (attempt > 1), max_tokens=max_tokens or server.max_tokens)
            if attempt > 1:
                server = replace(server, temperature=max(RETRY_TEMPERATURE, server.temperature))
        # Later attempts carry their number in the id.
        asked = pending if attempt == 1 else [replace(request, id=f"{request.id}~{attempt}") for request in pending]
        answers = client.answer_all(asked, recorded=recorded, store=store, server=server, progress=progress)
        report.asked.append(len(asked))
        report.prompt_tokens += answers.prompt_tokens
        report.completion_tokens += answers.completion_tokens
        left = []
        for request, sent in zip(pending, asked, strict=True):
            if (text := answers.texts.get(sent.key)) is None:
                report.failed += 1
                left.append(request)
                continue
            parsed = parse(request, text)
            report.problems.update(parsed.problems)
            if parsed.rest is not None:
                left.append(parsed.rest)
        pending = left
    report.given_up = pending
    if pending:
        log.warning("%s: %d requests given up after %d attempts", pending[0].task, len(pending), attempts)
    return report


def unanswered(requests: Iterable[Request], recorded: Sequence[Path] = (), store: Path | None = None) -> list[Request]:
    """Those of the requests that neither a recorded file nor the store answers: what a first attempt would send."""
    known = AnswerStore(store, recorded)
    return [request for request in requests if known.find(request)[1] is None]


def without_thinking(answer: str) -> str:
    """The answer after the last `</think>`, without one that was never closed."""
    return answer.rpartition("</think>")[2].partition("<think>")[0].strip()
