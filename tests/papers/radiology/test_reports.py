"""Lexicon labels by hand, ranks against hand-worked values, splits without a leak, judgments that fit their reports."""

import gzip

import numpy as np
import pytest

from drehr_utils.errors import DataError
from drehr_utils.papers.radiology import reports as R


@pytest.fixture(scope="module")
def lexicon():
    return R.read_lexicon()


@pytest.fixture(scope="module")
def collections():
    return {c: R.read_collection(R.OPEN_CXR / f"collection_{c}.jsonl.gz") for c in "ab"}


@pytest.fixture(scope="module")
def entries(lexicon, collections):
    return {c: R.collection_entries(reports, lexicon) for c, reports in collections.items()}


@pytest.mark.parametrize(
    "a, b, same",
    [
        ("opacity", "opacities", True),  # "opacit", 6 of 9 letters
        ("pleural", "pleura", True),
        ("rib", "ribs", True),
        ("mass", "masses", True),
        ("pe", "per", False),
        ("bulla", "bulge", False),
        ("pneumonia", "pneumothorax", False),
        ("hypoinflation", "hyperinflation", False),
    ],
)
def test_partial_match(a, b, same):
    assert R.partial_match(a, b) is R.partial_match(b, a) is same


def plain_longest(phrase, words, max_gap):
    """Every chain, by exhaustive search: the longest, tightest, leftmost."""
    chains = [[]]
    for part in phrase:
        for chain in list(chains):
            for j, word in enumerate(words):
                if R.partial_match(part, word) and (not chain or 0 < j - chain[-1] <= max_gap + 1):
                    chains.append([*chain, j])
    key = min((-len(c), c[-1] - c[0] if c else 0, c[0] if c else 0) for c in chains)
    return -key[0], key[1], key[2]


def test_longest_common_subfix_equals_exhaustive_search():
    rng = np.random.default_rng(0)
    vocabulary = ["pleural", "pleura", "effusion", "effusions", "small", "or", "lung", "lungs"]
    for _ in range(300):
        phrase = rng.choice(vocabulary, rng.integers(1, 4)).tolist()
        words = rng.choice(vocabulary, rng.integers(1, 8)).tolist()
        chain = R.longest_common_subfix(phrase, words, max_gap=2)
        assert all(0 < b - a <= 3 for a, b in zip(chain, chain[1:], strict=False))
        found = (len(chain), chain[-1] - chain[0] if chain else 0, chain[0] if chain else 0)
        expected = plain_longest(phrase, words, 2)
        assert found[0] == expected[0], (phrase, words, chain)
        if found[0] == len(phrase):
            assert found == expected, (phrase, words, chain)


@pytest.mark.parametrize(
    "sentence, labels",
    [
        ("Central vascular congestion without overt edema.", {"vascular congestion": True, "pulmonary edema": False}),
        ("No pleural or pericardial effusion.", {"pleural effusion": False, "pericardial effusion": False}),
        ("Small bilateral effusions with loculated pleural fluid on the left.",
         {"pleural effusion": True, "loculated pleural effusion": True}),
        ("Interstitial pulmonary edema.", {"interstitial edema": True}),
        ("Resolution of right upper lobe pneumonia with a linear scar.", {"pneumonia": False, "lung scarring": True}),
        ("The heart is normal in size.", {}),
    ],
)  # fmt: skip
def test_labels_by_hand(lexicon, sentence, labels):
    assert R.label_sentence(sentence, R.FindingMatcher(lexicon)) == labels


def test_the_papers_example_gives_its_two_queries(lexicon):
    found = R.label_entries(["lungs: central vascular congestion without overt edema."], R.FindingMatcher(lexicon))
    assert [e.query for e in found] == ["vascular congestion", "no pulmonary edema"]


def test_entries_are_of_unique_sentences(lexicon):
    found = R.label_entries(["No pneumothorax.", "no  pneumothorax", "Pneumothorax."], R.FindingMatcher(lexicon))
    assert [(e.sentence, e.present) for e in found] == [("No pneumothorax.", False), ("Pneumothorax.", True)]


@pytest.mark.parametrize("collection", "ab")
def test_halves_share_no_finding_and_are_alike_in_size(entries, collection):
    first, second = R.split_by_finding(entries[collection])
    assert not {e.finding for e in first} & {e.finding for e in second}
    assert len(first) + len(second) == len(entries[collection])
    assert abs(len(first) - len(second)) < 0.05 * len(entries[collection])
    for train, test in ((first, second), (second, first)):
        kept = R.without_sentences(train, test)
        assert not {R.normalise(e.sentence) for e in kept} & {R.normalise(e.sentence) for e in test}
        assert not {e.query for e in kept} & {e.query for e in test} and len(kept) > 0.6 * len(train)


def test_collections_share_no_report_and_training_no_test_sentence(collections, entries):
    assert not {r.uid for r in collections["a"]} & {r.uid for r in collections["b"]}
    kept = R.without_sentences(entries["a"], entries["b"])
    assert not {R.normalise(e.sentence) for e in kept} & {R.normalise(e.sentence) for e in entries["b"]}


def test_query_values_by_hand():
    task = R.SentenceQueries(list("abcd"), {"x": np.array([0, 2]), "no x": np.array([1])})
    values = R.query_values(task, np.array([[4.0, 3, 2, 1], [1, 2, 3, 4]]))
    found = values.set_index(["query_id", "metric"])["value"]
    assert found["x", "mAP"] == pytest.approx(100 * (1 + 2 / 3) / 2) and found["x", "mR"] == 50
    assert found["no x", "mAP"] == pytest.approx(100 / 3) and found["no x", "mR"] == 0
    assert set(values["query_type"]) == {"positive", "negative"}
    with pytest.raises(ValueError, match="scores have shape"):
        R.query_values(task, np.zeros((2, 3)))
    rows = R.result_rows("s", "", values).set_index(["group", "metric"])["ours"]
    assert rows["positive", "mR"] == 50 and rows["all", "mR"] == 25


def test_judgments_fit_their_reports_and_check_the_labels(collections, lexicon):
    judgments = R.read_judgments()
    assert set(judgments[0]) <= {r.uid for reports in collections.values() for r in reports}
    for reports in collections.values():
        task = R.judged_task(reports, judgments)
        assert len(task.sentences) > 250 and len(task.matched) >= 15
    # "no pneumothorax" was judged by reading; the lexicon with the rules must find nearly the same sentences.
    matcher, names = R.FindingMatcher(lexicon), {"pneumothorax", "no pneumothorax"}
    said = {f"{r.uid}#{k}": s for c in collections.values() for r in c for k, s in enumerate(R.report_sentences(r))}
    judged = {(i, q) for q in names for i in judgments[1][q]}
    labelled = {(i, R.Entry("", yes, m).query) for i, s in said.items() if i.split("#")[0] in set(judgments[0])
                for m, yes in R.label_sentence(s, matcher).items()}  # fmt: skip
    labelled = {pair for pair in labelled if pair[1] in names}
    assert len(judged & labelled) / len(judged | labelled) > 0.85, judged ^ labelled


def test_coded_task_turns_headings_round():
    reports = [R.Report(str(i), "Text here.", "", ("Hernia, Hiatal", "normal")) for i in range(12)]
    kept, coded = R.coded_task([*reports, R.Report("x", "", "", ("Hernia, Hiatal",))])
    assert len(kept) == 12 and list(coded) == ["hiatal hernia"] and len(coded["hiatal hernia"]) == 12


def test_bad_files_name_the_row(tmp_path):
    path = tmp_path / "lexicon.tsv.gz"
    for text, message in (
        ("finding\tvariants\n", "row 1: not the header"),
        ("finding\ttype\tvariants\na\tb\n", "row 2, field finding: three"),
        ("finding\ttype\tvariants\na\tb\tc\na\tb\tc\n", "row 3, field finding: 'a' is there twice"),
    ):
        path.write_bytes(gzip.compress(text.encode()))
        with pytest.raises(DataError, match=f"lexicon.tsv.gz, {message}"):
            R.read_lexicon(path)
    judged = tmp_path / "judged.tsv"
    judged.write_text("# reports: a\nquery\tsentences\nx\ta2\n")
    with pytest.raises(DataError, match="judged.tsv, row 3, field sentences"):
        R.read_judgments(judged)


def test_iu_xray_absent_prints_a_hint(tmp_path, capsys):
    assert R.read_iu_xray(tmp_path) is None
    printed = capsys.readouterr().out
    assert "DREHR_PUBLIC_DATA" in printed and str(tmp_path) not in printed


def test_papers_figures_are_in_percent():
    table = R.figures(1).set_index(["system", "group", "metric"])["value"]
    assert table["SBERT/HS/MB(128)", "negative", "mAP"] == pytest.approx(39.2)
    assert R.figures(3)["value"].max() == pytest.approx(56)
