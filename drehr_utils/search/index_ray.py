"""An index's rows made by several processes of Ray, of this machine or, where DREHR_RAY_ADDRESS names one, of a cluster
that sees the index's folder: then the notes' text goes to its machines.

A worker writes its rows to the table's folder; they are in the table once this process has committed them, a part at a
time. So a worker that dies is replaced and does its part again, and no part is there half or twice.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

import pyarrow as pa

from drehr_utils.data.notes import Note
from drehr_utils.errors import DataError

if TYPE_CHECKING:
    from lancedb.table import Table

    from drehr_utils.search.index import NoteIndex

T = TypeVar("T")
ADDRESS = "DREHR_RAY_ADDRESS"
ATTEMPTS = 3  # at a part, where workers die


@contextmanager
def _cluster(workers: int) -> Iterator[None]:
    """Ray, closed to other users and machines: its sockets are loopback's, its files in a folder of mode 0700. Only
    where ADDRESS is set is it the cluster of that address, whose machines get the notes' text: RAY_ADDRESS, which may
    have been set for other work, counts for nothing."""
    address = os.environ.get(ADDRESS)
    if not address:  # its name notwithstanding it counts on Linux, too: no address but loopback's
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it tells its makers
    try:
        import lance  # noqa: F401
        import ray
    except ImportError:
        raise DataError("--workers needs Ray and Lance: pip install 'drehr_utils[scale]'") from None
    with tempfile.TemporaryDirectory(prefix="drehr_", ignore_cleanup_errors=True) as folder:
        own = dict(num_cpus=workers, include_dashboard=False, object_store_memory=256 * 2**20, _temp_dir=folder)
        try:
            ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **({} if address else own))
        except Exception as error:  # of many kinds, a plain one where the machine is too busy to answer in time
            where = f"{ADDRESS} ({address})" if address else "this machine"
            raise DataError(f"Ray did not start on {where} ({type(error).__name__}); run this again, or without "
                            "--workers") from None  # fmt: skip
        try:
            if not address and ray.util.get_node_ip_address() != "127.0.0.1":
                raise DataError("Ray was imported before this, and listens to the network: use a new Python process")
            yield
        finally:
            ray.shutdown()


def append_on_ray(
    table: Table, make: Callable[[], Callable[[T], pa.Table]], parts: Sequence[T], workers: int
) -> Iterator[T]:
    """Appends the rows of all parts and yields each part once it is in the table, in the order in which they are done.

    make: called once in each worker, gives the function from a part to its rows. Raises DataError for a part that
    raises, or whose worker died ATTEMPTS times."""
    with _cluster(workers):
        import lance
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
