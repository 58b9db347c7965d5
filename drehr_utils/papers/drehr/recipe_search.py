"""The search for the improved recipe, on dev: its candidates, the rule of choice, and what choosing itself explains.

The candidates are trained and recorded as all rows are (runs). data/dev_search.csv is the first search's record, under
the loss of the equations; its column `commit` names the code that had what it tried. Test is never read here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from drehr_utils.config import Recipe, StageConfig
from drehr_utils.profiles import ROOT, Profile

FIRST_SEARCH = ROOT / "data/dev_search.csv"
GUARD = ["MedQuAD R@1", "MedQuAD R@5"]
CHOSEN_BY = ["single MAP", "multi R@100"]
RISING, LONGER = "2357", ", twice as long"  # the second search's, by number

# The code's loss is a tenth of the equations' in size, and so is the weight of what is kept in place beside it.
_LONG = StageConfig(positives_per_chunk=16, batch_size=32, epochs=6, learning_rate=2e-4)
_MASKED = replace(_LONG, mask_false_negatives=True)
_BOTH = replace(_MASKED, both_ways=True)
_GRAPH = replace(_BOTH, complete_labels=True, complete_hypernyms=True, leave_out_related=True, substitution=0.4)
_KEPT = replace(_GRAPH, keep=1.0, kept_per_chunk=2)
_STAGE1 = replace(_BOTH, positives_per_chunk=32, epochs=2)


def candidates(profile: Profile) -> dict[str, Recipe]:
    """Name -> recipe: each says what it adds to the one before, or to the one that it names."""
    equations = replace(profile.improved.stage2, epochs=6, per_anchor=True, keep=10.0, learning_rate=4e-4, beta=20.0)
    found = {
        "1. the code's loss, masked": Recipe(stage2=_MASKED),
        "2. both ways": Recipe(stage2=_BOTH),
        "3. the graph's labels and names": Recipe(stage2=_GRAPH, read_names=True),
        "4. other texts kept in place": Recipe(stage2=_KEPT, read_names=True),
        "5. 4, beta 20 for 50": Recipe(stage2=replace(_KEPT, beta=20.0), read_names=True),
        "6. 4, learning rate 4e-4": Recipe(stage2=replace(_KEPT, learning_rate=4e-4), read_names=True),
        "7. 4, a third of its steps in stage I": Recipe(
            stage1=_STAGE1, stage2=replace(_KEPT, epochs=4), read_names=True
        ),
        "8. the first search's choice, by the equations": Recipe(stage2=equations, read_names=True),
    }
    if profile.published.stage1.max_steps:  # a slice for tests
        found = {name: replace(r, stage2=replace(r.stage2, batch_size=8, max_steps=2)) for name, r in found.items()}
    return found


def longer(profile: Profile) -> dict[str, Recipe]:
    """Those of the candidates whose curves still rose at the end (notebook 05), for twice the steps: to see what the
    comparison's length decided. The choice is among equal steps."""
    rising = {name: recipe for name, recipe in candidates(profile).items() if name[0] in RISING}
    return {
        name + LONGER: recipe.each(lambda stage: replace(stage, epochs=2 * stage.epochs))
        for name, recipe in rising.items()
    }


def trained(profile: Profile) -> dict[str, Recipe]:
    """All rows that the second search trains, which are scored on dev alone."""
    return candidates(profile) | longer(profile)


def first_search(profile: Profile) -> pd.DataFrame:
    """The first search's record; no row of it under a profile with notes that aren't ours, on which it wasn't made."""
    return pd.read_csv(FIRST_SEARCH, nrows=0 if profile.protected else None)


def passing(scored: pd.DataFrame, start: pd.Series) -> pd.DataFrame:
    """The rows that lose at most a point on each metric of a sample of MedQuAD against the starting encoder's row."""
    scored = scored.dropna(subset=GUARD)
    return scored[(scored[GUARD] >= start[GUARD].astype(float) - 1).all(axis=1)]


def best(scored: pd.DataFrame, start: pd.Series) -> pd.Series:
    """The row that the improved recipe is, by the rule: of those `passing`, the highest mean of Single-Patient MAP and
    Multi-Patient R@100."""
    kept = passing(scored, start)
    return kept.loc[kept[CHOSEN_BY].mean(axis=1).idxmax()]


def nested_choice(
    scores: Callable[[Sequence[str]], pd.Series], patients: Sequence[str], splits: int = 200, seed: int = 0
) -> pd.DataFrame:
    """What choosing explains: the best candidate on a random half of the patients, scored on the other half.

    `scores` gives each candidate's on some patients. A row a split: `chosen`, its score on its own half and on the
    other, and the other half's own best."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(splits):
        order = rng.permutation(list(patients)).tolist()
        own, other = scores(order[: len(order) // 2]), scores(order[len(order) // 2 :])
        rows.append((own.idxmax(), own.max(), other[own.idxmax()], other.max()))
    return pd.DataFrame(rows, columns=["chosen", "on its own half", "on the other half", "the other half's best"])
