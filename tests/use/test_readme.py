"""The README's tables are what their script makes of figures/, and each notebook is in its map."""

from drehr_utils.profiles import ROOT
from drehr_utils.use import readme

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_tables_are_up_to_date():
    assert readme.updated(TEXT) == TEXT, "run python -m drehr_utils.use.readme"


def test_every_notebook_is_in_the_map():
    for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"):
        assert f"notebooks/{path.name}" in TEXT
