"""An index of one's own notes, searched by the hybrid: chunks, vectors and patients in an embedded LanceDB table.

    index = NoteIndex.create("notes-index", hybrid)  # later: NoteIndex.open("notes-index")
    index.update(notes)
    index.search("shortness of breath", top=10)

Its folder is open to its owner alone and ignored by git. A note is in it whole or not at all, whenever it is killed.
Within a patient every chunk is scored; in the whole index, those that the encoder (by their one vector, not by their
windows) or a name brings up, each with the score that it would have among all. A search finds what the last finished
update left, while another goes on, too.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import unicodedata
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar

import numpy as np
import pyarrow as pa
from tqdm import tqdm

from drehr_utils import artifacts, files
from drehr_utils.data.notes import Note, chunk_note
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph, collector_paused
from drehr_utils.knowledge.negation import denied_in
from drehr_utils.search import places
from drehr_utils.search.bm25 import WordCounts
from drehr_utils.search.dense import dense_scores
from drehr_utils.search.expansion import expand_query
from drehr_utils.search.hybrid import Hybrid, count_names, joined, name_spans, names_of
from drehr_utils.search.windows import best_windows, blended, encode_windows, packed, unpacked
from drehr_utils.training import encoders

if TYPE_CHECKING:
    from lancedb.table import Table

T = TypeVar("T")
DEPTH = 1000  # chunks that the encoder, the expanded query and each name bring up in the whole index
NOTES_AT_ONCE = 64  # what a kill costs
_AT_ONCE = 2000  # chunks whose windows are in memory
TRIES = 10  # of a search whose files an update takes away
# Above so many chunks vectors are searched by product codes in partitions, and the best are rescored exactly; chosen by
# tests/benchmarks/bench_index_scale.py
EXACT_UP_TO, PARTITION, PROBES, REFINED = 200_000, 8192, 400, 2000
CODED = 4  # numbers of a vector that one byte stands for
_TABLE, _HYBRID, _GRAPH, _WORDS = "chunks", "hybrid", "graph.json", "words.json.gz"
TRAINING_LOCK = ".training.lock"  # in a folder of `drehr-search train`; not the name of an index's own lock
_PLACES = "places.json"  # folders and tables whose notes have no ids but their places there, and these ids
_UNFINISHED = ".unfinished"  # is there from an update's first commit until what it deleted is off the disk
_TEXTS = ("id", "note_id", "patient", "note_digest", "text")


@dataclass(frozen=True)
class Hit:
    """A chunk that was found: its `similarity`, its best window's included; `names` of the query that stand in it, with
    their number, where in `text`, and which of these mentions are denied ("no dyspnea"; knowledge.negation)."""

    score: float
    similarity: float
    names: dict[str, int]
    spans: list[tuple[int, int]]
    denied: list[bool]
    patient: str
    note_id: str
    chunk_id: str
    text: str


@dataclass(frozen=True)
class Update:
    """Numbers of notes; `gone` are in the index and not among the notes given."""

    new: int
    changed: int
    unchanged: int
    gone: int


def schema(dimension: int, windows: bool = False) -> pa.Schema:
    """Columns of the table: texts, vectors of that many numbers, and, if asked, those of each text's windows."""
    vector = pa.field("vector", pa.list_(pa.float32(), dimension))
    more = [pa.field("windows", pa.binary())] if windows else []
    return pa.schema([*(pa.field(name, pa.string()) for name in _TEXTS), vector, *more])


def is_new(folder: Path) -> bool:
    """Whether nothing is in the folder but what a killed NoteIndex.create left. DataError where it can be none."""
    if folder.is_file() or any(above.is_file() for above in folder.parents):
        raise DataError(f"{folder.name}: is a file, or lies below one; name a folder")
    if folder.is_symlink() and not folder.exists():
        raise DataError(f"{folder.name}: a link that leads nowhere; mount what it leads to, or name a folder")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    return all(name in (".gitignore", f".{_HYBRID}.lock") or name.startswith("partial-") for name in names)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """A disk that can't be written is a DataError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, DataError) or not (why := files.disk_fault(error)):
            raise
        raise DataError(f"{folder.name}/: {why}, then run this again; what is in the index stays whole") from None


@dataclass
class NoteIndex:
    folder: Path
    hybrid: Hybrid
    table: Table
    depth: int = DEPTH
    _read: tuple[object, Self, WordCounts] | None = field(default=None, init=False, repr=False)  # see _finished

    @classmethod
    def create(cls, folder: str | Path, hybrid: Hybrid) -> Self:
        """An empty index, which keeps a copy of the hybrid: an index is asked by what it was made with."""
        folder = Path(folder)
        if not is_new(folder):
            raise DataError(f"{folder.name}/: isn't empty; name a new folder, or leave --model out to add to its index")
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            os.chmod(folder, 0o700)
            files.write_atomically(folder / ".gitignore", b"*\n")
            artifacts.cached_folder(folder / _HYBRID, hybrid.save)
            # Read in a third of the time that BIOS's files take
            graph = {part.name: getattr(hybrid.graph, part.name) for part in fields(hybrid.graph)}
            files.write_atomically(folder / _GRAPH, json.dumps(graph).encode())
            return cls.open(folder)

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """The index in `folder`. Raises DataError where there is none, or LanceDB isn't installed."""
        folder = Path(folder)
        if (folder / TRAINING_LOCK).exists():
            raise DataError(f"{folder.name}/: is what `drehr-search train` made: give it as --model, and a new --index")
        if not (folder / _HYBRID).is_dir() and not is_new(folder):
            raise DataError(f"{folder.name}/: isn't empty, and no index; name another folder")
        if not (folder / _HYBRID).is_dir():
            raise DataError(f"{folder.name}/: no index; make one with `drehr-search index NOTES --index {folder.name}`")
        try:
            import lancedb
        except ImportError:
            raise DataError("an index of notes needs LanceDB: pip install 'drehr_utils[search]'") from None
        hybrid = Hybrid.load(folder / _HYBRID, _graph(folder / _GRAPH))
        database = lancedb.connect(str(folder.absolute()), read_consistency_interval=datetime.timedelta(0))
        try:
            table = database.open_table(_TABLE)
        except ValueError:  # there is none yet
            columns = schema(hybrid.encoder.get_embedding_dimension(), bool(hybrid.weights.windows))
            with _writing(folder):
                table = database.create_table(_TABLE, schema=columns, exist_ok=True)
        if hybrid.weights.windows and "windows" not in table.schema.names:
            raise DataError(
                f"{folder.name}/{_HYBRID}/hybrid.json, field windows: the index was made without; set it to 0, or "
                "index the notes in a new folder"
            )
        return cls(folder, hybrid, table)

    def notes(self) -> dict[str, str]:
        """Note id -> digest of the note that is in the index."""
        found = self.table.search().select(["note_id", "note_digest"]).to_arrow()
        return dict(zip(found["note_id"].to_pylist(), found["note_digest"].to_pylist(), strict=True))

    def update(
        self,
        notes: Sequence[Note],
        remove_gone: bool = False,
        progress: bool = True,
        workers: int = 0,
        unread: Sequence[str] = (),
        placed_in: Path | None = None,
    ) -> Update:
        """Adds the notes that are new or changed, and removes, if asked, those that aren't given any more but for
        `unread`, the ids of notes that are there still and couldn't be read.

        placed_in: the folder or table in which the notes' ids are places. Another one's notes aren't gone, and would be
        replaced by those of the same places: a DataError. Both while that one is still where it was.
        workers: so many processes of Ray encode what is new (search.index_ray). A second writer at the same time is a
        DataError, as is a full disk. What was killed goes on with the next call."""
        unfinished = self.folder / _UNFINISHED
        with _writing(self.folder), artifacts.lock(self.folder / ".lock", "indexing notes", wait=False):
            for left in self.folder.glob(f"partial-*-{_WORDS}"):  # a killed run's
                left.unlink()
            known = self.notes()
            digests = {note.note_id: _digest(note) for note in notes}
            if len(digests) < len(notes):
                at = {note.note_id: place for place, note in enumerate(notes, 1)}  # the last of each id
                place = next(place for place, note in enumerate(notes, 1) if at[note.note_id] != place)
                raise DataError(f"notes: number {place} has an id that comes again; note ids must be unique")
            wanted = [note for note in notes if known.get(note.note_id) != digests[note.note_id]]
            gone = known.keys() - digests.keys() - set(unread)
            if placed_in:
                gone -= places.claim(
                    self.folder / _PLACES, placed_in, digests, known.keys() & {note.note_id for note in wanted}
                )
            if remove_gone:
                places.forget(self.folder / _PLACES, gone)
            if wanted or (gone and remove_gone) or not (self.folder / _WORDS).exists():
                unfinished.touch()
            with tqdm(total=len(wanted), unit="note", desc="indexing", disable=not progress or not wanted) as bar:
                rest = wanted
                if workers:
                    from drehr_utils.search.index_ray import add_notes

                    rest = [note for note in wanted if note.note_id in known]  # what replaces rows isn't Ray's
                    new = [note for note in wanted if note.note_id not in known]
                    for some in add_notes(self, list(_batches(new, NOTES_AT_ONCE)), workers):
                        bar.update(len(some))
                for some in _batches(rest, NOTES_AT_ONCE):
                    self._add(some)
                    bar.update(len(some))
            if remove_gone:
                for some in _batches(sorted(gone), 1000):
                    self.table.delete(_is_in("note_id", some))
            if unfinished.exists():
                self._finish()
                unfinished.unlink()
        new = sum(note.note_id not in known for note in wanted)
        return Update(new, len(wanted) - new, len(notes) - len(wanted), len(gone))

    def rows_of(self, notes: Sequence[Note]) -> pa.Table:
        """The notes' chunks, encoded, as rows of the table."""
        chunks = [(chunk, note) for note in notes for chunk in chunk_note(note)]
        texts = [chunk.text for chunk, _ in chunks]
        vectors = encoders.encode(self.hybrid.encoder, texts, batch_size=16)
        columns = {
            "id": [chunk.id for chunk, _ in chunks],
            "note_id": [note.note_id for _, note in chunks],
            "patient": [note.subject_id for _, note in chunks],
            "note_digest": [_digest(note) for _, note in chunks],
            "text": texts,
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), vectors.shape[1]),
        }
        if "windows" in self.table.schema.names:
            columns["windows"] = packed(*encode_windows(self.hybrid.encoder, texts))
        return pa.table(columns, schema=self.table.schema)

    def _add(self, notes: Sequence[Note]) -> None:
        """In one commit: what the index had of these notes goes as they come."""
        merge = self.table.merge_insert("id").when_matched_update_all().when_not_matched_insert_all()
        stale = _is_in("note_id", [note.note_id for note in notes])
        merge.when_not_matched_by_source_delete(stale).execute(self.rows_of(notes))

    def _finish(self) -> None:
        """Indexes of words and patients, and what was deleted removed from the disk, too."""
        from lancedb.index import FTS, BTree

        have = {column for index in self.table.list_indices() for column in index.columns}
        if "text" not in have:  # words as they stand, for BM25 counts no stems
            self.table.create_index("text", config=FTS(stem=False, remove_stop_words=False, ascii_folding=False))
        if "patient" not in have:
            self.table.create_index("patient", config=BTree())
        self.index_vectors()
        self._rewrite_deleted()
        version = 0
        while version != (version := self.table.version):  # until nothing is left to compact, or to add to an index
            self.table.optimize()
        self._count_words()  # before those go that readers are at
        with warnings.catch_warnings(action="ignore"):  # of a reader that loses its version: it tries again
            self.table.optimize(cleanup_older_than=datetime.timedelta(0), delete_unverified=True)

    def _rewrite_deleted(self) -> None:
        """Rows that share a file with deleted ones go to a new file: a compaction leaves what was deleted on the disk
        while that is less than a tenth of a file."""
        # FRAGMENT-VERSION-ID.arrow; the fragment is a row's number without its lower 32 bits (Lance's table format)
        marks = (self.folder / f"{_TABLE}.lance/_deletions").glob("*-*-*")
        for fragment in sorted({int(path.name.split("-")[0]) for path in marks}):
            rows = f"_rowid >= {fragment << 32} AND _rowid < {fragment + 1 << 32}"
            self.table.update(where=rows, values_sql={"id": "id"})

    def index_vectors(self) -> None:
        """Above EXACT_UP_TO chunks: product codes (IVF-PQ), made anew when the table has four times the rows that they
        were fitted to, which their name tells."""
        from lancedb.index import IvfPq

        rows = self.table.count_rows()
        old = [index.name for index in self.table.list_indices() if "vector" in index.columns]
        if rows <= EXACT_UP_TO or any(rows < 4 * int(name.split("-")[1]) for name in old):
            return
        for name in old:
            self.table.drop_index(name)
        codes = self.table.schema.field("vector").type.list_size // CODED
        config = IvfPq(distance_type="cosine", num_partitions=rows // PARTITION, num_sub_vectors=codes)
        self.table.create_index("vector", config=config, name=f"vectors-{rows}")

    def _count_words(self) -> None:
        counts = {"version": self.table.version, **asdict(self._words_of(self.table))}
        files.write_atomically(self.folder / _WORDS, json.dumps(counts).encode())

    @staticmethod
    def _words_of(table: Table) -> WordCounts:
        batches = table.search().select(["text"]).to_batches()
        return WordCounts.of(text for batch in batches for text in batch["text"].to_pylist())

    @property
    def words(self) -> WordCounts:
        """BM25's word statistics of the whole index."""
        return self._finished()[1]

    def _finished(self) -> tuple[Self, WordCounts]:
        """The index at the version that its last finished update left, and that version's words; where none was
        finished, at the newest."""
        import lancedb

        path = self.folder / _WORDS
        found = (path.stat().st_mtime_ns, path.stat().st_ino) if path.exists() else self.table.version
        if self._read is None or self._read[0] != found:
            table, words = lancedb.connect(str(self.folder.absolute())).open_table(_TABLE), None
            if path.exists():
                with files.naming(path, "delete it: it is counted again"), files.open_file(path) as file:
                    about = json.load(file)
                    version, words = about.pop("version"), WordCounts(**about)
                try:
                    table.checkout(version)
                except ValueError:  # it is gone: another update has just finished, or one was killed
                    if (path.stat().st_mtime_ns, path.stat().st_ino) != found:
                        return self._finished()
                    words = None
            if words is None:
                table.checkout(table.version)
                words = self._words_of(table)
            self._read = found, replace(self, table=table), words
        return self._read[1:]

    def search(self, query: str, top: int = 10, patient: str | None = None) -> list[Hit]:
        """The best `top` chunks, best first: of one patient exactly, else of all candidates.

        Raises DataError for an empty query, an empty index, a patient without notes, or an index that can't be read."""
        if not (query := files.same_characters(query)).strip():
            raise DataError("the query is empty; give a term, as in 'shortness of breath'")
        vector = self.hybrid.embed_queries([query])
        for _ in range(TRIES):
            try:
                index, words = self._finished()
                return index._search(words, query, vector, top, patient)
            except DataError:
                raise
            except (OSError, RuntimeError, ValueError) as error:  # Lance's: an update took this version's files away
                self._read, said = None, type(error).__name__
        raise DataError(
            f"{self.folder.name}/: can't be read ({said}); if nothing indexes just now, index the notes anew"
        )

    def _search(self, words: WordCounts, query: str, vector: np.ndarray, top: int, patient: str | None) -> list[Hit]:
        if not self.table.count_rows():
            raise DataError(f"{self.folder.name}/: the index is empty; run `drehr-search index NOTES`")
        names = sorted(names_of(query, self.hybrid.graph))
        expanded = expand_query(query, self.hybrid.graph)
        depth = max(self.depth, top)
        found = self._candidates(vector[0], expanded, names, depth) if patient is None else self.of_patient(patient)
        texts = found["text"].to_pylist()
        vectors = found["vector"].combine_chunks().flatten().to_numpy().reshape(len(texts), -1)
        similarity = dense_scores(vector, vectors)[0]
        if share := self.hybrid.weights.windows:
            parts = (found["windows"].slice(at, _AT_ONCE).to_pylist() for at in range(0, len(texts), _AT_ONCE))
            windows = [best_windows(vector, *unpacked(part, vectors.shape[1]))[0] for part in parts]
            similarity = blended(similarity, np.concatenate(windows), share)
        counts = count_names([names], texts)[0]
        scores = joined(similarity, counts, words.scores(expanded, texts), self.hybrid.weights)
        ids = np.array(found["id"].to_pylist())
        best = np.lexsort((ids, -scores))[:top]
        rows = found.select(["patient", "note_id", "id", "text"]).take(best).to_pylist()
        hits = []
        for i, row in zip(best, rows, strict=True):
            spans = name_spans(names, row["text"])
            named = Counter(row["text"][a:b] for a, b in spans)
            denied = [denied_in(row["text"], *span) for span in spans]
            of_chunk = row["patient"], row["note_id"], row["id"], row["text"]
            hits.append(Hit(float(scores[i]), float(similarity[i]), dict(named), spans, denied, *of_chunk))
        return hits

    def of_patient(self, patient: str) -> pa.Table:
        """All rows of a patient, however accents are composed: macOS takes them apart in the names of folders. Raises
        DataError where there is none."""
        forms = {patient, *(unicodedata.normalize(form, patient) for form in ("NFC", "NFD"))}
        found = self.table.search().where(_is_in("patient", sorted(forms))).to_arrow()
        if not len(found):
            raise DataError(f"{self.folder.name}/: no note of patient {patient!r} is in the index")
        return found

    def nearest(self, vector: np.ndarray, depth: int | None = None):
        """The search for the `depth` nearest rows by cosine, exact up to EXACT_UP_TO rows: LanceDB's query builder."""
        search = self.table.search(vector).distance_type("cosine").limit(depth := depth or self.depth)
        return search.nprobes(PROBES).refine_factor(max(REFINED // depth, 1))

    def _candidates(self, vector: np.ndarray, expanded: str, names: Sequence[str], depth: int) -> pa.Table:
        """What is nearest, what has words of the expanded query, and what has all words of a name: `depth` of each."""
        from lancedb.query import BooleanQuery, FullTextOperator, MatchQuery, Occur

        whole = [(Occur.SHOULD, MatchQuery(name, "text", operator=FullTextOperator.AND)) for name in names]
        searches = [(self.nearest(vector, depth), "_distance")]
        for query in (MatchQuery(expanded, "text"), BooleanQuery(whole)):
            searches.append((self.table.search(query, query_type="fts"), "_score"))
        columns = [name for name in self.table.schema.names if name in (*_TEXTS, "vector", "windows")]
        parts = [search.limit(depth).select([*columns, score]).to_arrow() for search, score in searches]
        found = pa.concat_tables([part.select(columns) for part in parts])
        _, first = np.unique(found["id"].to_numpy(zero_copy_only=False), return_index=True)
        return found.take(first)


def _graph(path: Path) -> KnowledgeGraph | None:
    if not path.exists():
        return None
    with files.naming(path, "delete it: the hybrid's folder has it, too"), collector_paused():
        return KnowledgeGraph(**json.loads(path.read_bytes()))


def _batches(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _digest(note: Note) -> str:
    return hashlib.sha256(f"{note.subject_id}\n{note.text}".encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _is_in(column: str, values: Iterable[str]) -> str:
    quoted = ", ".join("'" + value.replace("'", "''") + "'" for value in values)
    return f"{column} IN ({quoted})"
