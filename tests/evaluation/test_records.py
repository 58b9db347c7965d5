"""Records: what is there stays, a killed write leaves the old file."""

import gzip
import os

import pandas as pd
import pytest

from drehr_utils.evaluation.records import Record, command, parse
from drehr_utils.profiles import load_profile

TOY = Record("toy.csv")


@pytest.fixture
def smoke(monkeypatch, tmp_path):
    """The smoke profile with a cache of its own."""
    profile = load_profile("smoke")
    monkeypatch.setattr(type(profile), "cache", property(lambda self: tmp_path))
    return profile


def rows(value):
    return lambda: pd.DataFrame({"metric": ["MAP", "MRR"], "ours": [value, 1.23456]})


def test_rows_stay_go_on_and_are_replaced(smoke, capsys):
    key = {"name": "a", "share": 1.0}
    assert TOY.add(smoke, key, rows(1)) and not TOY.add(smoke, key, rows(2))
    assert TOY.add(smoke, key | {"share": 0.5}, rows(3))
    assert TOY.read(smoke)[["share", "ours"]].to_numpy().tolist() == [[1, 1], [1, 1.2346], [0.5, 3], [0.5, 1.2346]]
    before = TOY.path(smoke).read_text().splitlines()
    assert TOY.add(smoke, key, rows(4), remake=True)
    assert TOY.path(smoke).read_text().splitlines()[1:3] == before[3:5]  # the other rows, byte for byte
    record = TOY.read(smoke)
    assert len(record) == 4 and record["ours"].max() == 4


def test_rows_of_something_else_are_replaced(smoke, capsys):
    zipped, key = Record("runs/toy.csv.gz"), {"name": "a"}
    assert zipped.add(smoke, key, rows(1), digest="1") and not zipped.add(smoke, key, rows(2), digest="1")
    assert zipped.add(smoke, {"name": "b"}, rows(3), digest="1") and zipped.add(smoke, key, rows(2), digest="2")
    assert zipped.read(smoke)["ours"].tolist() == [3, 1.2346, 2, 1.2346]
    assert zipped.fault(smoke, key, "2") == [] and "not there" in zipped.fault(smoke, {"name": "c"}, "2")[0]
    assert gzip.decompress(zipped.path(smoke).read_bytes()).startswith(b"name,metric,ours,minutes,date,machine,digest")
    first = zipped.path(smoke).read_bytes()
    assert zipped.add(smoke, key, rows(2), digest="3") and zipped.add(smoke, key, rows(2), digest="2")
    assert zipped.path(smoke).read_bytes() == first, "a record made again is the same file"


def test_a_digest_that_looks_like_a_number_stays_as_it_is(smoke, capsys):
    record, key = Record("runs/toy.csv.gz"), {"name": "a"}
    assert record.add(smoke, key, rows(1), digest="4846e1086689")  # which a float takes for infinite
    assert not record.add(smoke, key, rows(2), digest="4846e1086689")
    assert record.add(smoke, {"name": "b"}, rows(3), digest="007")
    assert record.fault(smoke, {"name": "b"}, "007") == [] and record.fault(smoke, {"name": "b"}, "7")
    assert set(record.read(smoke)["digest"]) == {"4846e1086689", "007"}


def test_a_killed_write_leaves_the_old_file(smoke, monkeypatch, capsys):
    TOY.add(smoke, {"name": "a", "share": 1.0}, rows(1))
    before = TOY.path(smoke).read_bytes()

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        TOY.add(smoke, {"name": "b", "share": 1.0}, rows(2))
    assert TOY.path(smoke).read_bytes() == before


def test_open_may_not_write_over_what_full_made(capsys):
    with pytest.raises(SystemExit):
        parse(command("x"), ["--profile", "open"])
    assert "open shows the records that full makes" in capsys.readouterr().err


def test_full_makes_the_records_that_open_shows_and_no_others():
    opened, full = load_profile("open"), load_profile("full")
    runs, own = Record("runs/toy.csv"), Record("toy.csv")
    assert runs.path(opened) == runs.path(full) and own.path(opened) != own.path(full) == full.cache / "toy.csv"
