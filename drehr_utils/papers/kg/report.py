"""What notebook 12 tells of KG entity retrieval: rows, gains, reasons, and the paper's figures beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd

from drehr_utils.evaluation import intervals, tables
from drehr_utils.papers.kg import linking
from drehr_utils.papers.kg.linking import TestSet
from drehr_utils.papers.kg.pair_training import pair_schedule
from drehr_utils.papers.kg.systems import (
    graphs,
    graphs_of,
    own_test,
    recall,
    tasks,
    test_sets,
    trained_on_task,
)
from drehr_utils.papers.kg.tasks import text_key
from drehr_utils.profiles import Profile

PAPER_PERCENT = 100  # the paper prints recall as a fraction, our tables run from 0 to 100


def compare(
    profile: Profile, systems: Mapping[str, str | Path], test_sets: Mapping[str, TestSet], against: str
) -> pd.DataFrame:
    """Long-form rows (intervals.RESULT_COLUMNS) of systems (name -> recall's `model`) on test sets (group -> set).

    `setting` is the zero-shot scenario; p is against the system named `against`."""
    frames = []
    for group, test_set in test_sets.items():
        values = {name: recall(profile, test_set, model) for name, model in systems.items()}
        for name in systems:
            setting = linking.zero_shot_setting(graphs_of(profile, name), test_set)
            base = None if name == against else values[against]
            frames.append(intervals.result_rows(name, setting, group, values[name], profile.resampling, base))
    return pd.concat(frames, ignore_index=True)


def gain_draws(
    profile: Profile, systems: Mapping[str, str | Path], test_sets: Mapping[str, TestSet], against: str | Path, n: int
) -> pd.DataFrame:
    """Bootstrap draws of every cell's gain over the model `against`, in points: [n, (system, group, metric)].

    A draw takes a test set's gold concepts with repetition, each with all its mentions and the same for every system
    and metric, so that any statistic over cells has its interval: take it draw by draw."""
    columns = {}
    for group, test_set in test_sets.items():
        rng, base = np.random.default_rng(profile.seed), recall(profile, test_set, against)
        clusters = sorted(set(base["query_id"]))
        weights = rng.multinomial(len(clusters), np.full(len(clusters), 1 / len(clusters)), n)
        for name, model in systems.items():
            gains = recall(profile, test_set, model).set_index(["metric", "search_id"])
            gains["value"] -= base.set_index(["metric", "search_id"])["value"]
            for metric, part in gains.groupby("metric"):
                each = part.groupby("query_id")["value"].agg(["sum", "size"]).loc[clusters].to_numpy()
                total, mentions = (weights @ each).T
                columns[name, group, metric] = total / mentions
    return pd.DataFrame(columns).rename_axis(columns=["system", "group", "metric"])


def learnt(profile: Profile, name: str, test_set: TestSet) -> dict[str, float]:
    """R@1 of a task's system against the starting encoder: the gain, its p, mentions put right and put wrong."""
    before, after = (
        recall(profile, test_set, model).query("metric == 'R@1'")
        for model in ("start", trained_on_task(profile, name)[0])
    )
    gain = intervals.gain_rows(name, "", "", after, before, profile.resampling).iloc[0]
    change = after.set_index("search_id")["value"] - before.set_index("search_id")["value"]
    put = {"right": int((change > 0).sum()), "wrong": int((change < 0).sum())}
    return {"gain": gain["ours"], "p": gain["p"], **put, "mentions": len(change)}


def why(profile: Profile) -> pd.DataFrame:
    """For each task: `learnt` on a sample of the mentions that training showed and on its dev mentions, and the share
    of its pairs that training showed, %. A gain on the first alone is one that does not carry over."""
    sizes, rows = profile.kg, {}
    for name, (train, _) in tasks(profile).items():
        pairs = sorted({pair for step in pair_schedule([len(train)], sizes.training) for _, pair in step})
        shown = linking.seen_task(train, pairs, sizes.seen_mentions, sizes.seen_concepts, profile.seed)
        parts = {"shown": learnt(profile, name, shown), "dev": learnt(profile, name, own_test(profile, name))}
        rows[name] = {f"{part}: {k}": v for part, found in parts.items() for k, v in found.items()}
        rows[name]["pairs shown, %"] = 100 * len(pairs) / len(train)
    return pd.DataFrame(rows).T


def seen_concepts(profile: Profile) -> pd.DataFrame:
    """The share of a test set's gold concepts, %, with a name in each task's training pairs: 0 where §2's second
    scenario holds."""
    shares: dict[str, dict[str, float]] = {}
    for test_set in test_sets(profile):
        gold = sorted({c for mention in test_set.mentions for c in mention.concepts})
        for name, (train, _) in tasks(profile).items():
            held = {text_key(text) for text in train.used_texts()}
            known = [any(text_key(n) in held for n in (test_set.concepts[c], *test_set.names[c])) for c in gold]
            shares.setdefault(test_set.name, {})[name] = 100 * float(np.mean(known))
    return pd.DataFrame(shares)


# --- the paper's figures --------------------------------------------------------------------------------------------


def paper_names(profile: Profile) -> dict[str, str]:
    """Our names -> the paper's, where ours take the place of what we cannot have: graphs, and test sets."""
    snomed, umls = graphs(profile)
    kinds = ("Syn", "Graph")
    systems = {f"{ours} {k}": f"{theirs} {k}" for ours, theirs in ((snomed, "SNOMED"), (umls, "UMLS")) for k in kinds}
    return systems | {"OpenLinking": "3DNotes-ICD", "NCBI Disease": "MedMentions"}


def paper_recall(profile: Profile) -> pd.DataFrame:
    """Table 3 of the paper in percent, on the two test sets whose place ours take, under our names."""
    figures, names = tables.paper_figures("kg", 3), paper_names(profile)
    ours = {names[name]: name for name in ("OpenLinking", "NCBI Disease")}
    figures = figures[figures["group"].isin(ours)]
    return figures.assign(group=figures["group"].replace(ours), value=PAPER_PERCENT * figures["value"])


def task_table(profile: Profile) -> pd.DataFrame:
    """Table 1 as a long form: pairs in train and dev, ours beside the paper's."""
    sizes = {name: {"Train": len(train), "Dev": len(dev)} for name, (train, dev) in tasks(profile).items()}
    return _counts(profile, sizes, 1)


def test_set_table(profile: Profile) -> pd.DataFrame:
    """Table 2 as a long form: the test sets' mentions; of ours also their gold concepts, and those searched."""
    sizes = {
        t.name: {
            "Mentions": len(t.mentions),
            "Gold concepts": len({c for m in t.mentions for c in m.concepts}),
            "Searched concepts": len(t.concepts),
        }
        for t in test_sets(profile)
    }
    return _counts(profile, sizes, 2)


def _counts(profile: Profile, sizes: dict[str, dict[str, int]], table: int) -> pd.DataFrame:
    blank = dict.fromkeys(["paper", "low", "high", "p"], np.nan) | {"setting": "", "group": ""}
    rows = [{"system": s, "metric": m, "ours": float(n)} | blank for s, row in sizes.items() for m, n in row.items()]
    long = pd.DataFrame(rows)[intervals.RESULT_COLUMNS]
    return tables.with_paper(long, tables.paper_figures("kg", table), paper_names(profile))


def example_table(profile: Profile, systems: Mapping[str, Path], test_set: TestSet, each: int = 2) -> pd.DataFrame:
    """Table 4 as a long form: mentions that one of two systems gets right at rank 1 and the other does not.

    Chosen by rule: the first `each` of either kind in the test set's order, each with another concept. `setting` is
    the mention, `group` the gold concept; the paper's own examples follow."""
    hits = first_hits(profile, systems, test_set)
    first, second = systems
    chosen: list[linking.Mention] = []
    for name, other in ((first, second), (second, first)):
        only = [m for m in test_set.mentions if hits.at[m.id, name] and not hits.at[m.id, other]]
        by_concept = {m.concepts: m for m in reversed(only)}
        chosen += [m for m in only if by_concept[m.concepts] is m][:each]
    rows = [
        (name, m.text, test_set.concepts[min(m.concepts)], "R@1", np.nan, 100.0 * hits.at[m.id, name])
        for m in chosen
        for name in systems
    ]
    long = pd.DataFrame(rows, columns=intervals.RESULT_COLUMNS[:6]).assign(low=np.nan, high=np.nan, p=np.nan)
    theirs = tables.paper_figures("kg", 4)
    renamed = dict(zip(theirs["system"].drop_duplicates(), systems, strict=True))
    theirs = theirs.assign(system=theirs["system"].replace(renamed), paper=PAPER_PERCENT * theirs["value"])
    return pd.concat([long, theirs.drop(columns="value")], ignore_index=True)[intervals.RESULT_COLUMNS]


def first_hits(profile: Profile, systems: Mapping[str, Path], test_set: TestSet) -> pd.DataFrame:
    """Whether each mention's gold concept comes first: bool [mentions, systems], indexed by the mention's id."""
    frames = {name: recall(profile, test_set, model) for name, model in systems.items()}
    return pd.DataFrame(
        {name: f[f["metric"] == "R@1"].set_index("search_id")["value"] > 0 for name, f in frames.items()}
    )
