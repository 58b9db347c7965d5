"""The trained rows of DR.EHR's tables at the length that can judge a claim (profile `full`), one at a time.

    python -m drehr_utils.papers.drehr.runs                       # all that the records lack: half a day on two cores
    python -m drehr_utils.papers.drehr.runs --only DR.EHR --seeds 0 1 2

A training that was cut off goes on from its last checkpoint. On two cores, two of them at once with one thread each
(OMP_NUM_THREADS=1) take two thirds of the time.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import replace
from pathlib import Path

from sentence_transformers import SentenceTransformer

from drehr_utils import pipeline
from drehr_utils.config import Recipe, StageConfig
from drehr_utils.evaluation import metrics
from drehr_utils.papers.drehr import ablations
from drehr_utils.pipeline import IMPROVED, PUBLISHED, WITHOUT_STAGE1
from drehr_utils.profiles import Profile, load_profile

EQUATIONS, SHORTER = "DR.EHR (equations)", "DR.EHR w/o stage I, stage II's steps"
CURVE_STEPS = 51  # dev is scored once an epoch of the open notes


def by_equations(recipe: Recipe) -> Recipe:
    """The recipe with the loss of equations 1-3 instead of the authors' code's."""

    def stage(config: StageConfig | None) -> StageConfig | None:
        return config and replace(config, per_anchor=True)

    return replace(recipe, stage1=stage(recipe.stage1), stage2=stage(recipe.stage2))


def rows(profile: Profile) -> dict[str, Recipe]:
    """Every trained row: Table 4's, then the ablations of Tables 5 and 6 at their share of the steps."""
    table4 = {
        PUBLISHED: profile.published,
        WITHOUT_STAGE1: profile.without_stage1(),
        SHORTER: replace(profile.published, stage1=None),
        EQUATIONS: by_equations(profile.published),
        IMPROVED: profile.improved,
    }
    return table4 | ablations.stage1_ablation(profile) | ablations.stage2_ablation(profile)


def slug(row: str, seed: int) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', row.lower()).strip('-')}-seed{seed}"


def dev_means(profile: Profile, encoder: SentenceTransformer) -> dict[str, float]:
    """Table 4's six metrics on dev, computed in bfloat16: for curves, not for tables."""
    bench = pipeline.benchmark(profile, "dev")
    scores = pipeline.dense(encoder, bench, bf16=True)
    found = {"single": metrics.single_patient(bench, scores), "multi": metrics.multi_patient(bench, scores)}
    means = {f"{setting} {k}": v for setting, values in found.items() for k, v in metrics.means(values).items()}
    return {name: round(float(value), 3) for name, value in means.items() if metrics.AVERAGE not in name}


def train(profile: Profile, row: str, seed: int = 0) -> Path:
    """The row's model folder, trained where it isn't there; `data/cache/<profile>/models/<slug>` is a link to it."""
    measured = CURVE_STEPS, lambda encoder: dev_means(profile, encoder)
    folder, _ = pipeline.train_recipe(profile, ablations.with_seed(rows(profile)[row], seed), measured)
    pipeline.link(profile.cache / "models" / slug(row, seed), folder)
    return folder


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="ROW", help="these rows")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--profile", default="full")
    options = parser.parse_args(arguments)
    profile = load_profile(options.profile)
    known = rows(profile)
    if unknown := [row for row in options.only or () if row not in known]:
        parser.error(f"no row {unknown[0]!r}; there are {', '.join(known)}")
    for row in options.only or known:
        for seed in options.seeds:
            print(f"{row}, seed {seed}", flush=True)
            train(profile, row, seed)


if __name__ == "__main__":
    main()
