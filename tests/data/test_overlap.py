"""No note of a benchmark's patient trains, whatever its ids: patients planted in both MIMICs and CliniQ's release."""

import gzip
import json
import shutil

import numpy as np
import pytest
from mimic4_miniature import write_miniature

from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.data.notes import read_notes
from drehr_utils.data.overlap import OTHER_NOTES, SameText, of_benchmark
from drehr_utils.errors import DataError
from drehr_utils.papers.cliniq import release


@pytest.fixture(scope="module")
def joined(tmp_path_factory):
    """The miniature, and its release joined with its MIMIC-III."""
    made, out = write_miniature(tmp_path_factory.mktemp("mimic")), tmp_path_factory.mktemp("cliniq")
    given = ["--release", made.release, "--mimic", made.mimic3, "--out", out, "--dev-share", "0.3"]
    assert release.main(list(map(str, given))) == 0
    return made, out


def test_the_release_becomes_dev_and_test_without_a_shared_patient(joined):
    made, out = joined
    parts = {split: load_benchmark(out, split) for split in ("dev", "test")}
    patients = {split: {p.subject_id for p in part.patients} for split, part in parts.items()}
    assert {len(found) for found in patients.values()} == {2, 4} and not patients["dev"] & patients["test"]
    assert not parts["dev"].corpus.keys() & parts["test"].corpus.keys()
    whole = release.read_release(made.release)
    of_parts = {(q, c) for part in parts.values() for q, judged in part.qrels.items() for c in judged}
    assert of_parts == whole.judgments.keys()
    modes = {path.stat().st_mode & 0o777 for path in out.rglob("*") if path.is_file()}
    assert modes == {0o600} and out.stat().st_mode & 0o777 == 0o700


def test_all_notes_of_its_patients_are_found_in_mimic_iv(joined):
    made, out = joined
    notes, _ = read_notes(made.notes)
    planted = {note.note_id for note in notes if note.subject_id in made.patients["both"]}
    assert len(planted) == 4 and of_benchmark(notes, out) == dict.fromkeys(planted, "text")


def test_without_the_patients_other_notes_one_of_them_would_train(joined):
    made, out = joined
    notes, _ = read_notes(made.notes)
    kept = (out / OTHER_NOTES).read_bytes()
    (out / OTHER_NOTES).unlink()
    found = {note.subject_id for note in notes if note.note_id in of_benchmark(notes, out)}
    (out / OTHER_NOTES).write_bytes(kept)
    assert len(found) == 1 and found < made.patients["both"]


def test_a_packed_benchmark_is_read_and_one_without_its_files_is_named(joined, tmp_path):
    made, out = joined
    notes, _ = read_notes(made.notes)
    packed = tmp_path / "cliniq"
    shutil.copytree(out, packed)
    for path in packed.glob("*/*.jsonl"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert of_benchmark(notes, packed) == of_benchmark(notes, out) != {}
    with pytest.raises(DataError, match="no dev/patients.jsonl or test/patients.jsonl"):
        of_benchmark(notes, packed / "test")


def test_where_the_tables_share_ids_they_decide(joined):
    made, out = joined
    notes, _ = read_notes(made.mimic3)
    assert set(of_benchmark(notes, out).values()) == {"subject_id"} and len(of_benchmark(notes, out)) == len(notes)
    for path in out.glob("*/patients.jsonl"):  # as a benchmark made elsewhere, which says no more than the admission
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line | {"subject_id": None}) + "\n" for line in lines))
    assert set(of_benchmark(notes, out).values()) == {"hadm_id"} and len(of_benchmark(notes, out)) == len(notes)


def test_a_short_addendum_finds_nobody_by_the_header_that_every_summary_has():
    """Its few probes are the header's: all of MIMIC would be its patient's."""
    header = (
        "Name: ___ Unit No: ___ Admission Date: ___ Discharge Date: ___ Date of Birth: ___ Sex: F Service: MEDICINE "
    )
    addendum = header + "Addendum: she was seen once more before she left, and her warfarin was held for two days."
    letters = np.random.default_rng(0).integers(97, 123, (120, 6))
    summary = header + " ".join("".join(map(chr, word)) for word in letters)
    same = SameText([("addendum", addendum), ("summary", summary)])
    assert header + "Allergies: none known. Chief complaint: a fall on ice, no loss of consciousness." not in same
    assert f"{summary} Discharged home." in same
