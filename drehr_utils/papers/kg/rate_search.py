"""The search for KG entity retrieval's hyper-parameters, on dev, and its committed record.

    python -m drehr_utils.papers.kg.rate_search             # trains and scores the candidates that the record lacks
    python -m drehr_utils.papers.kg.rate_search --remake    # all of them again (seven minutes)

Two tasks are trained: the comb, scored on those of its dev mentions that are the mention of no training pair; and
Figure 2's supervised task, on four fifths of its training notes, scored on the rest. No test mention is read.
Notebook 12 shows data/kg_dev_search.csv; its own test of the comb has other mentions.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from dataclasses import replace

import pandas as pd

from drehr_utils import artifacts
from drehr_utils.config import PairConfig
from drehr_utils.evaluation import intervals
from drehr_utils.papers.kg import linking, systems
from drehr_utils.papers.kg.tasks import Task
from drehr_utils.profiles import ROOT, Profile, load_profile
from drehr_utils.training import encoders

RECORD = ROOT / "data/kg_dev_search.csv"
KEYS = ["task", "config"]
CHOICES = {  # task -> learning rate, scale, mask_false_negatives; 3e-5 is the paper's rate
    systems.COMB: [
        (3e-5, 1.0, False),
        (1e-5, 20.0, False),
        (3e-5, 20.0, False),
        (1e-4, 20.0, False),
        (3e-4, 20.0, False),
        (3e-4, 20.0, True),
    ],
    systems.SUPERVISED: [(3e-5, 20.0, False), (1e-4, 20.0, False), (3e-4, 20.0, False), (1e-3, 20.0, False)],
}


def candidates(profile: Profile, task: str) -> list[PairConfig]:
    """The profile's training with each of a task's CHOICES."""
    base = profile.kg.training
    return [
        replace(base, learning_rate=lr, scale=scale, mask_false_negatives=mask) for lr, scale, mask in CHOICES[task]
    ]


def _train_and_dev(profile: Profile, task: str) -> tuple[Task, linking.TestSet]:
    if task == systems.SUPERVISED:
        return systems.supervised_dev(profile)
    (train, dev), sizes = systems.tasks(profile)[task], profile.kg
    return train, linking.own_task(train, dev, sizes.own_mentions, sizes.own_concepts, profile.seed)


def _row(profile: Profile, train: Task, dev: linking.TestSet, config: PairConfig | None) -> dict:
    """The candidate's fields and its recall on dev, with intervals, and p against the starting encoder (None)."""
    folder = "start" if config is None else systems.trained(profile, [train], config)[0]
    ours, start = (systems.recall(profile, dev, model) for model in (folder, "start"))
    row = {"learning rate": None, "scale": None, "false negatives masked": None}
    if config is not None:
        row |= {"learning rate": config.learning_rate, "scale": config.scale, "steps": config.max_steps,
                "batch": config.batch_size, "false negatives masked": config.mask_false_negatives}  # fmt: skip
    scores = intervals.result_rows("", "", "", ours, profile.resampling, None if config is None else start)
    for score in scores.round(4).itertuples():
        row |= {score.metric: score.ours, f"{score.metric} low": score.low, f"{score.metric} high": score.high,
                f"{score.metric} p": score.p}  # fmt: skip
    return row | {"mentions": len(dev.mentions)}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remake", action="store_true", help="forget the record and score every candidate again")
    parser.add_argument("--profile", default="open")
    options = parser.parse_args(arguments)
    profile = load_profile(options.profile)
    record = pd.read_csv(RECORD) if RECORD.exists() and not options.remake else pd.DataFrame(columns=KEYS)
    for task in CHOICES:
        train, dev = _train_and_dev(profile, task)
        for config in [None, *candidates(profile, task)]:
            key = {"task": task, "config": artifacts.digest(config)}
            if (record[KEYS] == pd.Series(key)).all(axis=1).any():
                continue
            row = key | _row(profile, train, dev, config)
            row |= {"date": datetime.date.today().isoformat(),
                    "machine": f"{platform.machine()}, {encoders.describe_device()}"}  # fmt: skip
            record = pd.concat([record, pd.DataFrame([row])], ignore_index=True)
            record.to_csv(RECORD, index=False)
            print(row, flush=True)


if __name__ == "__main__":
    main()
