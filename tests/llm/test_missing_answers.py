"""An answer that the language model failed to give is missing, not empty, and comes in when it is given after all.

From the notes to the positive sets, with MIMIC-III's tables in miniature and a real server on this machine."""

from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest
from llm_server import chat_server
from mimic3_miniature import write_mimic3

from drehr_utils import corpus, pipeline, profiles
from drehr_utils.errors import DataError
from drehr_utils.llm.answers import AnswerStore
from drehr_utils.profiles import load_profile

ABBREVIATIONS = "###htn\n**hypertension"
DRUG = {"htn, gastro": "pantoprazole", "heart failure": "furosemide", "well. asthma": "albuterol"}


@pytest.fixture
def profile(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "ROOT", tmp_path)  # where the cache is
    return replace(
        load_profile("smoke"), name="missing", notes=write_mimic3(tmp_path / "notes"), recorded_answers=(),
        max_train_notes=None,
    )  # fmt: skip


@pytest.fixture
def serving(monkeypatch):
    """A function that serves `reply(prompt)` to the pipeline."""

    monkeypatch.setenv("DREHR_LLM_MODEL", "m")
    with ExitStack() as servers:

        def start(reply):
            server = servers.enter_context(chat_server(lambda prompt, body: reply(prompt)))
            monkeypatch.setenv("DREHR_LLM_BASE_URL", server.base_url)
            return server

        yield start


def good(prompt: str) -> str:
    if prompt.startswith("Replace the abbreviations"):
        return ABBREVIATIONS if "htn, gastro" in prompt else "NA"
    kind = next(kind for kind in ("diseases", "clinical procedures", "drugs") if f"the {kind} explicitly" in prompt)
    return f"- {next((drug for words, drug in DRUG.items() if words in prompt), 'none')} of {kind}"


def fails_for(words: str, status: int, reply=good):
    return lambda prompt: status if words in prompt and "the drugs explicitly" in prompt else reply(prompt)


def entities(profile) -> dict[str, set[str]]:
    sets = pipeline.stage2_sets(profile)
    return {chunk_id: set(sets.of(i)) for i, chunk_id in enumerate(sets.ids)}


def chunk_with(profile, words: str) -> str:
    return next(chunk.id for chunk in pipeline.chunks(profile) if words in chunk.text)


def everything(chunk_id: str, profile) -> set[str]:
    text = next(chunk.text for chunk in pipeline.chunks(profile) if chunk.id == chunk_id)
    drug = next(drug for words, drug in DRUG.items() if words in text)
    return {f"{drug} of {kind}" for kind in ("diseases", "clinical procedures", "drugs")}


def test_an_answer_that_failed_is_named_and_comes_in_later(profile, serving):
    lost, lenient = chunk_with(profile, "well. asthma"), replace(profile, unanswered=0.5)
    wanted = len(pipeline.requests(profile, "entity_generation"))

    serving(fails_for("well. asthma", 500))
    with pytest.raises(DataError, match=f"stage II: 1 of {wanted} .* answers are missing, {lost}'s for drugs first"):
        entities(profile)
    first = entities(lenient)
    assert first[lost] == set(), "a chunk that lacks an answer is left out, its other entities too"
    assert all(first[chunk_id] for chunk_id in first if chunk_id != lost)
    with pytest.raises(DataError, match="1 of"):  # what the lenient run has cached is not the strict one's
        entities(profile)

    server = serving(good)
    for later in (profile, lenient):
        found = entities(later)
        assert found[lost] == everything(lost, profile)
        assert {c: names for c, names in found.items() if c != lost} == {c: n for c, n in first.items() if c != lost}
    assert len(server.bodies) == 1, "only what was missing is asked for, once"


def test_a_key_and_its_sets_are_of_the_same_answers(profile, serving):
    """A request that fails once, and succeeds the next time, must not put its answer under the key without it."""
    seen, lost = Counter(), chunk_with(profile, "well. asthma")

    def flaky(prompt):
        seen[prompt] += 1
        return fails_for("well. asthma", 400)(prompt) if seen[prompt] == 1 else good(prompt)

    lenient = replace(profile, unanswered=0.5)
    server = serving(flaky)
    wanted = len(pipeline.requests(profile, "entity_generation"))
    assert entities(lenient)[lost] == set() and len(server.bodies) == wanted
    key = pipeline.stage_positives(lenient, "stage2")[0]
    assert entities(lenient)[lost] == set() and len(server.bodies) == wanted, "few enough: no later notebook asks again"
    pipeline.answers(lenient, "entity_generation")  # notebook 04 does
    assert entities(lenient)[lost] == everything(lost, profile) and len(server.bodies) == wanted + 1
    assert pipeline.stage_positives(lenient, "stage2")[0] != key


def test_that_none_is_missing_is_remembered_until_an_answer_is_added(profile, serving, monkeypatch):
    def looked_up(*_, **__):
        raise InterruptedError

    serving(fails_for("well. asthma", 500))
    incomplete = pipeline.stage_positives(replace(profile, unanswered=0.5), "stage2")[0]
    serving(good)
    key = pipeline.stage_positives(profile, "stage2")[0]
    assert key != incomplete
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "answers", looked_up)
        assert pipeline.stage_positives(profile, "stage2")[0] == key
        with pytest.raises(InterruptedError):
            pipeline.stage_positives(profile, "stage1")
        request = pipeline.requests(profile, "entity_generation")[0]
        AnswerStore(profile.cache / "llm/answers.sqlite").append(request, {"answer": "- another's", "model": "n"})
        with pytest.raises(InterruptedError):
            pipeline.stage_positives(profile, "stage2")
    assert pipeline.stage_positives(profile, "stage2")[0] == key, "another model's answer is not this one's"


@pytest.mark.slow
def test_abbreviations_come_in_later_too(profile, serving):
    chunk_id, lenient = chunk_with(profile, "htn, gastro"), replace(profile, unanswered=0.5)

    def names(source):
        sets = pipeline.stage1_sets(lenient)
        return {term for kind, term in sets.samples(sets.ids.index(chunk_id)) if kind == source}

    serving(lambda prompt: 500 if "htn, gastro" in prompt else good(prompt))
    with pytest.raises(DataError, match=f"stage I: 1 of .* answers are missing, {chunk_id}'s first"):
        pipeline.stage1_sets(profile)
    assert names("abbreviation") == set() and names("string match")
    assert chunk_id not in pipeline.abbreviations(lenient)[0]
    serving(good)
    assert chunk_id in pipeline.abbreviations(lenient)[0]  # notebook 03 asks again
    assert names("abbreviation") == {"hypertension"} and names("string match")
    assert pipeline.stage1_sets(profile).samples(0)


def test_a_wrong_key_stops_a_run_that_has_answers_too(profile, serving):
    serving(fails_for("well. asthma", 500))
    pipeline.answers(profile, "entity_generation")
    serving(lambda prompt: 401)
    with pytest.raises(DataError, match="does not answer .HTTP 401"):
        pipeline.answers(profile, "entity_generation")
