"""Opaque names read as what they stand for: brand names, codes and abbreviations, in the encoder's own tokenizer.

The improved recipe writes what the graph knows into the tokenizer: "keppra 500 bid" reaches the transformer as
"levetiracetam 500 bid", in notes and queries alike. The rules are part of tokenizer.json: a saved model carries them,
and `SentenceTransformer(folder)` needs nothing else. The paper injects knowledge by training alone.
"""

from __future__ import annotations

import json
import re
from graphlib import CycleError, TopologicalSorter
from typing import Any

from sentence_transformers import SentenceTransformer
from tokenizers import Regex, Tokenizer, normalizers
from transformers import BatchEncoding, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drehr_utils.knowledge.graph import KnowledgeGraph

CODE_LETTERS = 5  # a name of this many letters or fewer may be an abbreviation
_WORD = re.compile(r"[\w-]+")
_BEFORE, _AFTER = r"(?<![\w-])", r"(?![\w-])"
_RULE = re.compile(rf"(?:\(\?i\))?{re.escape(_BEFORE)}(.+){re.escape(_AFTER)}")


def opaque_names(kg: KnowledgeGraph, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Name -> preferred term, for names whose letters say little about what they mean; in the order of `ordered`.

    They are single words that name one concept: names of drugs, and other names of up to CODE_LETTERS letters, unless
    they have more than three and the tokenizer knows them as a word ("lupus", "acne").
    Where the graph has concepts written for this project only theirs count: among the vocabularies' codes of rare
    diseases are too many that mean something else in a note ("cat", "gas")."""
    written_here = {cui for cui, sources in kg.sources.items() if "OPEN" in sources}
    words = tokenizer.get_vocab()
    found = {}
    for name, cuis in kg.term2cui.items():
        if len(cuis) != 1 or (written_here and cuis[0] not in written_here) or not _WORD.fullmatch(name):
            continue
        preferred = kg.cui2pt[cuis[0]]
        is_drug = kg.types.get(cuis[0]) == "drug"
        is_code = len(name) <= CODE_LETTERS and (len(name) <= 3 or name not in words)
        if (is_drug or is_code) and name not in _WORD.findall(preferred):
            found[name] = preferred
    return ordered(found)


def ordered(names: dict[str, str]) -> dict[str, str]:
    """`names` so that no rule rewrites what an earlier one wrote: rules are applied one after the other.

    A name comes before those whose preferred term holds it. Of names that stand for each other, some are left out."""
    names = dict(sorted(names.items()))
    while True:
        # graphlib's order: a node after its predecessors
        graph = {n: [word for word in _WORD.findall(term) if word in names] for n, term in names.items()}
        try:
            return {name: names[name] for name in TopologicalSorter(graph).static_order()}
        except CycleError as error:
            del names[error.args[1][0]]


class NameReader(PreTrainedTokenizerFast):
    """A tokenizer that reads each of `names`, where it is a word in itself, as what it stands for: in one pass over a
    text's words, whatever their number. It is saved as a plain tokenizer that has a rule for each name (with_rules),
    which any tool loads, and which takes twenty times as long for five thousand names."""

    names: dict[str, str]

    def read(self, text: Any) -> Any:
        """A text, or each in a list of them."""
        if not isinstance(text, str):
            return text and [self.read(part) for part in text]
        normalizer = self.backend_tokenizer.normalizer
        text = normalizer.normalize_str(text) if normalizer else text
        return _WORD.sub(lambda word: self.names.get(word[0].lower(), word[0]), text)

    def _encode_plus(self, text: Any, text_pair: Any = None, *rest: Any, **options: Any) -> BatchEncoding:
        return super()._encode_plus(self.read(text), self.read(text_pair), *rest, **options)

    def with_rules(self) -> PreTrainedTokenizerFast:
        backend = Tokenizer.from_str(self.backend_tokenizer.to_str())
        first = [backend.normalizer] if backend.normalizer else []
        case = "" if first and first[0].normalize_str("A") == "a" else "(?i)"
        rules = [normalizers.Replace(Regex(f"{case}{_BEFORE}{re.escape(n)}{_AFTER}"), t) for n, t in self.names.items()]
        backend.normalizer = normalizers.Sequence([*first, *rules])
        # Loaded under its own class, transformers would build a normalizer anew, and the rules would be lost.
        return PreTrainedTokenizerFast(tokenizer_object=backend, **_settings(self))

    def save_pretrained(self, *place: Any, **options: Any) -> tuple[str, ...]:
        return self.with_rules().save_pretrained(*place, **options)


def _settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    kept = ("model_max_length", "model_input_names", "padding_side")
    return {name: getattr(tokenizer, name) for name in kept} | tokenizer.special_tokens_map


def read_names(encoder: SentenceTransformer, names: dict[str, str]) -> None:
    """Makes the encoder's tokenizer read each name, where it is a word in itself, as its preferred term; in place.

    The names are in the order of `ordered`."""
    _read(encoder, encoder.tokenizer.backend_tokenizer, names_read(encoder.tokenizer) | names)


def _read(encoder: SentenceTransformer, backend: Tokenizer, names: dict[str, str]) -> None:
    reader = NameReader(tokenizer_object=backend, **_settings(encoder.tokenizer))
    reader.names = names
    encoder[0].processor = reader


def names_read(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    return tokenizer.names if isinstance(tokenizer, NameReader) else {}


def read_by_pass(encoder: SentenceTransformer) -> None:
    """Has a loaded tokenizer that has NameReader's rules read in one pass again; others stay as they are."""
    backend = encoder.tokenizer.backend_tokenizer
    state = json.loads(backend.to_str()) if isinstance(backend.normalizer, normalizers.Sequence) else {}
    steps = state["normalizer"]["normalizers"] if state else []
    found = [_RULE.fullmatch(step.get("pattern", {}).get("Regex", "")) for step in steps]
    if names := {re.sub(r"\\(.)", r"\1", m[1]): step["content"] for m, step in zip(found, steps, strict=True) if m}:
        left = [step for m, step in zip(found, steps, strict=True) if not m]
        state["normalizer"] = {"type": "Sequence", "normalizers": left} if len(left) > 1 else next(iter(left), None)
        _read(encoder, Tokenizer.from_str(json.dumps(state)), names)
