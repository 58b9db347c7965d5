"""Metrics by hand, by pytrec_eval and by sentence-transformers."""

from math import log2

import numpy as np
import pandas as pd
import pytest
import pytrec_eval
import scipy.stats

from drehr_utils.data.benchmark import Benchmark, Patient, load_benchmark, single_patient_tasks, subset
from drehr_utils.evaluation.metrics import hubness, means, multi_patient, single_patient
from drehr_utils.profiles import ROOT
from drehr_utils.search.bm25 import BM25
from drehr_utils.search.dense import dense_scores
from drehr_utils.search.fusion import rank, reciprocal_rank_fusion, tie_keys

OPEN_CLINIQ = ROOT / "data/open_cliniq"


@pytest.fixture(scope="module")
def dev():
    return load_benchmark(OPEN_CLINIQ, "dev")


@pytest.fixture
def toy():
    chunks = ["A_0", "A_1", "A_2", "B_0", "B_1"]
    return Benchmark(
        corpus=dict.fromkeys(chunks, ""),
        queries={"q1": "", "q2": ""},
        query_types={"q1": "disease", "q2": "drug"},
        patients=[Patient("1", "A", chunks[:3], ["q1"]), Patient("2", "B", chunks[3:], ["q1", "q2"])],
        qrels={"q1": {"A_0": 1, "A_2": 1, "B_1": 1}, "q2": {"B_0": 1}},
        match_types={"q1": {"A_0": "string", "A_2": "synonym", "B_1": "string"}, "q2": {"B_0": "string"}},
    )


TOY_SCORES = np.array([[0.1, 0.9, 0.5, 0.3, 0.2], [0.5, 0.4, 0.3, 0.2, 0.1]])


def by_metric(values, search_id):
    return values[values["search_id"] == search_id].set_index("metric")["value"].to_dict()


def test_single_patient_by_hand(toy):
    values = single_patient(toy, TOY_SCORES)
    assert list(values["search_id"].unique()) == ["q1@A", "q1@B", "q2@B"]
    # q1 in A: A_1, A_2*, A_0*
    found = by_metric(values, "q1@A")
    ndcg = (1 / log2(3) + 1 / log2(4)) / (1 + 1 / log2(3))
    expected = {"MRR": 50, "NDCG": 100 * ndcg, "MAP": 100 * (1 / 2 + 2 / 3) / 2}
    assert found == pytest.approx({**expected, "Average": sum(expected.values()) / 3})
    # q1 in B: B_0, B_1*;  q2 in B: B_0*, B_1
    assert by_metric(values, "q1@B")["MAP"] == 50 and by_metric(values, "q2@B")["MAP"] == 100
    assert values.drop_duplicates("search_id")["patient"].tolist() == ["A", "B", "B"]
    # The mean is over searches, so q1 counts twice.
    assert means(values)["MRR"] == pytest.approx((50 + 50 + 100) / 3)


def test_match_type_by_hand(toy):
    scores = TOY_SCORES.copy()
    scores[0, 0] = 0.7  # q1 in A: A_1, A_0 (string), A_2 (synonym)
    assert by_metric(single_patient(toy, scores), "q1@A")["MAP"] == pytest.approx(100 * (1 / 2 + 2 / 3) / 2)
    assert by_metric(single_patient(toy, scores, "string"), "q1@A")["MAP"] == 50
    synonym = single_patient(toy, scores, "synonym")  # A_0 is gone: A_2 comes second, not third
    assert list(synonym["search_id"].unique()) == ["q1@A"] and by_metric(synonym, "q1@A")["MAP"] == 50


def test_multi_patient_by_hand(toy):
    values = multi_patient(toy, TOY_SCORES)
    # q1: A_1, A_2*, B_0, B_1*, A_0*;  q2: A_0, A_1, A_2, B_0*, B_1
    ndcg = (1 / log2(3) + 1 / log2(5) + 1 / log2(6)) / (1 + 1 / log2(3) + 1 / log2(4))
    expected = {"MRR": 50, "NDCG@10": 100 * ndcg, "R@100": 100}
    assert by_metric(values, "q1") == pytest.approx({**expected, "Average": sum(expected.values()) / 3})
    assert by_metric(values, "q2")["MRR"] == 25
    assert (values["patient"] == values["query_id"]).all()  # a query is of no one patient


def test_equals_pytrec_eval_on_random_scores_with_ties(dev):
    rng = np.random.default_rng(0)
    scores = rng.integers(0, 6, (len(dev.queries), len(dev.corpus))).astype(float)
    ties = tie_keys(dev.queries, dev.corpus)
    untied = np.empty_like(scores)
    for row in range(len(scores)):  # the same order with no two scores alike
        untied[row, rank(scores[row], ties[row])] = np.arange(len(dev.corpus), 0, -1)
    row, column = ({key: i for i, key in enumerate(keys)} for keys in (dev.queries, dev.corpus))

    tasks = single_patient_tasks(dev)
    run = {t.search_id: {c: untied[row[t.query_id], column[c]] for c in t.chunk_ids} for t in tasks}
    trec = pytrec_eval.RelevanceEvaluator({t.search_id: t.relevant for t in tasks}, {"recip_rank", "ndcg", "map"})
    expected = pd.DataFrame(trec.evaluate(run)).T * 100
    wide = single_patient(dev, scores).pivot(index="search_id", columns="metric", values="value")
    np.testing.assert_allclose(wide[["MRR", "NDCG", "MAP"]], expected.loc[wide.index, ["recip_rank", "ndcg", "map"]])

    run = {q: {c: untied[row[q], column[c]] for c in dev.corpus} for q in dev.qrels}
    names = ["recip_rank", "ndcg_cut_10", "recall_100"]
    expected = pd.DataFrame(pytrec_eval.RelevanceEvaluator(dev.qrels, set(names)).evaluate(run)).T * 100
    wide = multi_patient(dev, scores).pivot(index="search_id", columns="metric", values="value")
    np.testing.assert_allclose(wide[["MRR", "NDCG@10", "R@100"]], expected.loc[wide.index, names])


def test_equals_sentence_transformers_evaluator(dev):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    part = subset(dev, dev.patients[:4])
    found = sorted({word for text in [*part.corpus.values(), *part.queries.values()] for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(found)}, unk_token=found[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    weights = np.random.default_rng(0).normal(size=(len(found), 64)).astype(np.float32)
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")
    asked = {query_id: part.queries[query_id] for query_id in part.qrels}
    size = len(part.corpus)
    relevant = {query_id: set(judged) for query_id, judged in part.qrels.items()}
    evaluator = InformationRetrievalEvaluator(
        asked, part.corpus, relevant, mrr_at_k=[size], ndcg_at_k=[10], precision_recall_at_k=[100], map_at_k=[10]
    )
    theirs = {name.split("_", 1)[1]: value for name, value in evaluator(model).items()}
    ours = means(
        multi_patient(
            part, dense_scores(model.encode(list(part.queries.values())), model.encode(list(part.corpus.values())))
        )
    )
    expected = [theirs[f"mrr@{size}"], theirs["ndcg@10"], theirs["recall@100"]]
    np.testing.assert_allclose(ours[["MRR", "NDCG@10", "R@100"]] / 100, expected, atol=1e-6)


def constant_benchmark(n_notes, n_chunks, relevant):
    notes = {f"N{i}": [f"N{i}_{k}" for k in range(n_chunks)] for i in range(n_notes)}
    chosen = {f"q{i}": f"N{i}_{relevant}" for i in range(n_notes)}
    return Benchmark(
        corpus={c: "" for chunks in notes.values() for c in chunks},
        queries=dict.fromkeys(chosen, ""),
        query_types=dict.fromkeys(chosen, "drug"),
        patients=[Patient(note, note, chunks, [f"q{i}"]) for i, (note, chunks) in enumerate(notes.items())],
        qrels={q: {c: 1} for q, c in chosen.items()},
        match_types={q: {c: "string"} for q, c in chosen.items()},
    )


@pytest.mark.parametrize("relevant", [0, 9])
def test_a_system_of_ties_gets_chance(relevant):
    benchmark = constant_benchmark(400, 10, relevant)
    scores = np.full((400, 4000), 0.5)
    chance = 100 * sum(1 / k for k in range(1, 11)) / 10  # a uniformly random place among ten
    values = single_patient(benchmark, scores).query("metric == 'MRR'")["value"]
    assert values.mean() == pytest.approx(chance, abs=4 * values.std() / 20)
    assert means(multi_patient(benchmark, scores))["R@100"] == pytest.approx(2.5, abs=3)


def test_file_order_does_not_matter(dev):
    scores = BM25(dev.corpus.values()).scores(dev.queries.values())
    columns = np.random.default_rng(0).permutation(len(dev.corpus))
    names = np.array(list(dev.corpus))
    shuffled = Benchmark(**{**vars(dev), "corpus": {names[i]: "" for i in columns}})
    pd.testing.assert_frame_equal(multi_patient(shuffled, scores[:, columns]), multi_patient(dev, scores))
    pd.testing.assert_frame_equal(single_patient(shuffled, scores[:, columns]), single_patient(dev, scores))


def test_bm25_on_dev(dev):
    scores = BM25(dev.corpus.values()).scores(dev.queries.values())
    single, multi = single_patient(dev, scores), multi_patient(dev, scores)
    assert (single["search_id"].nunique(), multi["search_id"].nunique()) == (804, 445)
    # The design's first try; its ties were broken in another order, which moves Single-Patient figures by one.
    assert means(single)[["MRR", "NDCG", "MAP"]].tolist() == pytest.approx([80.8, 80.6, 68.5], abs=1.5)
    assert means(multi)[["MRR", "NDCG@10", "R@100"]].tolist() == pytest.approx([64.4, 47.9, 61.8], abs=0.5)
    assert means(single_patient(dev, scores, "string"))["MAP"] == 100


def test_a_tuple_of_scores_is_fused_within_the_note(toy):
    other = np.array([[0.9, 0.1, 0.8, 0.95, 0.94], [0, 0, 0, 0, 1]])
    note = [0, 1, 2]
    ties = tie_keys(toy.queries, toy.corpus)
    fused = np.full_like(other, -1)
    fused[0, note] = reciprocal_rank_fusion([TOY_SCORES[0, note], other[0, note]], ties[0, note])
    pair = by_metric(single_patient(toy, (TOY_SCORES, other)), "q1@A")
    assert pair == by_metric(single_patient(toy, fused), "q1@A")
    whole = reciprocal_rank_fusion([TOY_SCORES, other], ties)
    pd.testing.assert_frame_equal(multi_patient(toy, (TOY_SCORES, other)), multi_patient(toy, whole))


def test_wrong_scores_are_refused(toy):
    with pytest.raises(ValueError, match="2 queries and 5 chunks"):
        single_patient(toy, TOY_SCORES.T)
    with pytest.raises(ValueError, match="NaN"):
        multi_patient(toy, TOY_SCORES * np.nan)


def test_hubness():
    even = hubness(np.eye(8), k=1)
    assert (even.top1_share, even.distinct_top1, even.skewness) == (1 / 8, 8, 0)
    scores = np.eye(8)
    scores[:6, 3] = 5  # one chunk comes first for six of eight queries
    hub = hubness(scores, k=1)
    assert (hub.top1_share, hub.distinct_top1) == (6 / 8, 3)
    assert hub.skewness == pytest.approx(scipy.stats.skew([0, 0, 0, 6, 0, 0, 1, 1]))


def test_a_match_type_without_a_search_has_no_row(toy):
    assert single_patient(toy, TOY_SCORES, "hyponym").empty
