"""Training on a few chunks: the schedule, resuming, determinism, equal encodings, a model that any tool loads."""

import itertools
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from transformers import TrainerCallback

from drehr_utils import pipeline
from drehr_utils.config import Recipe, StageConfig
from drehr_utils.data.notes import Chunk
from drehr_utils.errors import DataError
from drehr_utils.profiles import load_profile
from drehr_utils.search import windows
from drehr_utils.training import encoders, losses, sampling, trainer
from drehr_utils.training.positives import STAGE2_SOURCES, PositiveSets
from drehr_utils.training.sampling import TrainingSet, batch_schedule, draw_positives
from drehr_utils.training.trainer import train_stage

CONFIG = StageConfig(
    positives_per_chunk=4, batch_size=4, epochs=6, learning_rate=2e-4, both_ways=True, mask_false_negatives=True
)


def data() -> TrainingSet:
    texts = ["chf on lasix", "htn on lisinopril", "dm2 on metformin", "copd on albuterol", "gerd on omeprazole",
             "afib on warfarin", "oa on ibuprofen", "uti on ciprofloxacin"]  # fmt: skip
    names = ["heart failure", "hypertension", "diabetes", "chronic obstructive pulmonary disease", "reflux",
             "atrial fibrillation", "osteoarthritis", "urinary tract infection"]  # fmt: skip
    chunks = [Chunk(f"n{i // 2}_{i % 2}", f"n{i // 2}", text) for i, text in enumerate(texts)]
    rows = [(c.id, [("disease", n), ("drug", c.text.split()[-1])]) for c, n in zip(chunks, names, strict=True)]
    return TrainingSet.build(chunks, PositiveSets.build(rows, STAGE2_SOURCES))


def weights(encoder) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in encoder.parameters()])


def test_draws_are_exact_in_number_and_cover_short_lists():
    rng = np.random.default_rng(0)
    for terms in (["a"], ["a", "b"], [str(i) for i in range(50)]):
        for n in (1, 2, 5, 16, 50):
            drawn = draw_positives(terms, n, rng)
            assert len(drawn) == n and set(drawn) <= set(terms)
            assert len(set(drawn)) == min(n, len(terms))  # repeats only once all are drawn
    dataset = sampling.PositivePairs(data(), replace(CONFIG, positives_per_chunk=1))
    assert len({dataset[(epoch, 0)].drawn[0] for epoch in range(20)}) == 2  # drawn anew each epoch
    assert dataset[(3, 0)] == dataset[(3, 0)]


def test_each_epoch_visits_every_chunk_once_and_groups_a_notes_chunks():
    notes = [f"n{i // 10}" for i in range(40)]
    schedule = batch_schedule(notes, StageConfig(batch_size=10, epochs=2))
    assert len(schedule) == 8
    for epoch in (0, 1):
        visited = [i for batch in schedule for e, i in batch if e == epoch]
        assert sorted(visited) == list(range(40))
    assert list(schedule) == list(batch_schedule(notes, StageConfig(batch_size=10, epochs=2)))
    assert list(schedule) != list(batch_schedule(notes, StageConfig(batch_size=10, epochs=2, seed=1)))
    grouped = batch_schedule(notes, StageConfig(batch_size=10, chunks_per_note=5))
    assert all(len({notes[i] for _, i in batch}) <= 2 for batch in grouped)


def test_buckets_change_no_embedding():
    encoder = pipeline.starting_encoder(load_profile("smoke")).eval()
    texts = ["htn", "chronic kidney disease, stage 3", "a", "word " * 60, "metformin 500 mg"]
    with torch.no_grad():
        bucketed = encoders.embed_buckets(encoder, encoders.token_buckets(encoder, texts, 512, 3)).cpu().numpy()
    assert np.allclose(bucketed, encoder.encode(texts, normalize_embeddings=True), atol=1e-5)


@pytest.mark.parametrize("buckets", [1, 2, 3, 9])
def test_no_other_cut_pads_less(buckets):
    """Against all ways to cut a few texts."""
    for seed in range(20):
        lengths = np.sort(np.random.default_rng(seed).integers(3, 9, 1 + seed % 8))
        ends = encoders.bucket_ends(lengths, buckets)
        assert ends[-1] == len(lengths) and sorted(set(ends)) == ends and len(ends) <= buckets

        def padded(ends, lengths=lengths):
            return sum(len(part) * max(part) for part in np.split(lengths, ends))

        inside = range(1, len(lengths))
        ways = [way for n in range(min(buckets, len(lengths))) for way in itertools.combinations(inside, n)]
        assert padded(ends[:-1]) == min(map(padded, ways))
        bounded = encoders.bucket_ends(lengths, buckets, most=16)
        assert set(ends) <= set(bounded) and sorted(set(bounded)) == bounded
        assert all(len(part) * max(part) <= 16 for part in np.split(lengths, bounded[:-1]))


@pytest.mark.parametrize("adapters", [False, True])
def test_a_step_in_bf16_is_that_of_a_copy_in_bf16(tmp_path, adapters):
    """The trained weights stay float32: of a copy that is bf16 altogether they have the loss and the gradient."""
    encoder = pipeline.starting_encoder(load_profile("smoke"))
    if adapters:
        encoders.add_lora(encoder)
        for name, module in encoder.named_modules():
            if name.endswith("lora_dropout.default"):
                module.p = 0.0  # two draws would differ
    copy = deepcopy(encoder).bfloat16().train()
    collator, found = sampling.Collator(encoder), {}
    rows = [sampling.Row("chf on lasix", ["furosemide", "heart failure"], ["furosemide", "heart failure"]),
            sampling.Row("edema, lasix", ["furosemide", "edema"], ["furosemide", "edema"])]  # fmt: skip

    class First(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **_):
            found.update({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def loss(model, inputs):
        return trainer.batch_loss(model, inputs, CONFIG)

    start = {name: p.clone() for name, p in encoder.named_parameters()}
    options = {"progress": False, "bf16": True, "max_grad_norm": 0.0, "callbacks": [First()]}
    curve = trainer.train(encoder, [rows], collator, loss, CONFIG, tmp_path, **options)
    trainer.prepare_for_training(copy, CONFIG)
    expected = loss(copy, collator(rows))
    expected.backward()
    assert curve["loss"].item() == pytest.approx(expected.item(), rel=1e-6)
    gradients = {name: p.grad.float() for name, p in copy.named_parameters() if p.grad is not None}
    assert gradients.keys() == found.keys()
    tables = {name for name in gradients if "_embeddings." in name}  # whose rows are summed in float32
    assert len(tables) == (0 if adapters else 3)
    assert all(torch.equal(found[name], gradient) for name, gradient in gradients.items() if name not in tables)
    for name in tables:
        torch.testing.assert_close(found[name], gradients[name], rtol=2**-6, atol=gradients[name].abs().max() * 2**-8)
    assert not any(part.sparse for part in encoder.modules() if isinstance(part, torch.nn.Embedding))
    after = dict(encoder.named_parameters())
    assert {p.dtype for p in after.values()} == {torch.float32}
    moved = torch.cat([(after[name] - p).abs().flatten() for name, p in start.items()])
    assert moved[moved > 0].median().item() == pytest.approx(CONFIG.learning_rate, rel=0.01)  # AdamW's first step


def test_windows_are_trained_on_as_they_are_searched_with():
    """The loss of a batch with windows is that of the similarities that search.windows computes, chunk by chunk."""
    encoder = pipeline.starting_encoder(load_profile("smoke"))
    config = replace(CONFIG, windows=0.25)
    trainer.prepare_for_training(encoder, config)
    long = " ".join(["the patient was seen and"] * 6) + " lasix was begun " + " ".join(["without any events"] * 6)
    terms = [["furosemide", "heart failure"], ["edema", "furosemide"], ["fever", "cough"]]
    texts = [long, "edema, lasix", "fever and cough for three days " * 4]
    rows = [sampling.Row(text, drawn, drawn) for text, drawn in zip(texts, terms, strict=True)]
    batch = sampling.Collator(encoder, windows=True)(rows)
    names = list(dict.fromkeys(sum(terms, [])))
    of_names, of_texts = encoders.encode(encoder, names), encoders.encode(encoder, texts)
    best = windows.best_windows(of_names, *windows.encode_windows(encoder, texts))
    expected = torch.from_numpy(windows.blended(of_names @ of_texts.T, best, 0.25).T)
    masks = batch["columns"], batch["known"], config, batch["left_out"]
    with torch.no_grad():
        ours = trainer.batch_loss(encoder.eval(), batch, config)
        whole = trainer.batch_loss(encoder, sampling.Collator(encoder)(rows), config)
    assert ours.item() == pytest.approx(trainer.contrastive_loss(expected, *masks).item(), rel=1e-5)
    assert abs(ours.item() - whole.item()) > 1e-4


def test_windows_and_gathered_negatives_are_not_joined(tmp_path):
    encoder = pipeline.starting_encoder(load_profile("smoke"))
    with pytest.raises(DataError, match="each process would lack the others' windows"):
        trainer.train_stage(encoder, None, replace(CONFIG, windows=0.5, gather_negatives=True), tmp_path)


def test_gradients_equal_those_of_every_entity_encoded_by_itself():
    """Encoding a repeated entity once must not change what is learnt."""
    encoder = pipeline.starting_encoder(load_profile("smoke"))
    config = replace(CONFIG, both_ways=True, mask_false_negatives=True)
    trainer.prepare_for_training(encoder, config)
    encoder.train()
    rows = [sampling.Row("chf on lasix", ["furosemide", "heart failure"], ["furosemide", "heart failure"]),
            sampling.Row("edema, lasix", ["furosemide", "edema"], ["furosemide", "edema"])]  # fmt: skip
    batch = sampling.Collator(encoder)(rows)
    chunks, once = encoders.embed_buckets(encoder, batch["chunks"]), encoders.embed_buckets(encoder, batch["entities"])
    trainer.contrastive_loss(
        chunks @ once.T, batch["columns"], batch["known"], replace(config, both_ways=False)
    ).backward()
    ours = torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
    encoder.zero_grad()
    drawn = [term for row in rows for term in row.drawn]
    four = torch.cat([encoders.embed_buckets(encoder, encoders.token_buckets(encoder, [t], 16, 1)) for t in drawn])
    S = encoders.embed_buckets(encoder, batch["chunks"]) @ four.T
    P = torch.tensor([[True, True, False, False], [False, False, True, True]])
    N = torch.tensor([[False, False, False, True], [False, True, False, False]])  # the shared furosemide is masked
    losses.batch_multi_similarity_loss(S, P, N).backward()
    plain = torch.cat([p.grad.flatten() for p in encoder.parameters() if p.grad is not None])
    assert torch.allclose(ours, plain, atol=1e-5)


@pytest.mark.slow
def test_training_learns_is_repeatable_and_resumes_where_it_stopped(tmp_path):
    def run(folder, callbacks=(), **options):
        encoder = pipeline.starting_encoder(load_profile("smoke"))
        options |= {"save_steps": 100, "callbacks": callbacks, "progress": False}
        return encoder, train_stage(encoder, data(), CONFIG, tmp_path / folder, **options)

    class StopAfterTwo(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 2
            control.should_save = control.should_training_stop

    whole, curve = run("whole")
    again, _ = run("again", dataloader_num_workers=2)  # which draw and tokenise the batches
    assert torch.equal(weights(whole), weights(again))
    start = weights(pipeline.starting_encoder(load_profile("smoke")))
    assert not torch.allclose(weights(whole), start) and len(curve) == 12
    texts, names = zip(*[(data().text(i), data().positives(i)[0]) for i in range(8)], strict=True)

    def margin(encoder) -> float:  # by how much a chunk is nearer to its own entity than to the others'
        S = encoders.encode(encoder, texts) @ encoders.encode(encoder, names).T
        return float(np.diag(S).mean() - S[~np.eye(8, dtype=bool)].mean())

    assert margin(whole) > margin(pipeline.starting_encoder(load_profile("smoke")))
    run("cut", [StopAfterTwo()])
    resumed, curve = run("cut")
    assert torch.allclose(weights(resumed), weights(whole), atol=1e-6) and curve["step"].tolist() == list(range(1, 13))


def test_a_saved_model_is_a_sentence_transformers_folder(tmp_path):
    encoder = pipeline.starting_encoder(load_profile("smoke"))
    train_stage(encoder, data(), replace(CONFIG, max_steps=1), tmp_path / "c", save_steps=0, progress=False)
    encoders.save_encoder(encoder, tmp_path / "m")
    assert (tmp_path / "m/model.safetensors").exists()
    loaded = SentenceTransformer(str(tmp_path / "m"), device="cpu")
    ours = encoders.encode(encoder, ["htn", "lasix", "htn"])
    assert np.allclose(loaded.encode(["htn", "lasix", "htn"], normalize_embeddings=True), ours, atol=1e-5)
    assert loaded.max_seq_length == 512


def test_what_an_encoder_read_last_is_not_saved_with_it(start, tmp_path):
    """A run that was killed at its end and went on has read nothing."""
    encoder = encoders.load_encoder(start)
    encoders.save_encoder(encoder, tmp_path / "unread")
    encoders.encode(encoder, ["htn", "acute on chronic heart failure"])
    encoder.max_seq_length = 16
    encoders.encode(encoder, ["htn"])
    encoder.max_seq_length = 512
    encoders.save_encoder(encoder, tmp_path / "read")
    names = sorted(path.name for path in (tmp_path / "unread").iterdir() if path.is_file())
    assert "tokenizer.json" in names
    assert all((tmp_path / "read" / n).read_bytes() == (tmp_path / "unread" / n).read_bytes() for n in names)


class Dropouts(TrainerCallback):
    """What each dropout of the model is set to while it trains."""

    def on_step_end(self, args, state, control, model=None, **_):
        assert model.training
        kinds = {True: set(), False: set()}
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Dropout):
                kinds["lora" in name].add(module.p)
        self.adapters, self.encoder = kinds[True], kinds[False]


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, {0.0}), (0.2, {0.2}), (None, {0.1})])
def test_adapters_keep_their_dropout_whatever_the_encoders_is(dropout, expected, tmp_path):
    """DR.EHR §4.2: LoRA's dropout is 0.1."""
    encoder, seen = pipeline.starting_encoder(load_profile("smoke")), Dropouts()
    encoders.add_lora(encoder)
    config = replace(CONFIG, max_steps=1, dropout=dropout)
    train_stage(encoder, data(), config, tmp_path, save_steps=0, progress=False, callbacks=[seen])
    assert seen.adapters == {0.1} and seen.encoder == expected


def test_labels_are_completed_by_the_graph():
    view = sampling.GraphView(
        concepts_in=lambda text: frozenset({"C1"} if "lasix" in text else set()),
        concepts_of=lambda term: frozenset({"C1"} if term == "furosemide" else set()),
    )
    chunks = [Chunk("a_0", "a", "on lasix"), Chunk("b_0", "b", "edema")]
    sets = PositiveSets.build([("a_0", [("disease", "edema")]), ("b_0", [("drug", "furosemide")])], STAGE2_SOURCES)
    training_set = TrainingSet.build(chunks, sets, graph=view)
    config = replace(CONFIG, batch_size=2, complete_labels=True, positives_per_chunk=2)
    pairs = sampling.PositivePairs(training_set, config)
    encoder = pipeline.starting_encoder(load_profile("smoke"))
    collated = sampling.Collator(encoder, view.concepts_of)([pairs[0, 0], pairs[0, 1]])
    assert collated["known"].tolist() == [[True, True], [False, True]]  # edema, furosemide: completed for the first
    plain = sampling.PositivePairs(training_set, replace(config, complete_labels=False))
    assert sampling.Collator(encoder, view.concepts_of)([plain[0, 0], plain[0, 1]])["known"].tolist()[0] == [
        True,
        False,
    ]


def test_broader_concepts_are_positive_and_related_ones_left_out():
    view = sampling.GraphView(
        concepts_in=lambda text: frozenset({"metformin"}) if "metformin" in text else frozenset(),
        broader=lambda ids: frozenset({"antidiabetic"}) if ids else frozenset(),
        related=lambda ids: frozenset({"diabetes", "antidiabetic"}) if ids else frozenset(),
        concepts_of=lambda term: frozenset({term}),
    )
    chunks = [Chunk("a_0", "a", "on metformin"), Chunk("b_0", "b", "edema, sugars high")]
    rows = [("a_0", [("drug", "metformin")]), ("b_0", [("disease", "diabetes"), ("drug", "antidiabetic")])]
    training_set = TrainingSet.build(chunks, PositiveSets.build(rows, STAGE2_SOURCES), graph=view)
    config = replace(
        CONFIG, positives_per_chunk=2, complete_labels=True, complete_hypernyms=True, leave_out_related=True
    )
    pairs = sampling.PositivePairs(training_set, config)
    encoder = pipeline.starting_encoder(load_profile("smoke"))
    batch = sampling.Collator(encoder, view.concepts_of)([pairs[0, 0], pairs[0, 1]])
    order = np.argsort([["metformin", "diabetes", "antidiabetic"].index(t) for t in dict.fromkeys(
        [*pairs[0, 0].drawn, *pairs[0, 1].drawn])])  # fmt: skip
    assert batch["known"][:, order].tolist() == [[True, False, True], [False, True, True]]
    assert batch["left_out"][:, order].tolist() == [[False, True, False], [False, False, False]]


def test_what_is_left_out_contributes_nothing_to_the_loss():
    S = torch.tensor([[0.6, 0.9], [0.2, 0.7]])
    columns, known = torch.tensor([[0], [1]]), torch.eye(2, dtype=torch.bool)
    left_out = torch.tensor([[False, True], [False, False]])
    changed = S.clone()
    changed[0, 1] = 0.3
    one, other = (trainer.contrastive_loss(s, columns, known, CONFIG, left_out).item() for s in (S, changed))
    assert one == other != trainer.contrastive_loss(S, columns, known, CONFIG).item()


@pytest.mark.slow
def test_other_kinds_of_text_are_kept_where_the_starting_encoder_puts_them(tmp_path):
    others = [f"{entity} {aspect}" for entity in ("gout", "scurvy", "rabies") for aspect in ("treatment", "causes")]
    start = encoders.encode(pipeline.starting_encoder(load_profile("smoke")), others)

    def drift(keep: float) -> float:
        training_set = replace(data(), other_texts=others)
        encoder = pipeline.starting_encoder(load_profile("smoke"))
        config = replace(CONFIG, keep=keep, kept_per_chunk=2)
        reference, asked = pipeline.starting_encoder(load_profile("smoke")), []
        reference.register_forward_pre_hook(lambda _, inputs: asked.append(len(inputs[0]["input_ids"])))
        train_stage(
            encoder, training_set, config, tmp_path / str(keep), reference=reference, save_steps=0, progress=False
        )
        assert sum(asked) == (len(others) if keep else 0)  # each text once, however often it is drawn
        return float((1 - (encoders.encode(encoder, others) * start).sum(1)).mean())

    assert drift(20.0) < drift(0.0) / 2


def test_few_steps_encode_only_the_kept_texts_that_they_draw(tmp_path, monkeypatch):
    """Of texts of one length, which no padding moves, and with the loss of a training that encodes all."""
    training_set = replace(data(), other_texts=[f"of {i:03}" for i in range(200)])
    config = replace(CONFIG, epochs=1, keep=20.0, kept_per_chunk=2)  # 2 steps of 4 chunks: 16 draws

    def run(folder: str) -> tuple[list[float], int]:
        encoder, reference = (pipeline.starting_encoder(load_profile("smoke")) for _ in range(2))
        asked = []
        reference.register_forward_pre_hook(lambda _, inputs: asked.append(len(inputs[0]["input_ids"])))
        curve = train_stage(encoder, training_set, config, tmp_path / folder, reference=reference, progress=False)
        return curve["loss"].tolist(), sum(asked)

    few, asked = run("few")
    monkeypatch.setattr(trainer, "FEW_DRAWS", 0)
    every, all_asked = run("every")
    assert 0 < asked <= 16 and all_asked == 200
    assert few == pytest.approx(every, abs=0.01)


def test_mismatched_or_empty_data_is_refused():
    chunks = [Chunk("n_0", "n", "x")]
    with pytest.raises(DataError, match="belong to other chunks"):
        TrainingSet.build(chunks, PositiveSets.build([("m_0", [])], STAGE2_SOURCES))
    with pytest.raises(DataError, match="no chunk has a positive"):
        TrainingSet.build(chunks, PositiveSets.build([("n_0", [])], STAGE2_SOURCES))


def test_ablations_differ_by_what_their_name_says():
    profile = load_profile("open")
    assert profile.without_stage1() == Recipe(stage2=replace(profile.published.stage2, epochs=2))  # as many steps
    for stage in (profile.published.stage1, profile.published.stage2):  # the recipe as published: §3.3, §4.2
        assert (stage.learning_rate, stage.warmup_ratio, stage.beta) == (1e-4, 0.1, 50)
        assert not (stage.both_ways or stage.mask_false_negatives or stage.substitution or stage.sources)
    assert losses.PAPER == (2, 50, 0.5, 0.1)
    mimic = load_profile("mimic").published
    assert (mimic.stage1.positives_per_chunk, mimic.stage1.batch_size, mimic.stage1.epochs) == (128, 32, 3)  # Table 3
    assert (mimic.stage2.positives_per_chunk, mimic.stage2.batch_size, mimic.stage2.epochs) == (16, 32, 1)
