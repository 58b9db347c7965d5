"""Each knob of notebook 00's table turned, under `smoke`: which notebooks' cells and which tables move, and whether
turning it back brings the first results again.

python tests/long/knobs.py                    # the last result lies beside it, in JSON, a field at a time
python tests/long/knobs.py --only seed,kg --jobs 2

A trial runs the notebooks that the table names for a field and all others that ask the profile for it; the rest can't
know of it. Each runs in a fork of this process, which has the packages imported; a profile has the same place and cache
throughout, so a trial makes only what its change touches.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import functools
import gzip
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT, WORK = Path(__file__).with_suffix(".json"), ROOT / "data/cache/knobs"  # the profile's cache
PROFILE, INPUTS = ROOT / "data/cache/knobs.toml", ROOT / "data/cache/knobs-inputs"
NOTEBOOKS = {path.name[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
OURS = "protected = false\n"  # the changed copies are of the open data
VALUES = {
    "notes": f'{OURS}notes = "{INPUTS}/notes"\nrecorded_answers = ["{ROOT}/data/llm_answers/train.jsonl.gz"]',
    "max_train_notes": "max_train_notes = 12",
    "open_kg": f'open_kg = "{INPUTS}/concepts.tsv.gz"',
    "bios": f'bios = "{INPUTS}/bios"',
    "recorded_answers": f'recorded_answers = ["{INPUTS}/answers.jsonl.gz"]',
    "published": "[published]\nstage1.max_steps = 3\nstage2.learning_rate = 3e-4",
    "improved": "[improved.stage2]\nmax_steps = 3",
    "encoder": f'encoder = "{ROOT}/data/models/drehr-improved"',
    "pooling": 'pooling = "cls"',
    "seed": "seed = 1",
    "cliniq": f'[cliniq]\nsplit = "dev"\nretrievers = ["MiniLM (start)", "{ROOT}/data/models/drehr-improved"]',
    "benchmark": f'{OURS}benchmark = "{INPUTS}/benchmark"',
    "ablation_share": "ablation_share = 2.0",
    "bootstrap_samples": "bootstrap_samples = 150",
    "randomizations": "randomizations = 150",
    "kg": "[kg]\nmax_mentions = 30\nown_mentions = 15\ntraining.max_steps = 3",
    "capr": "[capr]\ntest_passages = 36\nmedquad_queries = 5\npassage_rows = 20",
    "radiology": "[radiology]\nreports = 16\niu_reports = 14\nbest.max_steps = 3",
}


def changed_inputs() -> None:
    """Copies of the open data, each a little different: four training notes fewer, and a query's name in a test note;
    a fifth of our concepts left out; the last of each answer; a third of the judgments."""

    def lines(name: str, change, to: str) -> None:
        target = INPUTS / to
        target.parent.mkdir(parents=True, exist_ok=True)
        with gzip.open(ROOT / name, "rt", newline="") as old, gzip.open(target, "wt", newline="") as new:
            change(old, new)

    def notes(old, new) -> None:
        rows, out = csv.reader(old), csv.writer(new)
        out.writerow(next(rows))
        for row in rows:
            if row[0] not in trained[:4]:
                out.writerow(row[:-1] + [row[-1] + "\nAbacavir sulfate was not given.\n" * (row[0] == "90000001-DS-1")])

    def answers(old, new) -> None:
        for line in old:
            answer = json.loads(line)
            last = "\n" if answer["task"] == "entity_generation" else "\n\n"
            new.write(json.dumps(answer | {"answer": answer["answer"].rpartition(last)[0] or answer["answer"]}) + "\n")

    shutil.rmtree(INPUTS, ignore_errors=True)
    shutil.copytree(ROOT / "data/open_notes", INPUTS / "notes")
    shutil.copytree(ROOT / "data/open_cliniq", INPUTS / "benchmark")
    with gzip.open(INPUTS / "notes/splits.csv.gz", "rt") as splits:
        trained = [row["note_id"] for row in csv.DictReader(splits) if row["split"] == "train"]
    lines("data/open_notes/discharge.csv.gz", notes, "notes/discharge.csv.gz")
    lines("data/llm_answers/train.jsonl.gz", answers, "answers.jsonl.gz")
    fewer = "data/open_kg/concepts.tsv.gz"
    lines(fewer, lambda old, new: new.writelines(row for i, row in enumerate(old) if not i or i % 5), "concepts.tsv.gz")
    for split in ("dev", "test"):
        qrels = INPUTS / f"benchmark/{split}/qrels/{split}.tsv"
        kept = [line for i, line in enumerate(qrels.read_text().splitlines(keepends=True)) if not i or i % 3]
        qrels.write_text("".join(kept))
    from drehr_utils.knowledge import vocabularies

    vocabularies.save_bios(vocabularies.build_open_kg(INPUTS / "concepts.tsv.gz"), INPUTS / "bios")


# --- a notebook's run -------------------------------------------------------------------------------------------------

_ASKED: set[str] = set()


def share_graphs() -> None:
    """Each graph and its matcher is loaded once, here, where every fork finds it; most knobs leave it as it is."""
    from drehr_utils import pipeline
    from drehr_utils.knowledge import vocabularies
    from drehr_utils.profiles import load_profile

    vocabularies.open_graph = functools.cache(vocabularies.open_graph)
    matchers, make = {}, pipeline.EntityMatcher
    pipeline.EntityMatcher = lambda terms: matchers[id(terms)] if id(terms) in matchers else make(terms)
    terms = pipeline.knowledge_graph(load_profile("smoke")).term2cui
    matchers[id(terms)] = make(terms)


def log_fields() -> None:
    """Notes in `_ASKED` each field of a profile that is read, but for what reads all of them."""
    from drehr_utils.profiles import Profile

    plain, names = Profile.__getattribute__, set(Profile.__dataclass_fields__)

    def asked(profile, name: str):
        if name in names and sys._getframe(1).f_code.co_name not in ("__hash__", "__eq__", "replace", "_changed"):
            _ASKED.add(name)
        return plain(profile, name)

    Profile.__getattribute__ = asked


def run(number: str) -> tuple[str, list[str], list[str]]:
    """A notebook's number, digests of what each code cell shows, and the fields that it asked for. In a fork."""
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    os.chdir(ROOT / "notebooks")
    shell, shown = InteractiveShell.instance(), []
    shell.enable_gui = lambda *_: None
    shell.enable_matplotlib("inline")
    _ASKED.clear()
    for cell in json.loads(NOTEBOOKS[number].read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        is_parameter = "parameters" in cell["metadata"].get("tags", [])
        with capture_output() as captured:
            done = shell.run_cell(f'profile = "{PROFILE}"' if is_parameter else "".join(cell["source"]))
        if not done.success:
            raise RuntimeError(f"notebook {number}: {done.error_in_exec or done.error_before_exec!r}")
        shows = captured.stdout + repr([sorted(output.data.items()) for output in captured.outputs])
        shows = re.sub(r"T_[0-9a-f]{5}", "", shows)  # a table's own name in HTML, drawn by lot
        shown.append(hashlib.sha256(shows.encode()).hexdigest()[:12])
    return number, shown, sorted(_ASKED)


def tables() -> dict[str, str]:
    """Digest of each table that the profile's runs have left."""
    return {
        path.stem: hashlib.sha256(path.read_bytes()).hexdigest()[:12]
        for path in (WORK / "figures/tables").glob("*.csv")
    }


# --- what notebook 00 says --------------------------------------------------------------------------------------------


def contract() -> dict[str, tuple[set[str], set[str]]]:
    """Of each field of 00's table: the notebooks that it moves, and the tables; claims_* and 16's are of others."""
    known = {path.stem for path in (ROOT / "figures/tables").glob("*.csv") if not path.stem.startswith("claims_")}
    known -= {"what_held", "paper_items"}
    cells = ("".join(cell["source"]) for cell in json.loads(NOTEBOOKS["00"].read_text())["cells"])
    section = next(source for source in cells if source.startswith("## What a change reruns"))
    found = {}
    for row in re.findall(r"^\| (\d\d.*) \|$", section, re.MULTILINE):
        where, fields, reruns, _, moving = (part.strip() for part in row.split(" | "))
        names = re.findall(r"`(\w+\*?)`", moving)
        spans = re.findall(r"`(\w+?)(\d)` to `\w+?(\d)`", moving)
        names += [f"{stem}{n}" for stem, first, last in spans for n in range(int(first), int(last) + 1)]
        named = {table for table in known if any(re.fullmatch(name.replace("*", ".*"), table) for name in names)}
        moved = known - named if moving.startswith("all") else named
        numbers = set(re.findall(r"\d\d", where + reruns))
        for first, last in re.findall(r"(\d\d) to (\d\d)", f"{where}; {reruns}"):
            numbers |= {f"{n:02d}" for n in range(int(first), int(last) + 1)}
        found |= {field: (numbers, moved) for field in re.findall(r"`(\w+)`", fields)}
    return found


# --- trials -----------------------------------------------------------------------------------------------------------


def run_all(numbers: list[str], jobs: int) -> dict[str, tuple[list[str], list[str]]]:
    """What each notebook's cells show, and the fields that it asked for."""
    with multiprocessing.get_context("fork").Pool(jobs, maxtasksperchild=1) as pool:
        found = {}
        for number, shown, asked in pool.imap_unordered(run, numbers, chunksize=1):
            found[number] = (shown, asked)
            print(number, end=" ", flush=True)
        return found


def moved(before: list[str], after: list[str], restless: list[int]) -> list[int]:
    return [i for i, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1] and i not in restless]


def git(*arguments: str, at: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=at, check=True, capture_output=True, text=True).stdout


def baseline(jobs: int) -> dict:
    """An undisturbed run of all notebooks, and the cells that differ when it is done again: they show times."""
    kept = WORK / "baseline.json"
    if not kept.exists():
        PROFILE.write_text('base = "smoke"\n')
        first = run_all(sorted(NOTEBOOKS), jobs)
        before, second = tables(), run_all(sorted(NOTEBOOKS), jobs)
        if before != tables():
            raise SystemExit("two undisturbed runs differ in their tables")
        kept.write_text(json.dumps({
            "cells": {n: shown for n, (shown, _) in second.items()},
            "restless": {n: moved(shown, second[n][0], []) for n, (shown, _) in first.items()},
            "asked": {n: asked for n, (_, asked) in first.items()},
            "tables": before,
        }))  # fmt: skip
    return json.loads(kept.read_text())


def trial(field: str, base: dict, jobs: int) -> dict:
    """Turns one knob and turns it back."""
    began, (named, named_tables) = time.monotonic(), contract()[field]
    asking = {number for number, asked in base["asked"].items() if field in asked}
    numbers = sorted(named | asking)
    PROFILE.write_text(f'base = "smoke"\n{VALUES[field]}\n')
    after, new = run_all(numbers, jobs), tables()
    cells = {n: moved(base["cells"][n], shown, base["restless"][n]) for n, (shown, _) in after.items()}
    those = sorted(n for n, which in cells.items() if which)
    of_tables = sorted(t for t in new.keys() | base["tables"].keys() if new.get(t) != base["tables"].get(t))
    ours = {table for table in of_tables if not table.startswith("claims_")} - {"what_held", "paper_items"}
    PROFILE.write_text('base = "smoke"\n')
    again = run_all(those, jobs)
    left = [n for n, (shown, _) in again.items() if moved(base["cells"][n], shown, base["restless"][n])]
    status = git("status", "--porcelain", "--", "notebooks", "figures", "data")
    return {
        "value": VALUES[field].replace(f"{ROOT}/", ""),
        "notebooks": numbers,
        "cells moved": {n: len(cells[n]) for n in those},
        "tables moved": of_tables,
        "named, and no cell moved": sorted(named - set(those)),
        "moved, and not named": sorted(set(those) - named),
        "tables named, and not moved": sorted(named_tables & base["tables"].keys() - ours),
        "tables moved, and not named": sorted(ours - named_tables),
        "restored": not left and tables() == base["tables"] and not status,
        "seconds": round(time.monotonic() - began),
        "date": datetime.date.today().isoformat(),
    }


def in_place() -> dict:
    """The parameter itself: notebook 01 in a fresh clone, `"smoke"` in its cell, run and saved; git restores it."""
    import nbformat
    from nbclient import NotebookClient

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        git("clone", "-q", "--shared", str(ROOT), folder)
        path = Path(folder) / "notebooks" / NOTEBOOKS["01"].name
        nb = nbformat.read(path, as_version=4)
        before = [cell.get("outputs") for cell in nb.cells]
        cell = next(cell for cell in nb.cells if "parameters" in cell.metadata.get("tags", []))
        cell.source = cell.source.replace('"open"', '"smoke"')
        os.environ |= {"DREHR_ROOT": folder, "PYTHONPATH": folder}
        NotebookClient(nb, resources={"metadata": {"path": str(path.parent)}}).execute()
        nbformat.write(nb, path)
        changes = [old != cell.get("outputs") for old, cell in zip(before, nb.cells, strict=True)]
        changed = git("diff", "--stat", at=Path(folder)) != ""
        git("checkout", "notebooks", "figures", at=Path(folder))
        clean = not git("diff", at=Path(folder)) and not git("status", "--porcelain", at=Path(folder))
    return {"notebook": "01", "cells moved": sum(changes), "changed": changed, "restored": clean,
            "seconds": round(time.monotonic() - began), "date": datetime.date.today().isoformat()}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(["in_place", *VALUES]), help="fields, and in_place")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    fixed = {"PYTHONHASHSEED": "0", "DREHR_ROOT": str(ROOT), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    fixed |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DREHR_PROFILE": str(PROFILE)}
    if any(os.environ.get(name) != value for name, value in fixed.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    sys.path.insert(0, str(ROOT))
    import sentence_transformers  # noqa: F401  # each fork has it, and what it needs

    from drehr_utils import pipeline  # noqa: F401

    log_fields()
    share_graphs()
    if not (INPUTS / "bios").exists():
        changed_inputs()
    base, worst = baseline(args.jobs), 0
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"fields": {}}
    result["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    for field in args.only.split(","):
        found = in_place() if field == "in_place" else trial(field, base, args.jobs)
        (result if field == "in_place" else result["fields"])[field] = found
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print("\n", field, json.dumps(found), flush=True)
        worst |= not found["restored"]
    return worst


if __name__ == "__main__":
    sys.exit(main())
