"""Tiny random models with a byte tokenizer: real architectures that run in milliseconds."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PICTURES = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['content'] is string %}{{ m['content'] }}"
    "{% else %}{% for part in m['content'] %}{% if part['type'] == 'image' %}<|vision_start|>"
    "<|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SHAPE: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "eos_token_id": 257, "bos_token_id": 256, "pad_token_id": 258, "initializer_range": 0.2,
}  # fmt: skip


def config(kind: str, **shape: Any) -> Any:
    """The configuration of a tiny llama, qwen2, qwen3 or gemma3; ``shape`` replaces values."""
    if kind == "gemma3":
        own: dict[str, Any] = {"head_dim": 16, "sliding_window": 6, "query_pre_attn_scalar": 16}
        own["layer_types"] = ["sliding_attention", "full_attention"]
        return hf.Gemma3TextConfig(**(SHAPE | own | shape))
    made = {"llama": hf.LlamaConfig, "qwen2": hf.Qwen2Config, "qwen3": hf.Qwen3Config}[kind]
    extra = {"head_dim": 8} if kind == "qwen3" else {}
    return made(**(SHAPE | {"tie_word_embeddings": True} | extra | shape))


def save(folder: Path, kind: str = "llama", seed: int = 0, **shape: Any) -> Path:
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config(kind, **shape), dtype=torch.float32)
    model.save_pretrained(folder)
    save_words(folder)
    return folder


def save_vision(folder: Path, kind: str = "qwen2_5_vl", seed: int = 0) -> Path:
    """A folder of a tiny model that reads pictures; 28 x 28 pixels are a token."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    text = {**SHAPE, "vocab_size": 264, "hidden_size": 64, "rope_parameters": rope}
    eyes: dict[str, Any] = {"depth": 2, "num_heads": 4, "initializer_range": 0.2}
    if kind == "qwen2_5_vl":
        eyes |= {"hidden_size": 32, "intermediate_size": 48, "out_hidden_size": 64}
        eyes["fullatt_block_indexes"] = [1]
    else:
        eyes |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
    special = ("vision_start", "vision_end", "image", "video")
    ids = {f"{name}_token_id": 260 + i for i, name in enumerate(special)}
    makers = {"qwen2_vl": hf.Qwen2VLConfig, "qwen2_5_vl": hf.Qwen2_5_VLConfig}
    settings = makers[kind](text_config=text, vision_config=eyes, tie_word_embeddings=True, **ids)
    model = hf.AutoModelForImageTextToText.from_config(settings, dtype=torch.float32)
    model.save_pretrained(folder)
    size = {"shortest_edge": 56 * 56, "longest_edge": 112 * 112}
    hf.Qwen2VLImageProcessorPil(size=size).save_pretrained(folder)
    names = ("vision_start", "vision_end", "image_pad", "video_pad")
    save_words(folder, [f"<|{name}|>" for name in names], PICTURES)
    return folder


def save_words(folder: Path, more: Sequence[str] = (), template: str = TEMPLATE) -> None:
    """A byte tokenizer with special tokens from id 256 on, and a chat template."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: i for i, letter in enumerate(alphabet)}
    core: Any = tokenizers.Tokenizer(tokenizers.models.BPE(ids, []))
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    core.add_special_tokens(["<s>", "</s>", "<pad>", "<unk>", *more])
    made = hf.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = template
    made.save_pretrained(folder)
