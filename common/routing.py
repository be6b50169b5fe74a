"""The experts that the routers of a mixture choose, by position and layer. The learner can route a
token as the engine did (``learner.routing_replay``), because both round differently.

Experts are int16 [positions, layers * k], NO_EXPERT in layers without a router. The row of a token
in a tree's node is that of the position before it, which predicts the token: so all rows of an
action are there when it has been sampled.
"""

import functools
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from coppice.wire.messages import NO_EXPERT


class Routers:
    """The routers of a causal language model, whose forwards are wrapped. chosen: by layer, what
    each chose itself in the last forward, int64 [rows, k]. Layers take an argument ``experts``,
    int64 [rows, layers, k], which replaces the choice of the rows that it knows."""

    def __init__(self, model: Any):
        layers = model.get_decoder().layers
        self.layers, self.chosen = len(layers), dict[int, torch.Tensor]()
        self._given: dict[int, torch.Tensor | None] = {}
        self._differing = self._compared = torch.zeros(())
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if type(module).__name__.lower().endswith("topkrouter"):
                    self._given[number] = None
                    module.forward = functools.partial(self._route, number, module, module.forward)
        for number, layer in enumerate(layers if self else ()):
            take = functools.partial(self._take, number)
            layer.register_forward_pre_hook(take, with_kwargs=True)

    def __bool__(self) -> bool:
        return bool(self._given)

    def rows(self) -> np.ndarray:
        """Return what the routers chose in the last forward, int16 [rows, layers * k]."""
        some = next(iter(self.chosen.values()))
        rows = torch.full((len(some), self.layers, some.shape[1]), NO_EXPERT, dtype=torch.int16)
        for number, chosen in self.chosen.items():
            rows[:, number] = chosen.to("cpu", torch.int16)
        return rows.flatten(1).numpy()

    def differing(self) -> dict[str, float]:
        """Return the sums since the last call: given choices that the routers would not have made,
        and given choices (a choice: the k experts of a token in a layer)."""
        sums = {"differing": float(self._differing), "compared": float(self._compared)}
        self._differing = self._compared = torch.zeros(())
        return sums

    def _take(self, number: int, _: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # here and not once per forward: gradient checkpointing calls a layer again with its own
        experts = kwargs.pop("experts", None)
        if number in self._given:
            self._given[number] = None if experts is None else experts[:, number]
        return args, kwargs

    def _route(self, number: int, router: Any, forward: Any, *args: Any, **kwargs: Any) -> Any:
        given = self._given[number]
        with _Selection(router.top_k, router.num_experts, given) as selection:
            result = forward(*args, **kwargs)
        self.chosen[number] = own = selection.own
        if given is not None:
            told = given[:, 0] >= 0
            differs = (own.sort(-1).values != given.sort(-1).values).any(-1) & told
            self._differing = self._differing.to(own.device) + differs.sum()
            self._compared = self._compared.to(own.device) + told.sum()
        return result


class _Selection(TorchFunctionMode):
    """Notes a router's selection of ``k`` of its ``experts``, the last topk of these sizes, and
    replaces it where ``given`` [rows, k] is known. The router weighs them as its own choice."""

    def __init__(self, k: int, experts: int, given: torch.Tensor | None):
        super().__init__()
        self.sizes, self.given, self.own = (k, experts), given, torch.zeros(())

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "topk":
            return result
        # routers with groups of experts choose groups first, by scores [rows, groups, experts]
        if (result.indices.shape[-1], args[0].shape[-1]) != self.sizes or args[0].ndim != 2:
            return result
        self.own = result.indices
        if self.given is None:
            return result
        if self.given.shape != self.own.shape or int(self.given.max()) >= self.sizes[1]:
            raise ValueError(
                f"given experts {list(self.given.shape)} up to {int(self.given.max())}: expected"
                f" {list(self.own.shape)} below {self.sizes[1]}; the engine's model is another one"
            )
        experts = torch.where(self.given >= 0, self.given, self.own)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))
