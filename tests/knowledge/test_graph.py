"""The knowledge graph: BIOS's files, the open graph, UMLS (expected values worked by hand or known in medicine)."""

import gzip
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from umls_miniature import conso, umls_release

from drehr_utils import corpus, pipeline
from drehr_utils.errors import DataError
from drehr_utils.evaluation import plots
from drehr_utils.knowledge import vocabularies
from drehr_utils.knowledge.graph import OPTIONAL_FILES, KnowledgeGraph, load_bios, save_bios
from drehr_utils.knowledge.umls import umls_to_bios
from drehr_utils.knowledge.vocabularies import build_open_kg
from drehr_utils.profiles import ROOT, load_profile

OPEN_KG = ROOT / "data/open_kg/concepts.tsv.gz"


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def kg() -> KnowledgeGraph:
    return build_open_kg(OPEN_KG)


def names(kg: KnowledgeGraph, term: str) -> list[str]:
    return [kg.cui2pt[cui] for cui in kg.cuis(term)]


def one(kg: KnowledgeGraph, term: str) -> str:
    (cui,) = kg.cuis(term)
    return cui


# --- files ---------------------------------------------------------------------------------------


@pytest.fixture
def small() -> KnowledgeGraph:
    kg = KnowledgeGraph(
        cui2pt={"C1": "diabetes mellitus", "C2": "type 2 diabetes", "C3": "metformin", "C4": "dermatomyositis"},
        is_a={"C2": ["C1"]},
        relations={"C3": [("may_treat", "C1"), ("may_treat", "C2")], "C1": [("may_be_treated_by", "C3")]},
        types={"C1": "disease", "C2": "disease", "C3": "drug", "C4": "disease"},
        sources={"C1": ["A", "B"], "C2": ["A"], "C3": ["B"], "C4": ["B"]},
    )
    for cui, term in kg.cui2pt.items():
        kg.add_term(cui, term)
    kg.add_term("C3", "glucophage")
    kg.add_abbreviation("C1", "dm")
    kg.add_abbreviation("C4", "dm")
    return kg


def test_look_ups(small):
    assert small.cuis(" DM ") == ["C1", "C4"]  # an ambiguous abbreviation
    assert small.abbreviations == {"C1": ["dm"], "C4": ["dm"]}
    assert small.synonyms("C3") == ["metformin", "glucophage"]
    assert small.hypernyms("C2") == ["C1"] and small.hyponyms("C1") == ["C2"]
    assert small.related("C3") == [("may_treat", "C1"), ("may_treat", "C2")]
    assert small.cuis("aspirin") == small.synonyms("C9") == small.hyponyms("C9") == small.related("C9") == []


def test_round_trip(small, tmp_path):
    save_bios(small, tmp_path)
    assert (tmp_path / "bios.txt").read_text().splitlines()[0] == "C1\tdiabetes mellitus"
    loaded = load_bios(tmp_path)
    assert loaded == small and not loaded.dropped
    save_bios(loaded, tmp_path / "again")
    first = digests(tmp_path / "again")
    assert first == {name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() for name in first}


def test_gzipped_and_mixed_case_files(small, tmp_path):
    save_bios(small, tmp_path)
    for name in ("bios.txt", "is_a.json"):
        with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
            file.write((tmp_path / name).read_bytes())
        (tmp_path / name).unlink()
    (tmp_path / "term2CUI.json").write_text(json.dumps({"Diabetes  Mellitus": ["C1"], "DM": ["C1", "C4"]}))
    loaded = load_bios(tmp_path)
    assert loaded.cuis("diabetes mellitus") == ["C1"] and loaded.cuis("dm") == ["C1", "C4"]
    assert loaded.cuis("metformin") == ["C3"] and loaded.is_a == small.is_a
    assert all(term == term.lower() for term in loaded.term2cui)


@pytest.mark.parametrize(
    "line, message",
    [
        (b"C1\n", r"bios\.txt, row 2: 1 columns instead of 2"),
        (b"C1\ta\tb\n", r"bios\.txt, row 2: 3 columns instead of 2"),
        (b"C1\t \n", r"bios\.txt, row 2: field 'term' is empty"),
        (b"\tterm\n", r"bios\.txt, row 2: field 'concept id' is empty"),
    ],
)
def test_malformed_rows(small, tmp_path, line, message):
    save_bios(small, tmp_path)
    rows = (tmp_path / "bios.txt").read_bytes().splitlines(keepends=True)
    (tmp_path / "bios.txt").write_bytes(b"".join([rows[0], line, *rows[1:]]))
    with pytest.raises(DataError, match=message):
        load_bios(tmp_path)


def test_unreadable_files(small, tmp_path):
    save_bios(small, tmp_path)
    good = (tmp_path / "bios.txt").read_bytes()
    (tmp_path / "bios.txt").write_bytes(good + "C1\tménière\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"bios\.txt, row 8: not UTF-8"):
        load_bios(tmp_path)
    (tmp_path / "bios.txt").unlink()
    with pytest.raises(DataError, match=r"bios\.txt: no such file.*BIOS"):
        load_bios(tmp_path)
    (tmp_path / "bios.txt.gz").write_bytes(gzip.compress(good)[:-12])
    with pytest.raises(DataError, match=r"bios\.txt\.gz.*broken gzip"):
        load_bios(tmp_path)
    (tmp_path / "bios.txt").write_bytes(good)


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("is_a", '{"C2": ["C1"]', r"is_a\.json, row 1, column 14: not JSON"),
        ("is_a", "[]", r"is_a\.json: one JSON object expected, not list"),
        ("CUI2pt", '{"C1": 3}', r"CUI2pt\.json, field 'C1': a term expected"),
        ("CUI2term", '{"C1": "dm"}', r"CUI2term\.json, field 'C1': a list of terms"),
        ("relations", '{"C1": [["may_treat"]]}', r"relations\.json, field 'C1': a list of \[relation, concept id\]"),
    ],
)
def test_malformed_json(small, tmp_path, name, text, message):
    save_bios(small, tmp_path)
    (tmp_path / f"{name}.json").write_text(text)
    with pytest.raises(DataError, match=message):
        load_bios(tmp_path)


def test_unknown_targets_are_dropped_and_counted(small, tmp_path):
    save_bios(small, tmp_path)
    (tmp_path / "is_a.json").write_text('{"C2": ["C1", "C8"], "C9": ["C1"]}')
    (tmp_path / "relations.json").write_text('{"C3": [["may_treat", "C1"], ["may_treat", "C7"]]}')
    (tmp_path / "term2CUI.json").write_text(json.dumps(small.term2cui | {" ": ["C1"]}))
    loaded = load_bios(tmp_path)
    assert loaded.is_a == {"C2": ["C1"]} and loaded.relations == {"C3": [("may_treat", "C1")]}
    unknown = {"is_a.json: concept unknown": 2, "relations.json: concept unknown": 1}
    assert dict(loaded.dropped) == unknown | {"term2CUI.json: blank term": 1} and "" not in loaded.term2cui


def test_a_concept_without_terms_is_left_to_the_other_files(small, tmp_path):
    save_bios(small, tmp_path)
    (tmp_path / "CUI2term.json").write_text(json.dumps(small.cui2terms | {"C2": [], "C9": []}))
    loaded = load_bios(tmp_path)
    assert loaded.synonyms("C2") == ["type 2 diabetes"] and loaded.cui2pt == small.cui2pt


def test_notebook_02_with_a_bios_that_has_none_of_our_files(small, tmp_path, monkeypatch):
    save_bios(small, tmp_path)
    for name in OPTIONAL_FILES:
        (tmp_path / f"{name}.json").unlink()
    monkeypatch.setattr(corpus, "knowledge_graph", lambda profile: load_bios(tmp_path))
    monkeypatch.setattr(plots, "save_figure", lambda *args: None)
    cells = json.loads((ROOT / "notebooks/02_knowledge_graph.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["sources"].values.tolist() == [["BIOS", 4, 7]]


# --- the open graph ------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_builds_are_equal(kg, tmp_path):
    """This process's, and another's with another hash seed."""
    here, there = tmp_path / "here", tmp_path / "there"
    code = (
        "from drehr_utils.knowledge.graph import save_bios\n"
        "from drehr_utils.knowledge.vocabularies import build_open_kg\n"
        f"save_bios(build_open_kg({str(OPEN_KG)!r}), {str(there)!r})"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    save_bios(kg, here)
    assert digests(here) == digests(there)
    assert load_bios(here) == kg


def test_size_and_sources(kg):
    concepts = Counter(source for sources in kg.sources.values() for source in sources)
    assert 180_000 < len(kg.term2cui) < 240_000
    assert 18_000 < concepts["DRUG"] < 21_000 and 16_000 < concepts["HPO"] < 20_000
    assert 4_500 < concepts["MESH"] < 6_100 and 20_000 < concepts["ICD10CM"] < 40_000 and concepts["OPEN"] > 1_298
    assert set(kg.types.values()) >= {"disease", "drug", "procedure", "finding", "test", "device"}
    edges = Counter(relation for pairs in kg.relations.values() for relation, _ in pairs)
    assert edges["may_treat"] == edges["may_be_treated_by"] > 3_000 and sum(map(len, kg.is_a.values())) > 50_000


def test_tables_agree(kg):
    assert kg.cui2pt.keys() == kg.cui2terms.keys() == kg.types.keys() == kg.sources.keys()
    for cui, terms in kg.cui2terms.items():
        assert kg.cui2pt[cui] == terms[0] and len(set(terms)) == len(terms)
        assert all(cui in kg.term2cui[term] for term in terms)
    for cui, parents in kg.is_a.items():
        assert cui not in parents and all(parent in kg.cui2pt for parent in parents)
        assert not any(cui in kg.is_a.get(parent, ()) for parent in parents)  # no two are broader than one another
    for cui, pairs in kg.relations.items():
        assert all(other in kg.cui2pt and other != cui for _, other in pairs)
        for relation, other in pairs:
            inverse = {**vocabularies.INVERSE, **{b: a for a, b in vocabularies.INVERSE.items()}}[relation]
            assert (inverse, cui) in kg.relations[other]


def test_only_abbreviations_are_ambiguous(kg):
    short = {(cui, term) for cui, terms in kg.abbreviations.items() for term in terms}
    ambiguous = [term for term, cuis in kg.term2cui.items() if len(cuis) > 1]
    assert 50 < len(ambiguous) < 400
    assert all(any((cui, term) in short for cui in kg.term2cui[term]) for term in ambiguous)
    assert names(kg, "arf") == ["acute kidney injury", "acute respiratory failure"]  # both in the open KG


@pytest.mark.parametrize(
    "term, concept",
    [
        ("OA", "osteoarthritis"),  # the paper's Figure 1
        ("HTN", "hypertension"),  # its Table 7
        ("dilantin", "phenytoin"),
        ("heart attack", "myocardial infarction"),
        ("MI", "myocardial infarction"),
        ("lasix", "furosemide"),
        ("tylenol", "acetaminophen"),
        ("paracetamol", "acetaminophen"),
        ("coumadin", "warfarin"),
        ("high blood pressure", "hypertension"),
        ("CVA", "stroke"),
        ("kidney stones", "nephrolithiasis"),
        ("prilosec", "omeprazole"),
    ],
)
def test_synonyms_and_abbreviations(kg, term, concept):
    assert names(kg, term) == [concept]


@pytest.mark.parametrize(
    "a, b",
    [
        ("metformin", "insulin"),
        ("phenytoin", "warfarin"),
        ("type 1 diabetes mellitus", "type 2 diabetes mellitus"),
        ("hypertension", "hypotension"),
        ("hyperkalemia", "hypokalemia"),
        ("myocardial infarction", "heart failure"),
        ("crohn disease", "ulcerative colitis"),
        ("morphine", "hydromorphone"),
        ("hepatitis b", "hepatitis c"),
    ],
)
def test_different_things_stay_apart(kg, a, b):
    assert kg.cuis(a) and kg.cuis(b) and not set(kg.cuis(a)) & set(kg.cuis(b))


def test_concepts_are_no_heaps(kg):
    assert max(map(len, kg.cui2terms.values())) <= 100
    substances = {cui for cui, kind in kg.types.items() if kind in ("drug", "chemical")}
    assert not [cui for cui in substances if {"HPO", "ICD10CM"} & set(kg.sources[cui])]


def test_vocabularies_are_joined(kg):
    assert kg.sources[one(kg, "myocardial infarction")] == ["OPEN", "MESH", "HPO", "ICD10CM"]
    assert kg.sources[one(kg, "metformin")] == ["OPEN", "DRUG"]
    assert names(kg, "seizures") == names(kg, "seizure") == ["seizure"]  # MeSH's preferred terms are plurals
    assert one(kg, "metformin").startswith("OPEN:")
    assert "glucophage" in kg.synonyms(one(kg, "metformin"))


def test_relations_point_the_right_way(kg):
    metformin, diabetes = one(kg, "metformin"), one(kg, "diabetes mellitus")
    assert ("may_treat", diabetes) in kg.related(metformin) and ("may_be_treated_by", metformin) in kg.related(diabetes)
    assert ("may_treat", metformin) not in kg.related(diabetes)
    lipase, pancreatitis = one(kg, "lipase"), one(kg, "acute pancreatitis")
    assert ("diagnoses_or_monitors", pancreatitis) in kg.related(lipase)
    assert ("diagnosed_or_monitored_by", lipase) in kg.related(pancreatitis)
    infarction = one(kg, "myocardial infarction")
    assert one(kg, "acute coronary syndrome") in kg.hypernyms(infarction)
    assert infarction in kg.hyponyms(one(kg, "acute coronary syndrome"))
    assert one(kg, "biguanides") in kg.hypernyms(metformin)  # from MeSH's tree
    # The packages' MeSH ids would make heart failure a neurocirculatory asthenia, and arthritis psoriatic.
    assert one(kg, "neurocirculatory asthenia") not in kg.hypernyms(one(kg, "heart failure"))
    assert one(kg, "psoriatic arthritis") not in kg.hypernyms(one(kg, "osteoarthritis"))


def test_no_junk_among_terms(kg):
    common = {"all", "he", "his", "was", "patient", "stable", "today", "alert", "normal", "mr", "pt", "wks", "ra"}
    assert not common & kg.term2cui.keys()
    assert not ENGLISH_STOP_WORDS & kg.term2cui.keys()  # another list than the one the module uses
    assert all(2 <= len(term) <= 120 and any(c.isalpha() for c in term) for term in kg.term2cui)
    assert all(term == " ".join(term.lower().split()) for term in kg.term2cui)
    assert not [term for term in kg.term2cui if "&" in term and ";" in term or "\t" in term]


@pytest.mark.parametrize(
    "rows, message",
    [
        ("name\ttype\n", "row 1, field synonyms: missing column; the header is name, type"),
        ("{header}\nasthma\tdisease\n", "row 2: 2 fields, the header has 9"),
        ("{header}\n\tdisease\t\t\t\t\t\t\t\n", "row 2, field name: empty"),
        ("{header}\nasthma\t\t\t\t\t\t\t\t\n", "row 2, field type: empty"),
    ],
)
def test_malformed_open_kg(tmp_path, rows, message):
    path = tmp_path / "concepts.tsv"
    path.write_text(rows.format(header="\t".join(vocabularies.OPEN_COLUMNS)))
    with pytest.raises(DataError, match=rf"concepts\.tsv, {message}"):
        build_open_kg(path)
    with pytest.raises(DataError, match="none.tsv.gz: no such file"):
        build_open_kg(tmp_path / "none.tsv.gz")


def test_missing_package(monkeypatch):
    monkeypatch.setattr(vocabularies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="Install"):
        build_open_kg(OPEN_KG)


# --- what a graph is found again by ---------------------------------------------------------------


def graph_digest(**changes) -> str:
    """Of the smoke profile's graph with these fields, asked anew, and of no later test."""
    pipeline.graph_digest.cache_clear()
    try:
        return pipeline.graph_digest(replace(load_profile("smoke"), **changes))
    finally:
        pipeline.graph_digest.cache_clear()


def test_a_bios_is_known_by_its_bytes_not_by_its_place(small, tmp_path):
    save_bios(small, tmp_path / "bios")
    first = graph_digest(bios=tmp_path / "bios")
    shutil.copytree(tmp_path / "bios", tmp_path / "moved/elsewhere")
    assert graph_digest(bios=tmp_path / "moved/elsewhere") == first != graph_digest()
    path = tmp_path / "bios/is_a.json"
    path.write_text(path.read_text().replace('"C1"', '"C3"'))
    assert graph_digest(bios=tmp_path / "bios") != first


def test_an_open_graph_is_known_by_its_file_and_the_packages_versions(tmp_path, monkeypatch):
    first = graph_digest(open_kg=OPEN_KG)
    copy = tmp_path / "concepts of another name.tsv.gz"
    shutil.copy(OPEN_KG, copy)
    assert graph_digest(open_kg=copy) == first != graph_digest(open_kg=None)
    copy.write_bytes(gzip.compress(gzip.decompress(OPEN_KG.read_bytes()) + b"\n"))
    assert graph_digest(open_kg=copy) != first
    version = importlib.metadata.version
    digests = {first}
    for package in vocabularies.VOCABULARY_PACKAGES:
        with monkeypatch.context() as patch:
            patch.setattr(importlib.metadata, "version", lambda n, p=package: version(n) + ".1" * (n == p))
            digests.add(graph_digest(open_kg=OPEN_KG))
    assert len(digests) == 1 + len(vocabularies.VOCABULARY_PACKAGES)


def test_open_graph_is_built_once_and_again_when_a_package_changes(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(vocabularies, "build_open_kg", lambda path: built.append(path) or KnowledgeGraph())
    for _ in range(2):
        vocabularies.open_graph(tmp_path, OPEN_KG)
    assert built == [OPEN_KG]
    vocabularies.open_graph(tmp_path, None)  # the vocabularies alone have another place
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version(name) + ".1")
    vocabularies.open_graph(tmp_path, OPEN_KG)
    assert built == [OPEN_KG, None, OPEN_KG] and len(list(tmp_path.iterdir())) == 3


def test_a_package_that_is_missing_from_the_key_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(vocabularies, "VOCABULARY_PACKAGES", ("no-such-vocabulary",))
    with pytest.raises(DataError, match="no-such-vocabulary.*Install"):
        vocabularies.open_graph(tmp_path, OPEN_KG)


# --- UMLS ----------------------------------------------------------------------------------------


@pytest.fixture
def release(tmp_path) -> Path:
    return umls_release(tmp_path)


def test_umls_to_bios(release, capsys):
    out = release / "bios"
    umls_to_bios(release / "MRCONSO.RRF", release / "MRREL.RRF", release / "MRSTY.RRF", out)
    kg = load_bios(out)
    assert kg.cui2pt == {"C01": "diabetes mellitus", "C02": "niddm", "C03": "metformin", "C04": "disease"}
    assert kg.cui2terms["C01"] == ["diabetes mellitus", "diabetes"] and kg.cuis("diabetes") == ["C01"]
    assert kg.cui2terms["C02"] == ["niddm", "type 2 diabetes"]  # STT counts more than ISPREF
    assert kg.is_a == {"C01": ["C04"], "C02": ["C01", "C04"]}
    assert kg.hyponyms("C04") == ["C01", "C02"]
    assert kg.relations == {
        "C01": [("may_be_treated_by", "C03")],
        "C03": [("may_treat", "C01")],
        "C04": [("has_part", "C03")],
    }
    assert kg.types == {"C01": "Disease or Syndrome", "C03": "Pharmacologic Substance"}
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: 2 malformed rows are left out: {rows}"
        for file, rows in (
            ("MRCONSO.RRF", "row 11, field CVF: 5 columns instead of 18; row 12, field STR: empty"),
            ("MRREL.RRF", "row 13, field CVF: 2 columns instead of 16; row 14, field CUI1: empty"),
        )
    ]
    assert sorted(path.name for path in out.iterdir()) == [
        "CUI2pt.json", "CUI2term.json", "bios.txt", "is_a.json", "relations.json", "term2CUI.json", "types.json",
    ]  # fmt: skip


def test_umls_gzipped_and_without_types(release):
    for name in ("MRCONSO.RRF", "MRREL.RRF"):
        (release / f"{name}.gz").write_bytes(gzip.compress((release / name).read_bytes()))
        (release / name).unlink()
    umls_to_bios(release / "MRCONSO.RRF", release / "MRREL.RRF", None, release / "bios")
    kg = load_bios(release / "bios")
    assert kg.cui2pt["C01"] == "diabetes mellitus" and kg.is_a["C02"] == ["C01", "C04"] and kg.types == {}


def test_umls_errors(release):
    with pytest.raises(DataError, match="MRREL.*no such file.*UMLS"):
        umls_to_bios(release / "MRCONSO.RRF", release / "none/MRREL.RRF", None, release / "bios")
    (release / "French.RRF").write_text(conso("C01", "Diabète", lat="FRE") + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="French.RRF: no row in ENG is left"):
        umls_to_bios(release / "French.RRF", release / "MRREL.RRF", None, release / "bios")
    (release / "MRCONSO.RRF").write_bytes("C01|ENG|P|é".encode("latin-1"))
    with pytest.raises(DataError, match="MRCONSO.RRF, row 1: not UTF-8"):
        umls_to_bios(release / "MRCONSO.RRF", release / "MRREL.RRF", None, release / "bios")
