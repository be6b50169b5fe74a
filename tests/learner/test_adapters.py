"""An adapted layer computes what PEFT's own does, and trains the same."""

import gc
import weakref
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.testing import assert_close

from coppice.learner.model.adapters import Adapted, install


class Two(torch.nn.Module):
    """Two layers that read the same input, as queries and keys do."""

    def __init__(self, bias: bool):
        super().__init__()
        self.one, self.other = (torch.nn.Linear(24, width, bias=bias) for width in (40, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((self.one(x), self.other(x)), -1)


def made(bias: bool, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    settings: Any = {"r": 4, "lora_alpha": 12, "target_modules": ["one", "other"]}
    model: Any = get_peft_model(Two(bias).to(dtype), LoraConfig(**settings))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return model


def computed(model: Any, x: torch.Tensor, narrow: bool) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        out = model(torch.nn.functional.layer_norm(x, x.shape[-1:]))
        with torch.no_grad(), model.disable_adapter():
            plain = model(x)
    out.float().square().sum().backward()
    trained = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(trained) == 4 and all(grad is not None for grad in trained)
    return [out, plain, x.grad, *trained]  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "narrow", "near"),
    [(torch.float64, False, 1e-12), (torch.float32, False, 1e-5), (torch.float32, True, 0.02)],
)
def test_outputs_and_gradients_are_those_of_peft(
    bias: bool, dtype: torch.dtype, narrow: bool, near: float
) -> None:
    ours, theirs = made(bias, dtype), made(bias, dtype)
    install(ours)
    assert sum(isinstance(module, Adapted) for module in ours.modules()) == 2
    x = torch.randn(1, 7, 24, dtype=dtype)
    for one, other in zip(computed(ours, x, narrow), computed(theirs, x, narrow), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert (one - other).double().norm() <= near * other.double().norm()
    merged = [model.merge_and_unload()(x) for model in (ours, theirs)]
    assert_close(*merged, atol=0, rtol=0)


def test_an_input_is_converted_once() -> None:
    model, x = made(False, torch.float32), torch.randn(1, 7, 24, requires_grad=True)
    install(model)
    conversions: list[torch.Tensor] = []

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.bfloat16 and tensor.shape == (7, 24):
            conversions.append(tensor)
        return tensor

    watched = torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor)
    with watched, torch.autocast("cpu", torch.bfloat16):
        model(x * 2.0)
    assert len(conversions) == 2 and conversions[0].data_ptr() == conversions[1].data_ptr()


def test_an_input_that_is_a_leaf_is_freed() -> None:
    """With gradient checkpointing the embeddings are leaves that require a gradient."""
    model, x = made(False, torch.float32), torch.randn(1, 7, 24).requires_grad_()
    install(model)
    with torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.float().sum().backward()
    left = weakref.ref(x)
    del x, out
    gc.collect()
    assert left() is None
