"""CAPR's labels against a hand-labelled miniature; queries, candidates, MedQuAD's form; patients held out."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from drehr_utils import pipeline
from drehr_utils.config import Resampling
from drehr_utils.data.notes import Note
from drehr_utils.evaluation.medquad import MedQuad
from drehr_utils.evaluation.tables import paper_figures
from drehr_utils.knowledge.matching import EntityMatcher
from drehr_utils.papers.capr import systems
from drehr_utils.papers.capr.passages import (
    Passage,
    medquad_passages,
    note_passages,
    properties,
    query_sample,
    question_aspect,
    relevant_passages,
    retrieval_task,
    split_sentences,
    with_query_form,
)
from drehr_utils.papers.capr.report import (
    Comparison,
    Report,
    exchanged_columns,
    latency_sentence,
    mistakes,
    progress_sentence,
    worth_it,
)
from drehr_utils.profiles import load_profile

FOURTH = """Name:  ___      Unit No:   ___

Service: MEDICINE

Allergies:
Penicillins

Chief Complaint:
Chest pain

History of Present Illness:
65M with diabetes, on metformin, who had chest pain at rest. No
shortness of breath. In the ED: aspirin given.

Pertinent Results:
Hgb 9, chest x-ray: clear

Brief Hospital Course:
# Chest pain: aspirin continued.
# Diabetes: metformin held.

Discharge Medications:
1. Aspirin 81 mg PO DAILY
2. Metformin 500 mg PO BID

Followup Instructions:
___
"""
THIRD = """[**2101-3-4**]
HISTORY OF PRESENT ILLNESS:  The patient has diabetes.

PAST MEDICAL HISTORY:  Diabetes, on
metformin.

HOSPITAL COURSE BY SYSTEM:  Pulmonary:  shortness of breath resolved.

DISCHARGE DIAGNOSES:  Diabetes.

MEDICATIONS ON DISCHARGE:  Aspirin.
"""
TERMS = ["chest pain", "diabetes", "metformin", "aspirin", "shortness of breath", "penicillins", "ed"]
# By hand: (note, aspect, the entities that its text mentions).
BY_HAND = [
    ("iv", None, set()),
    ("iv", "allergies", {"penicillins"}),
    ("iv", "chief complaint", {"chest pain"}),
    ("iv", "history of present illness", {"diabetes", "metformin", "chest pain", "shortness of breath", "aspirin"}),
    ("iv", "pertinent results", set()),
    ("iv", "hospital course", {"chest pain", "aspirin", "diabetes", "metformin"}),
    ("iv", "discharge medications", {"aspirin", "metformin"}),
    ("iii", "history of present illness", {"diabetes"}),
    ("iii", "past medical history", {"diabetes", "metformin"}),
    ("iii", "hospital course", {"shortness of breath"}),
    ("iii", "discharge diagnosis", {"diabetes"}),
    ("iii", "discharge medications", {"aspirin"}),
]


def miniature(max_words=None) -> list[Passage]:
    matcher = EntityMatcher(TERMS)
    notes = [Note("iv", "1", "1", FOURTH), Note("iii", "2", "2", THIRD)]
    return [p for note in notes for p in note_passages(note, matcher, max_words)]


def test_labels_are_those_given_by_hand():
    found = [(p.document_id, p.aspect, set(p.entities)) for p in miniature() if p.aspect or p.entities]
    assert found == [row for row in BY_HAND if row[1]]


def test_headings_are_no_part_of_the_text_and_wrapped_lines_are_joined():
    by_aspect = {(p.document_id, p.aspect): p for p in miniature()}
    hpi = by_aspect["iv", "history of present illness"]
    assert hpi.sentences == (
        "65m with diabetes, on metformin, who had chest pain at rest.",
        "no shortness of breath.",
        "in the ed: aspirin given.",
    )
    assert by_aspect["iii", "past medical history"].text == "diabetes, on metformin."
    assert not any(heading in p.text for p in miniature() for heading in ("history of", "medications:", "course"))
    assert hpi.document == by_aspect["iv", "discharge medications"].document  # one note, one document


def test_relevant_passages_by_hand():
    passages = miniature()
    for entity, aspect in [("metformin", "past medical history"), ("diabetes", "hospital course"), ("aspirin", "x")]:
        expected = [f"{n}:{a}" for n, a, entities in BY_HAND if a == aspect and entity in entities]
        ids = set(relevant_passages(entity, aspect, passages))
        assert [f"{p.document_id}:{p.aspect}" for p in passages if p.id in ids] == expected


def test_long_sections_are_cut_between_sentences_and_keep_their_aspect():
    cut = [p for p in miniature(max_words=12) if (p.document_id, p.aspect) == ("iv", "history of present illness")]
    assert [p.sentences[0].split()[0] for p in cut] == ["65m", "no"] and len(cut[1].sentences) == 2
    assert cut[0].entities == ("diabetes", "metformin", "chest pain")
    for p in cut:
        assert p.text.count(" ") < 12
    assert len(split_sentences("x " * 90)) == 3


def test_task_has_its_passage_among_the_candidates_and_labels_as_relevance():
    pool = [p for p in miniature() if p.labelled]
    data, candidates = retrieval_task(pool, n_queries=30, n_candidates=5, seed=3)
    ids = list(data.passages)
    assert len(set(data.queries.values())) == len(data.queries) > 8 and candidates.shape == (len(data.queries), 5)
    for row, (query_id, text) in enumerate(data.queries.items()):
        entity, aspect = text.split(" ; ")
        assert data.aspects[query_id] == aspect
        assert set(data.qrels[query_id]) == set(relevant_passages(entity, aspect, pool))
        assert len(set(candidates[row])) == 5 and ids[candidates[row, 0]] in data.qrels[query_id]
    again = retrieval_task(pool, 30, 5, seed=3)
    assert again[0] == data and (again[1] == candidates).all()
    assert (retrieval_task(pool, 30, 5, seed=4)[1][: len(candidates)] != candidates[: len(again[1])]).any()
    with pytest.raises(ValueError, match="without entity or aspect"):
        retrieval_task(miniature(), 3)


def test_mistakes_by_hand():
    labels = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")]  # aspect, entity
    pool = [Passage(f"p{i}", "d", aspect, (entity,), ("s",), 0, 1) for i, (aspect, entity) in enumerate(labels)]
    queries = {"q0": "x ; a", "q1": "x ; a", "q2": "x ; a", "q3": "x ; a"}
    qrels = {q: {"p0": 1} for q in queries}
    data = MedQuad(queries, dict.fromkeys(queries, "a"), {p.id: p.text for p in pool}, qrels, [])
    candidates = np.tile(np.arange(4), (4, 1))
    counts = mistakes(data, pool, candidates, np.eye(4))  # query i's first passage: p_i
    assert counts["wrong first passages"] == 3
    assert counts[["same aspect", "same entity", "neither"]].tolist() == pytest.approx([100 / 3] * 3)
    assert mistakes(data, pool, candidates[:, :1], np.ones((4, 1)))["wrong first passages"] == 0


def test_random_candidates_are_uniform_over_the_others():
    pool = [Passage(f"p{i}", "d", "a", (f"e{i}",), ("s",), 0, 1) for i in range(9)]
    counts = Counter()
    for seed in range(300):
        _, candidates = retrieval_task(pool, 9, 4, seed)
        counts.update((row[0], c) for row in candidates.tolist() for c in row[1:])
    assert len(counts) == 72 and not any(a == b for a, b in counts)
    assert abs(np.array(list(counts.values())) - 300 * 3 / 8).max() < 5 * np.sqrt(300 * 3 / 8 * 5 / 8)


@pytest.mark.parametrize(
    ("question", "aspect"),
    [
        ("What are the symptoms of gout ?", "symptoms"),
        ("What is (are) gout ?", "information"),
        ("How many people are affected by gout ?", "frequency"),
        ("What are the genetic changes related to gout ?", "genetic changes"),
        ("Is gout inherited ?", "inheritance"),
        ("What are the treatments for gout ?", "treatment"),
        ("How to diagnose gout ?", "exams and tests"),
        ("Who is at risk for gout? ?", "susceptibility"),
        ("what research (or clinical trials) is being done for gout ?", "research"),
        ("How to prevent gout ?", "prevention"),
        ("What is the outlook for gout ?", "outlook"),
        ("What are the complications of gout ?", "complications"),
        ("What causes gout ?", "causes"),
        ("What to do for gout ?", "considerations"),
        ("What are the stages of gout ?", "stages"),
        ("Gout ?", None),
    ],
)
def test_question_types(question, aspect):
    assert question_aspect(question) == aspect


def test_medquad_in_caprs_form():
    passages = {"A-1": "What is gout? It hurts. A lot of words follow here.", "B-1": "...", "A-2": "Rest helps."}
    data = MedQuad(
        {"m0": "Gout information", "m1": "Gout treatment"}, {"m0": "information", "m1": "treatment"}, passages,
        {"m0": {"A-1": 1}, "m1": {"A-2": 1}}, [],
    )  # fmt: skip
    form = with_query_form(data)
    assert form.queries == {"m0": "gout ; information", "m1": "gout ; treatment"}
    first, _, last = medquad_passages(data, max_words=6)
    assert first.document_id == last.document_id == "A" and first.document == last.document
    assert first.sentences == ("what is gout?", "it hurts.", "a") and last.text == "rest helps."
    assert medquad_passages(data)[0].text == "what is gout? it hurts. a lot of words follow here."
    smaller, candidates = query_sample(form, np.array([[0, 1], [2, 0]]), n=1, seed=0)
    (query,) = smaller.queries
    names = list(smaller.passages)
    expected = {"m0": ["A-1", "B-1"], "m1": ["A-2", "A-1"]}[query]
    assert [names[i] for i in candidates[0]] == expected and len(names) == 2 and set(smaller.qrels) == {query}


def test_no_held_out_patient_is_in_training():
    profile = load_profile("smoke")
    notes, _, _ = pipeline.notes(profile)
    patient = {note.note_id: note.subject_id for note in notes}
    seen = {s: {patient[p.document_id] for p in systems.passages(profile, s)} for s in ("train", "dev", "test")}
    assert all(seen.values())
    assert not seen["train"] & (seen["dev"] | seen["test"]) and not seen["dev"] & seen["test"]
    data, pool, candidates = systems.held_out(profile)
    assert {patient[p.document_id] for p in pool} <= seen["test"] and candidates.max() < len(pool)
    assert list(data.passages.values()) == [p.text for p in pool]


def test_properties_by_hand():
    passages = [p for p in miniature() if p.document_id == "iii" and p.aspect]
    table = properties(passages, n_tokens=[6, 6, 7, 2, 2])
    expected = {"documents": 1, "passages": 5, "sentences per passage": 1.0, "tokens per passage": 4.6}
    assert {k: table[k] for k in expected} == expected
    assert table["tokens per sentence"] == 4.6 and table["sentences per document"] == len(passages[0].document)
    assert replace(passages[0], aspect=None).labelled is False


def recall_frame(hits: list[int]) -> pd.DataFrame:
    ids = [f"q{i}" for i in range(len(hits))]
    rows = {"search_id": ids, "query_id": ids, "query_type": "", "metric": "R@1", "value": [100.0 * h for h in hits]}
    return pd.DataFrame(rows)


def test_claims_are_judged_by_the_paired_test_and_set_beside_the_papers():
    half = [1, 0] * 20
    values = {(n, "T"): recall_frame(h) for n, h in {"all": [1] * 40, "half": half, "none": [0] * 40}.items()}
    values["none", "U"] = recall_frame(half[:39])
    figures = pd.DataFrame(
        [("A", "T", "R@1", 70.0), ("half", "T", "R@1", 60.5), ("A", "T", "R@5", 1.0)],
        columns=["system", "group", "metric", "value"],
    )
    report = Report(values, figures, {"all": "A"}, Resampling())
    claim = report.compare("all", "half", "T")
    assert (claim.ours, claim.paper, claim.verdict) == (50.0, 9.5, "holds") and claim.p < 0.001
    assert report.compare("half", "all", "T").verdict == "holds"  # the paper has it below as well
    assert report.compare("none", "all", "T").verdict == "the reverse"  # the paper has no figure: the first should win
    assert Comparison("T", "a", "b", 50.0, 0.001, -5.0).verdict == "the reverse"
    assert report.compare("half", "half", "T").verdict == "not shown"
    assert "holds" in str(claim) and "paper" not in str(report.compare("none", "all", "T"))
    assert report.gains(["all", "none"], "half", "T").startswith("1 of 2 trained systems beat half with p < 0.01 (all)")
    ranked = report.ranking(["none", "half", "all"], "T")
    assert ranked.startswith("all 100.0, half 50.0, none 0.0 (40 queries; ")
    assert "0 of 40 right is compatible with 0% to 9%; 40 of 40 right is compatible with 91% to 100%" in ranked
    assert len(report.table([("all", "none")], ["T", "U"])) == 1
    values["all", "U"] = recall_frame([1] * 40)
    assert report.ranking(["none", "all"], "U").startswith("all 100.0, none 51.3 (39 queries")  # of those both have
    assert worth_it(report, ["half", "all"], "half", "T") == "So interaction pays here, with all."
    assert "not shown" in worth_it(report, ["none"], "half", "T")
    assert report.compare("all", "none", "U").ours == pytest.approx(100 * 39 / 39 - 100 * 20 / 39)  # of 39 both have


def test_speed_and_exchanged_columns_in_words():
    times = [("b", 10, 0.1), ("p", 10, 0.2), ("c", 10, 2.0), ("b", 99, 0.1), ("p", 99, 0.3)]
    frame = pd.DataFrame(times, columns=["system", "passages", "seconds"])
    said = latency_sentence(frame, "b", "p", "c")
    assert (
        said.startswith("For 10 passages c takes 2.00 s")
        and "20 times b's" in said
        and said.endswith("holds at 1 of 1 numbers of passages.")
    )
    assert "holds at 0 of 1" in latency_sentence(frame, "p", "b", "c")
    figures = paper_figures("capr", 1)
    sizes = [pd.Series({"documents": d, "passages": p}) for d, p in ((1110, 3758), (171, 1060), (171, 3762))]
    ours, theirs, neither = (exchanged_columns(size, figures) for size in sizes)
    assert "MedQuAD 171 and 1,060 and HealthQA 1,111 and 3,762" in ours and "seem exchanged. Against" in ours
    assert theirs.endswith("as the paper's Table 1 has it.") and "no data set of that size" in neither
    curve = pd.DataFrame({"step": range(1, 21), "loss": [3.0] * 10 + [2.0, 1.0] * 5})
    assert "a 1.50 after 20 (guessing 2.08)" in progress_sentence({"a": curve}, {"a": 8})
    assert paper_figures("capr", 2)["value"].sum() == 8597 + 25202 + 51299 + 55189 + 53 + 80 + 7 + 36 + 186 + 448 + 44
