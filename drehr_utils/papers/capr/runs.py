"""Records of CAPR's systems: trained as long as judges a claim (profile `full`), committed, and shown by `open`.

    python -m drehr_utils.papers.capr.runs                       # all that it lacks: 6 to 50 minutes of a core each
    python -m drehr_utils.papers.capr.runs --only CAPR-Bi CDV
    python -m drehr_utils.papers.capr.runs --check               # which systems' rows are of another recipe or data

data/runs/capr.csv.gz has a row a system, task, search and metric: each query's recalls (numbers, no text), what wrong
first passages share with their queries (§4.5), and training's losses, by step. A training that was cut off goes on from
its last checkpoint: start it in a clone of its own, where no edit makes it another, and copy data/runs from there.
capr_steps.csv.gz has the recalls on the way of WATCHED's second trainings; one that was cut off begins again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pandas as pd

from drehr_utils import artifacts
from drehr_utils.evaluation import medquad, records
from drehr_utils.evaluation.metrics import NO_PATIENT
from drehr_utils.evaluation.records import Record
from drehr_utils.papers.capr import report, systems
from drehr_utils.papers.capr.models import ContextualDocumentVectors
from drehr_utils.profiles import Profile
from drehr_utils.training import encoders

RECORD, STEPS = Record("runs/capr.csv.gz"), Record("runs/capr_steps.csv.gz")
WATCHED, SECOND = (systems.CDV, systems.CDV_FINETUNE, systems.BI, systems.POLY), 1  # and the second trainings' seed
ALL_ROWS = (*systems.TRAINED, *systems.TRIED, systems.WHOLE_START, systems.WHOLE)
TRAINING, ALL = "training", "all"  # the task of losses; the search of what is about all of a task's searches
SAVE_STEPS = 100  # a checkpoint of two encoders is half a gigabyte


def tasks(profile: Profile, row: str) -> tuple[Profile, str, dict[str, systems.Task]]:
    """The profile and system of a row, and what it is asked."""
    if row in (systems.WHOLE, systems.WHOLE_START):
        profile, row = systems.whole_sections(profile), systems.BI if row == systems.WHOLE else systems.START
    return profile, row, systems.tasks(profile, row)


def digest(profile: Profile, row: str) -> str:
    """Of a row's recipe, what it is trained on and started from, and what it is asked; not of the code."""
    profile, name, asked_of = tasks(profile, row)
    size, system = profile.capr, profile.capr.system(name)
    first = system.after and size.system(system.after)
    lengths = [size.passage_tokens, size.query_tokens, profile.pooling, profile.seed]
    lengths += [size.word_buckets] if name == systems.CDV_FASTTEXT else []
    lengths += [size.medquad_queries, size.costly_queries]  # of MedQuAD, which may not be here
    found = [t for task, t in asked_of.items() if task != systems.MEDQUAD]
    asked = [[*map(list, (t.data.queries.values(), t.data.passages.values(), t.data.qrels.values())), t.candidates]
             for t in found]  # fmt: skip
    start = encoders.identity(system.encoder or profile.encoder)
    return artifacts.digest(system, first, lengths, start, systems.training_passages(profile)[1], asked)


def measured(profile: Profile, row: str) -> pd.DataFrame:
    """`task, search_id, metric, value` of a row, trained where its weights aren't in the cache, with its budget."""
    profile, name, asked_of = tasks(profile, row)
    model, curve, _ = systems.trained_model(profile, name)
    rows = []
    if curve is not None:
        rows.append(curve.rename(columns={"step": "search_id", "loss": "value"}).assign(task=TRAINING, metric="loss"))
    # A Cross-encoder would read all pairs twice more.
    halves = {} if name == systems.CROSS else systems.halves(systems.held_out(profile))
    for task, asked in (asked_of | halves).items():
        scores = systems.scored(profile, name, task, *asked)
        rows.append(medquad.recall_values(asked.data, asked.candidates, scores).assign(task=task))
        if task not in (systems.MEDQUAD, *halves):  # MedQuAD's passages have no labels
            shared = report.mistakes(asked.data, asked.pool, asked.candidates, scores)
            rows.append(pd.DataFrame({"task": task, "search_id": ALL, "metric": shared.index, "value": shared.values}))
    if isinstance(model, ContextualDocumentVectors):
        heads = systems.head_values(model, systems.held_out(profile))
        rows += [found.assign(task=head) for head, found in heads.items()]
    config = profile.capr.system(name).config
    steps = 0 if curve is None else len(curve)
    budget = {"steps": steps, "pairs": steps and steps * config.batch_size, "seed": config.seed if config else 0}
    return pd.concat(rows, ignore_index=True)[["task", "search_id", "metric", "value"]].assign(**budget)


def recorded(profile: Profile) -> list[str]:
    """The systems that have a record where a run of the profile looks for it: a short one's, in place of its own."""
    rows = RECORD.read(profile) if profile.short else pd.DataFrame()
    return [name for name in systems.TRAINED if len(rows) and name in set(rows["system"])]


def values(profile: Profile, name: str, task: str, data: medquad.MedQuad) -> pd.DataFrame:
    """A recorded system's values on a task, `data`, as medquad.recall_values; empty where it wasn't asked."""
    rows = RECORD.read(profile).query("system == @name and task == @task and search_id in @data.aspects")
    rows = rows.assign(query_id=rows["search_id"], query_type=rows["search_id"].map(data.aspects))
    return rows[NO_PATIENT].reset_index(drop=True)


def mistakes(profile: Profile, name: str, task: str = systems.HELD_OUT) -> pd.Series:
    """report.mistakes of a recorded system."""
    rows = RECORD.read(profile).query("system == @name and task == @task and search_id == @ALL")
    return rows.set_index("metric")["value"].fillna(0.0)


def curve(profile: Profile, name: str) -> pd.DataFrame:
    """A recorded system's `step, loss`."""
    rows = RECORD.read(profile).query("system == @name and task == @TRAINING")
    return pd.DataFrame({"step": rows["search_id"].astype(int), "loss": rows["value"]}).reset_index(drop=True)


def budgets(profile: Profile) -> pd.DataFrame:
    """`steps, pairs, minutes, date, machine` of each recorded system; minutes with its scoring."""
    rows = RECORD.read(profile).drop_duplicates("system").set_index("system")
    return rows.loc[recorded(profile), ["steps", "pairs", "minutes", "date", "machine"]]


def steps(profile: Profile) -> dict[str, pd.DataFrame]:
    """WATCHED's systems.on_the_way, where they are recorded."""
    rows = STEPS.read(profile) if profile.short else pd.DataFrame()
    parts = dict(list(rows.groupby("system"))) if len(rows) else {}
    return {name: parts[name] for name in WATCHED if name in parts}


def stale(profile: Profile) -> list[str]:
    """The systems that the records lack, or have of another recipe or other data than now."""
    rows = [(RECORD, {"system": name}) for name in ALL_ROWS] + [(STEPS, _second(name)) for name in WATCHED]
    return sum((record.fault(profile, key, digest(profile, key["system"])) for record, key in rows), [])


def _second(name: str) -> dict[str, str | int]:
    return {"system": name, "seed": SECOND}


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__)
    parser.add_argument("--only", nargs="+", metavar="SYSTEM", choices=ALL_ROWS, default=ALL_ROWS)
    options, profile = records.parse(parser, arguments)
    profile, made = replace(profile, save_steps=SAVE_STEPS), RECORD.read(profile)
    if len(made) and systems.MEDQUAD in set(made["task"]) and systems.medquad_data(profile) is None:
        parser.error("the records have MedQuAD, which isn't here: ./run_all.sh --public fetches it")
    if options.check:
        records.end_check(stale(profile))
    for name in options.only:
        made_of, make = digest(profile, name), lambda name=name: measured(profile, name)
        RECORD.add(profile, {"system": name}, make, remake=options.remake, digest=made_of)
    for name in (name for name in WATCHED if name in options.only):
        make = partial(systems.on_the_way, profile, name, SECOND)
        STEPS.add(profile, _second(name), make, options.remake, digest(profile, name))


if __name__ == "__main__":
    main()
