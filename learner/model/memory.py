"""What a learner rank holds at most, all its models together, told from its settings and a model
folder's config.json, without torch. The launcher, ``coppice plan`` and the learner itself judge by
this one sum."""

from pathlib import Path
from typing import Any

from coppice.common import jsonl
from coppice.learner.config import BUCKET_BYTES, LearnerConfig
from coppice.learner.update.plan import plan_of

_SAVED = 9, 4
"""Numbers kept for the backward pass per token and layer, as multiples of the hidden width and of
the intermediate width."""
_KEPT_GIB = 1.0
"""A trained head keeps odds for backward up to this (KEPT_BYTES of learner/forest/head.py)."""


def model_shape(model: Path) -> dict[str, Any]:
    """Return the settings of a model's folder, with the number type of its weights as "dtype"; {}
    if it is not on this disk yet. Raises ValueError."""
    settings, expected = model / "config.json", "a Hugging Face model's settings"
    shape = jsonl.whole(settings, dict[str, Any], expected) if settings.is_file() else {}
    shape |= shape.get("text_config", {})
    return {"dtype": shape["torch_dtype"]} | shape if "torch_dtype" in shape else shape


def sizes(model: Path) -> tuple[dict[str, Any], float]:
    """Return the settings of a model's folder, and how many weights it holds (0 if none)."""
    shape = model_shape(model)
    size = sum(path.stat().st_size for path in model.glob("model*.safetensors"))
    return shape, size / (2 if "16" in shape.get("dtype", "float32") else 4)


def adapter_weights(shape: dict[str, Any], rank: int) -> float:
    """Return the number of weights of adapters on a dense model's linear layers."""
    hidden, inner = shape.get("hidden_size", 0), shape.get("intermediate_size", 0)
    heads = shape.get("num_attention_heads") or 1
    each = shape.get("head_dim") or hidden // heads
    own, shared = heads * each, (shape.get("num_key_value_heads") or heads) * each
    widths = 2 * (hidden + own) + 2 * (hidden + shared) + 3 * (hidden + inner)
    return rank * widths * shape.get("num_hidden_layers", 0)


def rank_parts(
    w: LearnerConfig, shape: dict[str, Any], weights: float, size: int, resting: bool = False
) -> dict[str, float]:
    """Return what a learner rank holds at most, in GiB, by what it is. size: bytes of a number in
    which it computes. shape: a model's config.json; weights: their number.

    A trained weight takes 16 bytes (with its gradient and moments), a frozen one ``size``, but 4 in
    the embedding. Models run one after another, so activations are those of one. Moments that are
    offloaded return for the step, when no activations are left: of the two, the larger counts.
    resting: what stays between updates, where engines take turns on the GPU.
    """
    models, sharded = plan_of(w).models, w.shards > 1
    layers, hidden = shape.get("num_hidden_layers", 0), shape.get("hidden_size", 0)
    embedding = shape.get("vocab_size", 0) * hidden
    ends = embedding * (1 if shape.get("tie_word_embeddings", True) else 2)
    held = (weights * size + embedding * (4 - size)) / w.shards
    frozen = held * sum(model.lora.rank > 0 for model in models.values())
    parts = {
        "frozen weights": frozen,
        "initial policy": held * any(m.copy for m in models.values()),
    }
    largest, moments = 0.0, 0 if w.offload_optimizer else 8
    each = 4 + moments + (0 if resting else 4)
    for name, model in models.items():
        rank = model.lora.rank
        trained = (adapter_weights(shape, rank) if rank else weights) / w.shards
        parts[f"{name} in training"] = each * trained
        largest = max(largest, trained)
    whole = [model for model in models.values() if not model.lora.rank]
    if not w.lora.rank:
        # two buckets; what engines may ask for: a version, and what changed in it; rows to compare
        served = 0.0 if w.publish == "file" else 2.0 if size == 4 else 1.1
        compared = size == 2 and w.publish != "memory" and w.whole_every > 1
        sent = served * weights * size + min(weights * size, 2 * BUCKET_BYTES)
        parts["published weights"] = sent + 2 * compared * weights / w.shards
    layer = _SAVED[0] * hidden + _SAVED[1] * shape.get("intermediate_size", 0)
    kept = layer + layers * hidden if w.gradient_checkpointing else layers * layer
    passing = {"activations": w.micro_tokens * kept * (4 if size == 4 else 3)}
    if whole and size == 2 and not sharded and not w.gradient_checkpointing:
        passing["rounded weights"] = size * weights
    if any(model.vocabulary for model in whole):
        odds = 0.75 * size * w.micro_tokens * shape.get("vocab_size", 0)
        passing["gradient of the head"] = min(_KEPT_GIB * 2**30, odds) + (4 + size) * embedding
    if sharded:  # the ends stay gathered, of the layers two at a time; and one layer's gradients
        one = (weights - ends) / max(1, layers)
        passing["gathered weights"] = size * (ends + 2 * one) + (4 + size) * one * bool(whole)
    # one buffer for all gradients between replicated ranks, and then AdamW's own
    step = {"optimizer step": (8 * w.offload_optimizer + 4 * (not sharded)) * largest}
    if not resting:
        parts |= max(passing, step, key=lambda group: sum(group.values()))
    return {name: value / 2**30 for name, value in parts.items() if value}


REMEDIES = {
    "in training": "learner.sharding = 'fsdp' over more ranks, learner.lora.rank, or"
    " learner.offload_optimizer",
    "optimizer step": "learner.sharding = 'fsdp' over more ranks, or learner.lora.rank",
    "activations": "learner.gradient_checkpointing, or a smaller learner.micro_tokens",
    "published": "learner.publish = 'file'",
    "cache": "a smaller actors.sglang.arguments.mem_fraction_static or kv_cache_gib",
    "": "learner.sharding = 'fsdp' over more ranks, or a smaller model",
}


def told(parts: dict[str, float]) -> str:
    """Return parts and their sum as one line."""
    each = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
    return f"{sum(parts.values()):.1f} GiB ({each})"


def lacks(parts: dict[str, float], free: float) -> str:
    """Return why parts do not fit into ``free`` GiB, with the largest one and its remedy, or ""."""
    if sum(parts.values()) <= free:
        return ""
    largest = max(parts.keys() - {"CUDA"}, key=lambda name: parts[name])
    remedy = next(remedy for end, remedy in REMEDIES.items() if end in largest)
    return f"{told(parts)}, {free:.1f} GiB are free: most is for {largest}; take {remedy}"
