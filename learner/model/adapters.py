"""A linear layer with its adapter, x W' + b + s (x A') B', in fewer passes over memory than PEFT
takes: sums are made in place, and an input is converted once for all layers that read it."""

from typing import Any

import torch
from peft.tuners.lora import Linear
from torch.autograd.function import once_differentiable
from torch.nn import functional


class _Product(torch.autograd.Function):
    """(input [rows, in], frozen weight [out, in] and bias, A [rank, in], B [out, rank], scale)
    -> [rows, out], all of one number type."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
        a: torch.Tensor, b: torch.Tensor, scale: float,
    ) -> torch.Tensor:  # fmt: skip
        inner = torch.mm(rows, a.t()).mul_(scale)
        ctx.save_for_backward(rows, weight, a, b, inner)
        ctx.scale = scale
        return functional.linear(rows, weight, bias).addmm_(inner, b.t())

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        rows, weight, a, b, inner = ctx.saved_tensors
        above = gradients[0]
        slope = torch.mm(above, b).mul_(ctx.scale)
        below = torch.mm(above, weight).addmm_(slope, a) if ctx.needs_input_grad[0] else None
        return below, None, None, torch.mm(slope.t(), rows), torch.mm(above.t(), inner), None


class Adapted(Linear):
    """PEFT's layer with another forward. It takes plain adapters without dropout, named "default",
    on a frozen layer."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        # bfloat16 without autocast is what the self-check computes in float32
        kind, dtype = x.device.type, torch.promote_types(x.dtype, torch.float32)
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        base: Any = self.get_base_layer()
        a, b = self.lora_A["default"].weight, self.lora_B["default"].weight
        bias = None if base.bias is None else base.bias.to(dtype)
        weight, a, b = (tensor.to(dtype) for tensor in (base.weight, a, b))
        rows = _converted(x, dtype).flatten(0, -2)
        with torch.autocast(kind, enabled=False):
            out: Any = _Product.apply(rows, weight, bias, a, b, self.scaling["default"])
        return out.unflatten(0, x.shape[:-1])


def _converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a layer's input in a number type, of which ``x`` keeps one copy for the next layer."""
    if x.dtype == dtype or (x.is_leaf and x.requires_grad):
        return x.to(dtype)  # a leaf would hold its copy, whose gradient holds the leaf
    copy: torch.Tensor | None = getattr(x, "_converted", None)
    if copy is None or copy.dtype != dtype or copy.requires_grad != x.requires_grad:
        copy = x.to(dtype)
        x._converted = copy  # pyright: ignore[reportAttributeAccessIssue]
    return copy


def install(model: torch.nn.Module) -> None:
    """Let the linear layers that PEFT has adapted in ``model`` compute so."""
    for module in model.modules():
        if type(module) is Linear and type(module.get_base_layer()) is torch.nn.Linear:
            module.__class__ = Adapted
