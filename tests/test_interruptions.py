"""Each stage killed once, on a full disk, in a folder that can't be written, twice at once (tests/long has more)."""

import subprocess
import sys

import pytest

from drehr_utils.profiles import ROOT

STAGES = ["positives,answers,training", "scores,records,index", "compaction,reading", "notebook"]


@pytest.mark.slow
@pytest.mark.parametrize("stages", STAGES)
def test_what_is_left_is_what_an_undisturbed_run_leaves(stages):
    command = [sys.executable, "tests/long/interruptions.py", "--points", "1", "--only", stages]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
