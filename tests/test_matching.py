import random

from reference_matching import build_trie, find

from drehr_utils import corpus, pipeline
from drehr_utils.matching import EntityMatcher, Match
from drehr_utils.profiles import load_profile


def spans(matcher, text):
    return [(m.start, m.end, m.term) for m in matcher.find(text)]


def test_rules_by_hand():
    matcher = EntityMatcher(["heart", "heart failure", "failure", "chf", "o2", "st elevation", "art"])
    assert matcher.find("chronic heart failure (chf), worse.") == [Match(8, 21, "heart failure"), Match(23, 26, "chf")]
    assert spans(matcher, "heart failures") == [(0, 5, "heart")]  # the longer one would end inside a word
    assert spans(matcher, "pre-chf") == [] and spans(matcher, "/chf") == []  # starts after white space or "(" only
    assert spans(matcher, "chf/heart o2-dependent") == [(0, 3, "chf"), (10, 12, "o2")]
    assert spans(matcher, "") == [] and EntityMatcher([]).find("chf") == []


def test_the_longest_from_the_left_blocks_a_later_longer_one():
    matcher = EntityMatcher(["acute kidney", "kidney injury requiring dialysis", "injury"])
    assert spans(matcher, "acute kidney injury requiring dialysis") == [(0, 12, "acute kidney"), (13, 19, "injury")]


def test_same_matches_as_the_reference_on_random_text():
    rng = random.Random(0)
    letters = "ab (.é1 "
    terms = {"".join(rng.choices("abé1 (", k=rng.randint(1, 5))).strip() for _ in range(200)} - {""}
    matcher, trie = EntityMatcher(terms), build_trie(terms)
    for _ in range(500):
        text = "".join(rng.choices(letters, k=rng.randint(0, 60)))
        assert spans(matcher, text) == find(trie, text)


def test_same_matches_as_the_reference_on_all_open_notes():
    profile = load_profile("open")
    matcher = pipeline.matcher(profile)
    trie = build_trie(matcher.terms)
    total = 0
    for note in pipeline.notes(profile)[0]:
        text = corpus.clean(note.text)
        ours = spans(matcher, text)
        assert ours == find(trie, text)
        total += len(ours)
    assert total > 20_000
