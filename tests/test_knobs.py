"""Notebook 00's table of knobs: each is a field of a profile, each field is a knob or says why not, each was tried."""

import importlib.util
import json
import re
from dataclasses import fields

from drehr_utils.profiles import ROOT, Profile

_spec = importlib.util.spec_from_file_location("knobs", ROOT / "tests/long/knobs.py")
knobs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(knobs)

NO_KNOBS = {
    "name": "the profile's own",
    "in_place": "of the profiles that we commit",
    "short": "says of the trainings' lengths what is true of them",
    "recorded": "of the profiles that we commit",
    "protected": "whose text it is",
    "lanes": "how many notebooks run at a time; no result",
    "offline": "whether a hub is asked for `encoder` and `cliniq.retrievers`",
    "graph_terms": "of the paper's pilot study; notebook 03 shows the record of a training with more",
    "real_notes": "needs public data that aren't ours to pass on",
    "unanswered": "needs a language model's server that fails",
    "max_eval_patients": "makes smoke small; intervals over fewer patients are nobody's aim",
    "lora": "of DR.EHR-large, on a GPU",
    "instruction": "of DR.EHR-large",
    "processes": "of several GPUs",
    "gradient_checkpointing": "memory alone",
    "deepspeed": "of several GPUs",
    "save_steps": "how much an interrupted training loses",
    "loaders": "draws and tokenises the same batches in other processes",
    "workers": "makes the same positive sets in several processes",
}


def test_every_field_is_a_knob_of_00_or_says_why_not():
    known = {field.name for field in fields(Profile)}
    assert not set(NO_KNOBS) & set(knobs.contract()), "both"
    assert set(NO_KNOBS) | set(knobs.contract()) == known


def test_the_table_names_notebooks_and_tables_that_are_there():
    for where, fields_of_row, _, minutes, tables in knobs.rows():
        assert set(re.findall(r"\d\d", where)) <= set(knobs.NOTEBOOKS) and re.search(r"\d", minutes), fields_of_row
        for name in re.findall(r"`([^`]+)`", tables):
            assert list((ROOT / "figures/tables").glob(f"{name}.csv")), name


# What the table names and the trial left where it was.
STAYS_UNDER_SMOKE = {
    "published": {"04"},  # its figure alone, and figures aren't compared
    "max_train_notes": {"capr_table3"},  # smoke's systems learn from the first 24 passages, however many there are
    "open_kg": {"00", "06"},  # their one search, and their one note, hold none of the concepts that the trial left out
    "bios": {"00", "06"},
    # The trial's benchmark has our own queries; 15 indexes the same notes and shows none of the judgments left out.
    "benchmark": {"15", "cliniq_query_length"},
    "randomizations": {"18"},  # a ▲ or ▼ of its tables, of which the trial turned none
    **dict.fromkeys(("encoder", "pooling", "seed", "bootstrap_samples"), {"drehr_sizes"}),  # smoke has no row of it
}


def test_each_knob_was_turned_moved_what_00_says_and_was_turned_back():
    result = json.loads(knobs.RESULT.read_text())
    assert result["in_place"]["restored"] and result["in_place"]["cells moved"]
    assert set(result["fields"]) == set(knobs.contract()) == set(knobs.VALUES)
    for field, tried in result["fields"].items():
        assert tried["restored"] and tried["cells moved"] and not tried["failed"], field
        found = knobs.against(field, tried, result["tables"])
        assert not found["moved, and not named"], field
        assert set(found["named, and not moved"]) == STAYS_UNDER_SMOKE.get(field, set()), field
