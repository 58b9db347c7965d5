"""Entity matching against the plain trie: throughput and memory, each in a process of its own, turn by turn.

    python tests/benchmarks/bench_matching.py [--write]     # --write: also figures/benchmarks/matching.json
    python tests/benchmarks/bench_matching.py --terms 5000000 [--write]     # keys match_5m_*, merged into the same file

Every repeat has each process go once over all open chunks, one after the other, so that other load on the machine
meets both; the speed-up is the median over repeats of the ratio within one. One thread each.

With `--terms`, terms made of the graph's own words are added up to so many. Then the trie alone takes most of a
machine's memory, so that the processes live one after the other: their turns can't alternate, and other load may meet
one alone. The trie may take LIMIT bytes; where that isn't enough, the largest number of terms that fit is found and
said, and the speed-up and the matches are compared at that number (`match_5m_reference_terms`)."""

import argparse
import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "knowledge"))  # for the reference, with the tests
import reference_matching
from machine import about

REPEATS = 9
KINDS = ("batch", "single", "trie")  # find_all of all chunks, find of each chunk, the reference of each chunk
LARGE_REPEATS = 5
LIMIT = 8e9  # bytes that the trie may take beyond its process's own: half of a laptop's memory
PATH = Path(__file__).resolve().parents[2] / "figures/benchmarks/matching.json"


def terms_up_to(terms: Sequence[str], number: int, seed: int = 0) -> list[str]:
    """So many distinct terms: a random part of the given ones or, beyond them, all and new ones of their words.

    A new term has as many words as some given term, and each word is one that stands at that place in another: so
    beginnings are shared, which is what a trie's size hangs on."""
    rng = np.random.default_rng(seed)
    if number <= len(terms):
        return [terms[i] for i in rng.permutation(len(terms))[:number]]
    split = [term.split() for term in terms]
    lengths = np.array([len(words) for words in split])
    places = [np.array([words[k] for words in split if len(words) > k], object) for k in range(max(lengths))]
    made = dict.fromkeys(terms)
    for _ in range(1000):
        drawn = rng.choice(lengths, max(1000, (number - len(made)) * 5 // 4))
        for length in np.unique(drawn[drawn > 1]).tolist():
            count = int((drawn == length).sum())
            columns = [rng.choice(place, count).tolist() for place in places[:length]]
            made.update(dict.fromkeys(map(" ".join, zip(*columns, strict=True))))
        if len(made) >= number:
            kept = list(made)[len(terms) :]  # short ones come first: a random part of the new ones, not the first
            order = rng.permutation(len(kept))[: number - len(terms)]
            return [*terms, *(kept[i] for i in order)]
    raise ValueError(f"{number} terms: the words of {len(terms)} give no more than {len(made)}")


def trie_within(terms: Sequence[str], limit: float) -> tuple[reference_matching.TrieNode | None, int]:
    """The reference's trie and its number of terms; None where it takes more than `limit` bytes, and how many fit."""
    taken = 0

    def counted() -> Iterator[str]:
        nonlocal taken
        for term in terms:
            yield term
            taken += 1  # when the next is asked for: this one is in

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(psutil.Process().memory_info().vms + limit), before[1]))
    gc.disable()  # which would go over all nodes again and again
    try:
        return reference_matching.build_trie(counted()), taken
    except MemoryError:
        return None, taken
    finally:
        gc.enable()
        resource.setrlimit(resource.RLIMIT_AS, before)


def worker(kind: str, given: Path | None, number: int | None) -> None:
    """Builds its matcher, says how it matched and its MB, then goes over the chunks at each line that it is sent.

    `given`: a file of terms, a line each, of which the first `number` count; else they are the open graph's."""
    from drehr_utils import pipeline
    from drehr_utils.data.notes import SPLITS
    from drehr_utils.knowledge.matching import EntityMatcher
    from drehr_utils.profiles import load_profile

    profile = load_profile("open")
    if given:
        terms = given.read_text(encoding="utf-8").split("\n")[:number]
    else:
        terms = sorted(pipeline.knowledge_graph(profile).term2cui)
        pipeline.knowledge_graph.cache_clear()
    texts = [chunk.text for split in SPLITS for chunk in pipeline.chunks(profile, split)]
    gc.collect()
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    if kind == "trie":
        trie, fit = trie_within(terms, LIMIT)
        if trie is None:
            print(json.dumps({"fit": fit}), flush=True)
            return
        go = lambda: [reference_matching.find(trie, text) for text in texts]  # noqa: E731
    else:
        matcher = EntityMatcher(terms)
        go = (lambda: matcher.find_all(texts)) if kind == "batch" else (lambda: [matcher.find(text) for text in texts])
    build_s, built = time.perf_counter() - start, psutil.Process().memory_info().rss
    if given:
        gc.freeze()  # or the collector would go over the trie's nodes within a pass
    matches = go()
    digest = hash(tuple((chunk, *match) for chunk, of_text in enumerate(matches) for match in of_text))
    count = sum(map(len, matches))
    del matches
    megabytes = (max(built, psutil.Process().memory_info().rss) - before) / 1e6  # with the buffers of a pass
    said = {"terms": len(terms), "chunks": len(texts), "matches": count, "digest": digest, "mb": megabytes}
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(json.dumps(said | {"build_s": build_s, "peak_mb": peak_mb}), flush=True)
    for _ in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        go()
        print(json.dumps([time.perf_counter() - start, time.process_time() - cpu]), flush=True)


def start_worker(kind: str, *arguments: str) -> tuple[subprocess.Popen, dict]:
    """The process, and what it said when its matcher was built."""
    environment = {**os.environ, "PYTHONHASHSEED": "0"}  # so that the digests compare
    command = [sys.executable, __file__, "--worker", kind, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{kind}: the process ended early, for want of memory perhaps; see above")
    return process, json.loads(line)


def one_pass(process: subprocess.Popen) -> list[float]:
    """Wall and processor seconds."""
    print("go", file=process.stdin, flush=True)
    return json.loads(process.stdout.readline())


def end(process: subprocess.Popen) -> None:
    process.stdin.close()
    process.wait()


def passes_alone(kind: str, file: Path, number: int) -> tuple[dict, float]:
    """What a process said, and the median seconds of its passes, 0 for a trie that didn't fit."""
    process, said = start_worker(kind, "--file", str(file), "--number", str(number))
    seconds = 0.0 if "fit" in said else statistics.median(one_pass(process)[0] for _ in range(LARGE_REPEATS))
    end(process)
    print(f"{kind}, {number:,} terms: {said | {'pass_s': round(seconds, 3)}}", file=sys.stderr, flush=True)
    return said, seconds


def label(number: int) -> str:
    """5,000,000: 5m; 250,000: 250k."""
    return f"{number // 10**6}m" if number % 10**6 == 0 else f"{number // 1000}k"


def measure_large(number: int) -> dict[str, float | int | str]:
    """One process after the other, at so many terms."""
    from drehr_utils import pipeline
    from drehr_utils.profiles import load_profile

    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "terms.txt")
        real = sorted(pipeline.knowledge_graph(load_profile("open")).term2cui)
        file.write_text("\n".join(terms_up_to(real, number)), encoding="utf-8")
        pipeline.knowledge_graph.cache_clear()
        print(f"{number:,} terms, {len(real):,} of them real", file=sys.stderr, flush=True)
        trie, trie_s = passes_alone("trie", file, number)
        fit = number
        if "fit" in trie:
            fit = int(trie["fit"] * 0.97)  # room for the passes
            trie, trie_s = passes_alone("trie", file, fit)
        matcher, matcher_s = passes_alone("batch", file, number)
        same, same_s = (matcher, matcher_s) if fit == number else passes_alone("batch", file, fit)
    assert same["digest"] == trie["digest"], (same, trie)
    chunks = matcher["chunks"]
    found = {
        "terms": number,
        "real_terms": len(real),
        "chunks": chunks,
        "matches": matcher["matches"],
        "chunks_per_s": round(chunks / matcher_s),
        "build_s": round(matcher["build_s"], 1),
        "mb": round(matcher["mb"], 1),
        "peak_mb": round(matcher["peak_mb"]),  # of the whole process, building included
        "reference_terms": fit,
        "reference_fits": int(fit == number),
        "reference_limit_mb": round(LIMIT / 1e6),
        "reference_chunks_per_s": round(chunks / trie_s),
        "reference_build_s": round(trie["build_s"], 1),
        "reference_mb": round(trie["mb"], 1),
        "reference_peak_mb": round(trie["peak_mb"]),
        "speedup": round(trie_s / same_s, 2),  # at reference_terms
        "memory_ratio": round(trie["mb"] / same["mb"], 2),  # likewise
        "repeats": LARGE_REPEATS,
    }
    return {f"match_{label(number)}_{key}": value for key, value in found.items()} | about(f"match_{label(number)}_")


def measure() -> dict[str, float | int | str]:
    """All processes at once, turn by turn, with the open graph's terms."""
    workers, said = {}, {}
    for kind in KINDS:
        workers[kind], said[kind] = start_worker(kind)
    assert len({said[kind]["digest"] for kind in KINDS}) == 1, said
    wall, cpu = {kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}
    for _ in range(REPEATS):
        for kind, process in workers.items():
            seconds = one_pass(process)
            wall[kind].append(seconds[0])
            cpu[kind].append(seconds[1])
    for process in workers.values():
        end(process)

    def speedup(kind: str, seconds: dict[str, list[float]]) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds["trie"], seconds[kind], strict=True)), 2)

    chunks = said["trie"]["chunks"]
    return {
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
    } | about("match_")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terms", type=int, help="so many, made of the open graph's words where it has fewer")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.file, options.number)
        return

    result = measure_large(options.terms) if options.terms else measure()
    print(json.dumps(result, indent=1))
    if options.write:
        PATH.parent.mkdir(parents=True, exist_ok=True)
        kept = json.loads(PATH.read_text()) if PATH.exists() else {}  # another number's
        PATH.write_text(json.dumps(kept | result, indent=1) + "\n")


if __name__ == "__main__":
    main()
