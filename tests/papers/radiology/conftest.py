"""The lexicon, the open collections and their entries, read once."""

import pytest
from transformers import LlamaConfig, LlamaModel

from drehr_utils.papers.radiology.entries import label_entries
from drehr_utils.papers.radiology.lexicon import FindingMatcher, read_lexicon
from drehr_utils.papers.radiology.reports import OPEN_CXR, read_collection
from drehr_utils.training import encoders


@pytest.fixture(scope="session")
def matcher():
    return FindingMatcher(read_lexicon())


@pytest.fixture(scope="session")
def collections():
    return {c: read_collection(OPEN_CXR / f"collection_{c}.jsonl.gz") for c in "ab"}


@pytest.fixture(scope="session")
def entries(matcher, collections):
    return {c: label_entries((s for r in reports for s in r.sentences), matcher) for c, reports in collections.items()}


@pytest.fixture(scope="session")
def decoder(tmp_path_factory):
    """A folder with a tiny language model of SmolLM2's kind, its head tied to its table of tokens."""
    folder, tokenizer = tmp_path_factory.mktemp("decoder"), encoders.load_encoder("minilm").tokenizer
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    LlamaModel(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **size)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
