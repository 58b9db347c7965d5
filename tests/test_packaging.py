"""An ordinary installation holds every room, and finds its data or says what is missing."""

import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

import drehr_utils
from drehr_utils.profiles import ROOT


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The wheel of this checkout, unpacked: where an ordinary `pip install .` puts the package."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "drehr_utils", "pyproject.toml", "LICENSE", "README.md",
         "data/models", "data/open_kg"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    for name in files:  # a copy: setuptools writes into the source folder
        if (ROOT / name).exists():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_the_wheel_holds_every_room(installed):
    held = {p.relative_to(installed).as_posix() for p in installed.glob("drehr_utils/**/*.py")}
    assert held == {p.relative_to(ROOT).as_posix() for p in ROOT.glob("drehr_utils/**/*.py")}


def test_the_wheel_holds_graph_and_weights(installed):
    (share,) = installed.glob("*.data/data/share/drehr_utils")
    for folder in ("data/models", "data/open_kg"):
        listed = ["git", "ls-files", "-co", "--exclude-standard", folder]
        files = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        assert files and all((share / name).read_bytes() == (ROOT / name).read_bytes() for name in files)


def test_the_release_is_one_version(installed):
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (metadata,) = installed.glob("drehr_utils-*.dist-info/METADATA")
    released = re.search(r"^## (\d\S*) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released.groups() == (cited["version"], str(cited["date-released"]))
    assert cited["version"] == drehr_utils.__version__
    assert f"\nVersion: {drehr_utils.__version__}\n" in metadata.read_text()
    assert cited["license"] == project["license"] and len(cited["references"]) == 5
    optional = set(re.findall(r"Provides-Extra: (.+)", metadata.read_text()))
    assert {"search", "site"} <= optional == set(project["optional-dependencies"])


def run(installed, cwd, code):
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(installed)!r})\n{code}"]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.slow
def test_an_installed_package_finds_the_checkout_it_runs_in_or_says_what_is_missing(installed, tmp_path):
    code = "from drehr_utils import profiles; print(profiles.__file__, profiles.ROOT, sep='\\n')"
    where, root = run(installed, ROOT / "notebooks", code).stdout.split()
    assert where.startswith(str(installed)) and root == str(ROOT)
    code = "from drehr_utils import pipeline, profiles; pipeline.notes(profiles.load_profile('open'))"
    lost = run(installed, tmp_path, code).stderr
    assert "DataError: open_notes/: neither discharge.csv(.gz)" in lost and "DREHR_ROOT" in lost
