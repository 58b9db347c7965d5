import os
import re
import shutil
from dataclasses import is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from drehr_utils import artifacts, corpus, files, profiles
from drehr_utils.config import CaprSystem, StageConfig
from drehr_utils.data.benchmark import benchmark_folder
from drehr_utils.errors import DataError
from drehr_utils.papers.drehr import runs
from drehr_utils.papers.kg import systems as kg
from drehr_utils.papers.radiology import systems as radiology
from drehr_utils.profiles import PROFILES, ROOT, load_profile


def test_an_unknown_profile_is_named_with_what_there_is():
    with pytest.raises(
        DataError, match="profile 'opne': there is none; use open, full, smoke, mimic, or the path of a .toml file"
    ):
        load_profile("opne")


def test_mimic_is_placed_by_environment_variables_and_the_others_are_not(monkeypatch, tmp_path):
    monkeypatch.setenv("DREHR_NOTES", str(tmp_path))
    monkeypatch.setenv("DREHR_ENCODER", "a/decoder")
    monkeypatch.setenv("DREHR_LORA", "1")
    mimic = load_profile("mimic")
    assert (mimic.notes, mimic.encoder, mimic.pooling, mimic.lora) == (tmp_path, "a/decoder", "cls", True)
    assert load_profile("open") is PROFILES["open"]
    monkeypatch.setenv("DREHR_LORA", "yes")
    with pytest.raises(DataError, match="variable DREHR_LORA, field lora: 'yes' is not bool"):
        load_profile("mimic")


@pytest.mark.parametrize(
    ("base", "change", "expected"),
    [
        ("open", "[published.stage2]\nmax_steps = 100", None),  # of one stage alone: the epochs of both count
        ("open", "[published.stage1]\nmax_steps = 100\n[published.stage2]\nmax_steps = 50", 150),
        ("smoke", '[published.stage1]\nmax_steps = "none"', None),
        ("open", '[published]\nstage1 = "none"', None),
    ],
)
def test_steps_without_stage1_of_a_profile_of_ones_own(tmp_path, base, change, expected):
    (tmp_path / "mine.toml").write_text(f'base = "{base}"\n{change}')
    profile = load_profile(tmp_path / "mine.toml")
    found = profile.without_stage1()
    assert found.stage1 is None and found.stage2.max_steps == expected
    first = profile.published.stage1
    assert found.stage2.epochs == profile.published.stage2.epochs + (first.epochs if first else 0)


def test_an_unset_benchmark_is_never_the_fictional_one(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text('base = "mimic"\nname = "no-such-cache"')
    for profile in (load_profile("mimic"), load_profile(tmp_path / "mine.toml")):
        assert profile.benchmark is None
    monkeypatch.setattr(profiles, "ROOT", tmp_path)
    for split in ("test", "dev"):
        (profile.cache / f"cliniq/{split}/qrels").mkdir(parents=True)
    (profile.cache / "cliniq/test/qrels/test.tsv").touch()
    with pytest.raises(DataError, match="(?s)set DREHR_BENCHMARK to CliniQ's release .*--only 06"):
        benchmark_folder(profile)
    (profile.cache / "cliniq/dev/qrels/dev.tsv").touch()  # which notebook 06 writes last
    assert benchmark_folder(profile) == profile.cache / "cliniq"


def test_a_protected_profile_writes_for_its_user_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "ROOT", tmp_path)
    cache, path = tmp_path / "data/cache/mine", tmp_path / "mine.toml"
    cache.mkdir(parents=True)
    path.write_text('base = "smoke"')
    load_profile(path)
    assert cache.stat().st_mode & 0o777 == 0o755
    for own in ('notes = "notes"', 'benchmark = "cliniq"', 'base = "mimic"'):
        path.write_text(own)
        os.umask(0o022)
        cache.chmod(0o755)  # made by an earlier version
        mine = load_profile(path)
        artifacts.cached_file(mine.cache / "scores/a.npy", lambda: np.zeros(1))
        files.write_atomically(mine.tables / "t.csv", b"")
        found = {made: made.stat().st_mode & 0o777 for made in (cache, *cache.rglob("*"))}
        assert {mode for made, mode in found.items() if made.is_dir()} == {0o700}
        assert {mode for made, mode in found.items() if made.is_file()} == {0o600} and len(found) == 6
        shutil.rmtree(cache / "scores"), shutil.rmtree(cache / "figures")


def test_a_profile_on_full_with_notes_of_its_own_leaves_the_committed_records_alone(tmp_path):
    (tmp_path / "mine.toml").write_text('base = "full"\nnotes = "n"')
    mine = load_profile(tmp_path / "mine.toml")
    assert not mine.recorded and mine.recorded_answers == () and mine.protected
    assert runs.folder(mine) == mine.cache / "runs"


def test_notes_of_ones_own_without_a_benchmark_become_one(tmp_path):
    """Of both splits, for one of a single split is not found again; nothing recorded of the open notes is read."""
    own = 'notes = "n"\nbenchmark = "none"\n'
    for more, dev in (("", 100), ("[cliniq]\ndev_sample = 7", 7)):
        (tmp_path / "mine.toml").write_text(own + more)
        found = load_profile(tmp_path / "mine.toml").cliniq
        assert (found.recorded, found.dev_sample) == (False, dev)
    (tmp_path / "mine.toml").write_text('notes = "n"')
    found = load_profile(tmp_path / "mine.toml").cliniq
    assert (found.recorded, found.dev_sample) == (False, 0), "OpenCliniQ has a dev"
    (tmp_path / "mine.toml").write_text('notes = "n"\ncliniq = 3')
    with pytest.raises(DataError, match="mine.toml, field cliniq"):
        load_profile(tmp_path / "mine.toml")


def test_text_under_a_data_use_agreement_stays_in_ignored_folders():
    ignored = (ROOT / ".gitignore").read_text().split()
    mimic = load_profile("mimic")
    assert "data/cache/" in ignored and "data/mimic*/" in ignored
    for path in (mimic.cache, mimic.figures):
        assert Path("data/cache") in path.relative_to(ROOT).parents
    assert mimic.recorded_answers == ()


MINE = """
base = "smoke"
notes = "my/notes"
max_eval_patients = "none"
recorded_answers = ["answers.jsonl"]
randomizations = 50

[published.stage1]
epochs = 2

[kg.training]
batch_size = 4

[improved]
read_names = false

[[capr.systems]]
name = "CDV"
kind = "cdv"
[capr.systems.config]
max_steps = 3
"""


def test_a_profile_of_ones_own_changes_what_it_says_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    mine, base = load_profile(path), PROFILES["smoke"]
    assert mine.notes == tmp_path / "my/notes" and mine.recorded_answers == (tmp_path / "answers.jsonl",)
    assert mine.max_eval_patients is None and mine.resampling.randomizations == 50
    (tmp_path / "my/encoder").mkdir(parents=True)
    path.write_text(f'encoder = "my/encoder"\n{MINE}')
    assert load_profile(path).encoder == str(tmp_path / "my/encoder")
    assert mine.published == replace(base.published, stage1=replace(base.published.stage1, epochs=2.0))
    assert mine.kg == replace(base.kg, training=replace(base.kg.training, batch_size=4))
    assert mine.improved == replace(base.improved, read_names=False)
    assert mine.capr == replace(base.capr, systems=(CaprSystem("CDV", "cdv", StageConfig(max_steps=3)),))
    # Notes that aren't ours are protected: their results stay in a git-ignored folder, messages don't quote them.
    assert mine.protected and not mine.in_place and mine.figures == ROOT / "data/cache/mine/figures"
    path.write_text(MINE)
    monkeypatch.setenv("DREHR_PROFILE", str(path))
    assert load_profile() == mine


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("sede = 1", "mine.toml, field sede: no such field; there are name, in_place"),
        ("[published.stage1]\nepoch = 2", "mine.toml, field published.stage1.epoch: no such field; .*epochs"),
        ("seed = 'a'", "mine.toml, field seed: 'a' is not int"),
        ("seed = true", "mine.toml, field seed: True is not int"),
        ("seed = -1", "mine.toml, field seed: -1; give a number of at least 0"),
        ("unanswered = nan", "mine.toml, field unanswered: nan; give a number of at least 0"),
        ("[published.stage1]\nbatch_size = 0", "field published.stage1.batch_size: 0; give a number above 0"),
        ("max_train_notes = -5", "mine.toml, field max_train_notes: -5; give a number above 0"),
        ("published = 3", "mine.toml, field published: 3 is not Recipe"),
        ("recorded_answers = [1]", "mine.toml, field recorded_answers: 1 is not Path"),
        ("base = 'opne'", "mine.toml, field base: 'opne' is none of open, full, smoke, mimic"),
        ("name = 'open'", "mine.toml, field name: "),
        ("name = ['x']", "mine.toml, field name: "),
        ("in_place = true", "mine.toml, field in_place: "),
        ("[[capr.systems]]\nname = 'CDV'", "mine.toml, field capr.systems: field kind is missing"),
        ("recorded = true", "mine.toml, field recorded: "),
        ("name = '..'", "mine.toml, field name: "),
        ("name = 'site'", "mine.toml, field name: "),  # data/cache/site is removed by ./run_all.sh site
        ("seed =", "mine.toml: not TOML"),
    ],
)
def test_a_bad_profile_file_is_named_with_its_field(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        load_profile(path)
    with pytest.raises(DataError, match="none.toml: no such profile file"):
        load_profile(tmp_path / "none.toml")


def test_the_names_of_profiles_are_asked_nowhere():
    asked = re.compile(r"profile\.name\s*(?:[=!]=|in\b)|\.name == .(?:open|smoke|mimic|full)")
    for path in [*ROOT.glob("drehr_utils/**/*.py"), *ROOT.glob("notebooks/*.ipynb")]:
        assert not asked.search(path.read_text(encoding="utf-8")), path.name


class Watched:
    """A profile that notes which of its fields are read, those of its fields' fields as "kg.umls"."""

    def __init__(self, of, seen, before=""):
        self._of, self._seen, self._before = of, seen, before

    def __getattr__(self, name):
        value = getattr(self._of, name)
        if is_dataclass(value):
            return Watched(value, self._seen, f"{self._before}{name}.")
        self._seen.add(self._before + name)
        return value


@pytest.mark.slow
def test_what_profiles_share_reads_the_fields_it_names_and_no_others():
    """Or a profile would be given what was made for another."""
    profile, shared = load_profile("smoke"), [corpus.knowledge_graph, corpus.graph_digest, corpus.matcher]
    shared += [kg.graphs, kg.test_sets, kg.all_codes, kg.whole_tasks, kg.tasks, radiology.collections]
    for function in shared:
        function.cache_clear()  # what it asks of another of them reads that one's fields, made or not
        seen = set()
        made = function(Watched(profile, seen))
        assert seen <= set(function.fields), function.__name__
        assert function(replace(profile, encoder="another")) is made
    seen = set()
    radiology.entries.cache_clear()
    radiology.entries(Watched(profile, seen), "A")
    assert seen <= set(radiology.entries.fields)
    assert corpus.matcher(replace(profile, open_kg=None)) is not corpus.matcher(profile)
