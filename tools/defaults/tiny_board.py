"""A policy so small that two CPU cores train it in minutes: a Llama with random weights that reads
and writes characters, each action tag being one token. ``legal_play`` teaches it the notation."""

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from coppice.common.atomic import drafted

NAME = "tiny-board"
"""The value of ``model.name`` that selects this policy."""
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")
TAGS = ("<action>", "</action>")
"""Each tag is one token of plain text, which decoding keeps."""
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))
INITIAL = 0.12
"""Standard deviation of the initial weights. With the usual 0.02, attention starts uniform and for
long singles out no cell."""
ROPE_BASE = 100.0
"""Base of the rotary wavelengths. It is small because a board is tens of characters away, not
thousands."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{{ '\\n' }}{% endfor %}"
"""Writes a newline after each message, so that the policy's turn is a new line."""


def tokenizer() -> PreTrainedTokenizerFast:
    """Return the character tokenizer. Text of ``CHARACTERS`` and ``TAGS`` survives encoding and
    decoding unchanged."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    core = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    core.decoder = tokenizers.decoders.Fuse()  # pyright: ignore
    core.add_special_tokens(list(SPECIAL))
    core.add_tokens([tokenizers.AddedToken(tag, normalized=False) for tag in TAGS])
    return wrapped(core, unk_token="<unk>")


def wrapped(core: tokenizers.Tokenizer, **special: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer as transformers reads it, with the usual special tokens and others."""
    words = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>",
        clean_up_tokenization_spaces=False, **special,
    )  # fmt: skip
    words.chat_template = TEMPLATE
    return words


def make_tiny_policy(
    folder: Path, seed: int = 0, hidden: int = 128, layers: int = 4, heads: int = 16,
    intermediate: int = 256,
) -> Path:  # fmt: skip
    """Write a model folder with random weights, tokenizer and chat template. The default sizes give
    0.7 million parameters."""
    shape = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    shape |= {"intermediate_size": intermediate}
    return save_random(folder, tokenizer(), seed, shape, initial=INITIAL, rope_base=ROPE_BASE)


def save_random(
    folder: Path, words: Any, seed: int, shape: dict[str, Any], initial: float, rope_base: float,
    prepare: Callable[[Any], None] = lambda model: None,
) -> Path:  # fmt: skip
    """Save a Llama with random weights and its tokenizer (``words``) as a model folder. prepare:
    changes the weights before saving."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    settings = LlamaConfig(
        vocab_size=len(words), num_key_value_heads=shape["num_attention_heads"], **shape,
        max_position_embeddings=1024, tie_word_embeddings=True, initializer_range=initial,
        rope_parameters={"rope_type": "default", "rope_theta": rope_base},
        bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
        prepare(model)
    logging.disable_progress_bar()
    with drafted(folder, replace=True) as draft:
        model.save_pretrained(draft)
        words.save_pretrained(draft)
    return folder
