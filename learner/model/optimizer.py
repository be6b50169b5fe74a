"""AdamW with its schedule. Each model of the learner (policy, critic, reward model) has its own."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from coppice.learner.config import OptimizerConfig
from coppice.learner.model.ranks import Ranks, own_rows

_BLOCK = 2**30
"""Bytes of main memory that moments share. torch rounds pinned memory up to a power of two, which
for each moment alone took almost twice as much."""


def _hosts(moments: list[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield a tensor in main memory for each moment, without values."""
    block, used, left = torch.empty(0, dtype=torch.uint8), 0, sum(m.nbytes + 15 for m in moments)
    for moment in moments:
        if used + moment.nbytes > len(block):
            size = max(moment.nbytes, min(_BLOCK, left))
            block = torch.empty(size, dtype=torch.uint8, pin_memory=moment.is_cuda)
            used = 0
        yield block[used : used + moment.nbytes].view(moment.dtype).view(moment.shape)
        padded = -(-moment.nbytes // 16) * 16
        used, left = used + padded, left - padded


class Stepper:
    """Sums the gradients over the ranks, clips their norm and updates the parameters. Call ``step``
    after the backward passes."""

    def __init__(
        self, name: str, parameters: dict[str, torch.nn.Parameter], config: OptimizerConfig,
        ranks: Ranks,
    ):  # fmt: skip
        self.name, self.parameters, self.config, self.ranks = name, parameters, config, ranks
        settings: Any = {"betas": config.betas, "weight_decay": config.weight_decay}
        self.adamw = torch.optim.AdamW(list(parameters.values()), lr=config.lr, **settings)
        self._away: dict[torch.Tensor, torch.Tensor] = {}
        """The values of each moment that is not on the device."""

    @contextlib.contextmanager
    def moments(self) -> Iterator[None]:
        """Have the optimizer's moments on their device; outside, with ``offload``, they have no
        storage there, and their values are in main memory."""
        for moment, host in self._away.items():
            moment.untyped_storage().resize_(host.nbytes)
            moment.copy_(host)
        self._away = {}
        try:
            yield
        finally:
            states = self.adamw.state.values() if self.config.offload else ()
            moments = [own_rows(v)[0] for s in states for kind, v in s.items() if kind != "step"]
            for moment, host in zip(moments, _hosts(moments), strict=True):
                self._away[moment] = host.copy_(moment)
                moment.untyped_storage().resize_(0)

    def rate(self, version: int) -> float:
        """Return the learning rate of the update version -> version + 1: a linear warm-up, then
        constant, or a linear or cosine decay that reaches min_ratio x lr at decay_updates. It is a
        function of the version alone, so a resumed run goes on where it stopped."""
        c = self.config
        version, last = max(0, version - c.frozen_updates), c.decay_updates - c.frozen_updates
        if version < c.warmup_updates:
            return c.lr * (version + 1) / c.warmup_updates
        done = min(1.0, (version - c.warmup_updates) / max(1, last - c.warmup_updates))
        cosine = 0.5 * (1 + math.cos(math.pi * done))
        left = {"constant": 1.0, "linear": 1 - done, "cosine": cosine}[c.schedule]
        return c.lr * (c.min_ratio + (1 - c.min_ratio) * left)

    def step(self, version: int) -> float:
        """Make one step on the accumulated gradients. Returns their norm before clipping; raises
        RuntimeError if the norm is not finite."""
        trained = list(self.parameters.values())
        self.ranks.add_gradients(trained)
        norm = torch.nn.utils.clip_grad_norm_(trained, self.config.grad_clip)
        size = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not math.isfinite(size):
            raise RuntimeError(
                f"update {version + 1}: the {self.name}'s gradient norm is {size}: the run stops"
                " before the weights are spoilt. Resume with a lower learning rate or a tighter"
                " correction"
            )
        for group in self.adamw.param_groups:
            group["lr"] = self.rate(version)
        with self.moments():
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        return size
