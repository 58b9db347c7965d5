"""A language model's answers on disk, one sqlite database a run: ours as they come, and those of recorded files.

An answer belongs to a prompt and a chunk's text: both are named by their digests, so an answer to another text or
another prompt is never taken for this one's. There may be tens of millions: none is held in memory."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path

import pandas as pd

from drehr_utils import artifacts
from drehr_utils.errors import DataError
from drehr_utils.files import open_database, read_json_lines, short_name
from drehr_utils.llm.prompts import PAPER_PROMPT_SHA256, Key, Request, prompt_sha256

log = logging.getLogger(__name__)

OURS = ""  # the source of answers that a server gave; a recorded file's is its content's digest
_KEY = "task, entity_type, id, text_sha256, prompt_sha256, source, model"
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY, {_KEY.replace(",", " TEXT NOT NULL,")} TEXT NOT NULL, answer TEXT NOT NULL,
    finish_reason TEXT, prompt_tokens INTEGER, completion_tokens INTEGER, UNIQUE ({_KEY}));
CREATE TABLE IF NOT EXISTS files (
    source TEXT, bytes INTEGER, malformed_lines INTEGER, conflicting INTEGER, UNIQUE (source, bytes));
CREATE TEMP TABLE found (
    task TEXT, entity_type TEXT, id TEXT, number INTEGER, PRIMARY KEY (task, entity_type, id)) WITHOUT ROWID;
"""


def _stored(*values: str | int | None) -> list[str | int | None]:
    """As sqlite keeps them: none is an empty string, and half a surrogate pair, which JSON can hold, a "?"."""
    return [value.encode("utf-8", "replace").decode() if isinstance(value, str) else value or "" for value in values]


class AnswerStore:
    """The database `path`, by the name in .sqlite (None: a temporary one), with the answers of `recorded` files, which
    are copied in once; so is the file of that name in .jsonl, where an earlier version kept our answers.

    `counts` has the files' `malformed_lines` (skipped, logged by number: bad JSON, a field missing or of another type,
    not UTF-8, a damaged end) and `conflicting` (of two answers to one question by one model the last wins). Raises
    DataError for a recorded file that isn't there."""

    def __init__(self, path: Path | None, recorded: Sequence[Path] = ()):
        self.path = path and path.with_suffix(".sqlite")
        self.database = open_database(self.path, _SCHEMA)
        self.counts: Counter[str] = Counter()
        if path is not None and (earlier := path.with_suffix(".jsonl")).exists():
            self._copy(earlier, OURS)
        self.sources = [OURS]
        for file in map(Path, recorded):
            if not file.is_file():
                raise DataError(f"{short_name(file)}: no such file; recorded answers are JSON lines")
            self.sources.append(artifacts.digest(read_json_lines, file))
            self._copy(file, self.sources[-1])

    def _copy(self, path: Path, source: str) -> None:
        """The file's answers, all in one transaction, unless they are there."""
        counts, key = Counter(), (source, path.stat().st_size)

        def skip(fault: str) -> None:
            counts["malformed_lines"] += 1
            if counts["malformed_lines"] <= 5:
                log.warning("skipped: %s", fault)

        with self.database:
            self.database.execute("BEGIN IMMEDIATE")  # waits for another process that copies it
            known = "SELECT malformed_lines, conflicting FROM files WHERE (source, bytes) = (?, ?)"
            if (row := self.database.execute(known, key).fetchone()) is None:
                needed = ("task", "id", "text_sha256", "answer")
                optional = ("entity_type", "prompt_sha256", "model", "finish_reason")
                for _, _, line in read_json_lines(path, needed, optional, skip):
                    prompt = line.get("prompt_sha256") or PAPER_PROMPT_SHA256.get(line["task"], "")
                    asked = (line["task"], line.get("entity_type"), line["id"], line["text_sha256"], prompt)
                    counts["conflicting"] += self._put((*asked, source), line)[1]
                row = (counts["malformed_lines"], counts["conflicting"])
                self.database.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (*key, *row))
        if any(row):
            log.warning("%s: %d malformed lines, %d conflicting answers", short_name(path), *row)
        self.counts.update(malformed_lines=row[0], conflicting=row[1])

    def _put(self, key: tuple[str | None, ...], answer: Mapping) -> tuple[int, bool]:
        """The answer's number, and whether it replaced another one of the same key and model."""
        key = _stored(*key, answer.get("model"))
        values = _stored(answer["answer"], answer.get("finish_reason"))
        tokens = (answer.get(f"{of}_tokens") for of in ("prompt", "completion"))
        values += [n if isinstance(n, int) and 0 <= n < 2**31 else None for n in tokens]  # else it is no count
        sql = f"SELECT number, answer FROM answers WHERE ({_KEY}) = (?, ?, ?, ?, ?, ?, ?)"
        earlier = self.database.execute(sql, key).fetchone()
        # Another run of the same may have put it there meanwhile: then the later answer stands.
        sql = f"""INSERT INTO answers VALUES (NULL{", ?" * 11}) ON CONFLICT ({_KEY}) DO UPDATE SET answer =
            excluded.answer, finish_reason = excluded.finish_reason, prompt_tokens = excluded.prompt_tokens,
            completion_tokens = excluded.completion_tokens RETURNING number"""
        ((number,),) = self.database.execute(sql, key + values).fetchall()
        return number, earlier is not None and earlier[1] != values[0]

    def append(self, request: Request, answer: Mapping) -> int:
        """Keeps our answer (`answer`, `model`, `finish_reason`, `prompt_tokens`, `completion_tokens`) to a request: it
        is on disk when this returns its number."""
        key = (*request.key, request.text_sha256, prompt_sha256(request.task), OURS)
        return self._put(key, answer)[0]

    def has_any_of(self, model: str) -> bool:
        """Whether the model has ever answered."""
        sql = "SELECT 1 FROM answers WHERE (source, model) = (?, ?) LIMIT 1"
        return self.database.execute(sql, _stored(OURS, model)).fetchone() is not None

    @cached_property
    def _only_model(self) -> str:
        models = [name for (name,) in self.database.execute("SELECT DISTINCT model FROM answers WHERE source = ''")]
        if len(models) > 1:
            named = ", ".join(sorted(name or "one without a name" for name in models))
            where = self.path.name if self.path else "the store"
            raise DataError(f"llm: {where} has answers of {named}; set DREHR_LLM_MODEL to the one whose answers count")
        return models[0]

    def last(self) -> int:
        """The last answer's number, 0 where there is none."""
        return self.database.execute("SELECT coalesce(max(number), 0) FROM answers").fetchone()[0]

    def texts(self, requests: Iterable[Request], model: str | None, last: int) -> dict[Key, str]:
        """The answers' texts as Texts has them, of the requests that have one up to number `last`; see find."""
        numbers = {request.key: found[0] for request in requests if (found := self.find(request, model, last)[1])}
        return {key: _text(self.database, number) for key, number in numbers.items()}

    def find(
        self, request: Request, model: str | None = None, last: int | None = None
    ) -> tuple[str, tuple[int, str] | None]:
        """Where the request's answer is from, with its number and finish reason; or why there's none, and None.

        Either names a counter of Answers. `model`: ours count only if they are this model's; None: of the one that gave
        them all. `last`: none counts that came after the answer of this number. Raises DataError where none is named
        and several gave ours: a training on a mixture of them would be no model's."""
        rows = self.database.execute(
            "SELECT text_sha256, prompt_sha256, source, model, number, finish_reason FROM answers"
            " WHERE (task, entity_type, id) = (?, ?, ?) AND number <= ? ORDER BY number",
            (*_stored(*request.key), 2**63 - 1 if last is None else last),
        )
        if not (rows := [row for row in rows if row[2] in self.sources]):
            return "never_recorded", None
        wanted = (request.text_sha256, prompt_sha256(request.task))
        fitting = [row for row in rows if row[:2] == wanted]
        if not fitting:
            return "stale_prompt" if any(row[0] == wanted[0] for row in rows) else "stale_text", None
        last = max(fitting, key=lambda row: (self.sources.index(row[2]), row[4]))  # ours only if none is recorded
        if last[2] != OURS:
            return "recorded", last[4:]
        ours = [row for row in fitting if row[3] == (self._only_model if model is None else model)]
        return ("stored", ours[-1][4:]) if ours else ("other_model", None)


def _text(database: sqlite3.Connection, number: int) -> str:
    """Of an answer cut at the token limit without its last line: half a name is a wrong name."""
    answer, finish_reason = database.execute(
        "SELECT answer, finish_reason FROM answers WHERE number = ?", (number,)
    ).fetchone()
    return answer.rpartition("\n")[0] if finish_reason == "length" else answer


class Texts(Mapping[Key, str]):
    """The answers' texts by `Request.key`, in the keys' order, read from the database one by one."""

    def __init__(self, database: sqlite3.Connection):
        self.database = database

    def __getitem__(self, key: Key) -> str:
        row = self.database.execute(
            "SELECT number FROM found WHERE (task, entity_type, id) = (?, ?, ?) AND number IS NOT NULL", _stored(*key)
        ).fetchone()
        if row is None:
            raise KeyError(key)
        return _text(self.database, row[0])

    def __iter__(self) -> Iterator[Key]:
        found = self.database.execute(
            "SELECT task, entity_type, id FROM found WHERE number IS NOT NULL ORDER BY task, entity_type, id"
        )
        return ((task, kind or None, at) for task, kind, at in found)

    def __len__(self) -> int:
        return self.database.execute("SELECT count(number) FROM found").fetchone()[0]


@dataclass
class Answers:
    """Answer texts by `Request.key` (a request that failed has none), and how they came about.

    Counted in answers: `recorded`, `stored` and `asked` (where each came from), `truncated` (cut at the token limit;
    the last line is dropped). In requests: `failed` (`errors` says of what; a later run asks again) and those whose
    earlier answer didn't apply: `stale_text`, `stale_prompt`, `other_model`. In lines of answer files:
    `malformed_lines` (skipped) and `conflicting` (replaced another answer to the same question). In tokens, as the
    server counts them: `prompt_tokens`, `completion_tokens`."""

    store: AnswerStore = field(repr=False)
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

    def __post_init__(self) -> None:
        self.malformed_lines, self.conflicting = (self.store.counts[n] for n in ("malformed_lines", "conflicting"))

    @property
    def texts(self) -> Texts:
        return Texts(self.store.database)

    def enter(self, request: Request, number: int | None) -> None:
        """Answer `number` of the store is the request's, None: there is none. DataError for one that comes twice."""
        try:
            self.store.database.execute("INSERT INTO found VALUES (?, ?, ?, ?)", (*_stored(*request.key), number))
        except sqlite3.IntegrityError:
            said = f"llm: request {request.id} ({request.label}) comes twice; ids must be unique in a run"
            raise DataError(said) from None

    def keep(self, request: Request, answer: Mapping) -> None:
        """Stores the answer that was asked for (AnswerStore.append): it is on disk when this returns."""
        self.asked += 1
        self.truncated += answer["finish_reason"] == "length"
        number = self.store.append(request, answer)
        sql = "UPDATE found SET number = ? WHERE (task, entity_type, id) = (?, ?, ?)"
        self.store.database.execute(sql, (number, *_stored(*request.key)))

    def digest(self) -> str:
        """SHA-256 of all keys and texts, in the keys' order."""
        sha = hashlib.sha256()
        for key, text in self.texts.items():
            sha.update(json.dumps([*key, text]).encode("ascii"))
        return sha.hexdigest()

    def report(self) -> pd.DataFrame:
        """One row a counter: columns `what`, `count`."""
        rows = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self) if f.type == "int"]
        rows += [(f"failed: {kind}", count) for kind, count in sorted(self.errors.items())]
        return pd.DataFrame(rows, columns=["what", "count"])
