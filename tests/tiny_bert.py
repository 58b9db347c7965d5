"""An encoder that loads, encodes and trains in no time, and knows nothing."""

from pathlib import Path

import torch
from transformers import BertConfig, BertModel

from drehr_utils.config import MINILM
from drehr_utils.training import encoders


def tiny_bert(folder: Path) -> Path:
    """A BERT of two tiny layers, whose checkpoints take no second, with the tokenizer at hand."""
    torch.manual_seed(0)
    size = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    BertModel(BertConfig(vocab_size=30522, **size)).save_pretrained(folder)
    encoders.load_encoder(MINILM).tokenizer.save_pretrained(folder)
    return folder
