"""Public data in the layout that the notebooks read, made of what their hosts give (see public_data).

Each function takes the downloaded files by name and returns the uncompressed content of each output. All raise
DataError, naming the file and where in it, for a file that isn't what its name says.
"""

from __future__ import annotations

import json
import re
import tarfile
import xml.etree.ElementTree as ET
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pandas as pd

from drehr_utils.errors import DataError
from drehr_utils.files import is_utf8, iter_rows, naming

_AGAIN = "delete it and run this again"
IU_COLUMNS = ("uid", "MeSH", "Problems", "image", "indication", "comparison", "findings", "impression")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """`naming` of an archive."""
    try:
        with naming(path, _AGAIN):
            yield
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        raise DataError(f"{path.name}: not an archive ({error}); {_AGAIN}") from None


def _xml_members(path: Path) -> Iterator[tuple[str, bytes]]:
    """Name and content of the XML files in a zip or tar archive."""
    with _reading(path):
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                yield from ((name, archive.read(name)) for name in archive.namelist() if name.endswith(".xml"))
        else:
            with tarfile.open(path) as archive:
                members = (m for m in archive if m.isfile() and m.name.endswith(".xml"))
                yield from ((m.name, archive.extractfile(m).read()) for m in members)


def _parse(name: str, content: bytes) -> ET.Element:
    try:
        return ET.fromstring(content)
    except ET.ParseError as error:
        raise DataError(f"{name}, row {error.position[0]}: not XML ({error}); delete the archive, run again") from None


def _json_lines(records: Sequence[dict]) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def convert_medquad(downloads: dict[str, Path]) -> dict[str, bytes]:
    """MedQuAD's answers and CDV's annotations of its test split as BEIR-like records (see medquad.load_medquad).

    A passage's text is the answer, stripped, whose `<source>_<qid>` is the annotation's id; annotations without an
    answer are left out. Raises DataError where no answer is found at all."""
    answers: dict[str, str] = {}
    for name, content in _xml_members(downloads["MedQuAD.zip"]):
        document = _parse(name, content)
        for pair in document.iter("QAPair"):
            question, text = pair.find("Question"), (pair.findtext("Answer") or "").strip()
            if question is not None and text:
                answers[f"{document.get('source')}_{question.get('qid')}"] = text
    annotations = downloads["MedQuAD_test_annotations.json"]
    try:
        cdv = json.loads(annotations.read_bytes())
        passages = [
            {"id": a["id"], "doc_id": d["id"], "title": d["title"], "text": answers[a["id"]], "entity": a["entity"],
             "entity_id": a.get("entityId"), "aspect": a.get("aspect")}
            for d in cdv["documents"] for a in d["annotations"] if a["id"] in answers
        ]  # fmt: skip
        queries = []
        for i, query in enumerate(cdv["queries"]):
            (asked,) = query["annotations"]
            queries.append({
                "id": f"mq{i}", "text": query["text"], "entity": asked["entity"], "entity_id": asked.get("entityId"),
                "aspect": asked["aspect"], "aspect_heading": asked["aspectHeading"],
                "relevant": [result["id"] for result in query["results"]],
            })  # fmt: skip
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{annotations.name}: not CDV's annotations ({error!r}); delete it and run this again"
        ) from None
    if not passages:
        raise DataError("MedQuAD.zip: no answer belongs to an annotation; delete it and run this again")
    return {"medquad/queries.jsonl.gz": _json_lines(queries), "medquad/passages.jsonl.gz": _json_lines(passages)}


def convert_iu_xray(downloads: dict[str, Path]) -> dict[str, bytes]:
    """Open-i's XML reports as one CSV, by number: the coders' `major` headings as MeSH, what stands before their first
    "/" as Problems, the first image's caption, and the four sections."""
    rows = []
    for name, content in _xml_members(downloads["NLMCXR_reports.tgz"]):
        report = _parse(name, content)
        identity = next((e.get("id", "") for e in report.iter("uId")), "") or Path(name).stem
        number = re.search(r"\d+$", identity)
        if number is None:
            raise DataError(f"{name}, field uId: {identity!r} has no number; delete the archive and run this again")
        sections = {e.get("Label", ""): _folded(e) for e in report.iter("AbstractText")}
        headings = [_folded(e) for e in report.iter("major")]
        rows.append({
            "uid": number[0], "MeSH": ";".join(headings), "Problems": ";".join(h.split("/")[0] for h in headings),
            "image": next((_folded(e) for e in report.iter("caption")), ""),
            **{key: sections.get(key.upper(), "") for key in IU_COLUMNS[4:]},
        })  # fmt: skip
    if not rows:
        raise DataError("NLMCXR_reports.tgz: no report in it; delete it and run this again")
    table = pd.DataFrame(sorted(rows, key=lambda row: int(row["uid"])), columns=IU_COLUMNS)
    return {"iu_xray/indiana_reports.csv.gz": table.to_csv(index=False, lineterminator="\n").encode()}


def _folded(element: ET.Element) -> str:
    return " ".join("".join(element.itertext()).split())


def convert_ncbi(downloads: dict[str, Path]) -> dict[str, bytes]:
    """The text file of each of NCBI Disease's archives."""
    outputs = {}
    for path in downloads.values():
        name = path.with_suffix(".txt").name
        with _reading(path), zipfile.ZipFile(path) as archive:
            member = next((m for m in archive.namelist() if Path(m).name == name), None)
            if member is None:
                raise DataError(f"{path.name}: {name} isn't in it; delete it and run this again")
            outputs[f"ncbi_disease/{name}.gz"] = archive.read(member)
    return outputs


def _table(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The columns of a CSV file whose cells hold lines, their ends as one character."""
    for row, cells in iter_rows(path, [column.lower() for column in columns]):
        if not all(map(is_utf8, cells.values())):
            raise DataError(f"{path.name}, row {row}: bytes that are not UTF-8; delete the file and run this again")
        yield tuple(cell.replace("\r\n", "\n") for cell in cells.values())


def _csv(rows: Sequence[tuple[str, ...]], columns: tuple[str, ...]) -> bytes:
    return pd.DataFrame(rows, columns=columns).to_csv(index=False, lineterminator="\n").encode()


def convert_aci_bench(downloads: dict[str, Path]) -> dict[str, bytes]:
    """Every split's visit notes, without the dialogues that they were written from."""
    splits = zip(("train", "valid", "test1", "test2", "test3"), downloads.values(), strict=True)
    rows = [(i, split, note) for split, path in splits for i, note in _table(path, ("encounter_id", "note"))]
    return {"real_notes/aci_bench_notes.csv.gz": _csv(rows, ("encounter_id", "split", "note"))}


def convert_mts_dialog(downloads: dict[str, Path]) -> dict[str, bytes]:
    """Every split's sections, without their dialogues; an id is unique with its split's name before it."""
    splits = zip(("train", "validation", "test1", "test2"), downloads.values(), strict=True)
    columns = ("ID", "section_header", "section_text")
    rows = [(f"{split}-{i}", *rest) for split, path in splits for i, *rest in _table(path, columns)]
    return {"real_notes/mts_dialog_sections.csv.gz": _csv(rows, ("id", *columns[1:]))}
