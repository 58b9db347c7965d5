"""Values of queries by hand, judgments that fit their reports and check the labels, coders' headings."""

import numpy as np
import pandas as pd
import pytest

from drehr_utils.config import MINILM, Resampling
from drehr_utils.evaluation.intervals import RESULT_COLUMNS
from drehr_utils.papers.radiology.entries import Entry, SentenceQueries, label_sentence
from drehr_utils.papers.radiology.reports import Report, read_judgments
from drehr_utils.papers.radiology.retrieval import (
    coded_values,
    judged_task,
    query_values,
    remembering,
    result_rows,
)
from drehr_utils.training import encoders


def test_query_values_by_hand():
    task = SentenceQueries(list("abcd"), {"x": np.array([0, 2]), "no x": np.array([1])})
    values = query_values(task, np.array([[4.0, 3, 2, 1], [1, 2, 3, 4]]))
    found = values.set_index(["query_id", "metric"])["value"]
    assert found["x", "mAP"] == pytest.approx(100 * (1 + 2 / 3) / 2) and found["x", "mR"] == 50
    assert found["no x", "mAP"] == pytest.approx(100 / 3) and found["no x", "mR"] == 0
    assert set(values["query_type"]) == {"positive", "negative"}
    rows = result_rows("s", "", values, Resampling()).set_index(["group", "metric"])["ours"]
    assert rows["positive", "mR"] == 50 and rows["all", "mR"] == 25


def test_judgments_fit_their_reports_and_check_the_labels(collections, matcher):
    judgments = read_judgments()
    assert set(judgments[0]) <= {r.uid for reports in collections.values() for r in reports}
    for reports in collections.values():
        task = judged_task(reports, judgments)
        assert len(task.sentences) > 250 and len(task.matched) >= 40
    # "no pneumothorax" was judged by reading; the lexicon with the rules must be right, and miss only what isn't named.
    names = {"pneumothorax", "no pneumothorax"}
    said = {f"{r.uid}#{k}": s for c in collections.values() for r in c for k, s in enumerate(r.sentences)}
    judged = {(i, q) for q in names for i in judgments[1][q]}
    labelled = {(i, Entry("", yes, m).query) for i, s in said.items() if i.split("#")[0] in set(judgments[0])
                for m, yes in label_sentence(s, matcher).items()}  # fmt: skip
    labelled = {pair for pair in labelled if pair[1] in names}
    assert len(judged & labelled) >= 0.95 * len(labelled), labelled - judged
    assert len(judged & labelled) > 0.75 * len(judged), judged - labelled


def test_coders_headings_are_turned_round_and_reports_without_text_left_out():
    reports = [Report(str(i), "Text here.", "", ("Hernia, Hiatal", "normal")) for i in range(12)]
    reports.append(Report("x", "", "", ("Hernia, Hiatal", "Scar")))
    asked = {}
    values = coded_values(reports, 1, lambda *given: asked.update(given=given) or np.zeros((1, 1)))
    assert asked["given"] == (["hiatal hernia"], ["Text here."])
    assert set(values["query_id"]) == {"hiatal hernia"} and values["value"].tolist() == [100, 100]
    assert coded_values(reports, 12, lambda *given: np.zeros((1, 1))).equals(values)


def test_nothing_asked_gives_no_rows():
    encode = remembering(encoders.load_encoder(MINILM))
    assert encode([]).shape == (0, 384)
    none = pd.DataFrame({"search_id": [], "query_id": [], "query_type": [], "metric": [], "value": []})
    rows = result_rows("x", "A", none, Resampling(50))
    assert rows.empty and set(RESULT_COLUMNS) <= set(rows.columns)


def test_a_coded_report_scores_as_its_best_sentence():
    reports = [Report("a", "Old scar. Large hernia.", "", ("Hernia",)), Report("b", "Old scar.", "No hernia seen.")]

    def score(queries, sentences):
        by_sentence = {"Large hernia.": 2.0, "No hernia seen.": 1.0}
        return np.array([[by_sentence.get(sentence, 0.0) for sentence in sentences] for _ in queries])

    assert coded_values(reports, 1, score)["value"].tolist() == [100, 100]
    assert coded_values(reports, 1, lambda *asked: -score(*asked)).query("metric == 'mAP'")["value"].tolist() == [50]
