"""A notebook knows the cells, data and results that its outputs belong to, and says which of them changed."""

import json

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from drehr_utils import run
from drehr_utils.use import provenance

SOURCES = (
    "import os\nimport pandas as pd\nfrom drehr_utils import files\nroot = os.environ['DREHR_ROOT']",
    "rows = pd.read_csv(f'{root}/data/notes.csv')\nopen(f'{root}/data/cache/made', 'w').write('made')",
    "files.write_atomically(files.project_root() / 'figures/table.csv', rows.to_csv().encode())\n"
    "rows.plot().get_figure().savefig(f'{root}/figures/plot.png');",
    "pd.read_csv(f'{root}/figures/table.csv'); pd.read_csv(f'{root}/figures/earlier.csv')",
)


@pytest.fixture
def notebook(tmp_path, monkeypatch):
    monkeypatch.setenv("DREHR_ROOT", str(tmp_path))
    monkeypatch.delenv("MPLBACKEND")
    for name in ("data/cache", "figures", "notebooks"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("data/notes.csv", "figures/earlier.csv"):
        (tmp_path / name).write_text("a\n1\n2\n")
    path = tmp_path / "notebooks/00_a.ipynb"
    cells = [new_code_cell("profile = 'open'", metadata={"tags": ["parameters"]}), *map(new_code_cell, SOURCES)]
    nbformat.write(new_notebook(cells=cells), path)
    assert provenance.changed(path, tmp_path) == ["holds no digests: it was not made by ./run_all.sh"]
    assert run.main([]) == 0
    return path


def test_each_file_is_named_once_and_nothing_else(notebook, tmp_path):
    kept = json.loads(notebook.read_text())["metadata"]["drehr"]
    assert set(kept["read"]) == {"data/notes.csv", "figures/earlier.csv"}
    assert set(kept["wrote"]) == {"figures/table.csv", "figures/plot.png"}
    assert provenance.changed(notebook, tmp_path) == []


@pytest.mark.parametrize("name", ["data/notes.csv", "figures/earlier.csv", "figures/table.csv", "figures/plot.png"])
def test_a_changed_or_missing_file_is_named(notebook, tmp_path, name, capsys):
    (tmp_path / name).write_text("a\n3\n")
    assert [name in said and said.endswith("has changed") for said in provenance.changed(notebook, tmp_path)] == [True]
    (tmp_path / name).unlink()
    assert provenance.main() == 1
    assert f"00_a.ipynb: {name}, which it" in capsys.readouterr().out


def test_another_papers_rows_change_nothing_and_its_own_do(notebook, tmp_path):
    ledger, nb = tmp_path / "data/claims.csv", nbformat.read(notebook, as_version=4)
    ledger.write_text("id,paper\na-01,a\nb-01,b\n")
    nb.metadata["drehr"] |= provenance.digests(nb, ["read\tdata/claims.csv\n"], tmp_path)
    nbformat.write(nb, notebook)
    ledger.write_text("id,paper\nc-01,c\na-01,a\nb-01,b\n")
    assert provenance.changed(notebook, tmp_path) == []
    ledger.write_text("id,paper\na-01,a\nb-02,b\n")
    assert provenance.changed(notebook, tmp_path) == ["data/claims.csv, which it read, has changed"]


def test_code_counts_and_prose_does_not(notebook, tmp_path):
    nb = nbformat.read(notebook, as_version=4)
    (tmp_path / "data/README.md").write_text("Other words.")
    nb.metadata["drehr"]["read"]["data/README.md"] = "of the words before"
    nb.cells.insert(1, nbformat.v4.new_markdown_cell("More prose."))
    nbformat.write(nb, notebook)
    assert provenance.changed(notebook, tmp_path) == []
    nb.cells[-1].source += "  # edited"
    nbformat.write(nb, notebook)
    assert provenance.changed(notebook, tmp_path) == ["its code cells have changed"]


def test_a_models_weights_count_which_are_opened_unseen(tmp_path):
    (model := tmp_path / "data/models/mine").mkdir(parents=True)
    for name in ("modules.json", "model.safetensors"):
        (model / name).write_text(name)
    log = ["read\tdata/models/mine/modules.json\n", "read\tdata/models/gone/modules.json\n"]
    read = provenance.digests(new_notebook(), log, tmp_path)["read"]
    assert set(read) == {"data/models/mine/modules.json", "data/models/mine/model.safetensors"}
