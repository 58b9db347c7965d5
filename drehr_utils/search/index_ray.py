"""An index's rows made by several processes of Ray (cluster), which see the index's folder.

A worker writes its rows to the table's folder; they are in the table once this process has committed them, a part at a
time. So a worker that dies is replaced and does its part again, and no part is there half or twice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from drehr_utils.cluster import ATTEMPTS, cluster
from drehr_utils.data.notes import Note
from drehr_utils.errors import DataError

if TYPE_CHECKING:
    from lancedb.table import Table

    from drehr_utils.search.index import NoteIndex

T = TypeVar("T")


def append_on_ray(
    table: Table, make: Callable[[], Callable[[T], pa.Table]], parts: Sequence[T], workers: int
) -> Iterator[T]:
    """Appends the rows of all parts and yields each part once it is in the table, in the order in which they are done.

    make: called once in each worker, gives the function from a part to its rows. Raises DataError for a part that
    raises, or whose worker died ATTEMPTS times."""
    try:
        import lance
    except ImportError:
        raise DataError("--workers needs Lance: pip install 'drehr_utils[scale]'") from None
    with cluster(workers):
        import ray

        place = os.path.join(table._conn.uri, f"{table.name}.lance")

        @ray.remote(num_cpus=1, max_restarts=ATTEMPTS - 1, max_task_retries=ATTEMPTS - 1)
        class Worker:
            def __init__(self) -> None:
                self.rows_of = make()

            def write(self, part: T) -> list[lance.FragmentMetadata]:
                from lance.fragment import write_fragments

                return write_fragments(self.rows_of(part), place, mode="append")

        pool, waiting = [Worker.remote() for _ in range(workers)], list(enumerate(parts))
        running = {}

        def next_part(worker) -> None:
            if waiting:
                at, part = waiting.pop(0)
                running[worker.write.remote(part)] = (worker, at)

        for worker in pool:
            next_part(worker)
        while running:
            (done, *_), _ = ray.wait(list(running), num_returns=1)
            worker, at = running.pop(done)
            try:
                fragments = ray.get(done)
            except ray.exceptions.RayError as error:
                kind = type(getattr(error, "cause", None) or error).__name__
                raise DataError(f"indexing on Ray: part {at + 1} of {len(parts)} failed ({kind}); run this again: it "
                                "goes on; without --workers the error says more") from None  # fmt: skip
            version = lance.dataset(place).version
            lance.LanceDataset.commit(place, lance.LanceOperation.Append(fragments), read_version=version)
            next_part(worker)
            yield parts[at]


def add_notes(index: NoteIndex, batches: Sequence[Sequence[Note]], workers: int) -> Iterator[Sequence[Note]]:
    """Adds notes that the index doesn't have."""
    folder = str(index.folder.absolute())

    def make() -> Callable[[Sequence[Note]], pa.Table]:
        import torch

        from drehr_utils.search.index import NoteIndex

        torch.set_num_threads(1)
        return NoteIndex.open(folder).rows_of

    yield from append_on_ray(index.table, make, batches, workers)
