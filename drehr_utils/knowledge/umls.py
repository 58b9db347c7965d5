"""UMLS release files (MRCONSO.RRF, MRREL.RRF, MRSTY.RRF) to BIOS's layout (DR.EHR §3.1, footnote 1)."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

from tqdm.auto import tqdm

from drehr_utils.data.notes import ReadReport
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import normalize_term, read_lines

RRF_COLUMNS = {
    "MRCONSO": "CUI LAT TS LUI STT SUI ISPREF AUI SAUI SCUI SDUI SAB TTY CODE STR SRL SUPPRESS CVF".split(),
    "MRREL": "CUI1 AUI1 STYPE1 REL CUI2 AUI2 STYPE2 RELA RUI SRUI SAB SL RG DIR SUPPRESS CVF".split(),
    "MRSTY": "CUI TUI STN STY ATUI CVF".split(),
}


def _rrf(path: Path, table: str, report: ReadReport) -> Iterator[dict[str, str]]:
    """Rows of a Rich Release Format file (pipe-separated, a pipe after the last cell); malformed ones are counted."""
    columns = RRF_COLUMNS[table]
    hint = "It is part of a UMLS Metathesaurus release (META folder), which needs a licence from the NLM."
    for number, line in enumerate(
        tqdm(read_lines(path, hint), desc=table, unit="row", unit_scale=True, leave=False), 1
    ):
        cells = line.rstrip("\r\n").split("|")
        report.rows += 1
        row = dict(zip(columns, cells, strict=False))
        required = [name for name in ("CUI", "CUI1", "CUI2", "STR", "STY") if not row.get(name, "-").strip()]
        if len(cells) != len(columns) + 1:
            report.skip(number, columns[-1], f"{len(cells) - 1} columns instead of {len(columns)}")
        elif required:
            report.skip(number, required[0], "empty")
        else:
            yield row


def _dump(path: Path, rows: Iterable[tuple], value: Callable[[list[tuple]], object]) -> None:
    """Write {first cell: value(the rest of its rows)} as JSON, a key at a time."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write("{")
        for n, (key, group) in enumerate(groupby(rows, key=itemgetter(0))):
            item = json.dumps(value([row[1:] for row in group]), ensure_ascii=False)
            file.write(f"{',' if n else ''}\n{json.dumps(key, ensure_ascii=False)}: {item}")
        file.write("\n}\n")


def umls_to_bios(
    mrconso: Path,
    mrrel: Path,
    mrsty: Path | None,
    folder: Path,
    languages: tuple[str, ...] = ("ENG",),
    suppress: bool = True,
) -> list[ReadReport]:
    """Convert UMLS's RRF files (plain or .gz) to BIOS's layout in `folder`; a report for each file read.

    A concept's preferred term is the one with TS=P, STT=PF, ISPREF=Y in the first of the languages that it has. A row
    of MRREL says what CUI2 is to CUI1: REL=PAR, "CUI2 is a parent of CUI1"; RELA=isa, "CUI2 isa CUI1". So is_a comes
    from PAR and CHD without RELA (a source's tree), and from isa and inverse_isa; other RELAs become (CUI2: RELA,
    CUI1). suppress: leave out rows with SUPPRESS=O, E or Y. Rows go through an SQLite file in `folder`, so memory stays
    bounded whatever the release's size. Raises DataError for a missing or unreadable file, or if no concept is left.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"MRCONSO": mrconso, "MRREL": mrrel, "MRSTY": mrsty}
    reports = {name: ReadReport(Path(path).name) for name, path in paths.items() if path is not None}

    def rows(name: str) -> Iterator[dict[str, str]]:
        for row in _rrf(Path(paths[name]), name, reports[name]):
            if not (suppress and row.get("SUPPRESS") in ("O", "E", "Y")):
                yield row

    def terms() -> Iterator[tuple[str, str, int]]:
        for row in rows("MRCONSO"):
            if row["LAT"] in languages:
                reports["MRCONSO"].kept += 1
                rank = (row["TS"] != "P") * 4 + (row["STT"] != "PF") * 2 + (row["ISPREF"] != "Y")
                yield row["CUI"], normalize_term(row["STR"]), languages.index(row["LAT"]) * 8 + rank

    def edges() -> Iterator[tuple[str, str, str]]:
        for row in rows("MRREL"):
            first, relation, second, name = row["CUI1"], row["REL"], row["CUI2"], row["RELA"]
            if first == second or (not name and relation not in ("PAR", "CHD")):
                continue
            reports["MRREL"].kept += 1
            if name == "isa" or (not name and relation == "CHD"):
                yield second, "is_a", first
            elif name == "inverse_isa" or not name:
                yield first, "is_a", second
            else:
                yield second, name, first

    def semantic_types() -> Iterator[tuple[str, str]]:
        for row in rows("MRSTY"):
            reports["MRSTY"].kept += 1
            yield row["CUI"], row["STY"]

    with TemporaryDirectory(dir=folder) as scratch:
        db = sqlite3.connect(Path(scratch) / "umls.sqlite", isolation_level=None)
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("PRAGMA cache_size = -262144")  # KiB
        db.execute("CREATE TABLE term (cui, term, rank, PRIMARY KEY (cui, term)) WITHOUT ROWID")
        db.execute("CREATE TABLE edge (cui, relation, other, PRIMARY KEY (cui, relation, other)) WITHOUT ROWID")
        db.execute("CREATE TABLE type (cui, name, PRIMARY KEY (cui, name)) WITHOUT ROWID")
        db.execute("BEGIN")
        best = "ON CONFLICT DO UPDATE SET rank = min(rank, excluded.rank)"
        db.executemany(f"INSERT INTO term VALUES (?, ?, ?) {best}", terms())
        db.executemany("INSERT OR IGNORE INTO edge VALUES (?, ?, ?)", edges())
        if mrsty is not None:
            db.executemany("INSERT OR IGNORE INTO type VALUES (?, ?)", semantic_types())
        db.execute("COMMIT")
        if not db.execute("SELECT count(*) FROM term").fetchone()[0]:
            raise DataError(f"{Path(mrconso).name}: no row in {', '.join(languages)} is left. Check field LAT.")
        by_rank = "SELECT cui, term FROM term ORDER BY cui, rank, term"
        with open(folder / "bios.txt", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{cui}\t{term}\n" for cui, term in db.execute(by_rank))
        db.execute("CREATE TABLE concept (id PRIMARY KEY) WITHOUT ROWID")
        db.execute("INSERT INTO concept SELECT DISTINCT cui FROM term")
        # CROSS JOIN fixes the tables' order: a plan of SQLite's own took two minutes for 120,000 edges.
        linked = "FROM edge CROSS JOIN concept a ON a.id = cui CROSS JOIN concept b ON b.id = other WHERE relation"
        firsts = itemgetter(0)
        typed = "SELECT cui, name FROM type CROSS JOIN concept ON id = cui"
        for name, query, value in (
            ("CUI2term", by_rank, lambda group: list(map(firsts, group))),
            ("CUI2pt", by_rank, lambda group: group[0][0]),
            ("term2CUI", "SELECT term, cui FROM term ORDER BY 1, 2", lambda group: list(map(firsts, group))),
            ("is_a", f"SELECT cui, other {linked} = 'is_a' ORDER BY 1, 2", lambda group: list(map(firsts, group))),
            ("relations", f"SELECT cui, relation, other {linked} != 'is_a' ORDER BY 1, 2, 3", list),
            ("types", f"{typed} ORDER BY 1, 2", lambda group: group[0][0]),
        ):
            _dump(folder / f"{name}.json", db.execute(query), value)
        db.close()
    return list(reports.values())
