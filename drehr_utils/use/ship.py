"""The weights that come with the repository, after `papers.drehr.runs` trained them:

    python -m drehr_utils.use.ship                    # data/models/drehr-improved
    python -m drehr_utils.use.ship --windows          # data/models/drehr-by-windows, which drehr-search asks

Writes the encoder in half precision, the hybrid's weights, and into the model card beside them the scores of what it
wrote.
"""

from __future__ import annotations

import argparse
import datetime
import json
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from safetensors.torch import load_file, save_file

from drehr_utils.errors import DataError
from drehr_utils.evaluation import metrics
from drehr_utils.papers.drehr import rivals, runs, systems
from drehr_utils.pipeline import IMPROVED, benchmark, model_scores
from drehr_utils.profiles import Profile, load_profile
from drehr_utils.search.hybrid import WEIGHTS_FILE, WINDOWS_GRID, Weights
from drehr_utils.training import encoders
from drehr_utils.use import readme
from drehr_utils.use.search import IMPROVED as WHOLE
from drehr_utils.use.search import SHIPPED as BY_WINDOWS

CARD = ("<!-- made: python -m drehr_utils.use.ship -->", "<!-- end of made -->")  # between them: facts and figures
HEAD = "| OpenCliniQ | Single MRR | Single NDCG | Single MAP | Multi MRR | Multi NDCG@10 | Multi R@100 |"


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
    card = (folder / "README.md").read_text(encoding="utf-8")  # which saving may write anew
    encoders.save_encoder(encoders.load_encoder(model), folder)
    weights = folder / "model.safetensors"
    halves = {name: tensor.half() for name, tensor in load_file(weights).items()}
    save_file(halves, weights, metadata={"format": "pt"})
    joint = rivals.hybrid_weights(profile, folder, WINDOWS_GRID)
    (folder / WEIGHTS_FILE).write_text(json.dumps(asdict(joint)) + "\n")
    about, steps = json.loads((model / "stage.json").read_text()), len(pd.read_csv(model / "loss.csv"))
    rows = [
        f"| {row}, {split} | " + " | ".join(f"{value:.1f}" for value in values) + " |"
        for split in runs.SPLITS
        for row, values in figures(profile, folder, split).items()
    ]
    chunks, option = steps * about["config"]["batch_size"], " --windows" if row == systems.BY_WINDOWS else ""
    made = (
        f"{chunks:,} presentations of chunks in {steps} steps; {datetime.date.today()}; {about['machine']}; "
        f"`{command}`, then `python -m drehr_utils.use.ship{option}`."
    )
    table = "\n".join([HEAD, "| --- |" + " ---: |" * 6, *rows])
    (folder / "README.md").write_text(readme.between(card, CARD, f"{made}\n\n{table}"), encoding="utf-8")
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
