"""The forward of a step: the modules of transformers, or for Llama, Qwen2 and Qwen3 the same
operations with less overhead: query, key and value are one matrix product and the rotary angles
come from a table. A step of 32 tokens is a tenth faster, of a tiny model several times.
"""

from typing import Any

import torch
from torch.nn import functional

from coppice.actors.engines.attend import AttentionPlan
from coppice.common import vision
from coppice.common.hardware import wide_product

PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_HEAD_ROWS = 2048
"""Rows of the head per product on a CPU; one product of 49,152 rows is a fifth slower."""
_ROUNDS = ("cpu",)
"""Devices on which logits keep the model's number type: wider ones take half as long again there.
The distribution that is sampled from, and its log-probabilities, are those of the rounded."""


def decoder(model: Any, longest: int) -> "PlainDecoder | WholeDecoder":
    """Return the decoder of a causal language model for positions below ``longest``."""
    rope = getattr(getattr(model.get_decoder(), "rotary_emb", None), "rope_type", "")
    # the table needs angles that never change
    plain = type(model).__name__ in PLAIN and rope in ("default", "linear", "llama3", "yarn")
    return PlainDecoder(model, longest) if plain else WholeDecoder(model)


class WholeDecoder:
    """Runs any model whose attention goes through transformers' interface."""

    def __init__(self, model: Any):
        self._model, self._decoder = model, model.get_decoder()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Map tokens [rows], positions [rows] or [3, rows] to hidden states [rows, hidden]."""
        inputs = {"input_ids": tokens[None]}
        if features is not None:
            inputs = {"inputs_embeds": vision.embed(self._model, tokens, features, slice(None))}
        where = positions[None] if positions.ndim == 1 else positions[:, None]
        return self._decoder(
            **inputs, position_ids=where, use_cache=False, plan=plan
        ).last_hidden_state[0]


class PlainDecoder:
    """Runs Llama, Qwen2 and Qwen3. The model's parameters become views of the fused ones."""

    def __init__(self, model: Any, longest: int):
        inner = model.get_decoder()
        self._embed, self._norm = inner.embed_tokens, inner.norm
        self._layers = [_Layer(layer) for layer in inner.layers]
        positions = torch.arange(longest, device=model.device)[None]
        cos, sin = inner.rotary_emb(self._embed.weight[:1], positions)
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin equals x, rolled by half a head, times sin with its first half
        # negated.
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        plan: AttentionPlan,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Like ``WholeDecoder.forward``. These models read no pictures."""
        hidden = functional.embedding(tokens, self._embed.weight)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for number, layer in enumerate(self._layers):
            hidden = layer.forward(number, hidden, cos, sin, plan)
        return _normed(hidden, self._norm)


class _Layer:
    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        parts = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.qkv = _transposed([part.weight for part in parts])
        self.qkv_bias = None
        if parts[0].bias is not None:
            biases = [part.bias for part in parts]
            self.qkv_bias = _shared(biases, torch.cat(biases))
        self.width, self.scale = attention.head_dim, attention.scaling
        self.heads, self.kv_heads = (len(part.weight) // self.width for part in parts[:2])
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        _transposed([attention.o_proj.weight])
        self.gate, self.up = mlp.gate_proj, mlp.up_proj
        added = attention.o_proj, mlp.down_proj
        self.out, self.down = ((linear, linear.weight.t()) for linear in added)
        self.activation = mlp.act_fn

    def forward(
        self,
        number: int,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        """Apply the layer. hidden: [rows, hidden], overwritten. cos, sin: [rows, 1, head_dim]."""
        rows = len(hidden)
        qkv = torch.mm(_normed(hidden, self.before), self.qkv)
        if self.qkv_bias is not None:
            qkv += self.qkv_bias
        qkv = qkv.view(rows, -1, self.width)
        rotated = qkv[:, : self.heads + self.kv_heads]
        if self.norms[0] is not None:
            parts = rotated.split([self.heads, self.kv_heads], 1)
            for part, norm in zip(parts, self.norms, strict=True):
                part.copy_(_normed(part, norm))
        torch.addcmul(rotated * cos, rotated.roll(self.width // 2, -1), sin, out=rotated)
        new = qkv[:, self.heads :].view(rows, 2, self.kv_heads, self.width)
        attended = plan.attend(number, qkv[:, : self.heads], new, self.scale)
        hidden = _added(hidden, attended.reshape(rows, -1), *self.out)
        normed = _normed(hidden, self.between)
        gate = self.activation(functional.linear(normed, self.gate.weight, self.gate.bias))
        gate.mul_(functional.linear(normed, self.up.weight, self.up.bias))
        return _added(hidden, gate, *self.down)


def _added(
    hidden: torch.Tensor, rows: torch.Tensor, linear: Any, transposed: torch.Tensor
) -> torch.Tensor:
    """Add a linear layer to the residual stream, in one operation if it has no bias."""
    if linear.bias is not None:
        return hidden + functional.linear(rows, linear.weight, linear.bias)
    return hidden.addmm_(rows, transposed)


def _transposed(weights: list[torch.nn.Parameter]) -> torch.Tensor:
    """Store weights as views of one [in, out]: products of few rows are a tenth faster."""
    return _shared(weights, torch.cat([weight.data for weight in weights]).t().contiguous().t()).t()


def _shared(parameters: list[torch.nn.Parameter], whole: torch.Tensor) -> torch.Tensor:
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _normed(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    """Return the root-mean-square norm in float32, with fewer passes than transformers."""
    length = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
    scale = (length.square_() / hidden.shape[-1]).add_(norm.variance_epsilon).rsqrt_()
    if hidden.dtype == torch.float32:
        return (hidden * norm.weight).mul_(scale)
    return norm.weight * (hidden * scale).to(hidden.dtype)


class Head:
    """The output embedding. It reuses its result's memory, because new pages cost much."""

    def __init__(self, model: Any):
        self._linear = model.get_output_embeddings()
        self._kept = self._linear.weight.new_empty(0, len(self._linear.weight))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocabulary], which the next call overwrites."""
        weight = self._linear.weight
        if self._linear.bias is not None:
            return self._linear(hidden)
        if hidden.device.type not in _ROUNDS:
            return wide_product(hidden, weight.t())
        if len(self._kept) < len(hidden):
            self._kept = hidden.new_empty(len(hidden), len(weight))
        logits = self._kept[: len(hidden)]
        for first in range(0, len(weight), _HEAD_ROWS):
            rows = slice(first, first + _HEAD_ROWS)
            torch.mm(hidden, weight[rows].t(), out=logits[:, rows])
        return logits
