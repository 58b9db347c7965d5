"""CAPR's equations by hand and by other means, its architectures, and that training teaches them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_bert import tiny_bert
from torch import nn
from transformers import LongformerConfig, LongformerModel

from drehr_utils.config import MINILM, StageConfig
from drehr_utils.papers.capr import systems
from drehr_utils.papers.capr.models import (
    LSTM_DIM,
    PASSAGE_MARK,
    QUERY_MARK,
    SCALE,
    BiEncoder,
    ContextualDocumentVectors,
    CrossEncoder,
    LongEncoder,
    PolyEncoder,
    WordVectors,
    listwise_loss,
    passage_amid_document,
    poly_score,
)
from drehr_utils.papers.capr.passages import Passage
from drehr_utils.profiles import load_profile
from drehr_utils.training import encoders

SENTENCES = (
    "lasix 40 mg daily.",
    "mother died of a myocardial infarct.",
    "clear lungs, no wheeze on exam today.",
    "ok.",
)
QUERIES = ["lasix ; discharge medications", "infarct ; family history", "wheeze ; physical exam"]


def passages() -> list[Passage]:
    aspects = ["discharge medications", "family history", "physical exam"]
    entities = [("lasix",), ("infarct", "myocardial infarct"), ("wheeze",)]
    return [Passage(f"n_{i}", "n", aspects[i], entities[i], SENTENCES, i, i + 1 + (i == 2)) for i in range(3)]


@pytest.fixture(scope="module")
def start():
    return encoders.load_encoder(MINILM)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_bert(tmp_path_factory.mktemp("tiny")))


def fresh():
    return encoders.load_encoder(MINILM)


def as_if_trained(cdv: ContextualDocumentVectors) -> ContextualDocumentVectors:
    """With heads as after some training: at first they add nothing."""
    for weight in cdv.heads.parameters():
        nn.init.normal_(weight, std=0.02)
    return cdv


def test_equation_1_is_torchs_cross_entropy_and_a_hand_worked_value():
    scores = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)) * 5
    torch.testing.assert_close(listwise_loss(scores), nn.functional.cross_entropy(scores, torch.arange(8)))
    # y = softmax of (ln 3, 0) = (3/4, 1/4), and of (0, 0) = (1/2, 1/2): -(ln 3/4 + ln 1/2) / 2
    scores = torch.tensor([[np.log(3.0), 0.0], [0.0, 0.0]], dtype=torch.float64)
    assert listwise_loss(scores).item() == pytest.approx(-(np.log(3 / 4) + np.log(1 / 2)) / 2)


def test_equation_2_by_hand():
    # P's rows times q = (ln 3, 0): logits (ln 3, 0), y's weights 3/4 and 1/4, so y = (3/4, 1/4) for unit rows.
    q = torch.tensor([[np.log(3.0), 0.0]])
    P = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    mask = torch.ones(1, 2, dtype=torch.bool)
    W = torch.tensor([[2.0, -2.0], [0.0, -1.0]], dtype=torch.float64)  # W y = (1, -1/4), relu: (1, 0)
    assert poly_score(q.double(), P, mask, W).item() == pytest.approx(np.log(3.0))


def test_equation_2_equals_plain_loops():
    rng = np.random.default_rng(0)
    q, P, W = rng.normal(size=(3, 5)), rng.normal(size=(4, 6, 5)), rng.normal(size=(5, 5))
    mask = np.arange(6)[None, :] < np.array([6, 3, 1, 5])[:, None]
    expected = np.zeros((3, 4))
    for i in range(3):
        for j in range(4):
            tokens = P[j][mask[j]]
            weights = np.exp(tokens @ q[i])
            weights /= weights.sum()
            attended = sum(w * t for w, t in zip(weights, tokens, strict=True))
            expected[i, j] = np.maximum(W @ attended, 0) @ q[i]
    got = poly_score(*(torch.from_numpy(x) for x in (q, P, mask, W)))
    np.testing.assert_allclose(got.numpy(), expected, atol=1e-12)


def test_bi_encoder_starts_as_the_encoders_cosine(start):
    model = BiEncoder(start, query_tokens=32, passage_tokens=64)
    scores = model.eval()(QUERIES, passages()).detach()
    embedded = [torch.from_numpy(encoders.encode(start, t)) for t in (QUERIES, [p.text for p in passages()])]
    torch.testing.assert_close(scores, SCALE * embedded[0] @ embedded[1].T, atol=1e-4, rtol=1e-4)


def test_the_dot_product_is_of_mean_token_vectors_and_the_ranking_their_cosine(start):
    model = BiEncoder(start, dot=True, query_tokens=32, passage_tokens=64)
    with torch.no_grad():
        ranked = model.eval()(QUERIES, passages())
        model.training = True  # its encoder's dropout stays off
        scores = model(QUERIES, passages())
    means = []
    for texts in (QUERIES, [passage.text for passage in passages()]):
        batches = [start.tokenizer(text, return_tensors="pt") for text in texts]  # one by one: no padding
        with torch.no_grad():
            means.append(torch.stack([start[0].auto_model(**b).last_hidden_state[0].mean(dim=0) for b in batches]))
    torch.testing.assert_close(scores, means[0] @ means[1].T, atol=1e-4, rtol=1e-4)
    cosines = nn.functional.cosine_similarity(means[0][:, None], means[1][None], dim=2)
    torch.testing.assert_close(ranked, SCALE * cosines, atol=1e-4, rtol=1e-4)


def test_word_vectors_are_means_and_know_a_words_parts():
    sentences = ["chest pain at rest", "no chest pain", "fever and chills"] * 20
    words, again = (WordVectors(sentences, 1000, dimension=12, epochs=2, seed=3) for _ in range(2))
    found = words(["chest pain", "chest", "pain", "chestpain", " ; "])
    raw = [torch.tensor(words.vectors[word]) for word in ("chest", "pain")]
    torch.testing.assert_close(found[0], nn.functional.normalize(raw[0] + raw[1], dim=0))
    assert "chestpain" not in words.vectors.key_to_index  # but its n-grams have vectors
    torch.testing.assert_close(found[:4].norm(dim=1), torch.ones(4))
    assert found[4].abs().sum() == 0 and torch.equal(found, again(["chest pain", "chest", "pain", "chestpain", " ; "]))


def test_marks_enter_the_tokenizer_and_the_weights():
    encoder = fresh()
    rows = encoder[0].auto_model.get_input_embeddings().weight.shape[0]
    assert len(encoder.tokenizer.tokenize(f"{QUERY_MARK} pain")) > 2  # in pieces before
    model = BiEncoder(encoder, marks=True).eval()
    tokenizer = model.encoders[0].tokenizer
    ids = tokenizer(f"{QUERY_MARK} pain {PASSAGE_MARK}")["input_ids"]
    assert tokenizer.tokenize(f"{QUERY_MARK} pain") == [QUERY_MARK, "pain"]
    assert {ids[1], ids[-2]} == {rows, rows + 1} and tokenizer.unk_token_id not in ids
    assert encoder[0].auto_model.get_input_embeddings().weight.shape[0] == rows + 2
    # Weights are shared, so only the marks can tell the same text as query and as passage apart.
    passage = Passage("p", "d", None, (), (QUERIES[0],), 0, 1)
    same, apart = BiEncoder(fresh()).eval(), model
    for shared, equal in ((same, True), (apart, False)):
        one, other = shared.encode_queries([QUERIES[0]]), shared.encode_passages([passage])
        assert torch.allclose(one, other, atol=1e-4) is equal
    # Each mark moves its own row when trained.
    model(QUERIES, passages()).sum().backward()
    gradient = encoder[0].auto_model.get_input_embeddings().weight.grad
    assert gradient[rows].abs().sum() > 0 and gradient[rows + 1].abs().sum() > 0


def test_sharing_halves_the_weights():
    def count(model):
        return sum(p.numel() for p in model.parameters())

    assert count(BiEncoder(fresh(), fresh())) == 2 * count(BiEncoder(fresh()))


def test_poly_encoder_is_equation_2_of_the_encoders_outputs_whatever_the_padding(start):
    model = PolyEncoder(start, start, passage_tokens=64).eval()
    scores = model(QUERIES, passages()).detach()
    alone = torch.cat([model(QUERIES, [p]) for p in passages()], dim=1).detach()
    torch.testing.assert_close(scores, alone, atol=1e-4, rtol=1e-4)
    q = SCALE**0.5 * torch.from_numpy(encoders.encode(start, QUERIES))
    for j, passage in enumerate(passages()):
        tokens = start.encode([passage.text], output_value="token_embeddings", convert_to_tensor=True)[0]
        P = SCALE**0.5 * nn.functional.normalize(tokens.cpu(), dim=1)
        y = torch.softmax(P @ q.T, dim=0).T @ P
        torch.testing.assert_close(scores[:, j], (torch.relu(y) * q).sum(dim=1), atol=1e-3, rtol=1e-3)


def test_poly_encoder_over_one_vector_is_equation_2_with_all_weight_on_it(start):
    model = PolyEncoder(start, start, pooled=True, passage_tokens=64).eval()
    q, P = (torch.from_numpy(encoders.encode(start, t)) for t in (QUERIES, [p.text for p in passages()]))
    torch.testing.assert_close(model(QUERIES, passages()).detach(), SCALE * q @ torch.relu(P).T, atol=1e-3, rtol=1e-3)


def test_cross_encoder_reads_pairs_in_any_order(start):
    torch.manual_seed(0)
    model = CrossEncoder(start, max_tokens=48).eval()
    pairs = [(q, p.text) for q in QUERIES for p in passages()]
    scores = model.pair_scores(pairs).detach()
    torch.testing.assert_close(model.pair_scores(pairs[::-1]).detach().flip(0), scores, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model(QUERIES, passages()).detach().flatten(), scores, atol=1e-4, rtol=1e-4)
    batch = start.tokenizer(*pairs[4], return_tensors="pt")
    assert set(batch["token_type_ids"][0].tolist()) == {0, 1}
    alone = model.head(start[0].auto_model(**batch).last_hidden_state.mean(dim=1)).detach()  # MiniLM's pooling
    torch.testing.assert_close(scores[4], alone[0, 0], atol=1e-4, rtol=1e-4)
    long = model.pair_scores([(QUERIES[0], "word " * 500)])
    assert torch.isfinite(long).all()


def test_cdv_reads_the_document_around_a_passage_and_scores_the_mean_cosine(start):
    torch.manual_seed(0)
    model = as_if_trained(ContextualDocumentVectors(start, start)).eval()
    own = passages()[0]
    other = replace(own, document=("atrial fibrillation.", *own.document), start=1, end=2)
    assert other.text == own.text
    vectors = model.encode_passages([own, other, passages()[2]]).detach()
    assert not torch.allclose(vectors[0], vectors[1], atol=1e-4)
    # By hand: one document through the LSTM, its two heads, mean of the cosines over the third passage's sentences.
    sentences = torch.from_numpy(encoders.encode(start, SENTENCES))
    torchs = nn.LSTM(sentences.shape[1], LSTM_DIM, bidirectional=True)
    there, back = (lstm.state_dict() for lstm in model.lstms)
    torchs.load_state_dict(there | {f"{name}_reverse": weight for name, weight in back.items()})
    hidden = torchs(sentences)[0]
    entity, aspect = (nn.functional.normalize(sentences + head(hidden), dim=1)[2:4] for head in model.heads)
    e, a = (torch.from_numpy(encoders.encode(start, [text])) for text in ("wheeze", "physical exam"))
    expected = SCALE * ((entity @ e.T + aspect @ a.T) / 2).mean()
    torch.testing.assert_close(model([QUERIES[2]], [passages()[2]])[0, 0], expected, atol=1e-3, rtol=1e-3)


def test_cdv_starts_as_the_mean_cosine_of_the_encoders_sentences(start):
    model = ContextualDocumentVectors(start, start).eval()
    sentences = torch.from_numpy(encoders.encode(start, SENTENCES))[2:4]  # the third passage's
    e, a = (torch.from_numpy(encoders.encode(start, [text])) for text in ("wheeze", "physical exam"))
    for model.shares in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):  # the last two: by one head alone
        entity, aspect = model.shares
        expected = SCALE * ((entity * sentences @ e.T + aspect * sentences @ a.T) / 2).mean()
        torch.testing.assert_close(model([QUERIES[2]], [passages()[2]])[0, 0], expected, atol=1e-3, rtol=1e-3)


def test_cdv_trains_its_sentence_encoder_only_when_unfrozen():
    for frozen in (True, False):
        model = as_if_trained(ContextualDocumentVectors(fresh(), fresh(), frozen=frozen))
        listwise_loss(model(QUERIES, passages())).backward()
        moved = [p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.encoder.parameters()]
        assert any(moved) is not frozen
        assert all(lstm.weight_ih_l0.grad.abs().sum() > 0 for lstm in model.lstms)
        assert {name.split(".")[0] for name in model.state_dict()} == {"encoder", "lstms", "heads"}  # no query encoder
        assert model.train().training and model.encoder.training is not frozen


QUICK = [systems.BI_SHARED, systems.BI_DOT, systems.POLY, systems.POLY_POOLED, systems.CDV, systems.CDV_FASTTEXT]


@pytest.mark.parametrize("name", [*QUICK, pytest.param(systems.CROSS, marks=pytest.mark.slow)])
def test_training_teaches_and_is_repeatable(name, tmp_path, tiny):
    profile, rate = replace(load_profile("smoke"), encoder=tiny), 1e-3
    if name == systems.CROSS:  # which has no cosine to start from: a tiny one would need more epochs
        profile, rate = load_profile("smoke"), 2e-4
    config = StageConfig(batch_size=3, epochs=25, learning_rate=rate, dropout=0.0)
    states = []
    for run in ("first", "second"):
        model = systems.build(profile, profile.capr.system(name))
        curve = systems.train(model, passages(), config, tmp_path / run, progress=False)
        most = 0.7 if name == systems.CDV_FASTTEXT else 0.5  # whose words are all alike in so small a slice
        assert len(curve) == 25 and curve["loss"].iloc[-3:].mean() < most * curve["loss"].iloc[0]
        states.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        candidates = np.array([[0, 1, 2], [2, 1, 0], [1, 0, 2]])
        scores = systems.candidate_scores(model, QUERIES, passages(), candidates, block=2)
        assert np.take_along_axis(candidates, scores.argmax(axis=1)[:, None], 1)[:, 0].tolist() == [0, 1, 2]
    assert torch.equal(*states)


def test_candidate_scores_are_the_models_own(start):
    model = BiEncoder(start, fresh(), passage_tokens=64)
    candidates = np.array([[2, 0], [0, 1], [2, 1]])
    full = model.eval()(QUERIES, passages()).detach().numpy()
    got = systems.candidate_scores(model, QUERIES, passages(), candidates, block=2)
    np.testing.assert_allclose(got, np.take_along_axis(full, candidates, axis=1), atol=0.5)  # bf16 on some machines
    assert systems.latency(model, QUERIES[0], passages(), 5, repeats=1) > 0


def test_a_passage_amid_its_document(start):
    tokenizer = start.tokenizer
    middle = passages()[1]
    ids, own = passage_amid_document(middle, tokenizer, 512)
    assert tokenizer.decode(ids, skip_special_tokens=True) == " ".join(
        tokenizer.decode(tokenizer(s, add_special_tokens=False)["input_ids"]) for s in SENTENCES
    )
    assert tokenizer.decode(ids[own]) == middle.text
    short, own = passage_amid_document(middle, tokenizer, 5)  # the passage itself is cut
    assert len(short) == 5 and own == slice(1, 4)
    lengths = [len(tokenizer(s, add_special_tokens=False)["input_ids"]) for s in SENTENCES]
    ids, own = passage_amid_document(middle, tokenizer, 2 + lengths[0] + lengths[1])  # the sentence after doesn't fit
    assert own == slice(1 + lengths[0], len(ids) - 1) and len(ids[own]) == lengths[1]


@pytest.mark.parametrize("poly", [False, True])
def test_long_inputs_on_a_small_longformer(poly, start, tmp_path):
    torch.manual_seed(0)
    config = LongformerConfig(
        vocab_size=start.tokenizer.vocab_size, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, attention_window=[8, 8], max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    LongformerModel(config).save_pretrained(tmp_path)
    start.tokenizer.save_pretrained(tmp_path)
    model = LongEncoder(str(tmp_path), poly=poly, max_tokens=40).eval()
    model.query_model.load_state_dict(LongformerModel(config).state_dict())  # two towers, not one twice
    scores = model(QUERIES, passages())
    assert scores.shape == (3, 3) and torch.isfinite(scores).all()
    elsewhere = [replace(p, document=(*SENTENCES[:2], "new context.", *SENTENCES[2:]), start=0, end=1)
                 for p in passages()[:1]]  # fmt: skip
    assert not torch.allclose(model(QUERIES, elsewhere)[:, 0], scores[:, 0], atol=1e-6)  # the context is read
    again = LongEncoder(str(tmp_path), poly=poly, max_tokens=40).eval()
    again.query_model.load_state_dict(model.query_model.state_dict())
    torch.testing.assert_close(again(QUERIES, passages()), scores)
    for mode in (model.eval(), again.train()):  # training: layers are computed anew on the way back
        listwise_loss(mode(QUERIES, passages())).backward()
        assert mode.passage_model.embeddings.word_embeddings.weight.grad.abs().sum() > 0
    if poly:
        tokens, own = model.encode_passages(passages())
        rows = [passage_amid_document(p, start.tokenizer, 40) for p in passages()]
        assert own.sum(dim=1).tolist() == [len(ids[at]) for ids, at in rows]
    assert load_profile("mimic").capr.system("CAPR-Longformer-Poly")
