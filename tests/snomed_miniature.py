"""SNOMED CT's RF2 files in miniature, written by hand."""

import gzip

from drehr_utils.knowledge.snomed import FULLY_SPECIFIED_NAME, IS_A, RF2_COLUMNS, SYNONYM

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
