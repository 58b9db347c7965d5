"""Longest-match recognition of knowledge-graph terms in a chunk (DR.EHR §3.1), on an Aho-Corasick automaton."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ahocorasick_rs import AhoCorasick, Implementation, MatchKind


@dataclass(frozen=True, slots=True)
class Match:
    start: int  # in characters of the text
    end: int
    term: str


class EntityMatcher:
    """Finds the terms of a vocabulary in a text, from the left, the longest first, without overlaps.

    A match starts at the text's beginning or after white space or "(", and ends at the text's end or before a
    character that is neither letter nor digit. The automaton gives every occurrence in one pass over the text;
    the rules then choose among them, so that a long term that ends inside a word doesn't hide a shorter one."""

    def __init__(self, terms: Iterable[str]):
        self.terms = sorted({term for term in terms if term.strip()})
        # The contiguous NFA takes a fraction of the DFA's memory; the term list is ours already (store_patterns).
        self._automaton = AhoCorasick(
            self.terms, matchkind=MatchKind.Standard, store_patterns=False, implementation=Implementation.ContiguousNFA
        )

    def find(self, text: str) -> list[Match]:
        """The matches in `text`, which the caller has lower-cased as the terms are, in order."""
        longest: dict[int, tuple[int, int]] = {}  # start -> (end, term), the longest that obeys the boundary rules
        size = len(text)
        for index, start, end in self._automaton.find_matches_as_indexes(text, overlapping=True):
            if start and not (text[start - 1] == "(" or text[start - 1].isspace()):
                continue
            if end < size and text[end].isalnum():
                continue
            if start not in longest or end > longest[start][0]:
                longest[start] = (end, index)
        matches, free_from = [], 0
        for start in sorted(longest):
            if start >= free_from:
                end, index = longest[start]
                matches.append(Match(start, end, self.terms[index]))
                free_from = end
        return matches
