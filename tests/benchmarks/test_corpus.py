"""The benchmark of a corpus on disk: what its process makes is what the functions make in memory."""

import bench_corpus
import pytest
from bench_search_index import write_notes

from drehr_utils import corpus
from drehr_utils.data.notes import chunk_note, read_notes, read_splits
from drehr_utils.llm import prompts
from drehr_utils.llm.client import answer_all
from drehr_utils.profiles import PROFILES
from drehr_utils.training import positives


@pytest.mark.slow
def test_its_process_counts_what_the_functions_make(tmp_path):
    source, answers = tmp_path / "discharge.csv.gz", tmp_path / "answers.jsonl.gz"
    write_notes(source, 30)
    bench_corpus.write_answers(tmp_path, answers)
    found = bench_corpus.run_worker(source, answers)
    notes, _ = read_notes(tmp_path)
    splits = read_splits(tmp_path, notes)
    chunks = [chunk for note in notes if splits[note.note_id] == "train" for chunk in chunk_note(note)]
    given = answer_all(
        [request for task in corpus.TASKS.values() for request in corpus.Requests(chunks, task)], recorded=[answers]
    ).texts
    graph, counts = corpus.knowledge_graph(PROFILES["open"]), positives.AbbreviationCleaning()
    pairs = corpus._cleaned(chunks, graph, given, counts)
    first = positives.stage1_positives(chunks, graph, corpus.matcher(PROFILES["open"]), pairs)
    entities = {(i, kind): prompts.parse_entities(text)[0] for (_, kind, i), text in given.items() if kind}
    second = positives.stage2_positives(chunks, entities)
    assert counts.kept and found["n_samples"] == first.offsets[-1] + second.offsets[-1]
    assert (found["n_notes"], found["n_chunks"]) == (30, len(chunks))
    assert all(found[step].keys() == {"cpu_s", "mb"} for step in bench_corpus.STEPS)
    assert {f"corpus_x1_{step}_mb" for step in bench_corpus.STEPS} <= bench_corpus.keys("corpus_x1", found).keys()
