"""Test sets of entity retrieval, and recall: mentions with their concepts (KG entity retrieval §2, §5, §6.1)."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
import simple_icd_10_cm as icd

from drehr_utils.data import public_data
from drehr_utils.errors import DataError
from drehr_utils.evaluation.metrics import NO_PATIENT
from drehr_utils.files import iter_rows, read_text_lines, refuse, tab_rows
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.papers.kg.tasks import Task, icd10_codes, icd10_description, icd10_parent, icd10_sections, text_key
from drehr_utils.profiles import ROOT
from drehr_utils.search.fusion import rank, tie_keys

METRICS = {"R@1": 1, "R@25": 25}
NCBI = "NCBI Disease"
NCBI_DIGESTS = ROOT / "data/ncbi_disease_digests.tsv"  # of its mentions, and of their concepts' names in MeSH
REPEATED = "repeats another (mention, concept) pair"
KINDS = ("lexical", "synonym", "abbreviation", "implication")  # of mentions: how one leads to its concept


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

    @property
    def gold(self) -> list[str]:
        """The concepts that some mention has."""
        return sorted({c for mention in self.mentions for c in mention.concepts})

    def cut(self, mentions: int | None, concepts: int | None, seed: int) -> TestSet:
        """The first mentions, and their concepts with so many of the others, drawn, as make `concepts`; None: all."""
        first = replace(self, mentions=self.mentions[:mentions])
        kept = set(first.gold)
        others = [c for c in self.concepts if c not in kept]
        if concepts is not None and len(others) > concepts - len(kept):
            others = np.random.default_rng(seed).permutation(others)[: max(0, concepts - len(kept))].tolist()
        kept.update(others)
        return replace(first, concepts={c: t for c, t in self.concepts.items() if c in kept})

    def of_documents(self, documents: Iterable[str]) -> TestSet:
        wanted = set(documents)
        return replace(self, mentions=[m for m in self.mentions if m.document in wanted])


# --- the open notes' mentions ---------------------------------------------------------------------------------------


def icd10_concepts() -> dict[str, str]:
    """The most specific codes of ICD-10-CM before seventh characters, which notes are coded with, and descriptions."""
    codes = icd10_codes()
    above = set(map(icd10_parent, codes))
    return {code: icd10_description(code) for code in codes if code not in above}


def load_open_linking(path: Path) -> TestSet:
    """data/open_linking/mentions.csv.gz: distinct (mention, code) pairs against ICD-10-CM.

    A code with a seventh character counts as the code above: a mention doesn't say which encounter it is.
    Raises DataError (file, row, field) for a missing column, an empty mention or an unknown code."""
    concepts, mentions, left_out = icd10_concepts(), {}, Counter()
    for row, record in iter_rows(path, ("note_id", "mention", "icd10cm_code")):
        document, text, given = record.values()
        code, where = given.strip().upper(), f"{path.name}, row {row}, field"
        code = code if "." in code or len(code) <= 3 else f"{code[:3]}.{code[3:]}"  # MIMIC's tables leave the dot out
        while icd.is_valid_item(code) and icd.is_extended_subcategory(code):
            code = icd.get_parent(code)  # without the seventh character, and without the X that fills up to it
        if not text.strip():
            raise DataError(f"{where} mention: empty")
        if code not in concepts:
            raise DataError(f"{where} icd10cm_code: no specific code of ICD-10-CM")
        if (key := (text_key(text), code)) in mentions:
            left_out[REPEATED] += 1
        else:
            mentions[key] = Mention(f"L{row}", document, text, frozenset([code]))
    found = TestSet("OpenLinking", "ICD-10", concepts, {}, list(mentions.values()), left_out)
    return replace(found, names={c: [t for texts in icd10_sections(c).values() for t in texts] for c in found.gold})


def mention_kinds(path: Path) -> dict[tuple[str, str], str]:
    """data/open_linking/kinds.tsv: (text_key of a mention, code) -> one of KINDS, as two judges and a third decided.

    Raises DataError (file, row, field) for a missing column and for another kind."""
    found = {}
    for row, where, cells in tab_rows(path, ("mention", "icd10cm_code", "kind")):
        refuse(where, row, {f"field kind: none of {', '.join(KINDS)}": cells["kind"] not in KINDS})
        found[text_key(cells["mention"]), cells["icd10cm_code"]] = cells["kind"]
    return found


# --- NCBI Disease ---------------------------------------------------------------------------------------------------


def read_ncbi(path: Path) -> list[tuple[str, str, str]]:
    """(PMID, mention, concept id as annotated) of a file in PubTator's format.

    Raises DataError (file, row, field) for a line that is none of title, abstract, annotation, empty."""
    rows = []
    for number, line in read_text_lines(path):
        if not line.strip() or re.match(r"\d+\|[ta]\|", line):
            continue
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) != 6:
            raise DataError(f"{path.name}, row {number}: {len(cells)} columns instead of 6; fetch the file again")
        for column, cell in (("mention", cells[3]), ("concept id", cells[5])):
            if not cell:
                raise DataError(f"{path.name}, row {number}, field {column}: empty; fetch the file again")
        rows.append((cells[0], cells[3], cells[5].removeprefix("MESH:")))
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


def load_ncbi_disease(graph: KnowledgeGraph, name: str) -> TestSet | None:
    """The test part of NCBI Disease (public_data.locate) against the graph called `name`.

    Distinct (mention, concept) pairs; those of several concepts, of OMIM or of a descriptor that resolve_ids doesn't
    know are left out and counted. None without the files."""
    if (root := public_data.locate("ncbi_disease")) is None:
        return None
    paths = (root / f"ncbi_disease/NCBI{part}set_corpus.txt.gz" for part in ("train", "develop", "test"))
    train, develop, test = map(read_ncbi, paths)
    cui_of = resolve_ids(train + develop, graph)
    mentions, left_out, seen = [], Counter(), set()
    for document, text, concept in test:
        key = (text_key(text), concept)
        if key in seen:
            left_out[REPEATED] += 1
        elif re.search(r"[|+]", concept):
            left_out["several concepts"] += 1
        elif not re.fullmatch(r"D\d+", concept):
            left_out["concept of OMIM, or a supplementary one"] += 1
        elif concept not in cui_of:
            left_out["descriptor that no training mention ties to the graph"] += 1
        else:
            mentions.append(Mention(f"N{len(mentions)}", document, text, frozenset([cui_of[concept]])))
        seen.add(key)
    found = TestSet(NCBI, name, dict(graph.cui2pt), {}, mentions, left_out)
    return replace(found, names={c: graph.synonyms(c) for c in found.gold})


# --- a task's own pairs ---------------------------------------------------------------------------------------------


def own_task(train: Task, dev: Task, mentions: int, concepts: int, seed: int, but: Iterable[Mention] = ()) -> TestSet:
    """A task's dev pairs as a test set: mentions that are no training pair's mention, among dev's concepts.

    A text may be another training pair's concept: a parent in one pair is a child in the next. Of the comb, whose two
    sides number their texts apart, more mentions go than need to, whichever have a number of train's: some 340 of 500
    stay, by which the records' learning rates were chosen. `concepts`: how many of dev's concepts are drawn at most,
    beside the gold ones. `but`: mentions that something was chosen by, left out."""
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
    asked = np.sort(rng.choice(among, min(mentions, len(among)), replace=False)).tolist()
    gold: dict[int, set[int]] = defaultdict(set)
    for m, c in zip(task.mention.tolist(), task.concept.tolist(), strict=True):
        gold[m].add(c)
    pool = np.unique(task.concept)
    drawn = rng.choice(pool, min(concepts, len(pool)), replace=False).tolist()
    pool = sorted({*drawn, *(c for m in asked for c in gold[m])})
    found = [Mention(str(m), str(m), task.texts[m], frozenset(map(str, gold[m]))) for m in asked]
    return TestSet(name, task.graph, {str(c): task.texts[c] for c in pool}, {}, found)


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


def unseen_digests(test_sets: Iterable[TestSet], graph: str) -> set[str]:
    """Digests of the texts that NCBI Disease would add to `unseen_texts`, where it isn't among the test sets: so tasks,
    and what is trained on them, are the same with and without its files, unless a profile cuts the test sets
    (`max_mentions`). None where it is."""
    if NCBI in {test_set.name for test_set in test_sets}:
        return set()
    rows = (row for _, _, row in tab_rows(NCBI_DIGESTS, ("graph", "digest")))
    return {row["digest"] for row in rows if row["graph"] != graph}


# --- recall ---------------------------------------------------------------------------------------------------------


def gold_rank(scores: np.ndarray, ties: np.ndarray, gold: Sequence[int]) -> int:
    """The rank, from 1, of the best of the `gold` positions; `scores` and `ties` (fusion.tie_keys') are [concepts].

    Counted, not sorted: of a few hundred thousand concepts only this one's rank is asked for."""
    best = gold[rank(scores[gold], ties[gold])[0]]
    ahead = (scores > scores[best]) | ((scores == scores[best]) & (ties < ties[best]))
    return 1 + int(ahead.sum())


def recall_values(test_set: TestSet, scores: Callable[[list[str]], np.ndarray]) -> pd.DataFrame:
    """R@1 and R@25 (0 or 100) of each mention; rows as metrics.single_patient's, for intervals.result_rows.

    A mention has one gold concept (or any of several counts as found), so recall is success. `scores` gives float
    [mentions, concepts] for some of the mentions' texts: the whole matrix need not fit memory. `query_id` is the gold
    concept: intervals draw concepts, since mentions of one concept aren't independent."""
    ids = list(test_set.concepts)
    at, rows, size = {c: i for i, c in enumerate(ids)}, [], max(1, 4_000_000 // len(ids))
    for start in range(0, len(test_set.mentions), size):
        part = test_set.mentions[start : start + size]
        block, ties = np.asarray(scores([m.text for m in part])), tie_keys([m.id for m in part], ids)
        for m, values, keys in zip(part, block, ties, strict=True):
            place = gold_rank(values, keys, [at[c] for c in m.concepts])
            told = (m.id, min(m.concepts), test_set.graph)
            rows += [(*told, name, 100.0 * (place <= k)) for name, k in METRICS.items()]
    frame = pd.DataFrame(rows, columns=NO_PATIENT)
    return frame.sort_values(["metric", "search_id"], ignore_index=True)
