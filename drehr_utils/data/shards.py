"""Tables of a corpus on disk: written a shard at a time as Parquet, which any tool reads, and joined in Arrow's own
format, which is read memory-mapped. What a process holds of a corpus grows far less than it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

T = TypeVar("T")
JOINED = "rows.arrow"  # beside the shards


def shard(folder: Path, at: int) -> Path:
    return folder / f"part-{at:05}.parquet"


def write_rows(folder: Path, rows: Iterable[T], kind: type[T], a_shard: int) -> None:
    """The rows, dataclasses of strings, in shards of `a_shard` (one without rows where there is none), and joined."""
    schema, rows, at = pa.schema([(field.name, pa.string()) for field in fields(kind)]), iter(rows), 0
    while (block := list(islice(rows, a_shard))) or not at:
        write(pa.table([[getattr(row, name) for row in block] for name in schema.names], schema), shard(folder, at))
        at += 1
    join(folder, at, folder / JOINED)


def write(table: pa.Table, path: Path) -> None:
    pq.write_table(table, path, compression="zstd")


def join(folder: Path, shards: int, path: Path) -> None:
    """One file of so many shards, in their order, of which one at a time is in memory."""
    parts = (pq.read_table(shard(folder, at)) for at in range(shards))
    first = next(parts)
    with pa.ipc.new_file(str(path), first.schema) as out:
        out.write_table(first)
        for part in parts:
            out.write_table(part)


def mapped(folder: Path) -> pa.Table:
    """The joined rows, memory-mapped: the system reads what is asked for, and drops it again where memory is short."""
    return pa.ipc.open_file(pa.memory_map(str(folder / JOINED))).read_all()


class Rows(Sequence[T], Generic[T]):
    """A table's rows as dataclasses of its columns, made when they are asked for; a slice of them is another table."""

    def __init__(self, table: pa.Table, kind: type[T]):
        self.table, self.kind = table.select([field.name for field in fields(kind)]), kind

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, at):
        if isinstance(at, slice):
            rows = range(len(self))[at]
            if rows.step == 1:
                return Rows(self.table.slice(rows.start, len(rows)), self.kind)
            return Rows(self.table.take(pa.array(rows, pa.int64())), self.kind)
        row = range(len(self))[at]  # negative ones count from the end; IndexError
        return self.kind(*(column[row].as_py() for column in self.table.columns))

    def __iter__(self) -> Iterator[T]:
        for batch in self.table.to_batches(max_chunksize=1000):
            yield from map(self.kind, *(column.to_pylist() for column in batch.columns))
