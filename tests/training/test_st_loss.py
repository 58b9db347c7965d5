"""The loss as sentence-transformers' trainer calls it, against `losses` on the same pairs without any padding."""

import pytest
import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.base.sampler import NoDuplicatesBatchSampler
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers

from drehr_utils.errors import DataError
from drehr_utils.training import losses
from drehr_utils.training.st_loss import MultiSimilarityLoss, positive_columns

ANCHORS = ["acute renal failure on dialysis", "hypertension and chest pain", "fever after surgery"]
POSITIVES = [["aki", "renal failure", "kidney injury"], ["htn"], ["pyrexia", "postoperative fever"]]


@pytest.fixture
def model():
    words = sorted({word for text in [*ANCHORS, *sum(POSITIVES, [])] for word in text.split()})
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    weights = torch.randn(len(words), 16, generator=torch.Generator().manual_seed(0))
    return SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights.numpy())], device="cpu")


def test_columns_pad_and_count():
    rows = positive_columns(ANCHORS, POSITIVES)
    assert list(rows) == ["anchor", "positive_1", "positive_2", "positive_3", "label"]
    assert rows["label"] == [3, 1, 2] and rows["positive_2"] == ["renal failure", "htn", "postoperative fever"]
    with pytest.raises(DataError, match="positives, row 1: none; leave this anchor out"):
        positive_columns(ANCHORS, [["aki"], [], ["pyrexia"]])


def test_padded_rows_share_a_batch_without_duplicates():
    """A filler that rows share would keep them apart: batches of one row, which have no negative."""
    rows = positive_columns(
        [f"chunk {i}" for i in range(8)], [[f"{i} {k}" for k in range(1 + i % 3)] for i in range(8)]
    )
    sampler = NoDuplicatesBatchSampler(
        Dataset.from_dict(rows), 4, True, valid_label_columns=["label"], generator=torch.Generator(), seed=0
    )
    assert sorted(map(len, sampler)) == [4, 4]


@pytest.mark.parametrize("per_anchor", [True, False])
def test_value_and_gradients_are_those_of_the_pairs_alone(model, per_anchor):
    loss = MultiSimilarityLoss(model, per_anchor, losses.Hyper(beta=10.0))
    rows = positive_columns(ANCHORS, POSITIVES)
    columns = [rows[name] for name in rows if name != "label"]
    found = loss([model.preprocess(texts) for texts in columns], torch.tensor(rows["label"]))
    (gradient,) = torch.autograd.grad(found, list(model.parameters()))

    terms = [(owner, term) for owner, own in enumerate(POSITIVES) for term in own]
    texts = [model.preprocess(side) for side in (ANCHORS, [term for _, term in terms])]
    anchors, others = (torch.nn.functional.normalize(model(side)["sentence_embedding"], dim=1) for side in texts)
    P = torch.tensor([[owner == row for owner, _ in terms] for row in range(3)])
    ours = losses.multi_similarity_loss if per_anchor else losses.batch_multi_similarity_loss
    expected = ours(anchors @ others.T, P, ~P, losses.Hyper(beta=10.0))
    (expected_gradient,) = torch.autograd.grad(expected, list(model.parameters()))
    assert found.item() == pytest.approx(expected.item(), abs=1e-6) and found > 0.1
    torch.testing.assert_close(gradient, expected_gradient)
    assert gradient.abs().max() > 1e-3


def test_without_labels_every_column_counts(model):
    texts = [ANCHORS, ["aki", "htn", "pyrexia"], ["renal failure", "hypertension", "fever"]]
    loss = MultiSimilarityLoss(model)
    unlabelled = loss([model.preprocess(column) for column in texts], None)
    labelled = loss([model.preprocess(column) for column in texts], torch.tensor([2, 2, 2]))
    assert unlabelled.item() == pytest.approx(labelled.item())


@pytest.mark.parametrize("per_anchor", [True, False])
def test_their_trainer_lowers_it(model, per_anchor, tmp_path):
    loss = MultiSimilarityLoss(model, per_anchor)
    rows = positive_columns(ANCHORS, POSITIVES)
    columns = [model.preprocess(rows[name]) for name in rows if name != "label"]
    before = loss(columns, torch.tensor(rows["label"])).item()
    arguments = SentenceTransformerTrainingArguments(
        output_dir=str(tmp_path), max_steps=20, per_device_train_batch_size=3, learning_rate=0.05, logging_steps=1,
        save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = SentenceTransformerTrainer(model, arguments, Dataset.from_dict(rows), loss=loss)
    trainer.train()
    curve = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert curve[0] == pytest.approx(before, abs=1e-3)  # the trainer's batch was read as meant: all three rows
    assert curve[-1] < 0.9 * curve[0]  # not to 0: what isn't mined stays in the sums of the code's form
    assert loss.get_config_dict() == {"per_anchor": per_anchor, **losses.PAPER._asdict()}
