"""The forward of a step: the modules of transformers, or for Llama, Qwen2 and Qwen3 the same
operations with less overhead: query, key and value are one matrix product, the rotary angles come
from a table, and large weights are packed for few rows."""

import contextlib
import types
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.nn import functional

from coppice.actors.engines import kernels
from coppice.actors.engines.attend import AttentionPlan
from coppice.common import vision
from coppice.common.hardware import wide_product

PLAIN = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
PACKED_FROM = 2**18
"""Weights of a matrix from which on packing pays: a packed product costs 20 us beside its work."""
_Then = Literal["none", "swish", "mul", "add"]
_ROUNDS = ("cpu",)
"""Devices on which logits keep the model's number type: wider ones take half as long again there.
The distribution that is sampled from, and its log-probabilities, are those of the rounded."""


def decoder(model: Any, longest: int) -> "PlainDecoder | WholeDecoder":
    """Return the decoder of a causal language model for positions below ``longest``."""
    rope = getattr(getattr(model.get_decoder(), "rotary_emb", None), "rope_type", "")
    # the table needs angles that never change
    plain = type(model).__name__ in PLAIN and rope in ("default", "linear", "llama3", "yarn")
    plain = plain and model.config.hidden_act in ("silu", "swish")
    return PlainDecoder(model, longest) if plain else WholeDecoder(model)


def kv_heads(settings: Any) -> tuple[int, int]:
    """Return the number of heads of keys and values, and their width."""
    width = getattr(settings, "head_dim", None)
    width = width or settings.hidden_size // settings.num_attention_heads
    return settings.num_key_value_heads, width


def not_computed(model: Any) -> str:
    """Return what AttentionPlan does not compute of a model's attention, "" if it computes it, as a
    forward of two tokens shows."""
    if type(model).__name__ in PLAIN:
        return ""
    expected = kv_heads(model.config.get_text_config())

    def attend(layer: int, query: torch.Tensor, new: torch.Tensor, scale: float) -> torch.Tensor:
        if (heads := tuple(new.shape[2:])) != expected:
            raise ValueError(f"layer {layer} has {heads} heads of keys, not {expected}")
        return query

    tokens = torch.arange(2, device=model.device)
    plan: Any = types.SimpleNamespace(attend=attend, final=slice(None))
    try:
        WholeDecoder(model).forward(tokens, tokens, plan)
    except (TypeError, ValueError) as error:
        return f"its attention ({error})"
    return ""


class WholeDecoder:
    """Runs any model whose attention goes through transformers' interface."""

    def __init__(self, model: Any):
        self._model, self._decoder = model, model.get_decoder()
        self.products: list[PackedLinear] = []

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Map tokens [rows], positions [rows] or [3, rows] to the last hidden states of the rows
        ``plan.final``, [finals, hidden]."""
        inputs = {"input_ids": tokens[None]}
        if features is not None:
            inputs = {"inputs_embeds": vision.embed(self._model, tokens, features, slice(None))}
        where = positions[None] if positions.ndim == 1 else positions[:, None]
        out = self._decoder(**inputs, position_ids=where, use_cache=False, plan=plan)
        return out.last_hidden_state[0, plan.final]


class PlainDecoder:
    """Runs Llama, Qwen2 and Qwen3. The model's parameters become views of the fused ones."""

    def __init__(self, model: Any, longest: int):
        inner = model.get_decoder()
        self._embed, self._norm = inner.embed_tokens, inner.norm
        self._layers = [_Layer(layer) for layer in inner.layers]
        self.products = [product for layer in self._layers for product in layer.products]
        positions = torch.arange(longest, device=model.device)[None]
        cos, sin = inner.rotary_emb(self._embed.weight[:1], positions)
        half = sin.shape[-1] // 2
        # rotate_half(x) * sin equals x, rolled by half a head, times sin with its first half
        # negated.
        self._cos, self._sin = cos[0], torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan,
        features: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Like ``WholeDecoder.forward``. These models read no pictures."""
        hidden = functional.embedding(tokens, self._embed.weight)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]
        for number, layer in enumerate(self._layers):
            final = layer is self._layers[-1]
            hidden = layer.forward(number, hidden, cos, sin, plan, final)
        return _normed(hidden, self._norm)


class _Layer:
    def __init__(self, layer: Any):
        attention, mlp = layer.self_attn, layer.mlp
        linears = attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.qkv = PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out, self.gate, self.up, self.down = map(PackedLinear, linears)
        self.products = [self.qkv, self.out, self.gate, self.up, self.down]
        self.width, self.scale = attention.head_dim, attention.scaling
        self.heads = len(attention.q_proj.weight) // self.width
        self.kv_heads = len(attention.k_proj.weight) // self.width
        self.before, self.between = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]

    def forward(
        self, number: int, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor,
        plan: AttentionPlan, final: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Apply the layer to [rows, hidden]. cos, sin: [rows, 1, head_dim]. final: return the rows
        ``plan.final`` alone."""
        rows = len(hidden)
        qkv = self.qkv(_normed(hidden, self.before)).view(rows, -1, self.width)
        rotated = qkv[:, : self.heads + self.kv_heads]
        if self.norms[0] is not None:
            parts = rotated.split([self.heads, self.kv_heads], 1)
            for part, norm in zip(parts, self.norms, strict=True):
                part.copy_(_normed(part, norm))
        torch.addcmul(rotated * cos, rotated.roll(self.width // 2, -1), sin, out=rotated)
        new = qkv[:, self.heads :].view(rows, 2, self.kv_heads, self.width)
        attended = plan.attend(number, qkv[:, : self.heads], new, self.scale, final)
        hidden = hidden[plan.final] if final else hidden
        hidden = self.out(attended.flatten(1), "add", hidden)
        normed = _normed(hidden, self.between)
        gated = self.up(normed, "mul", self.gate(normed, "swish"))
        return self.down(gated, "add", hidden)


class PackedLinear:
    """A linear layer of a step, or several side by side. Large weights are held in the order in
    which the CPU's library reads them, if it has one: 8 rows then take about half the time. Their
    parameters have values within ``plain`` only, unless they are ``kept``."""

    def __init__(self, *linears: Any, kept: bool = False):
        self._parameters, self._kept = [linear.weight for linear in linears], kept
        biases = [linear.bias for linear in linears if linear.bias is not None]
        self._bias = _joined(biases) if biases else None
        self._plain: torch.Tensor | None = _joined(self._parameters)
        self._packed: Any = None
        self.pack()

    def pack(self) -> None:
        weight = self._plain
        if weight is None or weight.numel() < PACKED_FROM or not _packs(weight):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        if not self._kept:
            self._plain = None
            for parameter in self._parameters:
                parameter.data = weight.new_empty(1).expand(parameter.shape)

    def unpack(self) -> None:
        if self._plain is None:
            self._plain = _parts(self._parameters, self._packed.to_dense())
        self._packed = None

    def __call__(
        self, rows: torch.Tensor, then: _Then = "none", other: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map [rows, in] to [rows, out], to which ``then`` is applied: ``swish``, or ``mul`` or
        ``add`` with ``other`` [rows, out]. A packed product does it before it rounds."""
        if self._packed is None:
            assert self._plain is not None
            if other is not None and then == "add" and self._bias is None:
                return torch.addmm(other, rows, self._plain.t())
            out = functional.linear(rows, self._plain, self._bias)
            if other is not None:
                return out.mul_(other) if then == "mul" else out.add_(other)
            return functional.silu(out, inplace=True) if then == "swish" else out
        count = len(rows)
        # Each other number of rows costs a compilation and about 0.6 MB.
        if spare := -count % max(4, (1 << count.bit_length()) >> 4):
            rows = functional.pad(rows, (0, 0, 0, spare))
            other = functional.pad(other, (0, 0, 0, spare)) if other is not None else None
        linear = torch.ops.mkldnn._linear_pointwise
        if other is not None:
            out = linear.binary(rows, other, self._packed, self._bias, then)
        else:
            out = linear.default(rows, self._packed, self._bias, then, [], "")
        return out[:count] if spare else out


@contextlib.contextmanager
def plain(products: list[PackedLinear]) -> Iterator[None]:
    """Let the parameters of products be read and written."""
    for product in products:
        product.unpack()
    try:
        yield
    finally:
        for product in products:
            product.pack()


def _packs(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    half = weight.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return half or weight.dtype == torch.float32


def _joined(parameters: list[torch.nn.Parameter]) -> torch.Tensor:
    """Return parameters as one tensor, of which they become views."""
    if len(parameters) == 1:
        return parameters[0].data
    return _parts(parameters, torch.cat([parameter.data for parameter in parameters]))


def _parts(parameters: list[torch.nn.Parameter], whole: torch.Tensor) -> torch.Tensor:
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole


def _normed(hidden: torch.Tensor, norm: Any) -> torch.Tensor:
    """Return the root-mean-square norm, computed in float32."""
    weight, epsilon = norm.weight, norm.variance_epsilon
    if hidden.ndim == 2 and hidden.is_contiguous() and kernels.suit(hidden):
        return kernels.rms_norm(hidden, weight, epsilon)
    return functional.rms_norm(hidden, weight.shape, weight, epsilon)


class Head:
    def __init__(self, model: Any):
        self._linear = model.get_output_embeddings()
        tied = self._linear.weight is model.get_input_embeddings().weight
        self.product = PackedLinear(self._linear, kept=tied)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map [rows, hidden] to logits [rows, vocabulary]."""
        if hidden.device.type in _ROUNDS or self._linear.bias is not None:
            return self.product(hidden)
        return wide_product(hidden, self._linear.weight.t())
