"""What holds for any input, with inputs that hypothesis makes up; fixed by its seed, so that a run repeats."""

import csv
import io
import json
import re
import string
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drehr_utils import artifacts
from drehr_utils.data.notes import chunk_words, clean
from drehr_utils.errors import DataError
from drehr_utils.files import iter_rows, read_json_lines, write_atomically
from drehr_utils.llm.answers import Answers, AnswerStore
from drehr_utils.llm.prompts import Request, parse_abbreviations, parse_entities, without_thinking
from drehr_utils.papers.cliniq.curation import parse_drug_name
from drehr_utils.papers.cliniq.judging import LABELS, parse_judgments

few = settings(max_examples=60, deadline=None, derandomize=True, database=None)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)  # all characters but halves of surrogate pairs
# Notes' own marks far more often than by chance.
NOTE = st.lists(st.one_of(st.sampled_from(["[**", "**]", "__", "!!", "\n", " ", "Gout", "É", "İ", "."]), TEXT)).map(
    "".join
)


@few
@given(NOTE)
def test_cleaning_removes_and_folds_but_writes_nothing(note):
    cleaned = clean(note)
    assert not re.search(r"\[\*\*.*?\*\*\]|__|\s\s|^\s|\s$", cleaned) and cleaned == cleaned.lower()
    left = iter(note.lower())
    assert all(character in left for character in cleaned if not character.isspace()), "a character that wasn't there"
    kept = re.sub(r"\[\*\*.*?\*\*\]", " ", note, flags=re.DOTALL)
    assert re.findall(r"[^\W_]+", cleaned) == re.findall(r"[^\W_]+", kept.lower())


@few
@given(st.lists(st.integers(), max_size=400), st.integers(1, 120), st.data())
def test_chunks_conserve_words_and_share_exactly_the_overlap(words, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    parts = chunk_words(words, size, overlap)
    joined = parts[0] if parts else []
    for before, after in zip(parts, parts[1:], strict=False):
        assert before[len(before) - overlap :] == after[:overlap] and len(before) == size
        joined = joined + after[overlap:]
    assert joined == words and all(len(part) <= size for part in parts)
    assert not parts or len(parts) == 1 or len(parts[-1]) > overlap, "the last brings something new"


MARKS = [
    "###",
    "**",
    "- ",
    "* ",
    "1. ",
    "NA",
    "none",
    "<think>",
    "</think>",
    "\n",
    "[",
    "]",
    "(",
    ")",
    " | ",
    "string",
    ": ",
]
ANSWER = st.lists(st.one_of(st.sampled_from(MARKS), TEXT), max_size=20).map("".join)


def folded(text: str) -> list[str]:
    return [" ".join(line.lower().split()) for line in text.splitlines()]


@few
@given(ANSWER)
def test_parsers_raise_on_nothing_and_make_up_no_term(answer):
    said = folded(answer)
    for term in parse_entities(answer)[0]:
        assert any(term in line for line in said)
    for pair in parse_abbreviations(answer)[0]:
        assert all(any(half in line for line in said) for half in pair)
    for n in (0, 3):
        labels, problems = parse_judgments(answer, n)
        assert set(labels) <= set(range(1, n + 1)) and set(labels.values()) <= set(LABELS)
        assert all(label in answer.lower() for label in labels.values()) and len(labels) + len(problems) >= n
    try:
        assert parse_drug_name("aspirin ec 81mg tablet", answer) in " ".join(folded(without_thinking(answer)))
    except ValueError:
        pass  # a reason is what it says of an answer that it doesn't take


@few
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=6))
def test_tables_and_json_lines_come_back_as_they_were_written(rows):
    with tempfile.TemporaryDirectory() as folder:
        table, records = Path(folder) / "t.csv.gz", Path(folder) / "r.jsonl"
        written = io.StringIO(newline="")
        csv.writer(written).writerows([("A", "b"), *rows])
        write_atomically(table, written.getvalue().encode())
        assert [tuple(values.values()) for _, values in iter_rows(table, ["a", "b"])] == rows
        write_atomically(records, "".join(json.dumps({"id": a, "x": b}) + "\n" for a, b in rows).encode())
        assert [(record["id"], record["x"]) for *_, record in read_json_lines(records, ("id", "x"))] == rows


@settings(few, max_examples=12)  # each makes a database
@given(st.lists(st.one_of(TEXT, st.text(max_size=5)).filter(str.strip), min_size=1, max_size=5))
def test_a_stored_answer_is_the_one_that_is_found(texts):
    answers = Answers(AnswerStore(None))
    asked = [Request("entity_generation", str(i), text, "drugs") for i, text in enumerate(texts)]
    for request, text in zip(asked, texts, strict=True):
        answers.enter(request, None)
        answers.keep(request, {"answer": text, "model": "m", "finish_reason": "stop"})
    kept = [text.encode("utf-8", "replace").decode() for text in texts]
    assert [answers.texts[request.key] for request in asked] == kept
    assert all(answers.store.find(request, "m")[0] == "stored" for request in asked)
    with pytest.raises(DataError, match="comes twice"):
        answers.enter(asked[0], None)


VALUES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(string.printable, max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text("abc", max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@few
@given(st.lists(VALUES, max_size=3), st.lists(VALUES, max_size=3), st.binary(max_size=20), st.binary(max_size=20))
def test_cache_keys_are_equal_where_what_they_hold_is(one, other, content, changed):
    def turned(value):
        """Equal, with the dictionaries' keys in another order."""
        if isinstance(value, dict):
            return {key: turned(value[key]) for key in reversed(value)}
        return list(map(turned, value)) if isinstance(value, list) else value

    assert artifacts.digest(*one) == artifacts.digest(*turned(one))
    assert (artifacts.digest(*one) == artifacts.digest(*other)) == (one == other)
    with tempfile.TemporaryDirectory() as folder:
        paths = Path(folder) / "a", Path(folder) / "b"
        for path, held in zip(paths, (content, changed), strict=True):
            path.write_bytes(held)
        a, b = map(artifacts.digest, paths)  # of a file its content counts, not its name
        assert (a == b) == (content == changed)
