"""Every reader on every kind of damage: a named DataError or a counted skip, never a raw error, never a note's words.

What a reader says of a field of its own is tested beside it; here all of them meet the same damage."""

import contextlib
import csv
import gzip
import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import snomed_miniature
from mimic3_miniature import write_mimic3
from umls_miniature import umls_release

from drehr_utils import files
from drehr_utils.data import public_conversions
from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.data.notes import Note, read_notes, read_splits
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph, load_bios, save_bios
from drehr_utils.knowledge.snomed import load_snomed
from drehr_utils.knowledge.umls import umls_to_bios
from drehr_utils.llm.answers import AnswerStore
from drehr_utils.papers.cliniq.curation import read_coded_admissions
from drehr_utils.papers.cliniq.pooling import COLUMNS, read_pooled
from drehr_utils.papers.cliniq.release import read_first_summaries, read_release
from drehr_utils.papers.kg.linking import load_open_linking, read_ncbi
from drehr_utils.papers.radiology.lexicon import read_lexicon
from drehr_utils.papers.radiology.reports import read_collection, read_judgments
from drehr_utils.profiles import load_profile

SECRET = "zephyrine"  # a word of the notes, which no message may hold
LIMIT = 5000  # characters of a field, for the test; files.MAX_FIELD of them otherwise


@dataclass(frozen=True)
class Reader:
    """`write` makes a folder that `read` reads without fault; `read` returns how much it skipped and counted."""

    write: Callable[[Path], object]
    read: Callable[[Path], int]
    files: tuple[str, ...]  # under the folder, each damaged in turn
    header: bool = True  # the first row names columns
    zipped: bool = True  # a .gz is read as well
    needed: bool = True  # a missing file is an error


def lines(*rows: str) -> str:
    return "".join(f"{row}\n" for row in rows)


def writing(**content: str) -> Callable[[Path], None]:
    """Writes files by name, "." for "__", "/" for "___"."""

    def write(folder: Path) -> None:
        for name, text in content.items():
            path = folder / name.replace("___", "/").replace("__", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


def graph(folder: Path) -> None:
    kg = KnowledgeGraph(
        is_a={"C2": ["C1"]}, relations={"C1": [("may_treat", "C2")]}, cui2pt={"C1": "gout", "C2": "x y"}
    )
    for cui, term in kg.cui2pt.items():
        kg.add_term(cui, term)
    save_bios(kg, folder)


def umls(folder: Path) -> int:
    tables = [folder / f"{name}.RRF" for name in ("MRCONSO", "MRREL", "MRSTY")]
    with contextlib.redirect_stdout(said := io.StringIO()):
        umls_to_bios(*tables, folder / "out")
    return malformed(said) - UMLS_SKIPPED


def malformed(said: io.StringIO) -> int:
    return sum(int(n) for n in re.findall(r"(\d+) malformed rows", said.getvalue()))


UMLS_SKIPPED = 4  # rows of the miniature that are malformed as it is


def snomed(folder: Path) -> int:
    with contextlib.redirect_stdout(said := io.StringIO()):
        kg = load_snomed(folder)
    return malformed(said) + kg.dropped.total() - 2


def names(content: dict[str, str]) -> tuple[str, ...]:
    return tuple(name.replace("___", "/").replace("__", ".") for name in content)


NOTE = f"Gout, {SECRET}."
ANSWER = {"task": "entity_generation", "entity_type": "drugs", "id": "n_0", "text_sha256": "0", "answer": f"- {SECRET}"}
NOTE_TABLE = lines("note_id,subject_id,hadm_id,text", f'n,1,2,"{NOTE}"', f'm,3,4,"{NOTE}"')
SPLIT_TABLE = lines("subject_id,note_id,split", "1,n,train", "3,m,test")
NOTES = [Note("n", "1", "2", NOTE), Note("m", "3", "4", NOTE)]
BENCHMARK = {
    "t___corpus__jsonl": lines(*(json.dumps({"_id": f"n_{k}", "text": NOTE}) for k in range(2))),
    "t___queries__jsonl": lines('{"_id": "q", "text": "gout", "type": "disease"}'),
    "t___patients__jsonl": lines('{"hadm_id": 1, "note_id": "n", "chunks": 2, "queries": ["q"]}'),
    "t___qrels___t__tsv": lines("query-id\tcorpus-id\tscore\tmatch_type\tpatient", "q\tn_0\t1\tstring\town"),
}
CODED = {
    "diagnoses_icd__csv": lines("hadm_id,icd_code,icd_version", "2,4280,9"),
    "procedures_icd__csv": lines("hadm_id,icd_code,icd_version", "2,4513,9"),
    "d_icd_diagnoses__csv": lines("icd_code,icd_version,long_title", "4280,9,Heart failure"),
    "d_icd_procedures__csv": lines("icd_code,icd_version,long_title", "4513,9,Endoscopy"),
    "prescriptions__csv": lines("hadm_id,drug", "2,aspirin"),
}
KINDS = ("disease", "procedure", "drug")
RELEASE = {"test_hadm_ids__txt": lines("101", "102")}
RELEASE |= {f"queries_{kind}__jsonl": lines(json.dumps({"_id": kind, "text": kind})) for kind in KINDS}
RELEASE |= {f"qrels_{kind}__tsv": lines(f"{kind}\t101_0\tstring") for kind in KINDS}
POOLED = lines("\t".join(COLUMNS), "q\tn_1\tstring\tstring\tstring")
SNOMED = "Snapshot/Terminology/sct2_{}_INT_20260101.txt"


READERS = {
    "MIMIC-IV's notes": Reader(
        writing(discharge__csv=NOTE_TABLE), lambda f: len(read_notes(f)[1].skipped), ("discharge.csv",)
    ),
    "MIMIC-III's notes": Reader(write_mimic3, lambda f: len(read_notes(f)[1].skipped), ("NOTEEVENTS.csv.gz",)),
    "first summaries": Reader(
        write_mimic3, lambda f: len(read_first_summaries(f, ["101", "102", "103"])[0]) - 3, ("NOTEEVENTS.csv.gz",)
    ),
    "splits": Reader(
        writing(splits__csv=SPLIT_TABLE), lambda f: len(read_splits(f, NOTES)) - 2, ("splits.csv",), needed=False
    ),
    "MIMIC-IV's codes": Reader(
        writing(**CODED), lambda f: read_coded_admissions(f, ["2"]).skipped.total(), names(CODED)
    ),
    "MIMIC-III's codes": Reader(
        write_mimic3, lambda f: read_coded_admissions(f, ["101", "102"]).skipped.total() - 1,
        ("DIAGNOSES_ICD.csv", "D_ICD_PROCEDURES.csv", "PRESCRIPTIONS.csv"),
    ),
    "BIOS": Reader(
        graph, lambda f: load_bios(f).dropped.total(),
        ("bios.txt", "term2CUI.json", "CUI2term.json", "CUI2pt.json", "is_a.json", "relations.json"), header=False,
    ),
    "BIOS, our files": Reader(
        graph, lambda f: load_bios(f).dropped.total(), ("types.json", "abbreviations.json", "sources.json"),
        header=False, needed=False,
    ),
    "UMLS": Reader(umls_release, umls, ("MRCONSO.RRF", "MRREL.RRF", "MRSTY.RRF"), header=False),
    "RF2": Reader(
        snomed_miniature.release, snomed,
        (SNOMED.format("Concept_Snapshot"), SNOMED.format("Description_Snapshot-en") + ".gz",
         SNOMED.format("Relationship_Snapshot")),
    ),
    "benchmark": Reader(writing(**BENCHMARK), lambda f: len(load_benchmark(f, "t").corpus) - 2, names(BENCHMARK)),
    "pooled judgments": Reader(
        writing(t___judgments___pooled__tsv=POOLED), lambda f: len(read_pooled(f, "t")) - 1,
        ("t/judgments/pooled.tsv",), zipped=False, needed=False,
    ),
    "CliniQ's release": Reader(writing(**RELEASE), lambda f: read_release(f).repeated, names(RELEASE), header=False),
    "recorded answers": Reader(
        writing(answers__jsonl=lines(json.dumps(ANSWER), json.dumps(ANSWER | {"id": "n_1"}))),
        lambda f: AnswerStore(None, [next(f.glob("answers.jsonl*"), f / "a.jsonl")]).counts.total(),
        ("answers.jsonl",), header=False,
    ),
    "profile": Reader(
        writing(mine__toml=lines('base = "smoke"', "seed = 5")), lambda f: load_profile(f / "mine.toml").seed - 5,
        ("mine.toml",), header=False, zipped=False,
    ),
    "linking": Reader(
        writing(mentions__csv=lines("note_id,mention,icd10cm_code", "n,gout,M10.9")),
        lambda f: load_open_linking(f / "mentions.csv").left_out.total(), ("mentions.csv",),
    ),
    "NCBI": Reader(
        writing(ncbi__txt=lines("1|t|x", "1|a|y", "1\t0\t4\tgout\tSpecificDisease\tD1")),
        lambda f: len(read_ncbi(f / "ncbi.txt")) - 1, ("ncbi.txt",), header=False,
    ),
    "radiology's reports": Reader(
        writing(c__jsonl=lines(json.dumps({"uid": "1", "findings": NOTE, "impression": NOTE}))),
        lambda f: len(read_collection(f / "c.jsonl")) - 1, ("c.jsonl",), header=False,
    ),
    "radiology's judgments": Reader(
        writing(j__tsv=lines("# reports: A", "query\tsentences", "edema\tA#0")),
        lambda f: len(read_judgments(f / "j.tsv")[1]) - 1, ("j.tsv",), header=False, zipped=False,
    ),
    "radiology's lexicon": Reader(
        writing(l__tsv=lines("finding\ttype\tvariants", "edema\tx\toedema")),
        lambda f: len(read_lexicon(f / "l.tsv")) - 1, ("l.tsv",),
    ),
    "ACI-Bench": Reader(
        writing(a__csv=lines("encounter_id,note", "1,x")),
        lambda f: len(public_conversions.convert_aci_bench(dict.fromkeys(range(5), f / "a.csv"))) - 1, ("a.csv",),
        zipped=False,
    ),
}  # fmt: skip
CASES = [(reader, name) for reader, of in READERS.items() for name in of.files]


def content(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def put(path: Path, data: bytes) -> None:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def missing(path: Path, reader: Reader) -> bool:
    path.unlink()
    return reader.needed


def a_folder(path: Path, reader: Reader) -> bool:
    path.unlink()
    path.mkdir()
    return reader.needed


def empty(path: Path, reader: Reader) -> bool:
    put(path, b"")
    return reader.header or path.suffix == ".json"


def cut_short(path: Path, reader: Reader) -> bool:
    data = content(path)
    put(path, data[: -max(3, len(data) // 4)])
    return path.suffix in (".json", ".jsonl")  # elsewhere what is left may be whole


def utf16(path: Path, reader: Reader) -> bool:
    put(path, content(path).decode().encode("utf-16"))
    return True


def latin1(path: Path, reader: Reader) -> bool:
    """A byte that is no UTF-8, in place of the last letter."""
    data = content(path)
    at = max((i for i, byte in enumerate(data) if chr(byte).isascii() and chr(byte).isalnum()), default=1)
    put(path, data[:at] + b"\xe9" + data[at + 1 :])
    return path.stem != "PRESCRIPTIONS"  # whose last row is of no admission that is asked for


def binary(path: Path, reader: Reader) -> bool:
    put(path, bytes(range(256)) * 40)
    return True


def nul(path: Path, reader: Reader) -> bool:
    data = content(path)
    put(path, data[: len(data) // 2] + b"\0" + data[len(data) // 2 :])
    return False


def twice(path: Path, reader: Reader) -> bool:
    """The last row again: an error, a count, or nothing changes by it."""
    data = content(path)
    put(path, data + data.splitlines(keepends=True)[-1])
    return False


def too_large(path: Path, reader: Reader) -> bool:
    """A field beyond the limit: what an unclosed quote or a lost line break makes of the rest of a file."""
    data = content(path)
    put(path, data.rstrip(b'\r\n}]"') + b"x" * (LIMIT + 1) + data[len(data.rstrip(b'\r\n}]"')) :])
    return path.suffix != ".json" and path.suffix != ".toml"


def cut_gzip(path: Path, reader: Reader) -> bool:
    packed = gzip.compress(content(path), mtime=0)
    path.unlink()
    path.with_name(path.name.removesuffix(".gz") + ".gz").write_bytes(packed[:-9])
    return reader.zipped


def no_gzip(path: Path, reader: Reader) -> bool:
    data = content(path)
    path.unlink()
    path.with_name(path.name.removesuffix(".gz") + ".gz").write_bytes(data)
    return reader.zipped


def broken_gzip(path: Path, reader: Reader) -> bool:
    """Whole, with other bytes in its middle than were written."""
    packed = bytearray(gzip.compress(content(path), mtime=0))
    packed[len(packed) // 2] ^= 0xFF
    path.unlink()
    path.with_name(path.name.removesuffix(".gz") + ".gz").write_bytes(packed)
    return reader.zipped


DAMAGES = [
    missing, a_folder, empty, cut_short, utf16, latin1, binary, nul, twice, too_large, cut_gzip, no_gzip, broken_gzip,
]  # fmt: skip


def refused(read: Callable[[], int]) -> tuple[str, int]:
    """What a reader says, or how much it counted; anything but a DataError comes through."""
    try:
        return "", read()
    except DataError as error:
        said = str(error)
    assert SECRET not in said and len(said) < 2000, said
    return said, 0


@pytest.fixture(autouse=True)
def small_fields(monkeypatch):
    monkeypatch.setattr(files, "MAX_FIELD", LIMIT)
    before = csv.field_size_limit(LIMIT)
    yield
    csv.field_size_limit(before)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize(("reader", "name"), CASES)
def test_a_damaged_file_is_named_or_what_is_skipped_counted(tmp_path, reader, name, damage):
    reader, folder = READERS[reader], tmp_path / "damaged"
    folder.mkdir()
    reader.write(folder)
    must = damage(folder / name, reader)
    said, count = refused(lambda: reader.read(folder))
    assert said or count or not must, "read as if nothing were wrong"
    known = (re.split(r"\.|_INT", Path(name).name)[0].lower(), "damaged")
    assert not said or any(part in said.lower() for part in known), said


@pytest.mark.parametrize("reader", READERS)
def test_the_undamaged_input_counts_nothing(tmp_path, reader):
    READERS[reader].write(tmp_path)
    assert READERS[reader].read(tmp_path) == 0


# --- fields ----------------------------------------------------------------------------------------------------------

TABLES = {name: reader for name, reader in READERS.items() if reader.header}


@pytest.mark.parametrize("reader", TABLES)
def test_a_table_without_its_header_or_with_another_is_named_without_its_first_row(tmp_path, reader):
    reader = READERS[reader]
    for name in reader.files:
        folder = tmp_path / name.replace("/", "_")
        folder.mkdir()
        reader.write(folder)
        if name.endswith(".jsonl"):
            continue
        path, where = folder / name, Path(name).name.split(".")[0]
        head, _, rest = content(path).partition(b"\n")
        put(path, rest)
        said, _ = refused(lambda: reader.read(folder))  # noqa: B023
        assert where in said and "row" in said, said
        put(path, re.sub(rb"[A-Za-z]+", b"other", head) + b"\n" + rest)
        said, _ = refused(lambda: reader.read(folder))  # noqa: B023
        assert where in said and "row" in said, said


RECORDS = [
    ("benchmark", "t/corpus.jsonl"), ("benchmark", "t/queries.jsonl"), ("benchmark", "t/patients.jsonl"),
    ("CliniQ's release", "queries_drug.jsonl"), ("recorded answers", "answers.jsonl"),
    ("radiology's reports", "c.jsonl"),
]  # fmt: skip
VALUES = {
    "a number": 5,
    "null": None,
    "a list": [],
    "a dict": {},
    "no": False,
    "half a pair": "\ud800",
    "lists": [[{}]],
}
RIGHT = {("queries", "a list"), ("entity_type", "null")} | {("hadm_id", value) for value in VALUES}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize(("reader", "name"), RECORDS)
def test_a_field_of_another_type_is_named_with_its_row(tmp_path, reader, name, value):
    reader = READERS[reader]
    reader.write(tmp_path)
    *first, last = (json.loads(line) for line in (tmp_path / name).read_text().splitlines())
    for field in last:
        changed = {**last, field: VALUES[value]}
        (tmp_path / name).write_text(lines(*map(json.dumps, [*first, changed])))
        said, count = refused(lambda: reader.read(tmp_path))  # noqa: B023
        assert count or (field, value) in RIGHT or f"{name}, row {len(first) + 1}, field {field}" in said, (field, said)
