"""Fetches the public data that we may not pass on: `python -m drehr_utils.data.public_data --help`.

MedQuAD with the CDV annotations (notebooks 08, 13), IU X-ray (14), NCBI Disease (12) and two collections of real notes
to train on (ACI-Bench, MTS-Dialog) are downloaded from their own hosts, checked, and written in the layout that the
notebooks read from $DREHR_PUBLIC_DATA. A file appears under its name only when it is whole.

What is checked, and how far:
- `Source.outputs` holds SHA-256 sums of the uncompressed files that this project was developed with. One that differs
  is reported as a warning: our conversion was written without reaching the hosts, so it was never run on the live IU
  X-ray archive or on all of MedQuAD, only on files of their format.
- ACI-Bench and MTS-Dialog are pinned to a commit, each file to its sum.
- The sums of NCBI's three archives are those that a public library (nlstruct) lists for them; we could not compare them
  with the live ones. A file that doesn't have its sum is refused and deleted.
- GitHub's and Open-i's archives have no published sum. MedQuAD and CDV are pinned to a commit, so what is in the
  archives cannot change under us.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pooch
import requests

from drehr_utils.data.public_conversions import (
    convert_aci_bench,
    convert_iu_xray,
    convert_medquad,
    convert_mts_dialog,
    convert_ncbi,
)
from drehr_utils.errors import DataError
from drehr_utils.files import naming, write_atomically
from drehr_utils.profiles import ROOT

DATA_VARIABLE = "DREHR_PUBLIC_DATA"
FOLDER = ROOT / "data/public"  # git-ignored; read where the variable is not set
TIMEOUT = 60  # seconds without a byte


@dataclass(frozen=True)
class RemoteFile:
    name: str  # in <folder>/downloads
    url: str
    sha256: str | None = None  # None: none is published; see the module's text


@dataclass(frozen=True)
class Source:
    """A data set: what it is called, its terms, what is fetched, and what is made of it."""

    title: str
    licence: str
    citation: str
    files: tuple[RemoteFile, ...]
    outputs: dict[str, str]  # under the folder, as the notebooks read them; SHA-256 of what this project was made with
    convert: Callable[[dict[str, Path]], dict[str, bytes]]  # downloads by name -> uncompressed content by output


def download(remote: RemoteFile, folder: Path, mirror: str | None = None, progress: bool = True) -> Path:
    """The file in `folder`, fetched if it isn't there whole. Raises DataError where it can't be, or has another sum."""
    url = f"{mirror.rstrip('/')}/{remote.name}" if mirror else remote.url
    downloader = pooch.HTTPDownloader(progressbar=progress, timeout=TIMEOUT)
    try:
        return Path(pooch.retrieve(url, remote.sha256, remote.name, folder, downloader=downloader))
    except requests.RequestException as error:
        raise DataError(
            f"{url}: cannot be fetched ({error}); run this again when it can be, or run it on a machine with a "
            f"network, copy its folder here and set {DATA_VARIABLE} to the copy; --mirror takes another address"
        ) from None
    except ValueError as error:  # another sum
        raise DataError(
            f"{remote.name}: {error} If it stays so, the host has another file: compare it by hand before you trust it"
        ) from None


_MEDQUAD = "7e94c7b336f1f8e010c03091df691c8bea014399"
_CDV = "9b75fd472fb06d707924d840f8714d6e1ed9bd76"
_NCBI = "https://www.ncbi.nlm.nih.gov/CBBresearch/Dogan/DISEASE"
_NCBI_SUMS = {  # of the archive, of the text in it
    "NCBItrainset_corpus": (
        "26157233d70aeda0b2ac1dda4fc9369b0717bd888f5afe511d0c1c6a5ad307a0",
        "f311381b28a6d0f641f57f4a963bb83619c2bdec5cd9caabb1381f894d5db817",
    ),
    "NCBIdevelopset_corpus": (
        "61681ad09356619c8f4f3e1738663dd007ad0135720fdc90195120fea944cbe9",
        "02db559974624ae9cbe6cd95d64d953e6926bb63afb6b25b63e53bd8b41a4b55",
    ),
    "NCBItestset_corpus": (
        "b978442f39c739deb6619c70e7b07327d9eb1b71aff64996c02a592435583f46",
        "61c8050bf6979ef7b943ec1158dfc03b651ea3367d4c37356f9de4841e85c9a3",
    ),
}
_ACI = "https://raw.githubusercontent.com/wyim/aci-bench/b909b2bb9cf1d19de08df15cddde7bd0179665e4/data/challenge_data"
_ACI_SUMS = {
    "train.csv": "6c778d4ac5e6cc6f1964786f9286e8d765c210f22ed6b57f83aff8497409cea4",
    "valid.csv": "6629e89e3fb409d2b3eceab60dc7b32fe1d3fb8d4e07795039284965522aa4d0",
    "clinicalnlp_taskB_test1.csv": "5cc4008e68545f84913744a8e493a58bdf17ba7e1b7a0be46d6943d6bfca9471",
    "clinicalnlp_taskC_test2.csv": "599e3330a14e25a0e056aee1365ffac7ebe50058f15821eae42a5513c2bb5a4f",
    "clef_taskC_test3.csv": "d3c18362a42124ea2bd1b2b4b66ba76a11bb123dfdb416471ae3b5924d1428ec",
}
_MTS = "https://raw.githubusercontent.com/abachaa/MTS-Dialog/3ff0801933608d6f570468c13125125fb5cabdea/Main-Dataset"
_MTS_SUMS = {
    "MTS-Dialog-TrainingSet.csv": "65a28681dd59fc159681ea026e44610f2af7bc64a0e7f892d763eb03d9f503dc",
    "MTS-Dialog-ValidationSet.csv": "227206520c4534381c0d7fba6d3f09319a9af5a6d9603a93c0341af1198e3958",
    "MTS-Dialog-TestSet-1-MEDIQA-Chat-2023.csv": "b4d38dd2c99b2e9860099abcf653f1e0f3e9b69f9fcc45be2a2699b37a4d2f37",
    "MTS-Dialog-TestSet-2-MEDIQA-Sum-2023.csv": "226644466ed3af82382b327a3e684aab70aa605b96cfd93b04f584f1826ab1a6",
}
SOURCES = {
    "medquad": Source(
        "MedQuAD, with CDV's annotations of its test split",
        "MedQuAD: CC BY 4.0 (answers under MedlinePlus copyright are not in it). CDV: see its repository.",
        "Ben Abacha and Demner-Fushman, 2019. A question-entailment approach to question answering. BMC "
        "Bioinformatics 20:511. Arnold et al., 2020. Learning contextualized document representations for healthcare "
        "answer retrieval. WWW '20, doi:10.1145/3366423.3380208.",
        (
            RemoteFile("MedQuAD.zip", f"https://github.com/abachaa/MedQuAD/archive/{_MEDQUAD}.zip"),
            RemoteFile(
                "MedQuAD_test_annotations.json",
                f"https://raw.githubusercontent.com/sebastianarnold/CDV/{_CDV}/data/MedQuAD/MedQuAD_test_annotations.json",
            ),
        ),
        {
            "medquad/queries.jsonl.gz": "08c5820fa69b0ceff17923727bf170a2c56aeb3ad855510f60af292781c1277c",
            "medquad/passages.jsonl.gz": "9efabb89689a38209a02404bc78b9d3af647535314499a5f9322f7b016df0172",
        },
        convert_medquad,
    ),
    "iu_xray": Source(
        "IU X-ray: Indiana University's chest X-ray reports (Open-i)",
        "Public. Each report's XML names its licence (CC BY-NC-ND 4.0 as far as we know): read it there.",
        "Demner-Fushman et al., 2016. Preparing a collection of radiology examinations for distribution and retrieval. "
        "JAMIA 23(2):304-310.",
        (RemoteFile("NLMCXR_reports.tgz", "https://openi.nlm.nih.gov/imgs/collections/NLMCXR_reports.tgz"),),
        {"iu_xray/indiana_reports.csv.gz": "fd718e074451e93effedd868ca8995d2495e58e85878e08853f2dd35810f2149"},
        convert_iu_xray,
    ),
    "ncbi_disease": Source(
        "NCBI Disease corpus",
        "Public domain (a work of the United States government).",
        "Doğan, Leaman and Lu, 2014. NCBI disease corpus: a resource for disease name recognition and concept "
        "normalization. Journal of Biomedical Informatics 47:1-10.",
        tuple(RemoteFile(f"{name}.zip", f"{_NCBI}/{name}.zip", archive) for name, (archive, _) in _NCBI_SUMS.items()),
        {f"ncbi_disease/{name}.txt.gz": text for name, (_, text) in _NCBI_SUMS.items()},
        convert_ncbi,
    ),
    "aci_bench": Source(
        "ACI-Bench's visit notes",
        "CC BY 4.0.",
        "Yim et al., 2023. Aci-bench: a novel ambient clinical intelligence dataset for benchmarking automatic visit "
        "note generation. Scientific Data 10:586.",
        tuple(RemoteFile(f"aci-{name}", f"{_ACI}/{name}", known) for name, known in _ACI_SUMS.items()),
        {"real_notes/aci_bench_notes.csv.gz": "71e387a8b186ca676496e2cefe1355df2f057704f36374df4151d5e860cc15da"},
        convert_aci_bench,
    ),
    "mts_dialog": Source(
        "MTS-Dialog's note sections",
        "CC BY 4.0.",
        "Ben Abacha et al., 2023. An empirical study of clinical note generation from doctor-patient encounters. EACL.",
        tuple(RemoteFile(name, f"{_MTS}/{name}", known) for name, known in _MTS_SUMS.items()),
        {"real_notes/mts_dialog_sections.csv.gz": "7a13358c4e60cf32ea6091fc04838dcbf0b1d087acebab981504422de6c23d67"},
        convert_mts_dialog,
    ),
}


# --- all of it ---------------------------------------------------------------------------------------------------


def verify(folder: Path, outputs: Mapping[str, str]) -> dict[str, str]:
    """For each output `ok` (the content this project was developed with), `differs`, `unreadable` or `missing`."""

    def state(path: Path, content: str) -> str:
        try:
            with gzip.open(path) as file:
                return "ok" if hashlib.file_digest(file, "sha256").hexdigest() == content else "differs"
        except FileNotFoundError:
            return "missing"
        except (OSError, EOFError, zlib.error):
            return "unreadable"

    return {name: state(folder / name, content) for name, content in outputs.items()}


def locate(name: str, folder: str | Path | None = None, missing_ok: bool = True) -> Path | None:
    """The folder with the files of SOURCES[name]: `folder`, else $DREHR_PUBLIC_DATA, else data/public.

    Prints the data set's citation and licence; where a file is not the one this project was developed with, a warning.
    Where a file is missing: says how to get it and returns None, so that a notebook goes on without; or raises
    DataError if not missing_ok. Raises DataError for a file that can't be read."""
    root, source = Path(folder or os.environ.get(DATA_VARIABLE) or FOLDER), SOURCES[name]
    states, command = verify(root, source.outputs), f"python -m drehr_utils.data.public_data {name}"
    broken, missing, other = ([f for f in states if states[f] == kind] for kind in ("unreadable", "missing", "differs"))
    if broken:
        raise DataError(f"{broken[0]}: damaged, or no gzip file; {command} fetches it")
    if missing:
        said = (
            f"{source.title}: {missing[0]} not found. `{command}` fetches it into data/public; or set {DATA_VARIABLE} "
            "to a folder that has it."
        )
        if not missing_ok:
            raise DataError(said)
        print(f"{said} Skipped.")
        return None
    print(f"{source.title}. Cite: {source.citation} Licence: {source.licence}")
    if other:
        print(f"Not the content this project was developed with, so figures may differ: {', '.join(other)}")
    return root


_LACKING = {"missing", "unreadable"}


def fetch(source: Source, folder: Path, mirror: str | None = None, progress: bool = True) -> dict[str, str]:
    """Makes a source's outputs under `folder` where they are missing or unreadable; returns verify's states.

    Raises DataError as `download` and the conversions do; what is already there stays as it is."""
    states = verify(folder, source.outputs)
    if not _LACKING & set(states.values()):
        return states
    downloads = {file.name: download(file, folder / "downloads", mirror, progress) for file in source.files}
    for name, content in source.convert(downloads).items():
        if states[name] in _LACKING:
            write_atomically(folder / name, content)
    return verify(folder, source.outputs)


_SAID = {
    "ok": "as this project was developed with",
    "differs": "not the content this project was developed with; scores may differ from the committed ones",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Fetches or checks what `argv` asks for; returns 0, or 1 where something is missing or could not be fetched."""
    given = os.environ.get(DATA_VARIABLE)
    parser = argparse.ArgumentParser(
        prog="python -m drehr_utils.data.public_data",
        description="Fetches public data that the notebooks can use, checks them, prints licence and citation.",
        epilog=f"Then set {DATA_VARIABLE} to the folder. Without a network: run it elsewhere and copy the folder.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SOURCES)} (default: all)")
    parser.add_argument("--folder", type=Path, default=Path(given) if given else FOLDER,
                        help=f"where to (default: ${DATA_VARIABLE}, else data/public)")  # fmt: skip
    parser.add_argument("--check", action="store_true", help="fetch nothing, say what is there")
    parser.add_argument("--mirror", metavar="URL", help="an address that has all files under their names")
    args = parser.parse_args(argv)
    if unknown := set(args.names) - set(SOURCES):
        parser.error(f"no data set {', '.join(sorted(unknown))}; there are {', '.join(SOURCES)}")
    failed = False
    for name in args.names or SOURCES:
        source = SOURCES[name]
        print(f"{name}: {source.title}\n  licence: {source.licence}\n  cite: {source.citation}")
        try:
            with naming(args.folder, "give another one as --folder"):
                states = verify(args.folder, source.outputs) if args.check else fetch(source, args.folder, args.mirror)
        except DataError as error:
            print(f"  failed: {error}", file=sys.stderr)
            failed = True
            continue
        for output, state in states.items():
            print(f"  {output}: {_SAID.get(state, state)}")
        failed |= bool(_LACKING & set(states.values()))
    if not failed and not args.check and str(args.folder) != given:
        print(f"Now: export {DATA_VARIABLE}={args.folder}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
