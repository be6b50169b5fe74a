"""The self-check of a run's first batch: the packed forest against the plain path, log-probabilities and gradients."""

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from learner.model import SHARE_FROM, Policy
from learner.trees import Path, pack

LOGPROB_BOUND = {torch.float32: 1e-3, torch.bfloat16: 0.25}
"""Largest log-probability difference: rounding is far below, a bug far above."""

GRADIENT_BOUND = {torch.float32: 1e-2, torch.bfloat16: 0.5}
"""Largest relative difference of the whole gradient."""

SAMPLES = 3
"""Paths that are compared, taken across the micro-batch."""


class PackingError(RuntimeError):
    """The packed forward disagrees with the plain one: training would be wrong."""


def check(policy: Policy, paths: Sequence[Path]) -> bool:
    """Compare ``paths`` read as one forest with some of them read alone; raises PackingError when they disagree.

    False when the paths share nothing, so that nothing was checked. The same on every rank, so that sharded ranks make equally many
    forwards and all refuse together. Leaves no gradient behind.
    """
    if pack(paths).token_ratio < SHARE_FROM:
        return False
    sample = range(0, len(paths), max(1, -(-len(paths) // SAMPLES)))
    counts = [len(p.tokens) - p.start for p in paths]
    packed = policy.logprobs(paths)[0].split(counts)
    torch.cat([packed[i] for i in sample]).sum().backward()
    together = _gradient(policy)
    worst = 0.0
    for i in sample:
        plain = policy.plain_logprobs(paths[i])
        worst = max(worst, float((plain - packed[i]).detach().abs().max()))
        plain.sum().backward()
    apart = _gradient(policy)
    squares = sum(float(((a - b) ** 2).sum()) for a, b in zip(together, apart, strict=True))
    scale = sum(float((b**2).sum()) for b in apart)
    sums = torch.tensor([squares, scale, worst], dtype=torch.float64)
    squares, scale, worst = policy.ranks.add(sums).tolist()  # worst: a sum over ranks, still far below its bound
    _refuse(worst, LOGPROB_BOUND[policy.compute], "log-probabilities")
    _refuse((squares / max(scale, 1e-12)) ** 0.5, GRADIENT_BOUND[policy.compute], "gradients (relative)")
    return True


def _gradient(policy: Policy) -> list[torch.Tensor]:
    """The gradients (this rank's shards of them), taken away from the parameters."""
    made = []
    for parameter in policy.trained().values():
        if parameter.grad is not None:
            grad = parameter.grad
            made.append((grad.to_local() if isinstance(grad, DTensor) else grad).clone())
            parameter.grad = None
    return made


def _refuse(error: float, bound: float, what: str) -> None:
    if not error < bound:
        raise PackingError(
            f"the packed forward's {what} differ from the plain path's by {error:.2e} (allowed {bound:.0e}): this model's"
            " attention does not follow the tree; try learner.attention = 'dense' or another model class, and report this"
        )
