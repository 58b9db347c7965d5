"""The registry's pieces on tiny models with random weights, against plain transformers; scores by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    dynamic_module_utils,
)

from drehr_utils.data.benchmark import Benchmark
from drehr_utils.errors import DataError
from drehr_utils.papers.cliniq import baselines
from drehr_utils.profiles import Profile, load_profile
from drehr_utils.search import retrievers
from drehr_utils.search.dense import dense_scores
from drehr_utils.search.retrievers import (
    REGISTRY,
    RetrieverSpec,
    as_in_cliniq,
    embed_texts,
    find_retriever,
    load_retriever,
    retriever_scores,
)
from drehr_utils.training.encoders import encode, load_encoder

QUERIES = ["renal failure", "htn", "heart failure with reduced ejection fraction after infarction"]
PASSAGES = ["patient with htn and renal failure on dialysis", "no events", "ejection fraction 20 after infarction"]
WORDS = sorted(
    {word for text in [*QUERIES, *PASSAGES] for word in text.split()} | set("instruct : given query".split())
)


def tokenizer(folder, special, template=None):
    vocabulary = {token: i for i, token in enumerate([*special.values(), *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        named = [(token, vocabulary[token]) for token in special.values() if token in template]
        backend.post_processor = TemplateProcessing(single=template, special_tokens=named)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    fast.save_pretrained(folder)
    return len(vocabulary)


def bert(folder, seed, eos=None):
    """With `eos`, its tokenizer knows such a token and, as NV-Embed's, ends no text with any."""
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    special |= {"eos_token": eos} if eos else {}
    size = tokenizer(folder, special, "[CLS] $A" if eos else "[CLS] $A [SEP]")
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


def decoder(folder, bos=False, kind="gpt_neox", template=None):
    """A tiny decoder (BMRetriever-410M's kind, if not another) whose tokenizer, as that one's, adds no end-of-text
    token, unless the template does."""
    special = {"unk_token": "<unk>", "eos_token": "<end>"} | ({"bos_token": "<s>"} if bos else {})
    size = tokenizer(folder, special, template or ("<s> $A" if bos else None))
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        kind, vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        head_dim=8, intermediate_size=64, max_position_embeddings=64, initializer_range=0.5, bos_token_id=0,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def states(folder, ids):
    return AutoModel.from_pretrained(folder).eval()(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()


def test_two_encoders_with_cls_pooling_and_dot_products(tmp_path):
    query, article = bert(tmp_path / "q", 1), bert(tmp_path / "d", 2)
    spec = replace(REGISTRY["MedCPT"], model=article, query_model=query, query_tokens=4)
    assert (spec.pooling, spec.similarity) == ("cls", "dot")
    found = embed_texts(spec, QUERIES, PASSAGES)
    for folder, texts, limit, embeddings in ((query, QUERIES, 4, found[0]), (article, PASSAGES, 512, found[1])):
        plain = AutoTokenizer.from_pretrained(folder)
        for text, embedding in zip(texts, embeddings, strict=True):
            ids = plain(text, truncation=True, max_length=limit)["input_ids"]
            np.testing.assert_allclose(embedding, states(folder, ids)[0], atol=1e-5)
    norms = np.linalg.norm(found[0], axis=1)
    assert abs(norms - 1).min() > 0.1  # not normalised: lengths count in a dot product
    np.testing.assert_allclose(dense_scores(*found, spec.similarity), found[0] @ found[1].T, rtol=1e-5)
    one, same = load_retriever(replace(spec, query_model=None), device="cpu")
    assert one is same
    two, other = load_retriever(spec, device="cpu")
    assert two is not other and (two.max_seq_length, other.max_seq_length) == (4, 512)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("limit", [512, 6])
def test_last_token_pooling_with_an_added_end_token_that_truncation_keeps(tmp_path, bos, limit):
    folder = decoder(tmp_path / "model", bos)
    spec = RetrieverSpec(
        "tiny", folder, pooling="lasttoken", query_prefix="given query : ", append_eos=True, similarity="dot",
        passage_tokens=limit, passage_prefix="instruct : ",
    )  # fmt: skip
    queries, passages = embed_texts(spec, QUERIES, PASSAGES)
    plain = AutoTokenizer.from_pretrained(folder)
    for prefix, texts, found in (("given query : ", QUERIES, queries), ("instruct : ", PASSAGES, passages)):
        for text, embedding in zip(texts, found, strict=True):
            ids = plain(prefix + text)["input_ids"][: limit - 1] + [plain.eos_token_id]
            assert ids[0] == plain.bos_token_id if bos else ids[-2] != plain.eos_token_id
            np.testing.assert_allclose(embedding, states(folder, ids)[-1], atol=1e-5)


def test_a_saved_pooling_can_skip_the_instruction(tmp_path):
    """NV-Embed's: the instruction is read but not pooled; so the prefix must go in as a prompt."""
    folder = bert(tmp_path / "plain", 4)
    transformer = Transformer(str(folder))
    model = SentenceTransformer(modules=[transformer, Pooling(32, "mean", include_prompt=False)], device="cpu")
    model.save(str(tmp_path / "saved"), create_model_card=False)
    spec = RetrieverSpec("tiny", tmp_path / "saved", query_prefix="instruct : given query : ", similarity="dot")
    queries, passages = embed_texts(spec, QUERIES, PASSAGES)
    plain = AutoTokenizer.from_pretrained(folder)
    ids = plain("instruct : given query : " + QUERIES[0])["input_ids"]
    np.testing.assert_allclose(queries[0], states(folder, ids)[6:].mean(axis=0), atol=1e-5)  # [CLS] and 5 words skipped
    np.testing.assert_allclose(passages[0], states(folder, plain(PASSAGES[0])["input_ids"]).mean(axis=0), atol=1e-5)


def test_minilm_is_the_projects_encoder():
    spec = find_retriever("MiniLM (start)")
    queries, passages = embed_texts(spec, QUERIES, PASSAGES)
    model = load_encoder("minilm")
    np.testing.assert_allclose(queries, encode(model, QUERIES), atol=1e-5)
    np.testing.assert_allclose(
        dense_scores(queries, passages), encode(model, QUERIES) @ encode(model, PASSAGES).T, atol=1e-5
    )


OTHERS = {"MiniLM (start)", "DR.EHR-small", "DR.EHR-large", "Qwen3-Embedding-0.6B"}


def test_registry_has_the_papers_list_with_each_models_own_settings():
    from drehr_utils.evaluation.tables import paper_figures

    papers = {s for s in paper_figures("cliniq", 3)["system"] if not s.startswith(("BM25", "RRF"))}
    known = {name: REGISTRY[name] for name in (*papers, *OTHERS)}  # and not what somebody adds
    pooling = {name: spec.pooling for name, spec in known.items()}
    assert pooling["bge-base-en-v1.5"] == pooling["MedCPT"] == pooling["DR.EHR-small"] == "cls"
    assert pooling["NV-Embed-v2"] is pooling["DR.EHR-large"] is None
    assert {p for n, p in pooling.items() if n.startswith(("BMRetriever", "gte", "Qwen3"))} == {"lasttoken"}
    assert {n for n, s in known.items() if s.similarity == "dot"} == {n for n in papers if n.startswith(("BMR", "Med"))}
    remote = ("NV", "gte", "DR.EHR-large")
    assert {n for n, s in known.items() if s.trust_remote_code} == {n for n in known if n.startswith(remote)}
    for name, spec in known.items():
        assert spec.query_prefix.startswith("Instruct: ") == name.startswith((*remote, "Qwen3"))
        published = as_in_cliniq(spec)
        assert published.similarity == "cosine" and (spec.api or published.query_tokens == 512)
    assert REGISTRY["bge-base-en-v1.5"].query_prefix and not as_in_cliniq(REGISTRY["bge-base-en-v1.5"]).query_prefix


# The architecture of each entry that isn't remote code, and what its own tokenizer adds to a text.
ARCHITECTURES = {
    "bge-base-en-v1.5": ("bert", None), "DR.EHR-small": ("bert", None), "MedCPT": ("bert", None),
    "BMRetriever-410M": ("gpt_neox", None), "BMRetriever-2B": ("gemma", "<s> $A"),
    "BMRetriever-7B": ("mistral", "<s> $A"), "Qwen3-Embedding-0.6B": ("qwen3", "$A <end>"),
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind", "template"), [(name, *how) for name, how in ARCHITECTURES.items()])
def test_each_entry_on_a_tiny_model_of_its_architecture(tmp_path, name, kind, template):
    """A padded batch through the entry, against the bare model on each text with its prefix."""
    folder = bert(tmp_path, 9) if kind == "bert" else decoder(tmp_path, template == "<s> $A", kind, template)
    query_model = folder if REGISTRY[name].query_model else None
    spec = replace(REGISTRY[name], model=folder, query_model=query_model, dtype="float32")
    plain = AutoTokenizer.from_pretrained(folder)
    # Some have a chat's template in their tokenizer; a text is no chat.
    chat = AutoTokenizer.from_pretrained(folder, chat_template="{{ messages }}")
    chat.save_pretrained(folder)
    for texts, prefix, found in zip(
        (QUERIES, PASSAGES), (spec.query_prefix, spec.passage_prefix), embed_texts(spec, QUERIES, PASSAGES), strict=True
    ):
        for text, embedding in zip(texts, found, strict=True):
            ids = plain(prefix + text)["input_ids"] + [plain.eos_token_id] * spec.append_eos
            assert kind == "bert" or (ids[-1] == plain.eos_token_id and ids.count(plain.eos_token_id) == 1)
            expected = states(folder, ids)[0 if spec.pooling == "cls" else -1]
            expected = expected / np.linalg.norm(expected) if spec.similarity == "cosine" else expected
            np.testing.assert_allclose(embedding, expected, atol=1e-4)


STAND_IN = """
from transformers import BertModel


class StandIn(BertModel):
    def forward(self, input_ids, attention_mask, pool_mask=None, return_dict=True):
        states = -super().forward(input_ids, attention_mask=attention_mask).last_hidden_state
        return {"%s": states} if return_dict else (states,)
"""


def remote(folder, states_are_called):
    """A tiny model whose own code turns its states' signs, and gives them a name of its own."""
    (folder / "standin.py").write_text(STAND_IN % states_are_called)
    config = json.loads((folder / "config.json").read_text()) | {"auto_map": {"AutoModel": "standin.StandIn"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def modules_cache(tmp_path, monkeypatch):
    """Where transformers copies remote code to before it imports it."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")


@pytest.mark.parametrize("name", ["gte-Qwen2-1.5B-Instruct", "gte-Qwen2-7B-Instruct"])
def test_gtes_entries_run_their_remote_code(tmp_path, modules_cache, name):
    folder = bert(tmp_path / "gte", 10)
    plain, expected = AutoTokenizer.from_pretrained(folder), {}
    spec = replace(REGISTRY[name], model=folder, dtype="float32")
    for text in [*(spec.query_prefix + query for query in QUERIES), *PASSAGES]:
        last = -states(folder, plain(text)["input_ids"])[-1]
        expected[text] = last / np.linalg.norm(last)
    remote(folder, "last_hidden_state")
    found = embed_texts(spec, QUERIES, PASSAGES)
    np.testing.assert_allclose(np.concatenate(found), list(expected.values()), atol=1e-5)


@pytest.mark.parametrize("name", ["NV-Embed-v2", "DR.EHR-large"])
def test_nv_embeds_entries_run_their_code_end_each_text_and_pool_no_instruction(tmp_path, modules_cache, name):
    """The model's code calls its states `sentence_embeddings`; the saved modules are those of an older version, whose
    file says nothing of that."""
    folder = bert(tmp_path / "plain", 11, eos="</s>")
    plain, expected = AutoTokenizer.from_pretrained(folder), []
    spec = replace(REGISTRY[name], model=tmp_path / "nv", dtype="float32")
    skipped = len(plain(spec.query_prefix)["input_ids"])  # with [CLS]
    for text in [*(spec.query_prefix + query for query in QUERIES), *PASSAGES]:
        ids = plain(text)["input_ids"] + [plain.eos_token_id]  # which is pooled, too
        pooled = -states(folder, ids)[skipped if text.startswith("Instruct") else 0 :].mean(axis=0)
        expected.append(pooled / np.linalg.norm(pooled))
    modules = [Transformer(str(folder)), Pooling(32, "mean", include_prompt=False)]
    SentenceTransformer(modules=modules, device="cpu").save(str(spec.model), create_model_card=False)
    (spec.model / "sentence_bert_config.json").write_text('{"max_seq_length": 4096, "do_lower_case": false}')
    remote(spec.model, "sentence_embeddings")
    found = embed_texts(spec, QUERIES, PASSAGES)
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5)


def test_by_name_or_path(tmp_path):
    assert find_retriever("MedCPT") is REGISTRY["MedCPT"]
    folder = bert(tmp_path / "mine", 5)
    assert find_retriever(str(folder)) == RetrieverSpec("mine", folder)
    assert find_retriever("owner/model").model == "owner/model"
    with pytest.raises(DataError, match="retriever 'nowhere': no folder") as error:
        find_retriever(tmp_path / "nowhere")
    assert str(tmp_path) not in str(error.value)
    with pytest.raises(DataError, match="nowhere: no such model folder"):
        load_retriever(RetrieverSpec("x", tmp_path / "nowhere"))
    with pytest.raises(DataError, match="x: model is not in the hub's cache") as error:
        load_retriever(RetrieverSpec("x", "no-such-owner/model"))  # offline
    assert error.value.__suppress_context__
    with pytest.raises(ValueError, match="similarity 'manhattan'"):
        RetrieverSpec("x", "y", similarity="manhattan")


def test_scores_are_kept_and_made_again_when_the_model_changes(tmp_path, monkeypatch):
    folder = bert(tmp_path / "model", 6)
    bench = Benchmark(
        corpus=dict(zip("abc", PASSAGES, strict=True)),
        queries=dict(zip("xyz", QUERIES, strict=True)),
        query_types={}, patients=[], qrels={}, match_types={},
    )  # fmt: skip
    spec = RetrieverSpec("tiny model", folder, pooling="cls")
    first = retriever_scores(spec, bench, tmp_path / "kept")
    expected = dense_scores(*embed_texts(spec, QUERIES, PASSAGES), spec.similarity)
    np.testing.assert_allclose(first, expected, atol=1e-6)
    assert first.shape == (3, 3) and first.max() <= 1.001

    def fail(*args, **kwargs):
        raise AssertionError("encoded again")

    with monkeypatch.context() as patch:
        patch.setattr(retrievers, "load_retriever", fail)
        np.testing.assert_array_equal(retriever_scores(spec, bench, tmp_path / "kept"), first)
    bert(folder, 7)  # other weights in the same folder
    again = retriever_scores(spec, bench, tmp_path / "kept")
    assert abs(again - first).max() > 0.01 and len(list((tmp_path / "kept").glob("tiny-model-*.npz"))) == 2
    # An entry more, or the model's folder elsewhere: nothing is encoded anew.
    monkeypatch.setitem(REGISTRY, "my-encoder", RetrieverSpec("my-encoder", "owner/my-encoder"))
    moved = replace(spec, model=folder.rename(tmp_path / "moved"))
    monkeypatch.setattr(retrievers, "load_retriever", fail)
    np.testing.assert_array_equal(retriever_scores(moved, bench, tmp_path / "kept"), again)


def test_a_newcomers_entry_runs_by_its_name(tmp_path, monkeypatch):
    folder = bert(tmp_path / "weights", 8)
    mine = RetrieverSpec("my-encoder", folder, pooling="cls", query_prefix="given query : ", similarity="dot")
    monkeypatch.setitem(REGISTRY, mine.name, mine)
    monkeypatch.setenv("DREHR_RETRIEVERS", "MiniLM (start), my-encoder")
    start, own = baselines.settings(load_profile("smoke")).retrievers
    assert (start.name, own) == ("MiniLM (start)", mine)  # with its own similarity, CliniQ's script or not
    queries, _ = embed_texts(find_retriever("my-encoder"), QUERIES, PASSAGES)
    ids = AutoTokenizer.from_pretrained(folder)("given query : " + QUERIES[0])["input_ids"]
    np.testing.assert_allclose(queries[0], states(folder, ids)[0], atol=1e-5)


def test_a_diverged_model_is_refused():
    for similarity in ("dot", "cosine"):
        with pytest.raises(DataError, match="embeddings, row 0: not finite"):
            dense_scores(np.full((1, 4), np.nan), np.ones((2, 4)), similarity)


def test_a_retriever_by_name_or_folder_gets_a_row_beside_the_starting_encoder(tmp_path, monkeypatch):
    monkeypatch.delenv("DREHR_RETRIEVERS", raising=False)
    monkeypatch.setattr(Profile, "cache", tmp_path / "cache")
    profile = load_profile("smoke")
    toy = Benchmark({str(i): text for i, text in enumerate(PASSAGES)}, {"q": QUERIES[0]}, {"q": "disease"}, [], {}, {})
    assert retrievers.extra_scores(profile, toy) == {}  # the starting encoder has its row already
    for name in ("mine", "again/mine"):
        load_encoder("minilm").save(str(tmp_path / name))
    monkeypatch.setenv("DREHR_RETRIEVERS", f"MiniLM (start), {tmp_path}/mine")
    ((name, scores),) = retrievers.extra_scores(profile, toy).items()
    expected = retriever_scores(REGISTRY["MiniLM (start)"], toy, tmp_path)
    assert name == "mine" and np.allclose(scores, expected, atol=1e-5)
    monkeypatch.setenv("DREHR_RETRIEVERS", f"{tmp_path}/mine, {tmp_path}/again/mine")
    with pytest.raises(DataError, match="two retrievers are called 'mine'"):
        retrievers.profile_retrievers(profile)
