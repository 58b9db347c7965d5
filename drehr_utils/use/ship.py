"""The weights that come with the repository, after `papers.drehr.runs` trained them:

    python -m drehr_utils.use.ship                    # data/models/drehr-improved
    python -m drehr_utils.use.ship --windows          # data/models/drehr-by-windows, which drehr-search asks

Writes the encoder in half precision, the hybrid's weights, and a model card with the scores of what it wrote.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file

from drehr_utils.errors import DataError
from drehr_utils.evaluation import metrics
from drehr_utils.papers.drehr import rivals, runs, systems
from drehr_utils.pipeline import IMPROVED, benchmark, curve, model_scores
from drehr_utils.profiles import Profile, load_profile
from drehr_utils.search.hybrid import WEIGHTS_FILE, WINDOWS_GRID, Weights
from drehr_utils.training import encoders
from drehr_utils.use.search import IMPROVED as WHOLE
from drehr_utils.use.search import SHIPPED as BY_WINDOWS

CARD = """---
license: apache-2.0
language: en
library_name: sentence-transformers
pipeline_tag: sentence-similarity
base_model: sentence-transformers/all-MiniLM-L6-v2
tags: [electronic-health-records, dense-retrieval, entity-retrieval]
---
# {name}

A small English encoder (23M parameters, 384 dimensions, mean pooling, cosine) that retrieves chunks of discharge
summaries for a medical entity, by the improved recipe of this repository after DR.EHR. {about}

```python
from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer("data/models/{name}")
```

{searched} The weights in `{weights}` were chosen on dev.

**Trained on** {chunks:,} presentations of the chunks of 160 fictional discharge summaries ({steps} steps, {date},
{machine}), with entities that a language model wrote for them and the open knowledge graph; started from
all-MiniLM-L6-v2. No real patient's text was used. Weights in float16, computed with in float32. The tokenizer reads
some 4,600 brand names and abbreviations as what they stand for. How it was made: `{command}`, then `python -m
drehr_utils.use.ship{option}`.

| OpenCliniQ | Single MRR | Single NDCG | Single MAP | Multi MRR | Multi NDCG@10 | Multi R@100 |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{rows}

**Limits.** One training. Its notes, the graph's own concepts and the benchmark's judgments have one author, a
language model: on real notes it may do worse. English, discharge summaries, entities (diseases, procedures, drugs);
not sentences or questions. It does not tell a denied finding from a present one. {limits} For research on
retrieval, never for care.
"""
ABOUT = {
    IMPROVED: dict(
        about="""It has the recipe
of the row `DR.EHR (improved)` in the project's Table 4, which is the mean of three trainings, and the seed of the
first; it was trained anew, and comes out within half a point of that row. `DR.EHR (hybrid)` joins encoders of this
recipe with strings and the graph; `DR.EHR (hybrid, windows)` is this encoder's, and looks at each chunk's windows of
twelve words as well.""",
        searched="""Use it for whole texts. A search joins it with the
graph's names, BM25 and windows (README); drehr-by-windows was trained for that, and finds a little more.""",
        limits="""On the seventh of
MedQuAD that was looked at, the recipe's three records find no fewer first passages than the encoder they start from,
and about a point fewer among the first five (untested); on the rest a shorter training is not shown to lose (notebook
08). Half of the texts held in place in training have that benchmark's form of query.""",
        option="",
    ),
    systems.BY_WINDOWS: dict(
        about="""It was trained as it
is searched: a chunk's similarity is half its own and half that of its best window of twelve words (notebook 08,
"Trained on windows"). It is the first of the three
trainings that are the record `DR.EHR (by windows)` of the project's Table 4, by its hybrid the middle one on dev.""",
        searched="""Use it with windows
(`drehr_utils.search.windows`), or by `drehr-search` (README), which joins it with the graph's names and BM25 as well: a
whole chunk's one vector is poorer than drehr-improved's.""",
        limits="""On the seventh of
MedQuAD that was looked at, it finds no fewer first passages than the encoder it starts from, and half a point fewer
among the first five (untested). Half of the texts held in place in training have that benchmark's form of query.""",
        option=" --windows",
    ),
}


def figures(profile: Profile, folder: Path, split: str) -> dict[str, list[float]]:
    """Table 4's six figures on a split: of the encoder in `folder`, of its hybrid without windows (weights chosen on
    dev), and of that with the weights beside it; of the one by windows, with windows and in the hybrid."""
    bench, weights = benchmark(profile, split), Weights(**json.loads((folder / WEIGHTS_FILE).read_text()))
    joint = rivals.joined_scores(profile, folder, bench, weights)
    if folder.name == BY_WINDOWS.name:
        alone = systems.scores(profile, systems.BY_WINDOWS, folder, bench)
        found = {systems.BY_WINDOWS: alone, systems.HYBRID_BY_WINDOWS: joint}
    else:
        alone, hybrid = model_scores(profile, folder, bench), rivals.hybrid_scores(profile, folder, bench)
        found = {IMPROVED: alone, rivals.HYBRID: hybrid, rivals.HYBRID_WINDOWS: joint}
    values = {
        row: (metrics.single_patient(bench, scores), metrics.multi_patient(bench, scores))
        for row, scores in found.items()
    }
    return {
        row: [v for part in parts for name, v in metrics.means(part).items() if name != metrics.AVERAGE]
        for row, parts in values.items()
    }


def ship(profile: Profile, seed: int, folder: Path = WHOLE) -> None:
    """Raises DataError where the trained model isn't there."""
    row = systems.BY_WINDOWS if folder.name == BY_WINDOWS.name else IMPROVED
    model = profile.cache / "models" / runs.slug(row, seed)
    command = f'python -m drehr_utils.papers.drehr.runs --profile {profile.name} --only "{row}" --seeds {seed}'
    if not model.exists():
        raise DataError(f"models/{model.name}: there is no such model; train it: {command} --remake")
    encoders.save_encoder(encoders.load_encoder(model), folder)
    weights = folder / "model.safetensors"
    halves = {name: tensor.half() for name, tensor in load_file(weights).items()}
    save_file(halves, weights, metadata={"format": "pt"})
    joint = rivals.hybrid_weights(profile, folder, WINDOWS_GRID)
    (folder / WEIGHTS_FILE).write_text(json.dumps(asdict(joint)) + "\n")
    about, steps = json.loads((model / "stage.json").read_text()), len(curve(model))
    rows = [
        f"| {row}, {split} | " + " | ".join(f"{value:.1f}" for value in values) + " |"
        for split in runs.SPLITS
        for row, values in figures(profile, folder, split).items()
    ]
    said = {"seed": seed, "steps": steps, "chunks": steps * about["config"]["batch_size"], "machine": about["machine"]}
    said |= {"date": datetime.date.today().isoformat(), "command": command, "weights": WEIGHTS_FILE}
    said |= {"name": folder.name} | ABOUT[row]
    (folder / "README.md").write_text(CARD.format(rows="\n".join(rows), **said), encoding="utf-8")
    print(f"{folder.name}: {sum(p.stat().st_size for p in folder.rglob('*') if p.is_file()) / 1e6:.0f} MB, {joint}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="full")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--windows", action="store_true", help="the encoder that was trained on windows")
    options = parser.parse_args(arguments)
    ship(load_profile(options.profile), options.seed, BY_WINDOWS if options.windows else WHOLE)


if __name__ == "__main__":
    main()
