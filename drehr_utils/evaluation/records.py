"""Records: what takes longer than a run should, committed with its date and machine, and remade by a command."""

from __future__ import annotations

import argparse
import datetime
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from drehr_utils import artifacts, files
from drehr_utils.errors import DataError
from drehr_utils.evaluation import intervals
from drehr_utils.profiles import ROOT, Profile, load_profile
from drehr_utils.training.encoders import describe_device

REMAKE = "restore it, or remake it by its command"
_DIGESTS = {"digest": str, "config": str}  # a digest may look like a number: 4846e1086689


def maker(profile: Profile) -> Profile:
    """The profile that made the records which `profile` shows."""
    return load_profile("full") if profile.in_place else profile


@dataclass(frozen=True)
class Record:
    """A CSV table (`name`.gz: gzipped) that grows by a group of rows at a time.

    It lies in data/, committed, for a profile whose results are; of those that `full` makes for others to show,
    `runs/`, `full`'s too. Any other profile's lies in its cache."""

    name: str

    def path(self, profile: Profile) -> Path:
        committed = profile.in_place or profile.recorded and self.name.startswith("runs/")
        return (ROOT / "data" if committed else profile.cache) / self.name

    def read(self, profile: Profile) -> pd.DataFrame:
        path = self.path(profile)
        with files.naming(path, REMAKE):
            return pd.read_csv(path, dtype=_DIGESTS) if path.exists() else pd.DataFrame()

    def _parts(self, profile: Profile, key: dict[str, str | float]) -> tuple[pd.DataFrame, pd.DataFrame]:
        """The rows with this key, and the others."""
        done = self.read(profile)
        own = (done[list(key)] == pd.Series(key)).all(axis=1) if len(done) else pd.Series(dtype=bool)
        return done[own], done[~own]

    def fault(self, profile: Profile, key: dict[str, str | float], digest: str) -> list[str]:
        """A line for `--check` where there are no rows with this key, or they were made of something else."""
        own, _ = self._parts(profile, key)
        if (made_of := str(own["digest"].iloc[0]) if len(own) else None) == digest:
            return []
        said = ", ".join(f"{name} {value}" for name, value in key.items())
        return [f"{said}: {'not there' if made_of is None else 'other settings or data, or another start'}"]

    def add(
        self, profile: Profile, key: dict[str, str | float], make: Callable[[], pd.DataFrame], remake: bool = False,
        digest: str | None = None,
    ) -> bool:  # fmt: skip
        """Adds `make()`'s rows, to 4 decimals, with `key`, minutes, date and machine; whether it made them.

        `key`, columns with their values, tells the groups of rows apart; rows with this key stay as they are (`remake`:
        are replaced). `digest`, a column too: of what the rows are made of; rows that were made of something else are
        replaced."""

        def is_there(own: pd.DataFrame) -> bool:
            return len(own) > 0 and not remake and (digest is None or str(own["digest"].iloc[0]) == digest)

        if is_there(self._parts(profile, key)[0]):
            return False
        begun = time.time()
        rows = make().round(4)
        minutes = round((time.time() - begun) / 60, 1)
        date, machine = datetime.date.today().isoformat(), f"{platform.machine()}, {describe_device()}"
        rows = pd.DataFrame(key, index=rows.index).join(rows).assign(minutes=minutes, date=date, machine=machine)
        rows = rows if digest is None else rows.assign(digest=digest)
        path = self.path(profile)
        with artifacts.lock(path.with_name(f".{path.name}.lock"), f"adding to {path.name}"):
            own, kept = self._parts(profile, key)  # another process may have added rows meanwhile
            if is_there(own):
                return False
            table = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
            files.write_atomically(path, table.to_csv(index=False).encode())
        print(f"{path.name}: {', '.join(map(str, key.values()))} ({minutes} min)", flush=True)
        return True


# --- the commands that make records, or measure what has none --------------------------------------------------------


OPTIONS = {"--remake": "also what the records hold", "--check": "say which are out of date, and make none"}


def command(doc: str, profile: str = "full", options: Sequence[str] = tuple(OPTIONS)) -> argparse.ArgumentParser:
    """A parser with those of OPTIONS, and `--profile`."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in options:
        parser.add_argument(option, action="store_true", help=OPTIONS[option])
    parser.add_argument("--profile", default=profile, help=f"default: {profile}")
    return parser


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Profile]:
    """The options and the profile that they name; a profile that can't be loaded ends the command with why."""
    options = parser.parse_args(arguments)
    try:
        profile = load_profile(options.profile)
    except DataError as error:
        parser.error(str(error))
    if hasattr(options, "check") and profile.in_place:  # the option of `command`, whose records `full` makes
        parser.error(f"{profile.name} shows the records that full makes; leave --profile out")
    return options, profile


def refuse_unknown(parser: argparse.ArgumentParser, what: str, asked: Sequence[str] | None, known: Iterable[str]):
    """Ends the command, with the names that there are, where it was asked for one that there isn't."""
    if unknown := sorted(set(asked or ()) - set(known)):
        parser.error(f"no {what} {unknown[0]!r}; there are {', '.join(known)}")


def end_check(out_of_date: Sequence[str]) -> None:
    """Prints what `--check` found, a line each, and exits: with 1 where it found anything."""
    print("\n".join(out_of_date) or "none out of date")
    raise SystemExit(int(bool(out_of_date)))


def printed(profile: Profile, values: Mapping[str, pd.DataFrame], start: str) -> pd.DataFrame:
    """What a command prints of systems' values: mean, 95% interval, and p against the system `start`, by metric."""
    rows = [
        intervals.result_rows(name, "", "", found, profile.resampling, None if name == start else values[start])
        for name, found in values.items()
    ]
    return pd.concat(rows)[["system", "metric", "ours", "low", "high", "p"]].round(
        {"ours": 1, "low": 1, "high": 1, "p": 4}
    )
