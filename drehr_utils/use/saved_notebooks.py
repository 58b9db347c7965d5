"""Keeps protected text out of saved and committed notebooks: two hooks, offered and never set by themselves.

Jupyter's, in `~/.jupyter/jupyter_server_config.py`:

    c.FileContentsManager.pre_save_hook = "drehr_utils.use.saved_notebooks.strip_protected"

Git's, as `.git/hooks/pre-commit` (executable), refuses what was saved without it:

    #!/bin/sh
    git diff --cached --name-only -z --diff-filter=d -- '*.ipynb' |
        xargs -0 -r python -m drehr_utils.use.saved_notebooks
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drehr_utils.errors import DataError
from drehr_utils.files import naming
from drehr_utils.profiles import PROFILES, ROOT, as_written

_QUOTED = re.compile(r"""(["'])((?:\\.|(?!\1).)*)\1""", re.DOTALL)
_BARE_PATH = re.compile(r"(?<![\w.~/\"'])(?:~|\.\.)?/[\w./~-]+")
_ELSEWHERE = re.compile(  # where a path may come from, unseen, or the notes' text itself
    r"\bPath\.home\(|\b(environ|getenv|expandvars|expanduser)\b|%env\b|\binput\(|\bPath\([\"']/[\"']\)|"
    r"\b(r?glob|walk|listdir|scandir|cwd|getcwd|chdir)\(|[\"']drehr-search\b|\bsearch\.main\(|\buse\.search\b|"
    r"\buse import search as\b|\bsys\.(argv|stdin)\b|"
    # a database or a server
    r"\bread_(sql|gbq)|\bcreate_engine\(|\bconnect\(|\bbigquery\b|\burlopen\(|\brequests\.|\w\([rf]*[\"']\w+://"
)
_IN_SHELL = re.compile(r"\$\{?\w|drehr-search")  # a variable's value is unseen
_PLACEHOLDER = re.compile(r"[*?\[{%]")  # in a path: of glob, of a format
_SHELL = re.compile(r"(?s:\A\s*%%.*)|(?m:^\s*[!%].*)")  # a cell (%%bash) or a line for the shell: !head notes/1.txt


def strip_protected(model: Mapping[str, Any], path: str = "", contents_manager: Any = None, **_: Any) -> None:
    """Takes the outputs out of a notebook that is about to be saved, in place, where `is_protected` says so.

    The arguments are those of jupyter_server's pre_save_hook, which goes on saving where a hook fails: so in doubt the
    outputs go."""
    if model.get("type") != "notebook" or not (notebook := model.get("content")):
        return
    try:
        folder = contents_manager and Path(contents_manager.root_dir, path.lstrip("/")).parent
        protected = is_protected(notebook, folder)
    except Exception:
        protected = True
    if not protected:
        return
    notebook.get("metadata", {}).pop("widgets", None)
    for cell in notebook.get("cells", []):
        if cell.get("cell_type") == "code":
            cell["outputs"], cell["execution_count"] = [], None
    if contents_manager is not None:
        contents_manager.log.warning("%s: saved without outputs, which may hold protected text", path)


def is_protected(notebook: Mapping[str, Any], folder: Path | None = None) -> bool:
    """Whether the code of a notebook that lies in `folder` may have read protected text: it names a protected profile
    or a file or folder that git doesn't track in this checkout, asks `drehr-search`, takes what may be a path from the
    user's home, the environment or `input()`, lists a folder, or DREHR_PROFILE names such a profile for all."""
    sources = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    names = {name for source in sources for name in _names(source)}
    own = _tracked()
    here = [folder.resolve()] if folder else []
    folders = [*here, ROOT / "notebooks", ROOT, *filter(Path.is_dir, own)]
    above = {place for start in here for place in (start, *start.parents)}  # named alone, they open nothing
    return (
        any(map(_is_protected_profile, [os.environ.get("DREHR_PROFILE", ""), *names]))
        or any(_IN_SHELL.search(line) for source in sources for line in _SHELL.findall(source))
        or any(map(_ELSEWHERE.search, sources))
        or any(_is_foreign(name, own | above, folders, [*here, ROOT / "notebooks"]) for name in names)
    )


def _names(source: str) -> Iterator[str]:
    for part in (source, *source.splitlines()):  # the apostrophe of a comment may hide what is quoted after it
        yield from (match[2] for match in _QUOTED.finditer(part))
    yield from (match[0] for match in _BARE_PATH.finditer(source))
    yield from (word for line in _SHELL.findall(source) for word in line.split())


def _is_protected_profile(name: str) -> bool:
    if name not in PROFILES and not name.endswith(".toml"):
        return False
    try:
        return as_written(str(Path(name).expanduser()) if name.endswith(".toml") else name).protected
    except DataError:
        return True  # of a file that can't be read, nobody knows


def _tracked() -> frozenset[Path]:
    """The files of the checkout that git tracks, and their folders; none where it isn't git's, so that any path that a
    notebook names is foreign. Raises OSError where there is no git."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False).stdout
    files = [Path(os.fsdecode(name)) for name in listed.split(b"\0") if name]
    return frozenset(ROOT.resolve() / path for file in files for path in (file, *file.parents))


def _is_foreign(name: str, own: Collection[Path], folders: Collection[Path], here: Collection[Path]) -> bool:
    """Whether it is an existing path, as a notebook in one of `folders` sees it (one of `here`, where it begins with
    ..) or as the last piece of a path that begins there (Path("../data") / name), and none of `own`, the project's open
    data; of a pattern or a format ("notes/{i}.txt"), the folder before it."""
    if name.startswith("data/cache/{profile.name}/"):  # whether that profile is protected is asked by itself
        return False
    if _PLACEHOLDER.search(name):
        name = _PLACEHOLDER.split(name)[0].rpartition("/")[0]
        if not name:
            return False
    try:
        bases = here if name.startswith("..") else folders
        paths = [(base / Path(name).expanduser()).resolve() for base in bases]
        return any(path != Path("/") and path.exists() and path not in own for path in paths)
    except (OSError, RuntimeError, ValueError):  # longer than a path can be, another user's home, a null character
        return False


def main(paths: Sequence[str]) -> int:
    """Names the notebooks among `paths` that are protected and hold outputs, as they are to be committed; 1 if there is
    one."""
    refused = []
    for path in map(Path, paths):
        staged = subprocess.run(["git", "show", f":./{path.as_posix()}"], capture_output=True, check=False)
        if staged.returncode:
            raise DataError(f"{path.name}: git has it not among what is to be committed; git add it first")
        with naming(path):
            notebook = json.loads(staged.stdout)
            held = any(cell.get("outputs") for cell in notebook["cells"]) or notebook.get("metadata", {}).get("widgets")
            if held and is_protected(notebook, path.parent):
                refused.append(path)
    for path in refused:
        print(f"{path}: holds outputs that may be protected text; clear them, or save it under another profile")
    return bool(refused)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except DataError as error:
        sys.exit(str(error))
