"""Notebooks 01 to 04: notes, chunks, the graph, a language model's answers, and both stages' positive sets.

Each is made once and kept on disk; notes, chunks and sets in shards, which are read memory-mapped (data.shards)."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from drehr_utils import artifacts, cluster, files
from drehr_utils.data import notes as notes_module
from drehr_utils.data import overlap, shards
from drehr_utils.data.benchmark import benchmark_folder
from drehr_utils.data.notes import Chunk, Note, ReadReport
from drehr_utils.errors import DataError
from drehr_utils.knowledge import vocabularies
from drehr_utils.knowledge.graph import KnowledgeGraph, load_bios
from drehr_utils.knowledge.matching import EntityMatcher
from drehr_utils.llm import client, prompts, servers
from drehr_utils.llm.answers import Answers, AnswerStore
from drehr_utils.profiles import ROOT, Profile, cached_by
from drehr_utils.training import positives
from drehr_utils.training.positives import AbbreviationCleaning, PositiveSets

# --- notebook 01 -------------------------------------------------------------------------------------------------


KEPT_APART = "benchmark's patient"  # the split of a note that would train, were its patient not in the benchmark


NOTES_A_SHARD, CHUNKS_A_SHARD = 2_000, 20_000


def notes(profile: Profile) -> tuple[Sequence[Note], ReadReport, dict[str, str]]:
    """The notes, what reading them skipped, and each note's split; cut to the profile's number of training notes.

    They are read once, and come from a memory-mapped file after; tables that change are read again, in a process that
    lives on, too."""
    there = [folder for folder in _benchmark(profile) if folder.exists()]  # else it is named when the notes are read
    return _notes(profile, artifacts.digest(notes_module.note_tables(profile.notes), there))


@cache
def _notes(profile: Profile, made_of: str) -> tuple[Sequence[Note], ReadReport, dict[str, str]]:
    key = artifacts.digest(notes_module.iter_notes, notes_module.note_tables(profile.notes))

    def make(folder: Path) -> None:
        report = ReadReport("")
        shards.write_rows(folder, notes_module.iter_notes(profile.notes, report), Note, NOTES_A_SHARD)
        (folder / "report.json").write_text(json.dumps(asdict(report)))

    folder = artifacts.cached_folder(profile.cache / f"corpus/notes-{key}", make)
    report = ReadReport(**json.loads((folder / "report.json").read_text()))
    report.skipped = [(row, field, reason) for row, field, reason in report.skipped]
    read: Sequence[Note] = shards.Rows(shards.mapped(folder), Note)
    splits = notes_module.read_splits(profile.notes, read)
    splits |= {note_id: KEPT_APART for note_id in _of_benchmark(profile, read) if splits[note_id] == "train"}
    if profile.max_train_notes:
        train = [note.note_id for note in read if splits[note.note_id] == "train"]
        left_out = set(train[profile.max_train_notes :])
        read = [note for note in read if note.note_id not in left_out]
    if profile.real_notes:
        real = notes_module.read_real_notes("aci_bench")
        read, splits = [*read, *real], splits | {note.note_id: "train" for note in real}
    return read, report, splits


def _benchmark(profile: Profile) -> list[Path]:
    """The benchmark's folder, if there is one. Notebook 06's is of these notes, but maybe of earlier splits."""
    try:
        return [benchmark_folder(profile)]
    except DataError:
        return []


def _of_benchmark(profile: Profile, read: Sequence[Note]) -> list[str]:
    """The notes of patients that the benchmark has."""
    if not (folder := _benchmark(profile)):
        return []
    key = artifacts.digest(overlap, notes_module, notes_module.note_tables(profile.notes), *folder)
    path = profile.cache / f"splits/of_benchmark-{key}.parquet"

    def make() -> pd.DataFrame:
        found = overlap.of_benchmark(read, *folder)
        return pd.DataFrame(found.items(), columns=["note_id", "found by"], dtype=str)

    return artifacts.cached_file(path, make)["note_id"].tolist()


def _made_of_notes(profile: Profile) -> list:
    """What the chunks of a profile depend on, but for code and real notes."""
    apart = [note_id for note_id, split in notes(profile)[2].items() if split == KEPT_APART]
    return [notes_module.note_tables(profile.notes), apart, profile.max_train_notes]


def chunks(profile: Profile, split: str = "train", stage: str = "") -> Sequence[Chunk]:
    """A split's chunks, in the notes' order, from a memory-mapped file; with a stage's name, what this stage trains on
    (real notes, which are few, come as a list)."""
    read, _, splits = notes(profile)
    cut = (chunk for note in read if splits[note.note_id] == split for chunk in notes_module.chunk_note(note))
    if profile.real_notes:
        with_sections = stage == "stage1" and split == "train"  # no language model was asked about them
        sections = notes_module.read_real_notes("mts_dialog") if with_sections else []
        return [*cut, *(chunk for note in sections for chunk in notes_module.chunk_note(note))]
    key = artifacts.digest(notes_module, overlap, *_made_of_notes(profile))
    folder = artifacts.cached_folder(
        profile.cache / f"corpus/{split}-{key}", lambda partial: shards.write_rows(partial, cut, Chunk, CHUNKS_A_SHARD)
    )
    return shards.Rows(shards.mapped(folder), Chunk)


# --- notebook 02 -------------------------------------------------------------------------------------------------


GRAPH = "bios", "open_kg"  # the fields that say which graph


@cached_by(*GRAPH)
def knowledge_graph(profile: Profile) -> KnowledgeGraph:
    """The graph of `profile.bios`, or the open one, which is built once and kept in BIOS's layout."""
    if profile.bios is not None:
        graph = load_bios(profile.bios)
        graph.say_dropped(profile.bios)
    else:
        graph = vocabularies.open_graph(ROOT / "data/cache/kg", profile.open_kg)
    gc.freeze()  # it lives as long as the process, and each collection would go over its millions of objects again
    return graph


@cached_by(*GRAPH)
def graph_digest(profile: Profile) -> str:
    """Of all that the graph is made of."""
    source = profile.bios or vocabularies.made_of(profile.open_kg)
    return artifacts.digest(knowledge_graph, source)


@cached_by(*GRAPH)
def matcher(profile: Profile) -> EntityMatcher:
    return EntityMatcher(knowledge_graph(profile).term2cui)


# --- notebooks 03 and 04 -----------------------------------------------------------------------------------------


TASKS = {"stage1": "abbreviation_reduction", "stage2": "entity_generation"}


class Requests(Sequence[prompts.Request]):
    """Every chunk's request of a task; for `entity_generation` one for each entity type."""

    def __init__(self, of: Sequence[Chunk], task: str):
        self.chunks, self.task = of, task
        self.kinds = prompts.ENTITY_TYPES if task == "entity_generation" else (None,)

    def __len__(self) -> int:
        return len(self.chunks) * len(self.kinds)

    def __getitem__(self, at: int) -> prompts.Request:
        chunk = self.chunks[at // len(self.kinds)]
        return prompts.Request(self.task, chunk.id, chunk.text, self.kinds[at % len(self.kinds)])

    def __iter__(self) -> Iterator[prompts.Request]:
        return (prompts.Request(self.task, chunk.id, chunk.text, kind) for chunk in self.chunks for kind in self.kinds)


def requests(profile: Profile, task: str) -> Requests:
    """Every training chunk's."""
    return Requests(chunks(profile), task)


def _answers_file(profile: Profile) -> Path:
    return profile.cache / "llm/answers.sqlite"


def answers(profile: Profile, task: str, progress: bool = True) -> Answers:
    """Recorded and stored answers, and a server's for the rest where one is set (see servers); none where all of them
    may be missing."""
    asked = requests(profile, task) if profile.unanswered < 1 else []
    return client.answer_all(
        asked, recorded=profile.recorded_answers, store=_answers_file(profile), server=servers.server_from_env(),
        progress=progress,
    )  # fmt: skip


def _cleaned(
    of: Sequence[Chunk], kg: KnowledgeGraph, texts: Mapping[prompts.Key, str], counts: AbbreviationCleaning
) -> dict[str, list[tuple[str, str]]]:
    kept = {}
    for chunk in of:
        if (answer := texts.get(("abbreviation_reduction", None, chunk.id))) is not None:
            pairs, malformed = prompts.parse_abbreviations(answer)
            counts.malformed += malformed
            kept[chunk.id] = positives.clean_abbreviations(pairs, chunk.text, kg, counts)
    return kept


def abbreviations(profile: Profile) -> tuple[dict[str, list[tuple[str, str]]], AbbreviationCleaning]:
    """Cleaned (abbreviation, full name) pairs by chunk id, and what each cleaning step removed (DR.EHR, Appendix A).

    A chunk whose request failed has no entry."""
    counts = AbbreviationCleaning()
    texts = answers(profile, "abbreviation_reduction").texts
    return _cleaned(chunks(profile), knowledge_graph(profile), texts, counts), counts


def generated_entities(profile: Profile) -> tuple[dict[tuple[str, str], list[str]], pd.DataFrame]:
    """The LLM's entities by (chunk id, entity type), and parse statistics by type (DR.EHR §3.2).

    A chunk and type whose request failed has no entry: an unanswered prompt is not an empty answer."""
    texts = answers(profile, "entity_generation").texts
    entities, rows = {}, []
    for kind in prompts.ENTITY_TYPES:
        parsed = {
            chunk.id: prompts.parse_entities(texts[key])
            for chunk in chunks(profile)
            if (key := ("entity_generation", kind, chunk.id)) in texts
        }
        entities |= {(chunk_id, kind): names for chunk_id, (names, _) in parsed.items()}
        found = [len(names) for names, _ in parsed.values()]
        rows.append((kind, len(found), sum(found), found.count(0), sum(bad for _, bad in parsed.values())))
    return entities, pd.DataFrame(
        rows, columns=["entity type", "answers", "entities", "answers without any", "malformed lines"]
    )


def _sets_of(profile: Profile, stage: str, model: str | None, last: int) -> Callable[[Sequence[Chunk]], PositiveSets]:
    """The function from chunks to a stage's positive sets, with all that it needs; each process has its own.

    model, last: which answers count (AnswerStore.texts)."""
    store = AnswerStore(_answers_file(profile), profile.recorded_answers)
    graph, find = (knowledge_graph(profile), matcher(profile)) if stage == "stage1" else (None, None)

    def sets_of(part: Sequence[Chunk]) -> PositiveSets:
        texts = store.texts(Requests(part, TASKS[stage]), model, last) if profile.unanswered < 1 else {}
        if stage == "stage1":
            pairs = _cleaned(part, graph, texts, AbbreviationCleaning())
            return positives.stage1_positives(part, graph, find, pairs, profile.seed, profile.graph_terms)
        entities = {(i, kind): prompts.parse_entities(text)[0] for (_, kind, i), text in texts.items()}
        return positives.stage2_positives(part, entities)

    return sets_of


@dataclass(frozen=True)
class Given:
    """What a stage's positive sets have to know of the language model's answers."""

    digest: str
    last: int  # the newest answer's number in the store
    failed: int
    refused: str  # what is said where more are missing than `profile.unanswered` allows


def _given(profile: Profile, stage: str) -> Given:
    """Looked up one by one, asked for where they are missing, and remembered once no more are than may be: millions
    take minutes, and a late answer makes each model anew. Notebooks 03 and 04 ask again, and what they get counts."""
    task, model = TASKS[stage], servers.model_from_env()
    texts = [chunk.text for chunk in chunks(profile)] if profile.real_notes else None
    of = artifacts.digest(client.answer_all, notes_module, *_made_of_notes(profile), texts)

    def path() -> Path:  # another one when an answer was added
        store = AnswerStore(_answers_file(profile), profile.recorded_answers)
        asked = [prompts.prompt_sha256(task), model, profile.unanswered]
        return profile.cache / f"llm/{task}-{artifacts.digest(of, asked, store.sources, store.last())}.json"

    if path().exists():
        return Given(**json.loads(path().read_text()))
    given, asked, refused = answers(profile, task, progress=False), requests(profile, task), ""
    if profile.unanswered < 1 and (lost := len(asked) - len(given.texts)) > profile.unanswered * len(asked):
        first = next(request for request in asked if request.key not in given.texts)
        whose = f"{first.id}'s for {first.entity_type}" if first.entity_type else f"{first.id}'s"
        why = "".join(f", {kind}: {n}" for kind, n in given.errors.most_common())
        refused = (
            f"stage {'I' * int(stage[-1])}: {lost} of {len(asked)} of the language model's answers are missing, "
            f"{whose} first{why}; run this again to ask for them, or allow a share of them in `unanswered`, a field "
            "of the profile"
        )
    found = Given(given.digest(), given.store.last(), given.failed, refused)
    if not refused:
        files.write_atomically(path(), json.dumps(asdict(found)).encode())
    return found


def stage_positives(profile: Profile, stage: str) -> tuple[str, Callable[[], PositiveSets]]:
    """The digest of all that a stage's positive sets are made of, and what gives the sets; both of the same answers,
    for one that the server failed to give may come the next time that it's asked for.

    They are made a shard at a time, by `profile.workers` processes, and come from a memory-mapped file; a run that was
    killed goes on with the shards that it lacks."""
    given, of, model = _given(profile, stage), chunks(profile, stage=stage), servers.model_from_env()
    code, graph = stage2_sets, None
    if stage == "stage1":
        code, graph = stage1_sets, [graph_digest(profile), profile.graph_terms]
    key = artifacts.digest(
        code, graph, *_made_of_notes(profile), profile.seed, given.digest,
        profile.unanswered if given.failed else None,
        [chunk.text for chunk in of] if profile.real_notes else None,
    )  # fmt: skip
    folder = profile.cache / f"positives/{stage}-{key}-{CHUNKS_A_SHARD}"

    def maker() -> Callable[[int], None]:
        of, sets_of = chunks(profile, stage=stage), _sets_of(profile, stage, model, given.last)

        def make(at: int) -> None:
            part = of[at * CHUNKS_A_SHARD : (at + 1) * CHUNKS_A_SHARD]
            artifacts.made_once(shards.shard(folder, at), lambda path: shards.write(sets_of(part).table, path))

        return make

    def join(path: Path) -> None:
        if given.refused:
            raise DataError(given.refused)
        parts = range(max(1, -(-len(of) // CHUNKS_A_SHARD)))
        left = [at for at in parts if not shards.shard(folder, at).exists()]
        with tqdm(total=len(of), desc=f"{stage} positives", unit="chunk", delay=1) as bar:
            for at in cluster.each(maker, left, profile.workers, f"positives of {stage}"):
                bar.update(min(CHUNKS_A_SHARD, len(of) - at * CHUNKS_A_SHARD))
        shards.join(folder, len(parts), path)

    def sets() -> PositiveSets:
        artifacts.made_once(folder / shards.JOINED, join)
        sources = positives.STAGE1_SOURCES if stage == "stage1" else positives.STAGE2_SOURCES
        found = PositiveSets(shards.mapped(folder), sources)
        if stage == "stage2" and len(found) and profile.unanswered < 1 and not found.offsets[-1]:
            raise DataError("stage II: no entity in any of the language model's answers; notebook 04 shows them")
        return found

    return key, sets


def stage1_sets(profile: Profile) -> PositiveSets:
    """Stage I's positive sets of the training chunks. Raises DataError as stage2_sets does; a chunk that may lack its
    answer has no abbreviations' full names."""
    return stage_positives(profile, "stage1")[1]()


def stage2_sets(profile: Profile) -> PositiveSets:
    """Stage II's positive sets of the training chunks. Raises DataError when more of the language model's answers are
    missing than `profile.unanswered` allows; else chunks that lack one have no positives, and aren't trained on."""
    return stage_positives(profile, "stage2")[1]()
