"""Partial matches by hand, the longest common subfix against an exhaustive search, a bad lexicon."""

import gzip

import numpy as np
import pytest

from drehr_utils.errors import DataError
from drehr_utils.papers.radiology.lexicon import longest_common_subfix, partial_match, read_lexicon


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
    assert partial_match(a, b) is partial_match(b, a) is same


def plain_longest(phrase, words):
    """Every chain, by exhaustive search: the longest, tightest, leftmost."""
    chains = [[]]
    for part in phrase:
        for chain in list(chains):
            for j, word in enumerate(words):
                if partial_match(part, word) and (not chain or 0 < j - chain[-1] <= 3):
                    chains.append([*chain, j])
    key = min((-len(c), c[-1] - c[0] if c else 0, c[0] if c else 0) for c in chains)
    return -key[0], key[1], key[2]


def test_longest_common_subfix_equals_exhaustive_search():
    rng = np.random.default_rng(0)
    vocabulary = ["pleural", "pleura", "effusion", "effusions", "small", "or", "lung", "lungs"]
    for _ in range(300):
        phrase = rng.choice(vocabulary, rng.integers(1, 4)).tolist()
        words = rng.choice(vocabulary, rng.integers(1, 8)).tolist()
        chain = longest_common_subfix(phrase, words)
        assert all(0 < b - a <= 3 for a, b in zip(chain, chain[1:], strict=False))
        found = (len(chain), chain[-1] - chain[0] if chain else 0, chain[0] if chain else 0)
        expected = plain_longest(phrase, words)
        assert found[0] == expected[0], (phrase, words, chain)
        if found[0] == len(phrase):
            assert found == expected, (phrase, words, chain)


def test_a_bad_lexicon_names_row_and_field(tmp_path):
    path = tmp_path / "lexicon.tsv.gz"
    for text, message in (
        ("finding\tvariants\n", "row 1, field type: missing column"),
        ("finding\ttype\tvariants\na\tb\n", "row 2: 2 fields, the header has 3"),
        ("finding\ttype\tvariants\na\tb\tc\na\tb\tc\n", "row 3, field finding: 'a' is there twice"),
        ("finding\ttype\tvariants\na\tb\tc\n?\tb\tc\n", "row 3, field finding: '\\?' has no word"),
        ("finding\ttype\tvariants\na\tb\tc; --; d\n", "row 2, field variants: '--' has no word"),
    ):
        path.write_bytes(gzip.compress(text.encode()))
        with pytest.raises(DataError, match=f"lexicon.tsv.gz, {message}"):
            read_lexicon(path)
