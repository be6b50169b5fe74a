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
from coppice.actors.config import ActorProcess, ActorsConfig
from coppice.actors.engines import local
from coppice.common import loop
from coppice.common.process import die_with
from coppice.learner import main as learner
from coppice.learner.config import LearnerConfig, LearnerProcess, LoraConfig
from coppice.learner.model import checkpoint
from coppice.learner.model.optimizer import Stepper
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.trainer import Trainer
from coppice.scheduler.config import EvaluationConfig, SchedulerConfig, SchedulerProcess
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.main import Run
from coppice.scheduler.telemetry.metrics import Metrics
from tests.updates import newest

UPDATES, QUESTIONS = 8, 2

POINTS: dict[str, tuple[Any, str, int, bool]] = {
    "before a group is journaled": (Journal, "save_group", 2, False),
    "after a group is journaled, before it is sent": (Journal, "save_group", 3, True),
    "after a tree is journaled, before the learner knows": (Journal, "close_tree", 4, True),
    "in an update, after the optimizer's step": (Stepper, "step", 2, True),
    "in the publication of weights": (learner.Publisher, "publish", 3, False),
    "between publication and checkpoint": (learner.Leader, "_checkpoint", 2, False),
    "in a checkpoint, before it has its name": (checkpoint.digest, "write_sums", 1, False),
    "after a checkpoint, before the answers": (learner.Leader, "_answer", 2, False),
    "after the answers, before they are journaled": (Journal, "mark_trained", QUESTIONS + 1, False),
    "between two marks of one update": (Journal, "mark_trained", QUESTIONS + 1, True),
    "after the marks, before the update's record": (Metrics, "record", 2, False),
    "between two removals of old trees": (Journal, "remove", 1, True),
    "in a generation": (local.LocalEngine, "_generate", 9, False),
}
"""Where a life may end: object, function, which call of it, and whether the call is done then."""


class Plan(msgspec.Struct, frozen=True):
    """A run and the crash points of its lives; the last life has none. damage: a bit of the newest
    checkpoint flips after each crash. keep: the versions whose trees stay. sifted: how many trees
    without a difference each update may replace."""

    model: str
    checkpoint_every: int
    points: list[str]
    damage: bool = False
    staleness: int = 0
    deterministic: bool = True
    keep: int = 0
    sifted: int = 0


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


def processes(folder: Path, plan: Plan) -> tuple[SchedulerProcess, ActorProcess, LearnerProcess]:
    settings = SchedulerConfig(
        strategy="full", strategy_options={"k": 3}, judge="none", updates=UPDATES,
        questions_per_update=QUESTIONS, max_staleness=plan.staleness, max_action_tokens=3,
        evaluation=EvaluationConfig(questions=0), keep_versions=plan.keep,
        dynamic_sampling_budget=plan.sifted,
    )  # fmt: skip
    options = {"prompt": "tictactoe_compact", "opponents": {"random": 1.0}}
    scheduler = SchedulerProcess(
        "scheduler", str(folder), 0, plan.model, "tests.games:AnyText", options, "", "", 1, [], 16,
        settings, 96, deterministic=plan.deterministic, reward="outcome",
    )  # fmt: skip
    actors = ActorsConfig(dtype="float32", kv_cache_gib=0.01, max_context=96)
    config = LearnerConfig(
        count=1, scheme="grpo", scheme_options={"column": "outcome"}, lr=1e-2, kl_coef=0.01,
        dtype="float32", lora=LoraConfig(4, 8.0), checkpoint_every=plan.checkpoint_every,
    )  # fmt: skip
    repeats = plan.deterministic
    actor = ActorProcess("actor-0", str(folder), 0, plan.model, actors, deterministic=repeats)
    learner = LearnerProcess("learner", str(folder), 0, plan.model, QUESTIONS, 1.0, config)
    return scheduler, actor, learner


async def live(folder: Path, plan: Plan) -> None:
    scheduling, acting, learning = processes(folder, plan)
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
    parent = os.getpid()
    if pid := os.fork():
        return pid
    code = 1
    try:
        die_with(parent)
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
        loop.run(live(folder, plan))

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
    for name in plans:
        (place / name).mkdir()
    runs = [forked(partial(follow, place / name, plan)) for name, plan in plans.items()]
    for pid in runs:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
