"""bench_index_scale's parts at small sizes: exact search against faiss, ratios by hand, tables against exact search."""

import importlib.util
import json

import faiss
import numpy as np
import pytest

pytest.importorskip("lancedb")
bench = pytest.importorskip("bench_index_scale")
SIZE = 3000


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """Real vectors made up, all else by the stages; blocks of 500."""
    folder, rng = tmp_path_factory.mktemp("work"), np.random.default_rng(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "REAL", 500)
        patch.setattr(bench, "BLOCK", 500)
        patch.setattr(bench, "PATIENCE", 2.0)
        centres = rng.normal(size=(20, bench.DIM))
        real = bench.unit(centres[rng.integers(20, size=500)] + 0.4 * rng.normal(size=(500, bench.DIM)))
        np.save(folder / "real.npy", real.astype(np.float32))
        np.save(folder / "queries.npy", bench.unit(rng.normal(size=(20, bench.DIM)) + real[:20]).astype(np.float32))
        (folder / "noise.json").write_text(json.dumps(bench.noise(folder)))
        bench.vectors(folder, 1000)
        bench.vectors(folder, SIZE)
        bench.truth(folder, SIZE)
        yield folder


def test_nearest_is_faiss_s(work):
    data, queries = bench.rows_from(work, 0, SIZE), np.load(work / "queries.npy")
    index = faiss.IndexFlatIP(bench.DIM)
    index.add(data)
    scores, rows = index.search(queries, bench.TOP)
    found, at = bench.nearest(queries, bench.blocks(work, SIZE), bench.TOP)
    np.testing.assert_allclose(found, scores, atol=1e-5)
    assert (at == rows).mean() > 0.99  # but for ties
    assert (np.load(work / f"truth-{SIZE}.npy") == at).all()


def test_ratio_of_distances_by_hand():
    angles = np.array([0.0, 0.3, 0.9])  # on a circle: chords 2 sin(angle / 2)
    expected = np.sin(0.15) / np.sin(0.45)
    assert bench.ratios(np.cos(angles)[None])[0] == pytest.approx(expected)


def test_a_larger_size_has_the_smaller_s_vectors_and_the_real_ones_first(work):
    data = bench.rows_from(work, 0, SIZE)
    np.testing.assert_array_equal(data[:500], np.load(work / "real.npy"))
    assert np.linalg.norm(data, axis=1) == pytest.approx(1, abs=1e-5)
    assert len(np.unique(data, axis=0)) == SIZE
    found = json.loads((work / "noise.json").read_text())
    assert abs(found["ratio_real_50"] - found["ratio_drawn_50"]) < 0.03


@pytest.fixture
def coded(monkeypatch):
    from drehr_utils.search import index

    for name, value in (("EXACT_UP_TO", 1000), ("PARTITION", 256), ("PROBES", 11)):
        monkeypatch.setattr(index, name, value)
    monkeypatch.setattr(index.NoteIndex, "depth", 200)


def test_the_table_finds_what_is_near(work, coded):
    built = bench.lance(work, SIZE)
    assert built["disk_mb"] >= SIZE * bench.DIM * 4 / 1e6
    found = bench.lance_query(work, SIZE)
    assert found["recall"] > 0.97 and found["patients_same"] == bench.PATIENTS
    names = [index.name for index in bench.open_index(work / f"lance-{SIZE}").table.list_indices()]
    assert f"vectors-{SIZE}" in names


@pytest.mark.slow
def test_codes_are_fitted_anew_when_there_are_four_times_the_rows(work, coded, tmp_path):
    opened, names = bench.open_index(tmp_path / "table"), []
    for start, stop in ((0, 500), (500, 1500), (1500, 2500), (2500, SIZE)):
        opened.table.add(bench.rows_of_block(str(work), start, stop))
        opened.index_vectors()
        names.append([index.name for index in opened.table.list_indices()])
    assert names == [[], ["vectors-1500"], ["vectors-1500"], ["vectors-1500"]]
    opened.table.add(bench.rows_of_block(str(work), 0, SIZE))
    opened.index_vectors()
    assert [index.name for index in opened.table.list_indices()] == [f"vectors-{2 * SIZE}"]


@pytest.mark.slow
def test_faiss_beside_it(work, coded):
    assert bench.flat(work, SIZE)["recall"] > 0.999
    assert bench.ivfpq(work, SIZE)["recall"] > 0.9
    assert bench.hnsw(work, SIZE)["recall"] > 0.9  # twenty islands, which a graph barely joins


@pytest.mark.slow
@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("ray", "lance"))), reason="needs the extra `scale`")
def test_on_ray_with_a_worker_killed_the_table_is_whole(work, coded):
    assert bench.ray(work, SIZE)["killed"] == 1
    table = bench.open_index(work / f"ray-{SIZE}").table.search().select(["id", "vector"]).to_arrow()
    ids = table["id"].to_numpy(zero_copy_only=False).astype(int)
    assert sorted(ids) == list(range(SIZE))
    held = table["vector"].combine_chunks().flatten().to_numpy().reshape(-1, bench.DIM)
    np.testing.assert_array_equal(held, bench.rows_from(work, 0, SIZE)[ids])


def test_what_is_gathered_has_the_issue_s_keys(tmp_path):
    for stage, size in bench.plan([100, 10]):
        found = {"load": 1.0, "recall": 0.995, "p95_ms_1": size}
        bench.kept(tmp_path, stage, size).write_text(json.dumps(found))
    result = bench.gathered(tmp_path, [100, 10])
    assert (result["index_vectors"], result["index_recall"], result["index_p95_ms"]) == (100, 0.995, 100)
    assert result["index_ray_10_recall"] == 0.995 and not [key for key in result if "query_" in key]
