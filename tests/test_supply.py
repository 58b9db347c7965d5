"""What comes from outside runs no code here: nothing is unpickled."""

import ast
import json
import os
import re

import numpy as np
import pytest

from drehr_utils.profiles import ROOT
from drehr_utils.training.positives import PositiveSets

MODULES = sorted((ROOT / "drehr_utils").rglob("*.py"))
# A package's own file, installed from an index like its code.
UNPICKLED = {"knowledge/vocabularies.py"}


def calls(source: str) -> set[str]:
    """Names called and modules imported, as written: "torch.load", "pickle"."""
    tree, found = ast.parse(source), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found.add(ast.unparse(node.func))
            found |= {f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in node.keywords}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def test_nothing_is_unpickled():
    notebooks = [json.loads(path.read_text())["cells"] for path in (ROOT / "notebooks").glob("*.ipynb")]
    cells = ["".join(cell["source"]) for nb in notebooks for cell in nb if cell["cell_type"] == "code"]
    sources = {path.relative_to(ROOT / "drehr_utils").as_posix(): path.read_text() for path in MODULES}
    loads = re.compile(
        r"pickle|^(torch|joblib|dill|shelve|marshal)(\.load)?$|read_pickle|allow_pickle=True|weights_only"
    )
    assert loads.search("torch.load") and "torch.load" in calls("import torch\ntorch.load(p)")
    for name, source in [*sources.items(), *((f"cell {i}", cell) for i, cell in enumerate(cells))]:
        found = {call for call in calls(source) if loads.search(call) and call != "torch"}
        assert not found or name in UNPICKLED, (name, found)


class Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_poisoned_cache_runs_nothing(tmp_path):
    np.savez(tmp_path / "p.npz", ids=np.array([Touch(tmp_path / "ran")], dtype=object))
    with pytest.raises(ValueError, match="allow_pickle"):
        PositiveSets.load(tmp_path / "p.npz")
    assert not (tmp_path / "ran").exists()
