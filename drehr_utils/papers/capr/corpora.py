"""WikiSectionQA and HealthQA, CAPR's test sets beside MedQuAD, as CDV's authors export them (CAPR §4.1, Table 1).

    python -m drehr_utils.papers.capr.corpora FOLDER --systems CAPR-Bi CDV    # trained on notes, where they aren't yet
    python -m drehr_utils.papers.capr.corpora FOLDER --systems CAPR-Bi --train-on CDV/data/Train [--and-notes]

FOLDER has `<name>_docs.tsv` and `<name>_queries.tsv`, which github.com/sebastianarnold/CDV makes (data/WikiSectionQA,
`convert.sh`; HealthQA's texts are had by request, and its script may refuse them as another set's). R@1 and R@5 with
95% intervals, among each query's own candidates, as notebook 13's Table 3. Only files in this layout were read here:
the sets need a network. `--train-on`: on Wikipedia's articles about diseases, as their `convert.sh` in data/Train
exports them, or on both; then the notes that are kept aside are asked, too (CAPR §4.4, Table 3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from drehr_utils.data.notes import clean
from drehr_utils.errors import DataError
from drehr_utils.evaluation import medquad, records
from drehr_utils.evaluation.medquad import MedQuad
from drehr_utils.files import read_text_lines, refuse, short_name, tab_rows
from drehr_utils.papers.capr import systems
from drehr_utils.papers.capr.passages import Passage, query_text, split_sentences
from drehr_utils.papers.capr.systems import Task
from drehr_utils.profiles import Profile

HINT = "CDV's convert.sh makes it: https://github.com/sebastianarnold/CDV/tree/master/data"
DOCS, QUERIES = ("doc_id", "p_id"), ("query_id", "relevance", "p_id", "entity_name", "aspect_label")


def load_exported(folder: Path, name: str) -> Task:
    """An exported test set: `<name>_docs.tsv`, a sentence a line, and `<name>_queries.tsv`, a candidate a line.

    A query is "entity ; aspect", as MedQuAD's. One with fewer candidates than another has an answer of its own again in
    the places left, which moves no other's rank. Raises DataError (file, row, field) as tab_rows, for a candidate that
    isn't among the passages and for a query without an answer."""
    documents, spans = defaultdict(list), {}
    for number, _, row in tab_rows(Path(folder) / f"{name}_docs.tsv", (*DOCS, "text"), HINT, DOCS):
        document, passage, text = (row[column] for column in (*DOCS, "text"))
        sentences = documents[document]
        place = spans.setdefault(passage, [document, len(sentences), len(sentences)])
        if place[0] != document or place[2] != len(sentences):
            raise DataError(f"{name}_docs.tsv, row {number}, field p_id: lines of passage {passage} aren't together")
        sentences.append(clean(text))
        place[2] = len(sentences)
    whole = {document: tuple(sentences) for document, sentences in documents.items()}
    pool = [Passage(p, d, None, (), whole[d], start, end) for p, (d, start, end) in spans.items()]
    at = {passage.id: place for place, passage in enumerate(pool)}

    data, asked = MedQuad({}, {}, {passage.id: passage.text for passage in pool}, {}), defaultdict(list)
    for number, _, row in tab_rows(Path(folder) / f"{name}_queries.tsv", QUERIES, HINT, QUERIES):
        query, relevance, passage, entity, aspect = (row[column] for column in QUERIES)
        if passage not in at:
            raise DataError(f"{name}_queries.tsv, row {number}, field p_id: {passage} is no passage of {name}_docs.tsv")
        text = query_text(clean(entity), aspect)
        wrong = {
            "field relevance: neither 0 nor 1": relevance not in ("0", "1"),
            "field query_id: another entity and aspect in an earlier row": data.queries.get(query, text) != text,
        }
        refuse(f"{name}_queries.tsv", number, wrong)
        data.queries[query], data.aspects[query] = text, aspect
        asked[query].append(at[passage])
        if relevance == "1":
            data.qrels.setdefault(query, {})[passage] = 1
    if unanswered := [query for query in data.queries if query not in data.qrels]:
        raise DataError(f"{name}_queries.tsv: query {unanswered[0]} has no answer (relevance 1) among its candidates")
    if not asked:
        raise DataError(f"{name}_queries.tsv: no query; {HINT}")
    most = max(map(len, asked.values()))
    again = {query: at[next(iter(found))] for query, found in data.qrels.items()}
    rows = [found + [again[query]] * (most - len(found)) for query, found in asked.items()]
    return Task(data, pool, np.array(rows))


def load_training(folder: Path) -> list[Passage]:
    """The labelled passages of an export for training, `<name>_matchzoo.tsv`: relevance, "entity ; aspect" and a
    passage's text on each line, no header. A passage under two aspects is two; each is a document of its own, for the
    export doesn't say which are of one article.

    Raises DataError (file, row, field) for a line in another layout and where there is nothing to learn from."""
    labels: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for path in sorted(Path(folder).glob("*_matchzoo.tsv")):
        for row, line in read_text_lines(path, HINT):
            cells = [*line.split("\t"), "", ""]
            entity, separator, aspect = cells[1].rpartition(" ; ")
            wrong = {
                "field relevance: no whole number": not cells[0].strip().isdecimal(),
                'field query: not "entity ; aspect"': not (separator and clean(entity) and clean(aspect)),
                "field text: empty": not split_sentences(cells[2]),
            }
            refuse(short_name(path), row, wrong if line.strip() else {})
            if line.strip() and int(cells[0]):
                labels[cells[2], clean(aspect)][clean(entity)] = None
    if not labels:
        raise DataError(f"{Path(folder).name}: no passage to learn from in a <name>_matchzoo.tsv; {HINT}")
    found = []
    for k, ((text, aspect), entities) in enumerate(labels.items()):
        sentences = tuple(split_sentences(text))
        found.append(Passage(f"w{k}", f"w{k}", aspect, tuple(entities), sentences, 0, len(sentences)))
    return found


def compared(
    profile: Profile, name: str, task: Task, systems_asked: Sequence[str], others: Sequence[Passage] = ()
) -> pd.DataFrame:
    """BM25, the start and trained systems on a test set, as records.printed; `others` as systems.trained_model."""
    data, pool, candidates = task
    bm25 = np.take_along_axis(medquad.term_scores(data, "BM25"), candidates, axis=1)
    asked = (systems.START, *systems_asked)
    scores = {system: systems.scored(profile, system, name, *task, others) for system in asked}
    values = {system: medquad.recall_values(data, candidates, of) for system, of in ({"BM25": bm25} | scores).items()}
    return records.printed(profile, values, systems.START)


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__, options=[])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--systems", nargs="+", default=[], metavar="SYSTEM", choices=systems.TRAINED)
    parser.add_argument("--train-on", type=Path, metavar="FOLDER", help="with CDV's training set, not on notes")
    parser.add_argument("--and-notes", action="store_true", help="on these, too")
    options, profile = records.parse(parser, arguments)
    if options.and_notes and not options.train_on:
        parser.error("--and-notes adds the notes to what --train-on names; without it they alone are trained on")
    found = sorted(path.name.removesuffix("_queries.tsv") for path in options.folder.glob("*_queries.tsv"))
    if not found:
        parser.error(f"{options.folder.name}: no <name>_queries.tsv there; {HINT}")
    try:
        others = load_training(options.train_on) if options.train_on else []
        tasks = {name: load_exported(options.folder, name) for name in found}
        if others:
            tasks["notes kept aside"] = systems.held_out(profile)
            print(f"{len(others):,} passages to learn from{', and the notes' * options.and_notes}")
        others += systems.training_passages(profile)[0] if options.and_notes and others else []
        for name, task in tasks.items():
            print(f"{name}: {len(task.data.queries):,} queries, {len(task.pool):,} passages")
            print(compared(profile, name, task, options.systems, others).to_string(index=False))
    except DataError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
