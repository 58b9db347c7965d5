"""`drehr-search`: an index of your own notes, on your own machine, searched by the hybrid.

    drehr-search index NOTES                    # MIMIC tables, a folder of .txt files, or a CSV with a text column
    drehr-search query "shortness of breath"    # --patient ID, --top 20, --json; no query: from stdin, one a line
    drehr-search train NOTES                    # an encoder of your own: then index NOTES --model drehr-model

`index` adds what is new or changed, by the notes' ids (of a .txt, its path in NOTES); it and `train` go on where they
were cut off. What they write is a folder that only you can read and that git ignores; nothing leaves the machine.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sqlite3
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from drehr_utils.data.notes import Note, ReadReport, find_table, read_any_notes
from drehr_utils.errors import DataError
from drehr_utils.files import disk_fault, hide_messages, is_utf8
from drehr_utils.profiles import ROOT, load_profile

if TYPE_CHECKING:  # what stands below imports torch where it needs it: --help and a wrong path are answered at once
    from drehr_utils.search.hybrid import Hybrid
    from drehr_utils.search.index import Hit

INDEX, MODEL = Path("drehr-index"), Path("drehr-model")
NAMED = 5  # skipped notes of a kind that are named
SHIPPED = ROOT / "data/models/drehr-by-windows"  # what a search asks
IMPROVED = ROOT / "data/models/drehr-improved"  # for whole texts, and what a training goes on from


def inside(model: Path) -> Path:
    """Where the hybrid lies in a folder that `train` wrote; else the folder as it is."""
    return model / "hybrid" if (model / "hybrid").is_dir() else model


def hybrid_of(model: str | Path = SHIPPED) -> Hybrid:
    """The hybrid of a folder that Hybrid.save or `train` wrote, or of an encoder's folder and the open graph."""
    from drehr_utils.knowledge import vocabularies
    from drehr_utils.search.hybrid import GRAPH_FOLDER, Hybrid

    model = inside(Path(model))
    whole = (model / GRAPH_FOLDER).is_dir()
    return Hybrid.load(model, None if whole else vocabularies.build_open_kg(load_profile("open").open_kg))


def read(options: argparse.Namespace) -> tuple[list[Note], ReadReport]:
    """The notes, and the report, of which it prints what was skipped."""
    notes, report = read_any_notes(options.notes, options.text_column, options.id_column, options.patient_column)
    files = options.notes.is_dir() and not find_table(options.notes, "discharge", "NOTEEVENTS")
    found: dict[str, list[str]] = {}
    for row, name, reason in report.skipped:
        found.setdefault(reason, []).append(name if files else f"row {row}")
    for reason, at in found.items():
        more = ", ..." if len(at) > NAMED else ""
        print(f"skipped: {reason}: {len(at)} ({', '.join(at[:NAMED])}{more})", file=sys.stderr)
    if report.unread:
        print("save them as UTF-8; until then the index keeps what it has of them", file=sys.stderr)
    return notes, report


def train(options: argparse.Namespace) -> None:
    os.environ["DREHR_LLM_BASE_URL"] = options.llm or ""  # a server that other work names is not asked about notes
    tables = options.notes.is_dir() and find_table(options.notes, "discharge", "NOTEEVENTS")
    notes = None if tables else read(options)[0]
    from drehr_utils.use import train_search

    train_search.train_on(
        options.notes, notes, options.out, inside(options.start), steps=options.steps,
        batch=options.batch, answers=options.answers, llm=bool(options.llm),
    )  # fmt: skip
    print(f"{options.out}/: trained; drehr-search index {options.notes} --model {options.out} --index NEW")


def make_index(options: argparse.Namespace) -> None:
    try:
        notes, report = read(options)
    except DataError as error:
        if options.remove_gone and options.index.is_dir():
            raise DataError(f"{error}; nothing was removed (an index's last notes go with its folder)") from None
        raise
    from drehr_utils.search.index import NoteIndex, is_new

    if is_new(options.index):
        hybrid = hybrid_of(options.model or (IMPROVED if options.no_windows else SHIPPED))
        if options.no_windows:
            hybrid.weights = replace(hybrid.weights, windows=0.0)
        index = NoteIndex.create(options.index, hybrid)
    elif options.model and (options.index / "hybrid").is_dir():
        raise DataError(f"{options.index.name}/: has its model already; leave --model out, or name a new folder")
    else:
        index = NoteIndex.open(options.index)
        if options.no_windows and index.hybrid.weights.windows:
            raise DataError(f"{options.index.name}/: has windows already; name a new folder, or leave --no-windows out")
    more = {"unread": report.unread, "placed_in": options.notes if report.placed else None}
    done = index.update(notes, options.remove_gone, workers=options.workers or 0, **more)
    gone = f", {done.gone} {'removed' if options.remove_gone else 'no longer there: --remove-gone removes them'}"
    print(
        f"{options.index}/: {done.new} notes added, {done.changed} changed, {done.unchanged} as they were"
        f"{gone if done.gone else ''}; {index.table.count_rows()} chunks in all"
    )


def ask(options: argparse.Namespace) -> None:
    from drehr_utils.search.index import NoteIndex

    index = NoteIndex.open(options.index)
    if options.query is None and sys.stdin.isatty():
        print("One query a line; an empty line ends.", file=sys.stderr)
    for query in [options.query] if options.query is not None else _lines():
        if not is_utf8(query + (options.patient or "")):
            raise DataError("a query has bytes that are not UTF-8; set the terminal to UTF-8, or convert them")
        hits = index.search(query, options.top, options.patient)
        if options.json:
            print(json.dumps({"query": query, "hits": [asdict(hit) for hit in hits]}), flush=True)
        else:
            print("\n\n".join(show(hit, place, sys.stdout.isatty()) for place, hit in enumerate(hits, 1)), flush=True)


def _lines() -> Iterator[str]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # as in arguments; `ask` says what is wrong
    for line in sys.stdin:
        if query := line.removeprefix("\ufeff").strip():  # a file that Windows saved begins with it
            yield query
        elif sys.stdin.isatty():
            return


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
    width = max(shutil.get_terminal_size((100, 24)).columns - 6, 20)
    shown = marked(replace(hit, text=harmless(hit.text)), *marks)
    text = textwrap.wrap(shown, width, initial_indent="    ", subsequent_indent="    ")
    return "\n".join([harmless(head), *text])


def harmless(text: str) -> str:
    """With a space for each control character, which a terminal would obey."""
    return "".join(" " if unicodedata.category(c) == "Cc" else c for c in text)


def _at_fault(error: OSError | sqlite3.OperationalError, options: argparse.Namespace) -> str:
    """Which of the folders that were given can't be read or written and what to do, "" where that isn't known."""
    if isinstance(error, PermissionError):
        given = (getattr(options, name, None) for name in ("index", "out", "notes"))
        found = (folder for folder in given if folder and Path(str(error.filename)).is_relative_to(folder))
        return next(
            (f"{folder}: {error.strerror} (another user's?); name another, or get its rights" for folder in found), ""
        )
    return disk_fault(error)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("drehr-search", description=__doc__, formatter_class=_FORMAT)
    commands = parser.add_subparsers(required=True, metavar="index | query | train")
    index = commands.add_parser(
        "index", help="make an index of notes, or bring one up to date", formatter_class=_FORMAT
    )
    index.set_defaults(run=make_index)
    index.add_argument("--model", type=Path, help="of a new index: what train made, or an encoder (the shipped hybrid)")
    index.add_argument("--no-windows", action="store_true", help="of a new index: one vector a chunk, none of its "
                       "windows of a few words: a third of the time, a sixth of the disk; finds less")  # fmt: skip
    index.add_argument("--remove-gone", action="store_true", help="take out the notes that aren't in NOTES any more")
    index.add_argument("--workers", type=_number, metavar="N", help="encode on N processes of Ray, here or on the "
                       "cluster that DREHR_RAY_ADDRESS names, which then gets the notes' text (pip install "
                       "'drehr_utils[scale]')")  # fmt: skip
    query = commands.add_parser("query", help="search an index", formatter_class=_FORMAT)
    query.set_defaults(run=ask)
    query.add_argument("query", nargs="?", help="an entity: a disease, a procedure, a drug, a finding")
    query.add_argument("--patient", help="search this patient's notes alone")
    query.add_argument("--top", type=_number, default=10, metavar="N")
    query.add_argument("--json", action="store_true", help="one JSON object a query")
    own = commands.add_parser("train", help="train an encoder on notes, to index them with", formatter_class=_FORMAT)
    own.set_defaults(run=train)
    own.add_argument("--out", type=Path, default=MODEL, metavar="FOLDER", help=f"({MODEL})")
    own.add_argument("--from", type=Path, default=IMPROVED, dest="start", metavar="MODEL", help="what goes on "
                     "training, like --model; minilm: an encoder that saw no notes (drehr-improved)")  # fmt: skip
    own.add_argument("--steps", type=_number, metavar="N", help="(6 times all chunks, but at most 100 steps)")
    own.add_argument("--batch", type=_number, default=32, metavar="N", help="chunks a step (32)")
    answers = own.add_mutually_exclusive_group()
    answers.add_argument("--answers", type=Path, metavar="FILE", help="a language model's entities, as JSON lines "
                         "(data/README.md); without them, what the graph finds in the notes")  # fmt: skip
    answers.add_argument("--llm", metavar="URL", help="ask a server for them: http://localhost:8000/v1, with its model "
                         "in DREHR_LLM_MODEL; one outside of this machine's network is refused, unless "
                         "DREHR_LLM_ALLOW_REMOTE allows it in so many words")  # fmt: skip
    for command in (index, query):
        command.add_argument("--index", type=Path, default=INDEX, metavar="FOLDER", help=f"({INDEX})")
    for command in (index, own):
        command.add_argument("notes", type=Path, metavar="NOTES", help="MIMIC's tables, a folder of .txt, or a CSV")
        command.add_argument("--text-column", default="text", help="of a CSV (text)")
        command.add_argument("--id-column", default="note_id", help="of a CSV (note_id; without it, file and row)")
        command.add_argument(
            "--patient-column", default="subject_id", help="of a CSV (subject_id; without it, each note's own)"
        )
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # of loading weights; indexing has its own
    os.environ["HF_HUB_OFFLINE"] = "1"  # a model is a folder here, and nobody is told its name
    hide_messages()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what the terminal's encoding hasn't is no reason to stop
    try:
        options.run(options)
    except DataError as error:
        parser.exit(1, f"drehr-search: {error}\n")
    except BrokenPipeError:  # of `| head`
        os._exit(141)
    except (OSError, sqlite3.OperationalError) as error:  # its own message may name a note's file
        if not (why := _at_fault(error, options)):
            raise
        parser.exit(1, f"drehr-search: {why}, then run this again\n")
    except KeyboardInterrupt:
        parser.exit(130, "\ndrehr-search: stopped\n")


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: a whole number of at least 1")
    return int(text)


_FORMAT = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
