"""Files of reports and judgments: what is wrong in them is named."""

from collections import Counter

import pytest

from drehr_utils.errors import DataError
from drehr_utils.papers.radiology.reports import OPEN_CXR, read_iu_xray, read_judgments


def test_bad_judgments_name_the_row(tmp_path):
    judged = tmp_path / "judged.tsv"
    judged.write_text("# reports: a\nquery\tsentences\nx\ta2\n")
    with pytest.raises(DataError, match="judged.tsv, row 3, field sentences"):
        read_judgments(judged)


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
