"""The search for training that suits windows, on dev: the improved recipe with one thing changed at a time, and the
published one in its place.

    python -m drehr_utils.papers.drehr.windows_search            # the changes that data/runs/windows_search.csv lacks

Each is one training, minutes on a GPU and hours without. Notebook 18 shows the record; test is never read here. The
record's two rows with hard negatives have no code any more: commit 592bc6c has it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import pandas as pd

from drehr_utils import artifacts, pipeline
from drehr_utils.config import Recipe
from drehr_utils.evaluation import records
from drehr_utils.evaluation.records import Record
from drehr_utils.papers.drehr import rivals, runs
from drehr_utils.profiles import Profile
from drehr_utils.search.hybrid import Weights

RECORD = Record("runs/windows_search.csv")
SEARCHED = {  # how a training's encoder is scored: alone, with windows, and in the hybrid by weights that fit them all
    "alone": Weights(0, 0),
    "windows": Weights(0, 0, 0.5),
    "hybrid": Weights(0.3, 0.2, 0.5),
}


def changes(profile: Profile) -> dict[str, Recipe]:
    """Name -> the improved recipe with that change, or the published one."""
    double = {"epochs": 2 * profile.improved.stage2.epochs}
    found = {
        "the recipe as it is": {},
        "twice the steps": double,
        "batches of 128": {"batch_size": 128, "epochs": 2 * double["epochs"]},
        "windows, half of the similarity": {"windows": 0.5},
        "windows, twice the steps": {"windows": 0.5} | double,
        "windows, four times the steps": {"windows": 0.5, "epochs": 2 * double["epochs"]},
        "windows, three quarters, twice the steps": {"windows": 0.75} | double,
        "windows, batches of 128, as many steps": {"windows": 0.5, "batch_size": 128, "epochs": 4 * double["epochs"]},
    }
    changed = {n: replace(profile.improved, stage2=replace(profile.improved.stage2, **c)) for n, c in found.items()}
    return changed | {"the published recipe instead": profile.published}


@cache
def _searched_in(profile: Profile) -> str:
    """Of what dev's scores hang on beside the training: its texts, its judgments, the names that the hybrid reads."""
    dev, names = pipeline.benchmark(profile, "dev"), pipeline.knowledge_graph(profile).term2cui
    return artifacts.digest(*dev.texts, dev.qrels, "\n".join(map(repr, names.items())))


def digest(profile: Profile, recipe: Recipe) -> str:
    return artifacts.digest(recipe, runs.data_digest(profile, recipe), _searched_in(profile))


def scored(profile: Profile, recipe: Recipe) -> pd.DataFrame:
    """One row: the training's length, and dev's mean of the six metrics by each way of SEARCHED."""
    model, curves = pipeline.train_recipe(profile, recipe)
    dev = pipeline.benchmark(profile, "dev")
    found = {
        how: rivals.mean_of_six(dev, rivals.joined_scores(profile, model, dev, weights))
        for how, weights in SEARCHED.items()
    }
    chunks = profile.processes * pipeline.budget(recipe, curves)
    return pd.DataFrame([{"steps": len(curves["stage2"]), "chunks": chunks} | found])


def stale(profile: Profile) -> list[str]:
    """The changes that the record lacks, or has of another recipe or other data."""
    made_of = {name: digest(profile, recipe) for name, recipe in changes(profile).items()}
    return sum((RECORD.fault(profile, {"change": name}, of) for name, of in made_of.items()), [])


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__)
    parser.add_argument("--only", nargs="+", metavar="CHANGE")
    options, profile = records.parse(parser, arguments)
    known = changes(profile)
    records.refuse_unknown(parser, "change", options.only, known)
    if options.check:
        records.end_check(stale(profile))
    for name in options.only or known:
        make, made_of = partial(scored, profile, known[name]), digest(profile, known[name])
        RECORD.add(profile, {"change": name}, make, options.remake, made_of)


if __name__ == "__main__":
    main()
