"""Test sets and recall: a miniature NCBI Disease file, the open mentions, ranks against a plain sort."""

import csv
import gzip

import ir_measures
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import cohen_kappa_score

from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.papers.kg.linking import (
    Mention,
    TestSet,
    gold_rank,
    load_ncbi_disease,
    load_open_linking,
    mention_kinds,
    read_ncbi,
    recall_values,
    resolve_ids,
)
from drehr_utils.papers.kg.report import naming_the_parent, ranked
from drehr_utils.papers.kg.systems import OPEN_LINKING
from drehr_utils.papers.kg.tasks import text_key
from drehr_utils.profiles import load_profile
from drehr_utils.search.fusion import tie_keys

TEXT = "1|t|Title.\n1|a|Abstract.\n"


def graph():
    made = KnowledgeGraph()
    for cui, terms in {"A": ["gout", "podagra", "cd"], "B": ["crohn disease", "cd"], "C": ["rash"]}.items():
        made.cui2pt[cui] = terms[0]
        for term in terms:
            made.add_term(cui, term)
    return made


def write(path, rows, text=TEXT):
    with gzip.open(path, "wt") as file:
        file.write(text + "".join("\t".join(row) + "\n" for row in rows) + "\n")


def test_ids_are_resolved_by_majority_of_unambiguous_names():
    annotated = [("1", mention, concept) for mention, concept in [
        ("Gout", "D1"), ("podagra", "D1"), ("rash", "D1"), ("CD", "D2"), ("crohn disease", "D2"),
        ("rash", "D3"), ("gout", "D3"), ("rash", "OMIM:1"), ("hives", "D4")]]  # fmt: skip
    assert resolve_ids(annotated, graph()) == {"D1": "A", "D2": "B"}  # D3: half and half


def test_ncbi_disease_from_a_folder(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "ncbi_disease"
    folder.mkdir()
    row = ("1", "0", "4")
    write(folder / "NCBItrainset_corpus.txt.gz", [(*row, "gout", "SpecificDisease", "D1")])
    write(folder / "NCBIdevelopset_corpus.txt.gz", [(*row, "Crohn disease", "SpecificDisease", "D2 ")])
    kinds = [("Gouty attack", "D1"), ("gouty attack", "D1"), ("CD", "MESH:D2"), ("rash", "D3"), ("rash", "D3"),
             ("x and y", "D1|D2"), ("y", "OMIM:3"), ("z", "C0123")]  # fmt: skip
    write(folder / "NCBItestset_corpus.txt.gz", [(*row, mention, "Modifier", i) for mention, i in kinds])
    monkeypatch.setenv("DREHR_PUBLIC_DATA", str(tmp_path))
    data = load_ncbi_disease(graph(), "MeSH")
    assert [(m.text, set(m.concepts)) for m in data.mentions] == [("Gouty attack", {"A"}), ("CD", {"B"})]
    assert data.concepts == {"A": "gout", "B": "crohn disease", "C": "rash"} and data.names["A"] == [
        "gout",
        "podagra",
        "cd",
    ]
    assert sorted(data.left_out.values()) == [1, 1, 2, 2] and data.left_out.total() + 2 == len(kinds)
    assert "Public domain" in capsys.readouterr().out
    (folder / "NCBItestset_corpus.txt.gz").unlink()
    assert load_ncbi_disease(graph(), "MeSH") is None
    printed = capsys.readouterr().out
    assert "DREHR_PUBLIC_DATA" in printed and str(tmp_path) not in printed


def test_ncbi_disease_malformed(tmp_path):
    path = tmp_path / "mini.txt.gz"
    write(path, [("1", "0", "4", "gout", "D1")])
    with pytest.raises(DataError, match=r"mini.txt.gz, row 3: 5 columns"):
        read_ncbi(path)
    write(path, [("1", "0", "4", "gout", "SpecificDisease", " ")])
    with pytest.raises(DataError, match=r"row 3, field concept id: empty"):
        read_ncbi(path)


def test_open_linking_counts_and_encounters():
    data = load_open_linking(OPEN_LINKING)
    table = pd.read_csv(OPEN_LINKING, dtype=str)
    assert len(data.mentions) + data.left_out.total() == len(table)
    assert all(m.concepts <= data.concepts.keys() for m in data.mentions)
    code = dict(zip([m.text for m in data.mentions], [min(m.concepts) for m in data.mentions], strict=True))
    assert code["core temp 31.8 c"] == "T68"  # T68.XXXA: hypothermia, initial encounter
    assert code["schizophrenia"] == "F20.9" and "B20" in data.concepts
    assert "I10" in data.concepts and "E11" not in data.concepts  # the most specific codes only
    assert 30_000 < len(data.concepts) < 40_000


def test_codes_as_mimic_writes_them(tmp_path):
    path = tmp_path / "m.csv"
    path.write_text("note_id,mention,icd10cm_code\n1,diabetes,E119\n1,sugar,e11.9 \n1,hip,S72001A\n1,htn,I10\n")
    assert [min(m.concepts) for m in load_open_linking(path).mentions] == ["E11.9", "E11.9", "S72.001", "I10"]


def test_each_mention_has_its_kind_and_two_judges():
    kinds = mention_kinds(OPEN_LINKING.parent / "kinds.tsv")
    asked = {(text_key(m.text), min(m.concepts)) for m in load_open_linking(OPEN_LINKING).mentions}
    assert kinds.keys() == asked and len(asked) == 1544
    assert (kinds["htn", "I10"], kinds[text_key("88% ra"), "R09.02"]) == ("abbreviation", "implication")
    assert kinds["schizophrenia", "F20.9"] == "lexical"
    table = pd.read_csv(OPEN_LINKING.parent / "kinds.tsv", sep="\t", quoting=csv.QUOTE_NONE, keep_default_na=False)
    agreed = table["judge_a"] == table["judge_b"]
    assert (table["kind"] == table["judge_a"])[agreed].all() and (~agreed).sum() == 31
    assert round(cohen_kappa_score(table["judge_a"], table["judge_b"]), 3) == 0.973


def test_a_kind_that_is_none_is_named(tmp_path):
    path = tmp_path / "kinds.tsv"
    path.write_text("mention\ticd10cm_code\tkind\ngout\tM10.9\tlexical\nsob\tR06.02\tabb\n")
    with pytest.raises(DataError, match="kinds.tsv, row 3, field kind: none of lexical, synonym"):
        mention_kinds(path)


def test_a_cell_that_may_be_a_patients_is_not_shown(tmp_path):
    (tmp_path / "m.csv").write_text("note_id,mention,icd10cm_code\n1,R07.9,Mr. Smith has chest pain\n")
    with pytest.raises(DataError, match="row 2, field icd10cm_code: no specific code") as error:
        load_open_linking(tmp_path / "m.csv")
    assert "Smith" not in str(error.value)


def test_mentions_that_name_the_code_above():
    told = {"schizophrenia": "F20.9", "Schizophrenia, unspecified": "F20.9", "sad": "F32.9", "podagra": "M10.9"}
    mentions = [Mention(f"m{i}", "d", text, frozenset([code])) for i, (text, code) in enumerate(told.items())]
    found = naming_the_parent(TestSet("t", "ICD-10", {}, {}, mentions))
    # "podagra" is an inclusion term of M10, "gout"; "schizophrenia, unspecified" is F20.9's own description.
    rows = [("m0", "schizophrenia", "F20.9", "F20"), ("m3", "podagra", "M10.9", "M10")]
    assert list(found.itertuples(index=False, name=None)) == rows


def test_open_linking_malformed(tmp_path):
    path = tmp_path / "mentions.csv"
    row = {"note_id": "1", "split": "test", "mention": "gout", "icd10cm_code": "M10.9", "icd10cm_title": "Gout"}
    for change, message in (
        ({"mention": " "}, "row 3, field mention: empty"),
        ({"icd10cm_code": "Q99.99"}, "row 3, field icd10cm_code: no specific"),
        ({"icd10cm_code": "E11"}, "row 3, field icd10cm_code: no specific"),
    ):
        pd.DataFrame([row, row | change]).to_csv(path, index=False)
        with pytest.raises(DataError, match=message):
            load_open_linking(path)
    pd.DataFrame([row]).drop(columns="mention").to_csv(path, index=False)
    with pytest.raises(DataError, match="mentions.csv, row 1: column mention is missing"):
        load_open_linking(path)


def test_recall_equals_ir_measures_success_of_a_full_sort_with_ties():
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (60, 90)).astype(float)  # ties everywhere, also at the cut
    mentions, concepts = [f"m{i}" for i in range(60)], [f"c{i}" for i in range(90)]
    gold = [rng.choice(90, rng.integers(1, 4), replace=False).tolist() for _ in mentions]
    ties = tie_keys(mentions, concepts)
    order = np.lexsort((ties, -scores), axis=-1)
    ranks = [gold_rank(scores[i], ties[i], gold[i]) for i in range(60)]
    assert ranks == [1 + min(list(order[i]).index(g) for g in gold[i]) for i in range(60)] and max(ranks) > 25
    run = {m: {concepts[c]: -float(place) for place, c in enumerate(order[i])} for i, m in enumerate(mentions)}
    qrels = {m: {concepts[g]: 1 for g in gold[i]} for i, m in enumerate(mentions)}
    found = [Mention(m, "d", m, frozenset(qrels[m])) for m in mentions]
    values = recall_values(
        TestSet("t", "g", dict.fromkeys(concepts, ""), {}, found),
        lambda texts: scores[[mentions.index(text) for text in texts]],
    ).set_index(["metric", "search_id"])["value"]
    for name, k in (("R@1", 1), ("R@25", 25)):
        for value in ir_measures.iter_calc([ir_measures.Success @ k], qrels, run):
            assert values[name, value.query_id] == 100 * value.value


def test_recall_by_hand_and_cut():
    concepts = {f"c{i}": f"concept {i}" for i in range(40)}
    mentions = [
        Mention(f"m{i}", "d", "t", frozenset(gold)) for i, gold in enumerate([["c0"], ["c1"], ["c39"], ["c5", "c0"]])
    ]
    data = TestSet("t", "g", concepts, {}, mentions)
    scores = np.tile(-np.arange(40.0), (4, 1))  # c0 first, c39 last, for every mention
    values = recall_values(data, lambda texts: scores[: len(texts)]).pivot(
        index="search_id", columns="metric", values="value"
    )
    assert values["R@1"].tolist() == [100, 0, 0, 100] and values["R@25"].tolist() == [100, 100, 0, 100]
    small = data.cut(3, 10, seed=0)
    assert len(small.concepts) == 10 and {"c0", "c1", "c39"} <= small.concepts.keys()
    assert list(small.concepts) == [c for c in concepts if c in small.concepts] and data.cut(None, None, 0) == data
    assert small.concepts == data.cut(3, 10, seed=0).concepts != data.cut(3, 10, seed=1).concepts


def test_a_ranked_list_marks_the_gold_concept():
    concepts = {"A": "gout of the toe", "B": "rash", "C": "pain in the toe"}
    found = TestSet("t", "g", concepts, {}, [Mention("1", "d", "Toe pain", frozenset("C"))])
    lists = ranked(load_profile("smoke"), found, {"BM25": "BM25"}, ["toe pain", "rash"], k=2)
    assert lists["gold"].tolist() == ["C pain in the toe", "", "not one of t's mentions", ""]
    best = lists["BM25"]
    assert best["toe pain"].tolist() == ["✓ C pain in the toe", "A gout of the toe"] and best["rash", 1] == "B rash"
