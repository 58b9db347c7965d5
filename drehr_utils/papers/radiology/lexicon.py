"""Findings of a lexicon in a sentence, by the longest common subfix (Radiology §2.1)."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from drehr_utils.files import refuse, tab_rows
from drehr_utils.papers.radiology.reports import OPEN_CXR
from drehr_utils.search.bm25 import words

TAU, MAX_GAP = 0.6, 2  # of longest_common_subfix: share of a word that must agree; words that may stand between
SHORTEST_PREFIX = 4  # letters; shorter words must be equal


@dataclass(frozen=True)
class Finding:
    """A core finding and the phrases that name it, the core name among them."""

    name: str
    phrases: tuple[str, ...]


def read_lexicon(path: Path = OPEN_CXR / "finding_lexicon.tsv.gz") -> list[Finding]:
    """The findings in the file's order. Raises DataError, naming file, row and field, where a line isn't one."""
    findings: dict[str, Finding] = {}
    for number, where, row in tab_rows(path, ("finding", "type", "variants"), filled=["finding"]):
        name, field = row["finding"], "variants" if words(row["finding"]) else "finding"
        phrases = [part.strip().lower() for part in (name, *row["variants"].split(";")) if part.strip()]
        wrong = {f"field {field}: {p!r} has no word; remove it, or write what it means": not words(p) for p in phrases}
        refuse(where, number, {f"field finding: {name!r} is there twice; keep one": name in findings} | wrong)
        findings[name] = Finding(name, tuple(dict.fromkeys(phrases)))
    return list(findings.values())


@cache
def partial_match(a: str, b: str) -> bool:
    """Whether two words share a prefix of at least 4 letters and TAU of the longer one, are equal, or differ by a
    plural s. So "opacity" meets "opacities", and "pe" nothing but itself."""
    if a == b or a + "s" == b or b + "s" == a:
        return True
    return len(os.path.commonprefix([a, b])) >= max(SHORTEST_PREFIX, TAU * max(len(a), len(b)) - 1e-9)


def longest_common_subfix(phrase: Sequence[str], sentence: Sequence[str]) -> list[int]:
    """Positions in the sentence's words of the longest in-order partial match of the phrase's words, at most MAX_GAP
    words between two neighbours; the tightest, then the leftmost, of equal length.

    `best[j]` is the best chain that ends at word j with the phrase's words so far: O(len(phrase) * len(sentence))."""
    best: dict[int, list[int]] = {}
    for part in phrase:
        fresh: dict[int, list[int]] = {}
        for j, word in enumerate(sentence):
            if partial_match(part, word):
                reachable = (best[i] for i in range(max(0, j - 1 - MAX_GAP), j) if i in best)
                fresh[j] = min(([*chain, j] for chain in reachable), key=_order, default=[j])
        best |= {j: min(best.get(j, chain), chain, key=_order) for j, chain in fresh.items()}
    return min(best.values(), key=_order, default=[])


def _order(chain: list[int]) -> tuple[int, int, int]:
    return -len(chain), chain[-1] - chain[0], chain[0]


@dataclass(frozen=True)
class Mention:
    finding: str
    start: int  # characters of the sentence
    end: int


class FindingMatcher:
    """Finds the lexicon's phrases in sentences: all of a phrase's words must be in the longest common subfix."""

    def __init__(self, lexicon: Iterable[Finding]):
        self.phrases = [(tuple(words(p)), f.name) for f in lexicon for p in f.phrases]
        self._partners: dict[str, list[str]] = {}  # of a word, once asked for: the lexicon's words that it meets
        self.vocabulary = sorted({word for phrase, _ in self.phrases for word in phrase})

    def find(self, sentence: str) -> list[Mention]:
        """The mentions, left to right; one that lies within a longer one is dropped ("effusion" in "pleural effusion",
        "edema" in "interstitial edema")."""
        spans = [m.span() for m in re.finditer(r"\w+", sentence)]
        said = [sentence[a:b].lower() for a, b in spans]
        for word in set(said) - self._partners.keys():
            self._partners[word] = [v for v in self.vocabulary if v[0] == word[0] and partial_match(v, word)]
        present = {partner for word in said for partner in self._partners[word]}
        found: dict[tuple[int, ...], tuple[int, str]] = {}
        for phrase, name in self.phrases:
            if not present.issuperset(phrase):
                continue
            letters = sum(len(w) for w in phrase if w in said)  # of two findings at one place, the literal one
            start = 0
            while len(chain := longest_common_subfix(phrase, said[start:])) == len(phrase):
                at = tuple(start + i for i in chain)
                if at not in found or letters > found[at][0]:
                    found[at] = (letters, name)
                start = at[0] + 1  # the tightest match is found first; one before it, looser, is not looked for
        kept = [at for at in sorted(found) if not any(set(at) < set(other) for other in found)]
        return [Mention(found[at][1], spans[at[0]][0], spans[at[-1]][1]) for at in kept]
