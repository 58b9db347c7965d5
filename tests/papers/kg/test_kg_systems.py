"""KG entity retrieval: pairs by hand, splits, zero-shot by construction on the open data, the loss against torch's."""

import gzip
import math
import shutil
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from snomed_miniature import release as snomed_release
from umls_miniature import umls_release

from drehr_utils import artifacts, pipeline, profiles
from drehr_utils.config import PairConfig
from drehr_utils.data.notes import read_splits
from drehr_utils.errors import DataError
from drehr_utils.knowledge.graph import KnowledgeGraph
from drehr_utils.papers.kg import linking, rate_search, report, runs
from drehr_utils.papers.kg import systems as systems_module
from drehr_utils.papers.kg.pair_training import (
    log_probability,
    log_probability_as_printed,
    mean_negative_log_likelihood,
    pair_schedule,
    similarity,
    train_pairs,
)
from drehr_utils.papers.kg.tasks import (
    Task,
    cap_spellings,
    comb_task,
    down_sample,
    graph_pairs,
    icd10_graph_pairs,
    icd10_name_pairs,
    icd10_sections,
    icd10_synonym_pairs,
    split_pairs,
    synonym_pairs,
    text_digest,
    text_key,
    title_concatenation,
    without_texts,
)
from drehr_utils.profiles import load_profile
from drehr_utils.training.encoders import encode


def pairs_of(task):
    return [task.pair(i) for i in range(len(task))]


@pytest.fixture(scope="module")
def profile():
    return load_profile("open")


@pytest.fixture(scope="module")
def tasks(profile):
    return systems_module.tasks(profile)


# --- pairs -------------------------------------------------------------------------------------------------------


def test_the_papers_example_of_a_title_concatenation():
    assert title_concatenation("Chest", "Pain") == "chest pain"  # Figure 1
    assert title_concatenation("Precordial pain", "Pain in throat and chest") == "precordial pain in throat and chest"
    assert title_concatenation("Pain", "Pain in throat") == ""


def test_icd10_pairs_of_real_codes():
    assert icd10_sections("I10") == {  # under a block, not a category: no title to join
        "title": [], "code": ["essential (primary) hypertension"],
        "see_also": [
            "high blood pressure", "hypertension (arterial) (benign) (essential) (malignant) (primary) (systemic)"
        ],
    }  # fmt: skip
    graph = KnowledgeGraph()
    for cui, term in (("C1", "High Blood-Pressure"), ("C1", "htn"), ("C1", "hypertension"), ("C2", "gout")):
        graph.add_term(cui, term)
    code = "essential (primary) hypertension"  # its concept is found by a similar concept's name, in any spelling
    assert list(icd10_name_pairs(["I10"], graph)) == [("htn", code), ("hypertension", code)]
    title, code = "precordial pain in throat and chest", "precordial pain"
    assert list(icd10_synonym_pairs(["R07.2"])) == [(title, code), (code, title)]
    pairs = list(icd10_synonym_pairs(["G40.909"]))
    assert ("epilepsy, unspecified, not intractable, without status epilepticus", "seizure disorder") in pairs
    assert ("seizure disorder", "epilepsy, unspecified, not intractable, without status epilepticus") in pairs
    assert ("seizure disorder", "epileptic fits") not in pairs  # both are of one section: L != R
    assert list(icd10_graph_pairs(["R07", "R07.2", "B20"])) == [("pain in throat and chest", "precordial pain")]


def graph():
    made = KnowledgeGraph()
    names = {"A": ["myocardial infarction", "heart attack", "mi", "cardiac infarction"], "B": ["heart disease"]}
    for cui, terms in (names | {"C": ["heart structure", "heart"]}).items():
        made.cui2pt[cui] = terms[0]
        for term in terms:
            made.add_term(cui, term)
    made.is_a["A"] = ["B"]
    made.relations["A"] = [("finding site", "C"), ("finding site", "unknown")]
    return made


def test_synonym_and_graph_pairs_by_hand():
    pairs = list(synonym_pairs(graph()))
    assert len(pairs) == 4 * 3 // 2 + 0 + 1  # d(d-1)/2 each
    assert pairs[0] == ("heart attack", "myocardial infarction")  # p > q: the main description is always a c
    assert ("cardiac infarction", "mi") in pairs and ("mi", "cardiac infarction") not in pairs
    main = "myocardial infarction"
    assert list(graph_pairs(graph())) == [(main, "heart disease"), (main, "heart structure")]


def test_a_task_keeps_a_pair_once_and_none_of_a_text_with_itself():
    task = Task.from_pairs("t", "g", [("A b", "c"), ("a  B", "C"), ("c", "c"), ("c", "a b"), ("", "x")])
    assert pairs_of(task) == [("a b", "c"), ("c", "a b")]


# --- splits, comb, zero-shot ---------------------------------------------------------------------------------------


def test_split_is_80_20_whole_and_keeps_both_directions_together():
    task = Task.from_pairs("t", "g", [p for i in range(500) for p in ((f"a{i}", f"b{i}"), (f"b{i}", f"a{i}"))])
    train, dev = split_pairs(task, seed=3)
    assert (len(train), len(dev)) == (800, 200)
    assert sorted(pairs_of(train) + pairs_of(dev)) == sorted(pairs_of(task))
    assert not {frozenset(p) for p in pairs_of(train)} & {frozenset(p) for p in pairs_of(dev)}
    assert pairs_of(split_pairs(task, seed=3)[1]) == pairs_of(dev) != pairs_of(split_pairs(task, seed=4)[1])


def test_comb_has_the_smallest_tasks_size_of_each():
    parts = [
        Task.from_pairs(n, n, [(f"{n}{i}", f"{n} c{i}") for i in range(size)]) for n, size in (("x", 50), ("y", 8))
    ]
    comb = pairs_of(comb_task(parts, seed=0))
    assert sum(m.startswith("x") for m, _ in comb) == sum(m.startswith("y") for m, _ in comb) == 8
    assert set(comb) <= {p for part in parts for p in pairs_of(part)}
    assert down_sample(parts[1], 99, 0) is parts[1]
    with pytest.raises(DataError, match="z has no pairs"):
        comb_task([*parts, Task.from_pairs("z", "z", [])], seed=0)


def test_left_out_texts_are_compared_without_case_and_punctuation():
    task = Task.from_pairs("t", "g", [("type-2 diabetes", "dm"), ("dm", "sugar"), ("gout", "uric acid")])
    assert pairs_of(without_texts(task, ["Type 2 Diabetes", "SUGAR"])) == [("gout", "uric acid")]
    digests = {text_digest("Type 2 Diabetes"), text_digest("SUGAR")}
    assert pairs_of(without_texts(task, [], digests)) == [("gout", "uric acid")]


def test_tasks_are_the_same_without_ncbi_disease(profile, tasks, monkeypatch):
    """Or a record's own test would be another than that of a run without those files (notebook 12 stopped at it)."""
    found = systems_module.test_sets(profile)
    if len(found) == 1:
        pytest.skip("NCBI Disease isn't here")
    alone = found[:1]
    for name, task in systems_module.whole_tasks(profile).items():
        left = [
            without_texts(task, linking.unseen_texts(sets, task.graph), linking.unseen_digests(sets, task.graph))
            for sets in (found, alone)
        ]
        assert len(left[0]) < len(task) and pairs_of(left[0]) == pairs_of(left[1]), name


def test_no_task_holds_a_test_mention_nor_another_graphs_test_concept(profile, tasks):
    """Zero-shot by construction (§2), on the data that the tables are made of."""
    for test_set in systems_module.test_sets(profile):
        asked = {text_key(m.text) for m in test_set.mentions}
        gold = {text_key(n) for m in test_set.mentions for c in m.concepts for n in test_set.names[c]}
        gold |= {text_key(test_set.concepts[c]) for m in test_set.mentions for c in m.concepts}
        for name, parts in tasks.items():
            held = {text_key(text) for part in parts for text in part.used_texts()}
            assert not held & asked, (name, test_set.name)
            if systems_module.zero_shot_setting(profile, name, test_set) == systems_module.MENTIONS_AND_CONCEPTS:
                assert not held & gold, (name, test_set.name)
            else:
                assert held & gold, "the concepts are to be seen, only the mentions not"


def test_settings_of_the_systems(profile):
    notes, systems = systems_module.test_sets(profile)[0], ("ICD-10 Syn", "HPO Graph", "MeSH Syn", "Comb", "BM25")
    one, both = systems_module.MENTIONS_ONLY, systems_module.MENTIONS_AND_CONCEPTS
    assert [systems_module.zero_shot_setting(profile, s, notes) for s in systems] == [one, both, both, one, ""]


def test_supervised_split_is_by_patient(profile):
    train, tested = systems_module.supervised_task(profile)
    whole = systems_module.test_sets(profile)[0]
    held_out, new = list(tested.values())[:2]
    notes = {m.document for m in held_out.mentions}
    trained_on = [m for m in whole.mentions if m.document not in notes]
    assert len(trained_on) + len(held_out.mentions) == len(whole.mentions) and len(notes) > 20
    assert set(pairs_of(train)) <= {(m.text.lower(), whole.concepts[c]) for m in trained_on for c in m.concepts}
    patients = pd.read_csv(profile.notes / "splits.csv.gz").set_index("note_id")["subject_id"]
    assert not set(patients[list(notes)]) & set(patients[[m.document for m in trained_on]])
    seen = {c for _, c in pairs_of(train)}
    assert 100 < len(new.mentions) < len(held_out.mentions)
    assert not seen & {whole.concepts[c] for m in new.mentions for c in m.concepts}
    assert not {text_key(m) for m, _ in pairs_of(train)} & {text_key(m.text) for m in new.mentions}
    for other in systems_module.test_sets(profile)[1:]:  # zero-shot for them too
        texts = {text_key(text) for text in train.used_texts()}
        assert not texts & {text_key(m.text) for m in other.mentions}
        assert not texts & {text_key(n) for m in other.mentions for c in m.concepts for n in other.names[c]}


def test_open_tasks_are_of_the_papers_sizes(profile, tasks):
    # 141K and 41K pairs in the paper's older release; ours leaves out seventh characters and the test's texts
    whole = systems_module.whole_tasks(profile)["ICD-10 Syn"]
    assert 0.8 < len(without_texts(whole, linking.unseen_texts(systems_module.test_sets(profile), "ICD-10"))) / 141_000
    for part in tasks["ICD-10 Syn"]:  # half of what is left are a text and the same text spelt out
        pairs = [tuple(set(text_key(text).split()) for text in pair) for pair in pairs_of(part)]
        assert sum(m <= c or c <= m for m, c in pairs) == len(part) / 2
    assert 0.8 < sum(map(len, tasks["ICD-10 Graph"])) / 41_000 < 1.2
    smallest = min(len(train) for name, (train, _) in tasks.items() if name != "Comb")
    assert 0.99 * 6 * smallest <= len(tasks["Comb"][0]) <= 6 * smallest  # a pair of two tasks counts once
    assert len(systems_module.all_codes(profile).concepts) == len(linking.icd10_concepts()) > 36_000


def test_the_combs_own_test_has_none_of_the_searchs_mentions(profile):
    searched = systems_module.own_dev(profile, "Comb")
    tested = systems_module.own_test(profile, "Comb")
    assert len(tested.mentions) > 10 and len(searched.mentions) > 10
    assert not {m.text for m in tested.mentions} & {m.text for m in searched.mentions}


def test_what_was_seen_is_of_training_pairs(tasks):
    train, _ = tasks["HPO Graph"]
    shown = sorted({pair for step in pair_schedule([len(train)], PairConfig(max_steps=2)) for _, pair in step})
    seen = linking.seen_task(train, shown, mentions=50, concepts=100, seed=0)
    assert {m.text for m in seen.mentions} <= {train.pair(i)[0] for i in shown}
    pairs = set(pairs_of(train))
    assert (
        all((m.text, seen.concepts[c]) in pairs for m in seen.mentions for c in m.concepts) and len(seen.mentions) == 50
    )


def test_false_negatives_are_pairs_of_one_mention_or_concept():
    # (a, x) and (A, y) have one mention, (a, x) and (x, b) one text, so that (A, y) and (x, b) have kin in common.
    task = Task.from_pairs("t", "g", [("a", "x"), ("A!", "y"), ("x", "b"), ("c", "z")])
    counted = report.known_false_negatives(task, PairConfig(batch_size=4, max_steps=2))
    assert counted == {"negatives": 2 * 12, "known to be false": 2 * 6}


def test_a_graph_tasks_known_false_negatives_are_masked_but_not_under_mimic(profile):
    syn, graph, comb = (systems_module.training(profile, name) for name in ("ICD-10 Syn", "HPO Graph", "Comb"))
    assert syn == comb == profile.kg.training and graph == replace(comb, mask_false_negatives=True)
    assert systems_module.training(profile, "ICD-10 Names") == replace(graph, start_share=0.5)
    mimic = load_profile("mimic")
    assert systems_module.training(mimic, "HPO Graph") == mimic.kg.training


def test_spellings_are_capped_and_the_same_ones_are_kept():
    pairs = [("pain of knee", "knee pain of"), ("gout", "podagra"), ("a b", "a b c"), ("a b c", "a b"), ("x", "y")]
    capped = cap_spellings(Task.from_pairs("t", "g", pairs), seed=0)
    assert len(capped) == 4 and {("gout", "podagra"), ("x", "y")} <= set(pairs_of(capped)) <= set(pairs)
    assert pairs_of(capped) == pairs_of(cap_spellings(Task.from_pairs("t", "g", pairs), seed=0))


def test_own_dev_mentions_are_of_no_training_pair(tasks):
    for train, dev in tasks.values():
        own = linking.own_task(train, dev, mentions=300, concepts=500, seed=0)
        asked, held = {m.text for m in own.mentions}, {m for m, _ in pairs_of(train)}
        assert own.mentions and not asked & held
        pairs = set(pairs_of(dev))
        assert all((m.text, own.concepts[c]) in pairs for m in own.mentions for c in m.concepts)


def test_the_training_is_the_searchs_best_on_dev(profile):
    record, sizes = rate_search.RECORD.read(profile), profile.kg
    for task, chosen in ((systems_module.COMB, sizes.training), (systems_module.SUPERVISED, sizes.supervised)):
        rows = record[record["task"] == task]
        assert {artifacts.digest(c) for c in rate_search.candidates(profile, task)} == set(rows["config"]), (
            "the record is of other candidates; delete their rows, run python -m drehr_utils.papers.kg.rate_search"
        )
        best = rows.dropna(subset="scale").sort_values(["R@1", "R@25"]).iloc[-1]
        assert (best["learning rate"], best["scale"], bool(best["false negatives masked"])) == (
            chosen.learning_rate, chosen.scale, chosen.mask_false_negatives)  # fmt: skip


@pytest.mark.slow
def test_the_search_keeps_other_rows_and_the_committed_record(tmp_path, monkeypatch):
    committed = rate_search.RECORD.path(load_profile("open"))
    before = committed.read_bytes()
    monkeypatch.setattr(profiles, "ROOT", tmp_path)  # Profile.cache
    monkeypatch.setattr(rate_search, "CHOICES", {"Comb": [(3e-5, 20.0, False)], "Supervised": [(3e-5, 20.0, False)]})
    made = []

    def score(profile, test_set, model):
        made.append(model)
        values = {"search_id": list("abcd"), "query_id": list("abcd"), "query_type": "g", "metric": "R@1"}
        return pd.DataFrame(values).assign(value=[0.0, 100, 100, 0 if model == "start" else 100])

    monkeypatch.setattr(rate_search.systems, "recall", score)
    monkeypatch.setattr(rate_search.systems, "trained", lambda *_: (tmp_path / f"trained {len(made)}", None))
    rate_search.main(["--profile", "smoke"])
    record = rate_search.RECORD.read(load_profile("smoke"))
    assert record["task"].tolist() == ["Comb", "Comb", "Supervised", "Supervised"]
    assert record["learning rate"].dropna().tolist() == [3e-5, 3e-5]  # not rounded to 0
    assert record["R@1"].tolist() == [50, 75, 50, 75] and record["R@1 p"].isna().tolist() == [True, False] * 2
    assert record[["mentions", "date", "machine", "minutes"]].notna().all(axis=None)
    made.clear()
    rate_search.main(["--profile", "smoke"])
    assert not made
    rate_search.main(["--profile", "smoke", "--remake", "--only", "Supervised"])
    assert len(made) == 3  # the start, then it and the trained model
    pd.testing.assert_frame_equal(rate_search.RECORD.read(load_profile("smoke")), record)
    assert committed.read_bytes() == before


def test_the_supervised_losss_dev_notes_are_training_notes(profile):
    (chosen_by, dev), (task, tested) = systems_module.supervised_dev(profile), systems_module.supervised_task(profile)
    notes, held_out = ({m.document for m in part.mentions} for part in (dev, tested["held-out notes"]))
    assert notes and held_out and not notes & held_out
    assert set(pairs_of(chosen_by)) < set(pairs_of(task))
    whole = systems_module.test_sets(profile)[0]
    trained_on = {m.document for m in whole.mentions} - notes - held_out
    assert {text for text, _ in pairs_of(chosen_by)} <= {m.text for m in whole.of_documents(trained_on).mentions}


@pytest.mark.slow
def test_gain_draws_centre_on_the_gain_and_pair_the_systems(profile, tasks):
    test_sets = {t.name: t for t in systems_module.test_sets(profile)[:1]}
    systems = {"BM25": "BM25", "the same": "BM25", "start": "start"}
    draws = report.gain_draws(profile, systems, test_sets, "start")
    rows = report.compare(profile, systems, test_sets, "start").set_index(["system", "group", "metric"])["ours"]
    assert (draws["BM25"] == draws["the same"]).all(axis=None) and (draws["start"] == 0).all(axis=None)
    for group, metric in draws["BM25"]:
        gain = rows["BM25", group, metric] - rows["start", group, metric]
        part = draws["BM25", group, metric]
        assert abs(part.mean() - gain) < 4 * part.std() / len(part) ** 0.5 + 0.5 and part.std() > 0


@pytest.mark.parametrize("sizes", [{"max_mentions": 2}, {"train_documents": 1.0}])
def test_a_test_set_without_mentions_is_named(profile, sizes):
    with pytest.raises(DataError, match="kg.max_mentions, kg.train_documents: held-out notes has no mention"):
        systems_module.supervised_task(replace(profile, kg=replace(profile.kg, **sizes)))


def test_gain_draws_are_joint_over_test_sets_and_draw_trainings(profile):
    hits = np.random.default_rng(0).integers(0, 2, (2, 60)) * 100.0

    def recorded(seeds, gain=0.0):
        rows = [
            {"search_id": f"m{i}", "query_id": f"c{i // 2}", "query_type": "", "metric": "R@1", "seed": seed,
             "value": hits[seed][i] + gain * seed, "group": group}
            for seed in seeds for group, n in (("whole", 60), ("copy", 60), ("half", 30)) for i in range(n)
        ]  # fmt: skip
        return runs.Recorded(pd.DataFrame(rows))

    sets = {name: linking.TestSet(name, "", {}, {}, []) for name in ("whole", "copy", "half")}
    start = recorded([0, 1])
    draws = report.gain_draws(profile, {"up": recorded([0, 1], 10.0), "one": recorded([0])}, sets, start)
    assert (draws["up", "whole", "R@1"] == draws["up", "copy", "R@1"]).all()
    assert 0.4 < np.corrcoef(draws["one", "whole", "R@1"], draws["one", "half", "R@1"])[0, 1] < 0.99
    assert draws["up"].std().max() < 1e-9  # other numbers of trainings beside it: each a mean, +5 whatever is drawn
    alone = report.gain_draws(profile, {"up": recorded([0, 1], 10.0)}, sets, start)["up", "whole", "R@1"]
    # Of two trainings that gain 0 and 10, two are drawn: 0, 5, 5, 10, whose spread is scaled by the root of 2
    assert sorted(alone.round(6).unique()) == [round(5 - 50**0.5, 6), 5, round(5 + 50**0.5, 6)]


def test_release_files_take_the_place_of_hpo_and_mesh(tmp_path, monkeypatch, capsys):
    for folder in ("snomed", "META"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(systems_module, "KG_CACHE", tmp_path / "cache")
    monkeypatch.setenv("DREHR_SNOMED", str(snomed_release(tmp_path / "snomed")))
    monkeypatch.setenv("DREHR_UMLS", str(umls_release(tmp_path / "META")))
    monkeypatch.setenv("DREHR_PUBLIC_DATA", str(tmp_path))
    mimic = replace(load_profile("mimic"), seed=7)  # graphs() keeps a profile's: not another test's
    assert list(systems_module.graphs(mimic)) == ["SNOMED", "UMLS"] and "stands in" not in capsys.readouterr().out
    whole = systems_module.whole_tasks(mimic)
    assert ("shortness of breath", "dyspnea (finding)") in pairs_of(whole["SNOMED Syn"])
    assert ("dyspnea (finding)", "clinical finding (finding)") in pairs_of(whole["SNOMED Graph"])
    assert ("type 2 diabetes", "niddm") in pairs_of(whole["UMLS Syn"])
    assert ("niddm", "diabetes mellitus") in pairs_of(whole["UMLS Graph"])
    assert report.paper_names(mimic)["UMLS Syn"] == "UMLS Syn"
    monkeypatch.delenv("DREHR_UMLS")
    assert list(systems_module.graphs(replace(load_profile("mimic"), seed=8))) == ["SNOMED", "MeSH"]
    assert "DREHR_UMLS is not set: MeSH" in capsys.readouterr().out


def test_a_umls_release_counts_by_its_content_not_by_its_path(tmp_path, monkeypatch):
    monkeypatch.setattr(systems_module, "KG_CACHE", tmp_path / "cache")
    made = []
    convert = systems_module.umls_to_bios
    monkeypatch.setattr(systems_module, "umls_to_bios", lambda *files: made.append(files) or convert(*files))

    def names(folder):
        systems_module.graphs.cache_clear()
        profile = load_profile("mimic")
        return systems_module.graphs(replace(profile, kg=replace(profile.kg, umls=folder)))["UMLS"].term2cui

    (tmp_path / "META").mkdir()
    meta = umls_release(tmp_path / "META")
    assert "niddm" in names(meta) and len(made) == 1
    shutil.copytree(meta, tmp_path / "copy")
    assert "niddm" in names(tmp_path / "copy") and len(made) == 1
    path = meta / "MRCONSO.RRF"
    path.write_text(path.read_text().replace("NIDDM", "sugar disease"))
    assert "niddm" not in names(meta) and "sugar disease" in names(meta) and len(made) == 2
    for path in (meta / "MRCONSO.RRF", meta / "MRREL.RRF"):  # as the release may be kept
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert "sugar disease" in names(meta)
    systems_module.graphs.cache_clear()


# --- loss ------------------------------------------------------------------------------------------------------------


def test_loss_is_torchs_cross_entropy_and_by_hand():
    torch.manual_seed(0)
    m, c = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 5, dtype=torch.float64)
    S = similarity(m, c)
    assert torch.allclose(S, torch.einsum("id,jd->ij", m, c))
    assert torch.allclose(mean_negative_log_likelihood(S), torch.nn.functional.cross_entropy(S, torch.arange(9)))
    by_hand = torch.tensor([[2.0, 0.0], [1.0, 1.0]])
    expected = [-math.log(1 + math.exp(-2)), -math.log(2)]
    torch.testing.assert_close(log_probability(by_hand), torch.tensor(expected))
    left_out = torch.tensor([[True, True], [False, True]])  # the diagonal stays whatever is asked
    torch.testing.assert_close(log_probability(by_hand, left_out), torch.tensor([0.0, -math.log(2)]))


def test_the_equation_as_printed_sees_no_negative():
    diagonal = torch.diag(torch.full((4,), 3.0))
    hard = diagonal + 50 * (1 - torch.eye(4))  # every negative far above every positive
    for S in (diagonal, hard):
        torch.testing.assert_close(log_probability_as_printed(S), torch.full((4,), -math.log(4)))
    assert mean_negative_log_likelihood(hard) > 40 > 1 > mean_negative_log_likelihood(diagonal)


# --- training --------------------------------------------------------------------------------------------------------


def test_schedule_covers_an_epoch_and_takes_a_batch_of_each_task():
    config = PairConfig(batch_size=4, epochs=2)
    schedule = pair_schedule([10, 3], config)
    assert len(schedule) == 4 and schedule == pair_schedule([10, 3], config)
    for epoch in (schedule[:2], schedule[2:]):
        first = [i for step in epoch for task, i in step if task == 0]
        assert len(first) == len(set(first)) == 8  # the last two don't fill a batch
    assert all(sorted(i for task, i in step if task == 1) == [0, 1, 2] for step in schedule)
    assert len(pair_schedule([10, 3], PairConfig(batch_size=4, max_steps=3))) == 3


SMALL = Task.from_pairs("s", "g", [(f"{w} of the {x}", f"{x} {w}") for w in ("pain", "cyst") for x in ("knee", "hip")])
OTHER = Task.from_pairs("o", "g", [("kidney stone", "renal calculus"), ("heart attack", "myocardial infarction")])


@pytest.mark.slow
def test_training_learns_repeats_and_sums_the_losses_of_two_tasks(tmp_path):
    profile = load_profile("smoke")
    config = PairConfig(batch_size=4, max_steps=6, learning_rate=1e-4, warmup_ratio=0.5)
    curves, embeddings = [], []
    for run in range(2):
        encoder = systems_module.load(profile, "start")
        if not run:
            sides = [
                [torch.from_numpy(encode(encoder, [task.pair(i)[side] for i in range(len(task))])) for side in (0, 1)]
                for task in (SMALL, OTHER)
            ]
            expected = sum(torch.nn.functional.cross_entropy(20 * m @ c.T, torch.arange(len(m))) for m, c in sides)
        curves.append(train_pairs(encoder, [SMALL, OTHER], config, tmp_path / str(run), progress=False))
        embeddings.append(encode(encoder, ["knee pain"]))
    pd.testing.assert_frame_equal(*curves)
    np.testing.assert_array_equal(*embeddings)
    loss = curves[0]["loss"].to_numpy()
    # bf16 where the CPU has it: a first step at learning rate 0
    assert loss[0] == pytest.approx(expected.item(), rel=0.05) and loss[-1] < loss[0]


@pytest.mark.slow
def test_trained_model_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setattr(profiles, "ROOT", tmp_path)  # Profile.cache
    profile = replace(load_profile("smoke"), seed=1)
    config = PairConfig(batch_size=2, max_steps=1)
    folder, curve = systems_module.trained(profile, [SMALL], config)
    made = (folder / "model.safetensors").stat().st_mtime_ns
    again, same = systems_module.trained(profile, [SMALL], config)
    assert again == folder and (folder / "model.safetensors").stat().st_mtime_ns == made
    pd.testing.assert_frame_equal(curve, same)
    assert systems_module.trained(profile, [OTHER], config)[0] != folder
    half = systems_module.trained(profile, [SMALL], replace(config, start_share=0.5, learning_rate=1e-2))[0]
    whole = systems_module.trained(profile, [SMALL], replace(config, learning_rate=1e-2))[0]
    first, half, whole = (systems_module.load(profile, m).state_dict() for m in ("start", half, whole))
    assert any(not torch.equal(first[name], whole[name]) for name in first)
    for name in first:
        torch.testing.assert_close(half[name], (first[name] + whole[name]) / 2)


def test_notes_of_the_linking_test_set_are_test_notes(profile):
    splits = read_splits(profile.notes, pipeline.notes(profile)[0])
    assert {splits[m.document] for m in systems_module.test_sets(profile)[0].mentions} == {"test"}
