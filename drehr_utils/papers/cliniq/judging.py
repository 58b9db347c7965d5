"""Relevance judgments of chunks for queries (CliniQ §3.3).

String matches by program, for every query over the whole corpus. Beyond them, a language model judges each chunk for
the queries of its own patient: synonym, abbreviation, hyponym, implication or not relevant, with its reason first.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from drehr_utils.config import CliniqSizes
from drehr_utils.data.benchmark import MATCH_TYPES, Benchmark
from drehr_utils.errors import DataError
from drehr_utils.files import refuse, tab_rows
from drehr_utils.llm.prompts import PROMPTS, Request, without_thinking
from drehr_utils.llm.servers import Server
from drehr_utils.llm.strict import AskReport, ask_strictly
from drehr_utils.search.hybrid import count_names

NOT_RELEVANT = "not relevant"
SEMANTIC_TYPES = tuple(kind for kind in MATCH_TYPES if kind != "string")
LABELS = (*SEMANTIC_TYPES, NOT_RELEVANT)
Pair = tuple[str, str]  # (query id, chunk id)

JUDGMENT_COLUMNS = ("query-id", "corpus-id", "match_type")

# --- string matches --------------------------------------------------------------------------------------------------


def string_matches(queries: dict[str, str], corpus: dict[str, str]) -> set[Pair]:
    """Every (query, chunk) where the query's text stands in the chunk, no letter or digit before or after it.

    Both are lower case already. Over all queries and chunks, whoever's patient they are (CliniQ §3.3)."""
    ids, chunk_ids = [query_id for query_id, text in queries.items() if text], list(corpus)
    counts = count_names([[queries[query_id]] for query_id in ids], list(corpus.values()))
    return {(ids[query], chunk_ids[chunk]) for query, chunk in np.argwhere(counts).tolist()}


def own_pairs(benchmark: Benchmark) -> list[Pair]:
    """Each query of each patient with each chunk of the patient's note, in the benchmark's order."""
    return [(q, c) for patient in benchmark.patients for c in patient.chunk_ids for q in patient.query_ids]


# --- the language model ----------------------------------------------------------------------------------------------

JUDGMENT_TASK = "relevance_judgment"
JUDGMENT_PROMPT = """\
You are a physician who reviews a part of a patient's discharge summary. For each numbered term below it, decide whether
the part holds information that a physician who searches the record for the term would want to find, and how it says it.

synonym: the part names the same thing in other words, or in another form or order of the words.
abbreviation: the part names the same thing by a short form of it, such as an acronym ("ra" for rheumatoid arthritis).
hyponym: the part names a kind of it, something narrower ("acute tubular necrosis" for acute renal failure).
implication: the part doesn't name it, but says something from which a physician concludes it, such as its specific
treatment, finding or cause ("amlodipine" for hypertension).
not relevant: none of these. What is only remotely connected, or could have many other reasons, is not relevant.

If several fit, take the first that does. Think about each term before you decide. Answer with one line for each term
and nothing else: the term's number, your reasoning in a few words, and one of synonym, abbreviation, hyponym,
implication, not relevant, separated by " | ". For example:
1 | "htn" is short for the term | abbreviation
2 | nothing in the part speaks of it | not relevant

Part of the record:
{note}

Your lines:"""
PROMPTS.setdefault(JUDGMENT_TASK, JUDGMENT_PROMPT)


@dataclass(frozen=True)
class Question:
    """One call: a chunk and some of its patient's queries; `request` is what is sent."""

    chunk_id: str
    query_ids: tuple[str, ...]
    request: Request


def _question(benchmark: Benchmark, request_id: str, chunk_id: str, query_ids: Sequence[str]) -> Question:
    terms = "\n".join(f"{i}. {benchmark.queries[query_id]}" for i, query_id in enumerate(query_ids, start=1))
    text = f"{benchmark.corpus[chunk_id]}\n\nTerms:\n{terms}"
    return Question(chunk_id, tuple(query_ids), Request(JUDGMENT_TASK, request_id, text))


def judgment_questions(benchmark: Benchmark, strings: set[Pair], settings: CliniqSizes) -> list[Question]:
    """The calls that judge each chunk for its own patient's queries, those that it matches as a string left out."""
    questions, n = [], settings.terms_per_call
    for patient in benchmark.patients:
        for chunk_id in patient.chunk_ids:
            asked = [q for q in patient.query_ids if (q, chunk_id) not in strings]
            batches = [asked[start : start + n] for start in range(0, len(asked), n)]
            questions += [_question(benchmark, f"{chunk_id}#{part}", chunk_id, b) for part, b in enumerate(batches)]
    return questions


_LINE = re.compile(rf"(\d{{1,4}})\s*\|\s*(\S.*?)\s*\|\s*({'|'.join(LABELS)})", re.IGNORECASE)


def parse_judgments(answer: str, n_terms: int) -> tuple[dict[int, str], list[str]]:
    """Labels by term number (from 1) in an answer, and what was malformed in it; total, it raises on no string.

    Strict: a line is `number | reason | label`, whole. A line of another form, a number that isn't asked for and a
    term that is missing are problems; a term with two labels gets none."""
    labels: dict[int, str] = {}
    twice: set[int] = set()
    problems = []
    for line in filter(None, map(str.strip, without_thinking(answer).splitlines())):
        match = _LINE.fullmatch(line)
        number = int(match[1]) if match else 0
        if match is None:
            problems.append("not a line of the format")
        elif not 1 <= number <= n_terms:
            problems.append("a term that was not asked for")
        elif labels.setdefault(number, match[3].lower()) != match[3].lower():
            twice.add(number)
    problems += ["two labels for a term"] * len(twice)
    labels = {number: label for number, label in labels.items() if number not in twice}
    problems += ["a term without a judgment"] * (n_terms - len(labels) - len(twice))
    return labels, problems


@dataclass
class Judged:
    """One judge's work: a label for each judged pair, the pairs that stayed without, and how the asking went.

    An unjudged pair counts as not relevant in what follows, and is counted here."""

    labels: dict[Pair, str] = field(default_factory=dict)
    unjudged: list[Pair] = field(default_factory=list)
    report: AskReport = field(default_factory=AskReport)

    def frame(self) -> pd.DataFrame:
        """The asking's counters, then pairs by label: columns `what`, `count`."""
        counts = Counter(self.labels.values())
        rows = [(f"pairs: {label}", counts[label]) for label in LABELS] + [("pairs unjudged", len(self.unjudged))]
        return pd.concat([self.report.frame(), pd.DataFrame(rows, columns=["what", "count"])], ignore_index=True)


def judge(
    benchmark: Benchmark,
    questions: Sequence[Question],
    settings: CliniqSizes,
    *,
    server: Server | None = None,
    store: Path | None = None,
) -> Judged:
    """Ask `questions` of a language model: good lines are kept, the other terms asked again, then counted (strict)."""
    judged, by_id = Judged(), {question.request.id: question for question in questions}

    def parse(request: Request, answer: str) -> tuple[Request | None, list[str]]:
        question = by_id[request.id]
        labels, problems = parse_judgments(answer, len(question.query_ids))
        for number, label in labels.items():
            judged.labels[question.query_ids[number - 1], question.chunk_id] = label
        left = [q for number, q in enumerate(question.query_ids, start=1) if number not in labels]
        by_id[request.id] = _question(benchmark, request.id, question.chunk_id, left)
        return by_id[request.id].request if left else None, problems

    judged.report = ask_strictly(
        [question.request for question in questions], parse, attempts=settings.attempts, store=store, server=server,
        max_tokens=max(512, 3 * settings.answer_tokens_per_term * settings.terms_per_call),
    )  # fmt: skip
    given_up = [by_id[request.id] for request in judged.report.given_up]
    judged.unjudged = [(query_id, question.chunk_id) for question in given_up for query_id in question.query_ids]
    if (lost := len(judged.unjudged)) > len(judged.labels):  # the benchmark would have little but string matches
        why = Counter({"requests without an answer": judged.report.failed}) + judged.report.problems
        raise DataError(
            f"judging: {lost} of {lost + len(judged.labels)} pairs of a term and a chunk stayed without a judgment "
            f"({', '.join(f'{kind}: {n}' for kind, n in why.most_common(3))}); another model may keep to the format"
        )
    return judged


# --- judgments on disk, and two judges' made one ---------------------------------------------------------------------


def read_judgments(path: Path, benchmark: Benchmark, strings: set[Pair]) -> dict[Pair, str]:
    """Labels of a `query-id, corpus-id, match_type` table; pairs that it doesn't have were judged not relevant.

    Raises DataError, naming file, row and field, for a missing file, an unknown query, chunk or label, a repeated
    pair, and a pair that was not to be judged: another patient's, or a string match."""
    asked, judgments = set(own_pairs(benchmark)), {}
    for row, where, judgment in tab_rows(Path(path), JUDGMENT_COLUMNS):
        query_id, chunk_id, label = (judgment[column] for column in JUDGMENT_COLUMNS)
        pair, two = (query_id, chunk_id), f"field corpus-id: {query_id} with {chunk_id}"
        wrong = {
            f"field query-id: {query_id!r} is no query of the benchmark": query_id not in benchmark.queries,
            f"field corpus-id: {chunk_id!r} is no chunk of the benchmark": chunk_id not in benchmark.corpus,
            f"field match_type: {label!r} is none of {', '.join(LABELS)}": label not in LABELS,
            f"{two}: not a query of the chunk's patient": pair not in asked,
            f"{two} is a string match; that is not judged": pair in strings,
            f"{two} is there twice; keep one": pair in judgments,
        }
        refuse(where, row, wrong)
        judgments[pair] = label
    return judgments


def combine_judgments(
    first: dict[Pair, str], second: dict[Pair, str] | None = None, third: dict[Pair, str] | None = None
) -> dict[Pair, str]:
    """Final match types of the relevant pairs. One judge: as judged. Two: the first's type where both say relevant,
    the third's answer where one does. Raises DataError for such a pair that the third didn't decide."""
    relevant = [{p: label for p, label in judge.items() if label != NOT_RELEVANT} for judge in (first, second or {})]
    if second is None:
        return relevant[0]
    final = {pair: label for pair, label in relevant[0].items() if pair in relevant[1]}
    for pair in relevant[0].keys() ^ relevant[1].keys():
        if pair not in (third or {}):
            raise DataError(f"adjudicated.tsv: no decision for {pair[0]} with {pair[1]}, on which the judges disagree")
        if third[pair] != NOT_RELEVANT:
            final[pair] = third[pair]
    return final
