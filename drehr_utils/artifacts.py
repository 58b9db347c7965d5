"""Artifacts under data/cache/<profile>/, named by a hash of what made them: a rerun redoes only what changed."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

T = TypeVar("T")


def _plain(part: Any) -> Any:
    """What stands for `part` in a hash: a file's bytes, a module's source, a dataclass's fields."""
    if isinstance(part, ModuleType) or inspect.isclass(part) or inspect.isfunction(part):
        return inspect.getsource(part)
    if isinstance(part, Path):
        if part.is_dir():
            return {p.relative_to(part).as_posix(): _plain(p) for p in sorted(part.rglob("*")) if p.is_file()}
        with open(part, "rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        return {f.name: _plain(getattr(part, f.name)) for f in dataclasses.fields(part)}
    if isinstance(part, dict):
        return {str(key): _plain(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [_plain(value) for value in part]
    if part is None or isinstance(part, str | int | float | bool):
        return part
    raise TypeError(f"no hash is defined for {type(part).__name__}")


def digest(*parts: Any) -> str:
    """12 hex digits of SHA-256 over strings, numbers, dataclasses, files (their bytes) and modules (their source)."""
    return hashlib.sha256(json.dumps(_plain(parts), sort_keys=True).encode()).hexdigest()[:12]


def cached(path: Path, make: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]) -> T:
    """`load(path)` if it is there, else `make()`, saved first beside and then under the name: never half a file."""
    if not path.exists():
        partial = path.with_name(f"partial-{os.getpid()}-{path.name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.is_dir():
            shutil.rmtree(partial)
        save(make(), partial)
        os.replace(partial, path)
    return load(path)
