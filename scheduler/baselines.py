"""Players that need no model, on the held-out tasks of a game. Any policy must beat them."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from actors.environments.base import Action, Environment, Task
from actors.environments.game import Game
from scheduler.context import Context
from scheduler.evaluation import estimate
from scheduler.together import together

PLAYERS: dict[str, Callable[[list[tuple[int, ...]], random.Random], tuple[int, ...]]] = {
    "random_legal_move": lambda moves, rng: rng.choice(moves),
    "first_legal_move": lambda moves, rng: moves[0],
}


async def play(
    environment: Environment, tasks: Sequence[Task], context: Callable[[Task, int], Context]
) -> dict[str, float]:
    """The mean headline measure of each player; empty for an environment that is not a game."""
    if not isinstance(environment, Game):
        return {}
    means = {}
    for name in PLAYERS:
        values = await together(
            _episode(environment, name, task, context(task, place)) for place, task in enumerate(tasks)
        )
        means[name] = estimate(values).mean
    return means


async def _episode(game: Game, player: str, task: Task, tools: Context) -> float:
    rng = random.Random(f"{player}/{task.id}")
    state: Any = await game.open(game.initial(task), tools)
    while True:
        move = PLAYERS[player](game.moves(state), rng)
        transition = await game.step(state, Action("move", "", move=move), tools)
        if transition.done:
            outcome = transition.outcome if transition.outcome is not None else 0.0
            (value,) = game.measures(task, [{"outcome": outcome, **transition.measures}])[game.headline]
            return value
        state = transition.state
