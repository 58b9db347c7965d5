"""The search for KG entity retrieval's hyper-parameters, on dev, and its committed record.

    python -m drehr_utils.papers.kg.rate_search                     # the candidates that the record lacks
    python -m drehr_utils.papers.kg.rate_search --remake            # all of them again, in their place (seven minutes)
    python -m drehr_utils.papers.kg.rate_search --remake --only Supervised

Two tasks are trained: the comb, scored on those of its dev mentions that are the mention of no training pair; and
Figure 2's supervised task, on four fifths of its training notes, scored on the rest. No test mention is read.
Notebook 12 shows data/kg_dev_search.csv; its own test of the comb has other mentions.
"""

from __future__ import annotations

from dataclasses import replace

import pandas as pd

from drehr_utils import artifacts
from drehr_utils.config import PairConfig
from drehr_utils.evaluation import intervals, records
from drehr_utils.evaluation.records import Record
from drehr_utils.papers.kg import linking, systems
from drehr_utils.papers.kg.tasks import Task
from drehr_utils.profiles import Profile

RECORD = Record("kg_dev_search.csv")
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


def candidates(profile: Profile, task: str) -> list[PairConfig | None]:
    """The profile's training with each of a task's CHOICES, after None: the starting encoder."""
    base = profile.kg.training
    return [None] + [
        replace(base, learning_rate=lr, scale=scale, mask_false_negatives=mask) for lr, scale, mask in CHOICES[task]
    ]


def _scores(profile: Profile, train: Task, dev: linking.TestSet, config: PairConfig | None) -> pd.DataFrame:
    """One row: the candidate's fields and its recall on dev, with intervals, and p against the starting encoder."""
    row: dict[str, object] = {"learning rate": None, "scale": None, "false negatives masked": None}
    start = systems.recall(profile, dev, "start")
    ours, base = start, None
    if config is not None:
        ours, base = systems.recall(profile, dev, systems.trained(profile, [train], config)[0]), start
        row = {"learning rate": config.learning_rate, "scale": config.scale, "steps": config.max_steps,
               "batch": config.batch_size, "false negatives masked": config.mask_false_negatives}  # fmt: skip
    for score in intervals.result_rows("", "", "", ours, profile.resampling, base).round(4).itertuples():
        row |= {score.metric: score.ours, f"{score.metric} low": score.low, f"{score.metric} high": score.high,
                f"{score.metric} p": score.p}  # fmt: skip
    return pd.DataFrame([row | {"mentions": len(dev.mentions)}], dtype=object)  # Record would round 3e-5 to 0


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__, "open", ["--remake"])
    parser.add_argument("--only", choices=CHOICES, help="the candidates of this task")
    options, profile = records.parse(parser, arguments)
    for task in [options.only] if options.only else CHOICES:
        if task == systems.SUPERVISED:
            train, dev = systems.supervised_dev(profile)
        else:
            train, dev = systems.tasks(profile)[task][0], systems.own_dev(profile, task)
        for config in candidates(profile, task):
            key = {"task": task, "config": artifacts.digest(config)}
            RECORD.add(profile, key, lambda t=train, d=dev, c=config: _scores(profile, t, d, c), options.remake)


if __name__ == "__main__":
    main()
