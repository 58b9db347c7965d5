"""Entity matching against the plain trie: throughput and memory, each in a process of its own.

python tests/benchmarks/bench_matching.py [--write]     # --write: also figures/benchmarks/matching.json
"""

import argparse
import gc
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

REPEATS = 5


def measure(kind: str) -> dict:
    """Chunks a second (best of REPEATS passes over all open chunks) and MB that the structure itself takes."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the reference, which lies with the tests
    import reference_matching

    from drehr_utils import pipeline
    from drehr_utils.corpus import SPLITS
    from drehr_utils.matching import EntityMatcher
    from drehr_utils.profiles import load_profile

    profile = load_profile("open")
    terms = sorted(pipeline.knowledge_graph(profile).term2cui)
    pipeline.knowledge_graph.cache_clear()
    texts = [chunk.text for split in SPLITS for chunk in pipeline.chunks(profile, split)]
    gc.collect()
    before = psutil.Process().memory_info().rss
    if kind == "automaton":
        find = EntityMatcher(terms).find
    else:
        trie = reference_matching.build_trie(terms)
        find = lambda text: reference_matching.find(trie, text)  # noqa: E731
    memory = (psutil.Process().memory_info().rss - before) / 1e6
    best, matches = float("inf"), 0
    for _ in range(REPEATS):
        start = time.perf_counter()
        matches = sum(len(find(text)) for text in texts)
        best = min(best, time.perf_counter() - start)
    return {
        "terms": len(terms),
        "chunks": len(texts),
        "matches": matches,
        "chunks_per_s": len(texts) / best,
        "mb": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--measure", choices=["automaton", "trie"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure)))
        return
    found = {}
    for kind in ("automaton", "trie"):
        command = [sys.executable, __file__, "--measure", kind]
        found[kind] = json.loads(
            subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
        )
    assert found["automaton"]["matches"] == found["trie"]["matches"]
    result = {
        "match_terms": found["trie"]["terms"],
        "match_chunks": found["trie"]["chunks"],
        "match_chunks_per_s": round(found["automaton"]["chunks_per_s"]),
        "match_reference_chunks_per_s": round(found["trie"]["chunks_per_s"]),
        "match_speedup": round(found["automaton"]["chunks_per_s"] / found["trie"]["chunks_per_s"], 2),
        "match_mb": round(found["automaton"]["mb"], 1),
        "match_reference_mb": round(found["trie"]["mb"], 1),
        "match_memory_ratio": round(found["trie"]["mb"] / found["automaton"]["mb"], 2),
    }
    print(json.dumps(result, indent=1))
    if options.write:
        folder = Path(__file__).resolve().parents[2] / "figures/benchmarks"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "matching.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
