"""Labelled entries and the queries they answer (Radiology §2.2, §3.1, §3.2).

A report's sentences are labelled with the lexicon's findings, present or ruled out; "M" and "no M" are the queries, and
a query's matched sentences are those with its label.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from drehr_utils.knowledge import negation
from drehr_utils.papers.radiology.lexicon import FindingMatcher
from drehr_utils.search.bm25 import words


@dataclass(frozen=True)
class Entry:
    """(S, N, M) of §2.2: a sentence, whether it affirms the finding, and the finding."""

    sentence: str
    present: bool
    finding: str

    @property
    def query(self) -> str:
        """ "M" or "no M": §2.2's simple form, in training and evaluation."""
        return self.finding if self.present else f"no {self.finding}"


def is_negative(query: str) -> bool:
    return query.startswith("no ")


def label_sentence(sentence: str, matcher: FindingMatcher) -> dict[str, bool]:
    """Findings of a sentence: affirmed (True) where one mention is, else ruled out (False)."""
    labels: dict[str, bool] = {}
    for mention in matcher.find(sentence):
        # From its first word to its last: "no pleural or pericardial effusion" denies both.
        present = not negation.denied(sentence, mention.start, mention.end)
        labels[mention.finding] = labels.get(mention.finding, False) or present
    return labels


def unique_sentences(sentences: Iterable[str]) -> dict[tuple[str, ...], str]:
    """By their lower-cased words, which make two sentences one, the first of each ("after pruning for duplicates",
    §3.1)."""
    unique: dict[tuple[str, ...], str] = {}
    for sentence in sentences:
        unique.setdefault(tuple(words(sentence)), sentence)
    return unique


def label_entries(sentences: Iterable[str], matcher: FindingMatcher) -> list[Entry]:
    """The entries of the unique sentences, in order of first appearance."""
    unique = unique_sentences(sentences).values()
    return [Entry(s, yes, finding) for s in unique for finding, yes in label_sentence(s, matcher).items()]


def without_sentences(entries: Sequence[Entry], test: Sequence[Entry]) -> list[Entry]:
    """The training entries whose sentence, in whatever spelling, is not among the test's."""
    held_out = unique_sentences(entry.sentence for entry in test)
    return [entry for entry in entries if tuple(words(entry.sentence)) not in held_out]


def split_by_finding(entries: Sequence[Entry], seed: int = 0) -> tuple[list[Entry], list[Entry]]:
    """Two halves without a common finding and with about equally many entries (§3.2).

    Findings of more than a twentieth of the entries are dealt first, largest first, then the others in a random order
    of the seed; each goes to the half that is smaller by then."""
    sizes = Counter(entry.finding for entry in entries)
    order = np.random.default_rng(seed).permutation(sorted(sizes)).tolist()
    halves: tuple[set[str], set[str]] = (set(), set())
    totals = [0, 0]
    for finding in sorted(order, key=lambda f: -sizes[f] if sizes[f] > len(entries) / 20 else 0):
        half = int(totals[1] < totals[0])
        halves[half].add(finding)
        totals[half] += sizes[finding]
    return tuple([entry for entry in entries if entry.finding in half] for half in halves)


@dataclass(frozen=True)
class SentenceQueries:
    """A retrieval task: sentences to rank, and for each query the positions of its matched ones."""

    sentences: list[str]
    matched: dict[str, np.ndarray]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> SentenceQueries:
        """The dictionary of §2.2: a unique query, and every sentence that carries its label."""
        at = {sentence: i for i, sentence in enumerate(dict.fromkeys(entry.sentence for entry in entries))}
        matched: dict[str, list[int]] = defaultdict(list)
        for entry in entries:
            matched[entry.query].append(at[entry.sentence])
        return cls(list(at), {query: np.array(rows) for query, rows in matched.items()})

    @property
    def queries(self) -> list[str]:
        return list(self.matched)
