"""Radiology report retrieval with lexicon-made labels (Shi, Syeda-Mahmood and Baldwin, 2022): labels, queries, scores.

A report's sentences are labelled with the lexicon's findings, present or ruled out (§2.1, §2.2); "M" and "no M" are the
queries; a query's matched sentences are those with its label. Training is in triplets.py, negation in negation.py.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import ir_measures
import numpy as np
import pandas as pd
from ir_measures import AP, Rprec
from sentence_transformers import SentenceTransformer

from drehr_utils.data import public_data
from drehr_utils.errors import DataError
from drehr_utils.evaluation import intervals, tables
from drehr_utils.files import read_json_lines
from drehr_utils.knowledge import negation
from drehr_utils.profiles import ROOT
from drehr_utils.search.fusion import rank, tie_keys
from drehr_utils.training import encoders

OPEN_CXR = ROOT / "data/open_cxr"
TAU, MAX_GAP = 0.6, 2  # of longest_common_subfix: share of a word that must agree; words that may stand between
SHORTEST_PREFIX = 4  # letters; shorter words must be equal
METRICS = {"mAP": AP, "mR": Rprec}  # §3.3's recall is R-precision: correct among as many as there are to find
GROUPS = ("positive", "negative", "all")


@dataclass(frozen=True)
class Finding:
    """A core finding, its type, and the phrases that name it, the core name among them."""

    name: str
    type: str
    phrases: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    uid: str
    findings: str
    impression: str
    problems: tuple[str, ...] = ()  # human coders' headings (IU X-ray only)


@dataclass(frozen=True)
class Entry:
    """(S, N, M) of §2.2: a sentence, whether it affirms the finding, and the finding."""

    sentence: str
    present: bool
    finding: str

    @property
    def query(self) -> str:
        """ "M" or "no M": §2.2's simple form, in training and evaluation."""
        return self.finding if self.present else f"no {self.finding}"


# --- reading -----------------------------------------------------------------------------------------------------


def read_lexicon(path: Path = OPEN_CXR / "finding_lexicon.tsv.gz") -> list[Finding]:
    """The findings in the file's order. Raises DataError, naming file, row and field, where a line isn't one."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t"))
    if not rows or rows[0] != ["finding", "type", "variants"]:
        raise DataError(f"{path.name}, row 1: not the header finding, type, variants; restore it")
    findings: list[Finding] = []
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != 3 or not row[0].strip():
            raise DataError(f"{path.name}, row {number}, field finding: three tab-separated fields are needed")
        name, kind, variants = (cell.strip() for cell in row)
        if name in {finding.name for finding in findings}:
            raise DataError(f"{path.name}, row {number}, field finding: {name!r} is there twice; keep one")
        phrases = [part.strip().lower() for part in variants.split(";") if part.strip()]
        findings.append(Finding(name, kind, tuple(dict.fromkeys([name.lower(), *phrases]))))
    return findings


def read_collection(path: Path) -> list[Report]:
    """Reports of an open_cxr collection (JSON lines: uid, findings, impression). Raises DataError for a bad line."""
    fields, reports = ("uid", "findings", "impression"), []
    for number, where, row in read_json_lines(path, fields):
        if bad := [field for field in fields if not isinstance(row[field], str)]:
            raise DataError(f"{where}, row {number}, field {bad[0]}: not a string; quote it")
        reports.append(Report(*(row[field] for field in fields)))
    return reports


def read_iu_xray(folder: str | Path | None = None) -> list[Report] | None:
    """IU X-ray's reports with their coders' problems (Demner-Fushman et al., 2016), from public_data.locate's folder;
    None without them."""
    root = public_data.locate("iu_xray", folder)
    if root is None:
        return None
    path = root / "iu_xray" / "indiana_reports.csv.gz"
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    missing = [c for c in ("uid", "Problems", "findings", "impression") if c not in table]
    if missing:
        raise DataError(f"{path.name}, row 1, field {missing[0]}: missing column; fetch the file again")
    columns = table[["uid", "findings", "impression", "Problems"]].itertuples(index=False, name=None)
    return [Report(u, f, i, tuple(dict.fromkeys(x.strip() for x in p.split(";")))) for u, f, i, p in columns]


def report_sentences(report: Report) -> list[str]:
    return negation.sentences(report.findings) + negation.sentences(report.impression)


def read_judgments(path: Path = OPEN_CXR / "sentence_judgments.tsv") -> tuple[list[str], dict[str, list[str]]]:
    """Queries judged by reading, not by the lexicon: the judged reports' uids and, for each query, its sentences' ids.

    A sentence's id is `<uid>#<k>`, its place in report_sentences. Raises DataError for a malformed file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if len(lines) < 2 or not lines[0].startswith("# reports: ") or lines[1] != "query\tsentences":
        raise DataError(f"{path.name}, rows 1-2: need '# reports: uid ...' and the header query, sentences")
    judged: dict[str, list[str]] = {}
    for number, line in enumerate(lines[2:], start=3):
        query, _, ids = line.partition("\t")
        if not ids or any(not re.fullmatch(r"\S+#\d+", i) for i in ids.split()):
            raise DataError(f"{path.name}, row {number}, field sentences: need ids such as HA0001#2, space-separated")
        judged[query] = ids.split()
    return lines[0].removeprefix("# reports: ").split(), judged


# --- §2.1: longest common subfix ---------------------------------------------------------------------------------


@cache
def partial_match(a: str, b: str, tau: float = TAU) -> bool:
    """Whether two words share a prefix of at least 4 letters and tau of the longer one, are equal, or differ by a
    plural s. So "opacity" meets "opacities", and "pe" nothing but itself."""
    if a == b or a + "s" == b or b + "s" == a:
        return True
    return len(os.path.commonprefix([a, b])) >= max(SHORTEST_PREFIX, tau * max(len(a), len(b)) - 1e-9)


def longest_common_subfix(
    phrase: Sequence[str], words: Sequence[str], tau: float = TAU, max_gap: int = MAX_GAP
) -> list[int]:
    """Positions in `words` of the longest in-order partial match of `phrase`'s words, at most `max_gap` words between
    two neighbours; the tightest, then the leftmost, of equal length. O(len(phrase) * len(words) * max_gap).

    `best[j]` is the best chain that ends at word j with the phrase's words so far."""
    best: dict[int, list[int]] = {}
    for part in phrase:
        fresh: dict[int, list[int]] = {}
        for j, word in enumerate(words):
            if partial_match(part, word, tau):
                reachable = (best[i] for i in range(max(0, j - 1 - max_gap), j) if i in best)
                fresh[j] = min(([*chain, j] for chain in reachable), key=_order, default=[j])
        for j, chain in fresh.items():
            if j not in best or _order(chain) < _order(best[j]):
                best[j] = chain
    return min(best.values(), key=_order, default=[])


def _order(chain: list[int]) -> tuple[int, int, int]:
    return -len(chain), chain[-1] - chain[0], chain[0]


@dataclass(frozen=True)
class Mention:
    finding: str
    start: int  # characters of the sentence
    end: int
    words: tuple[int, ...]


class FindingMatcher:
    """Finds the lexicon's phrases in sentences: all of a phrase's words must be in the longest common subfix."""

    def __init__(self, lexicon: Iterable[Finding]):
        self.phrases = [(tuple(_tokens(p)), f.name) for f in lexicon for p in f.phrases]
        self.vocabulary = sorted({word for words, _ in self.phrases for word in words})
        self._known: dict[str, frozenset[str]] = {}

    def _partners(self, word: str) -> frozenset[str]:
        if word not in self._known:
            near = [v for v in self.vocabulary if v[:1] == word[:1]]
            self._known[word] = frozenset(v for v in near if partial_match(v, word))
        return self._known[word]

    def find(self, sentence: str) -> list[Mention]:
        """The mentions, left to right; one that lies within a longer one is dropped ("effusion" in "pleural effusion",
        "edema" in "interstitial edema")."""
        spans = [m.span() for m in re.finditer(r"\w+", sentence)]
        words = [sentence[a:b].lower() for a, b in spans]
        present = frozenset().union(*(self._partners(word) for word in words)) if words else frozenset()
        found: dict[tuple[int, ...], tuple[int, str]] = {}
        for phrase, name in self.phrases:
            if not present.issuperset(phrase):
                continue
            for at in _all_matches(phrase, words):
                letters = sum(len(w) for w in phrase if w in words)  # of two findings at one place, the literal one
                if at not in found or letters > found[at][0]:
                    found[at] = (letters, name)
        kept = [at for at in found if not any(set(at) < set(other) for other in found)]
        mentions = {(found[at][1], at): None for at in sorted(kept)}
        return [Mention(name, spans[at[0]][0], spans[at[-1]][1], at) for name, at in mentions]


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _all_matches(phrase: tuple[str, ...], words: list[str]) -> list[tuple[int, ...]]:
    """Every full match of the phrase, each found after the one before it."""
    matches, start = [], 0
    while len(chain := longest_common_subfix(phrase, words[start:])) == len(phrase):
        matches.append(tuple(start + i for i in chain))
        start = matches[-1][0] + 1
    return list(dict.fromkeys(matches))


# --- §2.2: labelled entries, queries -----------------------------------------------------------------------------


def label_sentence(sentence: str, matcher: FindingMatcher) -> dict[str, bool]:
    """Findings of a sentence: affirmed (True) where one mention is, else ruled out (False)."""
    labels: dict[str, bool] = {}
    for mention in matcher.find(sentence):
        # From its first word to its last: "no pleural or pericardial effusion" denies both.
        present = not negation.denied(sentence, mention.start, mention.end)
        labels[mention.finding] = labels.get(mention.finding, False) or present
    return labels


def label_entries(sentences: Iterable[str], matcher: FindingMatcher) -> list[Entry]:
    """The entries of the unique sentences ("after pruning for duplicates", §3.1), in order of first appearance."""
    unique: dict[str, str] = {}
    for sentence in sentences:
        unique.setdefault(normalise(sentence), sentence)
    return [Entry(s, yes, m) for s in unique.values() for m, yes in label_sentence(s, matcher).items()]


def normalise(sentence: str) -> str:
    """What makes two sentences one: lower-cased words."""
    return " ".join(_tokens(sentence))


def collection_entries(reports: Iterable[Report], lexicon: Sequence[Finding]) -> list[Entry]:
    return label_entries((s for r in reports for s in report_sentences(r)), FindingMatcher(lexicon))


@dataclass(frozen=True)
class SentenceQueries:
    """A retrieval task: sentences to rank, and for each query the positions of its matched ones."""

    sentences: list[str]
    matched: dict[str, np.ndarray]

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> SentenceQueries:
        """The dictionary of §2.2: a unique query, and every sentence that carries its label."""
        sentences = list(dict.fromkeys(entry.sentence for entry in entries))
        at = {sentence: i for i, sentence in enumerate(sentences)}
        matched: dict[str, list[int]] = defaultdict(list)
        for entry in entries:
            matched[entry.query].append(at[entry.sentence])
        return cls(sentences, {query: np.array(rows) for query, rows in matched.items()})

    @property
    def queries(self) -> list[str]:
        return list(self.matched)


def is_negative(query: str) -> bool:
    return query.startswith("no ")


def entry_counts(entries: Sequence[Entry]) -> dict[str, int]:
    """The numbers that §3.1 gives of a data set."""
    queries = {entry.query for entry in entries}
    negative = sum(map(is_negative, queries))
    return {
        "entries": len(entries),
        "unique sentences": len({entry.sentence for entry in entries}),
        "positive queries": len(queries) - negative,
        "negative queries": negative,
    }


def split_by_finding(entries: Sequence[Entry], seed: int = 0) -> tuple[list[Entry], list[Entry]]:
    """Two halves without a common finding and with about equally many entries (§3.2).

    Findings of more than a twentieth of the entries are dealt first, largest first, then the others in a random order
    of the seed; each goes to the half that is smaller by then."""
    sizes: dict[str, int] = defaultdict(int)
    for entry in entries:
        sizes[entry.finding] += 1
    order = np.random.default_rng(seed).permutation(sorted(sizes)).tolist()
    halves: tuple[set[str], set[str]] = (set(), set())
    totals = [0, 0]
    for finding in sorted(order, key=lambda f: -sizes[f] if sizes[f] > len(entries) / 20 else 0):
        half = int(totals[1] < totals[0])
        halves[half].add(finding)
        totals[half] += sizes[finding]
    return tuple([entry for entry in entries if entry.finding in half] for half in halves)


def without_sentences(entries: Sequence[Entry], test: Sequence[Entry]) -> list[Entry]:
    """The training entries whose sentence, in whatever spelling, is not among the test's."""
    held_out = {normalise(entry.sentence) for entry in test}
    return [entry for entry in entries if normalise(entry.sentence) not in held_out]


# --- evaluation --------------------------------------------------------------------------------------------------


def query_values(task: SentenceQueries, scores: np.ndarray, prefix: str = "") -> pd.DataFrame:
    """Average precision and recall (R-precision) of each query, 0 to 100, for scores [queries, sentences].

    Rows as metrics.single_patient's; `query_type` is positive or negative. `prefix` keeps ids of two tasks apart."""
    if scores.shape != (len(task.matched), len(task.sentences)):
        raise ValueError(f"scores have shape {scores.shape}; need {(len(task.matched), len(task.sentences))}")
    ids = [str(i) for i in range(len(task.sentences))]
    places = [-float(i) for i in range(len(ids))]
    names = {measure: name for name, measure in METRICS.items()}
    rows = []
    order = rank(scores, tie_keys(task.queries, ids))
    for row, (query, matched) in enumerate(task.matched.items()):
        run = {query: dict(zip([ids[i] for i in order[row]], places, strict=True))}
        for value in ir_measures.iter_calc(METRICS.values(), {query: {ids[i]: 1 for i in matched}}, run):
            kind = "negative" if is_negative(query) else "positive"
            rows.append((prefix + query, prefix + query, kind, names[value.measure], 100 * value.value))
    return pd.DataFrame(rows, columns=["search_id", "query_id", "query_type", "metric", "value"])


def result_rows(system: str, setting: str, values: pd.DataFrame, start: pd.DataFrame | None = None) -> pd.DataFrame:
    """Long-form rows (intervals.RESULT_COLUMNS) for positive, negative and all queries; p against `start`."""
    frames = []
    for group in GROUPS:
        part, base = (f if f is None or group == "all" else f[f["query_type"] == group] for f in (values, start))
        if len(part):
            frames.append(intervals.result_rows(system, setting, group, part, base))
    return pd.concat(frames, ignore_index=True)


Encode = Callable[[Sequence[str]], np.ndarray]  # texts -> unit-length embeddings [texts, dim]


def remembering(encoder: SentenceTransformer) -> Encode:
    """The encoder as a function that encodes a text once, however many tables ask for it; bfloat16 where that is fast,
    as in training."""
    known: dict[str, np.ndarray] = {}

    def encode(texts: Sequence[str]) -> np.ndarray:
        if fresh := [text for text in dict.fromkeys(texts) if text not in known]:
            known.update(zip(fresh, encoders.encode(encoder, fresh, bf16=True), strict=True))
        return np.stack([known[text] for text in texts])

    return encode


def dense_query_scores(encode: Encode, task: SentenceQueries) -> np.ndarray:
    """Cosine similarities, float32 [queries, sentences]."""
    return encode(task.queries) @ encode(task.sentences).T


def separations(encode: Encode, entries: Sequence[Entry]) -> np.ndarray:
    """§3.4, of each entry: similarity of its sentence with its query, less that with the query of opposite negation."""
    opposite = [Entry(e.sentence, not e.present, e.finding).query for e in entries]
    own, other = encode([e.query for e in entries]), encode(opposite)
    return ((own - other) * encode([e.sentence for e in entries])).sum(axis=1)


def judged_task(reports: Sequence[Report], judgments: tuple[list[str], dict[str, list[str]]]) -> SentenceQueries:
    """§3.5's task on those of `reports` that were judged: all their unique sentences are candidates, labelled or not.

    Raises DataError where a judgment names a sentence that isn't there."""
    uids, judged = set(judgments[0]), judgments[1]
    place, sentences, by_uid = {}, {}, {r.uid: r for r in reports if r.uid in uids}
    for uid, report in by_uid.items():
        for k, sentence in enumerate(report_sentences(report)):
            place[f"{uid}#{k}"] = sentences.setdefault(normalise(sentence), (len(sentences), sentence))[0]
    matched = {}
    for query, ids in judged.items():
        here = [i for i in ids if i.partition("#")[0] in by_uid]
        if unknown := [i for i in here if i not in place]:
            raise DataError(f"sentence_judgments.tsv, query {query!r}: no sentence {unknown[0]}; judge the text again")
        if here:
            matched[query] = np.array(sorted({place[i] for i in here}))
    return SentenceQueries([s for _, s in sentences.values()], matched)


def coded_task(reports: Sequence[Report], minimum: int = 10) -> tuple[list[Report], dict[str, np.ndarray]]:
    """IU X-ray by its human coders: the reports with text, and for each problem that names a finding and that at least
    `minimum` of them carry, their positions. Queries are the headings, put in reading order ("Hernia, Hiatal")."""
    texts = [r for r in reports if report_sentences(r)]
    carried: dict[str, list[int]] = defaultdict(list)
    for i, report in enumerate(texts):
        for problem in report.problems:
            carried[" ".join(reversed(problem.lower().split(", ")))].append(i)
    return texts, {q: np.array(rows) for q, rows in carried.items() if len(rows) >= minimum and q not in NOT_A_FINDING}


# Headings of IU X-ray's coders that name a place or the image, or nothing: no query for a finding.
NOT_A_FINDING = frozenset(
    "normal,no indexing,lung,thoracic vertebrae,spine,aorta,diaphragm,thoracic aorta,markings,density,deformity,"
    "costophrenic angle,technical quality of image unsatisfactory,cardiac shadow,thickening,mediastinum,shoulder,"
    "medical device,pulmonary artery,trachea,ribs,bone and bones,humerus,clavicle,pleura,lucency,heart,hilum,neck,"
    "breast,abdomen,thorax,lumbar vertebrae,cervical vertebrae,lower lobe,blood vessels,heart ventricles,heart atria,"
    "surgical instruments,foreign bodies,funnel chest,bronchi,lung volumes".split(",")
)


def figures(table: int) -> pd.DataFrame:
    """The paper's Table 1-4 (tables.paper_figures), times 100, as all scores here are."""
    printed = tables.paper_figures("radiology", table)
    return printed.assign(value=100 * printed["value"])
