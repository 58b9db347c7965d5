"""Each knob of notebook 00's table turned, under `smoke`: which notebooks' cells and which tables move, and whether
turning it back brings the first results again.

python tests/long/knobs.py                    # the last result lies beside it, in JSON, a field at a time
python tests/long/knobs.py --only seed,kg
python tests/long/knobs.py --notebooks 08,18  # these alone, beside what the last result has of the rest

A trial runs the notebooks that the table names for a field and all others that ask the profile for it; the rest can't
know of it, but for 16, which follows any table of claims. Each runs in a fork of this process, which has the packages
imported; the profile has one cache throughout, so a trial makes only what its change touches.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gzip
import hashlib
import importlib
import json
import os
import pkgutil
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[2]
RESULT, WORK = Path(__file__).with_suffix(".json"), ROOT / "data/cache/knobs"  # the profile's cache
PROFILE, INPUTS = ROOT / "data/cache/knobs.toml", ROOT / "data/cache/knobs-inputs"
TABLES = WORK / "figures/tables"
NOTEBOOKS = {path.name[:2]: path for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))}
OURS = "protected = false\n"  # the changed copies are of the open data
VALUES = {
    "notes": f'{OURS}notes = "{INPUTS}/notes"\nrecorded_answers = ["{ROOT}/data/llm_answers/train.jsonl.gz"]',
    "max_train_notes": "max_train_notes = 12",
    "open_kg": f'open_kg = "{INPUTS}/kg.tsv.gz"',
    "bios": f'bios = "{INPUTS}/bios"',
    "recorded_answers": f'recorded_answers = ["{INPUTS}/answers.jsonl.gz"]',
    "published": "[published]\nstage1.max_steps = 3\nstage2.positives_per_chunk = 8",
    "improved": "[improved.stage2]\nmax_steps = 3",
    "encoder": f'encoder = "{ROOT}/data/models/drehr-improved"',
    "pooling": 'pooling = "cls"',
    "seed": "seed = 1",
    "cliniq": f'[cliniq]\nsplit = "dev"\nretrievers = ["MiniLM (start)", "{ROOT}/data/models/drehr-improved"]',
    "benchmark": f'{OURS}benchmark = "{INPUTS}/benchmark"',
    "ablation_share": "ablation_share = 2.0",
    "bootstrap_samples": "bootstrap_samples = 150",
    "randomizations": "randomizations = 150",
    "kg": "[kg]\nmax_pairs = 300\nmax_mentions = 30\nown_mentions = 15\ntraining.max_steps = 3",
    "capr": "[capr]\npassage_words = 40\ntest_passages = 36\nmedquad_queries = 5\npassage_rows = 20",
    "radiology": "[radiology]\nreports = 16\niu_reports = 14\nbest.max_steps = 3",
}


def changed_inputs() -> None:
    """Copies of the open data, each a little different: four training notes fewer and a drug more in a test note; a
    fifth of our concepts left out; the last of each answer; the judgments of all notes' second chunks, and each chunk's
    last word."""
    from drehr_utils.knowledge import vocabularies

    def rewrite(name: str, change: Callable[[list[str]], list[str]], to: str) -> None:
        lines = gzip.decompress((ROOT / "data" / name).read_bytes()).decode().splitlines(keepends=True)
        (INPUTS / to).write_bytes(gzip.compress("".join(change(lines)).encode()))

    def four_fewer(lines: list[str]) -> list[str]:
        four = [line for line in lines if ",train," in line][:4]
        return [line.replace(",train,", ",dev,") if line in four else line for line in lines]

    def less_said(line: str) -> str:
        answer = json.loads(line)
        less = answer["answer"].rpartition("\n" if answer["task"] == "entity_generation" else "\n\n")[0]
        return json.dumps(answer | {"answer": less or answer["answer"]}) + "\n"

    def one_more(line: str) -> str:
        return line.replace("47M undomiciled", "47M on abacavir sulfate, undomiciled")

    shutil.rmtree(INPUTS, ignore_errors=True)
    shutil.copytree(ROOT / "data/open_notes", INPUTS / "notes")
    shutil.copytree(ROOT / "data/open_cliniq", INPUTS / "benchmark")
    rewrite("open_notes/discharge.csv.gz", lambda lines: list(map(one_more, lines)), "notes/discharge.csv.gz")
    rewrite("open_notes/splits.csv.gz", four_fewer, "notes/splits.csv.gz")
    rewrite("llm_answers/train.jsonl.gz", lambda lines: list(map(less_said, lines)), "answers.jsonl.gz")
    rewrite("open_kg/concepts.tsv.gz", lambda lines: [x for i, x in enumerate(lines) if not i or i % 5], "kg.tsv.gz")
    for path in [*INPUTS.glob("benchmark/*/qrels/*.tsv"), *INPUTS.glob("benchmark/*/judgments/*.tsv")]:
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if not line.split("\t")[1].endswith("_1")))
    for path in INPUTS.glob("benchmark/*/corpus.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        rows = [row | {"text": row["text"].rpartition(" ")[0] or row["text"]} for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    vocabularies.save_bios(vocabularies.build_open_kg(INPUTS / "kg.tsv.gz"), INPUTS / "bios")


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


# --- a notebook's run -------------------------------------------------------------------------------------------------

_ASKED: set[str] = set()


def share_graphs() -> None:
    """Each graph and its matcher is loaded once, here, where every fork finds it; most knobs leave it as it is."""
    from drehr_utils import corpus, pipeline
    from drehr_utils.knowledge import vocabularies
    from drehr_utils.profiles import load_profile

    vocabularies.open_graph = functools.cache(vocabularies.open_graph)
    matchers, make = {}, corpus.EntityMatcher
    corpus.EntityMatcher = lambda terms: matchers[id(terms)] if id(terms) in matchers else make(terms)
    terms = pipeline.knowledge_graph(load_profile("smoke")).term2cui
    matchers[id(terms)] = make(terms)


def prepare() -> None:
    """Has `_ASKED` note each field of a profile that is read, but for what reads all of them; figures aren't drawn."""
    from drehr_utils.evaluation import plots
    from drehr_utils.profiles import Profile

    plain, names = Profile.__getattribute__, set(Profile.__dataclass_fields__)

    def asked(profile, name: str):
        if name in names and sys._getframe(1).f_code.co_name not in ("__hash__", "__eq__", "replace", "changed"):
            _ASKED.add(name)
        return plain(profile, name)

    Profile.__getattribute__ = asked
    plots.save_figure = lambda *given: None  # most of the time, and compared by nothing here


def written() -> set[tuple[Path, int]]:
    """The profile's tables, and when."""
    return {(path, path.stat().st_mtime_ns) for path in TABLES.glob("*.csv")}


def run(number: str) -> dict:
    """Digests of what each code cell shows (figures aside), the fields that it asked for, digests of its tables."""
    import matplotlib
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    matplotlib.use("agg")
    os.chdir(ROOT / "notebooks")
    _ASKED.clear()
    shell, shown, before = InteractiveShell.instance(), [], written()
    for cell in json.loads(NOTEBOOKS[number].read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        is_parameter = "parameters" in cell["metadata"].get("tags", [])
        with capture_output() as captured:
            done = shell.run_cell(f'profile = "{PROFILE}"' if is_parameter else "".join(cell["source"]))
        if not done.success:
            raise RuntimeError(f"notebook {number}: {done.error_in_exec or done.error_before_exec!r}")
        shows = captured.stdout + repr([sorted(output.data.items()) for output in captured.outputs])
        shown.append(sha(re.sub(r"T_[0-9a-f]{5}", "", shows).encode()))  # a table's own name in HTML, drawn by lot
    tables = {path.stem: sha(path.read_bytes()) for path, _ in written() - before}
    return {"cells": shown, "asked": sorted(_ASKED), "tables": tables}


def run_all(numbers: list[str], kept: str) -> dict[str, dict]:
    """`run` of each, in a fork of its own; what a run that was cut off has of them is in the folder `kept`."""
    found = {}
    for number in numbers:
        place = WORK / "trials" / kept / f"{number}.json"
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            if not (child := os.fork()):
                try:
                    place.write_text(json.dumps(run(number)))
                except Exception as error:
                    place.write_text(json.dumps({"failed": repr(error)[:300]}))
                os._exit(0)
            os.waitpid(child, 0)
        found[number] = json.loads(place.read_text())
        print(number, end=" ", flush=True)
    return found


# --- what notebook 00 says --------------------------------------------------------------------------------------------


def is_own(table: str) -> bool:
    """Whether it is a table of a paper's figures; a notebook's claims follow them, and 16 follows all."""
    return not table.startswith("claims_") and table not in ("what_held", "paper_items")


def rows() -> list[list[str]]:
    """Of 00's table: notebook, fields, what a change reruns, minutes, tables."""
    cells = ("".join(cell["source"]) for cell in json.loads(NOTEBOOKS["00"].read_text())["cells"])
    section = next(source for source in cells if re.match("#+ What a change reruns\n", source))
    return [row.split(" | ") for row in re.findall(r"^\| (\d\d.*) \|$", section, re.MULTILINE)]


def contract() -> dict[str, tuple[set[str], set[str]]]:
    """Of each field of 00's table: the notebooks that it moves, and the tables."""
    known = {path.stem for path in (ROOT / "figures/tables").glob("*.csv") if is_own(path.stem)}
    found = {}
    for where, fields, reruns, _, moving in rows():
        places = f"{where}; {reruns}"
        spans = [range(int(a), int(b) + 1) for a, b in re.findall(r"(\d\d) to (\d\d)", places)]
        numbers = set(re.findall(r"\d\d", places)) | {f"{n:02d}" for span in spans for n in span}
        named = {table for table in known for name in re.findall(r"`([^`]+)`", moving) if fnmatch(table, name)}
        moves = known - named if moving.startswith("all") else named
        found |= {field: (numbers, moves) for field in re.findall(r"`(\w+)`", fields)}
    return found


# --- trials -----------------------------------------------------------------------------------------------------------


def moved(before: dict, after: dict) -> list[int]:
    """The cells that show something else; not those that do so in two undisturbed runs, for they show times."""
    pairs = zip(before["cells"], after["cells"], strict=True)
    return [i for i, (one, other) in enumerate(pairs) if one != other and i not in before.get("restless", ())]


def tables_of(runs: dict[str, dict]) -> dict[str, str]:
    return {name: digest for run in runs.values() for name, digest in run["tables"].items()}


def git(*arguments: str, at: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=at, check=True, capture_output=True, text=True).stdout


def against(field: str, tried: dict, made: list[str]) -> dict[str, list[str]]:
    """Where 00 says something else of a field than what was found, of the tables that smoke makes."""
    numbers, tables = contract()[field]
    says, found = numbers | tables & set(made), {*tried["cells moved"], *filter(is_own, tried["tables moved"])}
    return {"named, and not moved": sorted(says - found), "moved, and not named": sorted(found - says)}


def undisturbed(numbers: set[str], known: dict[str, dict]) -> dict[str, dict]:
    """The notebooks' second run with no knob turned; cells that differ from the first are `restless`."""
    PROFILE.write_text('base = "smoke"\n')
    found = run_all(sorted(numbers), "second")
    if different := [n for n in numbers if known[n]["tables"] != found[n]["tables"]]:
        raise SystemExit(f"two undisturbed runs differ in the tables of {different}")
    return {n: found[n] | {"restless": moved(known[n], found[n])} for n in sorted(numbers)}


def trial(field: str, known: dict[str, dict]) -> dict:
    """Turns one knob; what moved."""
    began = time.monotonic()
    numbers = contract()[field][0] | {number for number, run in known.items() if field in run["asked"]}
    numbers = (numbers | ({"14"} if "05" in numbers else set())) - {"16"}  # 14 takes 05's models unasked
    numbers = sorted(numbers & known.keys())
    base = undisturbed(set(numbers), known)
    PROFILE.write_text(f'base = "smoke"\n{VALUES[field]}\n')
    after = run_all(numbers, field)
    failed = {n: run.pop("failed") for n, run in after.items() if "failed" in run}
    after = {n: base[n] | run for n, run in after.items()}
    cells = {n: moved(base[n], after[n]) for n in numbers}
    those = {n for n in numbers if cells[n] or after[n]["tables"] != base[n]["tables"]}
    before, new = tables_of(base), tables_of(after)
    tables = {t for t in new.keys() | before.keys() if new.get(t) != before.get(t)}
    return {
        "value": VALUES[field].replace(f"{ROOT}/", ""),
        "notebooks": numbers,
        "failed": failed,
        "cells moved": {n: len(cells[n]) for n in sorted(those)},
        "tables moved": sorted(tables),
        "seconds": round(time.monotonic() - began),
        "date": datetime.date.today().isoformat(),
    }


def beside(old: dict, tried: dict, known: dict[str, dict]) -> dict:
    """A trial of some notebooks, and of the others what an earlier one has, whose date it keeps."""
    others = {n: count for n, count in old["cells moved"].items() if n not in known}
    tables = {*old["tables moved"]} - tables_of(known).keys() | {*tried["tables moved"]}
    return old | {
        "value": tried["value"],
        "notebooks": sorted({*old["notebooks"], *tried["notebooks"]}),
        "failed": old["failed"] | tried["failed"],
        "cells moved": dict(sorted((others | tried["cells moved"]).items())),
        "tables moved": sorted(tables),
        "later": old.get("later", {}) | dict.fromkeys(tried["notebooks"], tried["date"]),
    }


def restored(fields: list[str], known: dict[str, dict]) -> bool:
    """Whether all notebooks that these trials ran are as they were, run again with no knob turned; and the checkout."""
    numbers = sorted({path.stem for field in fields for path in (WORK / "trials" / field).glob("*.json")})
    base, again = undisturbed(set(numbers), known), run_all(numbers, "restored")
    left = [n for n in numbers if moved(base[n], again[n]) or again[n]["tables"] != base[n]["tables"]]
    print("\nnot restored:", left)
    return not left and not git("status", "--porcelain", "--", "notebooks", "figures", "data")


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
        there = os.environ | {"DREHR_ROOT": folder, "PYTHONPATH": folder}
        NotebookClient(nb, resources={"metadata": {"path": str(path.parent)}}).execute(env=there)
        nbformat.write(nb, path)
        changes = [old != cell.get("outputs") for old, cell in zip(before, nb.cells, strict=True)]
        changed = git("diff", "--stat", at=Path(folder)) != ""
        git("checkout", "notebooks", "figures", at=Path(folder))
        clean = not git("diff", at=Path(folder)) and not git("status", "--porcelain", at=Path(folder))
    return {"notebook": "01", "cells moved": sum(changes), "changed": changed, "restored": clean,
            "seconds": round(time.monotonic() - began), "date": datetime.date.today().isoformat()}  # fmt: skip


def save(result: dict) -> None:
    for field, tried in result["fields"].items():
        tried |= against(field, tried, result["tables"])
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="fields, and in_place; all, unless said otherwise")
    parser.add_argument("--notebooks", help="of a field's notebooks these alone")
    args = parser.parse_args()
    if new := {*(args.only.split(",") if args.only else ())} - ({*VALUES} & {*contract()} | {"in_place"}):
        parser.error(f"{min(new)!r} needs a value in VALUES and a row in 00's table of knobs")
    fixed = {"PYTHONHASHSEED": "0", "DREHR_ROOT": str(ROOT), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    fixed |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "DREHR_PROFILE": str(PROFILE)}
    if any(os.environ.get(name) != value for name, value in fixed.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | fixed)
    sys.path.insert(0, str(ROOT))
    import matplotlib.pyplot  # noqa: F401  # each fork has what is imported here

    import drehr_utils.papers

    for module in pkgutil.walk_packages(drehr_utils.papers.__path__, "drehr_utils.papers."):
        importlib.import_module(module.name)
    prepare()
    share_graphs()
    if not (INPUTS / "bios").exists():
        changed_inputs()
    PROFILE.write_text('base = "smoke"\n')
    some = args.notebooks.split(",") if args.notebooks else []
    known = run_all(some or sorted(NOTEBOOKS), "first")
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {"fields": {}}
    result["tables"] = sorted(tables_of(known).keys() | set(result["tables"] if some else ()))
    asked_for = {n: sorted(set(run["asked"]) & set(VALUES)) for n, run in known.items()}
    result["asked"] = dict(sorted(((result["asked"] if some else {}) | asked_for).items()))
    result["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    concerned = [f for f in VALUES if not some or {*some} & (contract()[f][0] | {n for n in some if f in asked_for[n]})]
    asked = args.only.split(",") if args.only else concerned if some else ["in_place", *VALUES]
    for field in asked:
        if field == "in_place":
            result[field] = in_place()
        else:
            tried = trial(field, known) | {"restored": False}  # so far
            old = result["fields"].get(field) if some else None
            result["fields"][field] = beside(old, tried, known) if old else tried
        save(result)
        print(f"\n{field}", flush=True)
    fields = [field for field in asked if field != "in_place"]
    good = restored(fields, known)
    for field in fields:
        result["fields"][field]["restored"] = good
    save(result)
    for kept in ("restored", *fields):  # what a run that is cut off goes on from
        shutil.rmtree(WORK / "trials" / kept, ignore_errors=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
