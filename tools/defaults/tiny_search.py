"""A policy so small that two CPU cores train it many times: a Llama with random weights, one token
per name of the default corpus (a name is copied without being spelt) and byte-level BPE.

Each attention layer starts by writing back what it reads (its output matrix is the transpose of its
orthogonal value matrix), so that the policy has only to learn where to look; other initial weights
needed many times as many steps.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from coppice.judges.retriever.http_client import title_and_text
from coppice.tools.defaults.tiny_board import save_random, wrapped

NAME = "tiny-search"
"""The value of ``model.name`` that selects this policy."""
SPECIAL = ("<s>", "</s>", "<pad>")
_NAMES = ("think", "search", "answer", "information")
TAGS = tuple(f"<{end}{tag}>" for tag in _NAMES for end in ("", "/"))
"""Each tag is one token of plain text, which decoding keeps."""
SENTENCES = (
    "Question: What is the of the country whose is ?",
    "Name the of the country whose is .",
    " I need the of . I look it up. The is . I know it. I must answer.",
    "Doc 1(Title: ) Doc 2(Title: ) Doc 3(Title: ) No results found.",
    "That action could not be used. Write to look something up, or to finish, after a block."
    " Try once more.",
)
"""Sentences whose words become tokens, in addition to the fields of the corpus."""
INITIAL = 0.05
"""Standard deviation of the other initial weights. With the usual 0.02, attention stays uniform for
long."""
WRITTEN = 0.5
"""The share of its input that an attention layer writes back at the start."""
ROPE_BASE = 1000.0
"""Base of the rotary wavelengths. It suits episodes of about a hundred tokens."""


def names_and_fields(corpus: Path) -> tuple[list[str], list[str]]:
    """Return, each sorted, the distinct names (titles and values) and the distinct fields of a
    corpus of one-fact passages."""
    names: set[str] = set()
    fields: set[str] = set()
    for line in corpus.read_text().splitlines():
        title, text = title_and_text(json.loads(line)["contents"])
        field, _, value = text.partition(": ")
        names |= {title, value}
        fields.add(field)
    return sorted(names), sorted(fields)


def tokenizer(names: list[str], fields: list[str], *sentences: str) -> PreTrainedTokenizerFast:
    """Return the tokenizer. Any text survives encoding and decoding unchanged, and " Name" is one
    token. sentences: whose words are tokens too."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    levels: Any = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.pre_tokenizer = levels
    core.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2048, special_tokens=list(SPECIAL), show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    words = [*SENTENCES, *sentences, *(f"{field}: x {field.lower()} of" for field in fields)]
    core.train_from_iterator(words * 2, trainer)
    core.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    core.add_tokens([tokenizers.AddedToken(f" {name}", normalized=False) for name in names])
    return wrapped(core)


def make_tiny_search(
    folder: Path, corpus: Path, seed: int = 0, hidden: int = 128, layers: int = 2, heads: int = 4,
    words: PreTrainedTokenizerFast | None = None,
) -> Path:  # fmt: skip
    """Write a model folder with random weights, tokenizer and chat template, of about 0.6 million
    parameters. words: another tokenizer."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"intermediate_size": 2 * hidden}
    words = tokenizer(*names_and_fields(corpus)) if words is None else words
    return save_random(folder, words, seed, shape, INITIAL, ROPE_BASE, prepare=_write_back)


def _write_back(model: Any) -> None:
    import torch

    for layer in model.model.layers:
        values = torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight.data)
        layer.self_attn.o_proj.weight.data.copy_(WRITTEN * values.T)
