"""SNOMED CT's RF2 files: a miniature release, written by hand."""

import pytest
from snomed_miniature import DYSPNEA, FINDING, GONE, HEART, release

from drehr_utils.errors import DataError
from drehr_utils.knowledge.snomed import SYNONYM, load_snomed
from drehr_utils.papers.kg.tasks import graph_pairs, synonym_pairs


def test_miniature_release(tmp_path, capsys):
    graph = load_snomed(release(tmp_path))
    assert graph.cui2terms[DYSPNEA] == ["dyspnea (finding)", "shortness of breath", "dyspnea"]
    assert graph.cui2pt[HEART] == "heart structure (body structure)" and graph.types[HEART] == "body structure"
    assert graph.is_a == {DYSPNEA: [FINDING]} and graph.relations == {DYSPNEA: [("finding site", HEART)]}
    assert GONE not in graph.cui2pt and "old name" not in graph.term2cui
    assert graph.dropped == {"concept without a description": 1, "relationship: concept unknown or inactive": 1}
    assert "malformed" not in capsys.readouterr().out
    graph.say_dropped(tmp_path / "release")
    said = "release: left out: concept without a description, 1; relationship: concept unknown or inactive, 1\n"
    assert capsys.readouterr().out == said
    assert ("dyspnea", "shortness of breath") in synonym_pairs(graph)
    assert list(graph_pairs(graph)) == [
        ("dyspnea (finding)", "clinical finding (finding)"), ("dyspnea (finding)", "heart structure (body structure)")
    ]  # fmt: skip


def test_malformed_rows_are_counted_and_told(tmp_path, capsys):
    bad = [("1", "2"), ("91", "20260101", "1", "9", DYSPNEA, "en", SYNONYM, " ", "9")]
    graph = load_snomed(release(tmp_path, extra_description=bad))
    said = "row 12, field caseSignificanceId: 2 columns instead of 9; row 13, field term: empty\n"
    assert capsys.readouterr().out.endswith(f".txt: 2 malformed rows are left out: {said}")
    assert len(graph.cui2terms[DYSPNEA]) == 3


def test_missing_files_and_wrong_columns(tmp_path):
    with pytest.raises(DataError, match=r"sct2_Concept_Snapshot_\*.txt: no such file.*licence"):
        load_snomed(tmp_path)
    release(tmp_path / "two/older")
    for path in release(tmp_path / "two/newer").rglob("*.txt"):
        path.rename(path.with_name(path.name.replace("2026", "2027")))
    with pytest.raises(DataError, match="20260101.txt, sct2_Concept_Snapshot_INT_20270101.txt: two releases"):
        load_snomed(tmp_path / "two")
    folder = release(tmp_path / "a")
    path = next(folder.rglob("sct2_Relationship*"))
    path.write_text("id\tactive\n")
    with pytest.raises(DataError, match="sct2_Relationship_Snapshot_INT_20260101.txt, row 1: the columns must be"):
        load_snomed(folder)
    with pytest.raises(DataError, match="no active concept has a description"):
        load_snomed(release(tmp_path / "b", descriptions=[]))
