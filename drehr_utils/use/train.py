"""Trains a profile's DR.EHR with several processes, each with batches of its own (§4.2), for the notebooks to read.

    torchrun --nproc-per-node 8 -m drehr_utils.use.train --profile mine.toml

`processes = 8` must stand in the profile: a model is another with each number. Run notebooks 01 to 04 before: what the
processes read, one process makes. A training that was cut off goes on from its last checkpoint.
"""

from __future__ import annotations

import argparse

from drehr_utils import pipeline
from drehr_utils.config import Recipe
from drehr_utils.evaluation import records
from drehr_utils.papers.drehr import ablations
from drehr_utils.profiles import Profile
from drehr_utils.training import trainer


def rows(profile: Profile) -> dict[str, Recipe]:
    """What notebooks 05, 09 and 10 train; of a short profile's ablations, each is one of the systems."""
    found = {system: pipeline.recipe_of(profile, system) for system in pipeline.systems(profile)}
    if not profile.short:
        found |= ablations.stage1_ablation(profile) | ablations.stage2_ablation(profile)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="a name, or the path of a .toml file; default: DREHR_PROFILE")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="default: all that the profile's notebooks train")
    options, profile = records.parse(parser, arguments)
    known = rows(profile)
    records.refuse_unknown(parser, "row", options.only, known)
    for row in options.only or known:
        folder, _ = pipeline.train_recipe(profile, known[row])
        if trainer.ranks()[0] == 0:
            print(f"{row}: {folder}", flush=True)


if __name__ == "__main__":
    main()
