"""CAPR's labels, queries and candidates: passages by entity and aspect, made by rules alone (CAPR §3.1, §4.2).

A passage carries the entities that the matcher finds in it and, as its aspect, the heading of its section. A query is
one of the passage's entities and its aspect: "lasix ; discharge medications". The heading itself is no part of the
passage's text, so an aspect has to be understood and can't be copied.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from drehr_utils.data.notes import Note, clean
from drehr_utils.evaluation.medquad import MedQuad
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.knowledge.matching import EntityMatcher

# aspect -> its headings: MIMIC-IV's discharge template, and MIMIC-III's wordings of the same.
ASPECTS = {
    "allergies": r"(?:drug )?allerg(?:ies|y)(?: and adverse (?:drug )?reactions)?|adverse drug reactions",
    "chief complaint": r"chief complaint|presenting complaint|reason for (?:admission|hospitali[sz]ation)",
    "procedure": r"(?:major )?surgical or invasive procedures?|procedures?(?: performed)?|operations?(?: performed)?",
    "history of present illness": r"(?:brief )?history of (?:the )?present(?:ing)? illness|present illness|hpi",
    "past medical history": (
        r"past (?:medical|surgical|medical and surgical|psychiatric|oncologic) history|past history|pmhx?|pshx?"
    ),
    "social history": r"social (?:history|hx)|social|shx?",
    "family history": r"family (?:history|hx)|family medical history|fhx?",
    "review of systems": r"review of systems|ros",
    "physical exam": (
        r"(?:(?:admission|discharge|pertinent) )?physical exam(?:ination)?(?: (?:on|at|upon) (?:admission|discharge))?"
    ),
    "pertinent results": (
        r"(?:pertinent|laboratory|lab) (?:results|data|findings|studies|values)|labs|laboratories|"
        r"radiolog(?:y|ic studies)|imaging(?: studies)?|studies"
    ),
    "hospital course": (
        r"(?:brief |summary of )?hospital course(?: by (?:system|problem|issue)s?)?(?: and treatment)?|"
        r"summary of hospital stay"
    ),
    "medications on admission": (
        r"medications? (?:on|at|upon|prior to) admission|(?:admission|home|preadmission) medications?"
    ),
    "discharge medications": r"discharge medications?|medications? (?:on|at|upon) discharge",
    "discharge disposition": r"(?:discharge )?disposition",
    "discharge diagnosis": r"(?:final |primary |secondary )?(?:discharge )?diagnos[ei]s(?: (?:on|at) discharge)?",
    "discharge condition": r"(?:discharge )?condition|condition (?:on|at|upon) discharge",
    "discharge instructions": r"(?:discharge |patient )?instructions|instructions (?:on|at|upon) discharge",
    "follow-up": r"follow-? ?up(?: (?:instructions|appointments?|plans?))?",
}
# Lines of the template that end a section and say nothing clinical.
_ADMINISTRATIVE = r"name|unit no|admission date|discharge date|date of birth|sex|service|attending|facility|dictated by"
_HEADING = re.compile(
    rf"^[ \t]*(?:{'|'.join(f'({pattern})' for pattern in ASPECTS.values())}|(?:{_ADMINISTRATIVE}))[ \t]*:",
    re.MULTILINE | re.IGNORECASE,
)
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z#(])|\n(?!\s*[a-z])")  # a wrapped line goes on in lower case
_LONGEST_SENTENCE = 40  # words

# Question types of MedQuAD-like sources, in order: the first that fits gives the aspect.
QUESTION_TYPES = {
    "genetic changes": r"genetic changes|\bgenes?\b",
    "complications": r"complications?",
    "susceptibility": r"who is at risk|at risk for|risk factors",
    "symptoms": r"symptoms|signs",
    "inheritance": r"inherited|inherit",
    "frequency": r"how many people|how common|prevalence|frequency",
    "treatment": r"treatments?|treated?|manage",
    "causes": r"causes?|caused",
    "exams and tests": r"diagnos\w*|tests?\b|exams?\b",
    "research": r"research|clinical trials",
    "outlook": r"outlook|prognosis|life expectancy",
    "prevention": r"prevent\w*",
    "stages": r"\bstages?\b",
    "considerations": r"what to do|considerations",
    "information": r"^what is|^what are|information",
}


@dataclass(frozen=True)
class Passage:
    """A run of a document's sentences, with its labels; the document is kept for models that read the context."""

    id: str
    document_id: str
    aspect: str | None
    entities: tuple[str, ...]
    document: tuple[str, ...]  # all sentences, cleaned
    start: int  # of the passage's sentences, start <= i < end
    end: int

    @property
    def sentences(self) -> tuple[str, ...]:
        return self.document[self.start : self.end]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)

    @property
    def labelled(self) -> bool:
        """Whether it has an aspect and an entity; others are skipped (CAPR §3.1)."""
        return self.aspect is not None and bool(self.entities)


def sections(text: str) -> list[tuple[str | None, str]]:
    """(aspect, body) of each section of a note, in order, the headings cut off; None where the aspect isn't known."""
    found = list(_HEADING.finditer(text))
    aspects = [None, *(list(ASPECTS)[m.lastindex - 1] if m.lastindex else None for m in found)]
    starts, ends = [0, *(m.end() for m in found)], [*(m.start() for m in found), len(text)]
    return [(aspect, text[start:end]) for aspect, start, end in zip(aspects, starts, ends, strict=True)]


def split_sentences(text: str) -> list[str]:
    """Cleaned sentences: ended by punctuation before a capital, or by a line's end; at most 40 words each."""
    sentences = []
    for part in _SENTENCE_END.split(text):
        words = clean(part).split()
        if any(c.isalnum() for word in words for c in word):
            sentences += [" ".join(words[i : i + _LONGEST_SENTENCE]) for i in range(0, len(words), _LONGEST_SENTENCE)]
    return sentences


def note_passages(note: Note, matcher: EntityMatcher, max_words: int | None = None) -> list[Passage]:
    """A note's passages: its sections, those longer than `max_words` cut between sentences (None: never).

    Their entities are the matcher's terms of three letters or more, each once, in order of their first mention."""
    document: list[str] = []
    spans: list[tuple[str | None, int, int]] = []
    for aspect, body in sections(note.text):
        start, words = len(document), 0
        for sentence in split_sentences(body):
            length = sentence.count(" ") + 1
            if max_words and words and words + length > max_words:
                spans.append((aspect, start, len(document)))
                start, words = len(document), 0
            document.append(sentence)
            words += length
        if len(document) > start:
            spans.append((aspect, start, len(document)))
    whole, passages = tuple(document), []
    for k, (aspect, start, end) in enumerate(spans):
        terms = dict.fromkeys(match.term for match in matcher.find(" ".join(whole[start:end])))
        entities = tuple(term for term in terms if sum(map(str.isalpha, term)) >= 3)
        passages.append(Passage(f"{note.note_id}_{k}", note.note_id, aspect, entities, whole, start, end))
    return passages


def query_text(entity: str, aspect: str) -> str:
    return f"{entity} ; {aspect}"


def retrieval_task(
    pool: Sequence[Passage], n_queries: int, n_candidates: int = 64, seed: int = 0
) -> tuple[MedQuad, np.ndarray]:
    """Queries drawn from labelled passages, and each one's candidate positions [queries, candidates] (CAPR §4.2).

    A query is a random entity of a random passage, and its aspect; no two are the same. Its candidates are that passage
    and others at random, as CAPR has it for MIMIC-III. Any passage with both labels counts as relevant: a random
    candidate may carry them too. Raises ValueError where a passage isn't labelled."""
    if not all(p.labelled for p in pool):
        raise ValueError("a passage without entity or aspect can't be asked for; choose by Passage.labelled")
    rng = np.random.default_rng(seed)
    by_label: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)
    for passage in pool:
        for entity in passage.entities:
            by_label[entity, passage.aspect][passage.id] = 1
    targets: dict[tuple[str, str], int] = {}
    for i in rng.permutation(len(pool)).tolist():
        if len(targets) == n_queries:
            break
        entity = pool[i].entities[rng.integers(len(pool[i].entities))]
        targets.setdefault((entity, pool[i].aspect), i)
    data, candidates = MedQuad({}, {}, {p.id: p.text for p in pool}, {}), []
    for k, ((entity, aspect), target) in enumerate(targets.items()):
        data.queries[f"q{k}"], data.aspects[f"q{k}"] = query_text(entity, aspect), aspect
        data.qrels[f"q{k}"] = by_label[entity, aspect]
        others = rng.choice(len(pool) - 1, min(n_candidates, len(pool)) - 1, replace=False)
        candidates.append([target, *(others + (others >= target))])  # positions after the target move up by one
    return data, np.array(candidates)


def with_all_names(pool: Sequence[Passage], graph: KnowledgeGraph) -> list[Passage]:
    """The passages with their entities by every name that the graph has of them, their own first."""

    def names(term: str) -> list[str]:
        return [term, *(name for concept in graph.cuis(term) for name in graph.synonyms(concept))]

    return [
        replace(p, entities=tuple(dict.fromkeys(name for term in p.entities for name in names(term)))) for p in pool
    ]


def other_names_task(
    pool: Sequence[Passage], graph: KnowledgeGraph, n_queries: int, n_candidates: int = 64, seed: int = 0
) -> tuple[MedQuad, list[Passage], np.ndarray]:
    """`retrieval_task` where a word's match doesn't help and half an answer is at hand: queries, `with_all_names`' pool
    and each query's candidate positions [queries, candidates]. Ours; the paper has nothing like it.

    A query names an entity of a random passage by another of its names that the passage doesn't have, the graph's usual
    names rather than its rare ones. Up to a third of its candidates have the entity, by whatever name, under another
    aspect (at least one does, so that the aspect is needed), and up to a third the aspect with other entities; the
    others are random."""
    rng, named = np.random.default_rng(seed), with_all_names(pool, graph)
    at: dict[str, list[int]] = defaultdict(list)  # name -> the passages that have its entity
    under: dict[str, list[int]] = defaultdict(list)  # aspect -> its passages
    for i, passage in enumerate(named):
        under[passage.aspect].append(i)
        for name in passage.entities:
            at[name].append(i)
    data, candidates, asked = MedQuad({}, {}, {p.id: p.text for p in pool}, {}), [], set()
    for i in rng.permutation(len(pool)).tolist():
        aspect, third = pool[i].aspect, (n_candidates - 1) // 3
        for name in _other_names(pool[i], graph, rng):
            elsewhere = [j for j in at[name] if pool[j].aspect != aspect]
            if elsewhere and query_text(name, aspect) not in asked:
                asked.add(query_text(name, aspect))
                alike = np.setdiff1d(under[aspect], at[name])
                chosen = [i, *rng.permutation(elsewhere)[:third], *rng.permutation(alike)[:third]]
                rest = rng.permutation(np.setdiff1d(np.arange(len(pool)), chosen))
                candidates.append([*chosen, *rest][:n_candidates])
                query_id = f"n{len(data.queries)}"
                data.queries[query_id], data.aspects[query_id] = query_text(name, aspect), aspect
                data.qrels[query_id] = {pool[j].id: 1 for j in at[name] if pool[j].aspect == aspect}
                break  # one query a passage
        if len(candidates) == n_queries:
            break
    return data, named, np.array(candidates)


def _other_names(passage: Passage, graph: KnowledgeGraph, rng: np.random.Generator) -> list[str]:
    """Of each entity that names one concept one other name, which names no other concept and isn't in the text; in
    random order. The n-th that fits is drawn with weight 1 / n: graphs list the usual names first."""
    found = []
    for term in rng.permutation(passage.entities).tolist():
        names = graph.synonyms(concepts[0]) if len(concepts := graph.cuis(term)) == 1 else []
        names = [name for name in names if len(graph.cuis(name)) == 1 and name not in passage.text and len(name) > 2]
        if names:
            weights = 1 / np.arange(1, len(names) + 1)
            found.append(names[rng.choice(len(names), p=weights / weights.sum())])
    return found


def question_aspect(question: str) -> str | None:
    """The aspect that a question of a MedQuAD-like source asks for, by its type; None where no type fits."""
    question = question.lower()
    return next((aspect for aspect, pattern in QUESTION_TYPES.items() if re.search(pattern, question)), None)


def medquad_passages(data: MedQuad, max_words: int | None = None) -> list[Passage]:
    """MedQuAD's passages amid their document's, in the data's order; without labels, since nothing trains on them.

    Passage ids are `<document>-<k>`. `max_words` cuts each passage's end off."""
    documents: dict[str, list[str]] = {}
    spans = {}
    for i, text in data.passages.items():
        document = documents.setdefault(i.rsplit("-", 1)[0], [])
        start, left = len(document), max_words
        for sentence in split_sentences(text) or [clean(text)]:
            if left != 0:
                kept = sentence.split()[:left]
                document.append(" ".join(kept))
                left = left and left - len(kept)
        spans[i] = start, len(document)
    whole = {name: tuple(document) for name, document in documents.items()}
    return [Passage(i, name := i.rsplit("-", 1)[0], None, (), whole[name], *spans[i]) for i in data.passages]
