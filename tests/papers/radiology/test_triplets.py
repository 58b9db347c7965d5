"""The triplet loss against PyTorch's, hard sampling against a plain search, one short training run."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, DataCollatorForLanguageModeling

from drehr_utils.config import TripletConfig
from drehr_utils.errors import DataError
from drehr_utils.papers.radiology.entries import Entry
from drehr_utils.papers.radiology.retrieval import remembering, separations
from drehr_utils.papers.radiology.triplets import (
    TripletSet,
    cosine_distance,
    lm_steps,
    masked_loss,
    mega_batches,
    sample_unmatched,
    train_triplets,
    triplet_loss,
    tune_lm,
)
from drehr_utils.training import encoders

ENTRIES = [
    Entry("Small left pneumothorax.", True, "pneumothorax"),
    Entry("No pneumothorax is seen.", False, "pneumothorax"),
    Entry("Large right effusion with pneumothorax.", True, "pneumothorax"),
    Entry("Large right effusion with pneumothorax.", True, "pleural effusion"),
    Entry("There is no pleural fluid.", False, "pleural effusion"),
    Entry("The heart is enlarged, cardiomegaly.", True, "cardiomegaly"),
]


def test_triplet_loss_equals_pytorchs():
    torch.manual_seed(0)
    q, m, u = torch.randn(3, 20, 8)
    reference = torch.nn.TripletMarginWithDistanceLoss(
        distance_function=lambda a, b: 1 - torch.nn.functional.cosine_similarity(a, b), margin=0.5
    )
    torch.testing.assert_close(triplet_loss(q, m, u), reference(q, m, u))


def test_triplet_loss_by_hand():
    q = torch.tensor([[1.0, 0.0]])
    m, u = torch.tensor([[0.0, 2.0]]), torch.tensor([[3.0, 3.0]])
    assert cosine_distance(q, m).item() == pytest.approx(1)
    assert triplet_loss(q, m, u).item() == pytest.approx(1 - (1 - 2**-0.5) + 0.5)
    assert triplet_loss(q, q, -q).item() == 0  # further apart than the margin


def test_hard_sampling_is_the_most_similar_unmatched():
    torch.manual_seed(0)
    S, matched = torch.randn(30, 12), torch.rand(30, 12) < 0.4
    matched[3] = True
    chosen = sample_unmatched(S, matched, hard=True)
    for row in range(30):
        free = [c for c in range(12) if not matched[row, c]]
        assert chosen[row] == (max(free, key=lambda c: S[row, c].item()) if free else -1)
    draws = torch.stack([sample_unmatched(S, matched, False, torch.Generator().manual_seed(s)) for s in range(300)])
    for row in range(30):
        free = {c for c in range(12) if not matched[row, c]} or {-1}
        assert set(draws[:, row].tolist()) == free


def test_mega_batches_keep_the_steps_and_widen_the_pool():
    small, wide = (TripletConfig(mega_batch=m, batch_size=4, epochs=3) for m in (4, 16))
    pools, steps = mega_batches(42, small)
    wide_pools, wide_steps = mega_batches(42, wide)
    assert [[entry for _, entry in step] for step in steps] == [[entry for _, entry in step] for step in wide_steps]
    for some, taken in ((pools, steps), (wide_pools, wide_steps)):
        assert all(entry in some[pool] for step in taken for pool, entry in step)
        assert all(len({pool for pool, _ in step}) == 1 for step in taken)
    assert max(map(len, wide_pools)) == 16 and max(map(len, pools)) == 4
    assert sorted(sum(wide_pools[:3], [])) == list(range(42)) and wide_pools[0] != wide_pools[3]
    assert mega_batches(42, TripletConfig(max_steps=2))[1] == mega_batches(42, TripletConfig())[1][:2]


def test_labels_of_the_papers_rows():
    assert TripletConfig(hard=False, mega_batch=32).label == "SBERT/RS/NB(32)"
    assert TripletConfig(mega_batch=128).label == "SBERT/HS/MB(128)"


def test_a_matched_sentence_is_never_the_unmatched_one():
    data = TripletSet.build(ENTRIES)
    assert data.matched[data.query_of, data.sentence_of].all() and data.matched.sum() == len(ENTRIES)
    with pytest.raises(DataError, match="fewer than two"):
        TripletSet.build(ENTRIES[:1])


@pytest.mark.slow
def test_training_tells_a_finding_from_its_denial_and_repeats_itself():
    config = TripletConfig(batch_size=3, mega_batch=6, epochs=4, learning_rate=2e-4)
    start = encoders.load_encoder("minilm")
    before = separations(remembering(start), ENTRIES)
    first = train_triplets(encoders.load_encoder("minilm"), ENTRIES, config, progress=False)
    again = train_triplets(encoders.load_encoder("minilm"), ENTRIES, config, progress=False)
    after = separations(remembering(first), ENTRIES)
    assert after.mean() > before.mean() + 0.1
    np.testing.assert_array_equal(after, separations(remembering(again), ENTRIES))


def test_mlm_tuning_changes_the_encoder_with_the_dropout_asked_for():
    sentences = [e.sentence for e in ENTRIES]

    def tuned(dropout):
        config = TripletConfig(batch_size=3, epochs=1, dropout=dropout)
        return encoders.encode(tune_lm(encoders.load_encoder("minilm"), sentences, config, False), sentences)

    without, default, of_bert = tuned(0.0), tuned(None), tuned(0.1)
    assert np.isfinite(without).all()
    assert not np.allclose(without, encoders.encode(encoders.load_encoder("minilm"), sentences))
    assert not np.allclose(without, of_bert) and np.array_equal(default, of_bert)


def test_mlm_tuning_on_its_way_begins_with_the_start_and_ends_with_what_it_returns():
    """Trained first, the head alone leaves the encoder as it is, and guesses masked words better when that begins."""
    sentences = [e.sentence for e in ENTRIES]
    config = TripletConfig(batch_size=3, epochs=4, learning_rate=1e-3, dropout=0.0)
    start, begun = encoders.encode(encoders.load_encoder("minilm"), sentences), {}
    for head_first in (False, True):
        encoder, seen = encoders.load_encoder("minilm"), {}

        def measure(model, step, encoder=encoder, seen=seen):
            said = encoders.encode(encoder, sentences)
            seen[step] = said, masked_loss(model, encoder.tokenizer, sentences).mean()

        tuned = tune_lm(encoder, sentences, config, False, head_first, measure)
        steps = lm_steps(len(sentences), config)
        assert list(seen)[0] == 0 and list(seen)[-1] == steps and len(seen) > 2
        np.testing.assert_array_equal(seen[0][0], start)
        np.testing.assert_array_equal(seen[steps][0], encoders.encode(tuned, sentences))
        assert not np.allclose(seen[steps][0], start) and seen[steps][1] < seen[0][1]
        begun[head_first] = seen[0][1]
    assert begun[True] < begun[False]


def test_the_loss_of_a_sentence_is_transformers_own():
    model = AutoModelForMaskedLM.from_config(BertConfig(vocab_size=30522, hidden_size=8, num_hidden_layers=1,
                                                        num_attention_heads=2, intermediate_size=8))  # fmt: skip
    tokenizer, sentence = (
        encoders.load_encoder("minilm").tokenizer,
        "No pleural effusion or pneumothorax is seen today.",
    )
    batch = DataCollatorForLanguageModeling(tokenizer, seed=5)([tokenizer(sentence)])
    model.eval()
    with torch.no_grad():
        expected = model(**batch).loss.item()
    assert masked_loss(model, tokenizer, [sentence], seed=5)[sentence] == pytest.approx(expected, rel=1e-5)


def test_a_decoder_is_tuned_to_predict_the_next_word(decoder):
    sentences, config = [e.sentence for e in ENTRIES], TripletConfig(batch_size=3, epochs=30, learning_rate=1e-3)
    model = AutoModelForCausalLM.from_pretrained(decoder)

    def loss() -> float:
        """transformers' own, of each sentence by itself."""
        ids = [tuned.tokenizer(s, return_tensors="pt")["input_ids"] for s in sentences]
        return sum(model(input_ids=i, labels=i).loss.item() for i in ids) / len(ids)

    tuned = encoders.load_encoder(decoder, "mean")
    before = loss()
    tune_lm(tuned, sentences, config, False)
    model.model.load_state_dict(tuned[0].auto_model.state_dict())
    assert loss() < 0.9 * before


def test_a_batch_without_an_unmatched_sentence_teaches_nothing():
    entries = [Entry(s, True, f) for s in ("Edema and effusion.", "Effusion, edema.") for f in ("edema", "effusion")]
    start = encoders.load_encoder("minilm")
    trained = train_triplets(
        encoders.load_encoder("minilm"), entries, TripletConfig(batch_size=2, mega_batch=4, epochs=1), progress=False
    )
    texts = [e.sentence for e in entries]
    np.testing.assert_allclose(encoders.encode(trained, texts), encoders.encode(start, texts), atol=1e-5)
