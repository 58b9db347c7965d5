"""`--profile mimic` from MIMIC's tables to Table 4, in miniature, with a language model behind a real HTTP server."""

import json
import os
import re
import subprocess
import sys
import zlib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
from llm_server import chat_server
from mimic4_miniature import write_miniature
from tiny_bert import tiny_bert

from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.papers.cliniq import release
from drehr_utils.profiles import ROOT, load_profile

# What notebooks read beside a profile's own data. What was written for `open` isn't there: no open notes, OpenCliniQ,
# recorded answers or records, so a notebook that reads one of them fails. Of dev_search.csv only the header.
SHARED = ("data/papers.csv", "data/claims.csv", "data/dev_search.csv", "data/models")
OF_SISTERS = ("data/kg_dev_search.csv", "data/ncbi_disease_digests.tsv", "figures/benchmarks", "data/open_linking")
OF_SISTERS += ("data/open_cxr", "data/capr_mistakes.tsv")  # no notes of ours
NOTEBOOKS = "00,01,02,03,04,05,06,07,08,09,10,11,12,13,14,18"
STANDS_IN = ("12",)  # HPO and MeSH's diseases, for SNOMED CT and UMLS, which a miniature of MIMIC doesn't have
PUBLIC = ("08", "13", "14")  # they read public data, which aren't MIMIC's: MedQuAD, IU X-ray
PROFILE = """
base = "mimic"
offline = true
lanes = 2
encoder = "{encoder}"
pooling = "none"
bootstrap_samples = 20
randomizations = 50
notes = "{made.notes}"
benchmark = "{cliniq}"
bios = "{made.bios}"
[published.stage1]
positives_per_chunk = 4
batch_size = 4
max_steps = 2
[published.stage2]
positives_per_chunk = 4
batch_size = 4
max_steps = 2
[improved.stage2]
positives_per_chunk = 4
batch_size = 4
max_steps = 2
[cliniq]
retrievers = ["MiniLM (start)"]
"""
FULL_NAMES = {"htn": "hypertension", "cad": "coronary artery disease", "copd": "chronic obstructive pulmonary disease"}
FULL_NAMES |= {
    "chf": "congestive heart failure",
    "ct": "computed tomography",
    "iv": "intravenous",
    "wbc": "white blood cell",
}
SISTERS = ("kg", "capr", "radiology")  # notebooks 12 to 14, at the sizes of the profile `smoke`
LABELS = ("synonym", "abbreviation", "hyponym", "implication", "not relevant", "not relevant")


def answer(prompt: str, body: dict) -> str:
    """Answers to the four prompts in their formats: of the text's own words, the same for the same prompt."""
    if prompt.startswith("Replace the abbreviations"):
        words = prompt.rpartition("note:\n")[2].split()
        found = [f"###{short}\n**{full}" for short, full in FULL_NAMES.items() if short in words]
        return "\n\n".join(found) or "NA"
    if "medication orders" in prompt:
        return prompt.rpartition("Order: ")[2].split()[0].lower()
    if "Terms:" in prompt:
        terms = re.findall(r"^(\d+)\. (.*)$", prompt.rpartition("Terms:\n")[2], re.MULTILINE)
        return "\n".join(
            f"{n} | a reason | {LABELS[zlib.crc32((prompt + t).encode()) % len(LABELS)]}" for n, t in terms
        )
    note, _, asked = prompt.rpartition("\n\nBriefly summarize the ")
    words = [word for word in dict.fromkeys(re.findall("[a-z]{7,}", note))]
    at = ("diseases", "clinical", "drugs").index(asked.split()[0])
    return "\n".join(f"- {word}" for word in words[at::3][:6]) or "NA"


def toml(value) -> str:
    if is_dataclass(value):
        return "{" + ", ".join(f"{field.name} = {toml(getattr(value, field.name))}" for field in fields(value)) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps("none" if value is None else value)


def link(root: Path) -> None:
    """A project's folder with the notebooks, SHARED and OF_SISTERS alone."""
    for name in ("notebooks", *SHARED, *OF_SISTERS):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(ROOT / name)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """The miniature, the cache of its profile after all notebooks ran, and what the run printed."""
    root = tmp_path_factory.mktemp("project")
    link(root)
    made, cliniq = write_miniature(root / "mimic"), root / "data/cache/cliniq_release"
    given = ["--release", made.release, "--mimic", made.mimic3, "--out", cliniq, "--dev-share", "0.3"]
    before = os.umask(0o022)
    assert release.main(list(map(str, given))) == 0
    os.umask(before)  # the notebooks' processes close their files themselves
    profile, small = root / "miniature.toml", load_profile("smoke")
    sizes = "\n".join(f"{name} = {toml(getattr(small, name))}" for name in SISTERS)
    profile.write_text(sizes + PROFILE.format(made=made, cliniq=cliniq, encoder=tiny_bert(root / "encoder")))
    command = [sys.executable, "-m", "drehr_utils.run", "--profile", str(profile), "--only", NOTEBOOKS]
    with chat_server(answer) as chat:
        own = {"DREHR_ROOT": str(root), "PYTHONPATH": str(ROOT), "DREHR_LLM_BASE_URL": chat.base_url}
        own |= {"DREHR_LLM_MODEL": "m", "DREHR_PUBLIC_DATA": str(root / "none")}
        done = subprocess.run(command, env=os.environ | own, cwd=root, capture_output=True, text=True, check=False)
    return made, root / "data/cache/miniature", done


def said(cache: Path, name: str) -> str:
    """What the cells of a notebook printed and showed."""
    (path,) = (cache / "notebooks").glob(f"{name}_*.ipynb")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return "\n".join(json.dumps(cell["outputs"]) for cell in cells)


@pytest.mark.slow
def test_the_notebooks_run_and_no_cell_lacks_data(ran):
    _, cache, done = ran
    assert done.returncode == 0, done.stdout + done.stderr
    for number in NOTEBOOKS.split(","):
        shown = said(cache, number)
        assert number in STANDS_IN or not re.search(r"stands? in for|is not set", shown), number
        assert number in PUBLIC or "aren't there" not in shown, number


@pytest.mark.slow
def test_table_4_has_every_row(ran):
    _, cache, _ = ran
    table = pd.read_csv(cache / "figures/tables/drehr_table4.csv")
    ours = set(table.loc[table["ours"].notna(), "system"])
    trained = {"DR.EHR", "DR.EHR w/o stage I", "DR.EHR (improved)", "RRF with DR.EHR (improved)", "DR.EHR (hybrid)"}
    strings = {"random order", "BM25", "BM25 + KG", "names-in-text", "MiniLM (hybrid)"}
    trained |= {"DR.EHR (windows)", "DR.EHR (improved, windows)", "DR.EHR (hybrid, windows)"}
    strings |= {"MiniLM (windows)", "MiniLM + BM25 (windows)"}
    strings |= {"MiniLM, names read (windows)", "MiniLM (hybrid, windows)"}
    assert ours == trained | strings | {"MiniLM (start)", "MiniLM, names read", "RRF (no graph)", "RRF"}
    assert table.groupby("system")["ours"].count()[list(ours)].eq(6).all()


@pytest.mark.slow
def test_training_saw_no_patient_of_dev_test_or_the_benchmark(ran):
    made, cache, _ = ran
    shards = list((cache / "positives").glob("*/part-*.parquet"))
    stages = sorted(path.parent.name.split("-")[0] for path in shards)
    assert stages == ["stage1", "stage1", "stage2"]  # stage I again for notebook 09's row of more graph terms
    for path in shards:
        assert {i.split("-")[0] for i in pq.read_table(path)["id"].to_pylist()} == made.patients["train"]


@pytest.mark.slow
def test_the_benchmark_of_ones_own_notes_is_of_patients_that_never_train(ran):
    made, cache, _ = ran
    for split in ("dev", "test"):
        own = load_benchmark(cache / "cliniq", split)
        assert {patient.note_id.split("-")[0] for patient in own.patients} == made.patients[split]
        assert own.qrels and len(set(own.query_types.values())) == 3


@pytest.mark.slow
def test_all_of_it_is_for_the_user_alone(ran):
    _, cache, _ = ran
    modes = {path: path.stat().st_mode & 0o777 for path in (cache, *cache.rglob("*")) if not path.is_symlink()}
    assert not {path: oct(mode) for path, mode in modes.items() if mode & 0o077}
