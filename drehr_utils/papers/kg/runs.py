"""Records of KG entity retrieval's systems: trained as long as judges a claim (profile `full`), and shown by `open`.

    python -m drehr_utils.papers.kg.runs                                # all that the records lack
    python -m drehr_utils.papers.kg.runs --only Comb "HPO Syn on SmolLM2" --seeds 0 1 2
    python -m drehr_utils.papers.kg.runs --check                        # which records are of other data or settings

data/runs/kg.csv.gz holds every mention's R@1 and R@25, kg_steps.csv those of a system's own task on the way. A training
that was cut off goes on from its last checkpoint: start it in a clone of its own, where no edit makes it another, and
copy data/runs/kg* from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from drehr_utils import artifacts, files
from drehr_utils.evaluation import records
from drehr_utils.evaluation.metrics import NO_PATIENT, means
from drehr_utils.evaluation.records import REMAKE, Record
from drehr_utils.papers.kg import linking, systems
from drehr_utils.papers.kg.linking import TestSet
from drehr_utils.profiles import Profile
from drehr_utils.training import weights

VALUES, STEPS = Record("runs/kg.csv.gz"), Record("runs/kg_steps.csv")


# --- made --------------------------------------------------------------------------------------------------------


def all_rows(profile: Profile) -> list[str]:
    """All that a record may be of."""
    trained = [*systems.names(profile), *systems.share_rows(profile), *systems.length_rows(profile)]
    return [*trained, *systems.plain_rows(profile)]


def tested(profile: Profile, system: str, seed: int) -> dict[str, TestSet]:
    """What a system is measured on: the test sets, Figure 2's, and of its own task new mentions and learnt ones; one of
    share_rows and length_rows on new mentions of its task (TURNED: both ways) and all codes besides, one of plain_rows
    on new mentions of its task (PLAIN: of all), but for its first training, which was not asked."""
    (_, figure2), found = systems.supervised_task(profile), systems.test_sets(profile)
    if system in (plain := systems.plain_rows(profile)):
        learnt = plain[1:] if system == systems.PLAIN else [system] if seed else []
        own = [systems.own_test(profile, systems.start_of(profile, row)[1]) for row in learnt]
        return {t.name: t for t in (*found, *own)}
    if system in (*systems.share_rows(profile), *systems.length_rows(profile)):
        own = [systems.own_test(profile, systems.task_of(system)), systems.all_codes(profile)]
        other_way = [systems.own_test(profile, system)] if system.endswith(systems.TURNED) else []
        return {t.name: t for t in (*found, *own, *other_way)}
    if system not in systems.tasks(profile):
        return figure2
    own = [systems.own_test(profile, system)]
    own += [systems.seen_test(profile, system, systems.training(profile, system, seed))]
    own += [systems.all_codes(profile)] if system == systems.NAMES else []
    return {t.name: t for t in (*found, *own)} | (figure2 if system == systems.COMB else {})


def digest(profile: Profile, system: str, seed: int) -> str:
    """Of settings and data that a record is made of, whatever code made it."""
    own, name = systems.start_of(profile, system)
    pairs = [[t.texts, t.mention, t.concept] for t in systems.trained_on(own, name)]
    asked = [[t.name, [[m.id, m.text, *sorted(m.concepts)] for m in t.mentions], t.concepts]
             for t in tested(profile, system, seed).values()]  # fmt: skip
    return artifacts.digest(systems.training(own, name, seed), pairs, asked, systems.identity(own, "start"))


def on_the_way(profile: Profile, system: str, curve: pd.DataFrame) -> pd.DataFrame:
    """What systems.train measured into a training's curve: step, R@1, R@25, the start's first."""
    own = systems.own_test(profile, systems.task_of(system))
    start = means(systems.recall(profile, own, "start")).to_dict()
    points = curve[["step", *start]].dropna()
    return pd.concat([pd.DataFrame([{"step": 0, **start}]), points], ignore_index=True)


def record(profile: Profile, system: str, seed: int = 0, remake: bool = False) -> None:
    """Trains a system and adds what it finds, and what it found on the way, to the records."""
    own, name = systems.start_of(profile, system)

    def values() -> pd.DataFrame:
        folder, curve = systems.train(own, name, seed, own == profile)
        sets = tested(profile, system, seed).items()
        found = [systems.recall(own, t, folder).assign(group=group) for group, t in sets]
        return pd.concat(found, ignore_index=True).assign(steps=len(curve), pairs=systems.pairs_shown(own, name))

    key, made_of = {"system": system, "seed": seed}, digest(profile, system, seed)
    VALUES.add(profile, key, values, remake, made_of)
    if systems.has_curve(profile, system):
        STEPS.add(
            profile, key, lambda: on_the_way(profile, system, systems.train(profile, system, seed)[1]), remake, made_of
        )


# --- read --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Recorded:
    """A trained system's record, where systems.recall's `model` would stand."""

    values: pd.DataFrame  # of all its seeds and test sets

    def recall(self, group: str) -> pd.DataFrame:
        """systems.recall of the test set called `group`; with a column `seed` where there are several trainings."""
        found = self.values[self.values["group"] == group].reset_index(drop=True)
        return found[[*NO_PATIENT, "seed"] if found["seed"].nunique() > 1 else NO_PATIENT]


Model = str | Path | Recorded


def first_training(model: Model) -> Model:
    """Of a record of several trainings the first alone: each was shown other mentions (seen_test)."""
    if not isinstance(model, Recorded):
        return model
    return Recorded(model.values[model.values["seed"] == model.values["seed"].min()])


def recorded(profile: Profile) -> dict[str, Recorded]:
    """The records that a short profile shows beside its own trainings, in the systems' order; {} for another."""
    table = VALUES.read(profile) if profile.short else pd.DataFrame()
    if table.empty:
        return {}
    with files.naming(VALUES.path(profile), REMAKE):
        table = table.astype({"search_id": str, "query_id": str, "steps": int, "pairs": int})
        table[["group", *NO_PATIENT, "seed"]]
        parts = dict(list(table.groupby("system")))
    return {name: Recorded(parts[name]) for name in all_rows(profile) if name in parts}


def recall(profile: Profile, test_set: TestSet, model: Model) -> pd.DataFrame:
    """systems.recall, or what is recorded of it."""
    return model.recall(test_set.name) if isinstance(model, Recorded) else systems.recall(profile, test_set, model)


def live(profile: Profile) -> list[str]:
    """The systems that a run of the profile trains: all that it has no record of, and two that show the way."""
    few, known = [systems.COMB, f"{systems.ICD10} Syn"], recorded(profile)
    return [name for name in systems.names(profile) if name in few or name not in known]


def curves(profile: Profile, made: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Row -> `on_the_way`: the records', the mean over a row's trainings, or where there are none those of `made`, this
    run's loss curves by row."""
    table = STEPS.read(profile) if profile.short else pd.DataFrame()
    if len(table):
        mean = table.groupby(["system", "step"], as_index=False)[["R@1", "R@25"]].mean()
        parts = dict(list(mean.groupby("system")))
        names = [*systems.names(profile), *systems.length_rows(profile)]
        return {name: parts[name] for name in names if name in parts}
    rows = {row: row.removesuffix(" (short)") for row in made}
    return {row: on_the_way(profile, name, made[row]) for row, name in rows.items() if name in systems.tasks(profile)}


def stale(profile: Profile) -> list[str]:
    """The systems that the records lack, or have of other settings or data than the profile's now, or that are gone."""
    table, known = VALUES.read(profile), all_rows(profile)
    recorded = [*table[["system", "seed"]].drop_duplicates().itertuples(index=False, name=None)] if len(table) else []
    gone = [f"{system}: there is no such system now" for system in sorted({name for name, _ in recorded} - set(known))]
    keys = dict.fromkeys([(name, 0) for name in known] + [key for key in recorded if key[0] in known])
    return sum((VALUES.fault(profile, {"system": name, "seed": n}, digest(profile, name, n)) for name, n in keys), gone)


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__)
    parser.add_argument("--only", nargs="+", metavar="SYSTEM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    options, profile = records.parse(parser, arguments)
    known = all_rows(profile)
    records.refuse_unknown(parser, "system", options.only, known)
    made = VALUES.read(profile)  # without these data every digest is another, and all would be made again
    if len(made) and linking.NCBI in set(made["group"]) - {t.name for t in systems.test_sets(profile)}:
        parser.error(f"the records have {linking.NCBI}, which isn't here: ./run_all.sh --public fetches it")
    if options.check:
        records.end_check(stale(profile))
    for system in options.only or known:
        if lacking := weights.missing(systems.start_of(profile, system)[0].kg.encoder or ""):
            print(f"{system}: left out. {lacking}")
            continue
        for seed in options.seeds:
            record(profile, system, seed, options.remake)


if __name__ == "__main__":
    main()
