"""The construction: the published open benchmark to the byte, a miniature of MIMIC-III by a real server, statistics."""

import json

import numpy as np
import pytest
from llm_server import chat_server
from mimic3_miniature import write_mimic3
from sklearn.metrics import cohen_kappa_score

from drehr_utils.config import CliniqSizes, Resampling
from drehr_utils.data.benchmark import load_benchmark, single_patient_tasks
from drehr_utils.data.notes import Note, read_notes
from drehr_utils.errors import DataError
from drehr_utils.evaluation import metrics
from drehr_utils.evaluation.tables import paper_figures
from drehr_utils.llm.servers import Server
from drehr_utils.papers.cliniq import agreement, construction, curation, judging, statistics
from drehr_utils.profiles import ROOT, load_profile

DATA = ROOT / "data"
OPEN_CLINIQ = DATA / "open_cliniq"


@pytest.fixture(scope="module", params=["dev", "test"])
def rebuilt(request):
    """The open benchmark from the notes, the recorded curation and the recorded judgments: nothing of its files."""
    split = request.param
    notes = construction.split_notes(DATA / "open_notes", split)
    admissions = curation.read_coded_admissions(DATA / "open_notes", [note.hadm_id for note in notes])
    made = curation.read_curation(OPEN_CLINIQ / "query_curation.csv.gz")
    draft = construction.draft_benchmark(notes, admissions, made)
    strings = judging.string_matches(draft.queries, draft.corpus)
    names = ["judge_a", "judge_b", "adjudicated"] if split == "test" else ["judge_a"]
    judges = [judging.read_judgments(OPEN_CLINIQ / split / f"judgments/{n}.tsv", draft, strings) for n in names]
    return split, draft, strings, judges


def test_the_published_open_benchmark_is_what_the_code_gives(rebuilt, tmp_path):
    split, draft, strings, judges = rebuilt
    benchmark = construction.with_judgments(draft, strings, judging.combine_judgments(*judges))
    assert benchmark == load_benchmark(OPEN_CLINIQ, split)
    folder = construction.save_benchmark(benchmark, tmp_path, split)
    for name in ("corpus.jsonl", "queries.jsonl", "patients.jsonl", f"qrels/{split}.tsv"):
        assert (folder / name).read_bytes() == (OPEN_CLINIQ / split / name).read_bytes(), name
    assert load_benchmark(tmp_path, split) == benchmark


def test_a_judgment_on_a_string_match_is_refused(rebuilt):
    _, draft, strings, _ = rebuilt
    with pytest.raises(DataError, match="is a string match"):
        construction.with_judgments(draft, strings, {min(strings): "synonym"})


@pytest.mark.parametrize("rebuilt", ["test"], indirect=True)  # dev was judged once
def test_agreement_of_the_recorded_judges(rebuilt):
    """The data card's kappa and accuracy; and the interval's kappa against scikit-learn's."""
    _, draft, strings, judges = rebuilt
    pairs = [pair for pair in judging.own_pairs(draft) if pair not in strings]
    assert len(pairs) == 25_277
    rows = agreement.agreement_rows("a with b", judges[0], judges[1], pairs, Resampling(200)).set_index("metric")
    assert round(rows.loc["kappa", "ours"] / 100, 3) == 0.945 and round(rows.loc["accuracy", "ours"] / 100, 3) == 0.922
    assert (rows["low"] < rows["ours"]).all() and (rows["ours"] < rows["high"]).all()
    again = agreement.agreement_rows("a with b", judges[0], judges[1], pairs, Resampling(200)).set_index("metric")
    assert again["low"].equals(rows["low"])


def test_kappa_worked_by_hand_and_against_scikit_learn():
    # 20 both, 5 and 10 one, 15 neither of 50: observed 0.7, expected 0.5*0.6 + 0.5*0.4 = 0.5, kappa 0.4.
    assert agreement.kappa(np.array([20, 5, 10, 15])) == pytest.approx(0.4)
    rng = np.random.default_rng(0)
    for _ in range(20):
        a = rng.random(200) < 0.3
        b = a ^ (rng.random(200) < 0.1)
        counts = [np.sum(a & b), np.sum(a & ~b), np.sum(~a & b), np.sum(~a & ~b)]
        assert agreement.kappa(np.array(counts)) == pytest.approx(cohen_kappa_score(a, b))


def test_the_interval_of_kappa_draws_whole_notes():
    rng = np.random.default_rng(0)
    a = rng.random(200) < 0.3
    b = a ^ (rng.random(200) < 0.1)
    for notes, is_measured in ((range(200), True), ([0] * 200, False)):
        pairs = [(f"q{i}", f"n{note // 10}_0") for i, note in enumerate(notes)]
        judges = [{pair: "synonym" for pair, is_so in zip(pairs, judge, strict=True) if is_so} for judge in (a, b)]
        row = agreement.agreement_rows("a with b", *judges, pairs, Resampling(200)).iloc[0]
        assert row["ours"] == pytest.approx(100 * cohen_kappa_score(a, b))
        assert (row["low"] < row["ours"] < row["high"]) == is_measured == (not np.isnan(row["low"]))


def test_a_judged_note_that_is_no_patients_is_named():
    bench = load_benchmark(OPEN_CLINIQ, "dev")
    lost = {chunk for of in bench.qrels.values() for chunk in of} & set(bench.patients.pop().chunk_ids)
    with pytest.raises(DataError, match=f"qrels: '{min(lost)}' is of a note without a line in patients.jsonl"):
        statistics.statistics_rows(bench, Resampling(50))


def test_table1_against_counts_of_the_files():
    """Counted from the files' lines, without the loader."""
    rows = statistics.statistics_rows(load_benchmark(OPEN_CLINIQ, "dev"), Resampling(50))
    ours = rows.set_index(["setting", "group"])["ours"]
    qrels = [line.split("\t") for line in (OPEN_CLINIQ / "dev/qrels/dev.tsv").read_text().splitlines()[1:]]
    kinds = {q["_id"]: q["type"] for q in map(json.loads, (OPEN_CLINIQ / "dev/queries.jsonl").read_text().splitlines())}
    assert ours["multi", "patient record"] == 32 and ours["multi", "chunk of records"] == 331
    assert ours["multi", "relevance judgment"] == len(qrels) == 2835
    for kind in judging.MATCH_TYPES:
        assert ours["multi", kind] == sum(line[3] == kind for line in qrels)
        assert ours["single", kind] == pytest.approx(ours["multi", kind] / 32)
    searches = {(line[0], line[1].rpartition("_")[0]) for line in qrels if line[4] == "own"}
    assert ours["single", "query"] == pytest.approx(len(searches) / 32)
    for kind in ("disease", "procedure", "drug"):
        assert ours["multi", kind] == len({line[0] for line in qrels if kinds[line[0]] == kind})
        assert ours["single", kind] == pytest.approx(sum(kinds[q] == kind for q, _ in searches) / 32)
    single = rows[rows["setting"] == "single"]
    assert (single["low"] <= single["ours"]).all() and (single["ours"] <= single["high"]).all()
    theirs = paper_figures("cliniq", 1).set_index(["setting", "group"])["value"]
    assert set(theirs.index) == set(ours.index)


def test_a_query_of_two_kinds_is_one_and_ids_grow_with_their_number():
    coded = curation.CodedAdmissions(
        {"1": [curation.Code("1234", "9")]}, {}, {"1": ["Lithium 300mg"], "2": ["Zinc", "Lithium 300mg"]}, {}, {}
    )
    made = {
        ("diagnosis", "1234"): "zinc",
        ("drug", "Zinc"): "zinc",
        ("drug", "Lithium 300mg"): "lithium",
    }
    notes = [Note("n1", "p", "1", "On zinc. " * 60), Note("n2", "q", "2", "Well.")]
    draft = construction.draft_benchmark(notes, coded, made)
    assert draft.queries == {"q0000": "lithium", "q0001": "zinc"}
    assert draft.query_types == {"q0000": "drug", "q0001": "disease"}
    assert [p.query_ids for p in draft.patients] == [["q0001", "q0000"], ["q0001", "q0000"]]
    assert [p.chunk_ids for p in draft.patients] == [["n1_0", "n1_1"], ["n2_0"]]


def test_of_an_admission_the_first_summary_and_a_patients_notes_drawn_together(tmp_path, monkeypatch):
    rows = [("n1", "p", "1"), ("n2", "p", "1"), ("n3", "p", "2"), ("n4", "q", "3"), ("n5", "q", "")]
    table = "".join(f'{note},{who},{stay},"Well on zinc."\n' for note, who, stay in rows)
    (tmp_path / "discharge.csv").write_text(f"note_id,subject_id,hadm_id,text\n{table}")
    (tmp_path / "splits.csv").write_text(
        "subject_id,note_id,split\n" + "".join(f"{who},{note},test\n" for note, who, _ in rows)
    )
    notes = construction.split_notes(tmp_path, "test")
    assert [note.note_id for note in notes] == ["n1", "n3", "n4", "n5"]  # n2 is its admission's second
    coded = curation.CodedAdmissions({}, {}, {stay: ["Zinc"] for stay in ("1", "2", "3", "")}, {}, {})
    draft = construction.draft_benchmark(notes[:3], coded, {("drug", "Zinc"): "zinc"})
    assert metrics.patient_of(draft) == {"n1": "p", "n3": "p", "n4": "n4"}
    bench = construction.with_judgments(draft, {("q0000", c) for c in draft.corpus}, {})
    assert set(metrics.single_patient(bench, np.zeros((1, 3)))["patient"]) == {"p", "n4"}


def test_a_sample_is_drawn_once_and_in_order():
    notes = construction.split_notes(DATA / "open_notes", "train")
    drawn = construction.split_notes(DATA / "open_notes", "train", sample=20, seed=3)
    ids = [note.note_id for note in notes]
    places = [ids.index(note.note_id) for note in drawn]
    assert len(drawn) == 20 and places == sorted(set(places)) and places != list(range(20))
    assert [n.note_id for n in construction.split_notes(DATA / "open_notes", "train", 20, 3)] == [
        n.note_id for n in drawn
    ]


def test_a_split_without_a_note_is_said(tmp_path):
    with pytest.raises(DataError, match="mimic3/: none of the 4 notes is of the split dev; say in a splits.csv"):
        construction.split_notes(write_mimic3(tmp_path / "mimic3"), "dev")


def test_mimic3_in_miniature_by_a_real_server(tmp_path):
    """From MIMIC-III's tables to a benchmark that the loader reads; drugs and judgments by the language model."""
    folder = write_mimic3(tmp_path / "mimic3")
    notes, _ = read_notes(folder)
    assert [note.hadm_id for note in notes] == ["101", "102", "102", "103"]  # the nursing note is out
    admissions = curation.read_coded_admissions(folder, [note.hadm_id for note in notes])

    def reply(prompt: str, body: dict) -> str:
        if "medication orders" in prompt:
            return prompt.rpartition("Order: ")[2].split()[0].lower()
        note, _, terms = prompt.rpartition("record:\n")[2].partition("\n\nTerms:\n")
        lines = []
        for line in filter(lambda text: text[:1].isdigit(), terms.splitlines()):
            number, _, term = line.partition(". ")
            label = "abbreviation" if term == "essential hypertension" and "htn" in note else "not relevant"
            lines.append(f"{number} | reason | {label}")
        return "\n".join(lines)

    orders = {order for lines in admissions.drugs.values() for order in lines}
    with chat_server(reply) as chat:
        server = Server(chat.base_url, "m")
        names, _ = curation.clean_drugs_by_llm(orders, server=server, store=tmp_path / "d.jsonl")
        draft = construction.draft_benchmark(notes, admissions, curation.curate(admissions, names))
        strings = judging.string_matches(draft.queries, draft.corpus)
        questions = judging.judgment_questions(draft, strings, CliniqSizes())
        judged = judging.judge(draft, questions, CliniqSizes(), server=server, store=tmp_path / "j.jsonl")
    benchmark = construction.with_judgments(draft, strings, judging.combine_judgments(judged.labels))
    construction.save_benchmark(benchmark, tmp_path / "out", "all")
    read = load_benchmark(tmp_path / "out", "all")
    assert read == benchmark
    ids = {text: query_id for query_id, text in read.queries.items()}
    assert read.match_types[ids["essential hypertension"]] == {"1_0": "abbreviation"}
    assert read.match_types[ids["pantoprazole"]] == {"1_0": "string"}
    assert read.match_types[ids["aspirin"]] == {"1_0": "string", "3_0": "string"}
    assert {task.note_id for task in single_patient_tasks(read)} == {"1", "3", "5"}
    qrels = (tmp_path / "out/all/qrels/all.tsv").read_text()
    assert "\thospital" not in qrels and qrels.count("\n") == 1 + sum(map(len, read.qrels.values()))


def test_each_profile_has_settings_and_only_mimic_makes_its_judgments_anew():
    for name in ("open", "smoke", "mimic"):
        chosen = load_profile(name).cliniq
        assert chosen.recorded == (name != "mimic")


def test_the_open_profiles_steps_give_the_published_benchmark():
    profile = load_profile("open")
    notes = construction.split_notes(profile.notes, profile.cliniq.split)
    admissions = curation.read_coded_admissions(profile.notes, [note.hadm_id for note in notes])
    draft = construction.draft_benchmark(notes, admissions, construction.profile_curation(profile, admissions))
    strings = judging.string_matches(draft.queries, draft.corpus)
    judges, counted = construction.profile_judgments(profile, draft, strings)
    benchmark = construction.with_judgments(draft, strings, judging.combine_judgments(*judges))
    assert benchmark == load_benchmark(OPEN_CLINIQ, "test")
    assert counted["judge_a"].sum() == 6258 and counted.loc["not relevant", "adjudicated"] == 108
    assert list(counted) == ["judge_a", "judge_b", "adjudicated"] and len(judges) == 3


PAIRS = [(f"q{i}", f"n{i // 3}_0") for i in range(12)]


@pytest.mark.parametrize(
    ("first", "second", "kappa", "why"),
    [
        ([0, 4], [1, 7], -0.2, ["", "no pair that both judges call relevant"]),
        ([], [], None, ["both judges give all pairs one answer", "no pair that both judges call relevant"]),
        (range(12), range(12), None, ["both judges give all pairs one answer", ""]),
    ],
    ids=["disjoint", "nothing relevant", "everything relevant"],
)
def test_judges_that_cannot_be_compared_get_nan_and_a_reason(first, second, kappa, why, recwarn):
    a, b = ({PAIRS[i]: "synonym" for i in part} for part in (first, second))
    rows = agreement.agreement_rows("a with b", a, b, PAIRS, Resampling(50))
    assert list(rows["why"]) == why and list(rows["ours"].isna()) == [bool(reason) for reason in why]
    assert rows.loc[rows["ours"].isna(), ["low", "high"]].isna().all(axis=None)
    assert kappa is None or rows.loc[0, "ours"] == pytest.approx(100 * kappa)
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_without_a_pair_there_is_no_agreement():
    rows = agreement.agreement_rows("a with b", {}, {}, [], Resampling(50))
    assert rows["ours"].isna().all() and list(rows["why"]) == ["no pair was judged"] * 2
