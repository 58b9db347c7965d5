"""Imports run downwards through the rooms (CONTRIBUTING.md), never upwards and never between papers."""

import ast

from drehr_utils.profiles import ROOT

PACKAGE = ROOT / "drehr_utils"
FLOORS = (  # from the ground up: a room may use what stands before it
    "errors", "files", "artifacts", "cluster", "config", "overrides", "profiles", "data", "knowledge", "llm",
    "training", "search", "evaluation", "corpus", "pipeline", "papers", "use", "run",
)  # fmt: skip


def arrows() -> list[tuple[str, str]]:
    """(importing module, imported module) inside the package, without its name: ("papers.kg.systems", "pipeline")."""
    modules = {
        path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", "."): path for path in PACKAGE.rglob("*.py")
    }
    found = []
    for module, path in modules.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "drehr_utils":
                base = node.module.partition(".")[2]
                for alias in node.names:
                    joined = f"{base}.{alias.name}".strip(".")
                    found.append((module, joined if joined in modules or joined in FLOORS else base))
            elif isinstance(node, ast.Import):
                found += [(module, a.name.partition(".")[2]) for a in node.names if a.name.startswith("drehr_utils.")]
    return [(a, b) for a, b in found if b]


def test_arrows_run_downwards_and_never_between_papers():
    assert len(arrows()) > 100
    for a, b in arrows():
        floor_a, floor_b = a.split(".")[0], b.split(".")[0]
        if floor_a == "__init__":
            continue
        assert FLOORS.index(floor_b) <= FLOORS.index(floor_a), f"{a} imports {b}, which stands above it"
        if floor_a == floor_b == "papers":
            assert a.split(".")[1] == b.split(".")[1], f"{a} imports {b}: what two papers need goes up"
