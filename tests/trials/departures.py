"""Two departures whose switch is not in the package: python tests/trials/departures.py 160 (or repeats)."""
import sys, time, json, datetime
from dataclasses import replace
from pathlib import Path
import numpy as np, pandas as pd
from drehr_utils import pipeline, artifacts
from drehr_utils.evaluation import metrics, intervals
from drehr_utils.papers.drehr import ablations, runs, systems
from drehr_utils.profiles import load_profile
from drehr_utils.training import sampling, trainer, encoders
what = sys.argv[1]
profile = load_profile("full")
recipe = ablations.departures(profile)[ablations.DEPARTED]
if what == "160":
    sampling.CHUNK_TOKENS = 160
    name = "an epoch a stage, 160 tokens"
elif what == "repeats":
    name = "an epoch a stage, short lists repeated whole"
    def draw(terms, n, rng):
        terms = list(terms)
        whole = terms * -(-n // len(terms)) if len(terms) < n else terms
        return [whole[i] for i in rng.permutation(len(whole))[:n]]
    sampling.draw_positives = draw
begun = time.time()
encoder = pipeline.starting_encoder(profile)
out = Path("data/cache/trials") / what
for stage, sets in (("stage1", pipeline.stage1_sets(profile)), ("stage2", pipeline.stage2_sets(profile))):
    config = getattr(recipe, stage)
    data = sampling.TrainingSet.build(pipeline.chunks(profile, stage=stage), sets, config.sources, None, ())
    trainer.train_stage(encoder, data, config, out / stage, save_steps=0, progress=True)
minutes = round((time.time() - begun) / 60, 1)
encoders.save_encoder(encoder, out / "model")
dev = pipeline.benchmark(profile, "dev")
scores = pipeline.dense(encoders.load_encoder(out / "model"), dev)
values = metrics.per_search(dev, scores)
values.to_pickle(out / "values.pkl")
(out / "about.json").write_text(json.dumps({"system": name, "minutes": minutes, "date": datetime.date.today().isoformat(), "machine": encoders.describe_device(), "recipe": artifacts.digest(recipe)}))
print(name, minutes)
