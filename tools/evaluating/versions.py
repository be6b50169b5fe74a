"""The policy versions that a run still holds: the newest ones, and the best one on the
held-out tasks."""

import argparse
from pathlib import Path

from coppice.common import jsonl
from coppice.common.frontier import Frontier
from coppice.scheduler.evaluation import best

BEST = "best"


def argument(text: str) -> int | str:
    """Parse the value of --version. Raises argparse.ArgumentTypeError."""
    if text == BEST or text.isdecimal():
        return text if text == BEST else int(text)
    raise argparse.ArgumentTypeError(f"{text!r}: expected a version's number, or best")


def chosen(run: Path, version: int | str | None) -> tuple[int, Path | None]:
    """The chosen version and the folder of its weights. Raises ValueError that names the versions
    the run holds.

    version: None chooses the newest, "best" the best, and 0 the model of the start, which has no
    folder.
    """
    kept = {int(path.name[1:]): path for path in (run / "weights").glob("v??????")}
    learner = run / "learner.json"
    if version is None and not kept and learner.is_file():
        written = "what the learner wrote: copy it again"
        if trained := jsonl.whole(learner, Frontier, written).version:
            lacking = f"{run / 'weights'} holds none of the {trained} versions of this run"
            remedy = "copy that folder again (learner.publish=memory makes none)"
            raise ValueError(f"{lacking}: {remedy}, or choose a --version")
    record, own = best.read(run), kept  # a crash may have undone the best
    if record is not None and record[0].version:
        kept = {record[0].version: record[1]} | kept
    if version == BEST:
        if record is None:
            lacks = "has no held-out evaluation that was kept (scheduler.evaluation)"
            raise ValueError(f"--version best: {run} {lacks}")
        # Not kept[version]: a resumed run may have trained another version of that number.
        return record[0].version, record[1] if record[0].version else None
    number = max(own or kept, default=0) if version is None else int(version)
    if number and number not in kept:
        which = "the newest" + (f", best {record[0].version}" if record else "")
        raise ValueError(f"--version {number}: {run} holds {sorted(kept)} ({which}), and 0")
    return number, kept.get(number)
