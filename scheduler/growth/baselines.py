"""Players that need no model and choose among the replies that an environment lists. Any policy
must beat them."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from coppice.actors.environments.base import Environment, Task
from coppice.scheduler.evaluation.evaluation import estimate
from coppice.scheduler.growth.context import Context
from coppice.scheduler.telemetry.together import together

PLAYERS: dict[str, Callable[[list[str], random.Random], str]] = {
    "random_legal_move": lambda replies, rng: rng.choice(replies),
    "first_legal_move": lambda replies, rng: replies[0],
}


def offered(environment: Environment) -> bool:
    """Whether the environment lists replies to choose from. Environments that stand for others pass
    the method of those on."""
    return getattr(environment.replies, "__func__", None) is not Environment.replies


async def play(
    environment: Environment, tasks: Sequence[Task], context: Callable[[Task, int], Context]
) -> dict[str, float]:
    """The mean headline measure of each player; empty for an environment that lists no replies, or
    whose outcomes need a judge."""
    if environment.outcome_judge or not offered(environment):
        return {}
    means = {}
    for name in PLAYERS:
        values = await together(
            _episode(environment, name, task, context(task, place))
            for place, task in enumerate(tasks)
        )
        means[name] = estimate(values).mean
    return means


async def _episode(environment: Environment, player: str, task: Task, tools: Context) -> float:
    rng = random.Random(f"{player}/{task.id}")
    state: Any = await environment.open(environment.initial(task), tools)
    while True:
        # many episodes whose steps wait for nothing must not hold up the event loop
        await asyncio.sleep(0)
        reply = PLAYERS[player](environment.replies(state), rng)
        transition = await environment.step(state, environment.read(state, reply), tools)
        if transition.done:
            outcome = transition.outcome if transition.outcome is not None else 0.0
            turns = [{"outcome": outcome, **transition.measures}]
            (value,) = environment.measures(task, turns)[environment.headline]
            return value
        state = transition.state
