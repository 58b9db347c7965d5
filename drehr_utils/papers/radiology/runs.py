"""Records of notebook 14's systems: trained as long as judges a claim (profile `full`), committed, and shown by `open`.

    python -m drehr_utils.papers.radiology.runs             # all that the record lacks: some hours of one core
    python -m drehr_utils.papers.radiology.runs --check     # which of its rows are of another recipe or other data

data/runs/radiology.csv.gz holds each query's values, of Table 3 each entry's, with how the system was trained, and
radiology_steps.csv.gz those of Table 1's rows on the way, on IU X-ray, radiology_tuning.csv.gz those of MLM tuning. Of
IU X-ray these are numbers alone: findings, and an entry's or query's number, no text and no report's id. A training
that was cut off is begun again; what was done before it is kept. The rows from a plain start, SmolLM2, are made where
`python -m drehr_utils.training.weights smollm2` has fetched it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
from sentence_transformers import SentenceTransformer

from drehr_utils import artifacts, pipeline
from drehr_utils.config import TripletConfig
from drehr_utils.evaluation import records
from drehr_utils.evaluation.records import Record
from drehr_utils.papers.radiology import systems, triplets
from drehr_utils.papers.radiology.reports import read_judgments
from drehr_utils.papers.radiology.retrieval import bm25, dense, remembering
from drehr_utils.papers.radiology.systems import IU, OPEN
from drehr_utils.profiles import Profile
from drehr_utils.training import weights

RECORD, STEPS = Record("runs/radiology.csv.gz"), Record("runs/radiology_steps.csv.gz")
TUNING = Record("runs/radiology_tuning.csv.gz")
BM25, MLM, SBERT = "BM25", "MiniLM (MLM-tuned)", "SBERT (radiology)"
PLAIN, LM, ON_PLAIN = systems.PLAIN, f"{systems.PLAIN} (LM-tuned)", f"SBERT on {systems.PLAIN}"
HEAD_FIRST = "MiniLM (MLM-tuned, head first)"
TUNED = (MLM, LM, HEAD_FIRST)  # on a collection's sentences
NOTHING, FOLDS = "nothing", "folds of "  # what a system was trained on, beside a collection's name
TRAIN_OF = {"A": "B", "B": "A", IU: "A"}  # tested -> trained, where a table's row doesn't say another one
SEEDS = (1, 2)  # beside 0, of Table 1's rows and the models (SBERT, the tuned) that Tables 2 to 4 test


@dataclass(frozen=True)
class Training:
    """A system, what it is trained on (NOTHING, a collection, or FOLDS of one), and how; None: as it is."""

    system: str
    trained: str
    config: TripletConfig | None = None

    @property
    def key(self) -> dict[str, str | float]:
        rate, seed = (self.config.learning_rate, self.config.seed) if self.config else (0.0, 0)
        return {"system": self.system, "trained": self.trained, "rate": rate, "seed": seed}


def trainings(
    profile: Profile, seeds: tuple[int, ...] = (), tried: Callable[[], pd.DataFrame] | None = None
) -> Iterator[Training]:
    """All of Tables 1 to 4, what matters most first, and again with `seeds` Table 1's rows and the models that Tables
    2 to 4 test.

    `tried`: systems.rates, asked when those have been trained which choose the learning rate (default: rate_search);
    where it is given, the rows that would have chosen another one are trained on IU X-ray at theirs, too."""
    sizes, here = profile.radiology, systems.collections(profile)
    rows = dict.fromkeys(("A", *([IU] if IU in here else [])), sizes.table1)
    yield from (Training(system, NOTHING) for system in (BM25, pipeline.START))
    yield from (Training(pipeline.START, FOLDS + c) for c in rows)
    search, *others = systems.searched(profile) or [[]]
    yield from (Training(config.label, FOLDS + "A", config) for config in search)
    found = tried and tried()
    best = systems.chosen(profile, sizes.best, found)
    yield from (Training(SBERT, c, best) for c in OPEN)
    yield from (Training(MLM, c, sizes.mlm) for c in OPEN)
    rows = {c: [systems.chosen(profile, row, found) for row in rows[c]] for c in rows}
    yield from (Training(row.label, FOLDS + "A", row) for row in rows["A"] if row not in search)
    if IU in here:
        yield Training(SBERT, IU, best)
    yield from (Training(SBERT, c, replace(best, seed=seed)) for seed in seeds for c in here)
    yield from (Training(MLM, c, replace(sizes.mlm, seed=seed)) for seed in seeds for c in OPEN)
    yield from (Training(row.label, FOLDS + "A", replace(row, seed=seed)) for seed in seeds for row in rows["A"])
    check = [config for row in others for config in row if config not in rows["A"]]
    yield from (Training(config.label, FOLDS + "A", config) for config in check)
    of_iu = [(seed, row) for seed in (0, *seeds) for row in rows.get(IU, ())]
    yield from (Training(row.label, FOLDS + IU, replace(row, seed=seed)) for seed, row in of_iu)
    own = own_rates(tried()) if tried else {}
    at_own = [replace(row, learning_rate=float(own[row.label])) for row in rows.get(IU, ()) if row.label in own]
    yield from (Training(row.label, FOLDS + IU, row) for row in at_own if row not in rows[IU])


def from_plain(
    profile: Profile, seeds: tuple[int, ...] = (), tried: Callable[[], pd.DataFrame] | None = None
) -> Iterator[Training]:
    """The rows of Tables 2 to 4 from a plain start: as it is, tuned on a collection's sentences (again with `seeds`),
    trained with triplets. They are records alone; `tried` as in `trainings`."""
    sizes = profile.radiology
    yield Training(PLAIN, NOTHING)
    yield from (Training(LM, c, replace(sizes.mlm, seed=seed)) for seed in (0, *seeds) for c in OPEN)
    best = systems.chosen(profile, sizes.best, tried and tried())
    yield from (Training(ON_PLAIN, c, best) for c in OPEN)


def watched(profile: Profile, tried: Callable[[], pd.DataFrame] | None = None) -> Iterator[Training]:
    """The trainings of Table 1 that are measured on the way (systems.on_the_way): on IU X-ray, the paper's best row
    first."""
    sizes = profile.radiology
    rows = sorted(sizes.table1, key=lambda row: row.label != sizes.best.label)
    for row in rows if IU in systems.collections(profile) else ():
        yield Training(row.label, FOLDS + IU, systems.chosen(profile, row, tried and tried()))


def tunings(profile: Profile) -> Iterator[Training]:
    """The MLM tunings that are measured on the way (systems.tuning_on_the_way): as Table 2 has it on A, and with the
    new head trained alone before, which tells whether an untrained head is what costs the encoder its similarities."""
    yield from (Training(system, "A", profile.radiology.mlm) for system in (MLM, HEAD_FIRST))


# --- made --------------------------------------------------------------------------------------------------------


def values(profile: Profile, training: Training, tests: Sequence[str] = ()) -> pd.DataFrame:
    """A system's values, trained where it isn't yet: query_values' columns, the `table` that they belong to, the
    collection that was `tested` (`tests`; default: all others than the trained one), and how many steps the training
    took and how many entries it was `shown`."""
    system, trained, config = training.system, training.trained, training.config
    profile = systems.start_of(profile, system)
    if trained.startswith(FOLDS):
        collection = trained.removeprefix(FOLDS)
        parts = systems.fold_values(profile, collection, config)
        return parts.assign(table=1, tested=collection, **budget(profile, training))
    tests = tests or [c for c in systems.collections(profile) if c != trained]
    if system == BM25:
        found = systems.across_values(profile, tests, bm25)
    else:
        encode = remembering(_encoder(profile, training))
        found = systems.across_values(profile, tests, dense(encode), encode)
    return found.assign(**budget(profile, training))


def _encoder(profile: Profile, training: Training) -> SentenceTransformer:
    if training.config is None:
        return pipeline.starting_encoder(profile)
    if training.system in (MLM, LM):
        return systems.lm_tuned(profile, training.trained, training.config)
    return systems.sbert(profile, training.trained, training.config)


def budget(profile: Profile, training: Training) -> dict[str, int]:
    """Steps, and entries shown (of the LM-tuned: sentences), repeats counted; of two folds, the first one's."""
    config = training.config
    if config is None:
        return {"steps": 0, "shown": 0}
    if training.system in TUNED:
        steps = triplets.lm_steps(len(systems.said_in(profile, training.trained)), config)
        return {"steps": steps, "shown": steps * config.batch_size}
    trained = training.trained.removeprefix(FOLDS)
    whole = trained == training.trained
    entries = systems.training_entries(profile, trained) if whole else systems.folds(profile, trained)[0][0]
    steps = triplets.mega_batches(len(entries), config)[1]
    return {"steps": len(steps), "shown": sum(map(len, steps))}


def digest(profile: Profile, training: Training) -> str:
    """Of the recipe and the data that a training's values come from, whatever code made them. IU X-ray counts where it
    trains: to a test it is as it was published, and how it is labelled the open entries tell."""
    data = [systems.entries(profile, c) for c in (*OPEN, *([IU] if IU in training.trained else []))]
    said = systems.said_in(profile, training.trained) if training.system in TUNED else []
    judged = [] if training.trained.startswith(FOLDS) else read_judgments()
    return artifacts.digest(
        training.config, data, said, judged, pipeline.start_digest(systems.start_of(profile, training.system))
    )


# --- read --------------------------------------------------------------------------------------------------------


def measured(profile: Profile) -> pd.DataFrame:
    """The values of all trainings with their keys and the row's `name` in their table: what the run trains, or of a run
    in place what the record has, and beside it the short training on A that the run does itself, tested on B."""
    if profile.in_place:
        own = Training(live_name(profile), "A", systems.chosen(profile, profile.radiology.best))
        found = [RECORD.read(profile), values(profile, own, ["B"]).assign(**own.key)]
    else:
        found = [values(profile, training).assign(**training.key) for training in trainings(profile)]
    return _named(pd.concat(found, ignore_index=True), profile.radiology.best.label)


def live_name(profile: Profile) -> str:
    """The row of the model that a run trains on A."""
    return pipeline.row_name(profile, SBERT) if profile.in_place else SBERT


def _named(found: pd.DataFrame, best: str) -> pd.DataFrame:
    """With `name`, missing where no table shows it: the rates that weren't chosen, and what was tuned, or trained from
    a plain start, on another collection than TRAIN_OF's. A model of another one than that says in its name which, in
    Table 4 all do."""
    tried = tried_rates(found)
    tried = tried[tried["row"] == best]
    rates = [0, *tried.loc[tried.index[tried["all"] == tried["all"].max()], "learning rate"]]
    usual = found["trained"] == found["tested"].map(TRAIN_OF)
    name = found["system"].where(~found["system"].isin([MLM, LM, ON_PLAIN]) | usual)
    name = name.where((found["table"] != 1) | found["rate"].isin(rates))
    elsewhere = (found["system"] == SBERT) & (~usual | (found["table"] == 4))
    return found.assign(name=name.mask(elsewhere, "SBERT (trained on " + found["trained"] + ")"))


def tried_rates(found: pd.DataFrame) -> pd.DataFrame:
    """systems.rates of the rows that were trained on A's folds, with the seed that all rates were tried with."""
    return systems.rates(found[(found["trained"] == FOLDS + "A") & (found["rate"] > 0) & (found["seed"] == 0)])


def own_rates(tried: pd.DataFrame) -> pd.Series:
    """Row of Table 1 -> the learning rate at which it has the highest mAP over all queries in `tried`."""
    return tried.loc[tried.groupby("row")["all"].idxmax()].set_index("row")["learning rate"]


def shown(found: pd.DataFrame, rows: pd.DataFrame, table: int) -> pd.DataFrame:
    """A table's long form with `budget`: the entries that each training was shown; missing for untrained rows."""
    part = found[(found["table"] == table) & (found["shown"] > 0)].groupby(["name", "tested"])["shown"].max()
    at = pd.MultiIndex.from_arrays([rows["system"], rows["setting"].str.partition(" (")[0]])
    return rows.assign(budget=part.reindex(at).to_numpy())


def stale(profile: Profile) -> list[str]:
    """The trainings of the profile that the record lacks, or has of another recipe or other data."""
    search, *_ = systems.searched(profile) or [[]]
    rates = [Training(config.label, FOLDS + "A", config) for config in search]
    if lacking := sum((RECORD.fault(profile, rate.key, digest(profile, rate)) for rate in rates), []):
        return [*lacking, "and all that are trained at the learning rate which these choose"]
    faults = [RECORD.fault(profile, t.key, digest(profile, t)) for t in _of_record(profile, SEEDS)]
    faults += [STEPS.fault(profile, t.key, digest(profile, t)) for t in watched(profile, partial(_tried, profile))]
    faults += [TUNING.fault(profile, t.key, digest(profile, t)) for t in tunings(profile)]
    return sum(faults, [])


def _tried(profile: Profile) -> pd.DataFrame:
    return tried_rates(RECORD.read(profile))


def _of_record(profile: Profile, seeds: tuple[int, ...]) -> Iterator[Training]:
    """All that the record is to have, the learning rate chosen by what it has."""
    yield from trainings(profile, seeds, partial(_tried, profile))
    yield from from_plain(profile, seeds, partial(_tried, profile))


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS, metavar="N", help="beside 0")
    options, profile = records.parse(parser, arguments)
    made = RECORD.read(profile)
    if len(made) and systems.IU in set(made["tested"]) - set(systems.collections(profile)):
        parser.error(f"the records have {systems.IU}, which isn't here: ./run_all.sh --public fetches it")
    if options.check:
        records.end_check(stale(profile))
    for training in _of_record(profile, tuple(options.seeds)):
        if lacking := weights.missing(str(systems.start_of(profile, training.system).encoder)):
            print(f"{training.system}: left out. {lacking}")
            continue
        made_of = digest(profile, training)
        RECORD.add(profile, training.key, partial(values, profile, training), options.remake, made_of)
    for training in watched(profile, partial(_tried, profile)):
        make = partial(systems.on_the_way, profile, IU, training.config)
        STEPS.add(profile, training.key, make, options.remake, digest(profile, training))
    for training in tunings(profile):
        make = partial(systems.tuning_on_the_way, profile, "A", "B", training.system == HEAD_FIRST)
        TUNING.add(profile, training.key, make, options.remake, digest(profile, training))


if __name__ == "__main__":
    main()
