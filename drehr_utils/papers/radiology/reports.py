"""Radiology reports as they are read: the open collections, IU X-ray, and sentences that were judged by reading."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from drehr_utils.data import public_data
from drehr_utils.errors import DataError
from drehr_utils.files import iter_rows, read_json_lines, read_text_lines, refuse
from drehr_utils.knowledge import negation
from drehr_utils.profiles import ROOT

OPEN_CXR = ROOT / "data/open_cxr"


@dataclass(frozen=True)
class Report:
    uid: str
    findings: str
    impression: str
    problems: tuple[str, ...] = ()  # human coders' headings (IU X-ray only)

    @cached_property
    def sentences(self) -> list[str]:
        return negation.sentences(self.findings) + negation.sentences(self.impression)


def read_collection(path: Path) -> list[Report]:
    """Reports of an open_cxr collection (JSON lines: uid, findings, impression). Raises DataError for a bad line and a
    uid that is there twice."""
    fields, reports, uids = ("uid", "findings", "impression"), [], set()
    for number, where, row in read_json_lines(path, fields):
        if bad := [field for field in fields if not isinstance(row[field], str)]:
            raise DataError(f"{where}, row {number}, field {bad[0]}: not a string; quote it")
        refuse(where, number, {"field uid: there twice": row["uid"] in uids})
        uids.add(row["uid"])
        reports.append(Report(*(row[field] for field in fields)))
    return reports


def read_iu_xray(folder: str | Path | None = None) -> list[Report] | None:
    """IU X-ray's reports with their coders' problems (Demner-Fushman et al., 2016), from public_data.locate's folder;
    None without them."""
    if (root := public_data.locate("iu_xray", folder)) is None:
        return None
    reports = []
    for _, row in iter_rows(root / "iu_xray/indiana_reports.csv.gz", ("uid", "findings", "impression", "problems")):
        *texts, problems = row.values()
        reports.append(Report(*texts, tuple(dict.fromkeys(p.strip() for p in problems.split(";") if p.strip()))))
    return reports


def read_judgments(path: Path = OPEN_CXR / "sentence_judgments.tsv") -> tuple[list[str], dict[str, list[str]]]:
    """Queries judged by reading, not by the lexicon: the judged reports' uids and, for each query, its sentences' ids.

    By default what two of three judges say; each one's own are in judgments/, in the same form. A sentence's id is
    `<uid>#<k>`, its place in Report.sentences. Raises DataError for a malformed file."""
    lines = [line for _, line in read_text_lines(path)]
    if len(lines) < 2 or not lines[0].startswith("# reports: ") or lines[1] != "query\tsentences":
        raise DataError(f"{path.name}, rows 1-2: need '# reports: uid ...' and the header query, sentences")
    judged, uids = dict[str, list[str]](), lines[0].removeprefix("# reports: ").split()
    for number, line in enumerate(lines[2:], start=3):
        query, _, ids = line.partition("\t")
        if not ids or any(not re.fullmatch(r"\S+#\d+", i) for i in ids.split()):
            raise DataError(f"{path.name}, row {number}, field sentences: need ids such as HA0001#2, space-separated")
        strange = [i for i in ids.split() if i.partition("#")[0] not in uids]
        refuse(path.name, number, {f"field sentences: {i} is of no report of row 1": True for i in strange[:1]})
        refuse(path.name, number, {f"field query: {query!r} is there twice": query in judged})
        judged[query] = ids.split()
    return uids, judged
