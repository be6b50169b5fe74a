"""Faults of packing, planted where the policy packs its paths; each is one mistake that a packer
could make."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from coppice.learner.forest import selfcheck
from coppice.learner.forest.selfcheck import PackingError
from coppice.learner.forest.trees import Forest, Path, pack
from coppice.learner.update.trainer import Trainer


def _branches(forest: Forest) -> np.ndarray:
    """The first node of every branch: a node whose predecessor in the layout is not its parent."""
    index = np.arange(1, len(forest.end))
    return index[forest.depth[1:] <= forest.depth[:-1]]


def wrong_position(forest: Forest) -> Forest:
    """Each branch after the first begins one position too far on."""
    depth = forest.depth.copy()
    depth[_branches(forest)] += 1
    return msgspec.structs.replace(forest, depth=depth)


def sibling_visible(forest: Forest) -> Forest:
    """The token before each branch, the end of a sibling, is seen by the branch's first token."""
    end, first = forest.end.copy(), _branches(forest)
    end[first - 1] = first + 1
    return msgspec.structs.replace(forest, end=end)


def missing_ancestor(forest: Forest) -> Forest:
    """One token of the trunk is seen by itself alone."""
    end = forest.end.copy()
    end[1] = 2
    return msgspec.structs.replace(forest, end=end)


def shifted_target(forest: Forest) -> Forest:
    """Each log-probability is that of the next token's target."""
    return msgspec.structs.replace(forest, target=np.roll(forest.target, -1))


def wrong_parent(forest: Forest) -> Forest:
    """A branch's first token reads the node before it in the layout instead of its parent's."""
    read, first = forest.read.copy(), np.r_[True, np.diff(forest.read) != 1]
    read[first] += 1
    return msgspec.structs.replace(forest, read=np.minimum(read, len(forest.end) - 1))


FAULTS: dict[str, Callable[[Forest], Forest]] = {
    fault.__name__: fault
    for fault in (wrong_position, sibling_visible, missing_ancestor, shifted_target, wrong_parent)
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The policy packs with a fault; "" plants none."""

    def faulty(paths: Sequence[Path], share: bool | None = True) -> Forest:
        return FAULTS[name](pack(paths, share)) if name else pack(paths, share)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(selfcheck, "pack", faulty)
        yield


def refused(made: Trainer, paths: Sequence[Path]) -> dict[str, str]:
    """For each fault, and for none (""), the refusal's sentence; "" where there was none."""
    found = {}
    for name in ("", *FAULTS):
        with planted(name):
            try:
                assert selfcheck.check(made.policy, paths), (
                    "the paths share too little to be checked"
                )
                found[name] = ""
            except PackingError as error:
                found[name] = str(error)
    return found
