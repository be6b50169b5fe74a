"""Processor time of one scheduler over that of each of two that share its work (``scheduler.shards``), for the same number of updates.

Whole runs of the real processes, in the world of tools/chaos: a tiny policy that always searches, two actors, one learner rank. They are forks of
one process, so that a run starts within two seconds. One and two schedulers take turns. Linux only.
"""

import os
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil

from tools.research.chaos import SETTINGS
from wire import shards
from wire.numbers import Count

WARM, QUESTIONS = 3, 16
"""Updates before the measurement, and the questions of each update."""
PATIENCE_S = 300.0


def _seconds(world: Path, count: int, number: int, updates: int) -> list[float]:
    """Return the processor seconds that each of ``count`` schedulers takes for ``updates`` updates."""
    from tools.research.chaos.run import Run  # it imports what all processes need, after the settings of their threads

    run = Run(world, world / f"run-{number}")
    settings = {
        "scheduler.shards": count,
        "scheduler.questions_per_update": QUESTIONS,
        "learner.count": 1,
        "learner.checkpoint_every": 10,
    }
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    names = [shards.called("scheduler", place) for place in range(count)]

    def taken(version: int) -> list[float]:
        run.wait(lambda: run.version() >= version, f"version {version}", PATIENCE_S)
        return [sum(psutil.Process(run.pids()[name]).cpu_times()[:2]) for name in names]

    try:
        run.launch("--config", str(world / "chaos.toml"), "--run-folder", str(run.folder), *changes)
        before, after = taken(WARM), taken(WARM + updates)
        return [end - start for start, end in zip(before, after, strict=True)]
    finally:
        run.close()
        run.ended()


def run(updates: Count = 15, rounds: Count = 2) -> dict[str, Any]:
    """Return the seconds of every scheduler, and the ratio of their means."""
    os.environ |= SETTINGS
    from tools.research.chaos import world

    world.PACE_S = 0.02
    with tempfile.TemporaryDirectory() as scratch:
        world.make(Path(scratch))
        pairs = [
            [_seconds(Path(scratch), count, 2 * turn + count, updates) for count in (1, 2)] for turn in range(rounds)
        ]
    alone, shared = ([seconds for pair in pairs for seconds in pair[kind]] for kind in (0, 1))
    row = {"name": "processor time, one scheduler / each of two", "ratio": fmean(alone) / fmean(shared)}
    return row | {"goal": 1.7, "better": "higher", "one_s": alone, "two_s": shared, "trees": updates * QUESTIONS}
