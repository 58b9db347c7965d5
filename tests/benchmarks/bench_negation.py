"""Own negation rules against negspacy: accuracy on the hand-labelled mentions, and on judged report sentences.

    python tests/benchmarks/bench_negation.py [--write]

The second takes each (sentence, finding) that was judged by reading and that the lexicon finds in the sentence, and
asks whether the finding is denied there. p is McNemar's exact test of the two. `--write` puts the numbers into
figures/benchmarks/negation.json."""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/knowledge"))

from machine import about  # noqa: E402
from scipy.stats import binomtest  # noqa: E402
from test_negation import accuracy, negspacy_predictions, own, sample  # noqa: E402

from drehr_utils.papers.radiology.lexicon import FindingMatcher, read_lexicon  # noqa: E402
from drehr_utils.papers.radiology.reports import OPEN_CXR, read_collection, read_judgments  # noqa: E402

LEXICON_NAME = {  # judged query -> lexicon
    "lung nodule": "pulmonary nodule",
    "enlarged heart": "cardiomegaly",
    "pulmonary vascular congestion": "vascular congestion",
    "hyperinflated lungs": "hyperinflation",
    "free air under the diaphragm": "pneumoperitoneum",
    "lung cavity": "cavitary lesion",
    "chest drain": "chest tube",
}


def judged_mentions() -> list[dict[str, str]]:
    matcher = FindingMatcher(read_lexicon())
    collections = [read_collection(OPEN_CXR / f"collection_{c}.jsonl.gz") for c in "ab"]
    said = {f"{r.uid}#{k}": s for c in collections for r in c for k, s in enumerate(r.sentences)}
    rows = []
    for query, ids in read_judgments()[1].items():
        name = query.removeprefix("no ")
        for i in ids:
            for mention in matcher.find(said[i]):
                if mention.finding == LEXICON_NAME.get(name, name):
                    text = said[i][mention.start : mention.end]
                    rows.append({"sentence": said[i], "mention": text, "denied": str(int(query.startswith("no ")))})
                    break
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true")
    result: dict[str, float | int | str] = {"negspacy_version": version("negspacy")}
    for name, rows in (("sample", sample()), ("judged", judged_mentions())):
        ours, theirs = [own(row) for row in rows], negspacy_predictions(rows)
        differ = [(a == (row["denied"] == "1")) for a, b, row in zip(ours, theirs, rows, strict=True) if a != b]
        result[f"{name}_mentions"] = len(rows)
        result[f"{name}_own_accuracy"] = round(accuracy(ours, rows), 4)
        result[f"{name}_negspacy_accuracy"] = round(accuracy(theirs, rows), 4)
        result[f"{name}_mcnemar_p"] = round(binomtest(sum(differ), len(differ)).pvalue, 6) if differ else 1.0
    result |= about("negation_")
    print(json.dumps(result, indent=1))
    if parser.parse_args().write:
        path = ROOT / "figures/benchmarks/negation.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
