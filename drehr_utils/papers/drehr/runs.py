"""Records of DR.EHR's systems: trained as long as judges a claim (profile `full`), committed, and shown by `open`.

    python -m drehr_utils.papers.drehr.runs              # what the records lack; all of them: a day of two cores
    python -m drehr_utils.papers.drehr.runs --only DR.EHR --seeds 0 1 2
    python -m drehr_utils.papers.drehr.runs --check    # which are out of date; five steps of each: minutes

In data/runs: <row>-seed<n>.json says what was trained and how it went; scores.csv.gz holds every search's scores, a
column a training (of other sizes, of ablations, of other graphs, of other notes, by windows, of short trainings, of
the search on dev and of departures: scores-sizes.csv.gz, -ablations, -graphs, -notes, -windows, -short, -search,
-departures); <row>.<split>.<setting>.run.gz are TREC run files of Table 4's rows, of the first seed.

A training that was cut off goes on from its last checkpoint: start it in a clone of its own, where no edit makes it
another, and copy data/runs from there. On two cores, two of them at once with one thread each
(OMP_NUM_THREADS=1) take two thirds of the time.
"""

from __future__ import annotations

import datetime
import json
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback

from drehr_utils import artifacts, files, pipeline
from drehr_utils.config import Recipe
from drehr_utils.data.benchmark import Benchmark
from drehr_utils.errors import DataError
from drehr_utils.evaluation import medquad, metrics, records
from drehr_utils.evaluation.records import REMAKE
from drehr_utils.papers.drehr import ablations, recipe_search, rivals, systems
from drehr_utils.profiles import ROOT, Profile
from drehr_utils.search import retrievers
from drehr_utils.training import encoders, trainer
from drehr_utils.training.positives import PositiveSets

UNTRAINED, OWN = "untrained", ROOT / "data/models/drehr-improved"
CURVE_STEPS = 51  # dev is scored once an epoch of the open notes
SPLITS, SETTINGS, DEPTH = ("dev", "test"), ("single", "multi"), 100
KEYS = ["split", "setting", "match_type", "search_id", "metric"]  # of scores_file


def folder(profile: Profile) -> Path:
    return ROOT / "data/runs" if profile.in_place or profile.recorded else profile.cache / "runs"


def slug(row: str, seed: int | None = None) -> str:
    name = re.sub(r"[^a-z0-9]+", "-", row.lower()).strip("-")
    return name if seed is None else f"{name}-seed{seed}"


def scores_file(profile: Profile, row: str) -> Path:
    """A file a family of rows: a new record makes only those notebooks out of date that read its family."""
    of_ablations = ablations.stage1_ablation(profile) | ablations.stage2_ablation(profile)
    families = {"-sizes": systems.sizes(profile), "-ablations": of_ablations, "-notes": systems.of_other_notes(profile)}
    families |= {"-windows": systems.by_windows(profile), "-short": systems.as_short(profile)}
    families |= {"-search": recipe_search.trained(profile), "-graphs": systems.of_other_graphs(profile)}
    families |= {"-departures": ablations.departures(profile)}
    return folder(profile) / f"scores{next((name for name, its in families.items() if row in its), '')}.csv.gz"


# --- made --------------------------------------------------------------------------------------------------------


def dev_means(profile: Profile, encoder: SentenceTransformer) -> dict[str, float]:
    """Table 4's six metrics on dev, computed in bfloat16: for curves, not for tables."""
    bench = pipeline.benchmark(profile, "dev")
    scores = pipeline.dense(encoder, bench, bf16=True)
    found = {"single": metrics.single_patient(bench, scores), "multi": metrics.multi_patient(bench, scores)}
    means = {f"{setting} {k}": v for setting, values in found.items() for k, v in metrics.means(values).items()}
    return {name: round(float(value), 3) for name, value in means.items() if metrics.AVERAGE not in name}


def transfer_scores(encoder: SentenceTransformer) -> dict[str, float]:
    """Zero-shot R@1 and R@5 on a sample of MedQuAD, 16 candidates a query; empty where the data aren't at hand.

    A guard against forgetting, not a target: the full split with 64 candidates is notebook 08's."""
    if (data := medquad.load_medquad()) is None:
        return {}
    data = data.every(7)
    candidates = medquad.medquad_candidates(data, medquad.term_scores(data, "BM25"), n=16)
    values = medquad.zero_shot(lambda texts: encoders.encode(encoder, texts, bf16=True), data, candidates)
    return {f"MedQuAD {metric}": round(float(value), 2) for metric, value in metrics.means(values).items()}


def train(profile: Profile, row: str, seed: int = 0) -> tuple[Path, dict[str, pd.DataFrame]]:
    """The row's model folder, trained where it isn't there, and its curves, as pipeline.train_recipe;
    `data/cache/<profile>/models/<slug>` is a link to it."""
    curve = trainer.Curve(CURVE_STEPS, lambda encoder: dev_means(profile, encoder))
    recipe = ablations.with_seed(systems.rows(profile)[row], seed)
    model, curves = pipeline.train_recipe(systems.profile_of(profile, row), recipe, [curve])
    pipeline.link(profile.cache / "models" / slug(row, seed), model)
    return model, curves


def data_digest(profile: Profile, recipe: Recipe) -> str:
    """Of what a recipe is trained on and started from, whatever code made it."""
    sets = [pipeline.stage1_sets(profile)] if recipe.stage1 else []
    sets += [pipeline.stage2_sets(profile)] if recipe.stage2 else []
    texts = [chunk.text for chunk in pipeline.chunks(profile, stage="stage1" if recipe.stage1 else "")]
    return artifacts.digest(texts, [_content(part) for part in sets], pipeline.start_digest(profile))


def _content(sets: PositiveSets) -> dict[str, Any]:
    """A digest's, in the form that records have had from the first: terms numbered as they come up, flat arrays."""
    source = pc.list_flatten(sets.table["sources"]).combine_chunks()
    # With offsets of 64 bits: the paper's terms are more than 2 GB
    numbered = pc.list_flatten(sets.table["terms"]).cast(pa.large_string()).combine_chunks().dictionary_encode()
    return {
        "ids": sets.ids, "terms": numbered.dictionary.to_pylist(), "sources": sets.sources, "offsets": sets.offsets,
        "term": numbered.indices.to_numpy(), "source": source.to_numpy(),
    }  # fmt: skip


def record(profile: Profile, row: str, seed: int, model: Path, curves: dict[str, pd.DataFrame]) -> None:
    """Scores a trained row on dev and test (a candidate of the search and a departure on dev alone), and writes its
    records."""
    recipe, name = ablations.with_seed(systems.rows(profile)[row], seed), slug(row, seed)
    found, candidate = {}, row in recipe_search.trained(profile)
    guarded = candidate or row in {*systems.table4(profile), systems.BY_WINDOWS, systems.REAL[systems.BY_WINDOWS]}
    guarded = guarded and not systems.is_hybrid(row)
    for split in SPLITS[: 1 if candidate or row in ablations.departures(profile) else 2]:
        bench = pipeline.benchmark(profile, split)
        scores = systems.scores(profile, row, model, bench)
        found[split] = metrics.per_search(bench, scores)
        if seed == 0 and row in systems.table4(profile) | systems.by_windows(profile):
            write_runs(profile, row, bench, scores, split)
    add_scores(scores_file(profile, row), name, found)
    stages = {stage: config for stage in ("stage1", "stage2") if (config := getattr(recipe, stage))}
    made = [json.loads((stage / "stage.json").read_text()) for stage in _stages(model)]
    machine = made[0]["machine"] if made else f"{platform.machine()}, {encoders.describe_device()}"
    options = f'--profile {profile.name} --only "{row}" --seeds {seed} --remake'
    about = {
        "row": row,
        "seed": seed,
        "steps": {stage: len(curves[stage]) for stage in stages},
        "chunks": profile.processes * pipeline.budget(recipe, curves),
        "minutes": round(sum(stage["minutes"] for stage in made), 1),
        "date": datetime.date.today().isoformat(),
        "machine": machine,
        "command": f"python -m drehr_utils.papers.drehr.runs {options}",
        "recipe": artifacts.digest(recipe),
        "data": data_digest(systems.profile_of(profile, row), recipe),
        "settings": {stage: asdict(config) for stage, config in stages.items()},
        "first losses": _first_five(curves),
        "dev": {stage: _measured(curves[stage]) for stage in stages},
        "guard": transfer_scores(encoders.load_encoder(model)) if guarded else {},
    }
    files.write_atomically(folder(profile) / f"{name}.json", (json.dumps(about, indent=1) + "\n").encode())
    path = files.short_name(folder(profile) / name)
    print(f"{path}: {about['chunks']} chunks, {about['minutes']} minutes", flush=True)


def _first_five(curves: dict[str, pd.DataFrame]) -> list[float]:
    return next(iter(curves.values()))["loss"].head(5).round(5).tolist() if curves else []


def _measured(curve: pd.DataFrame) -> dict[str, list[float]]:
    points = curve.drop(columns=["loss", "learning_rate"]).dropna()
    return points.to_dict("list") if len(points.columns) > 1 else {}


def _stages(model: Path) -> Iterator[Path]:
    """The folders of a model's stages, the last first."""
    while (model / "stage.json").exists():
        yield model
        model = model.resolve().parent / json.loads((model / "stage.json").read_text())["start"]


def add_scores(path: Path, name: str, found: dict[str, pd.DataFrame]) -> None:
    """Puts a training's per-search scores, by split, into its column of a scores_file; one process at a time."""
    long = pd.concat(found, names=["split", None]).reset_index("split")
    column = long[long["metric"] != metrics.AVERAGE].set_index(KEYS)["value"].round(4).rename(name)
    with artifacts.lock(path.with_name(f".{path.name}.lock"), f"adding to {path.name}"):
        table = _scores(path).drop(columns=name, errors="ignore") if path.exists() else None
        files.write_atomically(path, pd.concat([table, column], axis=1).to_csv().encode())


def write_runs(profile: Profile, row: str, bench: Benchmark, scores: metrics.Scores, split: str) -> None:
    """A system's TREC run files of a split, the first 100 chunks of each search: all of a note's.

    Scores have four decimals, dev's three, for they are committed; those that are equal then are told apart by the last
    of them, in our order."""
    digits = 3 if split == "dev" else 4
    for setting in SETTINGS:
        lines = []
        for found in metrics.rankings(bench, scores, setting):
            last = np.inf
            for place, (chunk_id, score) in enumerate(zip(found.chunk_ids[:DEPTH], found.scores, strict=False), 1):
                last = min(round(float(score), digits), last - 10**-digits)
                lines.append(f"{found.search_id} Q0 {chunk_id} {place} {last:.{digits}f} {slug(row)}\n")
        path = folder(profile) / f"{slug(row)}.{split}.{setting}.run.gz"
        files.write_atomically(path, "".join(lines).encode())


def write_untrained(profile: Profile) -> None:
    """The run files of Table 4's rows that have no record: nothing trains for them, or the weights are in OWN."""
    for split in SPLITS:
        bench = pipeline.benchmark(profile, split)
        found = rivals.untrained_scores(profile, bench)
        for name, (model, grid) in rivals.windowed(profile, OWN).items():
            found[name] = rivals.hybrid_scores(profile, model, bench, grid)
        found[rivals.FUSED] = found["BM25 + KG"], pipeline.model_scores(profile, OWN, bench)
        for name, scores in found.items():
            if name != rivals.CHANCE:
                write_runs(profile, name, bench, scores, split)


def first_losses(profile: Profile, recipe: Recipe) -> list[float]:
    """The losses of the recipe's first five steps, trained for it where there is no model yet."""

    class Enough(Exception):
        pass

    class Stop(TrainerCallback):
        def on_log(self, args, state, control, **_):
            self.losses = [row["loss"] for row in state.log_history if "loss" in row]
            if len(self.losses) >= 5:  # more at once where a checkpoint's steps come back
                raise Enough

    stop = Stop()
    try:
        return _first_five(pipeline.train_recipe(profile, recipe, [stop])[1])
    except Enough:
        return [round(loss, 5) for loss in stop.losses[:5]]


# --- read --------------------------------------------------------------------------------------------------------


def abouts(profile: Profile) -> list[dict]:
    """What the records that the profile shows say of themselves."""
    found = []
    for path in sorted(folder(profile).glob("*.json")):
        with files.naming(path, REMAKE):
            found.append(json.loads(path.read_bytes()))
            for field in ("row", "seed", "chunks", "recipe", "data", "first losses"):
                found[-1][field]
    return found


def _scores(path: Path) -> pd.DataFrame:
    with files.naming(path, REMAKE):
        return pd.read_csv(path, index_col=KEYS)


def per_search(profile: Profile, row: str, split: str = "test") -> pd.DataFrame | None:
    """A recorded row as metrics.per_search, with a column `seed`; None where there is no record."""
    seeds = [about["seed"] for about in abouts(profile) if about["row"] == row]
    if not seeds:
        return None
    bench, keys = pipeline.benchmark(profile, split), [key for key in KEYS[1:] if key != "metric"]
    path = scores_file(profile, row)
    table = _scores(path)
    if missing := [name for name in (slug(row, n) for n in seeds) if name not in table]:
        raise DataError(f"{files.short_name(path)}, row 1: column {missing[0]} is missing; {REMAKE}")
    table = table.loc[split, [slug(row, n) for n in seeds]]
    wide = table.set_axis(seeds, axis=1).rename_axis("seed", axis=1).stack().dropna().rename("value").reset_index()
    average = wide.groupby([*keys, "seed"], sort=False, as_index=False)["value"].mean()
    values = pd.concat([wide, average.assign(metric=metrics.AVERAGE)], ignore_index=True)
    asked = values["search_id"].str.partition("@")  # <query>@<note>, or the query
    owners = metrics.patient_of(bench)
    values["query_id"], values["patient"] = asked[0], asked[2].map(owners).where(asked[1] == "@", asked[0])
    return values.assign(query_type=values["query_id"].map(bench.query_types))[[*keys[:2], *metrics.COLUMNS, "seed"]]


def recorded(profile: Profile, names: Iterable[str], split: str = "test") -> dict[str, pd.DataFrame]:
    """`per_search` of those of the rows that have a record."""
    found = {name: per_search(profile, name, split) for name in names}
    return {name: values for name, values in found.items() if values is not None}


def compared(
    profile: Profile, untrained: Iterable[str], recipes: Mapping[str, Recipe], trained: str
) -> tuple[dict[str, pd.DataFrame], dict[str, str]]:
    """What Tables 5 and 6 show: row -> its metrics.per_search on test, and row -> its block in the figures.

    Of the systems and of the ablation's `recipes`, those that have a record and those that the run trains itself: of a
    short profile's ablation that is `trained` alone. DREHR_RETRIEVERS adds to the untrained ones."""
    bench = pipeline.benchmark(profile, "test")
    plain = rivals.untrained_scores(profile, bench)
    scores = {row: plain[row] for row in untrained} | retrievers.extra_scores(profile, bench)
    values = {row: metrics.per_search(bench, of_row) for row, of_row in scores.items()}
    blocks, own = dict.fromkeys(values, "untrained"), [trained] if profile.short else recipes
    more = systems.of_other_notes(profile)
    own_notes = {row: recipe for row, recipe in systems.table4(profile).items() if row not in more}
    for block, known, mine in (
        ("the systems", own_notes, pipeline.systems(profile)),
        ("the ablation", recipes, own),
    ):
        found = recorded(profile, known) if profile.short else {}
        for name in mine:
            model = pipeline.train_recipe(profile, known[name])[0]
            of_model = metrics.per_search(bench, pipeline.model_scores(profile, model, bench))
            found[pipeline.row_name(profile, name)] = of_model
        values, blocks = values | found, blocks | dict.fromkeys(found, block)
    return values, blocks


def places(
    profile: Profile, row: str, bench: Benchmark, split: str = "test", setting: str = "single"
) -> np.ndarray | None:
    """A recorded row's run file as scores, minus each chunk's place (Multi-Patient: of the first hundred; the others
    come after); None where there is none."""
    path = folder(profile) / f"{slug(row)}.{split}.{setting}.run.gz"
    if not path.exists():
        return None
    queries, chunks = ({name: at for at, name in enumerate(names)} for names in (bench.queries, bench.corpus))
    matrix = np.full((len(queries), len(chunks)), -np.inf)
    for row, line in files.read_text_lines(path):
        with files.naming(Path(f"{path}, row {row}"), REMAKE):
            search, _, chunk, place, *_ = line.split()
            matrix[queries[search.partition("@")[0]], chunks[chunk]] = -int(place)
    return matrix


def budgets(profile: Profile) -> dict[str, int]:
    """Trained row -> how many chunks each of its trainings was shown, repeats counted."""
    return {about["row"]: about["chunks"] for about in abouts(profile) if about["chunks"]}


def stale(profile: Profile) -> list[str]:
    """The rows without a record, and what is no longer so in each record that isn't as code, recipes and data are."""
    known, made = systems.rows(profile), abouts(profile)
    found = [f"{row}: not there" for row in known if row not in {about["row"] for about in made}]
    for about in made:
        of_row = systems.profile_of(profile, about["row"])
        name = slug(about["row"], about["seed"])
        if about["row"] not in known:
            found.append(f"{name}: there is no such row now")
            continue
        recipe = ablations.with_seed(known[about["row"]], about["seed"])
        if artifacts.digest(recipe) != about["recipe"]:
            found.append(f"{name}: another recipe")
        elif data_digest(of_row, recipe) != about["data"]:
            found.append(f"{name}: other notes, positives or starting weights")
        elif missing := systems.lacking(profile, about["row"]):
            print(f"{name}: its first losses are not compared here, {missing}", file=sys.stderr)  # and that is no fault
        elif not np.allclose(losses := first_losses(of_row, recipe), about["first losses"], rtol=0.01):
            found.append(f"{name}: the first losses are {losses}, the record's {about['first losses']}")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = records.command(__doc__)
    parser.add_argument("--only", nargs="+", metavar="ROW", help=f"or {UNTRAINED}, for their run files")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="N")
    options, profile = records.parse(parser, arguments)
    known = systems.rows(profile)
    records.refuse_unknown(parser, "row", options.only, [UNTRAINED, *known])
    if options.check:
        records.end_check(stale(profile))
    chosen = options.only or [UNTRAINED, *(row for row in known if not systems.lacking(profile, row))]
    for row in chosen:
        if row == UNTRAINED:
            write_untrained(profile)
        else:
            for seed in options.seeds:
                if options.remake or not (folder(profile) / f"{slug(row, seed)}.json").exists():
                    record(profile, row, seed, *train(profile, row, seed))


if __name__ == "__main__":
    main()
