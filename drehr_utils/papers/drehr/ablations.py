"""The paper's ablations: stage I's sources one by one, stage II's entity types alone (DR.EHR §5.3, Tables 5 and 6).

Their rows at a length that tells them apart are records: `python -m drehr_utils.papers.drehr.runs`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import scipy.optimize

from drehr_utils import pipeline
from drehr_utils.config import ALPHA, LAMBDA, Recipe, StageConfig
from drehr_utils.errors import DataError
from drehr_utils.profiles import Profile
from drehr_utils.training.positives import STAGE1_SOURCES, STAGE2_SOURCES

WITHOUT, EQUAL_STEPS, STAGE1_ONLY = "w/o stage I", "w/o stage I, equal steps", "Stage I only"
STAGE1_ROWS = ("+ String Match", "+ Abbreviation", "+ KG-Synonym", "+ KG-Hypernym", "+ KG-Related")
ALL_THREE = "Stage I + all three"
DEPARTED = "an epoch a stage"
DEPARTED_CLS = f"{DEPARTED}, [CLS]"


def shortened(profile: Profile, recipe: Recipe) -> Recipe:
    """The recipe with `profile.ablation_share` of its steps, and nothing else changed: the budget of every row."""
    n, share = len(pipeline.chunks(profile)), profile.ablation_share
    return recipe if share == 1 else recipe.each(lambda c: replace(c, max_steps=max(1, round(share * c.steps(n)))))


def _of_two_stages(profile: Profile) -> Recipe:
    for stage in ("stage1", "stage2"):
        if getattr(profile.published, stage) is None:
            said = "the ablations take its positives apart, and it is none; give it, or leave notebooks 09 and 10 out"
            raise DataError(f"profile {profile.name}, field published.{stage}: {said}")
    return profile.published


def stage1_ablation(profile: Profile) -> dict[str, Recipe]:
    """Table 5's ablation: no stage I, then one more source of its positives a row (STAGE1_ROWS); stage II is the same.

    EQUAL_STEPS is ours: without stage I for as many steps as the rows with it, so that the longer training isn't
    taken for what the first source brings."""
    plain = shortened(profile, _of_two_stages(profile))
    rows = {WITHOUT: replace(plain, stage1=None), EQUAL_STEPS: shortened(profile, profile.without_stage1())}
    for last, name in enumerate(STAGE1_ROWS, start=1):
        # All sources is None, as in the recipe itself, so that the last row shares its checkpoint.
        sources = STAGE1_SOURCES[:last] if last < len(STAGE1_SOURCES) else None
        rows[name] = replace(plain, stage1=replace(plain.stage1, sources=sources))
    return rows


def stage2_ablation(profile: Profile) -> dict[str, Recipe]:
    """Table 6's ablation: from the same stage I no stage II, it on one entity type alone, and on all three (last)."""
    plain = shortened(profile, _of_two_stages(profile))
    rows = {STAGE1_ONLY: replace(plain, stage2=None)} | {
        f"Stage I + {kind.capitalize()}": replace(plain, stage2=replace(plain.stage2, sources=(kind,)))
        for kind in STAGE2_SOURCES
    }
    return rows | {ALL_THREE: plain}


def departures(profile: Profile) -> dict[str, Recipe]:
    """The published recipe for an epoch a stage, as ours and with one thing changed: as the authors' code has it or,
    masked, as the improved recipe (notebook 05). Scored on dev alone; systems.profile_of pools DEPARTED_CLS."""
    ours = profile.published.each(lambda stage: replace(stage, epochs=1))
    return {
        DEPARTED: ours,
        DEPARTED_CLS: ours,
        f"{DEPARTED}, dropout 0.1": ours.each(lambda stage: replace(stage, dropout=0.1)),
        f"{DEPARTED}, masked": ours.each(lambda stage: replace(stage, mask_false_negatives=True)),
    }


def collapsed_loss(config: StageConfig) -> float:
    """The loss's least value where all similarities are one s: what an encoder pays that tells nothing apart.

    For a batch as the published recipe has it: one way, nothing masked. Every pair is then informative, so with the P
    positives and N negatives of a logarithm (an anchor's by the equations, the batch's by the authors' code) it is
    log(1 + P e^(-α(s-λ)))/α + log(1 + N e^(β(s-λ)))/β, least over s; the code's divided by the batch's size."""
    P, size = config.positives_per_chunk, config.batch_size
    N, divisor = P * (size - 1), 1
    if not config.per_anchor:
        P, N, divisor = size * P, size * N, size

    def loss(s: float) -> float:
        pull = np.logaddexp(0, np.log(P) - ALPHA * (s - LAMBDA)) / ALPHA
        return pull + np.logaddexp(0, np.log(N) + config.beta * (s - LAMBDA)) / config.beta

    return float(scipy.optimize.minimize_scalar(loss, bounds=(-1, 1), method="bounded").fun) / divisor


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with another seed for its batches and draws."""
    return recipe.each(lambda stage: replace(stage, seed=seed))


# --- scores ------------------------------------------------------------------------------------------------------


def gained(values: pd.DataFrame, start: pd.DataFrame) -> pd.DataFrame:
    """A metrics.of_group frame's values less another's of the same searches; the mean over trainings on either side."""
    ours, theirs = (f.groupby(["search_id", "query_id", "patient"])["value"].mean() for f in (values, start))
    return (ours - theirs).reset_index()
