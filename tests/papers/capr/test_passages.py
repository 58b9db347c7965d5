"""CAPR's labels against a hand-labelled miniature; queries, candidates, MedQuAD's form; patients held out."""

from collections import Counter

import numpy as np
import pandas as pd
import pytest

from drehr_utils import pipeline
from drehr_utils.config import Resampling
from drehr_utils.data.notes import Note
from drehr_utils.evaluation.medquad import MedQuad
from drehr_utils.evaluation.tables import paper_figures
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.knowledge.matching import EntityMatcher
from drehr_utils.papers.capr import systems
from drehr_utils.papers.capr.passages import (
    Passage,
    medquad_passages,
    note_passages,
    other_names_task,
    question_aspect,
    retrieval_task,
    split_sentences,
)
from drehr_utils.papers.capr.report import comparisons, label_counts, mistakes, near, ranked, scores_of, telling
from drehr_utils.profiles import ROOT, load_profile

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
    label_of = {p.id: (p.document_id, p.aspect) for p in pool}
    for row, (query_id, text) in enumerate(data.queries.items()):
        entity, aspect = text.split(" ; ")
        assert data.aspects[query_id] == aspect
        by_hand = {(note, a) for note, a, entities in BY_HAND if a == aspect and entity in entities}
        assert {label_of[i] for i in data.qrels[query_id]} == by_hand and len(data.qrels[query_id]) == len(by_hand)
        assert len(set(candidates[row])) == 5 and ids[candidates[row, 0]] in data.qrels[query_id]
    again = retrieval_task(pool, 30, 5, seed=3)
    assert again[0] == data and (again[1] == candidates).all()
    assert (retrieval_task(pool, 30, 5, seed=4)[1][: len(candidates)] != candidates[: len(again[1])]).any()
    with pytest.raises(ValueError, match="without entity or aspect"):
        retrieval_task(miniature(), 3)


def graph_of(*concepts: tuple[str, ...]) -> KnowledgeGraph:
    graph = KnowledgeGraph()
    for i, names in enumerate(concepts):
        for name in names:
            graph.add_term(f"C{i}", name)
    return graph


def labelled(*labels: tuple[str, str]) -> list[Passage]:
    """Passages of one entity each, (aspect, the entity by the name that the text has)."""
    return [Passage(f"p{i}", "d", aspect, (name,), (f"{name}.",), 0, 1) for i, (aspect, name) in enumerate(labels)]


def test_a_query_by_another_name_finds_its_passage_among_halves_of_it():
    pool = labelled(
        ("plan", "tylenol"), ("allergies", "paracetamol"), ("plan", "gout"), ("plan", "paracetamol"), ("plan", "ms")
    )
    graph = graph_of(("tylenol", "paracetamol"), ("gout", "podagra"), ("ms", "sclerosis"), ("ms", "morphine"))
    data, named, candidates = other_names_task(pool, graph, 30, 5)
    # Gout is under no other aspect, and "ms" names two concepts.
    by_hand = {"paracetamol ; plan": {"p0", "p3"}, "tylenol ; allergies": {"p1"}, "tylenol ; plan": {"p0", "p3"}}
    found = {text: set(data.qrels[q]) for q, text in data.queries.items()}
    assert found == by_hand and candidates.shape == (3, 5)
    assert [sorted(row) for row in candidates.tolist()] == [[0, 1, 2, 3, 4]] * 3
    assert named[0].entities == ("tylenol", "paracetamol") and named[4].entities == ("ms", "sclerosis", "morphine")
    counts = label_counts(systems.Task(data, named, candidates))
    at = list(data.queries.values()).index("tylenol ; allergies")
    assert counts.loc[at].tolist() == [1, 3, 1, 5]  # answers, with the entity by any name, with the aspect, all


def test_candidates_by_another_name_are_a_third_and_a_third():
    pool = labelled(*[("plan", "tylenol"), ("plan", "gout"), ("history", "acetaminophen"), ("history", "gout")] * 30)
    graph = graph_of(("tylenol", "paracetamol", "acetaminophen"), ("gout",))
    data, named, candidates = other_names_task(pool, graph, 2, 31, seed=1)
    for row, (query_id, text) in zip(candidates.tolist(), data.queries.items(), strict=True):
        name, aspect = text.split(" ; ")
        assert named[row[0]].id in data.qrels[query_id] and name not in named[row[0]].text and len(set(row)) == 31
        assert all(named[i].aspect != aspect and name in named[i].entities for i in row[1:11])
        assert all(named[i].aspect == aspect and name not in named[i].entities for i in row[11:21])
    assert (other_names_task(pool, graph, 2, 31, seed=1)[2] == candidates).all()


def test_mistakes_by_hand():
    labels = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "z")]  # aspect, entity
    pool = [Passage(f"p{i}", "d", aspect, (entity,), ("s",), 0, 1) for i, (aspect, entity) in enumerate(labels)]
    queries = {"q0": "x ; a", "q1": "x ; a", "q2": "x ; a", "q3": "x ; a"}
    qrels = {q: {"p0": 1} for q in queries}
    data = MedQuad(queries, dict.fromkeys(queries, "a"), {p.id: p.text for p in pool}, qrels)
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


def test_medquads_passages_amid_their_documents_and_parts_of_the_data():
    passages = {"A-1": "What is gout? It hurts. A lot of words follow here.", "B-1": "...", "A-2": "Rest helps."}
    data = MedQuad(
        {"m0": "Gout information", "m1": "Gout treatment"}, {"m0": "information", "m1": "treatment"}, passages,
        {"m0": {"A-1": 1}, "m1": {"A-2": 1}},
    )  # fmt: skip
    first, _, last = medquad_passages(data, max_words=6)
    assert first.document_id == last.document_id == "A" and first.document == last.document
    assert first.sentences == ("what is gout?", "it hurts.", "a") and last.text == "rest helps."
    assert medquad_passages(data)[0].text == "what is gout? it hurts. a lot of words follow here."
    smaller = data.part([1], np.array([0, 2]))
    assert list(smaller.passages) == ["A-1", "A-2"] and smaller.qrels == {"m1": {"A-2": 1}}
    assert smaller.queries == {"m1": "Gout treatment"} and smaller.aspects == {"m1": "treatment"}
    assert data.head(1).queries == data.every(2).queries == {"m0": "Gout information"}
    assert data.head(9) == data.every(1) == data


def test_no_held_out_patient_is_in_training():
    profile = load_profile("smoke")
    notes, _, _ = pipeline.notes(profile)
    patient = {note.note_id: note.subject_id for note in notes}
    seen = {s: {patient[p.document_id] for p in systems.passages(profile, s)} for s in ("train", "dev", "test")}
    assert all(seen.values())
    assert not seen["train"] & (seen["dev"] | seen["test"]) and not seen["dev"] & seen["test"]
    for data, pool, candidates in (systems.held_out(profile), systems.other_names(profile)):
        assert {patient[p.document_id] for p in pool} <= seen["test"] and candidates.max() < len(pool)
        assert list(data.passages.values()) == [p.text for p in pool] and len(candidates) == len(data.queries) > 0


def test_a_sample_asks_the_same_of_the_same_passages():
    task = systems.other_names(load_profile("smoke"))
    part, ids = task.sample(3, seed=0), list(task.data.passages)
    assert len(part.data.queries) == 3 and list(part.data.passages) == [p.id for p in part.pool]
    for query, row in zip(part.data.queries, part.candidates, strict=True):
        whole = task.candidates[list(task.data.queries).index(query)]
        assert [part.pool[c].id for c in row] == [ids[c] for c in whole]
        assert part.data.queries[query] == task.data.queries[query]


def recall_frame(hits: list[int]) -> pd.DataFrame:
    ids = [f"q{i}" for i in range(len(hits))]
    rows = {"search_id": ids, "query_id": ids, "query_type": "", "metric": "R@1", "value": [100.0 * h for h in hits]}
    return pd.DataFrame(rows)


def test_claims_are_judged_by_the_paired_test_and_set_beside_the_papers():
    half = [1, 0] * 20
    values = {(n, "T"): recall_frame(h) for n, h in {"all": [1] * 40, "half": half, "none": [0] * 40}.items()}
    values |= {("none", "U"): recall_frame(half[:39]), ("all", "U"): recall_frame([1] * 40)}
    pairs = [("all", "half"), ("half", "all"), ("none", "all"), ("half", "half"), ("all", "none")]
    paper = {("all", "T", "R@1"): 70.0, ("half", "T", "R@1"): 60.5}
    found = comparisons(values, pairs, ["T", "U"], paper, Resampling())
    assert found["task"].tolist() == ["T"] * 5 + ["U"] * 2  # where both were measured
    assert found["paper"].tolist()[:2] == [9.5, -9.5] and found["paper"].isna().tolist()[2:3] == [True]
    assert found["ours"].tolist()[:4] == [50.0, -50.0, -100.0, 0.0] and found["p"][0] < 0.001
    # The second claim holds since the paper too has its first system below; the third reverses: it has no figure.
    assert found["verdict"].tolist()[:4] == ["holds", "holds", "reversed", "not shown"]
    below = comparisons(values, pairs[:1], ["T"], {("all", "T", "R@1"): 1.0, ("half", "T", "R@1"): 2.0}, Resampling())
    assert below["verdict"].tolist() == ["reversed"]
    assert found["ours"].iloc[-1] == pytest.approx(100 * 39 / 39 - 100 * 20 / 39)  # of the 39 that both answered


def test_the_papers_training_data_are_copied_whole():
    assert paper_figures("capr", 2)["value"].sum() == 8597 + 25202 + 51299 + 55189 + 53 + 80 + 7 + 36 + 186 + 448 + 44


def test_a_ranked_list_marks_the_passages_with_both_labels():
    def passage(i, aspect, text):
        return Passage(i, i, aspect, ("gout",), (text,), 0, 1)

    texts = [
        passage("a", "plan", "toe pain."),
        passage("c", "plan", "rest."),
        passage("b", "family history", "mother: gout."),
    ]
    query = "gout ; family history"
    assert [p.id for p in near(query, texts)] == ["b", "a", "c"] and near(query, texts, 1) == texts[2:]
    best = ranked(query, texts, scores_of(load_profile("smoke"), ["BM25"], query, texts), k=1)
    assert best["BM25"].tolist() == ["✓ [family history] mother: GOUT."]
    assert len(ranked("nothing ; of these", near("nothing ; of these", texts), {"X": np.zeros(3)}, k=9)) == 3


def test_the_telling_queries_are_the_first_won_and_the_first_lost():
    queries = {f"q{i}": "x ; a" for i in range(4)}
    data = MedQuad(queries, dict.fromkeys(queries, "a"), {"p0": "s", "p1": "s"}, {q: {"p0": 1} for q in queries})
    candidates = np.tile(np.arange(2), (4, 1))
    hits = {"before": [1, 0, 0, 1], "after": [1, 1, 1, 0]}
    before, after = (np.array([[h, 1 - h] for h in of], dtype=float) for of in hits.values())
    assert list(telling(data, candidates, before, after).values()) == [1, 3]
    assert list(telling(data, candidates, before, before).values()) == [0]


def test_what_was_read_of_mistakes_is_decided_by_two_judges_or_a_third_and_holds_no_answer():
    read = pd.read_csv(ROOT / "data/capr_mistakes.tsv", sep="\t", keep_default_na=False)
    assert len(read) == len(read.drop_duplicates(["task", "query_id", "passage_id"])) == 254
    for label in ("entity", "aspect"):
        a, b, third, decided = (read[f"{name}{label}"] for name in ("judge_a_", "judge_b_", "judge_c_", ""))
        assert (decided == a.where(a == b, third)).all() and ((third != "") == (a != b)).all()
        assert set(decided) == {"same", "related", "other"}
    profile = load_profile("open")
    for task, asked in systems.tasks(profile, systems.BI).items():
        for query, passage in read.loc[read["task"] == task, ["query_id", "passage_id"]].itertuples(index=False):
            assert passage in asked.data.passages and passage not in asked.data.qrels[query]
    assert set(read["task"]) == {systems.HELD_OUT, systems.OTHER_NAMES, systems.MEDQUAD}
