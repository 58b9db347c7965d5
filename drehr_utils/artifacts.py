"""Artifacts under data/cache/<profile>/, named by a digest of what made them: a rerun redoes only what changed.

A digest holds what a result depends on: the code that makes it, as loaded and not as it lies on disk now, without
docstrings and comments; the content of its inputs, never their paths; versions, settings, a language model's answers.
Two processes that want one artifact don't make it twice, and a killed one leaves nothing half made.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fcntl
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, lru_cache
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

from drehr_utils import files
from drehr_utils.errors import DataError

T = TypeVar("T")
PACKAGE = Path(__file__).resolve().parent
_NAME = PACKAGE.name
# A profile's values reach a digest as the inputs they are, and where an artifact lies changes nothing in it.
_NOT_CODE = {f"{_NAME}.profiles", f"{_NAME}.artifacts"}

# --- the code as it was loaded ----------------------------------------------------------------------------------------

_loaded: dict[str, str] = {}  # module -> its source when it was loaded: a file edited under a live kernel is another


class _Remembering(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        _loaded[module.__name__] = Path(self.path).read_text(encoding="utf-8")
        for known in (_tree, _tree_digest, _bindings, _imported, _reachable):
            known.cache_clear()  # importlib.reload
        super().exec_module(module)


class _Finder(PathFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> Any:
        spec = super().find_spec(fullname, path, target) if fullname.startswith(f"{_NAME}.") else None
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Remembering(spec.loader.name, spec.loader.path)
        return spec


def _file(module: str) -> Path:
    path = PACKAGE.joinpath(*module.split(".")[1:])
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def _tree(module: str) -> ast.Module:
    """The module's syntax without docstrings; comments and layout aren't in a tree."""
    if module not in _loaded:  # imported inside a function that hasn't run yet
        _loaded[module] = _file(module).read_text(encoding="utf-8")
    tree = ast.parse(_loaded[module])
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return tree


@cache
def _imported(tree: ast.AST) -> frozenset[str]:
    """Modules of this package that import statements in a tree name."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return frozenset(n for n in names - _NOT_CODE if n.startswith(f"{_NAME}.") and _file(n).exists())


@cache
def _reachable(module: str) -> frozenset[str]:
    """The module and all that it imports, directly or not."""
    found, left = {module}, [module]
    while left:
        new = _imported(_tree(left.pop())) - found
        found |= new
        left += new
    return frozenset(found)


@cache
def _bindings(module: str) -> dict[str, list[ast.stmt]]:
    """What binds each name of the module: definitions, assignments and imports."""
    found: dict[str, list[ast.stmt]] = {}
    for node in _tree(module).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name.split(".")[0] for alias in node.names]
        else:
            names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
        for name in names:
            found.setdefault(name, []).append(node)
    return found


@cache
def _tree_digest(module: str) -> str:
    return _sha256(ast.dump(_tree(module)))


def _trees(modules: Iterable[str]) -> dict[str, str]:
    return {module: _tree_digest(module) for module in modules}


def _code(part: Any) -> dict[str, str]:
    """Of a module: it and all that it imports. Of a function or class: its definition, whatever of its module it names,
    and the modules that these name, with all that they import. Name -> digest of the syntax tree."""
    if inspect.ismodule(part):
        return _trees(_reachable(part.__spec__.name))
    part = inspect.unwrap(part)
    spec = sys.modules[part.__module__].__spec__  # of `python -m` too, where the module's name is __main__
    module = spec.name if spec else part.__module__
    if not module.startswith(f"{_NAME}."):
        return {part.__qualname__: _sha256(inspect.getsource(part))}  # a notebook's own
    found: dict[str, str] = {}
    modules: set[str] = set()
    left, seen = [part.__qualname__.split(".")[0]], set()
    while left:
        if (name := left.pop()) in seen:
            continue
        seen.add(name)
        for at, node in enumerate(_bindings(module).get(name, ())):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                found[f"{module}.{name}, {at}"] = _sha256(ast.dump(node))
            left += [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
            for imported in _imported(node):
                modules |= _reachable(imported)
    return found | _trees(modules)


# --- digests ----------------------------------------------------------------------------------------------------------


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@lru_cache(maxsize=4096)
def _content(path: Path, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _plain(part: Any) -> Any:
    """What stands for `part` in a digest."""
    if isinstance(part, ModuleType) or inspect.isclass(part) or inspect.isroutine(part) or hasattr(part, "__wrapped__"):
        return _code(part)
    if isinstance(part, Path):
        if part.is_dir():
            inside = (p for p in files.walk(part) if p.is_file() and p.suffix != ".md")
            return {p.relative_to(part).as_posix(): _plain(p) for p in inside}
        if not part.exists():
            raise DataError(f"{part.name}: no such file or folder in {part.parent.name or 'the root'}/")
        stat = part.stat()
        return _content(part, stat.st_size, stat.st_mtime_ns)
    if dataclasses.is_dataclass(part):  # one that comes later, with a default, changes no digest
        found = {}
        for f in dataclasses.fields(part):
            value = getattr(part, f.name)
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            if type(value) is not type(default) or value != default:
                found[f.name] = _plain(value)
        return found
    if isinstance(part, dict):
        return {str(key): _plain(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    if isinstance(part, set | frozenset):
        return sorted(part)
    if isinstance(part, np.ndarray):
        return [str(part.dtype), list(part.shape), hashlib.sha256(np.ascontiguousarray(part)).hexdigest()]
    if part is None or isinstance(part, str | int | float | bool):
        return part
    raise TypeError(f"no digest is defined for {type(part).__name__}")


def digest(*parts: Any) -> str:
    """12 hex digits of SHA-256 over strings, numbers, arrays, dataclasses (what differs from their defaults), files and
    folders (their content, but a model's card), modules, functions and classes (the code they run, see _code)."""
    return _sha256(json.dumps(_plain(parts), sort_keys=True))[:12]


# --- made once --------------------------------------------------------------------------------------------------------


@contextmanager
def lock(path: Path, doing: str, wait: bool = True) -> Iterator[None]:
    """Holds the lock file `path` for this process; it says who holds it, and goes with a process that is killed.

    While another process has it: waits and says for whom, or raises DataError with the other's name if not `wait`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.seek(0)
            other = handle.read().strip() or "another process"
            if not wait:
                raise DataError(f"{other}; wait for it, or stop it, then run this again") from None
            print(f"Waiting for {other} ...", file=sys.stderr, flush=True)
            fcntl.flock(handle, fcntl.LOCK_EX)
        handle.truncate(0)
        handle.write(f"process {os.getpid()} on {platform.node()}, {doing} since {time.strftime('%H:%M, %d %B')}\n")
        handle.flush()
        yield


def made_once(path: Path, make: Callable[[Path], None]) -> None:
    """Makes `path`, file or folder, where it isn't there: `make` fills a partial one, which then takes its name."""
    if path.exists():
        return
    held = path.with_name(f".{path.name}.lock")
    with lock(held, f"making {path.name}"):
        if path.exists():  # by the process that was waited for
            return
        partial = path.with_name(f"partial-{path.name}")
        remove(partial)  # a killed run's: whoever makes it holds the lock
        make(partial)
        os.replace(partial, path)
        held.unlink()  # who waits for it finds the artifact


def remove(path: Path) -> None:
    """Removes a file or folder, if it is there; another process may be at it, too."""
    if path.is_dir() and not path.is_symlink():
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


def sweep(folder: Path) -> None:
    """Removes what killed runs left half made under `folder`, and what nobody is making now."""
    for partial in list(folder.rglob("partial-*")):
        if writer := re.match(r"partial-(\d+)-", partial.name):  # files.write_atomically's, without a lock
            if not _is_running(int(writer[1])):
                remove(partial)
            continue
        held = partial.with_name(f".{partial.name.removeprefix('partial-')}.lock")
        with suppress(DataError), lock(held, "sweeping", wait=False):
            remove(partial)


def _formats(suffix: str) -> tuple[Callable[[Any, Path], None], Callable[[Path], Any]]:
    import pandas as pd

    def load_arrays(path: Path) -> tuple[np.ndarray, ...]:
        with np.load(path) as arrays:
            return tuple(arrays[name] for name in arrays.files)

    return {
        ".npy": (lambda array, path: np.save(path, array), np.load),
        ".npz": (lambda arrays, path: np.savez(path, *arrays), load_arrays),
        ".parquet": (lambda frame, path: frame.to_parquet(path, index=False), pd.read_parquet),
    }[suffix]


def cached_file(path: Path, make: Callable[[], T]) -> T:
    """What `path` holds, made and saved first where it isn't there: never half a file, and by one process at a time.

    Its name ends in .npy, .npz (a tuple of arrays) or .parquet (a frame, without its index)."""
    save, load = _formats(path.suffix)
    made_once(path, lambda partial: save(make(), partial))
    return load(path)


def cached_folder(path: Path, make: Callable[[Path], None]) -> Path:
    """The folder `path`; where it isn't there, `make` fills another one, which then takes its name."""

    def fill(partial: Path) -> None:
        partial.mkdir(parents=True)
        make(partial)

    made_once(path, fill)
    return path


sys.meta_path.insert(0, _Finder)
for _name, _module in list(sys.modules.items()):  # those that this module itself needs
    if _name.startswith(f"{_NAME}.") and getattr(_module, "__file__", None):
        _loaded[_name] = Path(_module.__file__).read_text(encoding="utf-8")
