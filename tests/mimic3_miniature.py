"""MIMIC-III's tables in miniature, with its file names, upper-case headers and quirks; every word of it is invented."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

SUMMARY = (
    "Admission Date:  [**2101-3-4**]   Discharge Date: [**2101-3-9**]\n\nHTN, gastrointestinal bleed on aspirin. "
    "Pulmonary tuberculosis was ruled out.\nEGD showed an ulcer; a polypectomy was done. Started pantoprazole."
)
OTHER = "Heart failure, on furosemide (Lasix) [**Hospital1 18**]. Aspirin held.\n" + "Stable overnight. " * 60

TABLES = {
    "NOTEEVENTS": (
        "ROW_ID SUBJECT_ID HADM_ID CHARTDATE CATEGORY DESCRIPTION ISERROR TEXT",
        [
            (1, 11, 101, "2101-03-09", "Discharge summary", "Report", "", SUMMARY),
            (2, 11, 101, "2101-03-05", "Nursing", "Report", "", "secret nursing note"),
            (3, 12, 102, "2102-01-01", "Discharge summary", "Report", "", OTHER),
            (4, 12, 102, "2102-01-02", "Discharge summary", "Addendum", "", "Addendum: nothing new."),
            (5, 13, 103, "2103-01-01", "Discharge summary", "Report", "", "Well. Asthma."),
        ],
    ),
    "DIAGNOSES_ICD": (
        "ROW_ID SUBJECT_ID HADM_ID SEQ_NUM ICD9_CODE",
        [
            (1, 11, 101, 1, "53140"),
            (2, 11, 101, 2, "01192"),
            (3, 11, 101, 3, "4019"),
            (4, 11, 101, 4, "V1582"),
            (5, 12, 102, 1, "4280"),
            (6, 12, 102, 2, "40391"),
            (7, 12, 102, 3, ""),
            (8, 13, 103, 1, "49390"),
        ],
    ),
    "PROCEDURES_ICD": (
        "ROW_ID SUBJECT_ID HADM_ID SEQ_NUM ICD9_CODE",
        [(1, 11, 101, 1, "4513"), (2, 11, 101, 2, "4341")],
    ),
    "PRESCRIPTIONS": (
        "ROW_ID SUBJECT_ID HADM_ID DRUG_TYPE DRUG DRUG_NAME_GENERIC NDC PROD_STRENGTH",
        [
            (1, 11, 101, "MAIN", "Pantoprazole  Sodium 40mg Tablet", "", "", ""),
            (2, 11, 101, "MAIN", "Aspirin EC 81mg Tablet", "", "", ""),
            (3, 12, 102, "MAIN", "Furosemide 20mg/2mL Vial", "", "", ""),
            (4, 12, 102, "BASE", "Aspirin EC 81mg Tablet", "", "", ""),
            (5, 99, 999, "MAIN", "Of another patient", "", "", ""),
        ],
    ),
    "D_ICD_DIAGNOSES": (
        "ROW_ID ICD9_CODE SHORT_TITLE LONG_TITLE",
        [
            (1, "53140", "Chr stomach ulc w hem", "Chronic or unspecified gastric ulcer with hemorrhage"),
            (2, "01192", "Pulmonary TB NOS-exam unkn", "Pulmonary tuberculosis, unspecified, examination unknown"),
            (3, "4019", "Hypertension NOS", "Unspecified essential hypertension"),
            (4, "4280", "CHF NOS", "Congestive heart failure, unspecified"),
        ],
    ),
    "D_ICD_PROCEDURES": (
        "ROW_ID ICD9_CODE SHORT_TITLE LONG_TITLE",
        [
            (1, "4513", "Sm bowel endoscopy NEC", "Other endoscopy of small intestine"),
            (2, "4341", "Endosc dest stomach les", "Endoscopic excision or destruction of lesion or tissue of stomach"),
        ],
    ),
    "D_ICD9_CATEGORIES": (
        "icd_code long_title",
        [
            ("531", "Gastric ulcer"),
            ("011", "Pulmonary tuberculosis"),
            ("401", "Essential hypertension"),
            ("428", "Heart failure"),
            ("403", "Hypertensive chronic kidney disease"),
            ("493", "Asthma"),
        ],
    ),
}


def write_mimic3(folder: Path, without: str = "", **changed: list[tuple]) -> Path:
    """Write the miniature's tables as CSV (one of them gzipped); `changed` replaces a table's rows."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (header, rows) in TABLES.items():
        if name == without:
            continue
        name_on_disk = name.lower() if name == "D_ICD9_CATEGORIES" else name
        path = folder / f"{name_on_disk}.csv"
        opener = open
        if name == "NOTEEVENTS":
            path, opener = path.with_suffix(".csv.gz"), gzip.open
        with opener(path, "wt", newline="") as handle:
            writer = csv.writer(handle)
            writer.writerow(header.split())
            writer.writerows(changed.get(name, rows))
    return folder
