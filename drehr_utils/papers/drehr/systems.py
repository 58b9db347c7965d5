"""The trained rows of DR.EHR's tables: each one's recipe, the encoder it starts from, the texts it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drehr_utils import pipeline
from drehr_utils.config import Recipe
from drehr_utils.data import public_data
from drehr_utils.data.benchmark import Benchmark
from drehr_utils.papers.drehr import ablations, recipe_search, rivals
from drehr_utils.pipeline import IMPROVED, PUBLISHED, WITHOUT_STAGE1
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.search import hybrid
from drehr_utils.training import weights

EQUATIONS, SHORTER = "DR.EHR (equations)", "DR.EHR w/o stage I, stage II's steps"
GPU = "DR.EHR, GPU"  # in batches of 256: another experiment than 32, not the same one sooner
BY_WINDOWS, HYBRID_BY_WINDOWS = "DR.EHR (by windows)", "DR.EHR (hybrid, by windows)"  # trained on them, as searched
REAL = {  # notes; public_data has them
    PUBLISHED: "DR.EHR (open + real)",
    IMPROVED: "DR.EHR (improved, open + real)",
    rivals.HYBRID: "DR.EHR (hybrid, open + real)",
    BY_WINDOWS: "DR.EHR (by windows, open + real)",
    HYBRID_BY_WINDOWS: "DR.EHR (hybrid, by windows, open + real)",
}
MAIN = (  # of Table 4's rows those that README shows first, and notebook 08's figure
    "BM25", "BM25 + KG", rivals.NAMES, pipeline.START, "RRF", rivals.WINDOWS, rivals.GRAPHLESS, rivals.UNTRAINED_HYBRID,
    rivals.UNTRAINED_WINDOWS, PUBLISHED, WITHOUT_STAGE1, GPU, IMPROVED, rivals.FUSED, rivals.HYBRID, BY_WINDOWS,
    HYBRID_BY_WINDOWS,
)  # fmt: skip
PUBLIC = {  # trained and searched without a name of the open graph's own: the packages' vocabularies are the graph
    IMPROVED: "DR.EHR (improved, public names)",
    rivals.HYBRID: "DR.EHR (hybrid, public names)",
}
MORE_TERMS = f"{ablations.STAGE1_ROWS[-1]}, five of each"
OTHER_GRAPHS = {  # rows whose graph is another: what of the profile changes
    MORE_TERMS: {"graph_terms": 5},  # so up to 25 graph terms an entity where §4.1 has 10
    **dict.fromkeys(PUBLIC.values(), {"open_kg": None}),
}
FEWER = (20, 40, 80)  # notes of the open corpus's 160
MPNET, SMOLLM2 = "mpnet", "SmolLM2"  # untrained; weights has them
OTHER_SIZES = {  # the decoder is read and trained as DR.EHR-large (§3.3, §4.2), its instruction short for a CPU's sake
    "MiniLM": {},
    MPNET: {"encoder": weights.MPNET},
    SMOLLM2: {"encoder": weights.SMOLLM2, "pooling": "lasttoken", "instruction": "Query: ", "lora": True},
}


def by_equations(recipe: Recipe) -> Recipe:
    """The recipe with the loss of equations 1-3 instead of the authors' code's."""
    return recipe.each(lambda stage: replace(stage, per_anchor=True))


def in_large_batches(recipe: Recipe) -> Recipe:
    """The recipe in batches of 256, 2,000 of them a stage, with the dropout that the starting weights had (§4.2)."""
    large = {"batch_size": 256, "dropout": None, "epochs": 400}  # cut short, unless there are more notes
    return recipe.each(lambda stage: replace(stage, max_steps=stage.max_steps or 2000, **large))


def table4(profile: Profile) -> dict[str, Recipe]:
    return {
        PUBLISHED: profile.published,
        WITHOUT_STAGE1: profile.without_stage1(),
        SHORTER: replace(profile.published, stage1=None),
        EQUATIONS: by_equations(profile.published),
        GPU: in_large_batches(profile.published),
        IMPROVED: profile.improved,
        rivals.HYBRID: profile.improved,  # the same encoder, joined with strings and the graph
        REAL[PUBLISHED]: _as_long(profile, profile.published),
        REAL[IMPROVED]: _as_long(profile, profile.improved),
        REAL[rivals.HYBRID]: _as_long(profile, profile.improved),
    }


def as_short(profile: Profile) -> dict[str, Recipe]:
    """Two rows that a run of `open` has no time for, trained as short as its own are: an epoch for each stage."""
    short = profile.published.each(lambda stage: replace(stage, epochs=1))
    without = Recipe(stage2=replace(short.stage2, epochs=2))
    return {f"{EQUATIONS}, as short": by_equations(short), f"{WITHOUT_STAGE1}, as short": without}


def by_windows(profile: Profile) -> dict[str, Recipe]:
    """The improved recipe with windows in its loss as in search, half of a chunk's similarity, for twice the steps; and
    the published one as it is, searched with windows."""
    recipe = _windows(profile)
    return {BY_WINDOWS: recipe, HYBRID_BY_WINDOWS: recipe, rivals.PUBLISHED_WINDOWS: profile.published}


def _windows(profile: Profile) -> Recipe:
    return profile.improved.each(lambda stage: replace(stage, windows=0.5, epochs=2 * stage.epochs))


def scores(profile: Profile, row: str, model: Path, bench: Benchmark) -> np.ndarray:
    """A trained row's, [queries, chunks], as the row searches: with windows, joined with strings and its graph."""
    profile = replace(profile, **OTHER_GRAPHS.get(row, {}))
    if "windows" in row:
        grid = hybrid.WINDOWS_GRID if is_hybrid(row) else hybrid.WINDOWS_ALONE
        return rivals.hybrid_scores(profile, model, bench, grid)
    return (rivals.hybrid_scores if is_hybrid(row) else pipeline.model_scores)(profile, model, bench)


def is_hybrid(row: str) -> bool:
    """Whether the row's encoder is joined with strings and the graph (search.hybrid)."""
    return row.startswith(rivals.HYBRID.removesuffix(")"))


def with_notes(system: str, n: int) -> str:
    """The row of a system trained on the first n training notes."""
    return f"{system}, {n} notes"


def fewer_notes(profile: Profile) -> dict[str, Recipe]:
    """The learning curves of the improved recipe and of the one by windows, alone and in the hybrid: fewer notes for as
    many epochs each, and so for fewer steps."""
    of_all = {IMPROVED: profile.improved, rivals.HYBRID: profile.improved}
    of_all |= dict.fromkeys((BY_WINDOWS, HYBRID_BY_WINDOWS), _windows(profile))
    return {with_notes(system, n): recipe for n in FEWER for system, recipe in of_all.items()}


def real_by_windows(profile: Profile) -> dict[str, Recipe]:
    """The recipe by windows with real notes beside the open ones, for as many steps: no rows of Table 4."""
    return dict.fromkeys((REAL[BY_WINDOWS], REAL[HYBRID_BY_WINDOWS]), _as_long(profile, _windows(profile)))


def on(system: str, size: str) -> str:
    """The row of a system trained from an encoder of OTHER_SIZES."""
    return f"{system} on {size}"


def sizes(profile: Profile) -> dict[str, Recipe]:
    """Table 4's rows that show what an encoder's size brings: the larger ones untrained, and each after 204 steps of 16
    chunks in all, which a CPU can do with 110 million parameters. mpnet's rate for the improved recipe is `mimic`'s."""

    def short(recipe: Recipe, epochs: int, **changes: Any) -> Recipe:
        changes |= {"batch_size": 16, "epochs": epochs}  # `smoke` has steps of its own
        return recipe.each(lambda stage: replace(stage, max_steps=stage.max_steps or 102 * epochs, **changes))

    return {
        MPNET: Recipe(),
        SMOLLM2: Recipe(),
        **{on(PUBLISHED, size): short(profile.published, 1) for size in OTHER_SIZES},
        on(IMPROVED, "MiniLM"): short(profile.improved, 2),
        on(IMPROVED, MPNET): short(profile.improved, 2, learning_rate=1e-4),
    }


def of_other_notes(profile: Profile) -> set[str]:
    """The rows trained on other notes than the profile's: fewer, or real ones too."""
    return {*fewer_notes(profile), *REAL.values()}


def of_other_graphs(profile: Profile) -> dict[str, Recipe]:
    """What hangs on the graph: stage I by the ablations' recipe and length (DR.EHR §4.1), and the improved recipe,
    alone and in the hybrid."""
    published = ablations.stage1_ablation(profile)[ablations.STAGE1_ROWS[-1]]
    return {row: profile.improved if row in PUBLIC.values() else published for row in OTHER_GRAPHS}


def _as_long(profile: Profile, recipe: Recipe) -> Recipe:
    """The recipe with the steps that its epochs are on the profile's own notes, whatever texts are added."""
    n = len(pipeline.chunks(profile))
    return recipe.each(lambda stage: replace(stage, max_steps=stage.steps(n)))


def profile_of(profile: Profile, row: str) -> Profile:
    """The profile with the row's own encoder, graph and notes; real ones come with their recorded answers."""
    if row in fewer_notes(profile):
        return replace(profile, max_train_notes=int(row.split()[-2]))
    if row not in REAL.values():
        pooling = {"pooling": "cls"} if row == ablations.DEPARTED_CLS else {}
        return replace(
            profile, **OTHER_SIZES.get(row.rpartition(" on ")[2], {}), **OTHER_GRAPHS.get(row, {}), **pooling
        )
    answers = (*profile.recorded_answers, ROOT / "data/llm_answers/aci_bench.jsonl.gz")
    return replace(profile, real_notes=True, recorded_answers=answers)


def lacking(profile: Profile, row: str) -> str | None:
    """What the row's training needs that isn't at hand, and how it is fetched."""
    if row in REAL.values():
        missing = [name for name in ("aci_bench", "mts_dialog") if public_data.locate(name) is None]
        return f"{missing[0]} isn't here; ./run_all.sh --public fetches it" if missing else None
    if row == GPU and not torch.cuda.is_available():
        return "a batch of 256 chunks and its terms takes 13 GB and, on a CPU, minutes; run it where CUDA is"
    return weights.missing(profile_of(profile, row).encoder)


def rows(profile: Profile) -> dict[str, Recipe]:
    """Every trained row: Table 4's, other sizes', those by windows, the short ones, the ablations of Tables 5 and 6 at
    their share of the steps, those of other graphs, the learning curve's, and the candidates of the search and the
    departures, which are scored on dev alone."""
    tables = table4(profile) | sizes(profile) | ablations.stage1_ablation(profile) | ablations.stage2_ablation(profile)
    tables |= of_other_graphs(profile) | ablations.departures(profile) | by_windows(profile) | as_short(profile)
    return tables | fewer_notes(profile) | real_by_windows(profile) | recipe_search.trained(profile)
