"""Records, run files and the commands' arguments: what is wrong is named, with what to do."""

import json
from dataclasses import replace

import numpy as np
import pytest

from drehr_utils.data import public_data
from drehr_utils.data.benchmark import Benchmark, Patient
from drehr_utils.errors import DataError
from drehr_utils.evaluation import tables
from drehr_utils.evaluation.records import Record
from drehr_utils.papers.cliniq import release
from drehr_utils.papers.drehr import runs
from drehr_utils.papers.kg import rate_search
from drehr_utils.profiles import load_profile
from drehr_utils.search.fusion import rank, tie_keys
from drehr_utils.use import transfer

BENCH = Benchmark(
    {f"n{i}_0": "x" for i in range(6)}, {"q": "x", "p": "y"}, {"q": "drug", "p": "drug"},
    [Patient(str(i), f"n{i}", [f"n{i}_0"], ["q", "p"]) for i in range(6)],
    {"q": {f"n{i}_0": 1 for i in range(6)}, "p": {f"n{i}_0": 1 for i in range(6)}},
    {q: {f"n{i}_0": "string" for i in range(6)} for q in "qp"},
)  # fmt: skip


@pytest.fixture
def smoke(monkeypatch, tmp_path):
    monkeypatch.setattr(runs, "folder", lambda profile: tmp_path)
    return load_profile("smoke")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"row": "DR.EHR"}', b"\xff\xfe", b"[" * 100_000, b"null"])
def test_a_bad_record_is_named(smoke, tmp_path, content):
    (tmp_path / "dr-ehr-seed0.json").write_bytes(content)
    with pytest.raises(DataError, match="dr-ehr-seed0.json.*remake it"):
        runs.abouts(smoke)


@pytest.mark.parametrize("content", [None, b"", b"\x1f\x8b\x08", b"split,setting\n", b"\xff\xfe\x00"])
def test_a_bad_table_of_scores_is_named(smoke, tmp_path, content):
    about = dict.fromkeys(("chunks", "recipe", "data", "first losses"), 0) | {"row": "DR.EHR", "seed": 0}
    (tmp_path / "dr-ehr-seed0.json").write_text(json.dumps(about))
    if content is not None:
        (tmp_path / "scores.csv.gz").write_bytes(content)
    with pytest.raises(DataError, match="scores.csv.gz"):
        runs.per_search(smoke, "DR.EHR")


@pytest.mark.parametrize(
    "line", ["q@n0 Q0 n0_0", "q@n0 Q0 n0_0 first 1.0 x", "zz@n0 Q0 n0_0 1 1 x", "q@n0 Q0 zz 1 1 x"]
)
def test_a_bad_run_file_is_named_with_its_row(smoke, tmp_path, line):
    path = tmp_path / "dr-ehr.test.single.run.gz"
    runs.files.write_atomically(path, f"q@n0 Q0 n0_0 1 1.0 dr-ehr\n{line}\n".encode())
    with pytest.raises(DataError, match="dr-ehr.test.single.run.gz, row 2"):
        runs.places(smoke, "DR.EHR", BENCH)
    runs.files.write_atomically(path, b"q@n0 Q0 n0_0 1 1.0 dr-ehr\n")
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match="dr-ehr.test.single.run.gz.*broken gzip"):
        runs.places(smoke, "DR.EHR", BENCH)


@pytest.mark.parametrize("seed", range(20))
def test_a_run_file_holds_the_order_that_was_written(smoke, tmp_path, seed):
    """Scores of any size, with ties: one note of six chunks, so that its order is the whole ranking's."""
    rng = np.random.default_rng(seed)
    scores = rng.choice([0.0, 1e-9, 0.5, -3.25, 1 / 3, 10.0**seed], (2, 6))
    one = replace(BENCH, patients=[Patient("0", "n0", list(BENCH.corpus), ["q", "p"])])
    runs.write_runs(smoke, "DR.EHR", one, scores, "test")
    order = rank(scores, tie_keys(one.queries, one.corpus))
    np.testing.assert_array_equal(np.argsort(-runs.places(smoke, "DR.EHR", one), axis=1), order)


def test_bad_tables_are_named(tmp_path, monkeypatch):
    profile = replace(load_profile("smoke"), name="bad")
    monkeypatch.setattr(Record, "path", lambda self, profile: tmp_path / self.name)
    (tmp_path / "r.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="r.csv: not UTF-8"):
        Record("r.csv").read(profile)
    for content in (b"", b"\xff"):
        (tmp_path / "t.csv").write_bytes(content)
        with pytest.raises(DataError, match="t.csv: .*"):
            tables.read_table("t", tmp_path)
        with pytest.raises(DataError, match="t.csv: .*"):
            tables.paper_figures("drehr", 1, tmp_path / "t.csv")


@pytest.mark.parametrize("main", [runs.main, rate_search.main, transfer.main])
@pytest.mark.parametrize("given", ["none", "gone.toml", "bad.toml"])
def test_a_command_names_a_bad_profile(tmp_path, monkeypatch, capsys, main, given):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.toml").write_text("base = []\n")
    with pytest.raises(SystemExit) as stop:
        main(["--profile", given])
    assert stop.value.code == 2 and given in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["base = []", "base = 3", "[base]\nx = 1", "a = " + "[" * 5000, "name = 5", "capr = []"]
)
def test_a_profile_of_odd_shape_is_named(tmp_path, text):
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(DataError, match="odd.toml"):
        load_profile(tmp_path / "odd.toml")


def test_a_file_where_a_folder_goes_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert public_data.main(["ncbi_disease", "--folder", str(tmp_path / "file")]) == 1
    arguments = ["--release", str(tmp_path), "--mimic", str(tmp_path), "--out", str(tmp_path / "file")]
    assert release.main(arguments) == 1
    said = capsys.readouterr()
    assert "file: " in said.err and "test_hadm_ids.txt is missing" in said.out
