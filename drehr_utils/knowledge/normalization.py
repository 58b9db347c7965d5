"""Opaque names read as what they stand for: brand names, codes and abbreviations, in the encoder's own tokenizer.

The improved recipe writes what the graph knows into the tokenizer: "keppra 500 bid" reaches the transformer as
"levetiracetam 500 bid", in notes and queries alike. The rules are part of tokenizer.json: a saved model carries them,
and `SentenceTransformer(folder)` needs nothing else. The paper injects knowledge by training alone.
"""

from __future__ import annotations

import re
from graphlib import CycleError, TopologicalSorter

from sentence_transformers import SentenceTransformer
from tokenizers import Regex, normalizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from drehr_utils.knowledge.graph import KnowledgeGraph

CODE_LETTERS = 5  # a name of this many letters or fewer may be an abbreviation
_WORD = re.compile(r"[\w-]+")


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


def read_names(encoder: SentenceTransformer, names: dict[str, str]) -> None:
    """Makes the encoder's tokenizer read each name, where it is a word in itself, as its preferred term; in place."""
    old = encoder.tokenizer
    backend = old.backend_tokenizer
    first = [backend.normalizer] if backend.normalizer else []
    case = "" if first and first[0].normalize_str("A") == "a" else "(?i)"
    rules = [normalizers.Replace(Regex(rf"{case}(?<![\w-]){re.escape(n)}(?![\w-])"), t) for n, t in names.items()]
    backend.normalizer = normalizers.Sequence([*first, *rules])
    # Loaded under its own class, transformers would build a normalizer anew, and the rules would be lost.
    encoder[0].processor = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=old.model_max_length,
        model_input_names=old.model_input_names,
        padding_side=old.padding_side,
        **old.special_tokens_map,
    )
