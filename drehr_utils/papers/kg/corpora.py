"""Test sets that don't come with the repository: MedMentions and COMETA, whose concepts are licensed (KG entity
retrieval §5, Table 2), and mentions of one's own with their codes of ICD-10-CM.

    python -m drehr_utils.papers.kg.corpora medmentions FOLDER --fetch     # CC0, from GitHub; its concepts are UMLS's
    python -m drehr_utils.papers.kg.corpora cometa FOLDER                  # by request: https://siphs.org/corpus
    ... --systems "UMLS Syn" "SNOMED Graph"          # beside BM25 and the start; trained where they aren't yet
    python -m drehr_utils.papers.kg.corpora icd10 MENTIONS.csv --profile full --systems "ICD-10 Names"   # or .csv.gz

R@1 and R@25 with 95% intervals, as notebook 12's Table 3. DREHR_UMLS (a release's META folder) or DREHR_SNOMED (RF2)
gives the corpora's concepts; only files in their layouts were ever read here, for they can't be had without a network.
One's own file has the columns note_id, mention and icd10cm_code, and is searched among all specific codes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from drehr_utils.data.public_data import RemoteFile, download
from drehr_utils.errors import DataError
from drehr_utils.evaluation import records
from drehr_utils.files import read_text_lines, tab_rows
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.papers.kg import systems
from drehr_utils.papers.kg.linking import Mention, TestSet, load_open_linking, read_ncbi
from drehr_utils.papers.kg.tasks import text_key
from drehr_utils.profiles import Profile

UNKNOWN = "concept that the graph doesn't have"  # the corpus names another release's
SEEN = "stands in a training pair of one of the systems"  # so that it would not be zero-shot (§2)
_MEDMENTIONS = "https://raw.githubusercontent.com/chanzuckerberg/MedMentions/12c256b306d76c17f61412a5168a9ed420519a83"
MEDMENTIONS_FILES = tuple(  # no sum is published
    RemoteFile(name, f"{_MEDMENTIONS}/full/data/{name}")
    for name in ("corpus_pubtator.txt.gz", "corpus_pubtator_pmids_test.txt")
)
COMETA_SPLITS = {  # of Table 2: folder, and the identifier that its split is made for
    f"COMETA-{kind[0]}{which[0]}": (f"{folder}_{which.lower()}", f"{which} SNOMED ID")
    for kind, folder in (("Stratified", "stratified"), ("Zeroshot", "zeroshot"))
    for which in ("General", "Specific")
}


def _test_set(name: str, of: str, graph: KnowledgeGraph, rows: Iterator[tuple[str, str, str]]) -> TestSet:
    """(document, mention, concept) rows as a test set, each annotation a mention, as Table 2 counts them.

    Mentions of one concept aren't independent, repeated ones least of all: intervals draw concepts (recall_values)."""
    mentions, left_out = [], Counter()
    for number, (document, text, concept) in enumerate(rows):
        if concept in graph.cui2pt:
            mentions.append(Mention(f"{name}-{number}", document, text, frozenset([concept])))
        else:
            left_out[UNKNOWN] += 1
    found = TestSet(name, of, dict(graph.cui2pt), {}, mentions, left_out)
    return replace(found, names={c: graph.synonyms(c) for c in found.gold})


def load_medmentions(folder: Path, graph: KnowledgeGraph) -> list[TestSet]:
    """The test part of MedMentions, full or ST21pv (its `data` folder), against UMLS.

    Raises DataError as read_ncbi does, and where the corpus has no document of the test part."""
    corpus, test = (Path(folder) / file.name for file in MEDMENTIONS_FILES)
    kept = {line.strip() for _, line in read_text_lines(test)}
    rows = [(pmid, mention, cui.removeprefix("UMLS:")) for pmid, mention, cui in read_ncbi(corpus) if pmid in kept]
    if not rows:
        raise DataError(f"{corpus.name}: no annotation of a document that {test.name} lists; fetch both again")
    return [_test_set("MedMentions", "UMLS", graph, iter(rows))]


def load_cometa(folder: Path, graph: KnowledgeGraph) -> list[TestSet]:
    """The test parts of COMETA's four splits, `<split>/test.csv` (tab-separated, with a header), against SNOMED CT.

    Raises DataError (file, row, field) for a missing file or column, a row that is cut short and an empty field."""

    def rows(split: str, identifier: str) -> Iterator[tuple[str, str, str]]:
        hint, columns = "COMETA is had by request: https://siphs.org/corpus", ("ID", "Term", identifier)
        for _, _, cells in tab_rows(Path(folder) / split / "test.csv", columns, hint, columns):
            yield tuple(cells[column] for column in columns)

    return [_test_set(name, "SNOMED", graph, rows(*split)) for name, split in COMETA_SPLITS.items()]


def load_icd10(path: Path, _: None = None) -> list[TestSet]:
    """A file as data/open_linking/mentions.csv.gz, which linking.load_open_linking reads."""
    return [replace(load_open_linking(path), name=path.name)]


CORPORA: dict[str, tuple[str, Callable[[Path, KnowledgeGraph], list[TestSet]]]] = {
    "medmentions": ("UMLS", load_medmentions),
    "cometa": ("SNOMED", load_cometa),
    "icd10": (systems.ICD10, load_icd10),
}


def unseen(profile: Profile, test_set: TestSet, names: Sequence[str]) -> TestSet:
    """The test set without mentions that a training of the systems `names` shows, the same for all: zero-shot on
    mentions (§2); a training's pairs may hold other names of their concepts."""
    tasks = [task for name in names for task in systems.trained_on(profile, name)]
    shown = {text_key(text) for task in tasks for text in task.used_texts()}
    kept = [mention for mention in test_set.mentions if text_key(mention.text) not in shown]
    left_out = test_set.left_out + Counter({SEEN: len(test_set.mentions) - len(kept)})
    return replace(test_set, mentions=kept, left_out=left_out)


def compared(profile: Profile, test_set: TestSet, names: Sequence[str]) -> pd.DataFrame:
    """BM25, the start and the systems `names` on a test set, as records.printed."""
    models = {"start": "start", "BM25": "BM25"} | {name: systems.train(profile, name)[0] for name in names}
    values = {name: systems.recall(profile, test_set, model) for name, model in models.items()}
    return records.printed(profile, values, "start")


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__, "mimic", [])
    parser.add_argument("corpus", choices=CORPORA)
    parser.add_argument("folder", type=Path, help="of icd10 the file")
    parser.add_argument("--fetch", action="store_true", help="MedMentions into the folder first")
    parser.add_argument("--systems", nargs="+", default=[], metavar="SYSTEM", help="notebook 12's")
    options, profile = records.parse(parser, arguments)
    if options.fetch and options.corpus != "medmentions":
        parser.error("MedMentions alone can be fetched; COMETA is had by request: https://siphs.org/corpus")
    of, load = CORPORA[options.corpus]
    try:
        if of not in (graphs := systems.graphs(profile) | {systems.ICD10: None}):  # whose codes a package carries
            parser.error(f"the concepts are {of}'s: set DREHR_{of} to a release, which the profile mimic reads")
        records.refuse_unknown(parser, "system", options.systems, systems.names(profile))
        for remote in MEDMENTIONS_FILES if options.fetch else ():
            download(remote, options.folder)
        for test_set in load(options.folder, graphs[of]):
            asked = unseen(profile, test_set, options.systems).cut(None, profile.kg.max_codes, profile.seed)
            told = ", ".join(f"{n:,}: {why}" for why, n in asked.left_out.items() if n) or "none"
            print(f"{asked.name}: {len(asked.mentions):,} mentions, {len(asked.concepts):,} concepts; left out: {told}")
            if asked.mentions:
                print(compared(profile, asked, options.systems).to_string(index=False))
    except DataError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
