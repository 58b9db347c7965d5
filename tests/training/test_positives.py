import re

import numpy as np
import pytest

from drehr_utils import pipeline
from drehr_utils.data.notes import Chunk
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.knowledge.matching import EntityMatcher
from drehr_utils.llm import prompts
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.training import positives
from drehr_utils.training.positives import (  # fmt: skip
    AbbreviationCleaning,
    PositiveSets,
    alias_spans,
    clean_abbreviations,
    expand_entity,
    positive_statistics,
    stage1_positives,
    stage2_positives,
    substitute_aliases,
)


def small_graph() -> KnowledgeGraph:
    """Figure 1's neighbourhood of osteoarthritis, with an ambiguous abbreviation and a hyponym."""
    terms = {
        "C1": ["osteoarthritis", "oa", "degenerative joint disease", "arthrosis", "degenerative arthritis"],
        "C2": ["arthritis", "joint inflammation", "inflammation of joints"],
        "C3": ["joint disease", "arthropathy"],
        "C4": ["musculoskeletal disease"],
        "C5": ["ibuprofen", "advil", "motrin"],
        "C6": ["naproxen", "aleve"],
        "C7": ["acetaminophen", "tylenol"],
        "C8": ["knee osteoarthritis"],
        "C9": ["occiput anterior", "oa"],
    }
    term2cui: dict[str, list[str]] = {}
    for cui, names in terms.items():
        for name in names:
            term2cui.setdefault(name, []).append(cui)
    return KnowledgeGraph(
        term2cui, terms, {cui: names[0] for cui, names in terms.items()},
        {"C1": ["C2", "C3", "C4"], "C8": ["C1"]},
        {"C1": [("may_be_treated_by", c) for c in ("C5", "C6", "C7")]},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_expansion_keeps_the_papers_limits(seed):
    graph = small_graph()
    added = expand_entity("osteoarthritis", graph, np.random.default_rng(seed))
    by_source = {source: [t for s, t in added if s == source] for source in ("synonym", "hypernym", "related")}
    assert len(added) <= 10
    assert len(by_source["synonym"]) == 2 and set(by_source["synonym"]) <= set(graph.cui2terms["C1"][1:])
    for source, targets in (("hypernym", graph.is_a["C1"]), ("related", ["C5", "C6", "C7"])):
        concepts = [next(c for c in targets if term in graph.cui2terms[c]) for term in by_source[source]]
        assert len(set(concepts)) == 2  # two concepts,
        assert all(concepts.count(c) == min(2, len(graph.cui2terms[c])) for c in concepts)  # each with one synonym
    assert "knee osteoarthritis" not in [term for _, term in added]  # never a hyponym


def test_with_more_of_each_an_entity_gets_all_that_the_graph_has():
    graph = small_graph()
    added = expand_entity("osteoarthritis", graph, np.random.default_rng(0), of_each=5)
    assert [t for s, t in added if s == "synonym"] == graph.cui2terms["C1"][1:]
    sizes = {source: sum(s == source for s, _ in added) for source in ("hypernym", "related")}
    assert sizes == {"hypernym": 2 + 2 + 1, "related": 3 * 2} and len(set(added)) == len(added) == 15
    chunk, matcher = Chunk("n_0", "n", "osteoarthritis"), EntityMatcher(graph.term2cui)
    assert len(stage1_positives([chunk], graph, matcher, {}, of_each=5).samples(0)) == 1 + 15


def test_a_term_of_several_concepts_is_not_expanded():
    assert expand_entity("oa", small_graph(), np.random.default_rng(0)) == []
    assert expand_entity("unknown term", small_graph(), np.random.default_rng(0)) == []


def test_the_four_cleaning_steps_in_order():
    counts = AbbreviationCleaning()
    text = "pt with oa of r knee, on asa. hx: mi"
    pairs = [("oa", "osteoarthritis"), ("chf", "arthritis"), ("asa", "asa"), ("mi", "not a term"),
             ("r", "arthritis"), ("o", "arthritis")]  # fmt: skip
    assert clean_abbreviations(pairs, text, small_graph(), counts) == [("oa", "osteoarthritis")]
    assert (counts.generated, counts.not_in_note, counts.same_as_abbreviation, counts.not_in_kg, counts.one_character,
            counts.kept) == (6, 2, 1, 1, 1, 1)  # fmt: skip
    assert counts.missing_names == {"not a term": 1} and counts.frame()["pairs"].iloc[-1] == 1


def test_stage1_sets_are_disjoint_by_source_seeded_and_independent_of_other_chunks():
    graph = small_graph()
    matcher = EntityMatcher(graph.term2cui)
    chunks = [
        Chunk("n_0", "n", "knee osteoarthritis on advil"),
        Chunk("n_1", "n", "nothing here"),
        Chunk("n_2", "n", "oa"),
    ]
    abbreviations = {"n_2": [("oa", "osteoarthritis")]}
    sets = stage1_positives(chunks, graph, matcher, abbreviations, seed=1)
    first = sets.samples(0)
    assert [t for s, t in first if s == "string match"] == ["knee osteoarthritis", "advil"]
    assert len({t for _, t in first}) == len(first)
    assert sets.of(1) == [] and sets.of(2, ["string match", "abbreviation"]) == ["oa", "osteoarthritis"]
    assert any(s == "related" for s, _ in sets.samples(2))  # the reduced abbreviation is expanded
    alone = stage1_positives(chunks[2:], graph, matcher, abbreviations, seed=1)
    assert alone.samples(0) == sets.samples(2)
    counts = positive_statistics(sets).set_index("source")
    assert counts.loc["overall", "Sum"] == counts.drop("overall")["Sum"].sum()


def test_statistics_by_hand():
    rows = [
        ("a", [("disease", "x"), ("drug", "y")]),
        ("b", []),
        ("c", [("disease", "x"), ("disease", "z"), ("drug", "x")]),
    ]
    table = positive_statistics(PositiveSets.build(rows, positives.STAGE2_SOURCES)).set_index("source")
    assert table.loc["disease", ["Avg", "Max", "Sum"]].tolist() == [1.0, 2, 3]
    assert table.loc["overall", ["Avg", "Q1", "Q3", "Sum"]].tolist() == [4 / 3, 1.0, 2.0, 4]  # x counts once in c
    assert table.loc["drug", "None"] == pytest.approx(100 / 3)


def test_a_chunk_that_lacks_an_answer_has_no_positives():
    chunks = [Chunk("a", "n", "x"), Chunk("b", "n", "y")]
    answers = {("a", "diseases"): ["gout"], ("a", "clinical procedures"): [], ("a", "drugs"): ["aspirin", "advil"]}
    answers["b", "drugs"] = ["lasix"]
    sets = stage2_positives(chunks, answers)
    assert sets.samples(0) == [("disease", "gout"), ("drug", "aspirin"), ("drug", "advil")] and sets.samples(1) == []


def test_aliases_are_replaced_in_place():
    graph = small_graph()
    text = "on motrin, (tylenol) for oa"
    spans = alias_spans(text, graph, EntityMatcher(graph.term2cui))
    assert [(text[a:b], others) for a, b, others in spans] == [
        ("motrin", ["ibuprofen", "advil"]),
        ("tylenol", ["acetaminophen"]),
    ]
    rng = np.random.default_rng(0)
    assert substitute_aliases(text, spans, 0.0, rng) == text
    changed = {substitute_aliases(text, spans, 1.0, rng) for _ in range(40)}
    assert changed == {"on ibuprofen, (acetaminophen) for oa", "on advil, (acetaminophen) for oa"}


@pytest.mark.slow
def test_the_open_profiles_sets_look_like_the_papers():
    """Not equality: another corpus and graph. Orders of magnitude, and that no hyponym of a match slipped in."""
    profile = load_profile("open")
    sets = pipeline.stage1_sets(profile)
    table = positive_statistics(sets).set_index("source")
    assert 10 < table.loc["string match", "Avg"] < 25 and 80 < table.loc["overall", "Avg"] < 200
    graph = pipeline.knowledge_graph(profile)
    for i in range(0, len(sets), 97):
        samples = sets.samples(i)
        seeds = [t for s, t in samples if s in ("string match", "abbreviation")]
        cuis = {c for t in seeds for c in graph.term2cui[t] if len(graph.term2cui[t]) == 1}
        allowed = {t for c in cuis for t in graph.synonyms(c)}
        allowed |= {t for c in cuis for h in graph.hypernyms(c) for t in graph.synonyms(h)}
        allowed |= {t for c in cuis for _, r in graph.related(c) for t in graph.synonyms(r)}
        assert {t for s, t in samples if s in ("synonym", "hypernym", "related")} <= allowed


def test_the_prompts_figures_are_in_the_paper():
    """The prompts are the paper's, word for word (checked where the paper's text is at hand)."""

    paper = ROOT.parent / "shared/papers/drehr.txt"
    if not paper.exists():
        pytest.skip("the paper's text is not here")
    squeeze = lambda text: re.sub(r"\s+", " ", text)  # noqa: E731
    text = squeeze(paper.read_text())
    assert squeeze(prompts.ABBREVIATION_PROMPT) in text and squeeze(prompts.ENTITY_PROMPT) in text
