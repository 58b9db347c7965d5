"""SNOMED CT's release files (RF2, the Snapshot) as a KnowledgeGraph (KG entity retrieval §4.2)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from drehr_utils.errors import DataError
from drehr_utils.files import read_text_lines
from drehr_utils.knowledge.graph import KnowledgeGraph, normalize_term
from drehr_utils.knowledge.umls import read_rows

RF2_COLUMNS = {
    "Concept": "id effectiveTime active moduleId definitionStatusId".split(),
    "Description": "id effectiveTime active moduleId conceptId languageCode typeId term caseSignificanceId".split(),
    "Relationship": (
        "id effectiveTime active moduleId sourceId destinationId relationshipGroup typeId characteristicTypeId "
        "modifierId"
    ).split(),
}
FULLY_SPECIFIED_NAME, SYNONYM, IS_A = "900000000000003001", "900000000000013009", "116680003"
HINT = "it is part of a SNOMED CT release (RF2, Snapshot/Terminology), which needs an affiliate licence"


def load_snomed(folder: Path) -> KnowledgeGraph:
    """The active concepts of an RF2 release under `folder`, their descriptions and relationships.

    The main (English) description is the fully specified name, with its tag ("dyspnea (finding)", as in the paper's
    Table 4); active synonyms follow in the file's order. `types` holds the tag. Relations are named by their type's
    synonym; is_a apart, as in BIOS. Inferred relationships only, as the Relationship file has them. Files may be
    gzipped. Raises DataError for a missing file or wrong columns, or where no concept has a description."""

    def rows(table: str, middle: str = "") -> Iterator[dict[str, str]]:
        """Active rows."""
        found = sorted(Path(folder).rglob(f"sct2_{table}_Snapshot{middle}_*.txt*"))
        if not found:
            raise DataError(f"sct2_{table}_Snapshot{middle}_*.txt: no such file; {HINT}")
        if len(names := sorted({path.name.removesuffix(".gz") for path in found})) > 1:
            raise DataError(f"{', '.join(names)}: two releases below one folder; name one's own folder")
        path, columns = found[0].with_name(found[0].name.removesuffix(".gz")), RF2_COLUMNS[table]
        if next(read_text_lines(path, HINT), (1, ""))[1].split("\t") != columns:
            raise DataError(f"{path.name}, row 1: the columns must be {', '.join(columns)}; {HINT}")
        yield from (row for row in read_rows(path, columns, "\t", columns, HINT) if row["active"] == "1")

    active = {row["id"] for row in rows("Concept")}
    full: dict[str, str] = {}
    synonyms: dict[str, list[str]] = defaultdict(list)
    for row in rows("Description", "-en"):
        if row["conceptId"] in active and row["languageCode"] == "en":
            term = normalize_term(row["term"])
            if row["typeId"] == FULLY_SPECIFIED_NAME:
                full.setdefault(row["conceptId"], term)
            elif row["typeId"] == SYNONYM:
                synonyms[row["conceptId"]].append(term)
    graph = KnowledgeGraph()
    for cui in sorted(active):
        names = ([full[cui]] if cui in full else []) + synonyms[cui]
        if not names:
            graph.dropped["concept without a description"] += 1
            continue
        graph.cui2pt[cui] = names[0]
        for name in names:
            graph.add_term(cui, name)
        if tag := re.search(r" \(([^()]+)\)$", full.get(cui, "")):
            graph.types[cui] = tag[1]
    if not graph.cui2pt:
        raise DataError("sct2_Description_Snapshot-en_*.txt: no active concept has a description in 'en'")
    for row in rows("Relationship"):
        source, target, kind = row["sourceId"], row["destinationId"], row["typeId"]
        if source not in graph.cui2pt or target not in graph.cui2pt:
            graph.dropped["relationship: concept unknown or inactive"] += 1
        elif kind == IS_A:
            graph.is_a.setdefault(source, []).append(target)
        else:
            graph.add_relation(source, next(iter(synonyms.get(kind, [])), kind), target)
    return graph
