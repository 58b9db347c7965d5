"""The negation rules on hand-labelled sentences, beside negspacy's; what a text says of a concept."""

import csv
from pathlib import Path

import numpy as np
import pytest

from drehr_utils.knowledge.negation import denied, polarity, sentences

SAMPLE = Path(__file__).with_name("negation_sentences.csv")


def sample() -> list[dict[str, str]]:
    with SAMPLE.open(newline="") as file:
        return list(csv.DictReader(file))


def own(row: dict[str, str]) -> bool:
    start = row["sentence"].index(row["mention"])
    return denied(row["sentence"], start, start + len(row["mention"]))


def negspacy_predictions(rows: list[dict[str, str]]) -> list[bool]:
    """negspacy's clinical termset on a blank English pipeline: no model is loaded."""
    spacy = pytest.importorskip("spacy")
    pytest.importorskip("negspacy")
    from negspacy.negation import Negex  # noqa: F401, registers the component
    from negspacy.termsets import termset

    nlp = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    nlp.add_pipe("negex", config={"neg_termset": termset("en_clinical").get_patterns()})
    sentencizer, negex = nlp.get_pipe("sentencizer"), nlp.get_pipe("negex")
    found = []
    for row in rows:
        doc = sentencizer(nlp.make_doc(row["sentence"]))
        start = row["sentence"].index(row["mention"])
        doc.ents = [doc.char_span(start, start + len(row["mention"]), label="FINDING", alignment_mode="expand")]
        found.append(bool(negex(doc).ents[0]._.negex))
    return found


def accuracy(predictions: list[bool], rows: list[dict[str, str]]) -> float:
    return float(np.mean([p == (row["denied"] == "1") for p, row in zip(predictions, rows, strict=True)]))


def test_the_sample_is_hand_labelled_and_balanced():
    rows = sample()
    assert len(rows) >= 60 and len({(r["sentence"], r["mention"]) for r in rows}) == len(rows)
    assert 0.4 < np.mean([row["denied"] == "1" for row in rows]) < 0.6


def test_own_rules_on_the_sample_and_not_below_negspacy():
    rows = sample()
    ours = [own(row) for row in rows]
    wrong = [(r["sentence"], r["mention"]) for r, p in zip(rows, ours, strict=True) if p != (r["denied"] == "1")]
    assert accuracy(ours, rows) >= 0.95, wrong
    theirs = accuracy(negspacy_predictions(rows), rows)
    assert 0.6 < theirs <= accuracy(ours, rows)


def test_clauses_and_sentences():
    assert sentences("1. Cardiomegaly. 2. No edema; follow Dr. Roe 4.2 cm.\nOld scar") == [
        "Cardiomegaly.", "No edema;", "follow Dr. Roe 4.2 cm.", "Old scar",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="outside of a sentence"):
        denied("No edema.", 3, 30)


def test_polarity_of_a_text():
    assert polarity("No edema. Later: pulmonary edema.", ["edema"]) == "affirmed"
    assert polarity("no edema, no pneumonia", ["edema", "oedema"]) == "denied"
    assert polarity("edematous", ["edema"]) is None
