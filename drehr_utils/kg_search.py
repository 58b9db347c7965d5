"""The search for KG entity retrieval's hyper-parameters, on the comb task's dev pairs, and its committed record.

    python -m drehr_utils.kg_search             # trains and scores the candidates that the record lacks
    python -m drehr_utils.kg_search --remake    # all of them again (five minutes)

Dev mentions are the mention of no training pair; no test mention is read. Notebook 12's own test of the comb has other
mentions. Notebook 12 shows data/kg_dev_search.csv.
"""

from __future__ import annotations

import argparse
import datetime
import platform
from dataclasses import replace

import pandas as pd

from drehr_utils import artifacts, encoders, evaluation, kg_systems, linking
from drehr_utils.kg_retrieval import PairConfig
from drehr_utils.profiles import ROOT, Profile, load_profile

RECORD = ROOT / "data/kg_dev_search.csv"
CHOICES = [  # learning rate, scale, mask_false_negatives; the first learning rate is the paper's
    (3e-5, 1.0, False),
    (3e-5, 20.0, False),
    (1e-4, 20.0, False),
    (3e-4, 20.0, False),
    (3e-4, 20.0, True),
]


def candidates(profile: Profile) -> list[PairConfig]:
    """The profile's training with each of CHOICES."""
    base = kg_systems.settings(profile).training
    return [replace(base, learning_rate=lr, scale=scale, mask_false_negatives=mask) for lr, scale, mask in CHOICES]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remake", action="store_true", help="forget the record and score every candidate again")
    parser.add_argument("--profile", default="open")
    options = parser.parse_args(arguments)
    profile = load_profile(options.profile)
    sizes = kg_systems.settings(profile)
    train, dev = kg_systems.tasks(profile)[kg_systems.COMB]
    own = linking.own_task(train, dev, sizes.own_mentions, sizes.own_concepts, profile.seed)
    record = pd.read_csv(RECORD) if RECORD.exists() and not options.remake else pd.DataFrame(columns=["config"])
    for config in [None, *candidates(profile)]:
        key = artifacts.digest(config)
        if key in set(record["config"]):
            continue
        folder = "start" if config is None else kg_systems.trained(profile, [train], config)[0]
        values = [kg_systems.recall(profile, own, model) for model in (folder, "start")]
        scores = evaluation.result_rows("", "", "", values[0], None if config is None else values[1], profile.seed)
        row = {"config": key, "learning rate": None, "scale": None, "false negatives masked": None}
        if config is not None:
            row |= {"learning rate": config.learning_rate, "scale": config.scale, "steps": config.max_steps,
                    "batch": config.batch_size, "false negatives masked": config.mask_false_negatives}  # fmt: skip
        for score in scores.round(4).itertuples():
            row |= {score.metric: score.ours, f"{score.metric} low": score.low, f"{score.metric} high": score.high,
                    f"{score.metric} p": score.p}  # fmt: skip
        row |= {"mentions": len(own.mentions), "date": datetime.date.today().isoformat(),
                "machine": f"{platform.machine()}, {encoders.describe_device()}"}  # fmt: skip
        record = pd.concat([record, pd.DataFrame([row])], ignore_index=True)
        record.to_csv(RECORD, index=False)
        print(row, flush=True)


if __name__ == "__main__":
    main()
