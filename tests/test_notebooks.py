"""Every notebook runs under `smoke`, and the committed ones are whole."""

import json
import re

import pytest

from drehr_utils import run
from drehr_utils.profiles import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_under_smoke(path):
    assert run.main(["--profile", "smoke", "--only", path.stem[:2]]) == 0
    executed = json.loads((ROOT / "data/cache/smoke/notebooks" / path.name).read_text())
    assert all(c.get("execution_count") for c in executed["cells"] if c["cell_type"] == "code")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_notebook_is_executed_clean_and_short_celled(path):
    text = path.read_text()
    cells = json.loads(text)["cells"]
    code = [c for c in cells if c["cell_type"] == "code"]
    assert all(c["execution_count"] for c in code), "not executed; run ./run_all.sh"
    assert not [o for c in code for o in c["outputs"] if o["output_type"] == "error"]
    assert any("parameters" in c["metadata"].get("tags", []) for c in code)
    assert max(len("".join(c["source"]).splitlines()) for c in code) <= 15
    assert not re.search(r"(?<![\w.])/(?:root|work|tmp|home)/|sys\.path", text)
    assert "profile.name ==" not in text and "profile.name !=" not in text


def test_the_log_of_what_read_test_is_whole():
    """A notebook whose code names the test split has a row in 00's log, and each notebook one in its map."""
    start = next(path for path in NOTEBOOKS if path.name.startswith("00")).read_text()
    logged = {n for cells in re.findall(r"\| ([\d, ]+) \| [^|]*\|", start) for n in cells.split(", ")}
    for path in NOTEBOOKS:
        code = ["".join(c["source"]) for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert path.stem[:2] in logged or not any('"test"' in source for source in code), path.name
        assert path.stem.startswith("00") or f"({path.name})" in start
