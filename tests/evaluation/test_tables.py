"""Tables: the papers' figures against each other, layouts, round trips and bytes; and the figures' bytes."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from drehr_utils.config import Resampling
from drehr_utils.errors import DataError
from drehr_utils.evaluation import medquad, plots
from drehr_utils.evaluation.intervals import RESULT_COLUMNS, result_rows
from drehr_utils.evaluation.tables import (
    Layout,
    gains_table,
    marked,
    paper_figures,
    read_table,
    save_table,
    show_table,
    with_paper,
)
from drehr_utils.profiles import ROOT

SINGLE, MULTI = ["MRR", "NDCG", "MAP"], ["MRR", "NDCG@10", "R@100"]


def series(paper, table):
    return paper_figures(paper, table).set_index(["system", "setting", "group", "metric"])["value"].sort_index()


def test_drehr_table_1_and_cliniq_table_1_sum_up():
    table = paper_figures("drehr", 1).pivot(index="group", columns="metric", values="value")
    parts = table.drop(index="all")[["average", "sum (M)"]].sum()
    np.testing.assert_allclose(parts, table.loc["all", ["average", "sum (M)"]], rtol=0.002)
    chunks_m = 5.8  # §4.1: over 5.8M chunks
    np.testing.assert_allclose(table["average"] * chunks_m, table["sum (M)"], rtol=0.03)
    counts = paper_figures("cliniq", 1).pivot(index="group", columns="setting", values="value")
    types = ["string", "synonym", "abbreviation", "hyponym", "implication"]
    assert counts["multi"][types].sum() == counts.loc["relevance judgment", "multi"]
    assert counts["multi"][["disease", "procedure", "drug"]].sum() == counts.loc["query", "multi"]
    np.testing.assert_allclose(counts["single"][types].sum(), counts.loc["relevance judgment", "single"], atol=0.2)
    np.testing.assert_allclose(counts["single"][types], counts["multi"][types] / 1000, atol=0.051)


def test_drehr_table_4_repeats_cliniq_table_3():
    ours, theirs = series("drehr", 4), series("cliniq", 3)
    shared = ours.index.intersection(theirs.index)
    assert len(shared.get_level_values("system").unique()) == 5 and len(shared) >= 5 * 6
    pd.testing.assert_series_equal(ours[shared], theirs[shared])


def test_a_run_without_data_keeps_the_committed_rows_and_says_of_when(tmp_path, capsys):
    def rows(group, value, paper=np.nan):
        return pd.DataFrame([("A", "", group, "R@1", paper, value, np.nan, np.nan, np.nan)], columns=RESULT_COLUMNS)

    layout, lacking = Layout(columns=("group",)), "group == 'MedQuAD'"
    theirs = rows("MedQuAD", np.nan, 8.0).assign(system="B")  # a system of the paper's alone
    save_table(pd.concat([rows("notes", 1.0), rows("MedQuAD", 2.0, 7.0), theirs]), "t", layout, tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *step], check=True, env=os.environ | {"GIT_COMMITTER_DATE": "2026-01-02T00:00"})
    long = pd.concat([rows("notes", 3.0), rows("MedQuAD", np.nan, 7.0)])
    for _ in range(2):  # a second such run keeps the date, too
        cells = save_table(long, "t", layout, tmp_path, lacking)
        assert cells.loc["A"].tolist() == ["– / 3.00", "7.00 / 2.00†"]
        assert "t: 1 values with a † are of 2026-01-02" in capsys.readouterr().out
        assert read_table("t", tmp_path)["as_of"].tolist()[1] == "2026-01-02"
        assert cells.loc["B", "MedQuAD"] == "8.00 / –"
    assert "2.00$^{\\dagger}$" in (tmp_path / "t.tex").read_text()
    assert save_table(long, "new", layout, tmp_path, lacking).loc["A", "MedQuAD"] == "7.00 / –"
    save_table(pd.concat([rows("notes", 1.0), rows("MedQuAD", 4.0)]), "t", layout, tmp_path)
    assert "as_of" not in read_table("t", tmp_path)


@pytest.mark.parametrize("drehr_table, cliniq_table", [(5, 4), (6, 5)])
def test_drehr_tables_5_and_6_average_cliniq_tables_4_and_5(drehr_table, cliniq_table):
    keys = ["system", "setting", "group"]
    averages = paper_figures("cliniq", cliniq_table).groupby(keys)["value"].agg(["mean", "size"])
    printed = paper_figures("drehr", drehr_table).set_index(keys)["value"]
    shared = printed.index.intersection(averages.index)
    assert len(shared) == {5: 2 * 5, 6: 3 * 6}[drehr_table] and (averages["size"] == 3).all()
    np.testing.assert_allclose(printed[shared], averages.loc[shared, "mean"], atol=0.0051)


def test_each_table_is_complete():
    sizes = {
        ("drehr", 5): 9 * 5,
        ("drehr", 6): 8 * 6,
        ("cliniq", 4): 25 * 3,
        ("cliniq", 5): 15 * 6,
        ("capr", 3): 28 * 8,
    }
    for (paper, table), size in sizes.items():
        figures = paper_figures(paper, table)
        assert len(figures) == size and not figures.duplicated(["system", "setting", "group", "metric"]).any()
        assert figures["value"].between(0, 100).all()
    for paper, table, systems in (("drehr", 4, 8), ("cliniq", 3, 12)):
        scores = paper_figures(paper, table).query("setting != ''")
        assert len(scores) == systems * 6
    with pytest.raises(DataError, match="no table 9 of 'drehr'"):
        paper_figures("drehr", 9)


def test_term_based_methods_on_medquad_are_as_printed_and_as_committed():
    """The paper's figures in data/papers.csv and ours in figures/ against the methods themselves, run here."""
    data = medquad.load_medquad()
    if data is None:
        pytest.skip("MedQuAD isn't at hand (DREHR_PUBLIC_DATA)")
    candidates = medquad.medquad_candidates(data, medquad.term_scores(data, "BM25"))
    printed = series("capr", 3).xs(("term-based", "MedQuAD"), level=("setting", "group"))
    committed = read_table("capr_table3").query("group == 'MedQuAD'").set_index(["system", "metric"])
    for method in ("BM25", "TF-IDF"):
        scores = np.take_along_axis(medquad.term_scores(data, method), candidates, axis=1)
        values = medquad.recall_values(data, candidates, scores)
        rows = result_rows(method, "", "", values, Resampling()).set_index(["system", "metric"])
        assert rows.at[(method, "R@5"), "low"] < printed[method, "R@5"] < rows.at[(method, "R@5"), "high"]
        columns = ["ours", "low", "high"]
        np.testing.assert_allclose(rows[columns], committed.loc[rows.index, columns], atol=1e-4)


def test_tables_and_figures_follow_the_projects_root(tmp_path):
    """They lay beside the package, whatever DREHR_ROOT said."""
    code = "import matplotlib; matplotlib.use('Agg'); from matplotlib.figure import Figure; import pandas as pd;"
    code += "from drehr_utils.evaluation import intervals, plots, tables; plots.save_figure(Figure(), 'toy');"
    code += (
        "tables.save_table(pd.DataFrame([['x', '', 'all', 'MAP'] + [1.0] * 5], columns=intervals.RESULT_COLUMNS), 't')"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"DREHR_ROOT": str(tmp_path)}, cwd=ROOT)
    found = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")}
    assert found == {
        "figures/toy.pdf",
        "figures/toy.png",
        *(f"figures/tables/t.{kind}" for kind in ("csv", "md", "tex")),
    }


def test_papers_csv_malformed(tmp_path):
    path = tmp_path / "papers.csv"
    path.write_text("paper,table,system,setting,group,metric,value\ndrehr,4,X,single,all,MRR,12\ndrehr,4,Y,,,MRR,n/a\n")
    with pytest.raises(DataError, match="papers.csv, row 3, field value"):
        paper_figures("drehr", 4, path)
    path.write_text("paper,table\ndrehr,4\n")
    with pytest.raises(DataError, match="papers.csv, row 1"):
        paper_figures("drehr", 4, path)


@pytest.fixture
def long():
    rows = [
        ("BM25", "single", "all", "MRR", np.nan, 80.126, 78, 82, np.nan),
        ("BM25", "multi", "all", "MRR", np.nan, 60, 57.04, 63, np.nan),
        ("A & B_1", "single", "all", "MRR", np.nan, 85.5, 83, 87, 0.0001),
        ("A & B_1", "multi", "all", "MRR", np.nan, 55, 52, 58, 0.02),
    ]
    return pd.DataFrame(rows, columns=RESULT_COLUMNS)


def test_cells_are_paper_slash_ours_with_interval_and_mark(long):
    shown = show_table(with_paper(long, paper_figures("cliniq", 3), {"A & B_1": "RRF"}, append=False))
    assert shown.loc["BM25", ("single", "MRR")] == "71.65 / 80.13 [78.0, 82.0]"
    assert shown.loc["A & B_1", ("single", "MRR")] == "89.92 / 85.50 [83.0, 87.0]*"
    assert shown.loc["A & B_1", ("multi", "MRR")] == "67.04 / 55.00 [52.0, 58.0]"
    assert show_table(long).loc["BM25", ("single", "MRR")] == "80.13 [78.0, 82.0]"  # no paper at all: no slash


def test_with_paper_appends_the_papers_other_systems(long):
    joined = with_paper(long, paper_figures("cliniq", 3))
    assert list(joined.columns) == RESULT_COLUMNS
    assert joined.loc[joined["system"] == "BM25", "paper"].tolist() == [71.65, 59.18]
    assert joined.loc[joined["system"] == "A & B_1", "paper"].isna().all()
    rest = joined.iloc[4:]
    assert rest["system"].nunique() == 11 and rest["ours"].isna().all() and set(rest["metric"]) == {"MRR"}


def test_save_and_read_back(long, tmp_path):
    table = with_paper(long.assign(budget=[3264.0, *[np.nan] * (len(long) - 1)]), paper_figures("cliniq", 3))
    layout = Layout(caption="50% of A & B", labels={"single": "Single-Patient"})
    save_table(table, "toy", layout, tmp_path)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {"toy.csv", "toy.md", "toy.tex"}
    save_table(read_table("toy", tmp_path), "toy", layout, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    pd.testing.assert_frame_equal(read_table("toy", tmp_path), table.round(4), check_dtype=False)

    markdown = first["toy.md"].decode().splitlines()
    assert markdown[0] == "50% of A & B" and markdown[2] == "| System | Single-Patient MRR | multi MRR |"
    assert markdown[5] == "| A & B_1 | – / **85.50** [83.0, 87.0]\\* | – / 55.00 [52.0, 58.0] |"
    for sign, (plain, printed) in {1: ("▲", r"$^{\uparrow}$"), -1: ("▼", r"$^{\downarrow}$")}.items():
        save_table(table.assign(difference=0.5 * sign), "toy", layout, tmp_path)
        assert f"**85.50** [83.0, 87.0] {plain} |" in (tmp_path / "toy.md").read_text()
        assert rf"\textbf{{85.50}} [83.0, 87.0]{printed} &" in (tmp_path / "toy.tex").read_text()
        assert read_table("toy", tmp_path)["difference"].eq(0.5 * sign).all()
    assert {line.count("|") for line in markdown[2:]} == {4}

    latex = first["toy.tex"].decode()
    assert r"\caption{50\% of A \& B}" in latex and r"\label{tab:toy}" in latex
    assert r"A \& B\_1 & -- / \textbf{85.50} [83.0, 87.0]$^{*}$ & -- / 55.00 [52.0, 58.0] \\" in latex
    assert all(latex.count(rule) == 1 for rule in (r"\toprule", r"\midrule", r"\bottomrule"))
    body = latex[latex.index(r"\midrule") + 9 : latex.index(r"\bottomrule")].strip().splitlines()
    assert len(body) == 13 and all(line.replace(r"\&", "").count("&") == 2 for line in body)


def test_layout_by_group_and_counts(tmp_path):
    rows = [
        (system, "single", group, "MAP", np.nan, value, np.nan, np.nan, np.nan)
        for system, values in {"X": (1234, 5), "Y": (1000, 7)}.items()
        for group, value in zip(("string", "synonym"), values, strict=True)
    ]
    long = pd.DataFrame(rows, columns=RESULT_COLUMNS)
    layout = Layout(rows=("system", "group"), columns=("metric",), decimals=0)
    assert show_table(long, layout)["MAP"].to_dict() == {
        ("X", "string"): "1,234",
        ("X", "synonym"): "5",
        ("Y", "string"): "1,000",
        ("Y", "synonym"): "7",
    }
    save_table(long, "t", layout, tmp_path)
    # Bold is the best system of a group, wherever the layout puts groups; the system is printed once.
    latex = (tmp_path / "t.tex").read_text().splitlines()
    assert latex[2:3] + latex[4:8] == [
        r"System & Group & MAP \\",
        r"X & string & \textbf{1,234} \\",
        r" & synonym & 5 \\",
        r"Y & string & 1,000 \\",
        r" & synonym & \textbf{7} \\",
    ]
    with pytest.raises(ValueError, match="two rows of the long form"):
        show_table(long, Layout())
    with pytest.raises(ValueError, match="lacks the column paper"):
        show_table(long.drop(columns="paper"))


def test_read_table_missing(tmp_path):
    with pytest.raises(DataError, match="^nothing.csv: no such table"):
        read_table("nothing", tmp_path)
    (tmp_path / "half.csv").write_text("system,setting\nX,single\n")
    with pytest.raises(DataError, match="half.csv, row 1, field group"):
        read_table("half", tmp_path)


def test_figures_have_labels_and_the_same_bytes(long, tmp_path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def draw(folder):
        with plt.rc_context():
            plots.set_style()
            history = pd.DataFrame({"step": range(9), "loss": np.arange(9.0)[::-1]})
            counts = pd.DataFrame({"string": [3, 1], "synonym": [1, 1]}, index=["disease", "drug"])
            figures = {
                "dots": plots.dot_interval_plot(with_paper(long, paper_figures("cliniq", 3)), by="setting"),
                "loss": plots.loss_curve_plot({"stage II": history}, smooth=3),
                "bars": plots.counts_bar_plot(counts, "Pairs (%)", share=True),
            }
            for name, figure in figures.items():
                plots.save_figure(figure, name, folder)
            labels = {
                name: {text for ax in figure.axes for text in (ax.get_xlabel(), ax.get_ylabel())}
                for name, figure in figures.items()
            }
            supxlabel = figures["dots"].get_supxlabel()
            tops = [patch.get_y() + patch.get_height() for patch in figures["bars"].axes[0].patches[2:]]
            for figure in figures.values():
                plt.close(figure)
        return labels, supxlabel, tops

    labels, supxlabel, tops = draw(tmp_path / "a")
    draw(tmp_path / "b")
    assert {"Step", "Loss"} == labels["loss"] and "Pairs (%)" in labels["bars"]
    assert supxlabel == "MRR (0-100)" and tops == [100, 100]
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert len(list((tmp_path / "a").iterdir())) == 6
    with pytest.raises(ValueError, match="several rows"):
        plots.dot_interval_plot(long)


def test_a_system_has_one_colour():
    alone, among = plots.colours(["BM25", "a", "b"]), plots.colours(["c", "DR.EHR (improved, short)", "BM25"])
    assert alone["BM25"] == among["BM25"] == plots.PALETTE[6]
    assert among["DR.EHR (improved, short)"] == plots.SYSTEMS["DR.EHR (improved)"]
    assert plots.colours(["DR.EHR (short)"])["DR.EHR (short)"] == plots.SYSTEMS["DR.EHR"]
    many = plots.colours(["BM25", "DR.EHR", *"cdefgh"])
    assert len(set(many.values())) == 8 and list(many) == ["BM25", "DR.EHR", *"cdefgh"]
    assert len(plots.colours(["BM25", *"abcdefgh"])) == 9  # more systems than colours: some repeat


def test_differences_are_printed_with_their_interval_and_direction_in_their_own_order():
    rows = pd.DataFrame(
        {
            "system": ["b", "b", "a", "a"],
            "metric": ["Z", "A", "Z", "A"],
            "ours": [1.0, 2.04, -3.0, 4.0],
            "low": [0.5, -1, -4, 3],
            "high": [1.5, 3, -2, 5],
            "p": [0.001, 0.5, 0.001, np.nan],
        }
    )
    cells = gains_table(rows, ["system"], ["metric"])
    assert list(cells.index) == ["b", "a"] and list(cells.columns) == ["Z", "A"]
    assert cells.loc["b"].tolist() == ["+1.0 [+0.5, +1.5] ▲", "+2.0 [-1.0, +3.0]"]
    assert cells.loc["a"].tolist() == ["-3.0 [-4.0, -2.0] ▼", "+4.0 [+3.0, +5.0]"]


def test_a_count_has_no_decimals():
    rows = pd.DataFrame(
        [("", "", "all", m, 5.0, 1234.0, *[np.nan] * 3) for m in ("Avg", "Sum")], columns=RESULT_COLUMNS
    )
    shown = show_table(rows, Layout(("group",), ("metric",), decimals=1, whole=("Sum",)))
    assert shown.loc["all"].tolist() == ["5.0 / 1,234.0", "5 / 1,234"]


def test_marked_words_are_bold_and_the_rest_is_text():
    assert marked("CHF <b> & chf. chfx", ["chf"]) == "<b>CHF</b> &lt;b&gt; &amp; <b>chf</b>. chfx"
    assert marked("a (b", []) == "a (b" and marked("a (bc", ["(b"]) == "a (bc"  # whole words only
    assert marked("wbc < 5, h&p (s/p)", ["lt", "h&p", "(s/p)"]) == "wbc &lt; 5, <b>h&amp;p</b> <b>(s/p)</b>"


def test_stages_plot_has_a_box_for_each_source():
    fig = plots.stages_plot("a chunk", {"I": {"one": ["x"], "two": []}, "II": {"three": ["y", "z"]}})
    shown = {text.get_text() for text in fig.axes[0].texts}
    assert {"a chunk", "I", "II", "one\nx", "two\nnone", "three\ny; z"} <= shown


def test_a_diagrams_arrow_goes_from_box_to_box():
    fig = plots.diagram({"a": (0.1, 0.5, "left\nbox"), "b": (0.9, 0.5, "right")}, [("a", "b")])
    fig.draw_without_rendering()
    left, right, arrow = fig.axes[0].texts
    assert [text.get_text() for text in (left, right)] == ["left\nbox", "right"]
    shaft, a, b = (
        patch.get_window_extent() for patch in (arrow.arrow_patch, *(t.get_bbox_patch() for t in (left, right)))
    )
    assert a.x1 <= shaft.x0 <= a.x1 + 10 and b.x0 - 10 <= shaft.x1 <= b.x0
