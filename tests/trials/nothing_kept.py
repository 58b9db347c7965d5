"""What keeping other texts in place is worth: the improved recipe without it, on dev and on MedQuAD's unseen queries."""
import time, json, datetime
from dataclasses import replace
from pathlib import Path
import pandas as pd
from drehr_utils import pipeline, artifacts
from drehr_utils.evaluation import metrics, intervals, medquad
from drehr_utils.papers.drehr import runs
from drehr_utils.profiles import load_profile
from drehr_utils.training import encoders
profile = load_profile("full")
recipe = replace(profile.improved, stage2=replace(profile.improved.stage2, keep=0.0))
model, curves = pipeline.train_recipe(profile, recipe)
print("steps", {k: len(v) for k, v in curves.items()}, model.resolve(), flush=True)
out = Path("data/cache/trials/kept"); out.mkdir(parents=True, exist_ok=True)
dev = pipeline.benchmark(profile, "dev")
metrics.per_search(dev, pipeline.model_scores(profile, model, dev)).to_pickle(out / "dev.pkl")
metrics.per_search(dev, pipeline.model_scores(profile, runs.OWN, dev)).to_pickle(out / "dev_own.pkl")
data = medquad.load_medquad().without_every(7)
candidates = medquad.medquad_candidates(data, medquad.term_scores(data, "BM25"))
for name, folder in (("nothing", model), ("own", runs.OWN)):
    encoder = encoders.load_encoder(folder.resolve())
    v = medquad.zero_shot(lambda texts: encoders.encode(encoder, texts, bf16=True), data, candidates)
    v.to_pickle(out / f"medquad_{name}.pkl"); print(name, metrics.means(v), flush=True)
