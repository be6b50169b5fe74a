"""The self-check of a run's first batch: the packed forest against the plain path, log-probabilities and gradients.

First exactly: both are computed in float32 whatever the run computes in, so that rounding is far below any fault of packing, and
their largest difference is bounded. A bfloat16 run is then checked with its own kernels too: neither forest nor plain path is exact
there, so the forest may be only a few times further from the float32 path than the plain path is.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from learner.model import Policy
from learner.trees import SHARE_FROM, Path, cuts, micro_batches, pack

LOGPROB_BOUND, GRADIENT_BOUND = 1e-3, 1e-2
"""float32: largest difference of a log-probability, and of the whole gradient relative to its norm. Rounding is far below."""

NOISE_BOUND = 4.0
"""bfloat16: the forest's distance from the float32 path over the plain path's. Both are rounding, so it is near 1."""

LOGPROB_NOISE, GRADIENT_NOISE = 0.02, 0.1
"""The least noise that is assumed: a few tokens may happen to be hardly rounded on the plain path."""

SAMPLES = 2
"""Paths that each rank compares: the last of its forest and one in the middle, for the first branches off from nothing."""


class PackingError(RuntimeError):
    """The packed forward disagrees with the plain one: training would be wrong."""


def check(policy: Policy, paths: Sequence[Path]) -> bool:
    """Compare ``paths`` read as one forest with some of them read alone; raises PackingError when they disagree.

    False when the paths share nothing, so that nothing was checked. The same on every rank, so that sharded ranks make equally many
    forwards and all refuse together. Leaves no gradient behind.
    """
    if pack(paths).token_ratio < SHARE_FROM:
        return False
    # A few neighbours are enough, and each rank takes others: twice the longest path holds two of them at least.
    forests, _ = micro_batches(cuts(paths), 2 * max(len(path.tokens) for path in paths))
    paths = [paths[i] for i in forests[policy.ranks.rank % len(forests)]]
    sample = [((i + 1) * len(paths) // SAMPLES - 1) % len(paths) for i in range(SAMPLES)]
    exact, narrow = torch.float32, policy.compute != torch.float32
    # Flex would compile for minutes to run once in float32. Its rule is the dense mask's, and its own kernel is checked below.
    attention = "dense" if narrow and policy.device.startswith("cuda") else policy.config.attention
    with Wide() if narrow else contextlib.nullcontext():
        expected, slope = _plain(policy, paths, sample, exact), _gradient(policy)
        gap = _packed(policy, paths, sample, exact, attention) - expected
        far = _distance(policy, slope)
    _refuse(policy.ranks.largest(gap.abs().max()), LOGPROB_BOUND, "log-probabilities", "float32")
    _refuse(far, GRADIENT_BOUND, "gradients (relative)", "float32")
    if narrow:
        plain = _plain(policy, paths, sample, policy.compute) - expected, _distance(policy, slope)
        packed = _packed(policy, paths, sample, policy.compute, policy.config.attention) - expected
        far = _distance(policy, slope)
        sums = [float(gap.abs().sum()) for gap in (plain[0], packed)] + [float(len(expected))]
        noise, error, count = policy.ranks.add(torch.tensor(sums, dtype=torch.float64)).tolist()
        name = str(policy.compute).removeprefix("torch.")
        _refuse(error / count, NOISE_BOUND * max(noise / count, LOGPROB_NOISE), "log-probabilities (mean)", name)
        _refuse(far, NOISE_BOUND * max(plain[1], GRADIENT_NOISE), "gradients (relative)", name)
    return True


class Wide(TorchFunctionMode):
    """Products are taken in float32, also with weights that are kept or gathered in bfloat16."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            args = [a.float() if isinstance(a, torch.Tensor) else a for a in args]
        return func(*args, **(kwargs or {}))


def _plain(policy: Policy, paths: Sequence[Path], sample: list[int], compute: torch.dtype) -> torch.Tensor:
    """Log-probabilities of the sampled paths, each read alone; the gradient of their sum is left in the parameters."""
    made = []
    for i in sample:
        made.append(policy.read(policy.plain_row(paths[i]), compute=compute)[0])
        made[-1].sum().backward()
    return torch.cat(made).detach()


def _packed(
    policy: Policy, paths: Sequence[Path], sample: list[int], compute: torch.dtype, attention: Any
) -> torch.Tensor:
    """The same, read in the forest of all paths."""
    made = policy.read(policy.row(pack(paths, share=None), attention), compute=compute)[0].split(
        [len(p.tokens) - p.start for p in paths]
    )
    chosen = torch.cat([made[i] for i in sample])
    chosen.sum().backward()
    return chosen.detach()


def _gradient(policy: Policy) -> list[torch.Tensor]:
    """The gradients (this rank's shards of them), taken away from the parameters; a missing one is zero."""
    made = []
    for parameter in policy.trained().values():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        made.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        parameter.grad = None
    return made


def _distance(policy: Policy, slope: list[torch.Tensor]) -> float:
    """The distance of the gradients from ``slope`` relative to its norm, over all ranks; they are taken away."""
    squares = sum(float(((a - b) ** 2).sum()) for a, b in zip(_gradient(policy), slope, strict=True))
    scale = sum(float((b**2).sum()) for b in slope)
    squares, scale = policy.ranks.add(torch.tensor([squares, scale], dtype=torch.float64)).tolist()
    return (squares / max(scale, 1e-12)) ** 0.5


def _refuse(error: float, bound: float, what: str, dtype: str) -> None:
    if not error < bound:
        raise PackingError(
            f"the packed forward's {what} differ from the plain path's by {error:.2e} in {dtype} (allowed {bound:.0e}): this model's"
            " attention does not follow the tree; try learner.attention = 'dense' or another model class, and report this"
        )
