"""The relative links of the tree's texts, and whether they lead somewhere: a file, or a heading within one."""

import json
import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote


def prose(path: Path) -> str:
    """A Markdown file's text; of a notebook, all cells' sources."""
    if path.suffix == ".md":
        return path.read_text()
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text())["cells"])


def links(path: Path) -> set[str]:
    """What a text links to, and a notebook's HTML outputs; other sites aside."""
    found = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    if path.suffix == ".ipynb":
        outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", [])]
        shown = "\n".join("".join(output.get("data", {}).get("text/html", "")) for output in outputs)
        found += re.findall(r'href="([^"]+)"', shown)
    return {link for link in found if not re.match(r"[a-z]+:", link)}


@cache
def anchors(path: Path) -> set[str]:
    """A file's headings, spelt as Jupyter does in a notebook and a code host in Markdown."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    if path.suffix == ".md":
        headings = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in headings}


def is_dead(link: str, folder: Path) -> bool:
    """Whether a link from a file in `folder` leads nowhere."""
    name, _, anchor = link.partition("#")
    path = folder / unquote(name)
    if path.is_dir() and "drehr_utils" not in path.resolve().parts:  # of folders the site has the package's rooms
        return True
    return not path.exists() or bool(anchor) and unquote(anchor) not in anchors(path)
