"""UMLS release files (MRCONSO.RRF, MRREL.RRF, MRSTY.RRF) to BIOS's layout (DR.EHR §3.1, footnote 1)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm.auto import tqdm

from drehr_utils.errors import DataError
from drehr_utils.files import read_text_lines
from drehr_utils.knowledge.graph import normalize_term

RRF_COLUMNS = {
    "MRCONSO": "CUI LAT TS LUI STT SUI ISPREF AUI SAUI SCUI SDUI SAB TTY CODE STR SRL SUPPRESS CVF".split(),
    "MRREL": "CUI1 AUI1 STYPE1 REL CUI2 AUI2 STYPE2 RELA RUI SRUI SAB SL RG DIR SUPPRESS CVF".split(),
    "MRSTY": "CUI TUI STN STY ATUI CVF".split(),
}
REQUIRED = {"MRCONSO": ("CUI", "STR"), "MRREL": ("CUI1", "CUI2"), "MRSTY": ("CUI", "STY")}
HINT = "it is part of a UMLS Metathesaurus release (META folder), which needs a licence from the NLM"
_SCHEMA = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA cache_size = -262144;  -- KiB
CREATE TABLE term (cui, term, rank, PRIMARY KEY (cui, term)) WITHOUT ROWID;
CREATE TABLE edge (cui, relation, other, PRIMARY KEY (cui, relation, other)) WITHOUT ROWID;
CREATE TABLE type (cui, name, PRIMARY KEY (cui, name)) WITHOUT ROWID;
BEGIN
"""
_TERMS = "SELECT cui, term FROM term ORDER BY cui, rank, term"
# CROSS JOIN fixes the tables' order: a plan of SQLite's own took two minutes for 120,000 edges.
_LINKED = "FROM edge CROSS JOIN concept a ON a.id = cui CROSS JOIN concept b ON b.id = other WHERE relation"
_FILES = {  # BIOS's file -> its rows, in order, and what a key's rows become
    "CUI2term": (_TERMS, list),
    "CUI2pt": (_TERMS, itemgetter(0)),
    "term2CUI": ("SELECT term, cui FROM term ORDER BY 1, 2", list),
    "is_a": (f"SELECT cui, other {_LINKED} = 'is_a' ORDER BY 1, 2", list),
    "relations": (f"SELECT cui, relation, other {_LINKED} != 'is_a' ORDER BY 1, 2, 3", list),
    "types": ("SELECT cui, name FROM type CROSS JOIN concept ON id = cui ORDER BY 1, 2", itemgetter(0)),
}


def read_rows(
    path: Path, columns: Sequence[str], separator: str, required: Sequence[str], hint: str
) -> Iterator[dict[str, str]]:
    """Rows of a release's table (UMLS's RRF, SNOMED CT's RF2) as {column: cell}; malformed ones are left out, and told
    at the end."""
    faults = []
    for number, line in tqdm(read_text_lines(path, hint), desc=path.name, unit="row", unit_scale=True, leave=False):
        cells = line.removesuffix("|").split(separator)  # RRF has a pipe after the last cell too
        if number == 1 and cells == list(columns):  # RF2's header
            continue
        row = dict(zip(columns, cells, strict=False))
        if len(cells) != len(columns):
            faults.append(f"row {number}, field {columns[-1]}: {len(cells)} columns instead of {len(columns)}")
        elif empty := [name for name in required if not row[name].strip()]:
            faults.append(f"row {number}, field {empty[0]}: empty")
        else:
            yield row
    if faults:
        more = ["..."] if len(faults) > 3 else []
        print(f"{path.name}: {len(faults)} malformed rows are left out: {'; '.join([*faults[:3], *more])}")


def _dump(path: Path, rows: Iterable[tuple], value: Callable[[list], object]) -> None:
    """Write {first cell: value(the rest of its rows)} as JSON, a key at a time."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write("{")
        for n, (key, group) in enumerate(groupby(rows, key=itemgetter(0))):
            item = json.dumps(value([row[1] if len(row) == 2 else row[1:] for row in group]), ensure_ascii=False)
            file.write(f"{',' if n else ''}\n{json.dumps(key, ensure_ascii=False)}: {item}")
        file.write("\n}\n")


def _edge(first: str, relation: str, second: str, name: str) -> tuple[str, str, str] | None:
    """What a row of MRREL says, which is what CUI2 is to CUI1: REL=PAR, "CUI2 is a parent of CUI1"; RELA=isa, "CUI2
    isa CUI1". PAR and CHD without RELA are a source's tree; other relations without RELA say nothing."""
    if first == second or (not name and relation not in ("PAR", "CHD")):
        return None
    if name == "isa" or (not name and relation == "CHD"):
        return second, "is_a", first
    return (first, "is_a", second) if name in ("inverse_isa", "") else (second, name, first)


def umls_to_bios(mrconso: Path, mrrel: Path, mrsty: Path | None, folder: Path) -> None:
    """Convert UMLS's RRF files (plain or .gz) to BIOS's layout in `folder`.

    English terms only; a concept's preferred one has TS=P, STT=PF, ISPREF=Y. Rows with SUPPRESS=O, E or Y are left out.
    Rows go through an SQLite file in `folder`, so memory stays bounded whatever the release's size. Raises DataError
    for a missing or unreadable file, or if no concept is left."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"MRCONSO": mrconso, "MRREL": mrrel} | ({"MRSTY": mrsty} if mrsty else {})

    def cells(name: str, of: Callable[[dict[str, str]], tuple | None]) -> Iterator[tuple]:
        """`of` each row that isn't suppressed, where it gives something."""
        for row in read_rows(Path(paths[name]), RRF_COLUMNS[name], "|", REQUIRED[name], HINT):
            if row.get("SUPPRESS") not in ("O", "E", "Y") and (found := of(row)):
                yield found

    def term(row: dict[str, str]) -> tuple[str, str, int] | None:
        if row["LAT"] == "ENG":
            rank = (row["TS"] != "P") * 4 + (row["STT"] != "PF") * 2 + (row["ISPREF"] != "Y")
            return row["CUI"], normalize_term(row["STR"]), rank

    with TemporaryDirectory(dir=folder) as scratch:
        db = sqlite3.connect(Path(scratch) / "umls.sqlite", isolation_level=None)
        db.executescript(_SCHEMA)
        best = "ON CONFLICT DO UPDATE SET rank = min(rank, excluded.rank)"
        db.executemany(f"INSERT INTO term VALUES (?, ?, ?) {best}", cells("MRCONSO", term))
        edges = cells("MRREL", lambda row: _edge(row["CUI1"], row["REL"], row["CUI2"], row["RELA"]))
        db.executemany("INSERT OR IGNORE INTO edge VALUES (?, ?, ?)", edges)
        if mrsty:
            types = cells("MRSTY", lambda row: (row["CUI"], row["STY"]))
            db.executemany("INSERT OR IGNORE INTO type VALUES (?, ?)", types)
        db.execute("COMMIT")
        db.execute("CREATE TABLE concept (id PRIMARY KEY) WITHOUT ROWID")
        db.execute("INSERT INTO concept SELECT DISTINCT cui FROM term")
        if not db.execute("SELECT 1 FROM concept").fetchone():
            raise DataError(f"{Path(mrconso).name}: no row in ENG is left. Check field LAT.")
        with open(folder / "bios.txt", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{cui}\t{term}\n" for cui, term in db.execute(_TERMS))
        for name, (query, value) in _FILES.items():
            _dump(folder / f"{name}.json", db.execute(query), value)
        db.close()
