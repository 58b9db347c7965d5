"""`drehr-search`: an index of your own notes, on your own machine, searched by the hybrid.

    drehr-search index NOTES                    # MIMIC tables, a folder of .txt files, or a CSV with a text column
    drehr-search query "shortness of breath"    # --patient ID, --top 20, --json; no query: from stdin, one a line

`index` adds what is new or changed, and goes on where it was cut off. The index is a folder that only you can read and
that git ignores; nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from transformers.utils.logging import disable_progress_bar

from drehr_utils.data.notes import read_any_notes
from drehr_utils.errors import DataError
from drehr_utils.files import hide_messages
from drehr_utils.knowledge import vocabularies
from drehr_utils.profiles import ROOT, load_profile
from drehr_utils.search.hybrid import GRAPH_FOLDER, Hybrid
from drehr_utils.search.index import Hit, NoteIndex, is_new

INDEX = Path("drehr-index")
SHIPPED = ROOT / "data/models/drehr-improved"


def hybrid_of(model: Path = SHIPPED) -> Hybrid:
    """The hybrid of a folder that Hybrid.save wrote, or of an encoder's folder and the open graph."""
    whole = (model / GRAPH_FOLDER).is_dir()
    return Hybrid.load(model, None if whole else vocabularies.build_open_kg(load_profile("open").open_kg))


def make_index(options: argparse.Namespace) -> None:
    notes, report = read_any_notes(options.notes, options.text_column, options.id_column, options.patient_column)
    for reason, found in report.frame().iloc[1:].groupby("what"):
        print(f"{reason}: {found['rows'].sum()}, the first in row {found['first at row'].iloc[0]:.0f}", file=sys.stderr)
    if is_new(options.index):
        index = NoteIndex.create(options.index, hybrid_of(options.model or SHIPPED))
    elif options.model:
        raise DataError(f"{options.index.name}/: has its model already; leave --model out, or name a new folder")
    else:
        index = NoteIndex.open(options.index)
    done = index.update(notes, options.remove_gone)
    gone = f", {done.gone} {'removed' if options.remove_gone else 'no longer there: --remove-gone removes them'}"
    print(
        f"{options.index}/: {done.new} notes added, {done.changed} changed, {done.unchanged} as they were"
        f"{gone if done.gone else ''}; {index.table.count_rows()} chunks in all"
    )


def ask(options: argparse.Namespace) -> None:
    index = NoteIndex.open(options.index)
    if options.query is None and sys.stdin.isatty():
        print("One query a line; an empty line ends.", file=sys.stderr)
    for query in [options.query] if options.query is not None else _lines():
        hits = index.search(query, options.top, options.patient)
        if options.json:
            print(json.dumps({"query": query, "hits": [asdict(hit) for hit in hits]}))
        else:
            print("\n\n".join(show(hit, place, sys.stdout.isatty()) for place, hit in enumerate(hits, 1)))


def _lines() -> Iterator[str]:
    for line in sys.stdin:
        if not line.strip():
            return
        yield line.strip()


def marked(hit: Hit, said: tuple[str, str], denied: tuple[str, str], escape: Callable[[str], str] = str) -> str:
    """The hit's text with its names between two marks, between two others where the mention is denied."""
    parts, at = [], 0
    for (start, end), no in zip(hit.spans, hit.denied, strict=True):
        before, after = denied if no else said
        parts += [escape(hit.text[at:start]), before, escape(hit.text[start:end]), after]
        at = end
    return "".join([*parts, escape(hit.text[at:])])


def show(hit: Hit, place: int, colour: bool = False) -> str:
    """A hit as text, its names marked in colour, or by asterisks; denied ones greyed, or by tildes."""
    marks = (("\033[1;33m", "\033[0m"), ("\033[2m", "\033[0m")) if colour else (("*", "*"), ("~", "~"))
    named = ", ".join(f"{name} x{n}" if n > 1 else name for name, n in hit.names.items()) or "no name of it"
    head = f"{place:>2}  {hit.score:.3f}  patient {hit.patient}, chunk {hit.chunk_id}: {named}"
    width = shutil.get_terminal_size((100, 24)).columns - 6
    text = textwrap.wrap(marked(hit, *marks), width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([head, *text])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("drehr-search", description=__doc__, formatter_class=_FORMAT)
    commands = parser.add_subparsers(required=True, metavar="index | query")
    index = commands.add_parser(
        "index", help="make an index of notes, or bring one up to date", formatter_class=_FORMAT
    )
    index.set_defaults(run=make_index)
    index.add_argument("notes", type=Path, metavar="NOTES", help="folder in MIMIC's layout, folder of .txt, or CSV")
    index.add_argument("--model", type=Path, help="of a new index: an encoder or hybrid; without it, the shipped one")
    index.add_argument("--text-column", default="text", help="of a CSV (text)")
    index.add_argument("--id-column", default="note_id", help="of a CSV (note_id; without it, the row's number)")
    index.add_argument(
        "--patient-column", default="subject_id", help="of a CSV (subject_id; without it, each note's own)"
    )
    index.add_argument("--remove-gone", action="store_true", help="take out the notes that aren't in NOTES any more")
    query = commands.add_parser("query", help="search an index", formatter_class=_FORMAT)
    query.set_defaults(run=ask)
    query.add_argument("query", nargs="?", help="an entity: a disease, a procedure, a drug, a finding")
    query.add_argument("--patient", help="search this patient's notes alone")
    query.add_argument("--top", type=int, default=10, metavar="N")
    query.add_argument("--json", action="store_true", help="one JSON object a query")
    for command in (index, query):
        command.add_argument("--index", type=Path, default=INDEX, metavar="FOLDER", help=f"({INDEX})")
    options = parser.parse_args(arguments)
    if options.run is ask and options.top < 1:
        parser.error(f"--top {options.top}: at least 1")
    disable_progress_bar()  # of loading weights; indexing has its own
    hide_messages()
    try:
        options.run(options)
    except DataError as error:
        parser.exit(1, f"drehr-search: {error}\n")


_FORMAT = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
