"""Files of reports and judgments: what is wrong in them is named."""

import pytest

from drehr_utils.errors import DataError
from drehr_utils.papers.radiology.reports import read_iu_xray, read_judgments


def test_bad_judgments_name_the_row(tmp_path):
    judged = tmp_path / "judged.tsv"
    judged.write_text("# reports: a\nquery\tsentences\nx\ta2\n")
    with pytest.raises(DataError, match="judged.tsv, row 3, field sentences"):
        read_judgments(judged)


def test_iu_xray_absent_prints_a_hint(tmp_path, capsys):
    assert read_iu_xray(tmp_path) is None
    printed = capsys.readouterr().out
    assert "DREHR_PUBLIC_DATA" in printed and str(tmp_path) not in printed
