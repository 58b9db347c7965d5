"""Which folder or table gave an index of notes which ids, where ids are places there: paths or rows, which another one
may have too. A JSON file beside the index, {folder or table: ids}."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Set
from pathlib import Path

from drehr_utils import files
from drehr_utils.errors import DataError


def claim(path: Path, place: Path, given: Iterable[str], replaced: Set[str]) -> set[str]:
    """Notes in `path` that `place` gave these ids; returns the ids of other places. An id is the first place's that
    gave it, while that is there. DataError where one of the notes that would be `replaced` is another place's."""
    there = {one: ids for one, ids in _read(path).items() if Path(one).exists()}
    own = [one for one in there if place.samefile(one)]  # by a link, too, or a path with ".."
    others = {one: ids for one, ids in there.items() if one not in own}
    for one, ids in others.items():
        if taken := ids & replaced:
            raise DataError(
                f"{place.absolute().name}: {len(taken)} of its notes would replace those of the same paths or rows "
                f"in {one}; if they are newer ones of the same, move that away; else give tables a column of ids, "
                "index one folder above both, or name another index"
            )
    elsewhere = set().union(*others.values())
    mine = set(given).union(*(there[one] for one in own)) - elsewhere
    _write(path, others | {own[0] if own else str(place.absolute()): mine})
    return elsewhere


def forget(path: Path, gone: Set[str]) -> None:
    """Takes the ids of removed notes out of `path`: one may hold a patient's name."""
    if path.exists():
        _write(path, {place: ids - gone for place, ids in _read(path).items()})


def _read(path: Path) -> dict[str, set[str]]:
    with files.naming(path, "delete it"):
        found = dict(json.loads(path.read_bytes())) if path.exists() else {}
        return {place: set(ids) for place, ids in found.items()}


def _write(path: Path, places: Mapping[str, Set[str]]) -> None:
    files.write_atomically(path, json.dumps({place: sorted(ids) for place, ids in places.items()}).encode())
