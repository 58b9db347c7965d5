"""Profiles: every path, size and hyper-parameter of a run in one frozen dataclass.

`open` is the default; `full` trains its systems long enough to judge a claim; `smoke` is a slice for tests; `mimic` is
the paper's scale, its data placed by environment variables. One of your own is a TOML file that names a `base` and what
differs from it: `load_profile("mine.toml")`, or DREHR_PROFILE. A notebook asks for a profile by name and never tests
which one it got.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from operator import attrgetter
from pathlib import Path
from typing import Any

from drehr_utils.config import (
    GRAPH_TERMS,
    MINILM,
    START,
    CaprSizes,
    CaprSystem,
    CliniqSizes,
    KgSizes,
    PairConfig,
    RadiologySizes,
    Recipe,
    Resampling,
    StageConfig,
    TripletConfig,
)
from drehr_utils.errors import DataError
from drehr_utils.files import keep_private, naming, project_root
from drehr_utils.overrides import changed

ROOT = project_root()


@dataclass(frozen=True)
class Profile:
    name: str
    in_place: bool = False  # results are committed: notebooks in place, records in data/; else all of it to `cache`
    short: bool = False  # its trainings are too short for a verdict: rows say so, beside the records of `full`
    recorded: bool = False  # the models that it trains are committed as records, in data/runs
    protected: bool = False  # text under a data use agreement: no message quotes it, DREHR_* variables place the data
    lanes: int = 1  # notebooks that run at a time
    offline: bool = True  # models come from packages and folders, no hub is asked
    notes: Path = ROOT / "data/open_notes"  # MIMIC-IV-Note's or MIMIC-III's tables
    # BEIR layout, folders dev/ and test/; None: what notebook 06 makes of these notes
    benchmark: Path | None = ROOT / "data/open_cliniq"
    open_kg: Path | None = ROOT / "data/open_kg/concepts.tsv.gz"  # None: the packages' vocabularies alone
    bios: Path | None = None  # a folder in BIOS's layout; None: the open graph, built from open_kg and packages
    graph_terms: int = GRAPH_TERMS  # that stage I adds to a positive entity: so many synonyms, hypernyms, related ones
    real_notes: bool = False  # ACI-Bench's notes train beside these, and in stage I MTS-Dialog's sections (public_data)
    recorded_answers: tuple[Path, ...] = (ROOT / "data/llm_answers/train.jsonl.gz",)
    unanswered: float = 0.0  # share of a language model's answers that may be missing; 1: none is asked for
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
    instruction: str = ""  # stands before each query, and takes no part in pooling
    processes: int = 1  # that train one model of DR.EHR, each with batches of its own: use.train, under torchrun
    loaders: int = 0  # processes that draw and tokenise batches beside the training; on a GPU they pay
    workers: int = 1  # that make the positive sets; several are processes of Ray Data (the extra `scale`)
    gradient_checkpointing: bool = False  # of each layer, for models whose activations don't fit
    deepspeed: Path | None = None  # a configuration for transformers' Trainer
    save_steps: int = 25
    cliniq: CliniqSizes = CliniqSizes()
    kg: KgSizes = KgSizes()
    capr: CaprSizes = CaprSizes()
    radiology: RadiologySizes = RadiologySizes()

    @property
    def cache(self) -> Path:
        """Git-ignored: text under a data use agreement may be in it."""
        return ROOT / "data/cache" / self.name

    @property
    def figures(self) -> Path:
        return ROOT / "figures" if self.in_place else self.cache / "figures"

    @property
    def tables(self) -> Path:
        return self.figures / "tables"

    @property
    def resampling(self) -> Resampling:
        return Resampling(self.bootstrap_samples, self.randomizations, self.seed)

    def without_stage1(self) -> Recipe:
        """The published recipe without knowledge injection (DR.EHR §5.3): stage II alone, for as many steps as both
        stages take (for their epochs, where `max_steps` cuts one of them alone), so that what stage I brings isn't the
        longer training."""
        first, second = self.published.stage1, self.published.stage2
        if first is None or second is None:
            return replace(self.published, stage1=None)
        steps = first.max_steps and second.max_steps and first.max_steps + second.max_steps
        same = first.batch_size == second.batch_size
        epochs = first.epochs if same else first.epochs * second.batch_size / first.batch_size
        return Recipe(stage2=replace(second, epochs=epochs + second.epochs, max_steps=steps))


# --- open: what an hour on two cores allows --------------------------------------------------------------------------

# Table 3 of the paper, for DR.EHR-small: 128 and 16 positives a chunk, batches of 32, 3 and 1 epochs of 5.8M chunks;
# here 1,651 chunks, so epochs are counted in steps.
_IMPROVED_STAGE2 = StageConfig(  # the best on dev: papers.drehr.recipe_search, notebook 05
    positives_per_chunk=16,
    batch_size=32,
    epochs=2,
    learning_rate=4e-4,
    per_anchor=True,
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

# Learning rate and scale: papers.kg.rate_search, on dev. The supervised rate is from it too, on some training notes.
_PAIRS = PairConfig(batch_size=64, max_steps=40, learning_rate=1e-4, warmup_ratio=0.1)


def _capr_systems(lists: StageConfig, cross: StageConfig, cdv: StageConfig, finetune: StageConfig) -> tuple:
    """The rows of CAPR's Table 3, and what its §3.2 tried: CDV trained jointly from the start, Poly over one vector,
    Bi on the dot product. The lists' systems train alike but for the Cross-encoder."""
    kinds = ("bi-shared", "bi", "poly", "cross", "poly-pooled", "bi-dot")
    return (
        CaprSystem(START, "start"),
        CaprSystem("CDV+FastText", "cdv-fasttext", cdv),
        CaprSystem("CDV", "cdv", cdv),
        CaprSystem("CDV-finetune", "cdv-finetune", finetune, after="CDV"),
        CaprSystem("CDV-joint", "cdv-finetune", finetune),
        *(CaprSystem(f"CAPR-{kind.capitalize()}", kind, cross if kind == "cross" else lists) for kind in kinds),
    )


# The Cross-encoder reads each pair of a batch, so a batch of 32 would cost it 1,024 passages; it gets lists of 8. CDV
# reads whole documents, so its batches are of few notes: 4 passages of each, and 8 where the sentence encoder trains.
# The steps are what an hour of one core allows in all; `open` trains one system, and shows `full`'s records.
_LISTS = StageConfig(batch_size=32, epochs=50, max_steps=500, learning_rate=2e-4)
_CAPR = CaprSizes(
    _capr_systems(
        _LISTS,
        replace(_LISTS, batch_size=8),
        replace(_LISTS, max_steps=2000, learning_rate=1e-3, chunks_per_note=4),
        replace(_LISTS, batch_size=16, learning_rate=1e-4, chunks_per_note=8),
    )
)
_CAPR_SHORT = replace(
    _CAPR, systems=(CaprSystem(START, "start"), CaprSystem("CAPR-Bi", "bi", replace(_LISTS, max_steps=30)))
)


def _radiology(paper: TripletConfig, mlm: TripletConfig, rates: tuple[float, ...], **sizes: Any) -> RadiologySizes:
    """Table 1's rows from one configuration; Tables 2 to 4 train on twice the entries, so for twice the steps."""
    rows = [replace(paper, hard=False, mega_batch=32), replace(paper, mega_batch=32)]
    rows += [replace(paper, mega_batch=size) for size in (64, 128, 256, 512)]
    best = replace(paper, mega_batch=128, max_steps=paper.max_steps and 2 * paper.max_steps)
    return RadiologySizes(best, rates, tuple(rows), mlm, **sizes)


_MLM = TripletConfig(learning_rate=5e-5, epochs=5, dropout=None)  # as BERT was trained: 0.1
_OPEN = Profile(
    name="open",
    in_place=True,
    lanes=2,
    short=True,
    published=Recipe(
        stage1=StageConfig(positives_per_chunk=32, batch_size=32, epochs=1),
        stage2=StageConfig(positives_per_chunk=16, batch_size=32, epochs=1),
    ),
    improved=Recipe(stage2=_IMPROVED_STAGE2, read_names=True),
    kg=KgSizes(
        _PAIRS,
        replace(_PAIRS, learning_rate=3e-4),
        plain=replace(_PAIRS, batch_size=32, max_steps=100),
        max_concepts=2000,
    ),
    capr=_CAPR_SHORT,
    # The rate: the best of 5e-5, 1e-4 and 2e-4 on A's folds at so few steps.
    radiology=_radiology(TripletConfig(max_steps=18), replace(_MLM, max_steps=60), (5e-5,)),
)

# --- full: the same, long enough to judge a claim --------------------------------------------------------------------

_FULL = replace(
    _OPEN,
    name="full",
    in_place=False,
    short=False,
    recorded=True,
    published=Recipe(replace(_OPEN.published.stage1, epochs=10), replace(_OPEN.published.stage2, epochs=10)),
    improved=replace(_OPEN.improved, stage2=replace(_IMPROVED_STAGE2, epochs=6)),
    ablation_share=0.5,
    capr=_CAPR,
    radiology=_radiology(TripletConfig(), _MLM, (1e-5, 2e-5, 5e-5, 1e-4)),  # the paper's epochs and tuning
    kg=replace(
        _OPEN.kg,
        training=replace(_PAIRS, max_steps=1000),
        plain=replace(_PAIRS, max_steps=500),
        supervised=replace(_OPEN.kg.supervised, max_steps=300),
    ),
)

# --- smoke: a slice of it --------------------------------------------------------------------------------------------

_TINY = dict(batch_size=8, max_steps=2)
_TINY_RADIOLOGY = _radiology(
    TripletConfig(max_steps=1), replace(_MLM, max_steps=1), (5e-5, 1e-4), reports=12, iu_reports=12, coded_minimum=1
)
_SMOKE = replace(
    _OPEN,
    name="smoke",
    in_place=False,
    max_train_notes=8,
    max_eval_patients=4,
    published=Recipe(stage1=replace(_OPEN.published.stage1, **_TINY), stage2=replace(_OPEN.published.stage2, **_TINY)),
    improved=replace(_OPEN.improved, stage2=replace(_IMPROVED_STAGE2, **_TINY)),
    bootstrap_samples=100,
    randomizations=200,
    kg=KgSizes(
        replace(_PAIRS, **_TINY),
        replace(_PAIRS, **_TINY),
        replace(_PAIRS, **_TINY),
        max_pairs=400,
        max_mentions=40,
        max_concepts=200,
        max_codes=400,
        own_mentions=20,
        own_concepts=50,
        seen_mentions=20,
        seen_concepts=50,
    ),
    capr=replace(
        _CAPR,
        systems=tuple(
            replace(s, config=s.config and replace(s.config, batch_size=4, max_steps=2)) for s in _CAPR.systems
        ),
        passage_words=30,
        passage_tokens=48,
        n_candidates=8,
        test_queries=12,
        test_passages=40,
        medquad_queries=6,
        costly_queries=4,
        other_names=12,
        costly_names=4,
        latency_passages=(4, 16),
        latency_limit=16,
        passage_rows=24,
        word_buckets=200_000,
    ),
    radiology=replace(_TINY_RADIOLOGY, table1=_TINY_RADIOLOGY.table1[:2]),
)

# --- mimic: the papers' scale ----------------------------------------------------------------------------------------

_CAPR_PAPER = StageConfig(batch_size=32, epochs=50, learning_rate=2e-5, dropout=None)
_BIOBERT, _LONGFORMER = "dmis-lab/biobert-v1.1", "allenai/longformer-base-4096"
_MIMIC = Profile(
    name="mimic",
    protected=True,
    offline=False,
    notes=ROOT / "data/mimic-iv-note",
    benchmark=None,
    recorded_answers=(),
    unanswered=0.01,
    encoder="BAAI/bge-base-en-v1.5",
    pooling="cls",
    published=Recipe(
        stage1=StageConfig(positives_per_chunk=128, batch_size=32, epochs=3, dropout=None),
        stage2=StageConfig(positives_per_chunk=16, batch_size=32, epochs=1, dropout=None),
    ),
    improved=Recipe(stage2=replace(_IMPROVED_STAGE2, epochs=1, learning_rate=1e-4), read_names=True),
    save_steps=1000,
    loaders=4,
    cliniq=CliniqSizes(
        sample=1000,
        dev_sample=100,
        recorded=False,
        retrievers=(
            "bge-base-en-v1.5",
            "gte-Qwen2-1.5B-Instruct",
            "gte-Qwen2-7B-Instruct",
            "NV-Embed-v2",
            "MedCPT",
            "BMRetriever-410M",
            "BMRetriever-2B",
            "BMRetriever-7B",
            "text-embedding-3-large",
        ),
    ),
    kg=KgSizes(
        PairConfig(max_steps=100_000, dropout=None),
        mended=False,
        encoder="bert-base-uncased",
        pooling="mean",
        baselines=(("Clinical BERT", "emilyalsentzer/Bio_ClinicalBERT"),),
        own_mentions=5000,
        own_concepts=50_000,
    ),
    capr=replace(
        _CAPR,
        systems=(
            *(
                replace(system, encoder=_BIOBERT)
                for system in _capr_systems(
                    _CAPR_PAPER,
                    replace(_CAPR_PAPER, batch_size=8),
                    replace(_CAPR_PAPER, learning_rate=1e-3, chunks_per_note=4),
                    replace(_CAPR_PAPER, epochs=5, chunks_per_note=4),
                )
            ),
            CaprSystem("CAPR-Longformer-Bi", "longformer-bi", _CAPR_PAPER, encoder=_LONGFORMER),
            CaprSystem("CAPR-Longformer-Poly", "longformer-poly", _CAPR_PAPER, encoder=_LONGFORMER),
        ),
        passage_words=None,
        passage_tokens=512,
        test_queries=5000,
        test_passages=None,
        medquad_queries=3293,
        costly_queries=3293,
        other_names=5000,
        costly_names=5000,
        latency_passages=(16, 64, 256, 1024, 2048),
        latency_limit=2048,
    ),
    radiology=_radiology(TripletConfig(dropout=None), _MLM, (TripletConfig().learning_rate,)),
)

PROFILES = {p.name: p for p in (_OPEN, _FULL, _SMOKE, _MIMIC)}
# Where a protected profile's data and models are.
VARIABLES = {
    "DREHR_NOTES": "notes",
    "DREHR_BENCHMARK": "benchmark",
    "DREHR_BIOS": "bios",
    "DREHR_ENCODER": "encoder",
    "DREHR_POOLING": "pooling",
    "DREHR_LORA": "lora",
    "DREHR_WORKERS": "workers",
    "DREHR_SNOMED": "kg.snomed",
    "DREHR_UMLS": "kg.umls",
    "DREHR_KG_ENCODER": "kg.encoder",
}
_SAID = {"0": False, "1": True, "false": False, "true": True}


def cached_by(*fields: str) -> Callable[[Callable], Callable]:
    """functools.cache for a function of a profile (and more) that reads these fields of it and no others ("kg.umls" is
    the field of a field): profiles that differ elsewhere, in the encoder for instance, share what it made."""
    read = attrgetter(*fields)

    def decorate(function: Callable) -> Callable:
        known: dict[tuple, Any] = {}

        @wraps(function)
        def cached(profile: Profile, *rest: Any) -> Any:
            if (key := (read(profile), *rest)) not in known:
                known[key] = function(profile, *rest)
            return known[key]

        cached.cache_clear, cached.fields = known.clear, fields
        return cached

    return decorate


def load_profile(name: str | Path | None = None) -> Profile:
    """The profile by name, or of a TOML file (default: the variable DREHR_PROFILE, else `open`).

    The file's keys are Profile's fields, tables its nested ones ([published.stage1], [kg.training]), "none" is None,
    a path is relative to the file; `base` is the profile that it changes (default: open). Its results go to
    data/cache/<name>, and it counts as protected unless it says otherwise or keeps the base's notes and benchmark; with
    notes of its own, nothing that was recorded of the base's is read. A protected profile takes the paths and models
    of VARIABLES, and what its process writes is for its user alone. Raises DataError (file, field) for what isn't
    there."""
    profile = as_written(str(name or os.environ.get("DREHR_PROFILE") or "open"))
    if not profile.protected:
        return profile
    for variable, place in VARIABLES.items():
        if given := os.environ.get(variable):
            *tables, key = place.split(".")
            old = attrgetter(place)(profile)
            if isinstance(old, bool):
                given = _SAID.get(given, given)
            elif isinstance(old, int) and given.isdecimal():
                given = int(given)
            change: Any = {key: given}
            for table in tables:
                change = {table: change}
            profile = changed(profile, change, f"variable {variable}", Path())
    keep_private(profile.cache)
    return profile


def as_written(name: str) -> Profile:
    """`load_profile` without the variables, and without what it does to the process where the profile is protected."""
    profile = _from_toml(Path(name)) if name.endswith(".toml") else PROFILES.get(name)
    if profile is None:
        raise DataError(f"profile {name!r}: there is none; use {', '.join(PROFILES)}, or the path of a .toml file")
    return profile


_TAKEN = ("site", "kg", "weights", "cliniq_release")  # folders of data/cache that are no profile's


def _from_toml(path: Path) -> Profile:
    if not path.is_file():
        raise DataError(f"{path.name}: no such profile file in {path.parent.name or 'this folder'}/")
    with naming(path):
        text = path.read_bytes().decode("utf-8-sig")
    try:
        given = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise DataError(f"{path.name}: not TOML ({error})") from None
    base = given.pop("base", "open")
    if not isinstance(base, str) or base not in PROFILES:
        raise DataError(f"{path.name}, field base: {base!r} is none of {', '.join(PROFILES)}")
    foreign = PROFILES[base].protected or bool({"notes", "benchmark"} & given.keys())
    own = {"name": path.stem, "protected": foreign, "in_place": False, "recorded": False} | given
    if "notes" in given:  # without a benchmark, notebook 06 makes one of them, dev as well
        sizes, said = {"recorded": False}, given.get("cliniq", {})
        if given.get("benchmark") == "none":
            sizes["dev_sample"] = PROFILES["mimic"].cliniq.dev_sample
        own = {"recorded_answers": []} | own | {"cliniq": sizes | said if isinstance(said, dict) else said}
    ours = next((field for field in ("in_place", "recorded") if own[field]), "name")
    name, taken = str(own["name"]), (*PROFILES, *_TAKEN)
    if name in taken or not re.fullmatch(r"[\w-][\w.-]*", name) or ours != "name":
        raise DataError(
            f"{path.name}, field {ours}: a profile of one's own needs a name of "
            "letters, digits and -, not one of ours, and leaves the committed results alone"
        )
    return changed(PROFILES[base], own, path.name, path.absolute().parent)
