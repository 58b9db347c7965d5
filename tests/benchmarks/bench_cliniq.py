"""Single-Patient Retrieval over all open test patients: every baseline and match type, timed after encoding.

python tests/benchmarks/bench_cliniq.py [--write]     # --write: also figures/benchmarks/cliniq.json
"""

import argparse
import json
import time
from pathlib import Path

from machine import about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()

    from drehr_utils import pipeline
    from drehr_utils.data.benchmark import MATCH_TYPES
    from drehr_utils.evaluation import intervals, metrics
    from drehr_utils.papers.cliniq import baselines
    from drehr_utils.profiles import load_profile

    profile = load_profile("open")
    bench = pipeline.benchmark(profile, "test")
    scores = baselines.system_scores(profile, bench)
    searches = 0
    wall, cpu = time.perf_counter(), time.process_time()
    for matrices in scores.values():
        for match_type in (None, *MATCH_TYPES):
            searches += metrics.single_patient(bench, matrices, match_type)["search_id"].nunique()
    measured = time.perf_counter() - wall, time.process_time() - cpu
    wall, cpu = time.perf_counter(), time.process_time()
    values = {name: metrics.per_search(bench, matrices) for name, matrices in scores.items()}
    for name, found in values.items():
        intervals.evaluate_system(name, found, profile.resampling, values[baselines.SPARSE])
    result = {
        "single_patient_systems": len(scores),
        "single_patient_searches": searches,
        "single_patient_s": round(measured[0], 2),
        "single_patient_cpu_s": round(measured[1], 2),
        "cliniq_tables_s": round(time.perf_counter() - wall, 2),  # both settings, intervals and paired tests
        "cliniq_tables_cpu_s": round(time.process_time() - cpu, 2),
    } | about("cliniq_")
    print(json.dumps(result, indent=1))
    if options.write:
        folder = Path(__file__).resolve().parents[2] / "figures/benchmarks"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cliniq.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
