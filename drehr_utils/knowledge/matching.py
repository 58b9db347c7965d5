"""Longest-match recognition of knowledge-graph terms in chunks (DR.EHR §3.1).

`find` sends one text through an Aho-Corasick automaton. `find_all`, for a corpus, looks texts up in a table of hashed
terms: the automaton reads every character, one after the other, and hands each hit over as a Python object; the table
takes a word a step, for all words of many chunks at once in numpy. Both give the plain left-to-right longest match, and
tests/benchmarks/bench_matching.py times both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import repeat
from typing import NamedTuple

import numpy as np
import pandas as pd
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
        self._table = _SpanTable(self.terms)

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
        """`find` of each text, several times as fast: the way for a corpus."""
        found: list[list[Match]] = [[]] * len(texts)
        with collector_paused():
            for block in _blocks(texts):
                part = [texts[i] for i in block]
                matches = self._table.find(part)
                for i, of_text in zip(block, map(self.find, part) if matches is None else matches, strict=True):
                    found[i] = of_text
        return found


# --- the hashed terms ---------------------------------------------------------------------------------------------


_BLOCK = 1 << 19  # characters hashed at a time: arrays of a few MB
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2**64
_INVERSE = pow(_BASE, -1, 1 << 64)
_SPREAD = np.uint64(0xD6E8FEB86659FD93)  # the table's slot is a hash's highest bits; this mixes all others into them
_SEPARATOR = np.uint64(0x2545F4914F6CDD1D)  # in place of the hash of the line break between two texts
_PREFIX, _TERM = 1, 2


def _blocks(texts: Sequence[str]) -> Iterator[list[int]]:
    """Indices of texts to hash together. First those in ASCII: one other widens a block from bytes to words."""
    for kind in (True, False):
        group = [i for i, text in enumerate(texts) if text.isascii() is kind]
        sizes = np.cumsum([len(texts[i]) + 1 for i in group])
        cuts = np.flatnonzero(np.diff(sizes // _BLOCK)) + 1
        yield from (block.tolist() for block in np.split(np.array(group, int), cuts) if len(block))


@cache
def _classes(characters: int) -> tuple[np.ndarray, np.ndarray]:
    """(ends a term, opens a term) of each code point below `characters`, by the matching rules."""
    every = list(map(chr, range(characters)))
    return np.array([not c.isalnum() for c in every]), np.array([c.isspace() or c == "(" for c in every])


class _Hashed(NamedTuple):
    """Texts in a row, a line break around each: `prefix[p]` hashes the first p characters of the row."""

    codes: np.ndarray  # [characters] uint8 (ASCII) or uint32
    starts: np.ndarray  # [texts] where each begins in the row
    stops: np.ndarray  # [texts] where the line break after each lies
    ends: np.ndarray  # [ends] positions of all characters that are neither letter nor digit, the breaks included
    opens: np.ndarray  # [ends] whether a term may start after that character
    prefix: np.ndarray  # [characters + 1] uint64


class _SpanTable:
    """The terms as 64-bit polynomial hashes, for looking up many spans of text in a few numpy calls.

    The hash of any span is a difference of two prefix hashes, whatever its length. A match can end only where a
    word ends, so a walk from a start takes one such end after the other: `flags` tells, for the hash of the span so
    far, whether a term goes on from there (else the walk is over) and whether a term may end there; `hashes` and `ids`
    then tell which. `flags` knows a tenth or so of other spans too; that costs a step, no more."""

    def __init__(self, terms: list[str]):
        self._powers = self._inverses = np.ones(0, np.uint64)
        self.terms = np.array(terms, object)
        self.lengths = np.fromiter(map(len, terms), np.int32, len(terms))
        # A span for each term, and at most one for each place in it where a step of a walk can end.
        inner = sum(not c.isalnum() for term in terms for c in term)
        self.flags = np.zeros(_power_of_two(3 * (inner + len(terms))), np.uint8)
        known = []
        for block in _blocks(terms):
            row = self._hashed([terms[i] for i in block])
            ends = row.ends[1:]
            term = np.searchsorted(row.stops, ends)
            hashes = self._span_hashes(row.prefix[ends], row.starts[term], row.prefix[row.starts[term]])
            whole = ends == row.stops[term]
            slots = self._slots(hashes)
            self.flags[slots[~whole]] |= _PREFIX
            self.flags[slots[whole]] |= _TERM
            known.append(pd.Series(block, hashes[whole], np.int32))
        ids = pd.concat(known) if known else pd.Series([], np.zeros(0, np.uint64), np.int32)
        ids = ids[~ids.index.duplicated()]  # of two terms with one hash `find` tells which it is
        self.hashes, self.ids = ids.index, ids.to_numpy()

    def _hashed(self, texts: list[str]) -> _Hashed:
        row = "\n".join(["", *texts, ""])
        size = len(row)
        if size > len(self._powers):
            self._inverses = np.full(size, _INVERSE, np.uint64).cumprod()
            self._powers = np.full(size, _BASE, np.uint64).cumprod()
        if row.isascii():
            octets = row.encode()
            codes = np.frombuffer(octets, np.uint8)
            ends_a_term, opens_a_term = _classes(256)  # bytes.translate asks for all 256, and is faster than an index
            ends = np.frombuffer(octets.translate(ends_a_term.tobytes()), bool).nonzero()[0]
        else:
            codes = np.frombuffer(row.encode("utf-32-le"), np.uint32)
            ends_a_term, opens_a_term = _classes(_power_of_two(int(codes.max()) + 1))
            ends = ends_a_term[codes].nonzero()[0]
        stops = np.fromiter(map(len, texts), np.int64, len(texts)) + 1
        stops = np.cumsum(stops, out=stops)
        starts = np.concatenate([[1], stops[:-1] + 1])
        prefix = np.empty(size + 1, np.uint64)
        prefix[0] = 0
        np.multiply(codes, self._powers[:size], out=prefix[1:])
        prefix[stops + 1] = _SEPARATOR
        np.cumsum(prefix, out=prefix)
        return _Hashed(codes, starts, stops, ends, opens_a_term[codes[ends]], prefix)

    def _span_hashes(self, prefix_at_end: np.ndarray, starts: np.ndarray, prefix_at_start: np.ndarray) -> np.ndarray:
        """Hashes that depend on a span's characters, not on its place in the row."""
        return (prefix_at_end - prefix_at_start) * (self._inverses[starts] * _SPREAD)

    def _slots(self, hashes: np.ndarray) -> np.ndarray:
        return (hashes >> np.uint64(65 - len(self.flags).bit_length())).view(np.int64)

    def _longest(self, row: _Hashed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(start, end, term's index) of the longest term at each place where one starts."""
        # `take` throughout: it is about twice as fast as an index in brackets.
        at_ends = row.prefix.take(row.ends)
        step = row.opens[:-1].nonzero()[0]  # index into `ends`: the character before the start, then the end tried
        starts = row.ends.take(step) + 1
        step += 1
        step += row.ends.take(step) == starts  # no empty span: where a term starts with such a character itself
        walk = (step < len(row.ends)).nonzero()[0]  # not from the row's very end; all others are in bounds
        step, at = step.take(walk), starts.take(walk)
        origin, scale = row.prefix.take(at), self._inverses.take(at)
        scale *= _SPREAD
        tried = []
        while len(walk):
            hashes = at_ends.take(step)
            hashes -= origin
            hashes *= scale
            flags = self.flags.take(self._slots(hashes))
            hit = (flags >= _TERM).nonzero()[0]
            tried.append((walk.take(hit), step.take(hit), hashes.take(hit)))
            flags &= _PREFIX
            on = flags.view(bool).nonzero()[0]
            walk, step, origin, scale = walk.take(on), step.take(on), origin.take(on), scale.take(on)
            step += 1
            if len(step) and step[-1] == len(row.ends):  # past the row's end; `step` never falls
                inside = int(np.searchsorted(step, len(row.ends)))
                walk, step, origin, scale = walk[:inside], step[:inside], origin[:inside], scale[:inside]
        if not tried:
            return (np.zeros(0, np.int64),) * 3
        walk, step, hashes = map(np.concatenate, zip(*tried, strict=True))
        found = self.hashes.get_indexer(hashes)
        hit = np.flatnonzero(found >= 0)
        best = np.full(len(starts), -1, np.int64)
        best[walk[hit]] = hit  # a later step is a longer span, and the last one stays
        best = best[best >= 0]
        return starts[walk[best]], row.ends[step[best]], self.ids[found[best]]

    def find(self, texts: list[str]) -> list[list[Match]] | None:
        """Matches of each text; None if a span was taken for a term that only has its hash.

        Every match is held to the term's characters: a NUL adds nothing to a hash, and 64 bits may clash."""
        row = self._hashed(texts)
        starts, ends, ids = _without_overlaps(*self._longest(row))
        lengths = ends - starts
        names = self.terms.take(ids).tolist()  # a third of the time that the list takes
        first = np.append(np.searchsorted(starts, row.starts), len(starts))  # each text's first match
        if not (
            np.array_equal(lengths, self.lengths.take(ids))
            and np.array_equal(np.searchsorted(ends, row.stops, side="right"), first[1:])  # none runs on into the next
            and _characters(row.codes, starts, lengths) == "".join(names).encode(_encoding(row.codes))
        ):
            return None
        base = np.repeat(row.starts, np.diff(first))
        spans = zip((starts - base).tolist(), (ends - base).tolist(), names, strict=True)
        matches = list(map(tuple.__new__, repeat(Match), spans))  # Match(*span), without a Python call for each
        return [matches[a:b] for a, b in zip(first[:-1].tolist(), first[1:].tolist(), strict=True)]


def _power_of_two(least: int) -> int:
    """The power of two from `least` on, and at least 128."""
    return 1 << max(7, (least - 1).bit_length())


def _without_overlaps(starts: np.ndarray, ends: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    """Spans in the order of their starts, less those that begin inside one kept before."""
    while len(starts):
        inside = np.zeros(len(starts), bool)
        inside[1:] = starts[1:] < np.maximum.accumulate(ends)[:-1]
        if not inside.any():
            break
        # A span that no earlier one reaches is kept; it rules out those after it that begin before its end.
        kept = np.maximum.accumulate(np.where(inside, 0, np.arange(len(starts))))
        left = np.flatnonzero(~inside | (starts >= ends[kept]))
        starts, ends, ids = starts[left], ends[left], ids[left]
    return starts, ends, ids


def _encoding(codes: np.ndarray) -> str:
    return "utf-32-le" if codes.itemsize == 4 else "utf-8"


def _characters(codes: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> bytes:
    """The characters of all spans, one after the other."""
    before = np.cumsum(lengths) - lengths
    return codes.take(np.arange(lengths.sum()) + np.repeat(starts - before, lengths)).tobytes()
