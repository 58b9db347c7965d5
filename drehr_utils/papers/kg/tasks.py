"""Learning tasks from a knowledge graph: pairs, their splits, the comb task (KG entity retrieval §4)."""

from __future__ import annotations

import hashlib
import itertools
import re
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import simple_icd_10_cm as icd

from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph, normalize_term
from drehr_utils.search.bm25 import words

ALL_GRAPHS = "all"  # the comb task's `graph`


@dataclass(frozen=True)
class Task:
    """Pairs (m, c) as positions in `texts`: `mention` and `concept`, int32 [pairs]; 27M pairs of UMLS take 216 MB."""

    name: str
    graph: str  # the knowledge graph that the pairs are from, or ALL_GRAPHS
    texts: list[str]
    mention: np.ndarray
    concept: np.ndarray

    @classmethod
    def from_pairs(cls, name: str, graph: str, pairs: Iterable[tuple[str, str]]) -> Task:
        """Pairs of texts, in order, each once; a pair of a text with itself teaches nothing and is left out."""
        at: dict[str, int] = {}
        sides = array("i"), array("i")
        for pair in pairs:
            m, c = map(normalize_term, pair)
            if m and c and m != c:
                for side, text in zip(sides, (m, c), strict=True):
                    side.append(at.setdefault(text, len(at)))
        mention, concept = (np.frombuffer(side, dtype=np.int32) if side else np.zeros(0, np.int32) for side in sides)
        _, first = np.unique(mention.astype(np.int64) * len(at) + concept, return_index=True)
        return cls(name, graph, list(at), mention, concept).take(np.sort(first))

    def __len__(self) -> int:
        return len(self.mention)

    def pair(self, i: int) -> tuple[str, str]:
        return self.texts[self.mention[i]], self.texts[self.concept[i]]

    def used_texts(self) -> list[str]:
        """Every text that a pair has, on either side, in the order of `texts`."""
        return [self.texts[i] for i in np.union1d(self.mention, self.concept)]

    def take(self, rows: np.ndarray) -> Task:
        return replace(self, mention=self.mention[rows], concept=self.concept[rows])


# --- ICD-10-CM ------------------------------------------------------------------------------------------------------


def title_concatenation(description: str, parent: str) -> str:
    """A node's sub-specifier, then its parent's title: "chest" under "pain" gives "chest pain" (§4.1, Figure 1).

    ICD-10-CM's tabular list spells descriptions out, so the sub-specifier is what the description adds: its words that
    the parent's title lacks. Empty where it adds none."""
    known = set(words(parent))
    specifier = " ".join(word for word in words(description) if word not in known)
    return normalize_term(f"{specifier} {parent}") if specifier else ""


def icd10_codes() -> list[str]:
    """Codes of ICD-10-CM, categories to the most specific, without seventh characters (encounters, not conditions)."""
    # dict.fromkeys: the package lists a block of one category, whose code is the category's, twice
    codes = dict.fromkeys(icd.get_all_codes(True))
    return [c for c in codes if icd.is_category_or_subcategory(c) and not icd.is_extended_subcategory(c)]


def icd10_parent(code: str) -> str | None:
    """The code above; None under a block, which may have the very code of its one category (B20)."""
    parent = icd.get_parent(code)
    return parent if parent and parent != code and icd.is_category_or_subcategory(parent) else None


def icd10_description(code: str) -> str:
    return normalize_term(icd.get_description(code))


@cache
def icd10_sections(code: str) -> dict[str, list[str]]:
    """A node's concatenated title, description and similar concepts (§4.1). The tabular list has no SeeAlso: its
    inclusion terms and "includes" notes, names of conditions that get the code, are what comes nearest. "NOS" and codes
    in brackets are cut off."""
    description, parent = icd10_description(code), icd10_parent(code)
    title = title_concatenation(description, icd10_description(parent)) if parent else ""
    included = map(normalize_term, [*icd.get_inclusion_term(code), *icd.get_includes(code)])
    similar = [re.sub(r",? nos$", "", re.sub(r" \([a-z]\d[\w.,\s-]*\)$", "", term)) for term in included]
    return {"title": [title] if title else [], "code": [description], "see_also": list(dict.fromkeys(similar))}


def icd10_synonym_pairs(codes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """m = N^L, c = N^R, L != R: each two sections of a node, both ways (§4.1)."""
    for code in codes:
        for left, right in itertools.permutations(icd10_sections(code).values(), 2):
            yield from itertools.product(left, right)


def icd10_graph_pairs(codes: Iterable[str]) -> Iterator[tuple[str, str]]:
    """m = the parent's description, c = the child's (§4.1)."""
    for code in codes:
        if parent := icd10_parent(code):
            yield icd10_description(parent), icd10_description(code)


def icd10_name_pairs(codes: Iterable[str], graph: KnowledgeGraph) -> Iterator[tuple[str, str]]:
    """m = a name that `graph` has for a node and ICD-10-CM has not, c = the node's description. No task of the paper's.

    The graph's concepts of a node are those with a name that is its description or a similar concept of it."""
    concepts: dict[str, dict[str, None]] = {}
    for term, cuis in graph.term2cui.items():
        concepts.setdefault(text_key(term), {}).update(dict.fromkeys(cuis))
    for code in codes:
        sections = icd10_sections(code)
        known = {text_key(text): None for text in (*sections["code"], *sections["see_also"])}
        for cui in dict.fromkeys(cui for key in known for cui in concepts.get(key, ())):
            for name in graph.cui2terms[cui]:
                if text_key(name) not in known:
                    yield name, sections["code"][0]


# --- SNOMED, UMLS and graphs like them ------------------------------------------------------------------------------


def synonym_pairs(graph: KnowledgeGraph) -> Iterator[tuple[str, str]]:
    """m = l^p, c = l^q, p > q: d(d-1)/2 pairs of a concept with d descriptions, the main one first (§4.2)."""
    for cui, terms in graph.cui2terms.items():
        main = graph.cui2pt[cui]
        ordered = [main, *(term for term in terms if term != main)]
        for q, p in itertools.combinations(range(len(ordered)), 2):
            yield ordered[p], ordered[q]


def graph_pairs(graph: KnowledgeGraph) -> Iterator[tuple[str, str]]:
    """m = l^1_i, c = l^1_j for each edge from i to j, is_a or any other relation (§4.2)."""
    for cui, main in graph.cui2pt.items():
        others = [*graph.hypernyms(cui), *(other for _, other in graph.related(cui))]
        for other in dict.fromkeys(others):
            if other in graph.cui2pt:
                yield main, graph.cui2pt[other]


# --- zero-shot, splits, comb ----------------------------------------------------------------------------------------


def text_key(text: str) -> str:
    """What two texts share that differ in case, spaces and punctuation only."""
    return " ".join(words(text))


def text_digest(text: str) -> str:
    """A text's key as 16 hexadecimal digits, for a text that may not be passed on."""
    return hashlib.blake2b(text_key(text).encode(), digest_size=8).hexdigest()


def without_texts(task: Task, left_out: Iterable[str], digests: Collection[str] = ()) -> Task:
    """The task without pairs that have one of the texts, on either side; compared by text_key, or by text_digest."""
    keys = {text_key(text) for text in left_out}
    seen = [text_key(text) in keys or (bool(digests) and text_digest(text) in digests) for text in task.texts]
    seen = np.array(seen, dtype=bool)
    return task.take(np.flatnonzero(~(seen[task.mention] | seen[task.concept])))


def split_pairs(task: Task, seed: int) -> tuple[Task, Task]:
    """Train and dev, 80:20 (§4.3). Both directions of a pair fall on one side, or dev would hold train's answers."""
    low, high = np.minimum(task.mention, task.concept), np.maximum(task.mention, task.concept)
    _, group = np.unique(low.astype(np.int64) * len(task.texts) + high, return_inverse=True)
    groups = group.max(initial=-1) + 1
    in_train = np.zeros(groups, dtype=bool)
    in_train[np.random.default_rng(seed).permutation(groups)[: round(0.8 * groups)]] = True
    return task.take(np.flatnonzero(in_train[group])), task.take(np.flatnonzero(~in_train[group]))


def down_sample(task: Task, size: int, seed: int) -> Task:
    """A sample of the pairs without replacement; all of them where there are no more than `size`."""
    if len(task) <= size:
        return task
    return task.take(np.sort(np.random.default_rng(seed).choice(len(task), size, replace=False)))


def cap_spellings(task: Task, seed: int) -> Task:
    """The task with a sample of its spellings, no more than it has other pairs.

    A spelling is a pair of which one text has all words of the other, such as a description and the title that is
    joined of it and its parent's (title_concatenation): seven tenths of ICD-10-CM's pairs, which any encoder solves."""
    of = [set(words(text)) for text in task.texts]
    pairs = zip(task.mention.tolist(), task.concept.tolist(), strict=True)
    is_spelling = np.array([of[m] <= of[c] or of[c] <= of[m] for m, c in pairs], dtype=bool)
    others, spellings = np.flatnonzero(~is_spelling), np.flatnonzero(is_spelling)
    drawn = np.random.default_rng(seed).permutation(spellings)[: len(others)]
    return task.take(np.sort(np.concatenate([others, drawn])))


def comb_task(tasks: Sequence[Task], seed: int) -> Task:
    """All tasks, first down-sampled to the smallest one's size, then combined (§4.3).

    Raises DataError where a task has no pairs: the comb would be empty."""
    if empty := [task.name for task in tasks if not len(task)]:
        raise DataError(f"comb task: {empty[0]} has no pairs; check its graph's files")
    size = min(map(len, tasks))
    parts = [down_sample(task, size, seed + i) for i, task in enumerate(tasks)]
    return Task.from_pairs("Comb", ALL_GRAPHS, (part.pair(i) for part in parts for i in range(len(part))))
