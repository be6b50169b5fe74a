"""What a run needs before its processes start; the set-up itself runs apart, so that who waits for it never holds torch."""

import os
from pathlib import Path

import msgspec

from tools.apart import Killed, apart
from tools.bootstrap import ROOT
from tools.config import Config


class Assets(msgspec.Struct, frozen=True):
    """Resolved paths. train, heldout: "" where the environment makes its tasks. retriever: an index folder, a URL, or "" for none.
    judge_model: the folder of [judges.model], "" for none."""

    model: str
    train: str | list[str]
    heldout: str | list[str]
    retriever: str
    judge_model: str = ""


def cache_folder() -> Path:
    """COPPICE_CACHE, or .cache in the checkout."""
    return Path(os.environ.get("COPPICE_CACHE", ROOT / ".cache")).resolve()


def prepare(config: Config) -> Assets:
    """Make or find everything; raises FileNotFoundError, ValueError or MemoryError with the remedy."""
    try:
        return apart(_prepare, config)
    except Killed:
        raise MemoryError(
            "the set-up's process was killed, most likely for memory: free some, then start again"
        ) from None


def _prepare(config: Config) -> Assets:
    from tools import set_up  # it imports torch

    return set_up.prepare(config)
