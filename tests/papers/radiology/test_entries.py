"""Lexicon labels by hand, splits without a leak."""

import pytest

from drehr_utils.papers.radiology.entries import label_entries, label_sentence, split_by_finding, without_sentences
from drehr_utils.search.bm25 import words


@pytest.mark.parametrize(
    "sentence, labels",
    [
        ("Central vascular congestion without overt edema.", {"vascular congestion": True, "pulmonary edema": False}),
        ("No pleural or pericardial effusion.", {"pleural effusion": False, "pericardial effusion": False}),
        ("Small bilateral effusions with loculated pleural fluid on the left.",
         {"pleural effusion": True, "loculated pleural effusion": True}),
        ("Interstitial pulmonary edema.", {"interstitial edema": True}),
        ("Resolution of right upper lobe pneumonia with a linear scar.", {"pneumonia": False, "lung scarring": True}),
        ("The heart is normal in size.", {}),
    ],
)  # fmt: skip
def test_labels_by_hand(matcher, sentence, labels):
    assert label_sentence(sentence, matcher) == labels


def test_the_papers_example_gives_its_two_queries(matcher):
    found = label_entries(["lungs: central vascular congestion without overt edema."], matcher)
    assert [e.query for e in found] == ["vascular congestion", "no pulmonary edema"]


def test_entries_are_of_unique_sentences(matcher):
    found = label_entries(["No pneumothorax.", "no  pneumothorax", "Pneumothorax."], matcher)
    assert [(e.sentence, e.present) for e in found] == [("No pneumothorax.", False), ("Pneumothorax.", True)]


@pytest.mark.parametrize("collection", "ab")
def test_halves_share_no_finding_and_are_alike_in_size(entries, collection):
    first, second = split_by_finding(entries[collection])
    assert not {e.finding for e in first} & {e.finding for e in second}
    assert len(first) + len(second) == len(entries[collection])
    assert abs(len(first) - len(second)) < 0.05 * len(entries[collection])
    for train, test in ((first, second), (second, first)):
        kept = without_sentences(train, test)
        assert not {tuple(words(e.sentence)) for e in kept} & {tuple(words(e.sentence)) for e in test}
        assert not {e.query for e in kept} & {e.query for e in test} and len(kept) > 0.6 * len(train)


def test_collections_share_no_report_and_training_no_test_sentence(collections, entries):
    assert not {r.uid for r in collections["a"]} & {r.uid for r in collections["b"]}
    kept = without_sentences(entries["a"], entries["b"])
    assert not {tuple(words(e.sentence)) for e in kept} & {tuple(words(e.sentence)) for e in entries["b"]}
