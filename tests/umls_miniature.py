"""A Metathesaurus release in miniature: MRCONSO, MRREL and MRSTY with the cases that matter."""

from pathlib import Path


def conso(cui, term, lat="ENG", ts="P", stt="PF", ispref="Y", suppress="N"):
    return f"{cui}|{lat}|{ts}|L1|{stt}|S1|{ispref}|A1||||MSH|PT|D1|{term}|0|{suppress}||"


def rel(cui1, relation, cui2, rela="", suppress="N"):
    return f"{cui1}|A1|AUI|{relation}|{cui2}|A2|AUI|{rela}|R1||MSH|MSH|||{suppress}||"


def umls_release(folder: Path) -> Path:
    rows = [
        conso("C01", "Diabetes", ts="S", ispref="N"),
        conso("C01", "Diabetes  Mellitus"),
        conso("C01", "Diabetes mellitus", ts="S"),  # the same term: the better rank counts
        conso("C01", "DM (old)", suppress="O"),
        conso("C01", "Diabète", lat="FRE"),
        conso("C02", "Type 2 Diabetes", stt="VO"),
        conso("C02", "NIDDM", ispref="N"),
        conso("C03", "Metformin"),
        conso("C04", "Disease"),
        conso("C05", "Maladie rare", lat="FRE"),
        "C06|ENG|P|too|short|",
        conso("C07", ""),
    ]
    (folder / "MRCONSO.RRF").write_text("\n".join(rows) + "\n", encoding="utf-8")
    rows = [
        rel("C02", "PAR", "C01"),  # CUI2 is a parent of CUI1: C02 is_a C01
        rel("C01", "CHD", "C02"),  # the same edge from the other end
        rel("C04", "CHD", "C01", "isa"),  # "C01 isa C04"
        rel("C02", "PAR", "C04", "inverse_isa"),  # "C04 inverse_isa C02", so C02 is_a C04
        rel("C01", "RO", "C03", "may_treat"),  # "C03 may_treat C01"
        rel("C03", "RO", "C01", "may_be_treated_by"),
        rel("C03", "PAR", "C04", "has_part"),  # a tree of parts: no is_a
        rel("C03", "RO", "C04"),  # unspecified: nothing to say
        rel("C03", "RB", "C04"),  # broader, but not is_a
        rel("C01", "SY", "C01", "same_as"),
        rel("C02", "RO", "C05", "may_treat"),  # C05 has no English term
        rel("C02", "PAR", "C03", suppress="E"),
        "C01|broken|",
        rel("", "PAR", "C01"),
    ]
    (folder / "MRREL.RRF").write_text("\n".join(rows) + "\n", encoding="utf-8")
    rows = ["C01|T047|B2.2.1.2.1|Disease or Syndrome|AT1|256|", "C03|T121|A1.4.1.1.1|Pharmacologic Substance|AT2||"]
    (folder / "MRSTY.RRF").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return folder
