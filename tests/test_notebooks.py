"""Every notebook runs under `smoke` with an encoder that takes no time, and the committed ones are whole."""

import json
import re
from dataclasses import fields

import pytest

from drehr_utils import run
from drehr_utils.profiles import ROOT, Profile, load_profile
from drehr_utils.use import provenance

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture(scope="module")
def tiny_profile(start, tmp_path_factory):
    """Under `smoke` itself most of the time would go into MiniLM, whose run the committed notebooks are."""
    path = tmp_path_factory.mktemp("profile") / "smoke-tiny.toml"
    path.write_text(f'base = "smoke"\nencoder = "{start}"\n')
    return path


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_runs_under_smoke(path, tiny_profile):
    assert run.main(["--profile", str(tiny_profile), "--only", path.stem[:2]]) == 0
    executed = json.loads((load_profile(tiny_profile).cache / "notebooks" / path.name).read_text())
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_committed_outputs_belong_to_these_cells_data_and_records(path):
    assert not provenance.changed(path, ROOT), f"./run_all.sh --only {path.stem[:2]}"


def test_the_log_of_what_read_test_is_whole():
    """A notebook that opened a file of the test split, or whose code names it, has a row in 00's log."""
    log = _cell_of_00("Who has read the test split")
    logged = {n for cells in re.findall(r"^\| ([\d, ]+) \|", log, re.MULTILINE) for n in cells.split(", ")}
    for path in NOTEBOOKS:
        notebook = json.loads(path.read_text())
        code = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
        opened = any("/open_cliniq/test/" in f"/{name}" for name in notebook["metadata"]["drehr"]["read"])
        assert path.stem[:2] in logged or not (opened or any('"test"' in source for source in code)), path.name


def test_00_has_every_notebook_in_its_map_and_no_knob_that_isnt_there():
    ways = _cell_of_00("The way through")
    assert all(f"({path.name})" in ways for path in NOTEBOOKS[1:])
    rows = re.findall(r"^\| [\d, to]+ \| ([^|]+) \|", _cell_of_00("What a change reruns"), re.MULTILINE)
    knobs = re.findall(r"`(\w+)`", " ".join(rows))
    assert len(knobs) > 10 and set(knobs) <= {field.name for field in fields(Profile)}


def _cell_of_00(heading: str) -> str:
    cells = ("".join(cell["source"]) for cell in json.loads(NOTEBOOKS[0].read_text())["cells"])
    return next(source for source in cells if re.match(rf"#+ {heading}\n", source))
