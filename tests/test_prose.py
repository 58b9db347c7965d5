"""What notebooks and READMEs name in backticks is there, and what they link to: modules, functions, files, headings."""

import pkgutil
import re

import pytest
from links import is_dead, links, prose

from drehr_utils.profiles import ROOT

PACKAGE = sorted((ROOT / "drehr_utils").rglob("*.py"))
MODULES = [".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in PACKAGE]
TEXTS = [*sorted((ROOT / "notebooks").glob("*.ipynb")), *sorted(ROOT.glob("*.md")), ROOT / "data/README.md"]
MADE_LATER = ("data/cache", "data/public")


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


def test_a_dead_link_is_found(tmp_path):
    text = tmp_path / "text.md"
    text.write_text(
        "# What *it* is\n[a](text.md#what-it-is) [b](text.md#what) [c](gone.md) [d](https://nowhere.example)"
    )
    assert links(text) == {"text.md#what-it-is", "text.md#what", "gone.md"}
    assert {link for link in links(text) if is_dead(link, tmp_path)} == {"text.md#what", "gone.md"}


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    dead = [link for link in sorted(links(path)) if is_dead(link, path.parent)]
    assert not [link for link in dead if not re.match(r"(\.\./)*(data/cache|data/public)", link)]
