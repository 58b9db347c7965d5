"""What notebooks and READMEs name in backticks is there: modules, functions, files."""

import json
import pkgutil
import re

import pytest

from drehr_utils.profiles import ROOT

PACKAGE = sorted((ROOT / "drehr_utils").rglob("*.py"))
MODULES = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in PACKAGE]
TEXTS = [*sorted((ROOT / "notebooks").glob("*.ipynb")), *sorted(ROOT.glob("*.md")), ROOT / "data/README.md"]
MADE_LATER = ("data/cache", "data/public")


def prose(path) -> str:
    if path.suffix == ".md":
        return path.read_text()
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def resolves(name: str) -> bool:
    """A dotted name from `drehr_utils`, a room or a module on: `losses.embedding_drift`, `training.losses`."""
    first, rest = name.split(".", 1)
    starts = [first] if first == "drehr_utils" else [m for m in MODULES if m.endswith(f".{first}")]
    for start in starts:
        try:
            return bool(pkgutil.resolve_name(f"{start}.{rest}"))
        except (ImportError, AttributeError):
            continue
    return False


def test_a_name_where_it_is_not_is_found():
    assert resolves("umls.umls_to_bios") and resolves("knowledge.umls") and not resolves("kg.umls_to_bios")


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_names_in_prose(path):
    text = prose(path)
    ticked = re.findall(r"`([^`\n]+)`", text)
    names = {t for t in ticked if re.fullmatch(r"[a-z_]\w*(\.[A-Za-z_]\w*)+", t)}
    names = {n for n in names if not re.search(r"\.(csv|tsv|jsonl?|gz|txt|lock|py|sh|toml|yml)$", n)}  # a file's
    names |= set(re.findall(r"\bdrehr_utils(?:\.[A-Za-z_]\w*)+", text))
    assert not [name for name in sorted(names) if not resolves(name)]
    files = {t for t in ticked if re.fullmatch(r"(data|tests|figures|notebooks|drehr_utils)/[\w./-]*", t)}
    missing = [file for file in sorted(files) if not file.startswith(MADE_LATER) and not (ROOT / file).exists()]
    assert not missing
