"""Warm start for games: from random play the policy learns to write legal moves. With ``skill``, a
share of the moves is good: where random play hardly ever succeeds, a policy that learns from
outcomes alone would wait long for its first successes."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments.base import HELD_OUT_SEEDS, SPLIT, Action, Task, Tools
from coppice.actors.environments.game import Game
from coppice.learner.fine_tune import Example
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.warm_start import COOLDOWN, WarmStart, from_play

FIRST_SEED = HELD_OUT_SEEDS.stop
FLAGS = 0.1
"""The share of flags among random moves in Minesweeper. With a larger share, most of a board would
never be seen open."""


class RandomPlayers(Tools):
    """The ``Tools`` of random play: every opponent makes a random legal move."""

    def __init__(self, environment: Game, rng: random.Random):
        self.environment, self.rng = environment, rng

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """Return a uniformly random legal move of the position."""
        return self.rng.choice(self.environment.moves(state))


class RandomTurn(msgspec.Struct, frozen=True):
    """A position of random play and the legal move made there."""

    task: Task
    state: Any
    move: tuple[int, ...]


def random_play(environment: Game, count: int, seed: int, skill: float = 0.0) -> list[RandomTurn]:
    """Return ``count`` turns, shuffled, of whole episodes of random legal play."""
    rng, turns = random.Random(seed), list[RandomTurn]()
    tasks = map(environment.task, itertools.count(FIRST_SEED))
    while len(turns) < count:
        turns += asyncio.run(_episode(environment, next(tasks), rng, skill))
    rng.shuffle(turns)
    return turns[:count]


async def _episode(
    environment: Game, task: Task, rng: random.Random, skill: float
) -> list[RandomTurn]:
    players = RandomPlayers(environment, rng)
    state = await environment.open(environment.initial(task), players)
    turns: list[RandomTurn] = []
    while moves := environment.moves(state):
        good = environment.good_moves(state) if skill and rng.random() < skill else []
        if not good:
            flags = [move for move in moves if environment.notation(move).startswith("flag")]
            others = [move for move in moves if move not in flags]
            good = flags if flags and (not others or rng.random() < FLAGS) else others
        move = rng.choice(good)
        turns.append(RandomTurn(task, state, move))
        action = Action("move", _written(environment, move), move=move)
        transition = await environment.step(state, action, players)
        if transition.done:
            break
        state = transition.state
    return turns


def legal_play(
    environment: Game, text: Text, count: int, seed: int, skill: float = 0.0
) -> list[Example]:
    """Return the turns of ``random_play`` as the tokens of a rollout, whose prompt is encoded in
    two parts: that which all turns share, and the rest. The target is the move."""
    examples: list[Example] = []
    for turn in random_play(environment, count, seed, skill):
        parts = text.prompt(environment.prompt(turn.task, turn.state)).partition(SPLIT)[::2]
        prompt = [token for part in parts for token in text.encode(part).tolist()]
        move = text.encode(_written(environment, turn.move)).tolist()
        examples.append(Example(prompt + move, len(prompt)))
    return examples


def _written(environment: Game, move: tuple[int, ...]) -> str:
    return f"<action>{environment.notation(move)}</action>"


def ensure_legal_play(
    model: Path, environment: Game, options: dict[str, Any], config: WarmStart, cache: Path,
    threads: int,
) -> Path:  # fmt: skip
    """Return the model after random play (``from_play``). Raises ValueError for a ``skill`` that
    the game cannot have."""
    if config.skill and type(environment).good_moves is Game.good_moves:
        setting = f"warm_start.skill = {config.skill}"
        raise ValueError(f"{setting}: {environment.name!r} knows no good moves; set it to 0")
    recipe = [environment.name, options, environment.template, msgspec.to_builtins(config)]
    recipe += [FIRST_SEED, FLAGS, COOLDOWN]

    def examples(count: int) -> list[Example]:
        return legal_play(environment, Text(str(model)), count, config.seed, config.skill)

    play = f"random legal {environment.name}"
    return from_play(model, play, recipe, [], examples, config, cache, threads)
