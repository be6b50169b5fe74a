"""Tiny random models with a byte tokenizer: real architectures that run in milliseconds."""

from pathlib import Path
from typing import Any

import tokenizers
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "eos_token_id": 257,
    "bos_token_id": 256,
    "pad_token_id": 258,
    "initializer_range": 0.2,
}


def config(kind: str, **shape: Any) -> Any:
    """The configuration of a tiny llama, qwen2, qwen3 or gemma3; ``shape`` replaces values."""
    if kind == "gemma3":
        types = ["sliding_attention", "full_attention"]
        return Gemma3TextConfig(
            **(_SHAPE | shape), head_dim=16, sliding_window=6, layer_types=types, query_pre_attn_scalar=16
        )
    made = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[kind]
    extra = {"head_dim": 8} if kind == "qwen3" else {}
    return made(**(_SHAPE | extra | shape), tie_word_embeddings=True)


def save(folder: Path, kind: str = "llama", seed: int = 0, **shape: Any) -> Path:
    """A model folder with weights, tokenizer and chat template."""
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config(kind, **shape), dtype=torch.float32).save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(tokenizers.models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    core.decoder = tokenizers.decoders.ByteLevel()  # pyright: ignore
    core.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>"])
    made = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder
