"""Longest-match recognition of knowledge-graph terms in chunks (DR.EHR §3.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ahocorasick_rs import AhoCorasick, Implementation, MatchKind

from drehr_utils.knowledge.graph import collector_paused


class Match(NamedTuple):
    start: int  # in characters of the text
    end: int
    term: str


def _blanked(text: str) -> str:
    """`text` with a blank in place of each character after which a term may start: one pattern prefix for all."""
    if text.isprintable():  # then a blank is the only white space in it: the quick way, and the usual case
        return text.replace("(", " ")
    return re.sub(r"[\s(]", " ", text)


class EntityMatcher:
    """Finds the terms of a vocabulary in a text, from the left, the longest first, without overlaps.

    A match starts at the text's beginning or after white space or "(", and ends at the text's end or before a
    character that is neither letter nor digit. Patterns carry the blank before them, so that the automaton itself
    skips every occurrence inside a word (most of them); it gives the others in one pass, and the rules choose: a long
    term that ends inside a word doesn't hide a shorter one."""

    def __init__(self, terms: Iterable[str]):
        self.terms = sorted({term for term in terms if term.strip()})
        # The contiguous NFA takes a fraction of the DFA's memory; the term list is ours already (store_patterns).
        self._automaton = AhoCorasick(
            (f" {_blanked(term)}" for term in self.terms),
            matchkind=MatchKind.Standard,
            store_patterns=False,
            implementation=Implementation.ContiguousNFA,
        )

    def find(self, text: str) -> list[Match]:
        """The matches in `text`, which the caller has lower-cased as the terms are, in order."""
        blanked = f" {_blanked(text)}\n"  # the blank in front of a term stands at the term's own place in `text`
        hits = self._automaton.find_matches_as_indexes(blanked, overlapping=True)
        # start -> term. Hits come in the order of their ends, so the last one of a start is the longest.
        longest = {
            start: term
            for index, start, end in hits
            if not blanked[end].isalnum() and text.startswith(term := self.terms[index], start)
        }
        matches, free_from = [], 0
        for start in sorted(longest):
            if start >= free_from:
                free_from = start + len(longest[start])
                matches.append(Match(start, free_from, longest[start]))
        return matches

    def find_all(self, texts: Sequence[str]) -> list[list[Match]]:
        """`find` of each text."""
        with collector_paused():
            return [self.find(text) for text in texts]
