"""The pre-save hook inside Jupyter's own contents managers: a protected notebook is saved without its outputs."""

import asyncio
import json
import os
import re
import subprocess
import sys

import nbformat
import pytest
from jupyter_server.services.contents.filemanager import AsyncFileContentsManager, FileContentsManager
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from drehr_utils.profiles import PROFILES, ROOT
from drehr_utils.use import saved_notebooks

HOOK = "drehr_utils.use.saved_notebooks.strip_protected"
WORD = "zephyrine"


def notebook(*sources: str):
    shown = [
        new_output("stream", name="stdout", text=WORD),
        new_output("display_data", data={"text/html": WORD}),
        new_output("error", ename="ValueError", evalue=WORD, traceback=[WORD]),
    ]
    cells = [new_code_cell(source, outputs=shown, execution_count=1) for source in sources]
    return new_notebook(cells=[new_markdown_cell("# Mine"), *cells], metadata={"widgets": {"state": WORD}})


def saved(folder, nb, manager=FileContentsManager) -> str:
    contents = manager(root_dir=str(folder), pre_save_hook=HOOK)
    done = contents.save({"type": "notebook", "format": "json", "content": nb}, "mine.ipynb")
    if asyncio.iscoroutine(done):
        asyncio.run(done)
    return (folder / "mine.ipynb").read_text()


@pytest.mark.parametrize("manager", [FileContentsManager, AsyncFileContentsManager, AsyncLargeFileManager])
def test_a_protected_notebook_is_saved_without_outputs(tmp_path, manager):
    text = saved(tmp_path, notebook('profile = "mimic"', "print(notes[0].text)"), manager)
    cells = json.loads(text)["cells"]
    assert WORD not in text and ["".join(cell["source"]) for cell in cells][1:] == [
        'profile = "mimic"',
        "print(notes[0].text)",
    ]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells[1:])


def test_asking_whether_a_profile_is_protected_leaves_jupyters_process_as_it_is(tmp_path):
    """load_profile("mimic") makes all that its process writes private, for good."""
    (tmp_path / "mine.toml").write_text('notes = "notes"\n')
    before = os.umask(0o022)
    try:
        saved(tmp_path, notebook('profile = "mimic"', f'load_profile("{tmp_path}/mine.toml")'))
    finally:
        after = os.umask(before)
    assert after == 0o022


OPEN_ONES = ['profile = "open"', "x = 1 / 2", 'plt.title("a/b")', "%matplotlib inline\n1 /2", 'f"{a}/{b}: {c:.1%}"']


@pytest.mark.parametrize("source", OPEN_ONES)
def test_an_open_one_keeps_them(tmp_path, source):
    assert saved(tmp_path, notebook(source)).count(WORD) == 5


def test_ones_own_notes_in_an_open_notebook(tmp_path):
    (tmp_path / "mine.toml").write_text('notes = "notes"\n')
    (tmp_path / "open.toml").write_text("seed = 3\n")
    (tmp_path / "notes").mkdir()
    for source in (
        f'load_profile("{tmp_path}/mine.toml")', f"read_notes(Path('{tmp_path}/notes'))", f"!head {tmp_path}/notes",
        f"# don't show\nopen('{tmp_path}/notes/1')\nopen('{tmp_path}/notes')", 'Path.home() / "notes"', "input('file')",
        f"open(f'{tmp_path}/notes/{{i}}.txt')", f"open('{tmp_path}/notes/%s.txt' % i)", f"glob('{tmp_path}/notes/*')",
        "!head $NOTES/1.txt", "os.path.expandvars(where)", "%env NOTES", "from os import environ\nenviron['NOTES']",
        'subprocess.run(["drehr-search", "query", "pain"])', 'use.search.main(["query", "pain"])',
        'pd.read_sql("select text from noteevents", "postgresql://localhost/mimic")', "open(sys.argv[1])",
        "bigquery.Client().query(sql)", 'pd.read_csv("https://intranet.hospital/notes.csv")',
        "load_profile('gone.toml')", 'open("../data/cache")', f'notes = f"""{tmp_path}/notes"""',
    ):  # fmt: skip
        (ROOT / "data/cache").mkdir(exist_ok=True)
        assert WORD not in saved(tmp_path, notebook('profile = "open"', source)), source
    assert WORD not in saved(tmp_path, notebook("this is (no Python", f"'{tmp_path}/notes'"))


def test_what_the_readme_makes_inside_the_checkout(tmp_path, monkeypatch):
    """The index, the model, and notes at the profile's default place: git ignores them, or knows nothing of them."""
    root = tmp_path / "checkout"
    for folder in ("notebooks", "data/open_kg", "drehr-index", "drehr-model", "data/mimic-iv-note"):
        (root / folder).mkdir(parents=True)
    for name in ("notebooks/00.ipynb", "data/open_kg/kg.tsv", "drehr-index/notes", "data/mimic-iv-note/discharge.csv"):
        (root / name).touch()
    git = ["git", "-C", str(root), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "notebooks", "data/open_kg"], check=True)
    monkeypatch.setattr(saved_notebooks, "ROOT", root)
    for source in (
        'NoteIndex.open("drehr-index")', 'NoteIndex.open("../drehr-index")', 'SentenceTransformer("../drehr-model")',
        'Path("../data/mimic-iv-note")', '!drehr-search query "chest pain"', "!head drehr-index/notes",
        "%%bash\ndrehr-search query pain", "%cd ../drehr-index", 'Path("../data") / "mimic-iv-note" / "discharge.csv"',
        'os.path.join("..", "data", "mimic-iv-note")', 'Path("..").rglob("*.csv")', "os.listdir(data)",
        "Path.cwd().parent", 'Path("/") / "srv" / "notes"', "from drehr_utils.use.search import main",
        "from drehr_utils.use import search as ask",
    ):  # fmt: skip
        assert WORD not in saved(tmp_path, notebook('profile = "open"', source)), source
    for source in ('Path("../data/open_kg")', '"../data/open_kg/kg.tsv"', '".."', "%matplotlib inline", "!ls ../data"):
        assert WORD in saved(tmp_path, notebook('profile = "open"', source)), source


def test_what_lies_beside_a_notebook_elsewhere(tmp_path):
    """A notebook of one's own, outside of the checkout, names files as they lie around it."""
    own = tmp_path / "study/notebooks"
    for folder in (own, tmp_path / "study/mine"):
        folder.mkdir(parents=True)
        (folder / "notes.csv").touch()
    for source in ('pd.read_csv("notes.csv")', "open('../mine/notes.csv')", 'open("../mine/notes-%d.txt" % i)'):
        assert WORD not in saved(own, notebook('profile = "open"', source)), source
    for source in ('"" + "."', 'Path("..")', 'pd.read_csv("gone.csv")'):
        assert WORD in saved(own, notebook('profile = "open"', source)), source


def test_a_profile_for_all_notebooks_counts(tmp_path, monkeypatch):
    monkeypatch.setenv("DREHR_PROFILE", "mimic")
    assert WORD not in saved(tmp_path, notebook("x = 1"))
    monkeypatch.setenv("DREHR_PROFILE", "open")
    assert WORD in saved(tmp_path, notebook("x = 1"))


def test_in_doubt_outputs_go(tmp_path, monkeypatch):
    monkeypatch.setattr(saved_notebooks, "is_protected", lambda nb, folder: 1 / 0)
    assert WORD not in saved(tmp_path, notebook("x = 1"))


@pytest.mark.slow
def test_the_committed_notebooks_keep_theirs():
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        assert not saved_notebooks.is_protected(json.loads(path.read_text())), path.name
    assert {name for name, profile in PROFILES.items() if profile.protected} == {"mimic"}


def test_the_git_hook_refuses_what_was_saved_without_jupyters(tmp_path):
    """As its docstring has it, in a repository of its own."""
    hook = re.search(r"#!/bin/sh\n.*?\n(?=\"\"\"|$)", saved_notebooks.__doc__, re.DOTALL)[0]
    hook = "\n".join(line.strip() for line in hook.splitlines()).replace("python -m", f"{sys.executable} -m")

    def git(*arguments: str) -> subprocess.CompletedProcess:
        command = ["git", "-c", "user.name=x", "-c", "user.email=x", *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)

    git("init", "-q")
    (path := tmp_path / ".git/hooks/pre-commit").write_text(hook + "\n")
    path.chmod(0o755)
    nbformat.write(notebook('profile = "open"'), tmp_path / "fine one.ipynb")
    git("add", "-A")
    assert git("commit", "-m", "x").returncode == 0
    nbformat.write(notebook('profile = "mimic"'), tmp_path / "mine.ipynb")
    git("add", "-A")
    done = git("commit", "-m", "y")
    assert done.returncode != 0 and "mine.ipynb: holds outputs" in done.stdout + done.stderr
    assert WORD not in done.stdout + done.stderr
    nbformat.write(new_notebook(), tmp_path / "mine.ipynb")  # cleared, but not added: git would commit the other one
    assert "mine.ipynb: holds outputs" in git("commit", "-m", "y").stderr
    git("add", "-A")
    assert git("commit", "-m", "y").returncode == 0
    widgets = notebook('profile = "mimic"')  # outputs cleared, but not what a widget holds
    for cell in widgets.cells:
        cell.outputs = []
    widgets.metadata["widgets"] = {"state": WORD}
    nbformat.write(widgets, tmp_path / "mine.ipynb")
    git("add", "-A")
    assert "mine.ipynb: holds outputs" in git("commit", "-m", "y").stderr
    (tmp_path / "mine.ipynb").write_text("{")
    git("add", "-A")
    assert "mine.ipynb, row 1" in git("commit", "-m", "y").stderr
