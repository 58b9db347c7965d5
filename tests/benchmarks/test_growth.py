"""The growth benchmark's fit and processes, and the terms that matching is measured with."""

import json
import subprocess
import sys
from pathlib import Path

import bench_growth
import bench_matching
import pytest
import reference_matching

from drehr_utils.knowledge.matching import EntityMatcher

TERMS = [
    "heart failure", "acute heart failure", "acute kidney injury", "chronic kidney disease", "failure", "kidney",
    "injury of kidney", "type 2 diabetes", "2,4-dinitrophenol", "chronic heart disease (disorder)", "st elevation",
]  # fmt: skip


def run(code: str) -> str:
    """What a process of its own prints."""
    code = f"import sys; sys.path.insert(0, {str(Path(bench_growth.__file__).parent)!r})\n{code}"
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def test_a_power_law_gives_its_exponent():
    sizes = [50, 200, 1000]
    assert bench_growth.exponent(sizes, [3 * size**1.5 for size in sizes]) == pytest.approx(1.5, abs=1e-3)
    assert bench_growth.exponent(sizes, [7.0] * 3) == pytest.approx(0, abs=1e-3)
    # By hand: through (1, 1), (2, 4), (4, 4) in logarithms to base 2, (0, 0), (1, 2), (2, 2): slope 2 / 2.
    assert bench_growth.exponent([1, 2, 4], [1, 4, 4]) == pytest.approx(1, abs=1e-3)


def test_terms_are_distinct_in_number_as_asked_and_of_the_same_words():
    some = bench_matching.terms_up_to(TERMS, 5)
    assert len(set(some)) == 5 and set(some) <= set(TERMS)
    many = bench_matching.terms_up_to(TERMS, 100)
    assert len(many) == len(set(many)) == 100 and many[: len(TERMS)] == TERMS
    for k in range(4):
        at = {words[k] for term in TERMS if len(words := term.split()) > k}
        assert {words[k] for term in many if len(words := term.split()) > k} <= at
    assert many == bench_matching.terms_up_to(TERMS, 100) != bench_matching.terms_up_to(TERMS, 100, seed=1)
    with pytest.raises(ValueError, match="no more than"):
        bench_matching.terms_up_to(["heart failure", "kidney"], 100)
    assert [bench_matching.label(n) for n in (5_000_000, 250_000)] == ["5m", "250k"]


def test_matcher_and_trie_agree_on_made_terms():
    terms = bench_matching.terms_up_to(TERMS, 120)
    words = [word for term in terms for word in term.split()]
    texts = [" ".join(words[start : start + 40]) for start in range(0, len(words), 40)]
    trie, taken = bench_matching.trie_within(terms, 1e9)
    assert taken == 120
    expected = [reference_matching.find(trie, text) for text in texts]
    assert sum(map(len, expected)) > 50
    assert [list(map(tuple, found)) for found in EntityMatcher(terms).find_all(texts)] == expected


def test_a_trie_beyond_the_limit_says_how_many_terms_fit():
    said = run("""
import bench_matching
terms = [f"{i:07d} and some more" for i in range(300_000)]
trie, taken = bench_matching.trie_within(terms, 100e6)
print(trie is None, taken, bench_matching.trie_within(terms[: taken // 2], 100e6)[1] == taken // 2)
""").split()
    assert said[0] == said[2] == "True" and 10_000 < int(said[1]) < 300_000


def test_memory_is_the_work_s_own_peak():
    said = run("""
import json, bench_growth
before = [bytes(1000) for _ in range(200_000)]  # what was let go before the work hides nothing of it
held = before[::1000]
del before
def work():
    own = [bytes(1000) for _ in range(20_000)]
    return own[:100]
print(json.dumps(bench_growth.measured(work)))
""")
    said = json.loads(said)
    assert said["mb"] == pytest.approx(20 * 1.05, abs=4)  # 33 bytes more an object, and the list
    assert said["number"] == 100


def test_rows_become_keys_and_exponents():
    rows = {10: {"clean": {"cpu_s": 1.0, "mb": 5.0}}, 20: {"clean": {"cpu_s": 2.0, "mb": 20.0}}}
    found = bench_growth.keys("growth_notes", rows, {10: "x1", 20: "x2"})
    assert found == {
        "growth_notes_x1_clean_cpu_s": 1.0, "growth_notes_x1_clean_mb": 5.0,
        "growth_notes_x2_clean_cpu_s": 2.0, "growth_notes_x2_clean_mb": 20.0,
        "growth_notes_clean_cpu_exponent": 1.0, "growth_notes_clean_mb_exponent": 2.0,
    }  # fmt: skip
