"""A fuzz of the parsers and readers: 100,000 answers and 5,000 damaged files; none may raise but a named error.

python tests/long/fuzz_parsers.py            # a few minutes on one core; the last result lies beside it, in JSON
"""

from __future__ import annotations

import argparse
import csv
import datetime
import gzip
import importlib
import json
import os
import platform
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from drehr_utils import files
from drehr_utils.errors import DataError
from drehr_utils.llm.prompts import parse_abbreviations, parse_entities
from drehr_utils.papers.cliniq.curation import parse_drug_name
from drehr_utils.papers.cliniq.judging import LABELS, parse_judgments

sys.path.insert(0, str(Path(__file__).parents[1]))
readers = importlib.import_module("test_bad_input")

RESULT = Path(__file__).with_suffix(".json")
RECORDED = Path(__file__).parents[2] / "data/llm_answers/train.jsonl.gz"
PIECES = [*"### ** - * • 1. NA none ( ) [ ] <think> </think> : | implied string 1|x| é 😀 İ `".split()]
PIECES += ["\n", "\r", "\x0b", "\u2028", "\t", "\0"]
PIECES += [" ", "\n", "- gout", "###ct\n**computed tomography", "1 | because | synonym", *LABELS]


def answers(rng: random.Random, n: int) -> Iterator[str]:
    """Recorded ones with random edits, formats' marks in any order, and any characters; one in 500 is long."""
    with gzip.open(RECORDED, "rt", encoding="utf-8") as file:
        recorded = [json.loads(line)["answer"] for line in file]
    for i in range(n):
        if i % 3 == 0:
            text = list(rng.choice(recorded))
            for _ in range(rng.randrange(1, 6)):
                text.insert(rng.randrange(len(text) + 1), rng.choice(PIECES))
                del text[(at := rng.randrange(len(text))) : at + rng.randrange(4)]
        else:
            text = rng.choices(PIECES, k=rng.randrange(30))
            text += [chr(rng.randrange(0x110000)) for _ in range(rng.randrange(8))] if i % 3 == 1 else []
        yield "".join(text) * (rng.randrange(200, 2000) if i % 500 == 0 else 1)


def checked(answer: str) -> None:
    """All parsers on an answer: they raise nothing of their own, and every term is a piece of a line."""
    lines = [" ".join(line.lower().split()) for line in answer.splitlines()]
    for term in parse_entities(answer)[0]:
        assert any(term in line for line in lines), "a term that was made up"
    for pair in parse_abbreviations(answer)[0]:
        assert all(any(half in line for line in lines) for half in pair), "an abbreviation that was made up"
    labels, _ = parse_judgments(answer, 5)
    assert set(labels) <= set(range(1, 6)) and set(labels.values()) <= set(LABELS)
    try:
        parse_drug_name("aspirin ec 81mg tablet", answer)
    except ValueError:
        pass


def damaged(rng: random.Random, data: bytes) -> bytes:
    text = bytearray(data)
    for _ in range(rng.randrange(1, 5)):
        at, kind = rng.randrange(len(text) + 1), rng.randrange(5)
        if kind == 0:
            text[at:at] = rng.randbytes(rng.randrange(1, 5))
        elif kind == 1:
            del text[at : at + rng.randrange(1, 20)]
        elif kind == 2:
            text[at:at] = rng.choice([b'"', b"\t", b",", b"\n", b"\0", b"{", b"[", b"]", b"null", b"\\ud800", b"1e999"])
        elif kind == 3:
            text[at:at] = text[(start := rng.randrange(len(text) + 1)) : start + rng.randrange(1, 60)]
        else:
            text[at : at + 1] = rng.randbytes(1)
    return bytes(text)


def read_damaged(rng: random.Random, folder: Path, n: int, count: Counter[str]) -> Iterator[Callable[[], None]]:
    """Calls that read one damaged file each; what came of it goes into `count`."""
    for reader in readers.READERS.values():
        reader.write(made := Path(tempfile.mkdtemp(dir=folder)))
        for name in reader.files:
            path, each = made / name, n // len(readers.CASES) + 1
            good = readers.content(path)
            for _ in range(each):
                packed = path.suffix == ".gz" and rng.random() < 0.3

                def call(path=path, good=good, packed=packed, reader=reader, made=made) -> None:
                    if packed:
                        path.write_bytes(damaged(rng, gzip.compress(good)))
                    else:
                        readers.put(path, damaged(rng, good))
                    try:
                        reader.read(made)
                        count["read"] += 1
                    except DataError as error:
                        assert len(str(error)) < 2000
                        count["named"] += 1

                yield call
            readers.put(path, good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=100_000)
    parser.add_argument("--files", type=int, default=5_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    csv.field_size_limit(files.MAX_FIELD)
    rng, count, failures, slowest = random.Random(given.seed), Counter(), Counter(), Counter()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        sys.stderr, told = nowhere, sys.stderr  # progress bars
        calls = ((("answers"), lambda a=a: checked(a)) for a in answers(rng, given.answers))
        files_ = (("files", call) for call in read_damaged(rng, Path(folder), given.files, count))
        for kind, call in (item for part in (calls, files_) for item in part):
            began = time.perf_counter()
            try:
                call()
            except Exception:
                failures["".join(traceback.format_exc().splitlines(keepends=True)[-3:])] += 1
            count[kind] += 1
            slowest[kind] = max(slowest[kind], time.perf_counter() - began)
        sys.stderr = told
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "command": "python tests/long/fuzz_parsers.py",
        "seed": given.seed,
        "answers": count["answers"],
        "files": count["files"],
        "files named as bad": count["named"],
        "files read": count["read"],
        "failures": dict(failures),
        "slowest, s": {kind: round(seconds, 3) for kind, seconds in slowest.items()},
    }
    print(json.dumps(result, indent=1))
    if not failures and (given.answers, given.files) == (100_000, 5_000):
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
    return bool(failures)


if __name__ == "__main__":
    raise SystemExit(main())
