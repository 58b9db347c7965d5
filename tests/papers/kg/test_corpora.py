"""MedMentions and COMETA in their authors' layouts, against the miniature releases of UMLS and SNOMED CT."""

import gzip

import pytest
from snomed_miniature import DYSPNEA, FINDING, HEART
from snomed_miniature import release as snomed_release
from umls_miniature import conso, rel, umls_release

from drehr_utils import profiles
from drehr_utils.errors import DataError
from drehr_utils.knowledge.snomed import load_snomed
from drehr_utils.papers.kg import corpora, systems
from drehr_utils.profiles import load_profile


@pytest.fixture
def mimic(monkeypatch, tmp_path):
    """The profile mimic on the miniature UMLS, MiniLM as its start, with a cache of its own; HPO for SNOMED CT."""
    meta, more = tmp_path / "meta", range(100, 140)  # as many as give each task dev pairs
    meta.mkdir()
    umls_release(meta)
    with (meta / "MRCONSO.RRF").open("a") as file:
        file.writelines(conso(f"C{n}", f"{name} {n}") + "\n" for n in more for name in ("illness", "sickness"))
    with (meta / "MRREL.RRF").open("a") as file:
        file.writelines(rel(f"C{n}", "PAR", "C04") + "\n" for n in more)
    monkeypatch.setattr(profiles, "ROOT", tmp_path)
    monkeypatch.setattr(systems, "KG_CACHE", tmp_path / "kg")
    monkeypatch.setenv("DREHR_UMLS", str(meta))
    monkeypatch.setenv("DREHR_KG_ENCODER", "minilm")
    return load_profile("mimic")


def medmentions(folder, rows, test=("1", "2")):
    folder.mkdir()
    text = "".join(
        f"{p}|t|A title.\n{p}|a|An abstract.\n"
        + "".join("\t".join((p, "0", "4", *row)) + "\n" for pmid, *row in rows if pmid == p)
        + "\n"
        for p in ("1", "2", "3")
    )
    (folder / "corpus_pubtator.txt.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "corpus_pubtator_pmids_test.txt").write_text("\n".join(test) + "\n")
    return folder


def cometa(folder, rows):
    for split in ("stratified_general", "stratified_specific", "zeroshot_general", "zeroshot_specific"):
        (folder / split).mkdir(parents=True)
        header = "ID\tTerm\tGeneral SNOMED ID\tGeneral SNOMED Label\tSpecific SNOMED ID\tSpecific SNOMED Label\tExample"
        lines = [header, *("\t".join(row) for row in rows)]
        (folder / split / "test.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


ROWS = [
    ("1", "sugar disease", "T047", "UMLS:C01"),  # as ST21pv writes it
    ("1", "NIDDM", "T047", "C02"),
    ("2", "niddm", "T047", "C02"),  # an annotation more: Table 2 counts annotations
    ("2", "elsewhere", "T999", "C99"),  # of another release
    ("3", "metformin", "T121", "C03"),  # of a training document
]


def test_medmentions_test_part_by_hand(mimic, tmp_path):
    (found,) = corpora.load_medmentions(medmentions(tmp_path / "mm", ROWS), systems.graphs(mimic)["UMLS"])
    told = [(m.document, m.text, set(m.concepts)) for m in found.mentions]
    assert told == [("1", "sugar disease", {"C01"}), ("1", "NIDDM", {"C02"}), ("2", "niddm", {"C02"})]
    assert found.left_out == {corpora.UNKNOWN: 1} and {"C01", "C02", "C03", "C04"} < set(found.concepts)
    assert "niddm" in found.names["C02"] and found.graph == "UMLS"
    # "sugar disease" shares a word with one description alone, "disease", which is C04's and not the gold one's.
    first = systems.recall(mimic, found, "BM25").query("search_id == 'MedMentions-0'").set_index("metric")["value"]
    assert first["R@1"] == 0
    with pytest.raises(DataError, match="corpus_pubtator.txt.gz: no annotation of a document"):
        corpora.load_medmentions(medmentions(tmp_path / "none", ROWS, test=("9",)), systems.graphs(mimic)["UMLS"])


@pytest.fixture
def snomed(tmp_path):
    return load_snomed(snomed_release(tmp_path / "snomed"))


def test_cometa_has_its_four_splits(snomed, tmp_path):
    rows = [
        ("0", "can't breathe", DYSPNEA, "Dyspnea", FINDING, "Clinical finding", 'it "quotes'),
        ("1", "ticker", HEART, "Heart structure", HEART, "Heart structure", "my ticker"),
        ("2", "gone", "999", "Gone", "999", "Gone", "x"),
    ]
    found = corpora.load_cometa(cometa(tmp_path / "cometa", rows), snomed)
    gold = {t.name: [min(m.concepts) for m in t.mentions] for t in found}
    general, specific = [DYSPNEA, HEART], [FINDING, HEART]
    assert gold == {"COMETA-SG": general, "COMETA-SS": specific, "COMETA-ZG": general, "COMETA-ZS": specific}
    assert all(t.left_out == {corpora.UNKNOWN: 1} for t in found)
    assert found[0].concepts[DYSPNEA] == "dyspnea (finding)"  # the main description, as in the paper's Table 4


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (("0", " ", DYSPNEA, "l", FINDING, "l", "e"), "stratified_general/test.csv, row 2, field Term: empty; fill it"),
        (("0", "t", DYSPNEA), "stratified_general/test.csv, row 2: 3 fields, the header has 7"),
    ],
)
def test_cometa_malformed(snomed, tmp_path, row, said):
    with pytest.raises(DataError, match=said):
        corpora.load_cometa(cometa(tmp_path / "cometa", [row]), snomed)


def test_the_command_prints_recall_and_what_it_left_out(mimic, tmp_path, capsys, monkeypatch):
    corpora.main(["medmentions", str(medmentions(tmp_path / "mm", ROWS))])
    out = capsys.readouterr().out
    assert "MedMentions: 3 mentions, 44 concepts; left out: 1: concept that the graph doesn't have" in out
    assert {line.split()[0] for line in out.splitlines() if "R@" in line} == {"start", "BM25"}
    for arguments, said in (
        (["cometa", str(tmp_path)], "set DREHR_SNOMED to a release"),
        (["medmentions", str(tmp_path)], "corpus_pubtator_pmids_test.txt"),
        (["cometa", str(tmp_path), "--fetch"], "COMETA is had by request"),
        (["medmentions", str(tmp_path / "mm"), "--systems", "BERT"], "no system 'BERT'"),
        (["medmentions", str(tmp_path / "mm"), "--profile", "smoke"], "set DREHR_UMLS to a release"),
    ):
        with pytest.raises(SystemExit):
            corpora.main(arguments)
        assert said in capsys.readouterr().err


def test_mentions_of_ones_own_are_searched_among_all_codes(tmp_path, capsys):
    path, smoke = tmp_path / "own.csv", load_profile("smoke")
    shown = systems.tasks(smoke)["ICD-10 Syn"][0].pair(0)[0]
    path.write_text(f"note_id,mention,icd10cm_code\nn1,MI,I21.9\nn2,{shown},I21.9\nn3,broken wrist,S62.101A\n")
    (found,) = corpora.load_icd10(path)
    assert found.name == "own.csv" and len(found.concepts) > 36_000
    assert [m.concepts for m in found.mentions] == [{"I21.9"}, {"I21.9"}, {"S62.101"}]  # which encounter isn't said
    corpora.main(["icd10", str(path), "--profile", "smoke", "--systems", "ICD-10 Syn"])
    out = capsys.readouterr().out
    assert f"own.csv: 2 mentions, {smoke.kg.max_codes} concepts; left out: 1: {corpora.SEEN}" in out
    assert {line.split()[0] for line in out.splitlines() if "R@25" in line} == {"start", "BM25", "ICD-10"}
    path.write_text("note_id,mention,icd10cm_code\nn1,MI,I99.99\n")
    with pytest.raises(SystemExit):
        corpora.main(["icd10", str(path), "--profile", "smoke"])
    assert "own.csv, row 2, field icd10cm_code: no specific code" in capsys.readouterr().err


def test_a_mention_that_training_shows_is_left_out(mimic, tmp_path):
    train = systems.tasks(mimic)["UMLS Syn"][0]
    shown, hidden = train.pair(0)[0], "no name of any concept"
    rows = [("1", shown.upper(), "T047", "C01"), ("1", hidden, "T047", "C02")]
    (found,) = corpora.load_medmentions(medmentions(tmp_path / "mm", rows), systems.graphs(mimic)["UMLS"])
    asked = corpora.unseen(mimic, found, ["UMLS Syn"])
    assert [m.text for m in asked.mentions] == [hidden] and asked.left_out == {corpora.SEEN: 1}
    assert corpora.unseen(mimic, found, []).mentions == found.mentions
