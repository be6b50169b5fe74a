"""Wall time of the same number of updates with max_staleness = 0 over max_staleness = 4, with a
judge of heavy-tailed latency.

These are whole runs of the real processes. The default model is cut to two random layers, so that
the judge takes most of the time. The time is measured from the first training rollout to the last
update. The judges' process imports this module for its judge, so that nothing heavy is imported at
the top.
"""

import asyncio
import json
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from coppice.judges.exact_match import ExactMatch
from coppice.research.benches import launch_command, result
from coppice.tools.bootstrap import ROOT
from coppice.wire.messages import JudgedTurn, Judgement

UPDATES = 12


class SlowExactMatch(ExactMatch):
    """Takes median_s exp(sigma z) seconds per request, with z standard normal. Every tree asks this
    judge once, before the tree closes."""

    batch = 1

    def __init__(self, median_s: float = 1.0, sigma: float = 1.3, seed: int = 0):
        self.median_s, self.sigma, self.rng = median_s, sigma, random.Random(seed)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        await asyncio.sleep(self.median_s * self.rng.lognormvariate(0.0, self.sigma))
        return await super().score(turns)


def _seconds(folder: Path, model: Path, staleness: int) -> float:
    run = folder / f"staleness{staleness}"
    settings = {
        "model.name": f'"{model}"', "warm_start.steps": 0,
        "judges.use": f'{{slate_rules = {{}}, "{__name__}:SlowExactMatch" = {{}}}}',
        "scheduler.strategy_options": "{k = 2}", "scheduler.budget": 1,
        "scheduler.max_action_tokens": 4, "scheduler.updates": UPDATES,
        "scheduler.questions_per_update": 4, "scheduler.max_staleness": staleness,
        "scheduler.evaluation.questions": 0, "actors.count": 1, "learner.count": 1,
    }  # fmt: skip
    command = launch_command(run, ROOT / "configs" / "slate-cpu.toml", settings)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return records[-1]["time/training"]


def run() -> dict[str, Any]:
    """Return the seconds of both runs and their ratio."""
    from coppice.research.benches.prefill import random_copy

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = random_copy(folder / "model", num_hidden_layers=2)
        synchronous, asynchronous = (_seconds(folder, model, staleness) for staleness in (0, 4))
    seconds = {"synchronous_s": synchronous, "asynchronous_s": asynchronous}
    name = "wall time, synchronous / asynchronous, heavy-tailed judge"
    return result(name, synchronous / asynchronous, 1.5, "higher", **seconds)
