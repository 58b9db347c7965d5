"""Longest-match recognition of knowledge-graph terms in a chunk (DR.EHR §3.1), on an Aho-Corasick automaton."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from ahocorasick_rs import AhoCorasick, Implementation, MatchKind


class Match(NamedTuple):
    start: int  # in characters of the text
    end: int
    term: str


# White space other than a blank, and "(": a term may start after them, as after a blank.
_OPENS_A_TERM = re.compile(r"[^\S ]|\(")


def _marked(text: str) -> str:
    """`text` with a blank after each character that opens a term, so that one pattern prefix covers all of them."""
    if text.isprintable():  # then a blank is the only white space in it: the quick way, and the usual case
        return text.replace("(", "( ")
    return _OPENS_A_TERM.sub(r"\g<0> ", text)


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
            (f" {_marked(term)}" for term in self.terms),
            matchkind=MatchKind.Standard,
            store_patterns=False,
            implementation=Implementation.ContiguousNFA,
        )

    def find(self, text: str) -> list[Match]:
        """The matches in `text`, which the caller has lower-cased as the terms are, in order."""
        marked = f" {_marked(text)} "
        hits = self._automaton.find_matches_as_indexes(marked, overlapping=True)
        # start -> (end, term). Hits come in the order of their ends, so the last one of a start is the longest.
        longest = {start: (end, index) for index, start, end in hits if not marked[end].isalnum()}
        added: list[int] = []  # where `marked` has a blank more than `text`, but for the one in front
        if len(marked) > len(text) + 2:
            added = [m.end() + i + 1 for i, m in enumerate(_OPENS_A_TERM.finditer(text))]
        matches, free_from = [], 0
        for start in sorted(longest):
            first = start - bisect_right(added, start)  # the blank in front of the term counts as its start
            if first >= free_from:
                term = self.terms[longest[start][1]]
                free_from = first + len(term)
                matches.append(Match(first, free_from, term))
        return matches
