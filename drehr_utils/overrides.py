"""A frozen dataclass with other values in some of its fields, each named and of its field's type.

The values are a TOML file's (a profile of one's own) or a variable's of the environment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from drehr_utils.errors import DataError

_NEVER_0 = {
    "batch_size", "bootstrap_samples", "chunks_per_note", "epochs", "lanes", "max_eval_patients", "max_steps",
    "max_train_notes", "mega_batch", "positives_per_chunk", "processes", "randomizations", "workers",
}  # fmt: skip


def changed(owner: Any, given: Mapping[str, Any], where: str, folder: Path, at: str = "") -> Any:
    """`owner`, a dataclass, with `given` in its fields. Raises DataError for a key or type that doesn't fit."""
    hints = get_type_hints(type(owner))
    changes = {}
    for key, value in given.items():
        if key not in hints:
            known = ", ".join(f.name for f in fields(owner))
            raise DataError(f"{where}, field {at}{key}: no such field; there are {known}")
        changes[key] = _typed(
            value, hints[key], getattr(owner, key), f"{where}, field {at}{key}", folder, where, at + key
        )
    return replace(owner, **changes)


def _in_range(value: float, place: str, at: str) -> float:
    """Raises DataError for a number that isn't finite, is negative or, where none is no choice, 0."""
    if not 0 <= value < math.inf or value == 0 and at.rpartition(".")[2] in _NEVER_0:
        least = "above 0" if at.rpartition(".")[2] in _NEVER_0 else "of at least 0"
        raise DataError(f"{place}: {value!r}; give a number {least}")
    return value


def _typed(value: Any, hint: Any, old: Any, place: str, folder: Path, where: str, at: str) -> Any:
    options = [t for t in (get_args(hint) if type(None) in get_args(hint) else (hint,)) if t is not type(None)]
    kind = options[0]
    if value == "none" and type(None) in get_args(hint):
        return None
    if is_dataclass(kind):
        if isinstance(value, Mapping):
            if old is None:  # a table of a list, whose fields without a default it must give
                needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
                if lacking := sorted(needed - value.keys()):
                    raise DataError(f"{place}: field {lacking[0]} is missing")
                old = kind(**dict.fromkeys(needed))
            return changed(old, value, where, folder, f"{at}.")
    elif get_origin(kind) is tuple:
        if isinstance(value, list):
            parts = get_args(kind)
            types = [parts[0]] * len(value) if parts[-1] is ... else parts
            if len(value) == len(types):
                return tuple(_typed(v, t, None, place, folder, where, at) for v, t in zip(value, types, strict=True))
    elif kind is Path:
        if isinstance(value, str):
            return folder / Path(value).expanduser()
    elif kind is float:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(_in_range(value, place, at))
    elif type(value) is kind:
        if kind is int:
            _in_range(value, place, at)
        if at.endswith("encoder") and (own := folder / Path(value).expanduser()).is_dir():  # a hub's name, or a folder
            return str(own)
        return value
    raise DataError(f"{place}: {value!r} is not {getattr(kind, '__name__', kind)}")
