"""What a committed notebook's outputs belong to: its code cells, the files it read, the files it wrote.

The runner has each kernel log the files that it opens, and puts their digests into the notebook's metadata.
`python -m drehr_utils.use.provenance` names the notebooks whose cells, data, records or results have changed since.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from drehr_utils.files import naming, project_root

LOG = "DREHR_FILES_LOG"
# A kernel runs this first: libraries open files in too many places to ask each for a note. Only what lies in data/ and
# figures/ counts, but for the caches, whose artifacts are named by digests of those files and read them for that.
STARTUP = f'''
def _log_files():
    import os, sys
    root, log, seen = os.environ["DREHR_ROOT"], open(os.environ["{LOG}"], "a", buffering=1), set()

    def hook(event, args):
        if event not in ("open", "os.rename"):
            return
        path, kind = (args[1], "wrote") if event == "os.rename" else (args[0], "read")
        if isinstance(path, (str, os.PathLike)):
            if event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR):
                kind = "wrote"
            name = os.path.relpath(os.fspath(path), root)
            if name.startswith(("data/", "figures/")) and not name.startswith("data/cache/"):
                if (kind, name) not in seen:
                    seen.add((kind, name))
                    log.write(f"{{kind}}\\t{{name}}\\n")

    sys.addaudithook(hook)

_log_files()
del _log_files
'''


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _digest(root: Path, name: str) -> str | dict[str, str]:
    """Of a file; of the papers' ledgers, data/*.csv, of each paper's rows, for another paper's are nothing to them."""
    data = (root / name).read_bytes()
    rows = csv.DictReader(io.StringIO(data.decode())) if re.fullmatch(r"data/\w+\.csv", name) else None
    if rows is None or "paper" not in (rows.fieldnames or ()):
        return _sha256(data)
    by_paper: dict[str, list[dict]] = defaultdict(list)
    for row in rows:
        by_paper[row["paper"]].append(row)
    return {paper: _sha256(json.dumps(own).encode()) for paper, own in by_paper.items()}


def _cells(notebook: Mapping[str, Any]) -> str:
    """Digest of the code cells' sources, in order; prose may change without its outputs."""
    return _sha256(json.dumps(["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]).encode())


def digests(notebook: Mapping[str, Any], log: Iterable[str], root: Path) -> dict[str, Any]:
    """The cells' digest, and one for each file that was read, or written and kept; `log` has lines "kind<TAB>path"."""
    logged = {tuple(line.rstrip("\n").split("\t", 1)) for line in log}
    wrote = {path for kind, path in logged if kind == "wrote" and (root / path).is_file()}
    read = {path for kind, path in logged if kind == "read"}
    # Of a model, its weights too, which safetensors opens unseen
    read |= {path.replace("modules.json", "model.safetensors") for path in read if path.endswith("/modules.json")}
    read = {path for path in read if (root / path).is_file()} - wrote
    found = {name: {p: _digest(root, p) for p in sorted(ps)} for name, ps in (("read", read), ("wrote", wrote))}
    return {"cells": _cells(notebook)} | found


def _unchanged(now: str | dict[str, str], kept: str | dict[str, str]) -> bool:
    return now == kept or isinstance(now, dict) and isinstance(kept, dict) and kept.items() <= now.items()


def changed(path: Path, root: Path) -> list[str]:
    """What the notebook's outputs no longer belong to, each in words; empty if they are of what lies here.

    A text that lay among what was read, a model's card, may change as a notebook's prose may."""
    with naming(path, "restore it from git, or run ./run_all.sh"):
        notebook = json.loads(path.read_bytes())
        kept = notebook["metadata"].get("drehr")
        if kept is None:
            return ["holds no digests: it was not made by ./run_all.sh"]
        said = [] if kept["cells"] == _cells(notebook) else ["its code cells have changed"]
        for kind in ("read", "wrote"):
            for name, digest in kept[kind].items():
                if kind == "read" and name.endswith(".md"):
                    continue
                if not (root / name).is_file():
                    said.append(f"{name}, which it {kind}, is gone")
                elif not _unchanged(_digest(root, name), digest):
                    said.append(f"{name}, which it {kind}, has changed")
    return said


def main() -> int:
    root, stale = project_root(), 0
    for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb")):
        for what in changed(path, root):
            print(f"{path.name}: {what}; ./run_all.sh --only {path.name[:2]}")
            stale = 1
    return stale


if __name__ == "__main__":
    sys.exit(main())
