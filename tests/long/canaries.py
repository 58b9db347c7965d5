"""All stages of profile `mimic` and the commands, each under every fault, with canaries in notes, orders and ids.

python tests/long/canaries.py --write    # an hour on one busy core; the last result lies beside it, in JSON

Each stage is disturbed before it has run: killed, its run killed, crashed (core files are on), an error that quotes a
note, no file beyond 30 kB (as on a full disk), a server that quotes notes in errors; then it runs to its end, with a
server that quotes them in answers.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
planted = importlib.import_module("planted")
llm_server = importlib.import_module("llm_server")

RESULT = Path(__file__).with_suffix(".json")
STAGES = "00,01,02,03,04,05,06,07,08"
FAULTS = ("kill", "killrun", "abort", "raise", "size")
ELSEWHERE = ("/tmp", "/var/tmp", "/dev/shm", "~")


def commands(place: planted.Place) -> dict[str, tuple[str, ...]]:
    search, at = "drehr_utils.use.search", ("--index", str(place.index))
    model = next(place.cache.glob("models/drehr-hybrid"), place.root / "none")
    return {
        "--check": ("drehr_utils.run", "--profile", str(place.toml), "--check"),
        "drehr-search index": (search, "index", str(place.root / "mimic/mimic-iv-note"), "--model", str(model), *at),
        "drehr-search query": (search, "query", "heart failure", *at),
    }


def newer(since: float, but: Path) -> list[Path]:
    """Files of ELSEWHERE that anybody wrote since then, below 256 MB; not those under `but`."""
    found = []
    for folder in map(os.path.expanduser, ELSEWHERE):
        for at, folders, names in os.walk(folder):
            folders[:] = [name for name in folders if Path(at, name) != but]
            for path in (Path(at, name) for name in names):
                try:
                    stat = path.lstat()
                except OSError:  # gone by now
                    continue
                if path.is_file() and not path.is_symlink() and stat.st_mtime >= since and stat.st_size < 1 << 28:
                    found.append(path)
    return found


def holds(place: planted.Place, path: Path) -> bool:
    try:
        place.searched.files += 1
        return place.holds(path)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error):  # somebody is writing it
        return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default=STAGES, help=f"notebooks (default: {STAGES})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", action="store_true", help=f"keep the result as {RESULT.name}")
    given = parser.parse_args()
    began, draw, runs = time.time(), random.Random(given.seed), []
    with tempfile.TemporaryDirectory(prefix="canaries_") as folder:
        place = planted.plant(Path(folder, "place"), given.seed)
        place.trace = bool(shutil.which("strace"))
        planted_in = place.holding(place.root / "mimic")

        def disturbed(what: str, fault: str, arguments: tuple[str, ...], **options) -> None:
            before, start = len(place.fired()), time.time()
            code, printed = place.run(*arguments, fault=fault, **options)
            if what == "drehr-search query" and code == 0:
                printed = ""  # its answer is the notes' text
            happened = [kind.split("/")[-1] for kind in place.fired()[before:]]
            found = place.leaks(printed)
            runs.append({"what": what, "fault": fault, "at": happened, "exit": code,
                         "s": round(time.time() - start, 1), "leaks": found})  # fmt: skip
            print(runs[-1], flush=True)

        def faults(role: str) -> list[str]:
            kinds = [kind for kind in FAULTS if (kind, role) != ("killrun", "command")]  # that would be this process
            return [f"{kind}:{role}:{30_000 if kind == 'size' else draw.randint(1, 12)}" for kind in kinds]

        release = planted.release_command(place)
        for fault in [*faults("command"), ""]:
            disturbed("release", fault, release)
        with llm_server.chat_server(place.hostile) as hostile, llm_server.chat_server(place.reply) as quoting:
            for stage in given.stages.split(","):
                run = ("drehr_utils.run", "--profile", str(place.toml), "--only", stage)
                for fault in faults("kernel"):
                    disturbed(stage, fault, run, base_url=quoting.base_url)
                asked = len(hostile.bodies)
                disturbed(stage, "", run, base_url=hostile.base_url)
                if len(hostile.bodies) > asked:
                    runs[-1]["fault"] = f"a hostile server, asked {len(hostile.bodies) - asked} times"
                    disturbed(stage, "", run, base_url=quoting.base_url)
            sent = len(hostile.bodies) + len(quoting.bodies)
        disturbed("90 (a careless cell)", "", ("drehr_utils.run", "--profile", str(place.toml), "--only", "90"))
        for what, command in commands(place).items():
            for fault in [*faults("command"), ""]:
                disturbed(what, fault, command)
        kept = len(place.holding(place.cache))
        others = [str(path) for path in newer(began, place.root) if holds(place, path)]
    leaks = sorted({leak for run in runs for leak in run["leaks"]}) + others
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        "command": f"python tests/long/canaries.py --stages {given.stages} --seed {given.seed}",
        "planted": {"files that hold it": planted_in},  # not what: a later run would find this record
        "runs": len(runs),
        "undisturbed runs that failed": [run["what"] for run in runs if not run["fault"] and run["exit"]],
        "faults that happened": sum(bool(run["at"]) for run in runs),
        "requests to the language model's server": sent,
        "files with canaries in the profile's folder, at the end": kept,
        "searched": {
            "files": place.searched.files,
            "bytes, unpacked": place.searched.bytes,
            "where": "after each run: checkout with git's objects, home, temporary folder, terminal; figures, tables, "
            f"model cards and settings of the profile; at the end what is newer in {', '.join(ELSEWHERE)}",
            "calls out of the machine seen by": "audit hook, strace" if place.trace else "audit hook",
        },
        "leaks": leaks,
        "each run": runs,
    }
    if given.write:
        RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "each run"}, indent=1))
    return int(bool(leaks))


if __name__ == "__main__":
    sys.exit(main())
