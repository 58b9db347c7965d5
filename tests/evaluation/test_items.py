"""The two ledgers: each item has its place or its reason, each claim its verdict, and what shows them is up to date."""

import ast
import re
from functools import cache

import matplotlib.pyplot as plt
import pandas as pd
import pytest
from links import is_dead

from drehr_utils.evaluation import claims, plots, tables
from drehr_utils.profiles import ROOT, load_profile

ITEMS, FOUND = claims.items(), claims.gathered(load_profile("open"))
PLACES = ITEMS["where"].str.split("; ").map(lambda places: [place for place in places if place])


@cache
def resolves(place: str) -> bool:
    """`<module file>:<name>`, `<notebook>#<heading>` or a file of the tree. Modules are read, not imported: seconds."""
    path, _, name = place.partition(".py:")
    if not name:
        return not is_dead(place, ROOT)
    file = ROOT / f"{path}.py"
    body = ast.parse(file.read_text()).body if file.exists() else []
    for part in name.split("."):
        node = next((node for node in body if part in names(node)), None)
        body = getattr(node, "body", [])
    return node is not None


def names(node: ast.stmt) -> set[str]:
    """What a statement defines: a function, a class, or what it assigns to."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return {getattr(node, "name", "")}


def test_a_wrong_place_is_found():
    assert resolves("drehr_utils/search/bm25.py:BM25.scores") and resolves("notebooks/08_main_results.ipynb#Table-4")
    assert not resolves("drehr_utils/search/bm25.py:BM26") and not resolves("drehr_utils/search/bm.py:BM25")
    assert not resolves("notebooks/08_main_results.ipynb#Table-5") and not resolves("figures/fig_99.png")


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_each_item_has_its_place_or_its_reason(paper):
    of_paper = ITEMS[ITEMS["paper"] == paper]
    assert set(of_paper["status"]) <= set(claims.STATUS) and (of_paper["kind"] != "").all()
    silent = (of_paper["status"] != "yes") == (of_paper["missing"] == "")  # a reason where, and only where, one is due
    assert not list(of_paper.index[silent])
    placeless = (of_paper["status"] != "no") & (of_paper["where"] == "")
    assert not list(of_paper.index[placeless])
    dead = {place for places in PLACES[of_paper.index] for place in places if not resolves(place)}
    assert not dead
    here = PLACES[of_paper.index[of_paper["status"] == "yes"]]  # all that is here is in the package and in a notebook
    assert not [item for item, places in here.items() if not ({".py:", ".ipynb#"} <= _kinds(places))]


def _kinds(places: list[str]) -> set[str]:
    return {mark for place in places for mark in (".py:", ".ipynb#") if mark in place}


def test_the_ledgers_ids_say_paper_and_kind():
    assert ITEMS.index.is_unique and set(ITEMS["paper"]) == set(claims.PAPERS) == set(FOUND["paper"])
    assert all(item == f"{row.paper}-{row.kind}-{item[-2:]}" for item, row in ITEMS.iterrows())


def test_each_claim_has_a_verdict_and_what_it_needs():
    assert FOUND.index.is_unique and len(FOUND) == len(claims.ledger())
    assert not list(FOUND.index[~FOUND["verdict"].isin(claims.VERDICTS)])
    untestable = FOUND[FOUND["verdict"] == claims.NOT_TESTABLE]
    assert not list(untestable.index[~untestable["ours"].str.contains(r"\bneeds \w")])
    assert not [place for place in FOUND["where"].unique() if not resolves(place)]


@pytest.mark.parametrize(
    ("name", "rows", "of", "order"),
    [("what_held", FOUND, "verdict", claims.VERDICTS), ("paper_items", ITEMS, "status", claims.STATUS)],
)
def test_notebook_16s_counts_are_the_ledgers(name, rows, of, order):
    saved = tables.read_table(name).pivot(index="system", columns="group", values="ours")
    by_hand = pd.Series([(claims.PAPERS[p], v) for p, v in rows[["paper", of]].to_numpy()]).value_counts()
    for paper in claims.PAPERS.values():
        for kind in order:
            assert saved.loc[paper, kind] == by_hand.get((paper, kind), 0), "run ./run_all.sh --only 16"
    assert saved.loc["all"].sum() == len(rows)


def test_a_profile_without_a_table_has_no_verdict_of_it(tmp_path, monkeypatch):
    monkeypatch.setattr(type(load_profile("smoke")), "cache", property(lambda _: tmp_path))
    smoke = load_profile("smoke")
    smoke.tables.mkdir(parents=True)
    claims.table(smoke, "12", {"kg-01": claims.needs("time"), "kg-10": claims.Judged(claims.HOLDS, "+1.0")})
    found = claims.gathered(smoke)
    assert found["verdict"].value_counts().to_dict() == {"": len(FOUND) - 2, claims.NOT_TESTABLE: 1, claims.HOLDS: 1}
    assert found.loc["kg-10", "ours"] == "+1.0" and list(found["where"]) == list(FOUND["where"])
    assert claims.counts(found, "verdict", claims.VERDICTS).loc["all"].tolist() == [1, 0, 0, 1]


def test_the_sheet_has_one_mark_a_claim():
    ax = plots.verdicts_plot(FOUND).axes[0]
    marks = [(tuple(line.get_xydata()[0]), line.get_marker()) for line in ax.lines if len(line.get_xdata()) == 1]
    marks = [mark for mark in marks if mark[1] in "osD"]
    assert len(marks) == len({at for at, _ in marks}) == len(FOUND)
    said = [text.get_text() for text in ax.texts]
    assert sorted(s for s in said if s.isdigit()) == sorted(FOUND.index.str[-2:])
    assert {f"{v}: {(FOUND['verdict'] == v).sum()}" for v in claims.VERDICTS} | set(claims.PAPERS.values()) <= set(said)
    plt.close(ax.figure)


def test_links_are_of_places():
    link = claims.link("notebooks/05_training.ipynb#The-loss-of-the-authors'-code")
    href, said = re.fullmatch(r'<a href="(.*)">(.*)</a>', link).groups()
    assert href == "../notebooks/05_training.ipynb#The-loss-of-the-authors%27-code" and said.startswith("05 The loss")
    assert not is_dead(href, ROOT / "notebooks")
    assert claims.link("drehr_utils/search/bm25.py:BM25") == '<a href="../drehr_utils/search/bm25.py">bm25.BM25</a>'
    zero = "notebooks/14_radiology_lexicon_sbert.ipynb#2-Hard-sampling-and-mega-batches-(§2.3,-§3.2):-Table-1"
    assert ">14 Hard sampling and mega-batches (§2.3" in claims.link(zero)  # its hyphens, not its number
    assert claims.link("data/papers.csv").endswith(">papers.csv</a>")
