"""The folder in which the defaults are cached, and the settings of warm starts."""

import os
from pathlib import Path

import msgspec

from coppice.common.numbers import Count, Natural, Positive, Share
from coppice.tools.bootstrap import ROOT


def cache_folder() -> Path:
    """Return the folder that COPPICE_CACHE names, or .cache in the checkout."""
    return Path(os.environ.get("COPPICE_CACHE", ROOT / ".cache")).resolve()


class WarmStart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [warm_start]. steps = 0 switches the warm start off. two_hop: share of two-hop
    questions among the traces' questions.

    skill: the share of a game's moves that are good ones (``Game.good_moves``) instead of random
    ones.
    """

    steps: Natural = 7
    rows: Count = 8
    lr: Positive = 1e-4
    warmup: Natural = 4
    two_hop: Share = 0.5
    skill: Share = 0.0
    seed: int = 1
