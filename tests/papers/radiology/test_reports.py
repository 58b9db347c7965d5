"""Files of reports and judgments: what is wrong in them is named."""

import gzip
from collections import Counter

import pytest

from drehr_utils.errors import DataError
from drehr_utils.papers.radiology.reports import OPEN_CXR, read_collection, read_iu_xray, read_judgments


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("x\ta2\n", "row 3, field sentences: need ids"),
        ("x\ta#2\ny\tb#0\n", "row 4, field sentences: b#0 is of no report of row 1"),
        ("x\ta#2\nx\ta#1\n", "row 4, field query: 'x' is there twice"),
    ],
)
def test_bad_judgments_name_the_row(tmp_path, lines, said):
    judged = tmp_path / "judged.tsv"
    judged.write_text(f"# reports: a\nquery\tsentences\n{lines}")
    with pytest.raises(DataError, match=f"judged.tsv, {said}"):
        read_judgments(judged)


def test_a_report_is_there_once(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"uid": "a", "findings": "Clear.", "impression": ""}\n' * 2)
    with pytest.raises(DataError, match="a.jsonl, row 2, field uid: there twice"):
        read_collection(path)


def test_a_blank_heading_is_none(tmp_path):
    (tmp_path / "iu_xray").mkdir()
    with gzip.open(tmp_path / "iu_xray/indiana_reports.csv.gz", "wt") as file:
        file.write("uid,findings,impression,problems\n1,Clear.,,\n2,Clear.,,Hernia; ;\n")
    assert [report.problems for report in read_iu_xray(tmp_path)] == [(), ("Hernia",)]


def test_a_judgment_is_what_two_of_three_judges_say():
    uids, decided = read_judgments()
    judges = [read_judgments(OPEN_CXR / f"judgments/judge_{n}.tsv") for n in (1, 2, 3)]
    votes = Counter((query, i) for _, said in judges for query, ids in said.items() for i in set(ids))
    assert {pair for pair, n in votes.items() if n >= 2} == {(query, i) for query, ids in decided.items() for i in ids}
    assert all(judge[0] == uids for judge in judges) and len(decided) == 50


def test_iu_xray_absent_prints_a_hint(tmp_path, capsys):
    assert read_iu_xray(tmp_path) is None
    printed = capsys.readouterr().out
    assert "DREHR_PUBLIC_DATA" in printed and str(tmp_path) not in printed
