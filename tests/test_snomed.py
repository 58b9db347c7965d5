"""SNOMED CT's RF2 files: a miniature release, written by hand."""

import gzip

import pytest

from drehr_utils.corpus import DataError
from drehr_utils.kg_tasks import graph_pairs, synonym_pairs
from drehr_utils.snomed import FULLY_SPECIFIED_NAME, IS_A, RF2_COLUMNS, SYNONYM, load_snomed

DYSPNEA, FINDING, HEART, GONE, SITE, BARE = "267036007", "404684003", "80891009", "111", "363698007", "222"


def release(folder, extra_description=(), descriptions=None):
    place = folder / "Snapshot" / "Terminology"
    place.mkdir(parents=True)
    rest = ["20260101", "1", "900000000000207008"]

    def table(name, middle, rows, zipped=False):
        path = place / f"sct2_{name}_Snapshot{middle}_INT_20260101.txt"
        text = "".join("\t".join(row) + "\r\n" for row in [RF2_COLUMNS[name], *rows])
        if zipped:
            path = path.with_name(path.name + ".gz")
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_bytes(text.encode())

    concepts = [[c, *rest, "9"] for c in (DYSPNEA, FINDING, HEART, SITE, BARE)] + [[GONE, "20260101", "0", "9", "9"]]
    table("Concept", "", concepts)
    full, other = FULLY_SPECIFIED_NAME, SYNONYM
    named = [
        (DYSPNEA, other, "Shortness of breath"), (DYSPNEA, full, "Dyspnea (finding)"), (DYSPNEA, other, "Dyspnea"),
        (FINDING, full, "Clinical finding (finding)"), (HEART, full, "Heart structure (body structure)"),
        (HEART, other, "Heart"), (GONE, full, "Gone (finding)"), (SITE, full, "Finding site (attribute)"),
        (SITE, other, "Finding site"),
    ] if descriptions is None else descriptions  # fmt: skip
    rows = [[str(i), *rest, c, "en", kind, term, "9"] for i, (c, kind, term) in enumerate(named)]
    rows += [["90", "20260101", "0", "9", DYSPNEA, "en", other, "Old name", "9"]]  # inactive
    table("Description", "-en", rows + [list(row) for row in extra_description], zipped=True)
    edges = [(DYSPNEA, FINDING, IS_A), (DYSPNEA, HEART, SITE), (DYSPNEA, HEART, SITE), (DYSPNEA, GONE, SITE)]
    table("Relationship", "", [[str(i), *rest, a, b, "0", kind, "9", "9"] for i, (a, b, kind) in enumerate(edges)])
    return folder


def test_miniature_release(tmp_path):
    graph, reports = load_snomed(release(tmp_path))
    assert graph.cui2terms[DYSPNEA] == ["dyspnea (finding)", "shortness of breath", "dyspnea"]
    assert graph.cui2pt[HEART] == "heart structure (body structure)" and graph.types[HEART] == "body structure"
    assert graph.is_a == {DYSPNEA: [FINDING]} and graph.relations == {DYSPNEA: [("finding site", HEART)]}
    assert GONE not in graph.cui2pt and "old name" not in graph.term2cui
    assert graph.dropped == {"concept without a description": 1, "relationship: concept unknown or inactive": 1}
    assert [(r.rows, r.kept) for r in reports] == [(6, 5), (10, 9), (4, 4)]
    assert ("dyspnea", "shortness of breath") in synonym_pairs(graph)
    assert list(graph_pairs(graph)) == [
        ("dyspnea (finding)", "clinical finding (finding)"), ("dyspnea (finding)", "heart structure (body structure)")
    ]  # fmt: skip


def test_malformed_rows_are_counted(tmp_path):
    bad = [("1", "2"), ("91", "20260101", "1", "9", DYSPNEA, "en", SYNONYM, " ", "9")]
    graph, reports = load_snomed(release(tmp_path, extra_description=bad))
    assert reports[1].skipped == [(12, "caseSignificanceId", "2 columns instead of 9"), (13, "term", "empty")]
    assert len(graph.cui2terms[DYSPNEA]) == 3


def test_missing_files_and_wrong_columns(tmp_path):
    with pytest.raises(DataError, match=r"sct2_Concept_Snapshot_\*.txt is missing.*licence"):
        load_snomed(tmp_path)
    folder = release(tmp_path / "a")
    path = next(folder.rglob("sct2_Relationship*"))
    path.write_text("id\tactive\n")
    with pytest.raises(DataError, match="sct2_Relationship_Snapshot_INT_20260101.txt, row 1: the columns must be"):
        load_snomed(folder)
    with pytest.raises(DataError, match="no active concept has a description"):
        load_snomed(release(tmp_path / "b", descriptions=[]))
