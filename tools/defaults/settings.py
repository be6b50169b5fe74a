"""The folder in which the defaults are cached, and the settings of warm starts."""

import contextlib
import functools
import hashlib
import os
from pathlib import Path

import msgspec

from coppice.common.numbers import Count, Natural, Positive, Share
from coppice.tools.bootstrap import CHECKOUT, ROOT, SOURCE


def cache_folder() -> Path:
    """Return the folder that COPPICE_CACHE names, else .cache in a checkout, else the user's."""
    usual = ROOT / ".cache" if CHECKOUT else Path.home() / ".cache" / "coppice"
    return Path(os.environ.get("COPPICE_CACHE", usual)).resolve()


@functools.cache
def importable() -> Path:
    """Return a folder from which processes import this package, and which holds nothing else: what
    stands beside an installed package must not reach another Python."""
    if CHECKOUT:
        return SOURCE
    folder = cache_folder() / "import" / hashlib.sha256(bytes(ROOT)).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / ROOT.name).symlink_to(ROOT)
    return folder


class WarmStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [warm_start]: supervised steps before the run, after which the policy writes usable
    actions."""

    steps: Natural = 7
    """Optimizer steps; 0 switches the warm start off."""
    rows: Count = 8
    """Examples of a step."""
    lr: Positive = 1e-4
    """The largest learning rate."""
    warmup: Natural = 4
    """Steps over which the learning rate rises."""
    two_hop: Share = 0.5
    """Share of two-hop questions among the traces' questions."""
    skill: Share = 0.0
    """Share of good moves (``Game.good_moves``), or in an adapter of tasks played to a success."""
    seed: int = 1
    """Draws the examples."""
