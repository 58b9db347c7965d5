"""The search for training that suits windows: one change a training, scored on dev in three ways, in a record."""

import numpy as np
import pytest

from drehr_utils import pipeline
from drehr_utils.data.notes import windows
from drehr_utils.evaluation import metrics
from drehr_utils.papers.drehr import rivals, systems, windows_search
from drehr_utils.profiles import load_profile
from drehr_utils.training import encoders


def test_each_change_is_one_change_of_the_improved_recipe():
    profile = load_profile("full")
    found = windows_search.changes(profile)
    assert found.pop("the recipe as it is") == profile.improved
    assert found.pop("the published recipe instead") == profile.published
    assert len(set(found.values())) == len(found) == 7 and all(recipe.read_names for recipe in found.values())
    steps = {name: recipe.stage2.epochs / profile.improved.stage2.epochs for name, recipe in found.items()}
    assert found["windows, twice the steps"] == systems.by_windows(profile)[systems.BY_WINDOWS]  # what was chosen
    assert steps["windows, twice the steps"] == 2 and steps["windows, four times the steps"] == 4


@pytest.mark.slow
def test_a_change_is_trained_scored_on_dev_and_recorded(tiny_smoke):
    profile, name = tiny_smoke, "windows, half of the similarity"
    committed = windows_search.RECORD.path(load_profile("full")).read_bytes()
    windows_search.main(["--profile", "smoke", "--only", name, "--remake"])
    row = windows_search.RECORD.read(profile).set_index("change").loc[name]
    assert windows_search.RECORD.path(load_profile("full")).read_bytes() == committed
    assert (row["steps"], row["chunks"]) == (2, 16)

    model = pipeline.train_recipe(profile, windows_search.changes(profile)[name])[0]
    dev, encoder = pipeline.benchmark(profile, "dev"), encoders.load_encoder(model)
    queries = encoder.encode(list(dev.queries.values()), normalize_embeddings=True)
    whole = queries @ encoder.encode(list(dev.corpus.values()), normalize_embeddings=True).T
    best = [(queries @ encoder.encode(windows(t), normalize_embeddings=True).T).max(1) for t in dev.corpus.values()]
    for how, scores in (("alone", whole), ("windows", (whole + np.stack(best, axis=1)) / 2)):
        six = [
            metrics.means(found).drop(metrics.AVERAGE)
            for found in (metrics.single_patient(dev, scores), metrics.multi_patient(dev, scores))
        ]
        assert row[how] == pytest.approx(np.concatenate(six).mean(), abs=0.3), how  # of 4 patients: a near tie may turn
    assert row["hybrid"] == pytest.approx(
        rivals.mean_of_six(dev, rivals.joined_scores(profile, model, dev, windows_search.SEARCHED["hybrid"])), abs=1e-3
    )
