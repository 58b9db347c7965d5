"""Texts of other kinds: what they are, and that no evaluation's texts are among them."""

import pytest
import torch

from drehr_utils import pipeline
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import load_profile
from drehr_utils.training import general_texts, losses


def test_definitions_are_the_ontologys():
    written = general_texts.definitions()
    assert len(written) > 15_000 and len(written) == len([text for text in written if text.strip()])
    assert any(text.startswith("Multicystic dysplasia of the kidney is characterized by") for text in written)
    assert not any('\\"' in text for text in written)


def test_texts_are_of_the_stated_kinds_and_fixed_by_the_seed():
    kg = KnowledgeGraph(cui2pt={"C1": "gout", "C2": "aspirin"}, types={"C1": "disease", "C2": "drug"})
    texts = general_texts.general_texts(kg, 800, seed=1)
    assert texts == general_texts.general_texts(kg, 800, seed=1) != general_texts.general_texts(kg, 800, seed=2)
    queries = [text for text in texts if text in {f"gout {aspect}" for aspect in general_texts.ASPECTS}]
    questions = [text for text in texts if text in {form.format("gout") for form in general_texts.QUESTIONS}]
    assert len(queries) == pytest.approx(400, abs=50) and len(questions) == pytest.approx(100, abs=35)
    assert not {f"aspirin {aspect}" for aspect in general_texts.ASPECTS} & set(texts)  # a drug
    longest = max(texts, key=len)
    assert sum(text in longest for text in general_texts.definitions()) >= 3  # a passage


def test_a_graph_without_types_gives_all_its_terms():
    texts = general_texts.general_texts(KnowledgeGraph(cui2pt={"C1": "gout", "C2": "aspirin"}), 200)
    for entity in ("gout", "aspirin"):
        assert {f"{entity} {aspect}" for aspect in general_texts.ASPECTS} & set(texts)


def test_a_graph_without_a_concept_is_said_and_a_type_of_none_left_out():
    with pytest.raises(DataError, match="no concept to write general texts about"):
        general_texts.general_texts(KnowledgeGraph(), 5)
    kg = KnowledgeGraph(cui2pt={"a": "asthma"}, types={"a": "disease", "gone": "disease"})
    assert len(general_texts.general_texts(kg, 5)) == 5


def test_no_benchmark_text_is_kept():
    profile = load_profile("open")
    texts = set(general_texts.general_texts(pipeline.knowledge_graph(profile)))
    for split in ("dev", "test"):
        bench = pipeline.benchmark(profile, split)
        assert not texts & set(bench.queries.values()) and not texts & set(bench.corpus.values())


def test_embedding_drift_is_the_mean_cosine_distance():
    before = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    after = torch.tensor([[0.6, 0.8], [0.0, 1.0]])
    assert losses.embedding_drift(after, before).item() == pytest.approx((0.4 + 0.0) / 2)
