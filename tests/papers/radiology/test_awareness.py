"""Texts that affirm or deny a query, ranks and shifts by hand."""

import numpy as np
import pytest

from drehr_utils import pipeline
from drehr_utils.config import Resampling
from drehr_utils.papers.radiology.awareness import (
    NO_X,
    SHIFT,
    PolarityTask,
    X,
    awareness_rows,
    denial_above,
    polarity_task,
)
from drehr_utils.profiles import load_profile

CORPUS = {"n": "Nothing.", "a": "He has gout.", "b": "No gout.", "c": "Denies gout.", "d": "Podagra since 1990."}


def gout_task(corpus: dict[str, str] = CORPUS) -> PolarityTask:
    queries = {"r": "asthma", "q": "gout"}
    return PolarityTask.of(corpus, queries, lambda query: ["podagra"] if query == "gout" else [])


def test_a_task_has_the_queries_that_are_affirmed_and_denied_and_their_texts():
    task = gout_task()
    assert list(task.queries) == ["q"] and list(task.corpus) == list("abcd") and task.pairs == 4
    assert task.affirmed["q"].tolist() == [0, 3] and task.denied["q"].tolist() == [1, 2]


def test_denial_above_by_hand():
    (value,) = denial_above(gout_task(), np.array([[3.0, 4, 1, 2]]))["value"]
    assert value == 50  # b above a and d, c above none
    renamed = (gout_task({f"{i}{c}": text for c, text in CORPUS.items()}) for i in range(400))
    assert 45 < np.mean([denial_above(task, np.zeros((1, 4)))["value"].item() for task in renamed]) < 55


def test_awareness_of_a_system_that_heeds_no_and_of_one_that_is_blind():
    task = PolarityTask.of({"a": "gout", "b": "no gout", "c": "denies gout"}, {"q": "gout"}, lambda query: [])

    def heeds(queries, texts):
        return np.array([[0.0, 1, 1] if query.startswith("no ") else [1.0, 0, 0] for query in queries])

    def blind(queries, texts):
        return np.array([[1.0, 0, 2]] * len(queries))

    rows = awareness_rows(task, "queries", {pipeline.START: blind, "heeds": heeds}, Resampling())
    found = rows.set_index(["system", "group"])["ours"]
    assert found["heeds"].to_dict() == {X: 0, NO_X: 100, SHIFT: 100}
    assert found[pipeline.START].to_dict() == {X: 50, NO_X: 50, SHIFT: 0}
    assert rows.loc[rows["system"] == pipeline.START, "p"].isna().all()


def test_polarity_task_refuses_another_kind():
    with pytest.raises(ValueError, match="neither queries nor concepts"):
        polarity_task(load_profile("smoke"), "drugs")
