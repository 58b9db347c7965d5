"""Work in parts on several processes of Ray, of this machine or, where DREHR_RAY_ADDRESS names one, of a cluster that
sees the same folders: then the notes' text goes to its machines. An extra of the package (`scale`)."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from drehr_utils.errors import DataError

ADDRESS = "DREHR_RAY_ADDRESS"
ATTEMPTS = 3  # at a part, where workers die


@contextmanager
def cluster(workers: int) -> Iterator[None]:
    """Ray, closed to other users and machines: its sockets are loopback's, its files in a folder of mode 0700. Only
    where ADDRESS is set is it the cluster of that address, whose machines get the notes' text: RAY_ADDRESS, which may
    have been set for other work, counts for nothing."""
    address = os.environ.get(ADDRESS)
    if not address:  # its name notwithstanding it counts on Linux, too: no address but loopback's
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else it tells its makers
    try:
        import ray
    except ImportError:
        raise DataError("several workers need Ray: pip install 'drehr_utils[scale]'") from None
    with tempfile.TemporaryDirectory(prefix="drehr_", ignore_cleanup_errors=True) as folder:
        own = dict(num_cpus=workers, include_dashboard=False, object_store_memory=256 * 2**20, _temp_dir=folder)
        try:
            ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **({} if address else own))
        except Exception as error:  # of many kinds, a plain one where the machine is too busy to answer in time
            where = f"{ADDRESS} ({address})" if address else "this machine"
            raise DataError(f"Ray did not start on {where} ({type(error).__name__}); run this again, or with one "
                            "worker") from None  # fmt: skip
        try:
            if not address and ray.util.get_node_ip_address() != "127.0.0.1":
                raise DataError("Ray was imported before this, and listens to the network: use a new Python process")
            yield
        finally:
            ray.shutdown()


def each(make: Callable[[], Callable[[int], None]], parts: Sequence[int], workers: int, doing: str) -> Iterator[int]:
    """Does each part, a number, once, and yields it when it is done: one worker in this process and in turn, several as
    processes of Ray Data, of which one that dies is replaced, and its part done again.

    make: called once in each worker, gives the function that does a part. Ray's raises DataError for what a part
    raises, or where the workers of a part died ATTEMPTS times."""
    if (workers := min(workers, len(parts))) < 2:
        work = make() if parts else None
        for part in parts:
            work(part)
            yield part
        return

    class Worker:
        def __init__(self) -> None:
            self.work = None

        def __call__(self, row: dict[str, int]) -> dict[str, int | str]:
            try:
                self.work = self.work or make()
                self.work(int(row["part"]))
            except Exception as error:  # of an error Ray Data tells no more than that there was one
                return row | {"failed": str(error) if isinstance(error, DataError) else type(error).__name__}
            return row | {"failed": ""}

    def failed(why: str) -> DataError:
        return DataError(f"{doing} on Ray: {why}; run this again: it goes on; with one worker the error says more")

    with cluster(workers):
        import ray

        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = ray.data.from_items([{"part": part} for part in parts], override_num_blocks=len(parts))
        pool = ray.data.ActorPoolStrategy(size=workers)
        again = {"max_restarts": ATTEMPTS - 1, "max_task_retries": ATTEMPTS - 1}
        try:
            for row in rows.map(Worker, compute=pool, num_cpus=1, **again).iter_rows():
                if row["failed"]:
                    raise failed(row["failed"])
                yield row["part"]
        except ray.exceptions.RayError as error:  # one that dies again and again, such as for want of memory
            raise failed(f"a worker died, {type(error).__name__}") from None
