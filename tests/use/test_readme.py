"""The README's table is what its script makes of figures/, and what it names is there."""

import re

from drehr_utils.profiles import ROOT
from drehr_utils.use import readme

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_results_table_is_up_to_date():
    assert readme.updated(TEXT) == TEXT, "run python -m drehr_utils.use.readme"


def test_every_linked_file_exists():
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert len(links) > 8 and not [link for link in links if not (ROOT / link).exists()]


def test_every_notebook_is_in_the_map():
    for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"notebooks/{path.name}" in TEXT
