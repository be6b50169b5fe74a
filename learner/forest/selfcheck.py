"""The self-check of a run's first batch compares log-probabilities and gradients of the packed
forest with those of plain paths, first in float32, where rounding is far below any fault of
packing. A bfloat16 run is also checked with its own kernels: there the forest's distance from the
float32 path may be at most a few times the plain path's distance.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers.integrations import moe

from coppice.learner.forest.trees import SHARE_FROM, Path, cuts, micro_batches, pack
from coppice.learner.model.model import TreeModel

LOGPROB_BOUND, GRADIENT_BOUND = 1e-3, 1e-2
"""Bounds in float32: the largest difference of a log-probability, and the gradient's relative
distance. Rounding is far below both."""

NOISE_BOUND = 4.0
"""Bound in bfloat16: the forest's distance from the float32 path / the plain path's distance. Both
come from rounding, so the ratio is near 1."""

LOGPROB_NOISE, GRADIENT_NOISE = 0.02, 0.1
"""Lower bounds of the plain path's distance, because by chance rounding may hardly change a few
tokens."""

SAMPLES = 2
"""The number of paths that each rank compares: the last of its forest and one in the middle, since
the first path branches off from no other."""


class PackingError(RuntimeError):
    """The packed forward disagrees with the plain one: training would be wrong."""


def check(policy: TreeModel, paths: Sequence[Path], again: bool = False) -> bool:
    """Compare ``paths`` read as one forest with some of them read alone. Raises PackingError, on
    every rank, if they disagree. Returns whether they share prefixes; paths that do not are packed
    one after the other, and nothing of one may reach the next, which is proven once: not again.
    """
    shared = pack(paths).token_ratio >= SHARE_FROM
    if again and not shared:
        return False
    # A few neighbouring paths are enough, and each rank takes different ones. Twice the longest
    # path has room for at least two.
    forests, _ = micro_batches(cuts(paths), 2 * max(len(path.tokens) for path in paths))
    paths = [paths[i] for i in forests[policy.ranks.rank % len(forests)]]
    sample = [((i + 1) * len(paths) // SAMPLES - 1) % len(paths) for i in range(SAMPLES)]
    exact, narrow = torch.float32, policy.compute != torch.float32
    # Flex would compile for minutes to run once in float32. The dense mask follows the same rule;
    # flex's own kernel is checked below.
    attention = "dense" if narrow and policy.device.startswith("cuda") else policy.config.attention
    with wide() if narrow else contextlib.nullcontext():
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
        bound = NOISE_BOUND * max(noise / count, LOGPROB_NOISE)
        _refuse(error / count, bound, "log-probabilities (mean)", name)
        _refuse(far, NOISE_BOUND * max(plain[1], GRADIENT_NOISE), "gradients (relative)", name)
    return shared


@contextlib.contextmanager
def wide() -> Iterator[None]:
    """Compute products in float32, even if the weights are kept or gathered in bfloat16. The whole
    process is patched: gradient checkpointing computes again during backward, for which a
    TorchFunctionMode is not in force, and on CUDA in another thread."""
    linear, grouped = torch.nn.functional.linear, moe._grouped_mm

    def in_float32(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(input.float(), weight.float(), None if bias is None else bias.float())

    def experts(input: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        return grouped(input.float(), weight.float(), offs)

    torch.nn.functional.linear, moe._grouped_mm = in_float32, experts
    try:
        yield
    finally:
        torch.nn.functional.linear, moe._grouped_mm = linear, grouped


def _plain(policy: TreeModel, paths: list[Path], sample: list[int], compute: torch.dtype) -> Tensor:
    """Return the log-probabilities of the sampled paths, each read alone; the gradients of their
    sum remain."""
    logprobs = []
    for i in sample:
        logprobs.append(policy.read(pack([paths[i]]), compute=compute, attention="causal")[0])
        logprobs[-1].sum().backward()
    return torch.cat(logprobs).detach()


def _packed(
    policy: TreeModel, paths: list[Path], sample: list[int], compute: torch.dtype, attention: Any
) -> Tensor:
    """Return the same log-probabilities, read in the forest of all paths."""
    logprobs = policy.read(pack(paths, share=None), compute=compute, attention=attention)[0]
    of_path = logprobs.split([len(path.tokens) - path.start for path in paths])
    chosen = torch.cat([of_path[i] for i in sample])
    chosen.sum().backward()
    return chosen.detach()


def _gradient(policy: TreeModel) -> list[Tensor]:
    """Return this rank's gradients (or shards of gradients) and remove them from the parameters. A
    missing gradient counts as zero."""
    gradients = []
    for parameter in policy.trained().values():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        gradients.append(grad.to_local() if isinstance(grad, DTensor) else grad)
        parameter.grad = None
    return gradients


def _distance(policy: TreeModel, slope: list[Tensor]) -> float:
    """Return the distance of the gradients from ``slope``, relative to the norm of ``slope``, over
    all ranks. Removes the gradients."""
    gaps = zip(_gradient(policy), slope, strict=True)
    squares = sum(float(((a - b) ** 2).sum()) for a, b in gaps)
    scale = sum(float((b**2).sum()) for b in slope)
    squares, scale = policy.ranks.add(torch.tensor([squares, scale], dtype=torch.float64)).tolist()
    return (squares / max(scale, 1e-12)) ** 0.5


def _refuse(error: float, bound: float, quantity: str, dtype: str) -> None:
    if not error < bound:
        raise PackingError(
            f"the packed forward's {quantity} differ from the plain path's by {error:.2e} in"
            f" {dtype} (allowed {bound:.0e}): this model's attention does not follow the tree; try"
            " learner.attention = 'dense' or another model class, and report this"
        )
