"""Each stage killed once, on a full disk, in a folder that can't be written, twice at once (tests/long has more)."""

import json
import re
import subprocess
import sys

import pytest

from drehr_utils.profiles import ROOT

STAGES = ["positives", "answers", "training", "scores", "records", "index", "compaction", "reading", "notebook"]


@pytest.fixture(scope="module")
def told():
    """Stage -> what its trials found; all of them in one process, with one graph."""
    command = [sys.executable, "tests/long/interruptions.py", "--points", "1", "--only", ",".join(STAGES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = dict(re.findall(r"^(\w+) (\{.*\})$", done.stdout, re.MULTILINE))
    assert list(found) == STAGES, done.stdout + done.stderr[-2000:]
    return {stage: json.loads(text) for stage, text in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_left_is_what_an_undisturbed_run_leaves(told, stage):
    assert told[stage]["artefacts"] and told[stage]["unequal"] == []
