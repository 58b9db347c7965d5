"""The prompts of DR.EHR's data generation, and strict, total parsers of their answers (§3.1, §3.2, Appendices A, B)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import normalize_term

ENTITY_TYPES = ("diseases", "clinical procedures", "drugs")

# DR.EHR Figure 2, as printed.
ABBREVIATION_PROMPT = """\
Replace the abbreviations of medical entities with their full names in the
clinical note below. For one abbreviation, only output once unless it refers
to different full names in the note. If no abbreviation is found in the note,
please output "NA". Otherwise, output in the following format (only output
the terms and nothing else):
###[abbreviation]
**[full name]
...

For example:
###ct
**computed tomography

###wbc
**white blood cell

Now the task begins. Here is the note:
{note}"""

# DR.EHR Figure 3, as printed.
ENTITY_PROMPT = """\
{note}

Briefly summarize the {entity_type} explicitly mentioned or that can be
implicitly inferred from the medical record above. Only output the entity
names (in their standardized terms) in a list. Do not output the reasons.

Output format:
- Entity 1
- Entity 2
..."""

# Task -> template. A new task is one more entry; `{note}` stands for the request's text, `{entity_type}` for its type.
PROMPTS = {"abbreviation_reduction": ABBREVIATION_PROMPT, "entity_generation": ENTITY_PROMPT}

# Recorded answers carry no prompt hash: they belong to these prompts, whatever PROMPTS holds now.
PAPER_PROMPT_SHA256 = {
    "abbreviation_reduction": "40ce5dfc3fe7603058114161d74bbe108175f54a7f477d3379f807b02e11d703",
    "entity_generation": "d2da158583347bef741d060dd7f349ba9dedda7a8bd90a99de366223e670efe3",
}

Key = tuple[str, str | None, str]  # task, entity type, chunk id


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def prompt_sha256(task: str) -> str:
    """SHA-256 of the task's template as it is now. Raises DataError for an unknown task."""
    if task not in PROMPTS:
        raise DataError(f"llm: no prompt for task {task!r}; prompts.PROMPTS has {', '.join(PROMPTS)}")
    return _sha256(PROMPTS[task])


@dataclass(frozen=True, slots=True)
class Request:
    """One question about one text; `key` is what `Answers.texts` is indexed by, and must be unique in a run."""

    task: str
    id: str
    text: str
    entity_type: str | None = None

    @property
    def key(self) -> Key:
        return (self.task, self.entity_type, self.id)

    @property
    def text_sha256(self) -> str:
        return _sha256(self.text)

    @property
    def label(self) -> str:
        return f"{self.task}, {self.entity_type}" if self.entity_type else self.task

    def prompt(self) -> str:
        """The template with its placeholders filled, in one pass: braces in the note stay as they are.

        Raises DataError for an unknown task, or an entity type that the template needs or has no place for."""
        prompt_sha256(self.task)
        template, values = PROMPTS[self.task], {"note": self.text, "entity_type": self.entity_type}
        if ("{entity_type}" in template) != (self.entity_type is not None):
            verb = "needs an" if self.entity_type is None else "takes no"
            raise DataError(f"llm: request {self.id}, field entity_type: the prompt of {self.task} {verb} entity type")
        return re.sub(r"\{(note|entity_type)\}", lambda match: values[match[1]], template)


def estimated_tokens(requests: Iterable[Request]) -> int:
    """Prompt tokens that asking all of `requests` would send, at 4 characters a token."""
    return round(sum(len(request.prompt()) for request in requests) / 4)


# --- parsers: total, they raise on no string -------------------------------------------------------------------------


def without_thinking(answer: str) -> str:
    """The answer after the last `</think>`, without one that was never closed."""
    return answer.rpartition("</think>")[2].partition("<think>")[0].strip()


# Some chat templates open the thinking themselves, so that the answer holds only its end.
_THINKING = re.compile(r"(?:\A|<think>).*?</think>|<think>.*", re.DOTALL)
_NOTHING = re.compile(r"[\s\"'`*.•-]*(?:n/?a|none|nil|nothing)[\s\"'`*.]*", re.IGNORECASE)


def _answer_lines(answer: str) -> list[str]:
    answer = _THINKING.sub("\n", answer)  # not "": what stands before and after it is no word
    return [] if _NOTHING.fullmatch(answer) else [line for line in map(str.strip, answer.splitlines()) if line]


def _unmarked(text: str) -> str:
    """As the graph has terms, without Markdown's marks, quotes or enclosing brackets; what hides characters in itself
    keeps them, and is no name."""
    text = " ".join(text.lower().split())
    text = (normalize_term(text) if text.isprintable() else text).strip(" *_`\"'")
    return text[1:-1].strip() if text.startswith("[") and text.endswith("]") else text


def _term(text: str) -> str:
    return _unmarked(_unmarked(text).rstrip(" .,;:*_`\"'"))


def parse_abbreviations(answer: str) -> tuple[list[tuple[str, str]], int]:
    """(abbreviation, full name) pairs in order, lower-case, each once; and the number of malformed pieces.

    The format is Figure 2's: `###abbr`, then a line `**full name` (more than one where the abbreviation has more than
    one meaning); "NA" is an answer without pairs. A piece is malformed when it is neither, or lacks its other half."""
    pairs: dict[tuple[str, str], None] = {}
    malformed, abbreviation, open_block = 0, "", False
    for line in _answer_lines(answer):
        head, stars, full = line.lstrip("#").partition("**")
        if line.startswith("###"):
            abbreviation = _unmarked(head)  # not _term: "p.o." is looked up in the note
            malformed += open_block + (not abbreviation)
            open_block = bool(abbreviation)
            if not stars:
                continue
        elif not line.startswith("**"):
            malformed += 1
            continue
        full = _term(full)
        if abbreviation and full:
            pairs[abbreviation, full] = None
            open_block = False
        else:
            malformed += not open_block
    return list(pairs), malformed + open_block


_ITEM = re.compile(r"(?:[-•‣▪●–—+]\s*|\*(?!\*)\s*|\(?\d{1,3}[.)]\s+)(.*)")
_REASON = re.compile(
    r"\b(?:explicit|implicit|impl(?:y|ied|ies)\b|inferred|mention|suggest|indicat|evidence|presum|suspect|stated\b|likely\b"
    r"|possibl[ey]\b|because\b|due to\b|based on\b|given\b|used\b|for\b|history of\b)"
)
_HEADED = re.compile(r"\*\*(.+?)(?:\s*[:–—-]\s*\*\*|\*\*\s*[:–—-]\s).*")  # **an entity**: and what is said of it
_ASIDE = re.compile(r"\s[-–—]\s|:\s")
_REFUSAL = re.compile(
    r"(?:n/?a|none|nil|nothing|unknown|not applicable)\Z|(?:there (?:is|are|was|were) )?(?:none|no|not|nothing)\b.*"
    r"\b(?:mention|identif|found|document|report|list|specif|present|provid|inferred|applicable)"
)
MAX_ENTITY_WORDS, MAX_ENTITY_CHARACTERS = 16, 120
# Letters and digits of any script and the signs that names have: no markup, address, template or control character.
_NO_NAME = re.compile(r"[^\w '’.,:;()/%&+*\[\]–-]|_|//")


def _without_reason(term: str) -> str:
    """Cuts a trailing "(implied by metformin)" or " - implied by ..."; leaves "(recombinant)" and "type 2: ..." be."""
    if term.endswith(")"):
        # Where the parenthesis that ends the term opens; 0: nowhere.
        depths = accumulate((character == ")") - (character == "(") for character in reversed(term))
        start = len(term) - next((n for n, depth in enumerate(depths, start=1) if depth == 0), len(term))
        if start > 0 and _REASON.search(term, start):
            term = term[:start]
    aside = _ASIDE.search(term)
    return term[: aside.start()] if aside and _REASON.search(term, aside.end()) else term


def parse_entities(answer: str) -> tuple[list[str], int]:
    """Entities in order, lower-case, each once; and the number of lines that were not used.

    The format is Figure 3's, `- Entity`; `*`, `•` and `1.` are read as well. Not used, and counted: a line that is no
    list item, a heading, an item that says there is none, has no letter, more than 16 words (a sentence) or 120
    characters, or a character that no name has. An answer that is "NA" or "none" as a whole has no entities and no
    malformed line."""
    entities: dict[str, None] = {}
    malformed = 0
    for line in _answer_lines(answer):
        item = _ITEM.fullmatch(line)
        if item is None or item[1].rstrip(" *_").endswith(":"):
            malformed += 1
            continue
        named = _HEADED.sub(r"\1", item[1]).replace("**", "")
        term = _term(_without_reason(_term(named)))
        too_long = len(term.split()) > MAX_ENTITY_WORDS or len(term) > MAX_ENTITY_CHARACTERS
        if too_long or not any(map(str.isalpha, term)) or _NO_NAME.search(term) or _REFUSAL.match(term):
            malformed += 1
        else:
            entities[term] = None
    return list(entities), malformed
