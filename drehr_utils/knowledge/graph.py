"""The knowledge graph in BIOS's layout: built from open vocabularies or UMLS, saved and loaded (DR.EHR §3.1)."""

from __future__ import annotations

import gc
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from drehr_utils.errors import DataError
from drehr_utils.files import naming, read_text_lines, same_characters

OPTIONAL_FILES = ("abbreviations", "types", "sources")  # ours: BIOS has no such files
JSON_FILES = {"term2CUI": "term2cui", "CUI2term": "cui2terms", "CUI2pt": "cui2pt"}  # and KnowledgeGraph's fields
JSON_FILES |= {name: name for name in ("is_a", "relations", *OPTIONAL_FILES)}
BIOS_HINT = "BIOS (Yu et al., 2022) has such a file; build_open_kg with save_bios, and umls_to_bios, write it"


def normalize_term(term: str) -> str:
    """Lower case, white space folded: the form in which terms are stored and matched."""
    return " ".join(same_characters(term).lower().split())


@contextmanager
def collector_paused() -> Iterator[None]:
    """Python's cycle collector would go over all that is made here again and again: a quarter of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


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

    def say_dropped(self, source: Path) -> None:
        """Prints what reading it from `source` left out, if anything."""
        if self.dropped:
            print(f"{source.name}: left out: {'; '.join(f'{what}, {n:,}' for what, n in self.dropped.items())}")

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

    def add_relation(self, cui: str, relation: str, other: str) -> None:
        pairs = self.relations.setdefault(cui, [])
        if (relation, other) not in pairs:
            pairs.append((relation, other))


# --- BIOS's files ----------------------------------------------------------------------------------------------------


def save_bios(kg: KnowledgeGraph, folder: Path) -> None:
    """Write bios.txt (concept id, tab, term) and the JSON files; the same graph gives the same bytes."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "bios.txt", "w", encoding="utf-8", newline="\n") as file:
        for cui, terms in kg.cui2terms.items():
            file.writelines(f"{cui}\t{term}\n" for term in terms)
    for name, attribute in JSON_FILES.items():
        (folder / f"{name}.json").write_text(json.dumps(getattr(kg, attribute), ensure_ascii=False), encoding="utf-8")


def _read_json(folder: Path, name: str, check: Callable[[object], bool], expected: str) -> dict:
    path = folder / f"{name}.json"
    with naming(path, "fetch or build the file again"):  # all of it may be one line
        value = json.loads("\n".join(line for _, line in read_text_lines(path, BIOS_HINT, most=-1)))
    if not isinstance(value, dict):
        raise DataError(f"{name}.json: one JSON object expected, not {type(value).__name__}. {BIOS_HINT}.")
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


@collector_paused()
def load_bios(folder: Path) -> KnowledgeGraph:
    """Read a folder in BIOS's layout; each file may be gzipped (`bios.txt.gz`).

    Relations whose source or target is no concept, and blank terms, are counted in `kg.dropped`. Raises DataError
    (file, row, field)."""
    folder, kg = Path(folder), KnowledgeGraph()
    for term, cuis in _read_json(folder, "term2CUI", _is_texts, "a list of concept ids").items():
        if not term.strip():
            kg.dropped["term2CUI.json: blank term"] += 1
            continue
        known = kg.term2cui.setdefault(normalize_term(term), [])
        known += [cui for cui in dict.fromkeys(cuis) if cui not in known]
    terms_of = _read_json(folder, "CUI2term", _is_texts, "a list of terms")
    kg.cui2terms = {cui: list(dict.fromkeys(map(normalize_term, terms))) for cui, terms in terms_of.items() if terms}
    preferred = _read_json(folder, "CUI2pt", _is_text, "a term")
    kg.cui2pt = {cui: normalize_term(term) for cui, term in preferred.items()}
    for row, line in read_text_lines(folder / "bios.txt", BIOS_HINT):
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != 2:
            raise DataError(f"bios.txt, row {row}: {len(cells)} columns instead of 2, a concept id and a term")
        if not all(cells):
            raise DataError(f"bios.txt, row {row}: field {'term' if cells[0] else 'concept id'!r} is empty; fill it")
        kg.add_term(cells[0], normalize_term(cells[1]))
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
    for cui, parents in _read_json(folder, "is_a", _is_texts, "a list of concept ids").items():
        if kept := [parent for parent in parents if cui in known and parent in known]:
            kg.is_a[cui] = kept
        kg.dropped["is_a.json: concept unknown"] += len(parents) - len(kept)
    for cui, pairs in _read_json(folder, "relations", _is_pairs, "a list of [relation, concept id]").items():
        if kept := [(relation, other) for relation, other in pairs if cui in known and other in known]:
            kg.relations[cui] = kept
        kg.dropped["relations.json: concept unknown"] += len(pairs) - len(kept)
    kg.dropped = +kg.dropped  # what was counted at all
    for name in OPTIONAL_FILES:
        if any((folder / f"{name}.json{end}").exists() for end in ("", ".gz")):
            check, expected = (_is_text, "a type") if name == "types" else (_is_texts, "a list")
            setattr(kg, name, _read_json(folder, name, check, expected))
    return kg
