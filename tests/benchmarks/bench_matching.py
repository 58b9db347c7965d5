"""Entity matching against the plain trie: throughput and memory, each in a process of its own, turn by turn.

python tests/benchmarks/bench_matching.py [--write]     # --write: also figures/benchmarks/matching.json

Every repeat has each process go once over all open chunks, one after the other, so that other load on the machine
meets both; the speed-up is the median over repeats of the ratio within one. One thread each."""

import argparse
import datetime
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPEATS = 9
KINDS = ("batch", "single", "trie")  # find_all of all chunks, find of each chunk, the reference of each chunk


def worker(kind: str) -> None:
    """Builds its matcher, says how it matched and its MB, then goes over the chunks at each line that it is sent."""
    sys.path.insert(
        0, str(Path(__file__).resolve().parents[1] / "knowledge")
    )  # for the reference, which lies with the tests
    import reference_matching

    from drehr_utils import pipeline
    from drehr_utils.data.notes import SPLITS
    from drehr_utils.knowledge.matching import EntityMatcher
    from drehr_utils.profiles import load_profile

    profile = load_profile("open")
    terms = sorted(pipeline.knowledge_graph(profile).term2cui)
    pipeline.knowledge_graph.cache_clear()
    texts = [chunk.text for split in SPLITS for chunk in pipeline.chunks(profile, split)]
    gc.collect()
    before = psutil.Process().memory_info().rss
    if kind == "trie":
        trie = reference_matching.build_trie(terms)
        go = lambda: [reference_matching.find(trie, text) for text in texts]  # noqa: E731
    else:
        matcher = EntityMatcher(terms)
        go = (lambda: matcher.find_all(texts)) if kind == "batch" else (lambda: [matcher.find(text) for text in texts])
    built = psutil.Process().memory_info().rss
    matches = go()
    digest = hash(tuple((chunk, *match) for chunk, of_text in enumerate(matches) for match in of_text))
    count = sum(map(len, matches))
    del matches
    megabytes = (max(built, psutil.Process().memory_info().rss) - before) / 1e6  # with the buffers of a pass
    said = {"terms": len(terms), "chunks": len(texts), "matches": count, "digest": digest, "mb": megabytes}
    print(json.dumps(said), flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        go()
        print(json.dumps([time.perf_counter() - start, time.process_time() - cpu]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker)
        return

    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # so that the digests compare
    workers, said = {}, {}
    for kind in KINDS:
        command = [sys.executable, __file__, "--worker", kind]
        workers[kind] = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        said[kind] = json.loads(workers[kind].stdout.readline())
    assert len({said[kind]["digest"] for kind in KINDS}) == 1, said
    wall, cpu = {kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}
    for _ in range(REPEATS):
        for kind, process in workers.items():
            print("go", file=process.stdin, flush=True)
            seconds = json.loads(process.stdout.readline())
            wall[kind].append(seconds[0])
            cpu[kind].append(seconds[1])
    for process in workers.values():
        process.stdin.close()
        process.wait()

    def speedup(kind: str, seconds: dict[str, list[float]]) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds["trie"], seconds[kind], strict=True)), 2)

    chunks = said["trie"]["chunks"]
    result = {
        "match_terms": said["trie"]["terms"],
        "match_chunks": chunks,
        "match_matches": said["trie"]["matches"],
        "match_chunks_per_s": round(chunks / statistics.median(wall["batch"])),
        "match_single_chunks_per_s": round(chunks / statistics.median(wall["single"])),
        "match_reference_chunks_per_s": round(chunks / statistics.median(wall["trie"])),
        "match_speedup": speedup("batch", wall),
        "match_speedup_lowest": round(min(a / b for a, b in zip(wall["trie"], wall["batch"], strict=True)), 2),
        "match_cpu_speedup": speedup("batch", cpu),
        "match_single_speedup": speedup("single", wall),
        "match_mb": round(max(said["batch"]["mb"], said["single"]["mb"]), 1),
        "match_reference_mb": round(said["trie"]["mb"], 1),
        "match_memory_ratio": round(said["trie"]["mb"] / max(said["batch"]["mb"], said["single"]["mb"]), 2),
        "match_repeats": REPEATS,
        "match_load": round(os.getloadavg()[0], 1),
        "match_date": datetime.date.today().isoformat(),
        "match_machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps(result, indent=1))
    if options.write:
        folder = Path(__file__).resolve().parents[2] / "figures/benchmarks"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "matching.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
