"""Records: what takes longer than a run should, committed with its date and machine, and remade by a command."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from drehr_utils import artifacts, files
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.training.encoders import describe_device

REMAKE = "restore it, or remake it by its command"


@dataclass(frozen=True)
class Record:
    """A CSV table that grows by a group of rows at a time.

    It lies in data/, committed, for a profile whose results are; another profile's lies in its cache."""

    name: str

    def path(self, profile: Profile) -> Path:
        return (ROOT / "data" if profile.in_place else profile.cache) / self.name

    def read(self, profile: Profile) -> pd.DataFrame:
        path = self.path(profile)
        with files.naming(path, REMAKE):
            return pd.read_csv(path) if path.exists() else pd.DataFrame()

    def _others(self, profile: Profile, key: dict[str, str | float]) -> pd.DataFrame:
        done = self.read(profile)
        return done[(done[list(key)] != pd.Series(key)).any(axis=1)] if len(done) else done

    def add(
        self, profile: Profile, key: dict[str, str | float], make: Callable[[], pd.DataFrame], remake: bool = False
    ) -> bool:
        """Adds `make()`'s rows, to 4 decimals, with `key`, minutes, date and machine; whether it made them.

        `key`, columns with their values, tells the groups of rows apart; rows with this key stay as they are (`remake`:
        are replaced)."""
        if len(self._others(profile, key)) < len(self.read(profile)) and not remake:
            return False
        begun = time.time()
        rows = make().round(4)
        minutes = round((time.time() - begun) / 60, 1)
        date, machine = datetime.date.today().isoformat(), f"{platform.machine()}, {describe_device()}"
        rows = pd.DataFrame(key, index=rows.index).join(rows).assign(minutes=minutes, date=date, machine=machine)
        with artifacts.lock(profile.cache / f".{self.name}.lock", f"adding to {self.name}"):
            kept = self._others(profile, key)  # another process may have added rows meanwhile
            if len(kept) < len(self.read(profile)) and not remake:
                return False
            table = pd.concat([kept, rows], ignore_index=True) if len(kept) else rows
            files.write_atomically(self.path(profile), table.to_csv(index=False).encode())
        print(f"{self.name}: {', '.join(map(str, key.values()))} ({minutes} min)", flush=True)
        return True
