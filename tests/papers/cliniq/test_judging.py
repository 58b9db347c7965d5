"""Judging: string matches against a plain regular expression, strict parsing, a real local server that misbehaves."""

import random
import re
import sqlite3
from collections import Counter

import pytest
from llm_server import chat_server

from drehr_utils.config import CliniqSizes
from drehr_utils.data.benchmark import Benchmark, Patient, load_benchmark
from drehr_utils.errors import DataError
from drehr_utils.llm import strict
from drehr_utils.llm.servers import Server
from drehr_utils.papers.cliniq import judging
from drehr_utils.papers.cliniq.judging import parse_judgments
from drehr_utils.profiles import ROOT

OPEN_CLINIQ = ROOT / "data/open_cliniq"
UNASKED = "a term that was not asked for"
TERMS = {"q0": "aspirin", "q1": "hypertension", "q2": "renal failure", "q3": "copd", "q4": "gout"}
NOTES = {"A": ["on asa for htn", "aspirin held, atn seen"], "B": ["gout flare", "well"]}


@pytest.fixture
def toy() -> Benchmark:
    corpus = {f"{note}_{k}": text for note, chunks in NOTES.items() for k, text in enumerate(chunks)}
    patients = [Patient("1", "A", ["A_0", "A_1"], ["q0", "q1", "q2"]), Patient("2", "B", ["B_0", "B_1"], ["q3", "q4"])]
    return Benchmark(corpus, dict(TERMS), dict.fromkeys(TERMS, "disease"), patients, {}, {})


def test_string_matches_are_those_of_a_plain_regular_expression():
    benchmark = load_benchmark(OPEN_CLINIQ, "dev")
    found = judging.string_matches(benchmark.queries, benchmark.corpus)
    slow = {
        (query_id, chunk_id)
        for query_id, text in benchmark.queries.items()
        for chunk_id, chunk in benchmark.corpus.items()
        if text in chunk and re.search(rf"(?<![^\W_]){re.escape(text)}(?![^\W_])", chunk)
    }
    assert found == slow and len(found) == 802


@pytest.mark.parametrize(
    ("chunk", "matches"),
    [
        ("gout", True), ("(gout)", True), ("gout/ra", True), ("gouty", False), ("2gout", False), ("no_gout", True),
        ("gout2", False), ("a gout.", True), ("goût", False), ("ragout gout", True), ("égout", False), ("", False),
    ],
)  # fmt: skip
def test_string_rule(chunk, matches):
    assert (judging.string_matches({"q": "gout"}, {"c": chunk}) == {("q", "c")}) == matches


def test_overlapping_queries_all_match():
    queries = {"a": "heart failure", "b": "failure", "c": "acute heart failure", "d": "art"}
    assert judging.string_matches(queries, {"c": "acute heart failure"}) == {("a", "c"), ("b", "c"), ("c", "c")}


def test_questions_hold_own_queries_without_string_matches(toy):
    strings = judging.string_matches(toy.queries, toy.corpus)
    assert strings == {("q0", "A_1"), ("q4", "B_0")}
    questions = judging.judgment_questions(toy, strings, CliniqSizes(terms_per_call=2))
    assert [(q.request.id, q.query_ids) for q in questions] == [
        ("A_0#0", ("q0", "q1")),
        ("A_0#1", ("q2",)),
        ("A_1#0", ("q1", "q2")),
        ("B_0#0", ("q3",)),
        ("B_1#0", ("q3", "q4")),
    ]
    prompt = questions[0].request.prompt()
    assert "on asa for htn" in prompt and "1. aspirin\n2. hypertension" in prompt and "{" not in prompt


@pytest.mark.parametrize(
    ("answer", "labels", "problems"),
    [
        ("1 | asa is short | abbreviation\n2 | nothing | not relevant", {1: "abbreviation", 2: "not relevant"}, []),
        ("  2|x|Synonym \n\n1 | a | b | hyponym", {2: "synonym", 1: "hyponym"}, []),
        ("<think>1 | x | synonym</think>\n1 | y | hyponym\n2 | y | implication", {1: "hyponym", 2: "implication"}, []),
        ("1 | x | synonym", {1: "synonym"}, ["a term without a judgment"]),
        ("1 | x | string\n2 | x | relevant", {}, ["not a line of the format"] * 2 + ["a term without a judgment"] * 2),
        ("1 | | synonym\n2 | x | synonym.", {}, ["not a line of the format"] * 2 + ["a term without a judgment"] * 2),
        ("1 | x | synonym\n1 | y | hyponym\n2 | x | synonym", {2: "synonym"}, ["two labels for a term"]),
        ("1 | x | synonym\n1 | y | synonym\n2 | x | synonym", {1: "synonym", 2: "synonym"}, []),
        ("1 | x | synonym\n2 | x | hyponym\n3 | x | hyponym", {1: "synonym", 2: "hyponym"}, [UNASKED]),
        ("", {}, ["a term without a judgment"] * 2),
        ("Sorry, I can't help with that.", {}, ["not a line of the format"] + ["a term without a judgment"] * 2),
    ],
)  # fmt: skip
def test_answers_are_parsed_strictly(answer, labels, problems):
    assert parse_judgments(answer, 2) == (labels, problems)


def test_the_parser_is_total():
    rng = random.Random(0)
    pieces = [
        "1",
        "2",
        "|",
        " | ",
        "synonym",
        "not relevant",
        "\n",
        "<think>",
        "</think>",
        "é",
        "\u2028",
        "\0",
        "٣",
        "*",
    ]
    for _ in range(5000):
        labels, _ = parse_judgments("".join(rng.choices(pieces, k=rng.randrange(25))), 2)
        assert set(labels) <= {1, 2} and set(labels.values()) <= set(judging.LABELS)
    parse_judgments("1 | " + "x | " * 20_000, 2)


TRUTH = {("q0", "A_0"): "abbreviation", ("q1", "A_0"): "abbreviation", ("q2", "A_1"): "hyponym"}


def answer_of(prompt: str, chunk_ids: dict[str, str]) -> str:
    """What a perfect judge says: it reads the chunk and the terms from the prompt."""
    chunk, _, terms = (
        prompt.partition("Part of the record:\n")[2].rpartition("\n\nYour lines:")[0].partition("\n\nTerms:\n")
    )
    ids = {text: query_id for query_id, text in TERMS.items()}
    lines = []
    for line in terms.splitlines():
        number, _, term = line.partition(". ")
        lines.append(f"{number} | because | {TRUTH.get((ids[term], chunk_ids[chunk]), 'not relevant')}")
    return "\n".join(lines)


def asked_questions(toy):
    strings = judging.string_matches(toy.queries, toy.corpus)
    return judging.judgment_questions(toy, strings, CliniqSizes(terms_per_call=2))


def test_a_real_server_that_misbehaves(toy, tmp_path):
    questions, chunk_ids, tries = asked_questions(toy), {text: c for c, text in toy.corpus.items()}, Counter()

    def reply(prompt: str, body: dict) -> str | int:
        good = answer_of(prompt, chunk_ids)
        chunk = prompt.partition("record:\n")[2].partition("\n\nTerms:")[0]
        tries[chunk] += 1
        if chunk == "well":  # garbage for ever
            return "As a language model I would rather not judge this chunk."
        if chunk == "aspirin held, atn seen" and tries[chunk] == 1:
            return good.splitlines()[0]  # half an answer
        if chunk == "gout flare" and tries[chunk] == 1:
            return 400  # an error of the request: no answer
        return good

    store, settings = tmp_path / "j.sqlite", CliniqSizes(terms_per_call=2, attempts=3)
    with chat_server(reply) as server:
        options = dict(server=Server(server.base_url, "m", concurrency=1), store=store)
        judged = judging.judge(toy, questions, settings, **options)
        sent = len(server.bodies)
        limit = server.bodies[0]["max_tokens"]
    assert judging.combine_judgments(judged.labels) == TRUTH
    assert judged.unjudged == [("q3", "B_1"), ("q4", "B_1")]
    assert judged.labels.keys() == {(q, c.chunk_id) for c in questions for q in c.query_ids} - set(judged.unjudged)
    assert judged.report.asked == [5, 3, 1] and judged.report.failed == 1 and sent == 9
    assert judged.report.problems["not a line of the format"] == 3
    assert judged.report.problems["a term without a judgment"] == 1 + 3 * 2
    assert limit >= 512
    counts = judged.frame().set_index("what")["count"]
    assert counts["pairs unjudged"] == 2 and counts["pairs: abbreviation"] == 2 and counts["requests given up"] == 1
    assert "rather not" not in judged.frame().to_string()  # an answer's words stay out of reports

    with chat_server(reply) as server:  # a second run finds every answer but the failed request's in the store
        again = judging.judge(
            toy, questions, settings, **(options | {"server": Server(server.base_url, "m", concurrency=1)})
        )
        resent = len(server.bodies)
    assert judging.combine_judgments(again.labels) == TRUTH and again.unjudged == judged.unjudged and resent == 1


def test_a_benchmark_is_not_made_of_string_matches_alone(toy, tmp_path):
    """A model that gives no judgment: the message says of what kind its answers were, and not what they said."""
    for reply, said in (("I would rather not.", "a term without a judgment: "), (400, "requests without an answer: ")):
        with chat_server(lambda prompt, body, reply=reply: reply) as server:
            with pytest.raises(DataError, match=f"8 of 8 pairs .* without a judgment .{said}") as error:
                judging.judge(toy, asked_questions(toy), CliniqSizes(), server=Server(server.base_url, "m"))
        assert "rather" not in str(error.value)


def test_resumes_after_the_server_died(toy, tmp_path):
    questions, chunk_ids = asked_questions(toy), {text: c for c, text in toy.corpus.items()}
    store, settings, count = tmp_path / "j.sqlite", CliniqSizes(terms_per_call=2), Counter()

    def dies(prompt: str, body: dict) -> str | int:
        count["n"] += 1
        return answer_of(prompt, chunk_ids) if count["n"] <= 3 else 503

    def run(server):
        target = Server(server.base_url, "m", concurrency=1, max_retries=0)
        return judging.judge(toy, questions, settings, server=target, store=store)

    with chat_server(dies) as server, pytest.raises(DataError, match="does not answer"):
        run(server)
    left = strict.unanswered([q.request for q in questions], store=store)
    assert len(left) == 2 and sqlite3.connect(store).execute("SELECT COUNT(*) FROM answers").fetchone() == (3,)
    with chat_server(lambda prompt, body: answer_of(prompt, chunk_ids)) as server:
        judged = run(server)
        assert len(server.bodies) == 2  # only what was missing
    assert judging.combine_judgments(judged.labels) == TRUTH and not judged.unjudged


def test_another_term_or_chunk_is_another_question(toy, tmp_path):
    """A changed query makes the stored answer stale: it isn't taken for the new one."""
    questions, chunk_ids = asked_questions(toy), {text: c for c, text in toy.corpus.items()}
    store, settings = tmp_path / "j.sqlite", CliniqSizes(terms_per_call=2)
    with chat_server(lambda prompt, body: answer_of(prompt, chunk_ids)) as server:
        judging.judge(toy, questions, settings, server=Server(server.base_url, "m"), store=store)
    toy.queries["q1"] = "high blood pressure"
    left = strict.unanswered([q.request for q in asked_questions(toy)], store=store)
    assert {request.id for request in left} == {"A_0#0", "A_1#0"}


def test_no_server_and_no_answers_is_an_error(toy):
    with pytest.raises(DataError, match="DREHR_LLM_BASE_URL"):
        judging.judge(toy, asked_questions(toy), CliniqSizes())


HEADER = "query-id\tcorpus-id\tmatch_type\n"
MALFORMED = {
    "header": ("q1\tA_0\tsynonym\n", "row 1, field query-id: missing column"),
    "fields": (HEADER + "q1\tA_0\n", "row 2: 2 fields"),
    "query": (HEADER + "q9\tA_0\tsynonym\n", "row 2, field query-id: 'q9'"),
    "chunk": (HEADER + "q1\tZ_0\tsynonym\n", "row 2, field corpus-id: 'Z_0'"),
    "label": (HEADER + "q1\tA_0\tstring\n", "row 2, field match_type: 'string'"),
    "another patient's": (
        HEADER + "q1\tB_0\tsynonym\n",
        "row 2, field corpus-id: q1 with B_0: not a query of the chunk's patient",
    ),
    "string match": (HEADER + "q0\tA_1\tsynonym\n", "row 2, field corpus-id: q0 with A_1 is a string match"),
    "twice": (HEADER + "q1\tA_0\tsynonym\nq1\tA_0\thyponym\n", "row 3, field corpus-id: q1 with A_0 is there twice"),
}


@pytest.mark.parametrize(("text", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_judgments_are_named(toy, tmp_path, text, message):
    path = tmp_path / "judgments/judge_a.tsv"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(DataError, match=f"judgments/judge_a.tsv, {message}"):
        judging.read_judgments(path, toy, judging.string_matches(toy.queries, toy.corpus))


def test_combination_of_two_judges_worked_by_hand():
    a = {("q", "1"): "synonym", ("q", "2"): "hyponym", ("q", "3"): "implication", ("q", "6"): "not relevant"}
    b = {("q", "1"): "abbreviation", ("q", "2"): "hyponym", ("q", "4"): "implication", ("q", "5"): "synonym"}
    third = {("q", "3"): "not relevant", ("q", "4"): "implication", ("q", "5"): "hyponym"}
    final = {("q", "1"): "synonym", ("q", "2"): "hyponym", ("q", "4"): "implication", ("q", "5"): "hyponym"}
    assert judging.combine_judgments(a, b, third) == final
    assert judging.combine_judgments(a) == {k: v for k, v in a.items() if v != "not relevant"}
    with pytest.raises(DataError, match="no decision for q with 5"):
        judging.combine_judgments(a, b, {k: v for k, v in third.items() if k[1] != "5"})
