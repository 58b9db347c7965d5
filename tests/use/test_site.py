"""The site of a small checkout, built by Sphinx: its links, what a protected notebook showed, and a dead link's end."""

import importlib.util
import json
import shutil

import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from drehr_utils.errors import DataError
from drehr_utils.profiles import ROOT
from drehr_utils.use import site

there = all(map(importlib.util.find_spec, ("latex2mathml", "myst_nb", "sphinx_book_theme")))
with_sphinx = pytest.mark.skipif(not there, reason="its packages aren't in requirements.lock: pip install '.[site]'")
TABLE = """<table><tr>
<td><a href="../figures/tables/t.csv">t</a> <a href="01_b.ipynb#The-authors%27-loss">b</a></td>
</tr></table>"""


def notebook(path, title, code, shown):
    output = new_output("display_data", {"text/html": shown})
    cells = [new_markdown_cell(title), new_code_cell(code, outputs=[output], execution_count=1)]
    about = {"language_info": {"name": "python", "pygments_lexer": "python"}}
    path.write_text(json.dumps(new_notebook(cells=cells, metadata=about)))


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    for name in ("notebooks", "figures/tables", "data/models/drehr-improved", "drehr_utils/llm"):
        (folder / name).mkdir(parents=True)
    for name in ("CONTRIBUTING.md", "CHANGELOG.md", "data/README.md", "data/models/drehr-improved/README.md"):
        (folder / name).write_text(f"# Of {name}\n\n## It's here\n")
    (folder / "README.md").write_text("# Small\n\n[card](data/README.md#its-here) [a](notebooks/00_a.ipynb)\n")
    (folder / "figures/tables/t.csv").write_text("x\n1\n")
    for name in ("errors.py", "files.py", "llm/strict.py"):
        shutil.copy(ROOT / "drehr_utils" / name, folder / "drehr_utils" / name)
    for name in "ab":
        (folder / f"drehr_utils/{name}.py").write_text("class Task:\n    pass\n")
    use = "from drehr_utils.b import Task\n\ndef use(tasks: list[Task]) -> Task: ..."
    (folder / "drehr_utils/c.py").write_text(use)
    about = "# First\n\n[files](../drehr_utils/files.py), [files.naming](../drehr_utils/files.py), $\\tfrac12$"
    notebook(folder / "notebooks/00_a.ipynb", about, "profile = 'open'", TABLE)
    notebook(folder / "notebooks/01_b.ipynb", "# Second\n\n## The authors' loss", "profile = 'mimic'", "zephyrine")
    notebook(folder / "notebooks/scratch.ipynb", "# zephyrine", "1", "zephyrine")
    return folder


@pytest.mark.slow
@with_sphinx
def test_pages_links_and_nothing_protected(checkout, tmp_path):
    html = site.build(checkout, tmp_path / "site")
    assert (html / "index.html").read_bytes() == (html / "README.html").read_bytes()
    first = (html / "notebooks/00_a.html").read_text()
    assert 'href="../api/drehr_utils.files.html"' in first
    assert 'href="../api/drehr_utils.files.html#drehr_utils.files.naming"' in first
    assert 'href="01_b.html#the-authors-loss"' in first and "<math" in first
    assert (html / "figures/tables/t.csv").read_text() == "x\n1\n"
    assert 'href="data/README.html#it-s-here"' in (html / "README.html").read_text()
    assert "_modules/drehr_utils/files.html" in (html / "api/drehr_utils.files.html").read_text()
    assert "naming" in (html / "searchindex.js").read_text()
    third = (html / "api/drehr_utils.c.html").read_text()
    assert third.count('href="drehr_utils.b.html#drehr_utils.b.Task"') == 2 and "#drehr_utils.a.Task" not in third
    held = [path for path in (tmp_path / "site").rglob("*") if path.is_file() and b"zephyrine" in path.read_bytes()]
    assert not held


def test_what_becomes_a_page_and_which_links_are_dead(checkout, tmp_path):
    """What comes before Sphinx, and after it."""
    pages = tmp_path / "pages"
    site.stage(checkout, pages)
    staged = {path.relative_to(pages).as_posix() for path in pages.rglob("*") if path.is_file()}
    assert {"README.md", "notebooks/00_a.ipynb", "notebooks/01_b.ipynb"} <= staged
    assert not any("scratch" in name for name in staged)
    assert not any(b"zephyrine" in path.read_bytes() for path in pages.rglob("*") if path.is_file())
    (tmp_path / "html/sub").mkdir(parents=True)
    (tmp_path / "html/a.html").write_text('<p id="here"> <a href="sub/b.html#there">b</a> <a href="#no">no</a></p>')
    (tmp_path / "html/sub/b.html").write_text('<p id="there"> <a href="../a.html#here">a</a> <img src="gone.png"></p>')
    assert site.dead_links(tmp_path / "html") == ["a.html: #no", "sub/b.html: gone.png"]


@pytest.mark.slow
@with_sphinx
def test_what_leads_nowhere_is_an_error(checkout, tmp_path, capfd):
    links = "[gone](gone.md) [place](data/README.md#no-such) [folder](figures/tables/)"
    (checkout / "README.md").write_text(f"# Small\n\n{links}\n")
    with pytest.raises(DataError) as error:
        site.build(checkout, tmp_path / "site")
    assert "README.html: gone.md" in str(error.value) and "no-such" in str(error.value)
    assert "figures/tables" in str(error.value)
    (checkout / "README.md").write_text("# Small\n\n![gone](gone.png)\n")
    with pytest.raises(DataError, match="warnings"):
        site.build(checkout, tmp_path / "site")
    assert "gone.png" in capfd.readouterr().err
