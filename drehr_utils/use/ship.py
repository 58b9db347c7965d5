"""The weights that come with the repository: `python -m drehr_utils.use.ship`, after `papers.drehr.runs` trained them.

Writes data/models/drehr-improved: the improved encoder in half precision, the hybrid's two weights, and a model card
whose scores are the records'.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import load_file, save_file

from drehr_utils.errors import DataError
from drehr_utils.evaluation import metrics
from drehr_utils.papers.drehr import rivals, runs
from drehr_utils.pipeline import IMPROVED
from drehr_utils.profiles import Profile, load_profile
from drehr_utils.search.hybrid import WEIGHTS_FILE
from drehr_utils.training import encoders
from drehr_utils.use.search import SHIPPED

CARD = """---
license: apache-2.0
language: en
library_name: sentence-transformers
pipeline_tag: sentence-similarity
base_model: sentence-transformers/all-MiniLM-L6-v2
tags: [electronic-health-records, dense-retrieval, entity-retrieval]
---
# drehr-improved

A small English encoder (22M parameters, 384 dimensions, mean pooling, cosine) that retrieves chunks of discharge
summaries for a medical entity, by the improved recipe of this repository after DR.EHR. It is the row `DR.EHR
(improved)` of its Table 4, seed {seed}, and in `DR.EHR (hybrid)` the encoder.

```python
from sentence_transformers import SentenceTransformer

encoder = SentenceTransformer("data/models/drehr-improved")
```

`drehr-search` (README) joins it with the graph's names and BM25 by the two weights in `{weights}`, chosen on dev.

**Trained on** {chunks:,} presentations of the chunks of 160 fictional discharge summaries ({steps} steps, {date},
{machine}), with entities that a language model wrote for them and the open knowledge graph; started from
all-MiniLM-L6-v2. No real patient's text was used. Weights in float16, computed with in float32. The tokenizer reads
some 4,600 brand names and abbreviations as what they stand for. How it was made: `{command}`, then `python -m
drehr_utils.use.ship`.

| OpenCliniQ | Single MRR | Single NDCG | Single MAP | Multi MRR | Multi NDCG@10 | Multi R@100 |
| --- | ---: | ---: | ---: | ---: | ---: | ---: |
{rows}

**Limits.** One training. Its notes, the graph's own concepts and the benchmark's judgments have one author, a
language model: on real notes it may do worse. English, discharge summaries, entities (diseases, procedures, drugs);
not sentences or questions. It does not tell a denied finding from a present one. It forgets a little of general
text (notebook 08, MedQuAD). For research on retrieval, never for care.
"""


def card(profile: Profile, about: dict) -> str:
    """The model card of a record."""
    lines = []
    for row in (IMPROVED, rivals.HYBRID):
        for split in runs.SPLITS:
            found = runs.per_search(profile, row, split)
            if found is not None:
                found = found[(found["match_type"] == "all") & (found["metric"] != metrics.AVERAGE)]
                of_seed = found[found["seed"] == about["seed"]]
                means = of_seed.groupby(["setting", "metric"], sort=False)["value"].mean()
                lines.append(f"| {row}, {split} | " + " | ".join(f"{value:.1f}" for value in means) + " |")
    said = {name: about[name] for name in ("seed", "chunks", "date", "machine", "command")}
    return CARD.format(rows="\n".join(lines), steps=sum(about["steps"].values()), weights=WEIGHTS_FILE, **said)


def ship(profile: Profile, seed: int, folder: Path = SHIPPED) -> None:
    """Raises DataError where the record or the trained model isn't there."""
    model = profile.cache / "models" / runs.slug(IMPROVED, seed)
    about = next((a for a in runs.abouts(profile) if (a["row"], a["seed"]) == (IMPROVED, seed)), None)
    if about is None or not model.exists():
        made = f'python -m drehr_utils.papers.drehr.runs --profile {profile.name} --only "{IMPROVED}" --seeds {seed}'
        raise DataError(f"models/{model.name}: there is no such model with its record; train it: {made} --remake")
    encoders.save_encoder(encoders.load_encoder(model), folder)
    weights = folder / "model.safetensors"
    halves = {name: tensor.half() for name, tensor in load_file(weights).items()}
    save_file(halves, weights, metadata={"format": "pt"})
    joined = rivals.hybrid_weights(profile, model)
    (folder / WEIGHTS_FILE).write_text(json.dumps(asdict(joined)) + "\n")
    (folder / "README.md").write_text(card(profile, about), encoding="utf-8")
    print(f"{folder.name}: {sum(p.stat().st_size for p in folder.rglob('*') if p.is_file()) / 1e6:.0f} MB, {joined}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="full")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    ship(load_profile(options.profile), options.seed)


if __name__ == "__main__":
    main()
