"""Records: what takes longer than a run should, committed with its date and machine, and remade by a command."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from drehr_utils import files
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.training.encoders import describe_device


@dataclass(frozen=True)
class Record:
    """A CSV table that grows by a group of rows at a time; `keys` are the columns that tell the groups apart.

    It lies in data/, committed, for a profile whose results are; another profile's lies in its cache."""

    name: str
    keys: tuple[str, ...]

    def path(self, profile: Profile) -> Path:
        return (ROOT / "data" if profile.in_place else profile.cache) / self.name

    def read(self, profile: Profile) -> pd.DataFrame:
        path = self.path(profile)
        if not path.exists():
            return pd.DataFrame(columns=list(self.keys))
        return pd.read_csv(path, dtype=dict.fromkeys(self.keys, str), keep_default_na=True)

    def add(
        self, profile: Profile, key: dict[str, str], make: Callable[[], pd.DataFrame], remake: bool = False
    ) -> bool:
        """Adds `make()`'s rows under `key` with minutes, date and machine, unless they are there (`remake`: in their
        place); all other rows stay. Whether it made them."""
        done = self.read(profile)
        there = (done[list(key)] == pd.Series(key)).all(axis=1) if len(done) else pd.Series(dtype=bool)
        if there.any() and not remake:
            return False
        begun = time.time()
        rows = make()
        about = {
            "minutes": round((time.time() - begun) / 60, 1),
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.machine()}, {describe_device()}",
        }
        rows = pd.DataFrame(key, index=rows.index).join(rows.assign(**about))
        table = pd.concat([done[~there] if there.any() else done, rows], ignore_index=True)
        files.write_atomically(self.path(profile), table.to_csv(index=False).encode())
        return True
