"""The site: committed notebooks as they were executed, the texts, the API's pages and a search, in one folder of HTML.

    ./run_all.sh site   # or python -m drehr_utils.use.site, with the packages of the extra `[site]`

Nothing is executed, and no module imported to document it. notebooks/site/conf.py is Sphinx's side. A warning of
Sphinx's and a dead link are errors.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from html import unescape
from pathlib import Path
from urllib.parse import unquote

from drehr_utils.errors import DataError
from drehr_utils.profiles import ROOT
from drehr_utils.use.saved_notebooks import strip_protected

OUT = ROOT / "data/cache/site"
TEXTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "data/README.md", "data/models/*/README.md")
_PLAIN = "---\nmyst: {enable_extensions: [colon_fence], disable_syntax: [html_inline, html_block]}\n---\n"
_DIRECTIVES = {"classmethod": "classmethod", "staticmethod": "staticmethod"} | dict.fromkeys(
    ("property", "cached_property"), "property"
)


def build(source: Path = ROOT, out: Path = OUT) -> Path:
    """The site of the checkout `source`, in out/html. Raises DataError, saying what is wrong or missing."""
    if not all(map(importlib.util.find_spec, ("latex2mathml", "myst_nb", "sphinx_book_theme"))):
        raise DataError("the site needs Sphinx: pip install -c requirements.lock '.[site]'")
    shutil.rmtree(out, ignore_errors=True)
    stage(source, out / "pages")
    options = ["-W", "--keep-going", "-q", "-d", out / "doctrees", "-D", f"checkout={source.resolve()}"]
    sphinx = [sys.executable, "-m", "sphinx", *options, "-c", ROOT / "notebooks/site", out / "pages", out / "html"]
    if subprocess.run(sphinx).returncode:
        raise DataError("the site has errors or warnings, named above")
    shutil.copy(out / "html/README.html", out / "html/index.html")
    if dead := dead_links(out / "html"):
        raise DataError("dead links:\n  " + "\n  ".join(dead))
    return out / "html"


def stage(source: Path, pages: Path) -> None:
    """What becomes a page or stands on one, each where it is in the checkout; the API's pages in api/."""
    for pattern in (*TEXTS, "figures/*.png", "notebooks/[0-9][0-9]_*.ipynb"):
        for path in sorted(source.glob(pattern)):
            to = pages / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, to)
            if path.suffix == ".ipynb":
                model = {"type": "notebook", "content": json.loads(path.read_text(encoding="utf-8"))}
                strip_protected(model)
                to.write_text(json.dumps(model["content"]), encoding="utf-8")
    (pages / "api").mkdir()
    index, room = "# The package\n\nA room imports only from rooms above its own (CONTRIBUTING.md).\n", ""
    for path in sorted((source / "drehr_utils").rglob("*.py"), key=lambda path: (path.parent, path)):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if path.name == "__init__.py":
            continue
        module = module_of(path.relative_to(source))
        name = module.removeprefix("drehr_utils.")
        if room != (room := name.rpartition(".")[0]):
            index += f"\n## {room}\n\n"
        said = " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())
        index += f"- [{name}]({module}.html): {said}\n"
        (pages / f"api/{module}.md").write_text(_PLAIN + "\n".join(_module_page(tree, module)), encoding="utf-8")
    index += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
    (pages / "api/index.md").write_text(_PLAIN.replace("[colon", "[attrs_inline, colon") + index, encoding="utf-8")


def module_of(file: Path) -> str:
    """drehr_utils/files.py -> drehr_utils.files."""
    return ".".join(file.with_suffix("").parts)


def _module_page(tree: ast.Module, module: str) -> Iterator[str]:
    yield f"# {module.removeprefix('drehr_utils.')}\n\n:::{{py:module}} {module}\n:::\n"
    yield f"{ast.get_docstring(tree) or ''}\n"
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    origin = {name.asname or name.name: f"{node.module}.{name.name}" for node in imports for name in node.names}
    for node in ast.walk(tree):  # a bare name, where two modules define it, would be a warning or the wrong link
        for annotation in filter(None, (getattr(node, "annotation", None), getattr(node, "returns", None))):
            for name in ast.walk(annotation):
                if isinstance(name, ast.Name):
                    name.id = origin.get(name.id, name.id)
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield from _described(node)


def _described(node: ast.ClassDef | ast.FunctionDef, in_class: bool = False) -> Iterator[str]:
    """A directive of Sphinx's Python domain: signature, docstring and, of a class, its public methods."""
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else []
    if isinstance(node, ast.ClassDef):
        kind, fields = "class", [ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign)]
        start = next((n for n in methods if n.name == "__init__"), None)
        signature = ast.unparse(start.args).removeprefix("self").removeprefix(", ") if start else ", ".join(fields)
    else:
        kinds = [_DIRECTIVES.get(ast.unparse(decorator)) for decorator in node.decorator_list]
        kind = next(filter(None, kinds), "method" if in_class else "function")
        signature = ast.unparse(node.args)
        if in_class and kind != "staticmethod":
            signature = signature.partition(", ")[2]
    returns = f" -> {ast.unparse(node.returns)}" if getattr(node, "returns", None) else ""
    fence = ":" * (3 if in_class else 4)
    shown = node.name if kind == "property" else f"{node.name}({signature}){returns}"
    yield f"{fence}{{py:{kind}}} {shown}\n"
    yield f"{ast.get_docstring(node) or ''}\n"
    for method in methods:
        if not method.name.startswith("_"):
            yield from _described(method, in_class=True)
    yield f"{fence}\n"


def anchor_key(heading: str) -> str:
    """One spelling for a heading, its anchor as Jupyter spells it and as a code host does."""
    return re.sub(r"[\W_]+", "", heading.lower())


@cache
def _page(path: Path) -> tuple[frozenset[str], frozenset[str]]:
    """A page's links and ids."""
    text = path.read_text(encoding="utf-8")
    links, ids = (re.findall(rf'\s(?:{kind})="([^"]*)"', text) for kind in ("href|src", "id"))
    return frozenset(map(unescape, links)), frozenset(map(unescape, ids))


def dead_links(site: Path) -> list[str]:
    """The links and images of a folder of pages that lead to no file of it, or to no place on a page: "page: link"."""
    dead = []
    for page in sorted(site.rglob("*.html")):
        if page.relative_to(site).parts[0] in ("_modules", "_static"):  # code that reads like links; templates
            continue
        for link in sorted(_page(page)[0]):
            if re.match("[a-z]+:|//", link):
                continue
            name, _, anchor = re.sub(r"\?[^#]*", "", link).partition("#")
            target = (page.parent / unquote(name)).resolve() if name else page
            lost = not target.is_file() or not target.is_relative_to(site.resolve())
            if lost or anchor and target.suffix == ".html" and unquote(anchor) not in _page(target)[1]:
                dead.append(f"{page.relative_to(site).as_posix()}: {link}")
    return dead


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    try:
        print(f"{build().relative_to(ROOT)}/index.html")
    except DataError as error:
        sys.exit(str(error))
