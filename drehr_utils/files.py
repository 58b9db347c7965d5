"""Files read and written the same way everywhere: whole or not at all, and with the file, row and field named."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from drehr_utils.errors import DataError

_STRINGS = ("_id", "id", "text", "type", "note_id", "entity", "aspect_heading")


def read_json_lines(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[int, str, dict]]:
    """Row number, short file name and object of each line of a .jsonl or .jsonl.gz file that has all `fields`.

    Raises DataError, naming file, row and field, where a line isn't an object with them; names are never absolute.
    """
    where = short_name(path)
    for row, line in read_text_lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{where}, row {row}, column {error.colno}: not JSON; write one object a line") from None
        if not isinstance(record, dict):
            raise DataError(f"{where}, row {row}: not a JSON object; write one object a line")
        for field in fields:
            if field not in record:
                raise DataError(f"{where}, row {row}, field {field}: missing; each line needs {', '.join(fields)}")
            if field in _STRINGS and not isinstance(record[field], str):
                raise DataError(f"{where}, row {row}, field {field}: not a string; quote it")
        yield row, where, record


def short_name(path: Path) -> str:
    # The last parts say which file; an absolute path would leak a folder layout into a committed notebook.
    return "/".join(path.parts[-3:]) if path.parent.name == "qrels" else "/".join(path.parts[-2:])


def read_text_lines(
    path: Path, hint: str = "data/README.md says which files a data set has"
) -> Iterator[tuple[int, str]]:
    """Row number and text of each line of a file, or of its .gz where only that is there.

    Raises DataError where neither is there (`hint` says where it comes from), it isn't UTF-8 or the gzip is broken."""
    found = next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.exists()), None)
    if found is None:
        raise DataError(f"{short_name(path)}: no such file, with or without .gz; {hint}")
    where, row = short_name(found), 0
    try:
        with (gzip.open if found.suffix == ".gz" else open)(found, "rb") as file:
            for row, line in enumerate(file, 1):
                yield row, line.decode("utf-8-sig" if row == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{where}, row {row}: not UTF-8; save the file as UTF-8") from None
    except (EOFError, gzip.BadGzipFile, zlib.error):
        raise DataError(f"{where}, after row {row}: broken gzip; copy or fetch the file again") from None


def project_root() -> Path:
    """The folder that holds data/ and figures/: DREHR_ROOT, else the checkout that this package lies in, else the
    current folder or the first above it that has data/open_notes (a package that was installed without `-e`)."""
    if given := os.environ.get("DREHR_ROOT"):
        return Path(given).absolute()
    beside = Path(__file__).resolve().parents[1]
    places = [beside, *(folder for folder in (Path.cwd(), *Path.cwd().parents))]
    return next((place for place in places if (place / "data/open_notes").is_dir()), beside)


def write_atomically(path: Path, content: bytes) -> None:
    """The file whole or not at all; gzipped if its name says so, the same bytes for the same content."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{os.getpid()}-{path.name}")
    partial.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    os.replace(partial, path)
