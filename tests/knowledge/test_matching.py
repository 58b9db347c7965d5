import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_matching import build_trie, find

from drehr_utils import pipeline
from drehr_utils.data.notes import SPLITS, clean
from drehr_utils.knowledge import matching
from drehr_utils.knowledge.graph import normalize_term
from drehr_utils.knowledge.matching import EntityMatcher, Match
from drehr_utils.profiles import load_profile


def spans(matcher, text):
    """Of one text alone, which must also be what it gives among others."""
    found = matcher.find(text)
    assert matcher.find_all([text, "chf " + text, "", text]) == [found, matcher.find("chf " + text), [], found]
    return [tuple(match) for match in found]


def test_rules_by_hand():
    matcher = EntityMatcher(["heart", "heart failure", "failure", "chf", "o2", "st elevation", "art"])
    text = "chronic heart failure (chf), worse."
    expected = [Match(8, 21, "heart failure"), Match(23, 26, "chf")]
    assert matcher.find(text) == expected and matcher.find_all([text]) == [expected]
    assert matcher.find_all([text])[0][0].term == "heart failure"
    assert spans(matcher, "heart failures") == [(0, 5, "heart")]  # the longer one would end inside a word
    assert spans(matcher, "pre-chf") == [] and spans(matcher, "/chf") == []  # starts after white space or "(" only
    assert spans(matcher, "chf/heart o2-dependent") == [(0, 3, "chf"), (10, 12, "o2")]
    assert spans(matcher, "") == [] and spans(EntityMatcher([]), "chf") == []
    assert matcher.find_all([]) == [] and matcher.find_all([""]) == [[]]


def test_the_longest_from_the_left_blocks_a_later_longer_one():
    matcher = EntityMatcher(["acute kidney", "kidney injury requiring dialysis", "injury"])
    assert spans(matcher, "acute kidney injury requiring dialysis") == [(0, 12, "acute kidney"), (13, 19, "injury")]


def test_spans_that_overlap_in_a_chain():
    matcher = EntityMatcher(["a b", "b c", "c d", "d e", "c", "e"])
    assert spans(matcher, "a b c d e") == [(0, 3, "a b"), (4, 7, "c d"), (8, 9, "e")]
    assert spans(matcher, "x b c d e") == [(2, 5, "b c"), (6, 9, "d e")]


def test_no_match_runs_from_one_text_into_the_next():
    matcher = EntityMatcher(["heart", "heart failure", "heart\nfailure", "a"])
    assert matcher.find_all(["heart", "failure", "a"]) == [[Match(0, 5, "heart")], [], [Match(0, 1, "a")]]
    assert spans(matcher, "heart\nfailure") == [(0, 13, "heart\nfailure")]


@pytest.mark.parametrize(
    "text",
    [
        "café au lait",
        "caf é",
        "5 µg/ml",
        "β-blocker (β)",
        "naïve\u00a0chf",
        "chf\u2028chf",
        "chf\U0001f600 chf",
    ],
)
def test_characters_beyond_ascii(text):
    terms = ["caf", "café", "caf é", "µg", "β", "β-blocker", "na", "chf", "5", "5 µg/ml"]
    matcher = EntityMatcher(terms)
    assert spans(matcher, text) == find(build_trie(terms), text)


def test_a_span_with_the_same_hash_as_a_term_is_no_match(monkeypatch):
    # NUL is the one character that adds nothing to a hash: "chf" and "chf\0" have the same. Then `find` decides.
    terms = ["chf", "chf worse", "o2", "o2\0"]
    matcher = EntityMatcher(terms)
    texts = ["chf\0 worse", "chf", "o2\0 o2", "chf\0\0"]
    asked = []
    monkeypatch.setattr(matcher, "find", lambda text: asked.append(text) or EntityMatcher.find(matcher, text))
    assert [[tuple(m) for m in found] for found in matcher.find_all(texts)] == [
        find(build_trie(terms), text) for text in texts
    ]
    assert asked == texts


@pytest.mark.parametrize("block", [1, 50, 1 << 18])
def test_blocks_of_any_size_give_the_same(block, monkeypatch):
    monkeypatch.setattr(matching, "_BLOCK", block)
    matcher = EntityMatcher(["chf", "café", "heart failure"])
    texts = ["chf"] * 5 + ["", "café chf"] + ["heart failure " * 40] + ["no"] * 3
    assert matcher.find_all(texts) == [matcher.find(text) for text in texts]


ALPHABETS = ["ab (.1", "abé1 (-", "ab\n\t (\u00a0", "aα中²_'\U0001f600 (", "ab"]


@pytest.mark.parametrize("letters", ALPHABETS)
def test_same_matches_as_the_reference_on_random_text(letters):
    rng = random.Random(letters)
    short = {"".join(rng.choices(letters, k=rng.randint(1, 6))) for _ in range(150)}
    nested = {f"{a}{rng.choice(' -(')}{b}" for a, b in zip(short, sorted(short), strict=True)}  # terms within terms
    terms = [term for term in short | nested if term.strip()]
    matcher, trie = EntityMatcher(terms), build_trie(terms)
    # Half of the texts are put together of terms, so that long ones come up.
    texts = ["".join(rng.choices(letters, k=rng.randint(0, 60))) for _ in range(400)]
    texts += [rng.choice([" ", "", "(", ". "]).join(rng.choices(terms, k=rng.randint(1, 8))) for _ in range(400)]
    expected = [find(trie, text) for text in texts]
    assert sum(map(len, expected)) > 500
    assert [[tuple(m) for m in matcher.find(text)] for text in texts] == expected
    assert [[tuple(m) for m in found] for found in matcher.find_all(texts)] == expected
    assert [[tuple(m) for m in matcher.find_all([text])[0]] for text in texts] == expected  # each at the row's end


@pytest.mark.slow
def test_same_matches_as_the_reference_on_all_open_notes():
    profile = load_profile("open")
    matcher = pipeline.matcher(profile)
    trie = build_trie(matcher.terms)
    notes = [clean(note.text) for note in pipeline.notes(profile)[0]]
    chunks = [chunk.text for split in SPLITS for chunk in pipeline.chunks(profile, split)]
    for texts, least in ((notes, 20_000), (chunks, 40_000)):
        expected = [find(trie, text) for text in texts]
        assert sum(map(len, expected)) > least
        assert [[tuple(m) for m in found] for found in matcher.find_all(texts)] == expected
        assert [[tuple(m) for m in matcher.find(text)] for text in texts] == expected


LETTERS = st.text(alphabet="ab1 (-é\n", max_size=8)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.lists(LETTERS.map(normalize_term), max_size=12), st.lists(st.text(alphabet="ab1 (-é\n", max_size=40)))
def test_matching_is_the_plain_longest_match(terms, texts):
    matcher = EntityMatcher(terms)
    root = build_trie({term for term in terms if term.strip()})
    expected = [find(root, text) for text in texts]
    assert [list(map(tuple, found)) for found in matcher.find_all(texts)] == expected
    assert [list(map(tuple, matcher.find(text))) for text in texts] == expected
