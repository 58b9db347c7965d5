"""A language model's answers on disk: JSON lines that are read with their faults counted, and appended one by one.

An answer belongs to a prompt and a chunk's text: both are named by their digests, so an answer to another text or
another prompt is never taken for this one's (client.answer_all)."""

from __future__ import annotations

import gzip
import json
import logging
import os
import sys
import zlib
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from drehr_utils.errors import DataError
from drehr_utils.llm.prompts import PAPER_PROMPT_SHA256, Request, prompt_sha256

log = logging.getLogger(__name__)


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


def open_store(path: Path | None) -> AbstractContextManager[BinaryIO | None]:
    """The store, opened to append to; None for none."""
    if path is None:
        return nullcontext()
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = open(path, "ab+")
    if handle.seek(0, os.SEEK_END):
        handle.seek(-1, os.SEEK_END)
        if handle.read(1) != b"\n":  # a killed run left half a line: end it, or it spoils the next
            handle.write(b"\n")
    return handle


def append(store: BinaryIO | None, request: Request, row: dict) -> None:
    """One line, flushed, so that a kill costs at most the answer being written."""
    if store is None:
        return
    kind = {"entity_type": request.entity_type} if request.entity_type else {}
    row = {"task": request.task, **kind, "id": request.id, "text_sha256": request.text_sha256, **row}
    store.write(json.dumps(row | {"prompt_sha256": prompt_sha256(request.task)}).encode("ascii") + b"\n")
    store.flush()
