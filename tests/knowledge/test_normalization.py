"""Opaque names: which ones count, that rules don't rewrite each other, and that a saved model carries them."""

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from drehr_utils import config, pipeline
from drehr_utils.knowledge import normalization
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.profiles import load_profile
from drehr_utils.training import encoders


def graph() -> KnowledgeGraph:
    concepts = {
        "C1": ("levetiracetam", "drug", ["keppra", "levetiracetam", "keppra xr"]),
        "C2": ("hypertension", "disease", ["htn", "hypertension", "hypertensive disease"]),
        "C3": ("systemic lupus erythematosus", "disease", ["lupus", "sle"]),
        "C4": ("acetylsalicylic acid", "drug", ["asa"]),
        "C5": ("asa physical status", "test", ["asa"]),
        "C6": ("rare disease", "disease", ["cat"]),
    }
    kg = KnowledgeGraph(
        cui2pt={cui: preferred for cui, (preferred, _, _) in concepts.items()},
        types={cui: kind for cui, (_, kind, _) in concepts.items()},
        sources={cui: ["OPEN"] if cui != "C6" else ["ORPHA"] for cui in concepts},
    )
    for cui, (preferred, _, names) in concepts.items():
        for name in dict.fromkeys([preferred, *names]):
            kg.term2cui.setdefault(name, []).append(cui)
    return kg


def test_opaque_names_are_brand_names_and_codes_of_one_concept():
    tokenizer = encoders.load_encoder(config.MINILM).tokenizer
    found = normalization.opaque_names(graph(), tokenizer)
    # Not "keppra xr" (two words), "lupus" (a word), "asa" (two concepts), "cat" (a vocabulary's).
    assert found == {
        "keppra": "levetiracetam",
        "htn": "hypertension",
        "sle": "systemic lupus erythematosus",
    }


def test_no_rule_rewrites_what_another_wrote():
    names = {"a": "x b", "b": "y c", "c": "z", "d": "e", "e": "d"}
    ordered = list(normalization.ordered(names))
    assert ordered.index("c") < ordered.index("b") < ordered.index("a")
    assert ("d" in ordered) != ("e" in ordered)  # they stand for each other: one rule goes


@pytest.mark.slow
def test_one_pass_gives_the_tokens_of_the_rules_in_turn():
    profile = load_profile("open")
    encoder = pipeline.reading_names(profile)
    reader, plain = encoder.tokenizer, pipeline.starting_encoder(profile).tokenizer
    assert reader.names["keppra"] == "levetiracetam" and len(reader.names) > 3000
    texts = [chunk.text for chunk in pipeline.chunks(profile)[::20]] + list(reader.names)[::20]
    texts += ["", "HTN; Keppra/ASA-500 pre-htn htn_2 (htn)", "naïve HTN é htn\u0301 \u4e2dhtn\u4e2d \x00htn"]
    by_rules = reader.with_rules()
    assert reader(texts)["input_ids"] == by_rules(texts)["input_ids"] != plain(texts)["input_ids"]
    assert [reader.tokenize(text) for text in texts[-3:]] == [by_rules.tokenize(text) for text in texts[-3:]]


def test_a_tokenizer_that_keeps_case_reads_names_in_any():
    encoder = encoders.load_encoder(config.MINILM)
    encoder.tokenizer.backend_tokenizer.normalizer = None
    normalization.read_names(encoder, {"htn": "fever", "a-b": "pain (cold)"})
    reader, texts = encoder.tokenizer, ["HTN and A-B, pre-htn", "x"]
    assert reader.tokenize(texts[0])[:8] == ["fever", "and", "pain", "(", "cold", ")", ",", "pre"]
    assert reader(texts)["input_ids"] == reader.with_rules()(texts)["input_ids"]
    assert reader(texts[0], "HTN")["input_ids"] == reader.with_rules()(texts[0], "HTN")["input_ids"]


def test_a_saved_model_reads_the_names_without_this_package(tmp_path):
    encoder = encoders.load_encoder(config.MINILM)
    before = encoders.encode(encoder, ["unrelated words"])
    normalization.read_names(encoder, {"keppra": "levetiracetam", "htn": "hypertension"})
    encoders.save_encoder(encoder, tmp_path / "model")
    loaded = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    written, meant, hyphened, plain = loaded.encode(
        ["HTN; Keppra/aspirin 500", "hypertension; levetiracetam/aspirin 500", "pre-htn", "unrelated words"]
    )
    assert np.allclose(written, meant, atol=1e-6)
    assert loaded.tokenizer.tokenize("pre-htn") == encoders.load_encoder(config.MINILM).tokenizer.tokenize("pre-htn")
    assert np.allclose(plain, before[0], atol=1e-5)
    again = encoders.load_encoder(tmp_path / "model")  # this package's own way
    assert again.tokenizer.names == {"keppra": "levetiracetam", "htn": "hypertension"}
    assert np.allclose(encoders.encode(again, ["HTN"]), encoders.encode(again, ["hypertension"]), atol=1e-6)
