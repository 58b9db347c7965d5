"""The knowledge graph in BIOS's layout: built from open vocabularies or UMLS, saved and loaded (DR.EHR §3.1)."""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import pandas as pd

from drehr_utils.errors import DataError

JSON_FILES = {
    "term2CUI": "term2cui",
    "CUI2term": "cui2terms",
    "CUI2pt": "cui2pt",
    "is_a": "is_a",
    "relations": "relations",
}
OPTIONAL_FILES = ("abbreviations", "types", "sources")  # ours: BIOS has no such files
BIOS_HINT = "BIOS (Yu et al., 2022) has such a file; build_open_kg with save_bios, and umls_to_bios, write it."


def normalize_term(term: str) -> str:
    """Lower case, white space folded: the form in which terms are stored and matched."""
    return " ".join(term.lower().split())


@dataclass
class KnowledgeGraph:
    """Concepts ("cuis") with their terms (lower-case, the preferred one first), broader concepts and other relations.

    `abbreviations`: which of a concept's terms are known to be abbreviations; an ambiguous one has several cuis in
    `term2cui`. `types` and `sources` serve counting and are empty in a BIOS without them. `dropped` counts what was
    left out, by reason; everything else is in a fixed order.
    """

    term2cui: dict[str, list[str]] = field(default_factory=dict)
    cui2terms: dict[str, list[str]] = field(default_factory=dict)
    cui2pt: dict[str, str] = field(default_factory=dict)
    is_a: dict[str, list[str]] = field(default_factory=dict)
    relations: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    abbreviations: dict[str, list[str]] = field(default_factory=dict)
    types: dict[str, str] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter, compare=False)

    def cuis(self, term: str) -> list[str]:
        """Concepts that the term names, in any case; empty where none does."""
        return self.term2cui.get(normalize_term(term), [])

    def synonyms(self, cui: str) -> list[str]:
        """All terms of the concept, its preferred term among them."""
        return self.cui2terms.get(cui, [])

    def hypernyms(self, cui: str) -> list[str]:
        """Directly broader concepts."""
        return self.is_a.get(cui, [])

    def related(self, cui: str) -> list[tuple[str, str]]:
        """(relation, concept) for every relation but is_a."""
        return self.relations.get(cui, [])

    def hyponyms(self, cui: str) -> list[str]:
        """Directly narrower concepts: for CliniQ's query expansion (§4.2.1), never for stage I (DR.EHR §3.1)."""
        return self._narrower.get(cui, [])

    @cached_property
    def _narrower(self) -> dict[str, list[str]]:
        narrower = defaultdict(list)
        for cui, parents in self.is_a.items():
            for parent in parents:
                narrower[parent].append(cui)
        return dict(narrower)

    def add_term(self, cui: str, term: str) -> None:
        cuis = self.term2cui.setdefault(term, [])
        if cui not in cuis:
            cuis.append(cui)
            self.cui2terms.setdefault(cui, []).append(term)

    def add_abbreviation(self, cui: str, term: str) -> None:
        if cui not in self.term2cui.get(term, []):
            self.add_term(cui, term)
            self.abbreviations.setdefault(cui, []).append(term)


def kg_counts(kg: KnowledgeGraph) -> dict[str, pd.DataFrame]:
    """Counts for notebook 02: tables "source" and "type" (concepts, terms), and "relation" (edges, concepts)."""
    size = {cui: len(terms) for cui, terms in kg.cui2terms.items()}

    def table(name: str, pairs: Iterable[tuple[str, int]], columns: tuple[str, str]) -> pd.DataFrame:
        frame = pd.DataFrame(pairs, columns=[name, "n"]).groupby(name)["n"].agg(["size", "sum"]).reset_index()
        frame.columns = [name, *columns]
        return frame.sort_values([columns[1], name], ascending=[False, True], ignore_index=True)

    edges = [(relation, 1) for pairs in kg.relations.values() for relation, _ in pairs]
    edges += [("is_a", 1) for parents in kg.is_a.values() for _ in parents]
    return {
        "source": table("source", ((s, size[c]) for c, s_ in kg.sources.items() for s in s_), ("concepts", "terms")),
        "type": table("type", ((type_, size[c]) for c, type_ in kg.types.items()), ("concepts", "terms")),
        "relation": table("relation", edges, ("rows", "edges"))[["relation", "edges"]],
    }


# --- BIOS's files ----------------------------------------------------------------------------------------------------


def save_bios(kg: KnowledgeGraph, folder: Path) -> None:
    """Write bios.txt (concept id, tab, term) and the JSON files; the same graph gives the same bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "bios.txt", "w", encoding="utf-8", newline="\n") as file:
        for cui, terms in kg.cui2terms.items():
            file.writelines(f"{cui}\t{term}\n" for term in terms)
    for name, attribute in [*JSON_FILES.items(), *((name, name) for name in OPTIONAL_FILES)]:
        (folder / f"{name}.json").write_text(json.dumps(getattr(kg, attribute), ensure_ascii=False), encoding="utf-8")


def _find(path: Path) -> Path | None:
    return next((p for p in (path, path.with_name(f"{path.name}.gz")) if p.exists()), None)


def read_lines(path: Path, hint: str) -> Iterator[str]:
    """Lines of a text file or its .gz; DataError where neither is there, it isn't UTF-8 or the gzip is broken."""
    found = _find(Path(path))
    if found is None:
        raise DataError(f"{path.name} (or {path.name}.gz) is missing. {hint}")
    row = 0
    try:
        with (gzip.open if found.suffix == ".gz" else open)(found, "rb") as file:
            for row, line in enumerate(file, 1):
                yield line.decode("utf-8-sig" if row == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{found.name}, row {row}: not UTF-8 ({error.reason}). Save the file as UTF-8.") from None
    except (EOFError, gzip.BadGzipFile, gzip.zlib.error):
        raise DataError(f"{found.name}, after row {row}: broken gzip. Copy or fetch the file again.") from None


def _read_json(folder: Path, name: str, check: Callable[[object], bool], expected: str) -> dict:
    try:
        value = json.loads("".join(read_lines(folder / f"{name}.json", BIOS_HINT)))
    except json.JSONDecodeError as error:
        where = f"{name}.json, row {error.lineno}, column {error.colno}"
        raise DataError(f"{where}: not JSON ({error.msg}). Fetch or build the file again.") from None
    if not isinstance(value, dict):
        raise DataError(f"{name}.json: one JSON object expected, not {type(value).__name__}. {BIOS_HINT}")
    for key, item in value.items():
        if not check(item):
            raise DataError(f"{name}.json, field {key!r}: {expected} expected. Fetch or build the file again.")
    return value


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _is_pairs(value: object) -> bool:
    return isinstance(value, list) and all(_is_texts(pair) and len(pair) == 2 for pair in value)


def load_bios(folder: Path, on_error: str = "raise") -> KnowledgeGraph:
    """Read a folder in BIOS's layout; each file may be gzipped (`bios.txt.gz`).

    on_error: "raise" stops at the first malformed row of bios.txt, "skip" counts such rows in `kg.dropped`. Relations
    whose source or target is no concept are dropped and counted either way. Raises DataError (file, row, field).
    """
    if on_error not in ("raise", "skip"):
        raise DataError(f"on_error must be 'raise' or 'skip', not {on_error!r}")
    folder, kg = Path(folder), KnowledgeGraph()
    for term, cuis in _read_json(folder, "term2CUI", _is_texts, "a list of concept ids").items():
        known = kg.term2cui.setdefault(normalize_term(term), [])
        known += [cui for cui in dict.fromkeys(cuis) if cui not in known]
    for cui, terms in _read_json(folder, "CUI2term", _is_texts, "a list of terms").items():
        kg.cui2terms[cui] = list(dict.fromkeys(map(normalize_term, terms)))
    for cui, term in _read_json(folder, "CUI2pt", _is_text, "a term").items():
        kg.cui2pt[cui] = normalize_term(term)
    for row, line in enumerate(read_lines(folder / "bios.txt", BIOS_HINT), 1):
        cells = [cell.strip() for cell in line.rstrip("\r\n").split("\t")]
        if len(cells) == 2 and all(cells):
            kg.add_term(cells[0], normalize_term(cells[1]))
            continue
        problem = f"{len(cells)} columns instead of 2 (concept id, term)"
        if len(cells) == 2:
            problem = f"field {'term' if cells[0] else 'concept id'!r} is empty"
        if on_error == "raise":
            raise DataError(f"bios.txt, row {row}: {problem}. Correct the row, or load with on_error='skip'.")
        kg.dropped[f"bios.txt: {problem}"] += 1
    for cui, terms in kg.cui2terms.items():
        kg.cui2pt.setdefault(cui, terms[0])
        for term in terms:  # the two tables may disagree; what either says holds
            if cui not in kg.term2cui.setdefault(term, []):
                kg.term2cui[term].append(cui)
    for term, cuis in kg.term2cui.items():
        for cui in cuis:
            if term not in kg.cui2terms.get(cui, ()):
                kg.cui2terms.setdefault(cui, []).append(term)
                kg.cui2pt.setdefault(cui, term)
    known = kg.cui2terms
    is_a = _read_json(folder, "is_a", _is_texts, "a list of concept ids")
    relations = _read_json(folder, "relations", _is_pairs, "a list of [relation, concept id]")
    kg.is_a = {c: kept for c, items in is_a.items() if c in known and (kept := [p for p in items if p in known])}
    kg.relations = {
        c: kept for c, items in relations.items() if c in known and (kept := [(r, o) for r, o in items if o in known])
    }
    for name, before, after in (("is_a", is_a, kg.is_a), ("relations", relations, kg.relations)):
        if lost := sum(map(len, before.values())) - sum(map(len, after.values())):
            kg.dropped[f"{name}.json: concept unknown"] = lost
    for name in filter(lambda name: _find(folder / f"{name}.json"), OPTIONAL_FILES):
        check, expected = (_is_text, "a type") if name == "types" else (_is_texts, "a list")
        setattr(kg, name, _read_json(folder, name, check, expected))
    return kg
