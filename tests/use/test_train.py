"""Two processes train a profile's DR.EHR, one of them writes it, and a notebook's one process reads it."""

import os
import subprocess
import sys

import pytest

from drehr_utils import artifacts, pipeline
from drehr_utils.errors import DataError
from drehr_utils.papers.drehr import ablations
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.use import train

PROFILE = """
base = "smoke"
processes = 2
max_train_notes = 2
[published.stage1]
max_steps = 4
batch_size = 4
positives_per_chunk = 8
[published.stage2]
max_steps = 2
batch_size = 4
positives_per_chunk = 8
"""


def test_rows_are_what_the_notebooks_train_and_an_unknown_one_is_named(capsys):
    smoke, full = map(load_profile, ("smoke", "full"))
    assert [*train.rows(smoke)] == [*pipeline.systems(smoke)]
    assert {*pipeline.systems(full), *ablations.stage2_ablation(full)} <= {*train.rows(full)}
    with pytest.raises(SystemExit):
        train.main(["--profile", "smoke", "--only", "DR.EHR", "Dr. Ehr"])
    assert "no row 'Dr. Ehr'; there are DR.EHR" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.main(["--profile", "gone.toml"])
    assert "error: gone.toml" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_train_what_a_notebook_then_reads(tmp_path):
    path = tmp_path / f"processes-{os.getpid()}.toml"
    path.write_text(PROFILE)
    profile = load_profile(path)
    try:
        with pytest.raises(
            DataError, match="field processes: it trains with 2, and this is one of 1; first run torchrun"
        ):
            pipeline.trained_model(profile, pipeline.PUBLISHED)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        command += ["-m", "drehr_utils.use.train", "--profile", str(path), "--only", pipeline.PUBLISHED]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("DR.EHR: ") == 1
        folder, curves = pipeline.trained_model(profile, pipeline.PUBLISHED)  # trains nothing, or it would refuse
        assert {stage: len(curve) for stage, curve in curves.items()} == {"stage1": 2, "stage2": 1}  # each half
        assert (profile.cache / "models/drehr").resolve() == folder and (folder / "model.safetensors").exists()
        assert not list(profile.cache.rglob("partial-*")) and not list(profile.cache.glob("checkpoints/*"))
    finally:
        artifacts.remove(profile.cache)
