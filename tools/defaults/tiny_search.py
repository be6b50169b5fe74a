"""A policy so small that two CPU cores train many of it: a Llama of random weights in which every name of the default corpus is one token.

The rest of the vocabulary is byte-level BPE over the words of questions, passages and actions. A query is then two tokens and an answer
one, so copying a name needs no spelling. Each attention layer starts by writing back what it reads (its output matrix is the transpose
of its value matrix, which is orthogonal), so that copying has only to learn where to look: with other weights that took many times the
steps. It knows nothing: ``tools/search_play`` teaches it the notation by made-up countries.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast

from judges.retriever.passage_text import title_and_text
from tools.defaults.tiny_board import TEMPLATE, save_random

NAME = "tiny-search"
"""The value of ``model.name`` that asks for it."""
SPECIAL = ("<s>", "</s>", "<pad>")
TAGS = tuple(f"<{end}{tag}>" for tag in ("think", "search", "answer", "information") for end in ("", "/"))
"""Tokens of their own that are plain text: decoding keeps them."""
SENTENCES = (
    "Question: What is the of the country whose is ?",
    "Name the of the country whose is .",
    " I need the of . I look it up. The is . I know it. I must answer.",
    "Doc 1(Title: ) Doc 2(Title: ) Doc 3(Title: ) No results found.",
    "That action could not be used. Write to look something up, or to finish, after a block. Try once more.",
)
"""Words that become tokens, beside the corpus's fields."""
INITIAL = 0.05
"""Standard deviation of the other initial weights: with the usual 0.02 attention stays uniform for long."""
WRITTEN = 0.5
"""How much of what it reads an attention layer writes back at the start."""
ROPE_BASE = 1000.0
"""Base of the rotary wavelengths: an episode is a hundred tokens."""


def names_and_fields(corpus: Path) -> tuple[list[str], list[str]]:
    """The distinct titles and values, and the distinct fields, of one-fact passages, sorted."""
    names: set[str] = set()
    fields: set[str] = set()
    for line in corpus.read_text().splitlines():
        title, text = title_and_text(json.loads(line)["contents"])
        field, _, value = text.partition(": ")
        names |= {title, value}
        fields.add(field)
    return sorted(names), sorted(fields)


def tokenizer(names: list[str], fields: list[str]) -> PreTrainedTokenizerFast:
    """Any text survives encoding and decoding unchanged; " Name" is one token."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    core.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = [*SENTENCES, *(f"{field}: x {field.lower()} of" for field in fields)]
    core.train_from_iterator(words * 2, trainer)
    core.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    core.add_tokens([tokenizers.AddedToken(f" {name}", normalized=False) for name in names])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def make_tiny_search(
    folder: Path, corpus: Path, seed: int = 0, hidden: int = 128, layers: int = 2, heads: int = 4
) -> Path:
    """A model folder with random weights, tokenizer and chat template; about 0.6 million parameters."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"intermediate_size": 2 * hidden}
    words = tokenizer(*names_and_fields(corpus))
    return save_random(folder, words, seed, shape, initial=INITIAL, rope_base=ROPE_BASE, prepare=_write_back)


def _write_back(model: Any) -> None:
    import torch

    for layer in model.model.layers:
        values = torch.nn.init.orthogonal_(layer.self_attn.v_proj.weight.data)
        layer.self_attn.o_proj.weight.data.copy_(WRITTEN * values.T)
