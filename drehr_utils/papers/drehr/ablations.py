"""The paper's ablations, and each departure from its recipe alone (DR.EHR §5.3, Tables 5 and 6).

    python -m drehr_utils.papers.drehr.ablations --seeds 3    # Table 5's with three seeds: data/ablation_seeds.csv
    python -m drehr_utils.papers.drehr.ablations --changes    # each change alone, on dev: data/recipe_changes.csv

Both records are committed, grow by a row set at a time, and go on where they were cut off; `--remake` makes all of it
again. Notebooks 05 and 09 show them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import scipy.optimize

from drehr_utils import artifacts, pipeline
from drehr_utils.config import Recipe, Resampling, StageConfig
from drehr_utils.data.benchmark import MATCH_TYPES, Benchmark
from drehr_utils.evaluation import intervals, metrics
from drehr_utils.evaluation.records import Record
from drehr_utils.profiles import Profile, load_profile
from drehr_utils.training.positives import STAGE1_SOURCES, STAGE2_SOURCES

SEEDS, CHANGES = Record("ablation_seeds.csv", ("seed", "system")), Record("recipe_changes.csv", ("system",))
WITHOUT, CONTROL = "w/o stage I", "w/o stage I, as many steps in all"
STAGE1_ROWS = ("+ String Match", "+ Abbreviation", "+ KG-Synonym", "+ KG-Hypernym", "+ KG-Related")
PLAIN, TOGETHER = "plain recipe", "all together"


def shortened(profile: Profile, recipe: Recipe) -> Recipe:
    """The recipe with `profile.ablation_share` of its steps, and nothing else changed: the budget of every row."""
    n = len(pipeline.chunks(profile))

    def cut(config: StageConfig | None) -> StageConfig | None:
        if config is None or profile.ablation_share == 1:
            return config
        steps = max(1, n // config.batch_size) * config.epochs
        steps = min(steps, config.max_steps) if config.max_steps else steps
        return replace(config, max_steps=max(1, round(profile.ablation_share * steps)))

    return replace(recipe, stage1=cut(recipe.stage1), stage2=cut(recipe.stage2))


def stage1_ablation(profile: Profile) -> dict[str, Recipe]:
    """Table 5's ablation: stage I without, then with one more source of positives a row; stage II is the same."""
    plain = shortened(profile, profile.published)
    rows = {WITHOUT: replace(plain, stage1=None)}
    for last, name in enumerate(STAGE1_ROWS, start=1):
        # All sources is None, as in the recipe itself, so that the last row shares its checkpoint.
        sources = STAGE1_SOURCES[:last] if last < len(STAGE1_SOURCES) else None
        rows[name] = replace(plain, stage1=replace(plain.stage1, sources=sources))
    return rows


def control(profile: Profile) -> Recipe:
    """Stage II alone for the steps of both stages: what the ablation's other rows owe to training longer."""
    return replace(profile, published=shortened(profile, profile.published)).without_stage1()


def stage2_ablation(profile: Profile) -> dict[str, Recipe]:
    """Table 6's ablation: from the same stage I, stage II on one entity type alone, and on all of them (last)."""
    plain = shortened(profile, profile.published)
    rows = {
        f"Stage I + {kind.capitalize()}": replace(plain, stage2=replace(plain.stage2, sources=(kind,)))
        for kind in STAGE2_SOURCES
    }
    return rows | {"Stage I + all three": plain}


def collapsed_loss(config: StageConfig) -> float:
    """Equation 3's least value where all similarities are one s: what an encoder pays that tells nothing apart.

    For a batch as the published recipe has it: one way, nothing masked. Every pair is then informative, so with P and N
    of an anchor's positives and negatives it is log(1 + P e^(-α(s-λ)))/α + log(1 + N e^(β(s-λ)))/β, least over s."""
    P, N = config.positives_per_chunk, config.positives_per_chunk * (config.batch_size - 1)

    def loss(s: float) -> float:
        pull = np.logaddexp(0, np.log(P) - config.alpha * (s - config.lam)) / config.alpha
        return pull + np.logaddexp(0, np.log(N) + config.beta * (s - config.lam)) / config.beta

    return float(scipy.optimize.minimize_scalar(loss, bounds=(-1, 1), method="bounded").fun)


def with_seed(recipe: Recipe, seed: int) -> Recipe:
    """The recipe with another seed for its batches and draws."""
    first, second = (c if c is None else replace(c, seed=seed) for c in (recipe.stage1, recipe.stage2))
    return replace(recipe, stage1=first, stage2=second)


# --- each change of the recipe alone -----------------------------------------------------------------------------


def _both(change: Callable[[StageConfig], StageConfig]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: replace(recipe, stage1=change(recipe.stage1), stage2=change(recipe.stage2))


def _draw_less(recipe: Recipe) -> Recipe:
    weights = (("hypernym", 0.5), ("related", 0.25))
    return replace(recipe, stage1=replace(recipe.stage1, draw_weights=weights))


def _doubled(config: StageConfig) -> StageConfig:
    steps = config.max_steps and max(1, config.max_steps // 2)  # about as many chunks are seen
    return replace(config, batch_size=2 * config.batch_size, max_steps=steps, recompute=True)


_CHANGES: dict[str, Callable[[Recipe], Recipe]] = {
    "contrast both ways": _both(lambda c: replace(c, both_ways=True)),
    "false negatives masked": _both(lambda c: replace(c, mask_false_negatives=True)),
    "hypernyms drawn 1/2, related 1/4 as often": _draw_less,
    "8 hard negatives from the graph": _both(lambda c: replace(c, hard_negatives=8)),
    "twice the positives a chunk": _both(lambda c: replace(c, positives_per_chunk=2 * c.positives_per_chunk)),
    "temperature: beta 20 for 50": _both(lambda c: replace(c, beta=20.0)),
    "twice the batch, half the steps, recomputed": _both(_doubled),
    "half of the entities as questions": _both(lambda c: replace(c, templates=0.5)),
}


def recipe_changes(profile: Profile) -> dict[str, Recipe]:
    """The plain (published) recipe, each change of it alone, and all of them together; all at the ablations' budget."""
    plain = shortened(profile, profile.published)
    together = plain
    for change in _CHANGES.values():
        together = change(together)
    return {PLAIN: plain} | {name: change(plain) for name, change in _CHANGES.items()} | {TOGETHER: together}


# --- scores ------------------------------------------------------------------------------------------------------


def _average(values: pd.DataFrame, match_type: str) -> pd.DataFrame:
    wanted = (values["match_type"] == match_type) & (values["metric"] == metrics.AVERAGE)
    return values[wanted].drop(columns=["setting", "match_type"])


def match_type_rows(
    name: str, values: pd.DataFrame, resampling: Resampling, start: pd.DataFrame | None = None
) -> pd.DataFrame:
    """Table 5's cells of one system from its metrics.per_search: the Average of MRR, NDCG and MAP by match type, as
    intervals.result_rows."""
    rows = []
    for kind in MATCH_TYPES:
        if not (ours := _average(values, kind)).empty:
            base = None if start is None else _average(start, kind)
            rows.append(intervals.result_rows(name, "single", kind, ours, resampling, base))
    return pd.concat(rows, ignore_index=True)


def match_type_gains(name: str, values: pd.DataFrame, start: pd.DataFrame, resampling: Resampling) -> pd.DataFrame:
    """What a system gains on another by match type, with paired intervals and p, as intervals.gain_rows."""
    pairs = {kind: (_average(values, kind), _average(start, kind)) for kind in MATCH_TYPES}
    rows = [intervals.gain_rows(name, "single", k, *pair, resampling) for k, pair in pairs.items() if len(pair[0])]
    return pd.concat(rows, ignore_index=True)


def change_rows(bench: Benchmark, scores: np.ndarray, plain: np.ndarray, resampling: Resampling) -> pd.DataFrame:
    """Single-Patient MAP and Multi-Patient R@100 of a changed recipe, and its gain on the plain one, with intervals."""
    rows = []
    for setting, metric, measure in (
        ("single", "MAP", metrics.single_patient),
        ("multi", "R@100", metrics.multi_patient),
    ):
        values, base = (frame[frame["metric"] == metric] for frame in (measure(bench, scores), measure(bench, plain)))
        gain = intervals.gain_rows("", setting, "all", values, base, resampling).assign(gain=lambda row: row["ours"])
        rows.append(gain.assign(ours=values["value"].mean()))
    return pd.concat(rows, ignore_index=True)[["setting", "metric", "ours", "gain", "low", "high", "p"]]


# --- the committed records ---------------------------------------------------------------------------------------


def run_seeds(profile: Profile, seeds: int, remake: bool = False) -> None:
    """Table 5's ablation and its control on test for each seed, into the record."""
    bench, recipes = pipeline.benchmark(profile, "test"), stage1_ablation(profile) | {CONTROL: control(profile)}
    for seed in range(seeds):
        for name, recipe in recipes.items():
            recipe = with_seed(recipe, seed)

            def make(name: str = name, recipe: Recipe = recipe) -> pd.DataFrame:
                scores = pipeline.model_scores(profile, pipeline.train_recipe(profile, recipe)[0], bf16=True)
                values = metrics.per_search(bench, scores)
                return match_type_rows(name, values, profile.resampling)[["group", "metric", "ours"]]

            SEEDS.add(profile, {"recipe": artifacts.digest(recipe), "seed": seed, "system": name}, make, remake)


def run_changes(profile: Profile, remake: bool = False) -> None:
    """Each change of the recipe on dev, into the record."""
    bench, recipes = pipeline.benchmark(profile, "dev"), recipe_changes(profile)

    def scores(name: str) -> np.ndarray:
        return pipeline.model_scores(profile, pipeline.train_recipe(profile, recipes[name])[0], "dev", bf16=True)

    for name, recipe in recipes.items():

        def make(name: str = name) -> pd.DataFrame:
            return change_rows(bench, scores(name), scores(PLAIN), profile.resampling)

        CHANGES.add(profile, {"recipe": artifacts.digest(recipe), "system": name}, make, remake)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=0, help="Table 5's ablation with so many seeds (20 minutes each)")
    parser.add_argument("--changes", action="store_true", help="each change of the published recipe (30 minutes)")
    parser.add_argument("--share", type=float, help="of the published steps (default: the profile's; 1 takes hours)")
    parser.add_argument("--remake", action="store_true", help="make again what the record holds")
    parser.add_argument("--profile", default="open")
    options = parser.parse_args(arguments)
    if not options.seeds and not options.changes:
        parser.error("give --seeds N or --changes")
    if options.share and not options.remake:
        parser.error("a record holds one budget: give --share together with --remake")
    profile = load_profile(options.profile)
    if options.share:
        profile = replace(profile, ablation_share=options.share)
    run_seeds(profile, options.seeds, options.remake)
    if options.changes:
        run_changes(profile, options.remake)


if __name__ == "__main__":
    main()
