"""CDV's exported test sets: a set in its layout, written by hand; recall against a count by hand."""

import pytest

from drehr_utils.errors import DataError
from drehr_utils.papers.capr import corpora, systems
from drehr_utils.profiles import load_profile

DOCS = [
    ("D1", "D1-a", "Gout is a form of arthritis."), ("D1", "D1-a", 'It is called "the disease of kings".'),
    ("D1", "D1-b", "Colchicine and allopurinol are given."), ("D2", "D2-a", "Asthma narrows the airways."),
    ("D2", "D2-b", "Inhaled steroids are given."),
]  # fmt: skip
QUERIES = [
    ("1", "1", "D1-a", "Gout", "information"), ("1", "0", "D2-a", "Gout", "information"),
    ("1", "0", "D1-b", "Gout", "information"), ("2", "0", "D2-a", "Asthma", "treatment"),
    ("2", "1", "D2-b", "Asthma", "treatment"),
]  # fmt: skip


def exported(folder, docs=DOCS, queries=QUERIES, name="WikiSectionQA_test"):
    folder.mkdir(exist_ok=True)
    lines = ["doc_id\tp_id\tt\ttext", *("\t".join((d, p, str(t), text)) for t, (d, p, text) in enumerate(docs))]
    (folder / f"{name}_docs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    header = "query_id\trelevance\tdoc_id\tp_id\tquestion\tentity_id\tentity_name\taspect_label\taspect_heading"
    rows = ["\t".join((q, r, p[:2], p, "What?", "Q1", e, a, a)) for q, r, p, e, a in queries]
    (folder / f"{name}_queries.tsv").write_text("\n".join([header, *rows]) + "\n", encoding="utf-8")
    return folder


def test_an_exported_set_by_hand(tmp_path):
    data, pool, candidates = corpora.load_exported(exported(tmp_path), "WikiSectionQA_test")
    assert data.queries == {"1": "gout ; information", "2": "asthma ; treatment"}
    assert data.qrels == {"1": {"D1-a": 1}, "2": {"D2-b": 1}} and data.aspects["2"] == "treatment"
    assert [p.id for p in pool] == ["D1-a", "D1-b", "D2-a", "D2-b"]
    assert data.passages["D1-a"].count(".") == 2 and pool[1].document == pool[0].document and pool[1].start == 2
    assert candidates.tolist() == [[0, 2, 1], [2, 3, 3]]  # the second has two candidates: its answer again


def test_recall_among_a_query_s_own_candidates_by_hand(tmp_path, monkeypatch):
    task = corpora.load_exported(exported(tmp_path), "WikiSectionQA_test")
    rows = corpora.compared(load_profile("smoke"), "WikiSectionQA_test", task, []).set_index(["system", "metric"])
    # BM25: "gout" is in D1-a alone; "asthma" in D2-a, which is no answer, so that D2-b comes second.
    assert rows.loc[("BM25", "R@1"), "ours"] == 50 and rows.loc[("BM25", "R@5"), "ours"] == 100
    assert rows.loc[(systems.START, "R@5"), "ours"] == 100


@pytest.mark.parametrize(
    ("docs", "queries", "said"),
    [
        ([*DOCS, ("D1", "D1-a", "More.")], QUERIES, "row 7, field p_id: lines of passage D1-a aren't together"),
        (DOCS, [*QUERIES, ("2", "0", "D9-a", "Asthma", "x")], "row 7, field p_id: D9-a is no passage of"),
        (DOCS, QUERIES[:4], "query 2 has no answer"),
        (DOCS, [*QUERIES, ("2", "2", "D1-a", "Asthma", "treatment")], "row 7, field relevance: neither 0 nor 1"),
        (DOCS, [*QUERIES, ("2", "0", "D1-a", "Gout", "treatment")], "row 7, field query_id: another entity and aspect"),
        (DOCS, [], "WikiSectionQA_test_queries.tsv: no query"),
        ([("D1", " ", "Gout.")], QUERIES, "row 2, field p_id: empty; fill it"),
    ],
)
def test_malformed(tmp_path, docs, queries, said):
    with pytest.raises(DataError, match=said):
        corpora.load_exported(exported(tmp_path, docs, queries), "WikiSectionQA_test")


def test_the_command(tmp_path, capsys):
    corpora.main([str(exported(tmp_path / "data")), "--profile", "smoke"])
    out = capsys.readouterr().out
    assert "WikiSectionQA_test: 2 queries, 4 passages" in out and out.count("R@5") == 2
    with pytest.raises(SystemExit):
        corpora.main([str(tmp_path), "--profile", "smoke"])
    assert "no <name>_queries.tsv there; CDV's convert.sh makes it" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        corpora.main([str(tmp_path / "data"), "--profile", "smoke", "--and-notes"])
    assert "--and-notes adds the notes to what --train-on names" in capsys.readouterr().err


TRAIN = (  # as CDV's ExportDatasets writes it: no header; a passage has a line for each of its labels
    "1\tgout ; symptoms\tThe joint is red. It hurts at night.\n"
    "1\tGout ; treatment\tColchicine is given.\n"
    "1\tPodagra ; treatment\tColchicine is given.\n"
    "0\tgout ; symptoms\tColchicine is given.\n"
)


def trains_on(folder, text=TRAIN):
    folder.mkdir(exist_ok=True)
    (folder / "wd_disease_train_matchzoo.tsv").write_text(text, encoding="utf-8")
    return folder


def test_what_wikipedia_has_to_learn_from_by_hand(tmp_path):
    first, second = corpora.load_training(trains_on(tmp_path))
    assert (first.aspect, first.entities) == ("symptoms", ("gout",))
    assert first.document == first.sentences == ("the joint is red.", "it hurts at night.")
    assert (second.aspect, second.entities) == ("treatment", ("gout", "podagra"))
    assert first.labelled and second.labelled and first.document_id != second.document_id


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("yes\tgout ; treatment\tText.", "row 5, field relevance: no whole number"),
        ("1\tgout\tText.", 'row 5, field query: not "entity ; aspect"'),
        ("1\tgout ; treatment", "row 5, field text: empty"),
    ],
)
def test_malformed_training(tmp_path, line, said):
    with pytest.raises(DataError, match=said):
        corpora.load_training(trains_on(tmp_path, TRAIN + line + "\n"))
    with pytest.raises(DataError, match="no passage to learn from"):
        corpora.load_training(trains_on(tmp_path, "0\tgout ; treatment\tText.\n"))


@pytest.mark.slow
def test_what_is_trained_on_wikipedia_is_asked_of_notes_too(tmp_path, tiny_smoke, monkeypatch, capsys):
    monkeypatch.setattr("drehr_utils.evaluation.records.load_profile", lambda name: tiny_smoke)
    lines = [f"1\tdisease {i} ; treatment\tDrug {i} is given.\n" for i in range(40)]
    asked, articles = str(exported(tmp_path / "data")), str(trains_on(tmp_path / "train", "".join(lines)))
    shown = []
    for more in ([], ["--and-notes"]):
        corpora.main([asked, "--systems", systems.BI, "--train-on", articles, *more])
        shown.append(capsys.readouterr().out)
        assert "40 passages to learn from" in shown[-1] and "notes kept aside: " in shown[-1]
        assert shown[-1].count(systems.BI) == 4  # R@1 and R@5 of both sets
    learnt = corpora.load_training(tmp_path / "train")
    keys = [systems.trained_model(tiny_smoke, systems.BI, others)[2] for others in ((), learnt)]
    assert keys[0] != keys[1]
    # CDV+FastText's word vectors are of the texts that are trained on, as its key says, not of the notes.
    words = systems.word_vectors(tiny_smoke, tuple(learnt)).vectors.key_to_index
    assert set(words) == {"drug", "is", "given", *map(str, range(40))}
