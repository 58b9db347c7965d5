"""Profiles: every path, size and hyper-parameter of a run in one frozen dataclass.

`open` is the default; `smoke` is a slice of it for tests; `mimic` is the paper's scale, its data placed by environment
variables. A notebook asks for a profile by name and never tests which one it got.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from drehr_utils.corpus import DataError
from drehr_utils.encoders import MINILM
from drehr_utils.training import Recipe, StageConfig

ROOT = Path(os.environ.get("DREHR_ROOT") or Path(__file__).resolve().parents[1])


@dataclass(frozen=True)
class Profile:
    name: str
    notes: Path = ROOT / "data/open_notes"  # MIMIC-IV-Note's or MIMIC-III's tables
    benchmark: Path = ROOT / "data/open_cliniq"  # BEIR layout, folders dev/ and test/
    open_kg: Path = ROOT / "data/open_kg/concepts.tsv.gz"
    bios: Path | None = None  # a folder in BIOS's layout; None: the open graph, built from open_kg and packages
    recorded_answers: tuple[Path, ...] = (ROOT / "data/llm_answers/train.jsonl.gz",)
    encoder: str = MINILM
    pooling: str | None = None  # None: as the starting weights were trained
    max_train_notes: int | None = None
    max_eval_patients: int | None = None
    published: Recipe = Recipe()  # the paper's, its sizes cut to the profile's budget
    improved: Recipe = Recipe()  # the best on dev
    ablation_share: float = 1.0  # of the published recipe's steps, for each row of an ablation (notebooks 09, 10)
    bootstrap_samples: int = 1000
    randomizations: int = 10_000
    seed: int = 0
    lora: bool = False  # train low-rank adapters only (DR.EHR-large)
    save_steps: int = 25
    figures: Path = ROOT / "figures"

    @property
    def cache(self) -> Path:
        return ROOT / "data/cache" / self.name

    def without_stage1(self) -> Recipe:
        """The published recipe without knowledge injection (DR.EHR §5.3): stage II alone, otherwise the same."""
        return replace(self.published, stage1=None)


# What the open profile's 30 minutes of training on two cores allow. Table 3 of the paper, for DR.EHR-small: 128 and 16
# positives a chunk, batches of 32, 3 and 1 epochs of 5.8M chunks; here 1,651 chunks, so epochs are counted in steps.
_IMPROVED_STAGE2 = StageConfig(  # the best on dev: drehr_utils.search, notebook 05
    positives_per_chunk=16,
    batch_size=32,
    epochs=2,
    learning_rate=4e-4,
    both_ways=True,
    mask_false_negatives=True,
    complete_labels=True,
    complete_hypernyms=True,
    leave_out_related=True,
    substitution=0.4,
    keep=10.0,
    kept_per_chunk=2,
    beta=20.0,
)
_OPEN = Profile(
    name="open",
    published=Recipe(
        stage1=StageConfig(positives_per_chunk=32, batch_size=32, epochs=1),
        stage2=StageConfig(positives_per_chunk=16, batch_size=32, epochs=1),
    ),
    improved=Recipe(stage2=_IMPROVED_STAGE2, read_names=True),
    ablation_share=0.25,
)

_TINY = dict(batch_size=8, max_steps=2)
_SMOKE = replace(
    _OPEN,
    name="smoke",
    figures=ROOT / "data/cache/smoke/figures",
    max_train_notes=8,
    max_eval_patients=4,
    published=Recipe(stage1=replace(_OPEN.published.stage1, **_TINY), stage2=replace(_OPEN.published.stage2, **_TINY)),
    improved=replace(_OPEN.improved, stage2=replace(_IMPROVED_STAGE2, **_TINY)),
    ablation_share=1.0,
    bootstrap_samples=100,
    randomizations=200,
)

_MIMIC = Profile(
    name="mimic",
    figures=ROOT / "data/cache/mimic/figures",  # git-ignored: a figure may show text under a data use agreement
    notes=ROOT / "data/mimic-iv-note",
    recorded_answers=(),
    encoder="BAAI/bge-base-en-v1.5",
    pooling="cls",
    published=Recipe(
        stage1=StageConfig(positives_per_chunk=128, batch_size=32, epochs=3),
        stage2=StageConfig(positives_per_chunk=16, batch_size=32, epochs=1),
    ),
    improved=Recipe(stage2=replace(_IMPROVED_STAGE2, epochs=1, learning_rate=1e-4), read_names=True),
    save_steps=1000,
)

PROFILES = {p.name: p for p in (_OPEN, _SMOKE, _MIMIC)}


def load_profile(name: str | None = None) -> Profile:
    """The profile by name (default: the variable DREHR_PROFILE, else `open`).

    Under `mimic`, paths and the model come from DREHR_NOTES, DREHR_BENCHMARK, DREHR_BIOS, DREHR_ENCODER,
    DREHR_POOLING and DREHR_LORA (1: low-rank adapters, for a decoder) where they are set.
    Raises DataError for an unknown name."""
    name = name or os.environ.get("DREHR_PROFILE") or "open"
    if name not in PROFILES:
        raise DataError(f"profile {name!r}: there is none; use {', '.join(PROFILES)}")
    profile = PROFILES[name]
    if name != "mimic":
        return profile
    given = {
        "notes": ("DREHR_NOTES", Path),
        "benchmark": ("DREHR_BENCHMARK", Path),
        "bios": ("DREHR_BIOS", Path),
        "encoder": ("DREHR_ENCODER", str),
        "pooling": ("DREHR_POOLING", str),
        "lora": ("DREHR_LORA", lambda value: value == "1"),
    }
    changes = {f: make(os.environ[variable]) for f, (variable, make) in given.items() if os.environ.get(variable)}
    return replace(profile, **changes)
