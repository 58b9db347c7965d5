"""Files read and written the same way everywhere: whole or not at all, and with the file, row and field named."""

from __future__ import annotations

import csv
import errno
import gzip
import json
import os
import re
import resource
import sqlite3
import subprocess
import sys
import sysconfig
import threading
import time
import traceback
import unicodedata
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO

from drehr_utils.errors import DataError

_STRINGS = ("_id", "id", "text", "type", "note_id", "entity", "aspect_heading", "task", "text_sha256", "answer")
MAX_FIELD = 1 << 24  # characters; what is longer is no note, but all that follows a quote that nothing closes
csv.field_size_limit(MAX_FIELD)


def project_root() -> Path:
    """The folder that holds data/ and figures/: DREHR_ROOT, else the checkout that this package lies in, else the
    current folder or the first above it that has data/open_notes (a package that was installed without `-e`), else what
    a wheel brings: graph and weights, for drehr-search."""
    if given := os.environ.get("DREHR_ROOT"):
        return Path(given).absolute()
    beside = Path(__file__).resolve().parents[1]
    places = (beside, Path.cwd(), *Path.cwd().parents)
    brought = Path(sysconfig.get_path("data")) / "share/drehr_utils"
    return next((place for place in places if (place / "data/open_notes").is_dir()), brought)


def short_name(path: Path) -> str:
    # The last parts say which file; an absolute path would leak a folder layout into a committed notebook.
    return "/".join(path.parts[-3:]) if path.parent.name == "qrels" else "/".join(path.parts[-2:])


HINT = "data/README.md says which files a data set has"


def open_file(path: Path, mode: str = "rb", hint: str = HINT, **options: str) -> IO:
    """A file to read, or its .gz where only that is there; gunzipped by its name.

    Raises DataError where neither is there; `hint` says where it comes from."""
    found = next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.is_file()), None)
    if found is None:
        raise DataError(f"{short_name(path)}: no such file, with or without .gz; {hint}")
    with naming(found, hint):
        return (gzip.open if found.suffix == ".gz" else open)(found, mode, **options)


_DISK_FAULTS = {
    errno.ENOSPC: "the disk is full; make room",
    errno.EDQUOT: "your share of the disk is full; make room",
    errno.EROFS: "can't be written to (a read-only disk); make it writable, or name another folder",
    errno.EACCES: "can't be written to (another user's); make it writable, or name another folder",
}


def disk_fault(error: BaseException) -> str:
    """What is wrong with the disk and what to do, "" for another error. Libraries have their own errors for it, which
    all give the system's number."""
    full = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL
    number = errno.ENOSPC if full else getattr(error, "errno", 0)
    return next((why for no, why in _DISK_FAULTS.items() if no == number or f"os error {no})" in str(error)), "")


@contextmanager
def naming(path: Path, hint: str = HINT) -> Iterator[None]:
    """What the block's libraries raise at a file that can't be read is a DataError: its name, and no word of it."""
    where = short_name(path)
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{where}: no such file; {hint}") from None
    except UnicodeError:
        raise DataError(f"{where}: not UTF-8; save the file as UTF-8") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{where}, row {error.lineno}, column {error.colno}: not JSON ({error.msg}); {hint}") from None
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise DataError(f"{where}: broken gzip; copy or fetch the file again") from None
    except OSError as error:
        raise DataError(f"{where}: {error.strerror or type(error).__name__}; {hint}") from None
    except (ValueError, TypeError, LookupError, RecursionError, csv.Error) as error:
        raise DataError(f"{where}: not what it should hold ({type(error).__name__}); {hint}") from None


# --- lines -----------------------------------------------------------------------------------------------------------

Skip = Callable[[str], None]  # told which file, row and field is left out and why, never what stands there


def _fault(message: str, skip: Skip | None) -> None:
    if skip is None:
        raise DataError(message) from None
    skip(message)


def read_text_lines(
    path: Path, hint: str = HINT, skip: Skip | None = None, most: int | None = None
) -> Iterator[tuple[int, str]]:
    """Row number and text of each line of a file, or of its .gz where only that is there (see open_file).

    Raises DataError, or tells `skip`, where a line isn't UTF-8, is longer than `most` bytes, or the gzip is broken."""
    row, most = 0, MAX_FIELD if most is None else most
    with open_file(path, hint=hint) as file:
        where, read = short_name(Path(file.name)), partial(file.readline, most)
        try:
            for row, line in enumerate(iter(read, b""), 1):
                if len(line) == most > 0 and not line.endswith(b"\n") and (rest := read()):
                    _fault(f"{where}, row {row}: longer than {most} bytes; is a line break missing?", skip)
                    while rest and not rest.endswith(b"\n"):
                        rest = read()
                    continue
                try:
                    text = line.decode("utf-8-sig" if row == 1 else "utf-8").rstrip("\r\n")
                except UnicodeDecodeError:
                    _fault(f"{where}, row {row}: not UTF-8; save the file as UTF-8", skip)
                else:
                    yield row, text
        except (EOFError, zlib.error, gzip.BadGzipFile):
            _fault(f"{where}, after row {row}: broken gzip; copy or fetch the file again", skip)


def read_json_lines(
    path: Path, fields: tuple[str, ...], optional: tuple[str, ...] = (), skip: Skip | None = None
) -> Iterator[tuple[int, str, dict]]:
    """Row number, short file name and object of each line of a .jsonl or .jsonl.gz file that has all `fields`, and
    `optional` ones as strings, as null or not at all.

    Raises DataError, naming file, row and field, where a line isn't such an object, or tells `skip` and goes on."""
    where = short_name(path)
    for row, line in read_text_lines(path, skip=skip):
        if line.strip():
            try:
                record = _record(line, fields, optional)
            except DataError as fault:
                _fault(f"{where}, row {row}{fault}", skip)
            else:
                yield row, where, record


def _record(line: str, fields: tuple[str, ...], optional: tuple[str, ...]) -> dict:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # of ValueErrors, a whole number of thousands of digits is another
        at = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise DataError(f"{at}: not JSON; write one object a line") from None
    if not isinstance(record, dict):
        raise DataError(": not a JSON object; write one object a line")
    for field in fields:
        if field not in record:
            raise DataError(f", field {field}: missing; each line needs {', '.join(fields)}")
        if field in _STRINGS and not isinstance(record[field], str):
            raise DataError(f", field {field}: not a string; quote it")
    for field in optional:
        if not isinstance(record.get(field), str | None):
            raise DataError(f", field {field}: not a string; quote it")
    for field in (*fields, *optional):
        if isinstance(text := record.get(field), str) and not is_utf8(text):
            raise DataError(f", field {field}: half of a surrogate pair, which is no character; take it out")
    return record


_SAME = str.maketrans({"’": "'", "‘": "'", "‐": "-", "‑": "-", "\u00ad": None, "\u200b": None, "\ufeff": None})


def same_characters(text: str) -> str:
    """The text with the characters that a keyboard has: accents composed (NFC), apostrophes and hyphens plain, without
    soft hyphens and zero-width spaces. A word processor's texts and a graph's names would not meet otherwise."""
    return text if text.isascii() else unicodedata.normalize("NFC", text).translate(_SAME)


def is_utf8(value: str) -> bool:
    """Whether `iter_rows` could decode the bytes of a value."""
    return value.isascii() or not any("\ud800" <= c <= "\udfff" for c in value)


_COLUMN_NAME = re.compile(r"[a-z][a-z0-9_ -]{0,40}")
_USUAL_COLUMNS = {"text", "note_id", "subject_id", "hadm_id"}


def iter_rows(path: Path, columns: Iterable[str], optional: Iterable[str] = ()) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV table as (row number in the file, the header being row 1; dict of the columns asked for, and of the
    `optional` ones that there are).

    Column names are compared in lower case, so that MIMIC-III's and MIMIC-IV's headers both fit. Raises DataError
    for a missing file or column, a row that is cut short or too long, or a file that is not CSV."""
    path, columns, row = Path(path), tuple(columns), 1
    where = short_name(path)
    # surrogateescape keeps bytes that are not UTF-8 visible, so that the row that holds them can be named.
    with open_file(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as handle:
        try:
            reader = csv.reader(handle, strict=True)  # a quote that nothing closes would take in the rows after it
            header = [name.strip().lower() for name in next(reader, [])]
            if twice := [name for name in (*columns, *optional) if header.count(name) > 1]:
                raise DataError(f"{where}, row 1: two columns are named {twice[0]}; rename one")
            if missing := ", ".join(name for name in columns if name not in header):
                known = {*columns, *optional, *_USUAL_COLUMNS} & {*header}
                said = f"the header: {', '.join(header[:20])}" if header else "the file is empty"
                if header and not (known and all(map(_COLUMN_NAME.fullmatch, header))):  # it may be a note
                    said = (
                        f"cells in row 1: {len(header)}, not shown, for none has a known column's name{_remedy(header)}"
                    )
                raise DataError(f"{where}, row 1: column {missing} is missing; {said}")
            at = {name: header.index(name) for name in (*columns, *(o for o in optional if o in header))}
            for row, values in enumerate(reader, start=2):
                if short := [name for name, i in at.items() if values and i >= len(values)]:
                    raise DataError(f"{where}, row {row}: no value for field {short[0]} (the row is cut short)")
                if any(values[len(header) :]):  # its text is cut at a comma, and cells are not what they seem
                    raise DataError(
                        f"{where}, row {row}: {len(values)} cells where the header has {len(header)}; quote a text "
                        'that has commas or quotes, and double its quotes ("")'
                    )
                if values:
                    yield row, {name: values[i] for name, i in at.items()}
        except (csv.Error, EOFError, zlib.error, gzip.BadGzipFile) as error:
            hint = "; quote a text that has quotes, and double them" if isinstance(error, csv.Error) else ""
            raise DataError(f"{where}, after row {row}: not a readable CSV table ({error}){hint}") from None


def _remedy(header: Sequence[str]) -> str:
    if any("\0" in cell or not is_utf8(cell) for cell in header):
        return "; save the table as UTF-8"
    return "; separate cells by commas" if len(header) == 1 and re.search("[;\t|]", header[0]) else ""


def refuse(where: str, row: int, wrong: dict[str, bool]) -> None:
    """Raises DataError with the first of the sentences about a file's row that is true."""
    for what in (what for what, is_so in wrong.items() if is_so):
        raise DataError(f"{where}, row {row}, {what}")


def tab_rows(
    path: Path, columns: Sequence[str], hint: str = HINT, filled: Sequence[str] = ()
) -> Iterator[tuple[int, str, dict[str, str]]]:
    """Row number, short file name and cells, stripped, of each line of a tab-separated table whose header has
    `columns`; a quotation mark is a character like any other.

    Raises DataError for a missing file or column, bytes that are not UTF-8, a line with fewer or more cells, and an
    empty cell in a column of `filled`."""
    where, lines, has = short_name(path), read_text_lines(path, hint), ", ".join(columns)
    header = [cell.strip() for cell in next(lines, (1, ""))[1].split("\t")]
    refuse(where, 1, {f"field {c}: missing column; the header is {has}": c not in header for c in columns})
    for row, line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if line and len(cells) != len(header):
            raise DataError(f"{where}, row {row}: {len(cells)} fields, the header has {len(header)}; separate by tabs")
        if line:
            found = dict(zip(header, cells, strict=True))
            refuse(where, row, {f"field {name}: empty; fill it": not found[name] for name in filled})
            yield row, where, found


# --- what is written -------------------------------------------------------------------------------------------------


def keep_private(folder: Path) -> None:
    """From here on this process writes files that its user alone can read (umask 077), `folder` too, if it is there;
    messages are hidden (hide_messages)."""
    os.umask(0o077)
    hide_messages()
    if folder.is_dir() and folder.stat().st_mode & 0o077:
        folder.chmod(0o700)


def hide_messages() -> None:
    """From here on an error that nobody foresaw shows where it was raised, but not its message, nor those of the errors
    that led to it, which may quote a note: a terminal's output ends in logs, mails and bug reports. Nor does a crash
    leave a core file, which is all of memory, in the folder where it ran."""

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        traceback.print_tb(trace)
        said = f": {error}" if issubclass(kind, DataError) else " (its message may quote a note, so it is not shown)"
        print(f"{kind.__qualname__}{said}", file=sys.stderr)

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.excepthook = show
    # The second is asked where no caller is left to hear of an error, as in __del__.
    threading.excepthook = sys.unraisablehook = lambda found: show(found.exc_type, found.exc_value, found.exc_traceback)


def committed_on(path: Path) -> str:
    """The day on which git has the file as it is; "an earlier run" where it knows none."""
    git = ["git", "-C", str(path.parent), "log", "-1", "--format=%cs", "--", path.name]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "an earlier run"


def walk(folder: Path, refuse: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """What is below a folder but for folders, links followed, each place once, by its first name in the order of names.

    refuse: is told what can't be read, which else is passed over."""
    seen = set()
    for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(place)
        if real in seen:  # a link that leads back
            folders.clear()
            continue
        seen.add(real)
        folders.sort(key=lambda name, at=place: (os.path.islink(os.path.join(at, name)), name))
        yield from (Path(place, name) for name in sorted(names))


def write_atomically(path: Path, content: bytes) -> None:
    """The file whole or not at all, on a full disk, too; gzipped if its name says so, the same bytes for the same
    content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{os.getpid()}-{path.name}")
    try:
        partial.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


LOCKED_S = 600  # for which a statement waits for another process


def _write_ahead(database: sqlite3.Connection) -> None:
    """Goes over to a write-ahead log; of two processes that do so in a new file, sqlite lets neither wait."""
    until = time.monotonic() + LOCKED_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.01)


def open_database(path: Path | None, schema: str) -> sqlite3.Connection:
    """The sqlite database `path` with the tables of `schema`; None: one that goes with its connection, on disk too.

    Each statement is a transaction of its own unless one is begun, and is on disk when it returns: a kill costs what it
    interrupts and nothing else. Processes may share it. Raises DataError for a file that is no database."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
    database = sqlite3.connect(path or "", timeout=LOCKED_S, isolation_level=None, check_same_thread=False)
    try:
        _write_ahead(database)
        database.executescript(f"PRAGMA synchronous = NORMAL; {schema}")
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        raise DataError(f"{short_name(path)}: {error}; move it away, or restore it from a copy") from None
    return database
