"""The policy versions that a run still holds: the newest ones (learner.keep) and the best on the held-out tasks."""

import argparse
from pathlib import Path

from scheduler import best

BEST = "best"


def argument(text: str) -> int | str:
    """Of a command line. Raises argparse.ArgumentTypeError."""
    if text == BEST or text.isdecimal():
        return text if text == BEST else int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected a version's number, or best")


def chosen(run: Path, version: int | str | None) -> tuple[int, Path | None]:
    """The version and the folder of its weights; None is the newest, "best" the best, and 0 the model of the start, without a folder.

    Raises ValueError that says what there is.
    """
    kept = {int(path.name[1:]): path for path in (run / "weights").glob("v??????")}
    found = best.read(run)
    if found is not None and found[0].version:
        kept = {found[0].version: found[1]} | kept
    if version == BEST:
        if found is None:
            raise ValueError(f"--version best: {run} has no held-out evaluation that was kept (scheduler.evaluation)")
        # Not the newest of that number: a run that went on from a checkpoint may have made it anew.
        return found[0].version, found[1] if found[0].version else None
    number = max(kept, default=0) if version is None else int(version)
    if number and number not in kept:
        told = f", best {found[0].version}" if found is not None else ""
        raise ValueError(f"--version {number}: {run} holds {sorted(kept)} (the newest learner.keep{told}), and 0")
    return number, kept.get(number)
