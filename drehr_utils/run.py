"""Runs notebooks/NN_*.ipynb in order: `python -m drehr_utils.run --help`.

A notebook that ran is cleaned of everything that differs between two runs of the same code (times, paths, progress
bars), so that a committed notebook changes only when its results do.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from drehr_utils import artifacts, files
from drehr_utils.errors import DataError
from drehr_utils.profiles import PROFILES, VARIABLES, Profile, load_profile
from drehr_utils.use import provenance

# "%|" alone is not enough: a bar without a known total has only a count and a rate.
_PASSING = re.compile(r"\d%\||\[\d+:\d\d(:\d\d)?(<|, )|it/s\]|s/it\]|^Waiting for process \d+")  # bars, locks
_CURSOR = re.compile(r"\x1b\[\d*[A-HJK]")
_CELL_FILE = re.compile(r"[^\s\"'<>]*/ipykernel_\d+/\d+\.py")
_INJECTED = "injected-parameters"
_ERROR_MARKER = "papermill-error-cell-tag"
_KEPT = ("llm", "run.lock")  # by --fresh: paid for, and held
_WIDGET = "application/vnd.jupyter.widget-view+json"
# What a notebook waits for where it is in the same run: 05's models, 08's Table 4.
_AFTER = dict.fromkeys(("08", "09", "10", "11", "14", "18"), "05") | {"15": "08"}
_ITS_BENCHMARK = dict.fromkeys(("00", "05", "07"), "06")  # where 06 makes the benchmark that the others read
_OPENED = "opened.tsv"
_LAST = "16"  # reads what all others found


@dataclass(frozen=True)
class Place:
    """The folders of one run, all absolute."""

    root: Path
    profile: Profile
    asked: str = "open"  # the profile's name or its file, as notebooks are told it
    lanes: int = 1  # notebooks at a time; each has its share of the cores

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def cache(self) -> Path:
        return self.root / "data/cache" / self.profile.name

    def log(self, notebook: Path) -> Path:
        return self.cache / "logs" / f"{notebook.stem}.log"

    def show(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def collapse(text: str) -> str:
    """Returns what a terminal would show of `text`: what follows a carriage return overwrites the line's start."""
    lines = []
    for line in _CURSOR.sub("", text).split("\n"):
        first, *parts = line.split("\r")
        for part in parts:
            first = part + first[len(part) :]
        lines.append(first.rstrip() if parts else first)
    return "\n".join(lines)


def path_shortener(root: Path) -> Callable[[str], str]:
    """Returns a function that replaces in a text the project's root by ".", the home by "~", this Python's own folder
    by "(env)", and the name that a kernel gives to a cell's code, which holds its process id, by "(cell)"."""
    names = {str(root): ".", str(root.resolve()): "."}
    for path, name in ((Path.home(), "~"), (Path(sys.prefix), "(env)")):
        if path != Path(path.anchor) and str(path) not in ("/usr", "/usr/local"):
            names.setdefault(str(path), name)
    longest_first = "|".join(re.escape(path) for path in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<![\w.-])(?:{longest_first})(?![\w-])")
    return lambda text: pattern.sub(lambda match: names[match[0]], _CELL_FILE.sub("(cell)", text))


def _clean_outputs(outputs: list[Any], shorten: Callable[[str], str]) -> list[Any]:
    from nbformat.v4 import new_output

    cleaned: list[Any] = []
    for streams, group in itertools.groupby(outputs, key=lambda output: output.output_type == "stream"):
        found = list(group)
        if not streams:
            found = [output for output in found if _WIDGET not in output.get("data", {})]  # it lives with its kernel
            for output in found:
                for kind, value in output.get("data", {}).items():
                    if isinstance(value, str) and (kind.startswith("text/") or kind == "image/svg+xml"):
                        output.data[kind] = shorten(value)
            cleaned += found
            continue
        # What one cell prints to stdout and stderr between two displays arrives in an order that depends on timing.
        for name in ("stdout", "stderr"):
            text = shorten(collapse("".join(output.text for output in found if output.name == name)))
            if name == "stderr":
                text = "\n".join(line for line in text.split("\n") if not _PASSING.search(line))
                text = text if text.strip() else ""
            if text:
                cleaned.append(new_output("stream", name=name, text=text))
    return cleaned


def _without(cells: list[Any], *tags: str) -> list[Any]:
    return [cell for cell in cells if not set(tags) & set(cell.metadata.get("tags", []))]


def clean_notebook(nb: Any, root: Path, *, keep_injected: bool = False) -> None:
    """Strips from an executed notebook, in place, what differs between two runs of the same code.

    `nb` is an nbformat v4 node; `root` is replaced in its outputs by "."; `keep_injected` keeps the cell that holds the
    run's parameters (else the cells are counted as if it had not been there, and it reads as it was written)."""
    shorten = path_shortener(root)
    for key in ("papermill", "widgets", "drehr"):
        nb.metadata.pop(key, None)
    nb.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    nb.metadata["language_info"] = {"name": "python"}
    nb.cells = _without(nb.cells, _ERROR_MARKER, *([] if keep_injected else [_INJECTED]))
    count = 0
    for cell in nb.cells:
        for key in ("papermill", "execution", "ExecuteTime"):
            cell.metadata.pop(key, None)
        if not cell.metadata.get("tags", True):
            del cell.metadata["tags"]  # papermill gives every cell an empty list
        if cell.cell_type != "code":
            continue
        if cell.execution_count is not None:
            count += 1
            cell.execution_count = count
        cell.outputs = _clean_outputs(cell.outputs, shorten)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = cell.execution_count


def _environment(place: Place, ipython: str) -> dict[str, str]:
    """What the notebooks' kernel has beside this process's own environment."""
    package_parent = str(Path(__file__).resolve().parents[1])
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if place.profile.offline else {}
    # Notebooks run in their own folder, where a relative path is another.
    paths = {
        name: os.path.abspath(at)
        for name in {*VARIABLES, "DREHR_PUBLIC_DATA"} - {"DREHR_LORA", "DREHR_POOLING", "DREHR_WORKERS"}  # no paths
        if os.path.exists(at := os.environ.get(name, ""))
    }
    named = [part.strip() for part in os.environ.get("DREHR_RETRIEVERS", "").split(",")]
    if any(map(os.path.isdir, named)):
        paths["DREHR_RETRIEVERS"] = ",".join(os.path.abspath(at) if os.path.isdir(at) else at for at in named)
    share = {"OMP_NUM_THREADS": str((os.cpu_count() or 1) // place.lanes)} if place.lanes > 1 else {}
    return (
        offline
        | paths
        | share
        | {
            "DREHR_PROFILE": place.asked,
            "DREHR_ROOT": str(place.root),
            # The notebooks must use the package that lies beside them, installed or not.
            "PYTHONPATH": os.pathsep.join(filter(None, [package_parent, os.environ.get("PYTHONPATH")])),
            "PYTHONHASHSEED": "0",
            "TOKENIZERS_PARALLELISM": "false",
            # A reader's own IPython start-up files would otherwise run first.
            "IPYTHONDIR": ipython,
            provenance.LOG: os.path.join(ipython, _OPENED),
            # tqdm asks for ipywidgets; plain text bars are what is wanted here.
            "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), "ignore:IProgress not found"])),
        }
    )


def execute(place: Place, notebook: Path, *, progress_bar: bool) -> str | None:
    """Runs one notebook and puts the cleaned result in its place, where results are committed, or in the cache's folder
    `notebooks`; returns a report where it failed.

    The notebook stays as it was when a cell fails (the half-executed copy then lies in the cache's folder `failed`) or
    when it was edited meanwhile."""
    import nbformat
    import papermill
    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpec

    running, failed = place.cache / "running" / notebook.name, place.cache / "failed" / notebook.name
    for stale in (running, failed, place.log(notebook)):
        stale.parent.mkdir(parents=True, exist_ok=True)
        stale.unlink(missing_ok=True)
    source = notebook.read_bytes()
    with tempfile.TemporaryDirectory(prefix="drehr_ipython_") as ipython, open(place.log(notebook), "wb") as log:
        startup = Path(ipython) / "profile_default/startup/00_log_files.py"
        startup.parent.mkdir(parents=True)
        startup.write_text(provenance.STARTUP, encoding="utf-8")

        class Kernel(AsyncKernelManager):
            """This interpreter, whatever is installed as `python3`; keeps patient text off the terminal, where compiled
            libraries print, and off open local sockets."""

            kernel_spec = KernelSpec(**get_kernel_dict(), env=_environment(place, ipython))

            async def start_kernel(self, **kwargs: Any) -> None:
                self.transport_encryption = "auto"
                await super().start_kernel(**kwargs, stdout=log, stderr=log)

        try:
            papermill.execute_notebook(
                notebook,
                running,
                parameters={"profile": place.asked},
                kernel_name="python3",
                language="python",
                cwd=place.notebooks,
                progress_bar=progress_bar,
                start_timeout=300,
                kernel_manager_class=Kernel,
            )
        except Exception as error:  # a cell's error, a dead kernel or a broken notebook: each ends the run
            if running.exists():
                os.replace(running, failed)
            return _report(place, notebook, error)
        except KeyboardInterrupt:
            running.unlink(missing_ok=True)
            raise
        opened = (Path(ipython) / _OPENED).read_text(encoding="utf-8").splitlines()
    nb = nbformat.read(running, as_version=4)
    # Results outside the repository keep their parameters: nothing else in them says which profile they are from.
    clean_notebook(nb, place.root, keep_injected=not place.profile.in_place)
    if place.profile.in_place:
        nb.metadata["drehr"] = provenance.digests(nb, opened, place.root)
    target = notebook if place.profile.in_place else place.cache / "notebooks" / notebook.name
    if target == notebook and notebook.read_bytes() != source:
        target = place.cache / "notebooks" / notebook.name
        print(f"(edited while it ran, so left alone; the result: {place.show(target)})", end=" ", flush=True)
    files.write_atomically(target, (nbformat.writes(nb) + "\n").encode())
    running.unlink()
    return None


def _report(place: Place, notebook: Path, error: Exception) -> str:
    """Where and why a notebook stopped; its own cells are counted, from 1.

    A kernel that died leaves no error in any cell, but papermill starts no cell after one that fails."""
    import nbformat

    copy, log = place.cache / "failed" / notebook.name, place.log(notebook)
    where, line, more = place.show(notebook), "", ""
    with contextlib.suppress(FileNotFoundError, ValueError):  # no copy, or one that a full disk cut off
        cells = _without(nbformat.read(copy, as_version=4).cells, _ERROR_MARKER, _INJECTED)
        more = f"\nThe notebook up to there: {place.show(copy)}"
        started = [at for at, cell in enumerate(cells) if cell.metadata.get("papermill", {}).get("start_time")]
        if started:
            where += f", cell {started[-1] + 1}"
            line = "\n  " + cells[started[-1]].source.strip().split("\n")[0]
    if log.stat().st_size:
        more += f"\nWhat its kernel printed: {place.show(log)}"
    kind = getattr(error, "ename", type(error).__name__)
    if place.profile.protected:  # a message may quote the data
        said = "The message may hold patient text, so it is not shown here, but it is in the notebook's last cell."
        said += " --check says what is missing."
        return f"{where} failed with {kind}:{line}\n{said}{more}"
    message = path_shortener(place.root)(getattr(error, "evalue", str(error))).strip()
    return f"{where} failed:{line}\n{kind}: {message}{more}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m drehr_utils.run",
        description="Runs the notebooks in order. Under the profile open they are executed in place; under others "
        "the executed copies go to data/cache/<profile>/notebooks/. A notebook that fails stays as it was, and its "
        "half-executed copy goes to data/cache/<profile>/failed/.",
    )
    known = f"{', '.join(PROFILES)}, or the path of a .toml file of your own"
    parser.add_argument("--profile", default="open", help=f"data, models and sizes: {known} (default: open)")
    some = parser.add_mutually_exclusive_group()
    some.add_argument("--from", dest="start", metavar="NN", help="start at this notebook, for example 05")
    some.add_argument("--only", metavar="NN[,NN...]", help="run these notebooks only, for example 08 or 08,09")
    fresh = "first delete data/cache/<profile>, except a language model's answers in its folder llm, always kept"
    parser.add_argument("--jobs", type=int, metavar="N", help="notebooks at a time, each with its share of the cores; "
                        "1 where memory is short (default: the profile's, 2 for open)")  # fmt: skip
    public = (
        "first fetch the public data sets that aren't ours to pass on, licences printed (drehr_utils.data.public_data)"
    )
    check = (
        "run nothing; say what is missing and where it comes from, and what a run would take (drehr_utils.use.check)"
    )
    parser.add_argument("--check", action="store_true", help=check)
    parser.add_argument("--public", action="store_true", help=public)
    parser.add_argument("--fresh", action="store_true", help=fresh)
    parser.add_argument("--yes", action="store_true", help="confirm --fresh under a protected profile, such as mimic")
    return parser


def _choose(parser: argparse.ArgumentParser, place: Place, start: str | None, only: str | None) -> list[Path]:
    """Returns the notebooks to run, in order; ends the program with code 2 when one asked for does not exist."""
    notebooks = sorted(place.notebooks.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        parser.error("there are no notebooks NN_*.ipynb in notebooks/")
    given = [start] if start is not None else (only or "").split(",")
    asked = [number.strip().zfill(2) for number in given if number.strip()]
    if not asked and (start, only) != (None, None):
        parser.error("--from and --only need a notebook's number")
    if missing := set(asked) - {path.name[:2] for path in notebooks}:
        names = "\n  ".join(path.stem for path in notebooks)
        parser.error(f"no notebook {', '.join(sorted(missing))}; there are:\n  {names}")
    if start is not None:
        return [path for path in notebooks if path.name[:2] >= asked[0]]
    return [path for path in notebooks if not asked or path.name[:2] in asked]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the notebooks that `argv` asks for; returns 0, or 1 when a notebook failed (bad arguments end with 2)."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        profile = load_profile(args.profile)
    except DataError as error:
        parser.error(str(error))
    asked = str(Path(args.profile).absolute()) if args.profile.endswith(".toml") else args.profile
    lanes = max(1, min(args.jobs or profile.lanes, os.cpu_count() or 1))
    place = Place(files.project_root(), profile, asked, lanes)
    if args.public:
        from drehr_utils.data import public_data

        if public_data.main([]):
            return 1
    if args.check:
        from drehr_utils.use.check import check

        return check(profile)
    notebooks = _choose(parser, place, args.start, args.only)
    try:
        with artifacts.lock(place.cache / "run.lock", f"./run_all.sh --profile {profile.name}", wait=False):
            if args.fresh:
                if profile.protected and not args.yes:
                    answers = f"{place.show(place.cache)}/llm"
                    parser.error(f"--fresh deletes days of work (all but {answers}): confirm with --yes")
                for path in place.cache.glob("*"):
                    if path.name not in _KEPT:
                        artifacts.remove(path)
            artifacts.sweep(place.cache)
            return _run(place, notebooks)
    except DataError as error:
        print(f"Not started: {error}", file=sys.stderr)
    except OSError as error:
        if not (why := files.disk_fault(error)):
            raise
        where = path_shortener(place.root)(str(error.filename or place.cache))
        print(f"Stopped: {where}: {why}, then run this again: it goes on", file=sys.stderr)
    return 1


def _run(place: Place, notebooks: Sequence[Path]) -> int:
    began, n = time.monotonic(), len(notebooks)
    if place.profile.benchmark is None:
        notebooks = sorted(notebooks, key=lambda notebook: (not notebook.name.startswith("06"), notebook.name))
    failed = _in_order(place, notebooks) if min(place.lanes, n) == 1 else _in_lanes(place, notebooks)
    if not failed:
        print(f"total {time.monotonic() - began:.1f} s")
    return int(failed)


def _in_order(place: Place, notebooks: Sequence[Path]) -> bool:
    """Runs one notebook after the other, up to the first that fails; returns whether one did."""
    terminal = sys.stdout.isatty()
    for number, notebook in enumerate(notebooks, start=1):
        label = f"[{number}/{len(notebooks)}] {notebook.stem} ..."
        # On a terminal papermill's bar, one step a cell, would land on an unfinished line.
        print(label, end="\n" if terminal else " ", flush=True)
        began = time.monotonic()
        failure = execute(place, notebook, progress_bar=terminal)
        took = f"{'failed after ' if failure else ''}{time.monotonic() - began:.1f} s"
        print(f"{label} {took}" if terminal else took, flush=True)
        if failure:
            print(failure, file=sys.stderr)
            return True
    return False


def _in_lanes(place: Place, notebooks: Sequence[Path]) -> bool:
    """Runs `place.lanes` notebooks at a time, a process each; begins no other after one that fails. What two of them
    need is made once: the cache's locks let one wait for the other."""
    waiting, running, failed = list(notebooks), {}, False
    after = _AFTER | (_ITS_BENCHMARK if place.profile.benchmark is None else {})
    with ProcessPoolExecutor(place.lanes, mp_context=get_context("spawn")) as pool:
        try:
            while running or (waiting and not failed):
                unfinished = {notebook.name[:2] for notebook in (*waiting, *running.values())}
                ready = [n for n in waiting if after.get(n.name[:2]) not in unfinished]
                ready = [n for n in ready if n.name[:2] != _LAST or unfinished == {_LAST}]
                for notebook in ready[: 0 if failed else place.lanes - len(running)]:
                    running[pool.submit(_in_lane, place, notebook)] = notebook
                    waiting.remove(notebook)
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    notebook = running.pop(future)
                    label = f"[{len(notebooks) - len(waiting) - len(running)}/{len(notebooks)}] {notebook.stem} ..."
                    try:
                        failure, took = future.result()
                    except BrokenProcessPool:
                        failure, took = f"{place.show(notebook)}: a process was killed; is memory short? --jobs 1", 0.0
                    print(f"{label} {'failed after ' if failure else ''}{took:.1f} s", flush=True)
                    if failure:
                        print(failure, file=sys.stderr)
                        failed = True
        except KeyboardInterrupt:  # which a terminal sends to the lanes, too, but `kill` doesn't
            for lane in active_children():
                lane.terminate()
            raise
    return failed


def _in_lane(place: Place, notebook: Path) -> tuple[str | None, float]:
    parent, began = os.getppid(), time.monotonic()

    def end_with_the_run() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)  # the run was killed, and its lock is free

    threading.Thread(target=end_with_the_run, daemon=True).start()
    return execute(place, notebook, progress_bar=False), time.monotonic() - began


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
