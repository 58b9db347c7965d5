"""Verdicts: against hand-worked cases; the committed notebooks' sentences against those that they rest on."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from drehr_utils.config import Resampling
from drehr_utils.errors import DataError
from drehr_utils.evaluation import claims
from drehr_utils.profiles import ROOT, load_profile


def _rows(*ours_and_p):
    return pd.DataFrame([{"ours": o, "low": o - 1, "high": o + 1, "p": p} for o, p in ours_and_p])


@pytest.mark.parametrize(
    ("rows", "sign", "said"),
    [
        (_rows((2.0, 0.001)), 1, claims.HOLDS),
        (_rows((2.0, 0.001)), -1, claims.REVERSED),
        (_rows((2.0, 0.02)), 1, claims.NOT_SHOWN),
        (_rows((2.0, 0.001), (3.0, 0.009)), 1, claims.HOLDS),  # each at its own level: no adjustment
        (_rows((2.0, 0.001), (3.0, 0.5)), 1, claims.NOT_SHOWN),  # a sign is no verdict
        (_rows((2.0, 0.001), (-3.0, 0.001)), 1, claims.NOT_SHOWN),
        (_rows((2.0, 0.001), (-3.0, 0.001)), [1, -1], claims.HOLDS),
        (_rows((2.0, 0.5), (-3.0, 0.001)), 1, claims.REVERSED),
        (_rows((2.0, 0.001), (np.nan, np.nan)), 1, claims.NOT_TESTABLE),
        (_rows((2.0, np.nan)), 1, claims.HOLDS),  # by its interval, 1 to 3
        (_rows((1.3, np.nan)), 1, claims.NOT_SHOWN),  # 0.3 to 2.3 is of 95%; of 99% it is 1.3 ± 1 * 2.576 / 1.960
        (_rows((-1.3, np.nan), (-1.4, np.nan)), -1, claims.NOT_SHOWN),
        (_rows((-1.4, np.nan)), 1, claims.REVERSED),
        (_rows((2.0, np.nan)).assign(low=np.nan), 1, claims.NOT_TESTABLE),  # by nothing
    ],
)
def test_a_claim_of_all_is_judged_on_all(rows, sign, said):
    found = claims.judge(rows, sign)
    assert found.verdict == said and found.p == pytest.approx(rows["p"].max(skipna=False), nan_ok=True)


def test_a_claim_of_nothing_is_not_testable():
    assert claims.judge(_rows()).verdict == claims.NOT_TESTABLE


def test_a_claim_of_most_is_a_sign_test():
    # 9 of 10: p = 2 (10 + 1) / 1024 = 0.0215; 20 of 20: 2 / 2^20.
    nine = claims.judge_most(_rows(*[(1.0, 0.5)] * 9, (-1.0, 0.5)))
    assert nine.verdict == claims.NOT_SHOWN and "p 0.0215" in nine.ours and nine.p == pytest.approx(22 / 1024)
    assert claims.judge_most(_rows(*[(1.0, 0.5)] * 20)).verdict == claims.HOLDS
    assert claims.judge_most(_rows(*[(1.0, 0.5)] * 20), -1).verdict == claims.REVERSED
    assert claims.judge_most(_rows(*[(np.nan, np.nan)] * 20)).verdict == claims.NOT_TESTABLE


def test_rows_of_means_draw_patients():
    values = pd.DataFrame({"same": [2.0] * 4, "by patient": [0.0, 0.0, 6.0, 6.0]})
    rows = claims.mean_rows(values, list("aabb"), Resampling(samples=500))
    assert rows["ours"].tolist() == [2, 3] and rows.loc["same", ["low", "high"]].tolist() == [2, 2]
    # a quarter of the draws is all a, a quarter all b: the 2.5% lie at the ends
    assert rows.loc["by patient", ["low", "high"]].tolist() == [0, 6]
    assert claims.judge(rows.loc[["same"]]).verdict == claims.HOLDS
    assert claims.judge(rows.loc[["by patient"]]).verdict == claims.NOT_SHOWN


def test_a_short_training_gives_numbers_and_no_verdict():
    found = claims.Judged(claims.HOLDS, "+2.0", "640 pairs")
    assert claims.at_length(found, 1000, 1000) == found
    short = claims.at_length(found, 40, 1000)
    assert short.verdict == claims.NOT_TESTABLE and short.budget == "640 pairs"
    assert short.ours.startswith("needs") and short.ours.endswith("40 steps: +2.0")


def test_what_an_untestable_claim_lacks():
    longer, other, both = claims.LONGER, *claims.LACKS[1:]
    assert claims.lacks(claims.at_length(claims.Judged(claims.HOLDS, "+2.0"), 40, 1000, "pairs").ours) == longer
    assert claims.lacks(claims.needs("the weights of a longer run", longer=True).ours) == longer
    assert claims.lacks(f"+1.0 [+0.5, +1.5]; needs BERT and {longer}") == both
    assert claims.lacks(f"needs BERT; of {longer}: +2.0") == claims.lacks("needs BERT") == other


@pytest.mark.parametrize(
    ("ours", "so"),
    [
        ("4 of 8 bounds significantly so, 2 significantly the other way; -1.0 to +3.0", True),
        ("1 of 2 rows significantly so, 0 significantly the other way", False),
        ("21 of 24 comparisons have the paper's sign, 10 the opposite (a; b)", True),
        ("MRR +2.4 [+0.5, +4.4] (not significant); MAP +5.5 [+3.9, +7.1] (opposite)", True),
        ("3 of 4 steps so; the other way: hypernym − related", True),
        ("4 of 4 steps so; the other way: none", False),
        ("0 of 2 significantly so, 0 significantly the other way; not judged: 4 significantly the other way", False),
    ],
)
def test_a_claim_with_a_significant_counterexample(ours, so):
    assert claims.contradicted(ours) == so


def test_holm_by_hand():
    # sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04 -> never falling
    assert claims.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert claims.holm([0.6, 0.7]) == pytest.approx([1, 1])


def test_a_flipped_verdict_is_a_note_and_a_wrong_one_an_error(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("drehr_utils.profiles.ROOT", tmp_path)
    profile = replace(load_profile("open"), in_place=False)
    shown = claims.table(
        profile, "99", {"drehr-01": claims.Judged(claims.HOLDS, "+1.0")}, {"drehr-01": claims.REVERSED}
    )
    assert "drehr-01 came out as 'reversed'; here: 'holds'" in capsys.readouterr().out
    assert shown.loc["drehr-01", "paper"].startswith("best baseline")
    kept = pd.read_csv(profile.tables / "claims_99.csv", index_col="id")
    assert list(kept.columns) == [*claims.COLUMNS, "said"] and kept.loc["drehr-01", "said"] == "reversed"
    for judged, rests_on in [
        ({"drehr-99": claims.Judged(claims.HOLDS)}, {}),
        ({"drehr-01": claims.Judged("perhaps")}, {}),
        ({}, {"drehr-01": claims.HOLDS}),
    ]:
        with pytest.raises(DataError):
            claims.table(profile, "99", judged, rests_on)


def test_a_run_without_all_data_keeps_the_committed_verdict_and_its_date(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("drehr_utils.profiles.ROOT", tmp_path)
    profile = replace(load_profile("open"), in_place=False)
    judged = {name: claims.Judged(claims.HOLDS, "14 of 14") for name in ("kg-01", "kg-02")}
    path = profile.tables / "claims_99.csv"
    claims.table(profile, "99", judged)
    git = ["git", "-C", str(path.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
    for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *step], check=True, env=os.environ | {"GIT_COMMITTER_DATE": "2026-01-02T00:00"})
    fewer = {name: claims.Judged(claims.NOT_SHOWN, "7 of 7") for name in judged}
    for _ in range(2):  # a second such run keeps the date, too
        shown = claims.table(profile, "99", fewer, lacking=["kg-01", "kg-03"])
        assert "claims_99: kg-01 stay as they were" in capsys.readouterr().out
        kept = pd.read_csv(path, index_col="id", keep_default_na=False)
        assert list(shown["verdict"]) == [claims.NOT_SHOWN] * 2 and list(shown.columns) == claims.COLUMNS
        assert list(kept["ours"]) == ["14 of 14", "7 of 7"] and list(kept["as_of"]) == ["2026-01-02", ""]
    claims.table(profile, "99", fewer)
    assert "as_of" not in pd.read_csv(path) and set(pd.read_csv(path)["ours"]) == {"7 of 7"}


def test_each_committed_sentence_rests_on_the_verdicts_that_came_out():
    for path in sorted((ROOT / "figures/tables").glob("claims_*.csv")):
        rows = pd.read_csv(path, index_col="id", keep_default_na=False)
        assert set(rows["verdict"]) <= set(claims.VERDICTS), path.name
        said = rows[rows["said"] != ""]
        assert (said["said"] == said["verdict"]).all(), f"{path.name}: {said.query('said != verdict')}"
