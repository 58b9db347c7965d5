"""Test sets of entity retrieval, and recall: mentions with their concepts (KG entity retrieval §2, §5, §6.1)."""

from __future__ import annotations

import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import ir_measures
import numpy as np
import pandas as pd
from ir_measures import Success

from drehr_utils.data import public_data
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.papers.kg.tasks import Task, icd10_codes, icd10_description, icd10_sections, text_key
from drehr_utils.search.fusion import rank, tie_keys

METRICS = {"R@1": Success @ 1, "R@25": Success @ 25}  # a mention has one gold concept, so success is recall
MENTIONS_ONLY, MENTIONS_AND_CONCEPTS = "mentions", "mentions and concepts"  # what a system never saw (§2)
LINKING_COLUMNS = ["note_id", "split", "mention", "icd10cm_code", "icd10cm_title"]


@dataclass(frozen=True)
class Mention:
    id: str
    document: str
    text: str
    concepts: frozenset[str]  # the gold concepts' ids; one, but in a task's own dev pairs


@dataclass(frozen=True)
class TestSet:
    """Mentions, and every concept that may be retrieved for one. Insertion order is the score matrices' order."""

    name: str
    graph: str  # the knowledge graph that the concepts are of
    concepts: dict[str, str]  # id -> the text that is searched: the main description
    names: dict[str, list[str]]  # id -> all names, of the gold concepts
    mentions: list[Mention]
    left_out: Counter[str] = field(default_factory=Counter)  # mentions, by reason

    __test__ = False  # no test of pytest's

    def cut(self, mentions: int | None, concepts: int | None, seed: int) -> TestSet:
        """The first mentions, and their concepts with so many of the others, drawn, as make `concepts`; None: all."""
        mentions = self.mentions[:mentions]
        gold = {c for mention in mentions for c in mention.concepts}
        others = [c for c in self.concepts if c not in gold]
        if concepts is not None and len(others) > concepts - len(gold):
            others = np.random.default_rng(seed).permutation(others)[: max(0, concepts - len(gold))].tolist()
        kept = gold | set(others)
        return replace(self, mentions=mentions, concepts={c: t for c, t in self.concepts.items() if c in kept})

    def of_documents(self, documents: Iterable[str]) -> TestSet:
        wanted = set(documents)
        return replace(self, mentions=[m for m in self.mentions if m.document in wanted])


# --- the open notes' mentions ---------------------------------------------------------------------------------------


def icd10_concepts() -> dict[str, str]:
    """The most specific codes of ICD-10-CM before seventh characters, which notes are coded with, and descriptions."""
    import simple_icd_10_cm as icd

    codes = icd10_codes()
    above = {parent for code in codes if (parent := icd.get_parent(code)) != code}  # B20 is also B20's block
    return {code: icd10_description(code) for code in codes if code not in above}


def _without_encounter(code: str) -> str:
    """A code without its seventh character (initial, subsequent encounter), and without the X that fills up to it."""
    import simple_icd_10_cm as icd

    while icd.is_extended_subcategory(code):
        code = icd.get_parent(code)
    return code


def load_open_linking(path: Path) -> TestSet:
    """data/open_linking/mentions.csv.gz: distinct (mention, code) pairs against ICD-10-CM.

    A code with a seventh character counts as the code above: a mention doesn't say which encounter it is.
    Raises DataError (file, row, field) for a missing column, an empty mention or an unknown code."""
    import simple_icd_10_cm as icd

    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    if missing := [column for column in LINKING_COLUMNS if column not in table]:
        raise DataError(f"{path.name}, row 1, field {missing[0]}: missing column")
    concepts, mentions, left_out = icd10_concepts(), {}, Counter()
    for row, record in enumerate(table.to_dict("records"), 2):
        code = record["icd10cm_code"]
        if not record["mention"].strip():
            raise DataError(f"{path.name}, row {row}, field mention: empty")
        if not icd.is_valid_item(code) or _without_encounter(code) not in concepts:
            raise DataError(f"{path.name}, row {row}, field icd10cm_code: {code!r} is no specific code of ICD-10-CM")
        code = _without_encounter(code)
        key = (text_key(record["mention"]), code)
        if key in mentions:
            left_out["repeats another (mention, concept) pair"] += 1
        else:
            mentions[key] = Mention(f"L{row}", record["note_id"], record["mention"], frozenset([code]))
    gold = {c for mention in mentions.values() for c in mention.concepts}
    names = {c: [text for texts in icd10_sections(c).values() for text in texts] for c in sorted(gold)}
    return TestSet("OpenLinking", "ICD-10", concepts, names, list(mentions.values()), left_out)


# --- NCBI Disease ---------------------------------------------------------------------------------------------------


def read_ncbi(path: Path) -> list[tuple[str, str, str]]:
    """(PMID, mention, concept id as annotated) of a file in PubTator's format.

    Raises DataError (file, row, field) for a line that is none of title, abstract, annotation, empty."""
    rows = []
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            cells = line.rstrip("\r\n").split("\t")
            if not line.strip() or re.match(r"\d+\|[ta]\|", line):
                continue
            if len(cells) != 6:
                raise DataError(f"{path.name}, row {number}: {len(cells)} columns instead of 6; fetch the file again")
            if not cells[3].strip() or not cells[5].strip():
                column = "concept id" if cells[3].strip() else "mention"
                raise DataError(f"{path.name}, row {number}, field {column}: empty; fetch the file again")
            rows.append((cells[0], cells[3], cells[5].strip().removeprefix("MESH:")))
    return rows


def resolve_ids(annotated: Iterable[tuple[str, str, str]], graph: KnowledgeGraph) -> dict[str, str]:
    """MeSH's id -> the graph's concept that more than half of the id's mentions name word for word.

    The package that carries MeSH gives many descriptors a related one's id, so ids are not compared. Only mentions
    that name just one concept count. Call it with the training and development parts, never with the test part."""
    concept_of: dict[str, set[str]] = defaultdict(set)
    for term, cuis in graph.term2cui.items():
        concept_of[text_key(term)].update(cuis)
    votes: dict[str, Counter[str]] = defaultdict(Counter)
    for _, mention, concept in annotated:
        found = concept_of.get(text_key(mention), ())
        if len(found) == 1 and re.fullmatch(r"D\d+", concept):
            votes[concept].update(found)
    best = {concept: counts.most_common(1)[0] for concept, counts in votes.items()}
    return {concept: cui for concept, (cui, n) in best.items() if 2 * n > votes[concept].total()}


def load_ncbi_disease(graph: KnowledgeGraph, name: str, folder: str | Path | None = None) -> TestSet | None:
    """The test part of NCBI Disease (public_data.locate) against the graph called `name`.

    Distinct (mention, concept) pairs; those of several concepts, of OMIM or of a descriptor that resolve_ids doesn't
    know are left out and counted. None without the files."""
    root = public_data.locate("ncbi_disease", folder)
    if root is None:
        return None
    parts = ("train", "develop", "test")
    paths = {part: root / "ncbi_disease" / f"NCBI{part}set_corpus.txt.gz" for part in parts}
    cui_of = resolve_ids([*read_ncbi(paths["train"]), *read_ncbi(paths["develop"])], graph)
    mentions, left_out, seen = {}, Counter(), set()
    for document, text, concept in read_ncbi(paths["test"]):
        key = (text_key(text), concept)
        if key in seen:
            left_out["repeats another (mention, concept) pair"] += 1
        elif re.search(r"[|+]", concept):
            left_out["several concepts"] += 1
        elif not re.fullmatch(r"D\d+", concept):
            left_out["concept of OMIM, or a supplementary one"] += 1
        elif concept not in cui_of:
            left_out["descriptor that no training mention ties to the graph"] += 1
        else:
            mentions[key] = Mention(f"N{len(mentions)}", document, text, frozenset([cui_of[concept]]))
        seen.add(key)
    gold = sorted({c for mention in mentions.values() for c in mention.concepts})
    names = {c: graph.synonyms(c) for c in gold}
    return TestSet("NCBI Disease", name, dict(graph.cui2pt), names, list(mentions.values()), left_out)


# --- a task's own dev pairs -----------------------------------------------------------------------------------------


def own_task(train: Task, dev: Task, mentions: int, concepts: int, seed: int, but: Iterable[Mention] = ()) -> TestSet:
    """A task's dev pairs as a test set: mentions that are no training pair's mention, among dev's concepts.

    A text may be another training pair's concept: a parent in one pair is a child in the next. `concepts`: how many of
    dev's concept texts are drawn at most, beside the gold ones. `but`: mentions that something was chosen by, left out.
    A mention with several concepts counts as found with any of them."""
    chosen_by = [int(mention.id) for mention in but]
    unseen = np.setdiff1d(dev.mention, np.union1d(train.mention, np.array(chosen_by, dtype=int)))
    own = _as_test_set(f"{train.name}, dev", dev, unseen, mentions, concepts, seed)
    # In the comb task, two graphs may have the same text at different positions.
    seen = {train.texts[i] for i in np.unique(train.mention)} | {mention.text for mention in but}
    return replace(own, mentions=[mention for mention in own.mentions if mention.text not in seen])


def seen_task(train: Task, shown: Sequence[int], mentions: int, concepts: int, seed: int) -> TestSet:
    """The pairs at positions `shown` of a task as a test set, like own_task's: what a system has learnt of them."""
    return _as_test_set(f"{train.name}, train", train, np.unique(train.mention[list(shown)]), mentions, concepts, seed)


def _as_test_set(name: str, task: Task, among: np.ndarray, mentions: int, concepts: int, seed: int) -> TestSet:
    rng = np.random.default_rng(seed)
    asked = np.sort(rng.choice(among, min(mentions, len(among)), replace=False))
    gold: dict[int, set[int]] = defaultdict(set)
    for m, c in zip(task.mention.tolist(), task.concept.tolist(), strict=True):
        gold[m].add(c)
    pool = np.unique(task.concept)
    drawn = rng.choice(pool, min(concepts, len(pool)), replace=False).tolist()
    pool = sorted({*drawn, *(c for m in asked.tolist() for c in gold[m])})
    return TestSet(
        name,
        task.graph,
        {str(c): task.texts[c] for c in pool},
        {},
        [Mention(str(m), str(m), task.texts[m], frozenset(map(str, gold[m]))) for m in asked.tolist()],
    )


# --- zero-shot ------------------------------------------------------------------------------------------------------


def unseen_texts(test_sets: Iterable[TestSet], graph: str) -> set[str]:
    """What pairs of a task on `graph` must not hold for the test sets to be zero-shot (§2).

    Every test mention, whatever the graph (zero-shot on mentions); and, where the test set's concepts are of another
    graph, every name of its gold concepts as well (zero-shot on mentions and concepts)."""
    texts: set[str] = set()
    for test_set in test_sets:
        texts |= {mention.text for mention in test_set.mentions}
        if test_set.graph != graph:
            texts |= {name for names in test_set.names.values() for name in names}
    return texts


def zero_shot_setting(graphs: Sequence[str], test_set: TestSet) -> str:
    """Which of §2's two scenarios a system trained on the pairs of `graphs` is in; empty for an untrained one."""
    if not graphs:
        return ""
    return MENTIONS_ONLY if test_set.graph in set(graphs) else MENTIONS_AND_CONCEPTS


# --- recall ---------------------------------------------------------------------------------------------------------


def best_concepts(
    scores: Callable[[slice], np.ndarray], mention_ids: Sequence[str], concept_ids: Sequence[str], k: int = 25
) -> np.ndarray:
    """Concept positions int [mentions, k], best first, equal scores in fusion.tie_keys' order.

    `scores` gives float [mentions, concepts] for a slice of the mentions: the whole matrix need not fit memory."""
    k, size = min(k, len(concept_ids)), max(1, 4_000_000 // len(concept_ids))
    best = np.empty((len(mention_ids), k), dtype=np.int64)
    for start in range(0, len(mention_ids), size):
        part = slice(start, start + size)
        block, ties = np.asarray(scores(part)), tie_keys(mention_ids[part], concept_ids)
        lowest = -np.partition(-block, k - 1, axis=1)[:, k - 1]
        for row, (values, keys) in enumerate(zip(block, ties, strict=True), start):
            pool = np.flatnonzero(values >= lowest[row - start])  # the k best and all that tie with the last
            best[row] = pool[rank(values[pool], keys[pool])[:k]]
    return best


def recall_values(test_set: TestSet, scores: Callable[[slice], np.ndarray]) -> pd.DataFrame:
    """R@1 and R@25 (0 or 100) of each mention; rows as metrics.single_patient's, for intervals.result_rows.

    `query_id` is the gold concept: intervals draw concepts, since mentions of one concept aren't independent."""
    ids = list(test_set.concepts)
    best = best_concepts(scores, [mention.id for mention in test_set.mentions], ids)
    places = range(best.shape[1])
    run = {m.id: {ids[best[row, i]]: float(-i) for i in places} for row, m in enumerate(test_set.mentions)}
    qrels = {m.id: dict.fromkeys(m.concepts, 1) for m in test_set.mentions}
    concept = {m.id: min(m.concepts) for m in test_set.mentions}
    names = {measure: name for name, measure in METRICS.items()}
    rows = [
        (value.query_id, concept[value.query_id], test_set.graph, names[value.measure], 100.0 * value.value)
        for value in ir_measures.iter_calc(METRICS.values(), qrels, run)
    ]
    frame = pd.DataFrame(rows, columns=["search_id", "query_id", "query_type", "metric", "value"])
    return frame.sort_values(["metric", "search_id"], ignore_index=True)
