"""Negation: is a mention of a finding denied in its sentence (Radiology §2.1)?

The rules are NegEx's idea (Chapman et al., 2001) with scopes by clause and a wide window of words: a cue before the
mention denies up to the clause's end, a cue after it denies back to the clause's start, phrases that only look like a
cue ("no change in", "cannot be excluded") deny nothing. tests/knowledge/test_negation.py holds them to hand-labelled
sentences, and tests/benchmarks/bench_negation.py compares them with negspacy on the same sentences.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_SEEN = (
    "seen|identified|visuali[sz]ed|visible|evident|present|appreciated|demonstrated|noted|detected|found|apparent|"
    "observed|shown|suspected|recogni[sz]ed|imaged|discernible|definite|likely|recommended"
)
# Words between cue and mention at most: notes have whole sections without a full stop.
WORDS_BEFORE, WORDS_IN_LIST, WORDS_AFTER, NAME_WORDS = 6, 10, 4, 4
# Look like a denial and are none; matched first, and their words can't start a cue.
_NOT_A_CUE = re.compile(
    r"\b(?:(?:no|not|without|little|nor)(?: any)?(?: \w+){0,2}? (?:chang\w*|increas\w*|decreas\w*|difference"
    r"|improvement|progression|worsening|enlargement|growth|longer needed)\b(?: in| of| to| from)?"
    r"|not only|no doubt|not (?:certain|sure) (?:if|whether)|(?:may|might|could) not"
    r"|(?:(?:can ?not|can't|not) (?:be )?(?:\w+ly )?|(?:difficult|hard|unable) to )(?:be )?"
    r"(?:exclude[d]?|rule[d]? out|separate[d]?|told apart|distinguish(?:ed)?)"
    r"|not (?:assessable|well seen|fully seen|fully imaged|well evaluated|included)"
    r"|(?:near(?:ly)?|almost|partial(?:ly)?|incomplete(?:ly)?|slow(?:ly)?)[ -]?(?:complete(?:ly)?)?"
    r" (?:resol\w+|clear\w+|vanished)"
    r"|(?:no|without) (?:known|significant)? ?(?:drug )?allerg\w+|no show)",
    re.IGNORECASE,
)
_BEFORE = re.compile(  # deny what follows
    r"\b(?:no|not|without|w/o|never(?! \w+ed\b)|neither|nor|denie[sd]|denying|non|negative(?: \w+)? for"
    r"|free (?:of|from)|clear of|devoid of|lack(?:s|ed|ing)?(?: of)?|against|absence of|absent|exclude[sd]?(?! by)"
    r"|ruled out(?= for)|rather than"
    r"|(?:interval |complete |full |total )?(?:resolution|clearing|clearance|disappearance) of|resolved(?= \w)"
    r"|rules? out(?= any)|fail(?:s|ed) to (?:show|reveal|demonstrate))\b",
    re.IGNORECASE,
)
_AFTER = re.compile(  # deny what precedes, in the same clause
    rf"\b(?:(?:is|are|was|were|has|have|had)(?: been)? (?:not|no longer|never)(?: been)?(?: \w+ly)?(?: (?:{_SEEN}))?\b"
    rf"|not (?:\w+ly )?(?:{_SEEN})\b|no longer(?: \w+)?|absent|(?:is|are|has|have|was|were) (?:since |now |fully "
    r"|completely |been )?(?:resolved|cleared|gone|vanished|disappeared|excluded|ruled out|negative|removed)"
    r"|(?:have|has) all but vanished|resolved|cleared|excluded|ruled out|unlikely|improbable|negative|: none|: no\b"
    r"|denied)",
    re.IGNORECASE,
)
_END = re.compile(  # ends a clause, whichever way it is read
    r";|:(?! no| none)|\b(?:but|however|although|though|except|apart from|aside from|other than|besides|whereas|while"
    r"|yet|despite|still|because|due to|secondary to|owing to|since|as"
    r"|(?<!consistent )(?<!compatible )(?<!associated )with|which"
    r"|(?:and|,) (?:there|it|the patient|(?:he|she)(?: \w+)?) (?:is|are|was|were|has|have))\b(?! (?:no|not)\b)",
    re.IGNORECASE,
)
_VERB = re.compile(r"\b(?:is|are|was|were|has|have|shows?|remains?|appears?|persists?|suggests?|projects?|may)\b", re.I)
_SIZE = re.compile(
    r"^(?:and )?(?:an? |the )?(?:small|mild|minimal|trace|tiny|moderate|large|severe|stable|new|unchanged|persistent|"
    r"known|likely|probable|possible|slight|left|right|bilateral|old|chronic|interval|increased|clear|normal|status|s/p|"
    r"history|continue|on|took|taking)\b",
    re.IGNORECASE,
)
_NO_NAME = re.compile(  # in a list's piece: it says something of its own
    r"[\d()]|\b(?:with|for|to|of this|allowing|findings?|that|trivial|benefit|midline|nl|ok|neg|only|covers)\b|ed\Z",
    re.IGNORECASE,
)
_ABBREVIATION = re.compile(r"\b(?:dr|mr|mrs|ms|vs|approx|st|[a-z]\.[a-z]|\d)\.$", re.IGNORECASE)


def sentences(text: str) -> list[str]:
    """Cut at `.`, `;`, `?` and `!` before white space; the numbers of a list ("1. ") and bullets are dropped."""
    parts: list[str] = []
    for piece in re.split(r"(?<=[.;?!])\s+|\s+(?=\d{1,2}\.\s)|\s+[-#]\s*(?=[a-z])|\n+", text):
        if parts and _ABBREVIATION.search(parts[-1]) and not re.fullmatch(r"\d\.", parts[-1]):
            parts[-1] += " " + piece
        else:
            parts.append(piece)
    stripped = (re.sub(r"^(?:\d{1,2}[.)]|[-*])\s*", "", part).strip() for part in parts)
    return [part for part in stripped if re.search(r"[A-Za-z]{2}", part)]


def _lists_names(before: str, rest: str) -> bool:
    """Whether a clause that denies goes on after its comma with nothing but names."""
    if not _BEFORE.search(before):
        return False
    parts = [part.strip() for part in re.split(r",|\band\b|\bor\b", rest.rstrip(" ."))]
    cues = (_SIZE, _VERB, _BEFORE, _AFTER, _END, _NO_NAME)
    return all(0 < len(part.split()) <= NAME_WORDS and not any(cue.search(part) for cue in cues) for part in parts)


def _clauses(sentence: str) -> list[tuple[int, int]]:
    """Spans of a sentence's clauses: cut at conjunctions, and at the commas that don't continue a list, be it one of
    short names that a cue opens ("denies chest pain, dyspnea, cough")."""
    cuts = [0] + [end.start() for end in _END.finditer(sentence)]
    for comma in re.finditer(r",", sentence):
        rest = sentence[comma.end() :].lstrip()
        if re.match(r"(?:or|nor|and/or)\b", rest):
            continue
        opened = max(cut for cut in cuts if cut <= comma.start())
        if sentence[opened] != "," and _lists_names(sentence[opened : comma.start()], rest):
            continue
        denies, more = re.match(r"(?:no|not|without)\b", rest), re.search(r" (?:or|nor|and) ", rest)
        if denies or not more or _SIZE.match(rest) or _VERB.search(rest.partition(",")[0]):
            cuts.append(comma.start())
    cuts = sorted(set(cuts)) + [len(sentence)]
    return list(zip(cuts[:-1], cuts[1:], strict=True))


def denied(sentence: str, start: int, end: int) -> bool:
    """Whether the mention at [start, end) of the sentence is denied. Raises ValueError for a span outside of it."""
    if not 0 <= start < end <= len(sentence):
        raise ValueError(f"span [{start}, {end}) lies outside of a sentence of {len(sentence)} characters")
    # Blanked words keep their place; the mention's own words are no cue ("nonspecific", "no-reflow").
    text = _NOT_A_CUE.sub(lambda match: "\0" * len(match[0]), sentence)
    text = text[:start] + "\0" * (end - start) + text[end:]
    first, last = next((a, b) for a, b in reversed(_clauses(text)) if a <= start)
    cues = list(_BEFORE.finditer(text[first:start]))
    if cues:
        between = text[first + cues[-1].end() : start]
        listed = re.search(r",|/|\b(?:or|nor|and)\b", between)
        if len(between.split()) <= (WORDS_IN_LIST if listed else WORDS_BEFORE):
            return True
    cue = _AFTER.search(text[end : max(last, end)])
    return cue is not None and len(text[end : end + cue.start()].split()) <= WORDS_AFTER


def denied_in(text: str, start: int, end: int) -> bool:
    """`denied` of a mention at [start, end) of a text of several sentences, white space folded."""
    at = 0
    for sentence in sentences(text):
        begins = text.find(sentence, at)
        if begins >= 0:
            at = begins + len(sentence)
            if begins <= start and end <= at:
                return denied(sentence, start - begins, end - begins)
    return False


def polarity(text: str, names: Iterable[str]) -> str | None:
    """What a text says of a concept, by any of its names: `affirmed` if one mention is not denied, `denied` if all are.

    None where no name occurs (as whole words, in any case)."""
    either = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<!\w)(?:{either})(?!\w)", re.IGNORECASE)
    found = [denied(s, *match.span()) for s in sentences(text) for match in pattern.finditer(s)]
    return None if not found else "denied" if all(found) else "affirmed"
