"""data/open_cliniq/test read by BEIR's own reader, scored by BEIR and by sentence-transformers' evaluator."""

import numpy as np
import pytest
from beir.datasets.data_loader import GenericDataLoader

from drehr_utils.data.benchmark import load_benchmark
from drehr_utils.evaluation.metrics import means, multi_patient
from drehr_utils.profiles import ROOT
from drehr_utils.search.dense import dense_scores
from drehr_utils.search.fusion import rank, tie_keys

FOLDER = ROOT / "data/open_cliniq"


@pytest.fixture(scope="module")
def test_split():
    return load_benchmark(FOLDER, "test")


@pytest.fixture(scope="module")
def beir():
    return GenericDataLoader(str(FOLDER / "test")).load(split="test")


def test_beirs_reader_gives_what_ours_does(beir, test_split):
    corpus, queries, qrels = beir
    assert {key: row["text"] for key, row in corpus.items()} == test_split.corpus
    assert list(corpus) == list(test_split.corpus)
    assert qrels == test_split.qrels
    assert queries == {key: test_split.queries[key] for key in qrels}  # BEIR keeps the queries that have a judgment


def test_beirs_metrics_equal_ours_with_ties(beir, test_split):
    from beir.retrieval.evaluation import EvaluateRetrieval

    _, _, qrels = beir
    scores = np.random.default_rng(0).integers(0, 9, (len(test_split.queries), len(test_split.corpus))).astype(float)
    order = rank(scores, tie_keys(test_split.queries, test_split.corpus))
    chunks = list(test_split.corpus)
    run = {
        query_id: {chunks[column]: float(-place) for place, column in enumerate(order[row])}
        for row, query_id in enumerate(test_split.queries)
        if query_id in qrels
    }
    ndcg, _, recall, _ = EvaluateRetrieval.evaluate(qrels, run, [10, 100])
    mrr = EvaluateRetrieval.evaluate_custom(qrels, run, [len(chunks)], "mrr")
    ours = means(multi_patient(test_split, scores)) / 100
    theirs = [mrr[f"MRR@{len(chunks)}"], ndcg["NDCG@10"], recall["Recall@100"]]
    np.testing.assert_allclose(ours[["MRR", "NDCG@10", "R@100"]], theirs, atol=6e-6)  # BEIR rounds to 5 places


def test_sentence_transformers_evaluator_on_beirs_dictionaries(beir, test_split):
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer, models, pre_tokenizers

    corpus, queries, qrels = beir
    texts = {key: row["text"] for key, row in corpus.items()}
    found = sorted({word for text in [*texts.values(), *queries.values()] for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(found)}, unk_token=found[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    weights = np.random.default_rng(1).normal(size=(len(found), 64)).astype(np.float32)
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")
    relevant = {query_id: set(judged) for query_id, judged in qrels.items()}
    evaluator = InformationRetrievalEvaluator(
        queries, texts, relevant, mrr_at_k=[len(texts)], ndcg_at_k=[10], precision_recall_at_k=[100], map_at_k=[10]
    )
    theirs = {name.split("_", 1)[1]: value for name, value in evaluator(model).items()}
    embeddings = [model.encode(list(part.values())) for part in (test_split.queries, test_split.corpus)]
    ours = means(multi_patient(test_split, dense_scores(*embeddings)))
    expected = [theirs[f"mrr@{len(texts)}"], theirs["ndcg@10"], theirs["recall@100"]]
    # Float rounding may order near-equal scores differently in a few of the 793 queries.
    np.testing.assert_allclose(ours[["MRR", "NDCG@10", "R@100"]] / 100, expected, atol=1e-4)
