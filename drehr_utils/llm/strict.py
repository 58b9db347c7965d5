"""Strict answers of a language model on top of the client: parse, ask again what was malformed, then count it.

client.answer_all keeps whatever the model said. Here an answer counts only as far as its parser accepts it; what it
doesn't is asked again under another request id, so that each attempt is in the store and a stopped run repeats them."""

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


# Of a request and its answer: what it leaves over to ask (None: nothing), and what was malformed in the answer, named
# without the answer's words (they may be a patient's).
Parse = Callable[[Request, str], tuple[Request | None, list[str]]]


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
    parse: Parse,
    *,
    max_tokens: int,
    attempts: int = 3,
    store: Path | None = None,
    server: Server | None = None,
) -> AskReport:
    """Ask `requests`, hand each answer to `parse`, and ask what it leaves over again, `attempts` times at most.

    `parse` keeps what is good itself. Attempts after the first use another seed and a temperature. Raises DataError as
    client.answer_all does."""
    report, pending = AskReport(), list(requests)
    if server:  # a long answer takes longer than a short one's patience: ten tokens a second
        server = replace(server, max_tokens=max_tokens, timeout_s=max(server.timeout_s, max_tokens / 10))
    for attempt in range(1, attempts + 1):
        if not pending:
            break
        asked = pending
        if attempt > 1:  # the number is in the id
            asked = [replace(request, id=f"{request.id}~{attempt}") for request in pending]
        if attempt > 1 and server is not None:
            server = replace(server, seed=server.seed + 1, temperature=max(RETRY_TEMPERATURE, server.temperature))
        answers = client.answer_all(asked, store=store, server=server)
        report.asked.append(len(asked))
        report.prompt_tokens += answers.prompt_tokens
        report.completion_tokens += answers.completion_tokens
        left = []
        for request, sent in zip(pending, asked, strict=True):
            if (text := answers.texts.get(sent.key)) is None:
                report.failed += 1
                left.append(request)
            else:
                rest, problems = parse(request, text)
                report.problems.update(problems)
                left += [rest] if rest else []
        pending = left
    report.given_up = pending
    if pending:
        log.warning("%s: %d requests given up after %d attempts", pending[0].task, len(pending), attempts)
    return report


def unanswered(requests: Iterable[Request], store: Path) -> list[Request]:
    """Those of the requests that the store doesn't answer yet: what a first attempt would send."""
    known = AnswerStore(store)
    return [request for request in requests if known.find(request)[1] is None]
