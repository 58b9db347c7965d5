"""Each stage killed at random points, on a full disk, in a folder that can't be written, and twice at once: what the
next run leaves is what an undisturbed run leaves.

python tests/long/interruptions.py            # as root (it mounts small disks); the last result lies beside it, in JSON
python tests/long/interruptions.py --points 1 --only training,index
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_notebook
from tqdm import tqdm

REPOSITORY = Path(__file__).parents[2]
RESULT = Path(__file__).with_suffix(".json")
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]
PROFILE = """
base = "smoke"
max_train_notes = 4
max_eval_patients = 4
save_steps = 1
encoder = "{encoder}"
published = {{ stage1 = {stage}, stage2 = {stage} }}
"""
# In 01's place, where there are few points: it takes a third of the time.
SMALL = """
import matplotlib.pyplot as plt
from drehr_utils.data import notes
from drehr_utils.evaluation import plots
from drehr_utils.profiles import load_profile
profile = load_profile(profile)
lengths = [len(note.text.split()) for note in notes.read_notes(profile.notes)[0]]
fig, axes = plt.subplots()
axes.hist(lengths)
plots.save_figure(fig, "fig_small", profile.figures)
"""
STAGE = "{{ max_steps = {steps}, batch_size = 4, positives_per_chunk = 8 }}"
SIZES = {False: (8, 40), True: (4, 16)}  # few points or not: steps of each stage of training, notes of an index


@contextlib.contextmanager
def own_root(small: bool) -> Iterator[Path]:
    """A project whose data are this one's and whose caches are empty, but for the graph; the package works in it. Its
    notebooks are this one's as well, or the `small` one alone."""
    steps, notes = SIZES[small]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "data/cache").mkdir(parents=True)
        for path in (REPOSITORY / "data").iterdir():
            if path.name != "cache":
                (root / "data" / path.name).symlink_to(path)
        if small:
            (root / "notebooks").mkdir()
            cells = [new_code_cell('profile = "smoke"', metadata={"tags": ["parameters"]}), new_code_cell(SMALL)]
            nbformat.write(new_notebook(cells=cells), root / "notebooks/01_small.ipynb")
        else:
            (root / "notebooks").symlink_to(REPOSITORY / "notebooks")
        (root / "trial.toml").write_text(PROFILE.format(encoder=root / "encoder", stage=STAGE.format(steps=steps)))
        os.environ |= {
            "TRIAL_NOTES": str(notes),
            "DREHR_ROOT": folder,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        os.environ |= {"HF_HUB_OFFLINE": "1", "DREHR_PROFILE": str(root / "trial.toml")}
        from tiny_bert import tiny_bert

        tiny_bert(root / "encoder")
        yield root


# --- the stages: each takes the profile and leaves its artefacts in the profile's cache -------------------------------


def graph(profile) -> None:
    from drehr_utils.knowledge import vocabularies

    vocabularies.open_graph(profile.cache / "kg", profile.open_kg)


def positives(profile) -> None:
    from drehr_utils import pipeline

    pipeline.stage1_sets(profile)
    pipeline.stage2_sets(profile)


def answers(profile) -> None:
    from drehr_utils import pipeline
    from drehr_utils.llm.client import answer_all
    from drehr_utils.llm.servers import Server

    server = Server(os.environ["TRIAL_SERVER"], "m", concurrency=8)
    asked = pipeline.requests(profile, "entity_generation")
    given = answer_all(asked, store=profile.cache / "llm/answers.sqlite", server=server, progress=False)
    if given.failed:
        raise OSError(f"{given.failed} answers failed")


def training(profile) -> None:
    from drehr_utils import pipeline

    pipeline.train_recipe(profile, profile.published)


def scores(profile) -> None:
    """And a table of them, as notebook 08 saves it."""
    from drehr_utils import pipeline
    from drehr_utils.evaluation import intervals, metrics, tables

    for split in ("dev", "test"):
        bench = pipeline.benchmark(profile, split)
        values = metrics.per_search(bench, pipeline.model_scores(profile, None, bench))
        found = intervals.evaluate_system("start", values, profile.resampling).query("group == 'all'")
        tables.save_table(found, f"trial_{split}", tables.Layout(caption=split, decimals=1), profile.tables)


def records(profile) -> None:
    import pandas as pd

    from drehr_utils.evaluation.records import Record

    for i in range(60):
        Record("trial.csv").add(profile, {"row": i}, lambda i=i: pd.DataFrame({"value": range(i, i + 20)}))


def index(profile) -> None:
    from drehr_utils import pipeline
    from drehr_utils.search import index as index_module
    from drehr_utils.search.hybrid import Hybrid, Weights

    index_module.NOTES_AT_ONCE = 4
    folder = profile.cache / "index"
    if (folder / "hybrid").exists():
        found = index_module.NoteIndex.open(folder)
    else:
        hybrid = Hybrid(pipeline.starting_encoder(profile), small_graph(), Weights(0.2, 0.4))
        found = index_module.NoteIndex.create(folder, hybrid)
    found.update(pipeline.notes(profile)[0][: int(os.environ["TRIAL_NOTES"])], progress=False)


def states() -> tuple[list, list]:
    """Notes before and after: 6 change, 3 go, 3 come. Each has words of its own, few enough to lie uncompressed."""
    from drehr_utils.data.notes import Note

    def note(i: int, state: str) -> Note:
        own = [hashlib.sha256(f"{state} {i} {j}".encode()).hexdigest()[:12] for j in range(9)]
        return Note(f"n{i}", f"p{i % 5}", "", " ".join([*own, *["mi", "cough"][: i % 3]]))

    before = [note(i, "before") for i in range(120)]
    return before, [*(note(i, "after") for i in range(6)), *before[6:117], *(note(i, "after") for i in range(120, 123))]


def prepare(profile) -> None:
    """An index of the notes before, and what is found before and after; not in the cache, for no trial begins here."""
    from drehr_utils import pipeline
    from drehr_utils.search.hybrid import Hybrid, Weights
    from drehr_utils.search.index import NoteIndex

    found, root = [], Path(os.environ["DREHR_ROOT"])
    for name, notes in zip(("before", "after"), states(), strict=True):
        made = NoteIndex.create(
            root / name, Hybrid(pipeline.starting_encoder(profile), small_graph(), Weights(0.2, 0.4))
        )
        made.update(notes, progress=False)
        found.append({hit.chunk_id: (hit.score, hit.text) for hit in made.search("mi cough", 200)})
    assert lying_in(root / "before", states()[0][:6]), "what is deleted would not be seen"
    (root / "found.json").write_text(json.dumps(found))


def lying_in(folder: Path, notes: list) -> bool:
    held = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    return any(note.text[:60].encode() in held for note in notes)


def copied(profile) -> None:
    """The prepared index in the cache."""
    from drehr_utils import artifacts

    before = Path(os.environ["DREHR_ROOT"]) / "before"
    try:
        artifacts.cached_folder(profile.cache / "index", lambda to: shutil.copytree(before, to, dirs_exist_ok=True))
    except shutil.Error:  # which lists each file
        raise OSError("no space left on the device for the prepared index") from None


def opened(profile):
    from drehr_utils.search import index as index_module

    index_module.NOTES_AT_ONCE = 4
    copied(profile)
    return index_module.NoteIndex.open(profile.cache / "index")


def compaction(profile) -> None:
    """Some notes change and some go: none of their text is left on the disk."""
    from drehr_utils.search.index import NoteIndex

    (before, after), compact, mark = states(), NoteIndex._finish, Path(os.environ["DREHR_ROOT"]) / COMPACTING

    def marked(self) -> None:
        began = time.monotonic()
        mark.touch()
        compact(self)
        mark.unlink()
        mark.with_suffix(".seconds").write_text(str(time.monotonic() - began))

    NoteIndex._finish = marked  # in this process, which is the trial's own
    opened(profile).update(after, remove_gone=True, progress=False)
    if lying_in(profile.cache / "index", [*before[:6], *before[117:]]):
        raise OSError("the text of deleted notes is on the disk")


def search_on(profile, ended: Path) -> None:
    found, searches = json.loads((Path(os.environ["DREHR_ROOT"]) / "found.json").read_text()), 0
    reader = opened(profile)
    while not ended.exists() or not searches:
        hits = {hit.chunk_id: (hit.score, hit.text) for hit in reader.search("mi cough", 200)}
        searches += 1
        # A batch's padding moves a score's last digits.
        whole = [state for state in found if {k: v[1] for k, v in state.items()} == {k: v[1] for k, v in hits.items()}]
        if not any(all(abs(state[k][0] - score) < 1e-4 for k, (score, _) in hits.items()) for state in whole):
            raise OSError("a search found neither the one state nor the other")


def to_and_fro(profile, ended: Path) -> None:
    before, after = states()
    written = opened(profile)
    for notes in (after, before, after):
        written.update(notes, remove_gone=True, progress=False)


def reading(profile) -> None:
    """Two readers beside a writer; the writer and one of the readers are killed, and another writer goes on."""
    from drehr_utils.errors import DataError

    copied(profile)
    beside_it = Path(os.environ["DREHR_ROOT"])  # whose disk isn't full
    ended, said = beside_it / f"ended-{os.getpid()}", beside_it / f"said-{os.getpid()}"

    def beside(do: Callable):
        def run() -> None:
            try:
                do(profile, ended)
            except Exception as error:
                said.write_text(f"{type(error).__name__}: {error}")

        process = _fork.Process(target=run)
        process.start()
        return process

    reader, lost, writer = beside(search_on), beside(search_on), beside(to_and_fro)
    for process in (writer, lost):
        process.join(random.uniform(0.2, 2))
        process.kill()
    again = beside(to_and_fro)
    again.join()
    ended.touch()
    reader.join()
    if said.exists() or reader.exitcode or again.exitcode:
        text = said.read_text() if said.exists() else "a process died"
        raise (DataError if text.startswith("DataError: process ") else OSError)(text)


def small_graph():
    from drehr_utils.knowledge.graph import KnowledgeGraph

    graph = KnowledgeGraph(cui2pt={"1": "myocardial infarction"})
    for term in ("myocardial infarction", "mi"):
        graph.add_term("1", term)
    return graph


def notebook(profile) -> None:
    """In a process of its own, as run_all.sh has it; the kernel dies with it."""
    done = subprocess.run(
        [sys.executable, "-m", "drehr_utils.run", "--profile", os.environ["DREHR_PROFILE"], "--only", "01"],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        from drehr_utils.errors import DataError

        said = done.stderr.strip()
        raise (DataError if said.startswith("Not started") else OSError)(said[:600])


STAGES: dict[str, Callable] = {
    stage.__name__: stage
    for stage in (positives, answers, training, scores, records, index, compaction, reading, graph, notebook)
}
PREPARED = {"compaction", "reading"}  # begin with an index that is there
COMPACTING = "compacting"  # a file in the root, there while an index is compacted


# --- what a stage leaves ----------------------------------------------------------------------------------------------


def left(profile) -> dict[str, str]:
    """Digest of each artefact by its path, without what tells the time: minutes, dates, logs, locks."""
    found = {}
    for path in sorted(profile.cache.rglob("*")):
        name = path.relative_to(profile.cache).as_posix()
        if not path.is_file() or name.startswith(("index/", "logs/")) or path.name.endswith((".lock", "-wal", "-shm")):
            continue
        if path.suffix == ".sqlite":
            with contextlib.closing(sqlite3.connect(path)) as database:
                tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
                # An answer's number is its turn, which differs from run to run.
                rows = [
                    sorted(repr(row[t == "answers" :]) for row in database.execute(f"SELECT * FROM {t}"))
                    for t in tables
                ]
                content = repr(rows).encode()
        elif path.name == "stage.json":
            content = repr({k: v for k, v in json.loads(path.read_text()).items() if k != "minutes"}).encode()
        elif path.suffix == ".ipynb":
            cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
            content = repr([(cell["source"], cell["outputs"]) for cell in cells]).encode()
        elif path.name == "trial.csv":
            rows = csv.DictReader(path.read_text().splitlines())
            content = repr([(row["row"], row["value"]) for row in rows]).encode()
        else:
            content = path.read_bytes()
        found[name] = hashlib.sha256(content).hexdigest()
    if (profile.cache / "index").exists():
        from drehr_utils.search.index import NoteIndex

        opened = NoteIndex.open(profile.cache / "index")
        rows = sorted(opened.table.search().to_arrow().to_pylist(), key=lambda row: row["id"])
        kept = [(row["id"], row["note_id"], row["patient"], row["text"], row["vector"]) for row in rows]
        hits = [(hit.score, hit.chunk_id) for hit in opened.search("mi cough", 50)]
        found["index"] = hashlib.sha256(repr((kept, hits)).encode()).hexdigest()
    return found


# --- trials -----------------------------------------------------------------------------------------------------------

_fork = multiprocessing.get_context("fork")  # a child begins with everything imported and the graph in memory


def _child(pipe, do: Callable, profile) -> None:
    os.setsid()  # a kill takes its own children along
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
    try:
        pipe.send((None, do(profile)))
    except Exception as error:
        pipe.send((f"{type(error).__name__}: {error}", None))


class Run:
    """A stage in a process of its own."""

    def __init__(self, do: Callable, profile):
        self.pipe, theirs = _fork.Pipe(duplex=False)
        self.process = _fork.Process(target=_child, args=(theirs, do, profile))
        self.began = time.monotonic()
        self.process.start()
        theirs.close()

    def end(self):
        """What it gave; raises RuntimeError with its error's text."""
        try:
            error, value = self.pipe.recv()
        except EOFError:
            error, value = "died", None
        self.process.join()
        self.seconds = time.monotonic() - self.began
        if error:
            raise RuntimeError(error)
        return value

    def killed_after(self, seconds: float, start: Path | None = None) -> bool:
        """Whether it was still at work then: so long after its beginning, or after the file `start` is there."""
        while start and self.process.is_alive() and not start.exists():
            time.sleep(0.001)
        self.process.join(seconds)
        alive = self.process.is_alive()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.kill()
        self.process.join()
        return alive


def empty(profile) -> None:
    shutil.rmtree(profile.cache, ignore_errors=True)
    profile.cache.mkdir(parents=True)


def failure(run: Run, profile) -> str:
    """The text of the error that a run ends with; "" if it ends well."""
    try:
        run.end()
    except RuntimeError as error:
        return str(error).replace(str(profile.cache), "<cache>")[:300]
    return ""


def trial(name: str, profile, points: int, rng: random.Random) -> dict:
    """What a stage did under each disturbance; under `unequal` what differed after it."""
    do, unequal = STAGES[name], []

    def mount(*arguments: str) -> bool:
        return subprocess.run(["mount", *arguments, profile.cache], stderr=subprocess.DEVNULL).returncode == 0

    empty(profile)
    run = Run(do, profile)
    run.end()
    expected = Run(left, profile).end()
    assert expected, name

    def compare(disturbance: str) -> None:
        try:
            Run(do, profile).end()
            found = Run(left, profile).end()
        except RuntimeError as error:
            unequal.append(f"{disturbance}: {error}")
            return
        if found != expected:
            differ = sorted(key for key in expected.keys() | found.keys() if expected.get(key) != found.get(key))
            unequal.append(f"{disturbance}: {', '.join(differ)}")

    kills, compacting, mark = 0, 0, Path(os.environ["DREHR_ROOT"]) / COMPACTING
    moments = {None: run.seconds}  # what a kill waits for: how long from then
    if name == "compaction":  # a small part of its run, which few kills would meet
        moments[mark] = float(mark.with_suffix(".seconds").read_text())
    for more, (start, lasts) in enumerate(moments.items(), 1):
        for _ in range(3 * points):
            if kills == more * points:
                break
            empty(profile)
            mark.unlink(missing_ok=True)
            after = rng.uniform(0, lasts)
            if not Run(do, profile).killed_after(after, start):
                continue
            kills += 1
            compacting += mark.exists()
            compare(f"killed after {after:.2f} s")

    said = {}
    size = sum(path.stat().st_size for path in profile.cache.rglob("*") if path.is_file())
    small, large = max(size // 2, 8192), 4 * size + 2**26
    if name in PREPARED:  # the disk has room for what it begins with, and no more
        before = (path for path in (Path(os.environ["DREHR_ROOT"]) / "before").rglob("*") if path.is_file())
        small = sum(-(-path.stat().st_size // 4096) * 4096 for path in before) + 2**15
    for fault, first, then in (
        ("full disk", f"size={small}", f"remount,size={large}"),
        ("read-only folder", "ro", f"remount,rw,size={large}"),
    ):
        empty(profile)
        copy_first = name in PREPARED and first == "ro"  # else what it begins with could not be put there
        if not mount("-t", "tmpfs", "-o", f"size={large}" if copy_first else first, "tmpfs"):
            said[fault] = "not tried: only root can mount"
            continue
        try:
            if copy_first:
                Run(copied, profile).end()
                mount("-o", "remount,ro")
            said[fault] = failure(Run(do, profile), profile)
            mount("-o", then)
            compare(fault)
        finally:
            subprocess.run(["umount", "-l", profile.cache], check=True)

    empty(profile)
    for one in [Run(do, profile), Run(do, profile)]:
        said["two at once"] = max(said.get("two at once", ""), failure(one, profile))
    unequal += [f"{fault}: {text}" for fault, text in said.items() if "Traceback" in text]
    if said["two at once"] and not said["two at once"].startswith("DataError"):  # which sends the second away
        unequal.append(f"two at once: {said['two at once']}")
    compare("two at once")
    return {
        "seconds": round(run.seconds, 2),
        "artefacts": len(expected),
        "kills": kills,
        **({"kills while it compacts": compacting} if name == "compaction" else {}),
        "said": said,
        "unequal": unequal,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20, help="kills a stage (default: 20)")
    parser.add_argument("--only", default=",".join(STAGES), help="stages, separated by commas")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    with own_root(small=given.points < 20) as root:
        from llm_server import chat_server

        from drehr_utils import pipeline
        from drehr_utils.profiles import load_profile

        # tqdm's own lock is shared by forked processes: one that is killed with it would stop all later ones.
        tqdm.set_lock(threading.RLock())
        profile, found = load_profile(root / "trial.toml"), {}
        pipeline.matcher(profile)  # once, for all children
        with chat_server(
            lambda prompt, body: f"- aspirin\n- {hashlib.sha256(prompt.encode()).hexdigest()[:8]}"
        ) as server:
            os.environ["TRIAL_SERVER"] = server.base_url
            if PREPARED & set(given.only.split(",")):
                Run(prepare, profile).end()
            for name in given.only.split(","):
                found[name] = trial(name, profile, given.points, random.Random(f"{given.seed} {name}"))
                print(f"\n{name}", json.dumps(found[name]), flush=True)
    if given.points >= 20:
        kept = json.loads(RESULT.read_text())["stages"] if RESULT.exists() else {}
        about = {"date": datetime.date.today().isoformat(), "seed": given.seed}
        about["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        kept |= {name: about | stage for name, stage in found.items()}
        result = {"command": "python tests/long/interruptions.py", "stages": kept}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return any(stage["unequal"] for stage in found.values())


if __name__ == "__main__":
    raise SystemExit(main())
