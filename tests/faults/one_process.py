"""Whole runs in one process each: python -m tests.faults.one_process FOLDER. FOLDER/lives.json
names the runs and where each life ends: by SIGKILL at its crash point, the last one with the run.

Scheduler, embedded engine and learner are the real ones, on one event loop over real sockets. Every
life is a fork of a process that has imported everything.
"""

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from coppice.actors import worker
from coppice.actors.config import ActorProcess
from coppice.actors.engines import local
from coppice.common import loop
from coppice.learner import main as learner
from coppice.learner.config import LearnerProcess
from coppice.learner.model import checkpoint
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.trainer import Trainer
from coppice.scheduler.config import SchedulerProcess
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.main import Run
from coppice.scheduler.telemetry.metrics import Metrics
from coppice.tools.launching import config, processes
from coppice.tools.launching.settings import Assets
from tests.updates import newest

UPDATES, QUESTIONS = 8, 2

POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before a group is journaled": (Journal, "save_group", 2, False),
    "after a group is journaled, before it is sent": (Journal, "save_group", 3, True),
    "after a tree is journaled, before the learner knows": (Journal, "close_tree", 4, True),
    "in an update, after the optimizer's step": (Stepper, "step", 2, True),
    "in the publication of weights": (learner, "publish_newest", 3, False),
    "between publication and checkpoint": (learner.Leader, "_checkpoint", 2, False),
    "in a checkpoint, before it has its name": (checkpoint.digest, "write_sums", 1, False),
    "after a checkpoint, before the answers": (learner.Leader, "_answer", 2, False),
    "after the answers, before they are journaled": (Journal, "mark_trained", QUESTIONS + 1, False),
    "between two marks of one update": (Journal, "mark_trained", QUESTIONS + 1, True),
    "after the marks, before the update's record": (Metrics, "record", 2, False),
    "in a generation": (local.LocalEngine, "_generate", 9, False),
}
"""Where a life may end: object, function, the call of this life in which it ends, and whether the
call is done then."""


SETTINGS = f"""
scheduler.updates={UPDATES} scheduler.questions_per_update={QUESTIONS} scheduler.judge=none
scheduler.strategy=full scheduler.strategy_options={{k=3}} scheduler.max_action_tokens=3
data.options={{prompt='tictactoe_compact',opponents={{random=1.0}}}} judges.use={{}}
actors.kv_cache_gib=0.01 actors.max_context=96 learner.scheme=grpo
learner.scheme_options={{column='outcome'}} learner.lr=1e-2 learner.kl_coef=0.01
"""


class Plan(msgspec.Struct, frozen=True):
    """A run and the crash points of its lives; the last life has none. settings: more of them.
    damage: a bit of the newest checkpoint flips after each crash."""

    settings: str
    points: list[str]
    damage: bool = False


def arm(point: str) -> None:
    owner, name, call, done = POINTS[point]
    function, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        result = function(*arguments, **options) if calls < call or done else None
        if calls >= call:
            if done and owner is Journal:
                arguments[0].flush()  # the end of this turn of the loop has come
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)


async def live(folder: Path) -> None:
    scheduling, acting, learning = (
        msgspec.json.decode((folder / "processes" / f"{name}.json").read_bytes(), type=kind)
        for name, kind in (
            ("scheduler", SchedulerProcess), ("actor-0", ActorProcess), ("learner", LearnerProcess),
        )
    )  # fmt: skip
    (folder / "endpoint").unlink(missing_ok=True)
    trainer = Trainer(learning, Ranks(60))
    # the engine switches gradients off in threads that both use
    trainer.update = torch.enable_grad()(trainer.update)
    state, warnings = checkpoint.restore_newest(trainer, folder)
    run = Run(scheduling)
    main = asyncio.create_task(run.main())
    while not (folder / "endpoint").exists():
        await asyncio.sleep(0.001)
    parts = [main, asyncio.create_task(worker.run(acting))]
    parts.append(asyncio.create_task(learner.lead(trainer, learning, state, warnings)))
    try:
        done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
        for part in done:
            part.result()
    finally:
        await run.close()


def forked(work: Callable[[], None]) -> int:
    """Return the process id of a fork that does ``work``."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        if code:
            traceback.print_exc()
        os._exit(code)


def follow(folder: Path, plan: Plan) -> None:
    """Live the lives of a run, and write how each ended."""

    def life() -> None:
        if point:
            arm(point)
        loop.run(live(folder))

    codes: list[int] = []
    for point in [*plan.points, ""]:
        codes.append(os.waitstatus_to_exitcode(os.waitpid(forked(life), 0)[1]))
        if point and plan.damage and (last := newest(folder)) is not None:
            content = bytearray((last / "policy-00000.safetensors").read_bytes())
            content[len(content) // 2] ^= 1
            (last / "policy-00000.safetensors").write_bytes(content)
    (folder / "codes.json").write_bytes(msgspec.json.encode(codes))


def main(place: Path) -> None:
    plans = msgspec.json.decode((place / "lives.json").read_bytes(), type=dict[str, Plan])
    for name, plan in plans.items():
        words = f"{SETTINGS} {plan.settings}".split()
        assets = Assets(str(place / "model"), "", "", "")
        processes.make(config.load(place / "config.toml", words), assets, place / name)
    runs = [forked(partial(follow, place / name, plan)) for name, plan in plans.items()]
    for pid in runs:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
