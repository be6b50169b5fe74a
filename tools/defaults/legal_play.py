"""Warm start for environments that list their replies: from random play the policy learns to write
usable actions. With ``skill``, a share of the play is good: where random play hardly ever succeeds,
a policy that learns from outcomes alone would wait long for its first successes."""

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments.base import HELD_OUT_SEEDS, SPLIT, Action, Task, Tools
from coppice.actors.environments.game import Game
from coppice.actors.environments.others.mutable import Mutable
from coppice.learner.fine_tune import Example
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.warm_start import COOLDOWN, WarmStart, from_play

FIRST_SEED = HELD_OUT_SEEDS.stop
FLAGS = 0.1
"""The share of flags among random moves in Minesweeper. With a larger share, most of a board would
never be seen open."""
TRIES = 256
"""The most episodes of a task that are played in search of a success."""
Listing = Game | Mutable


class RandomPlayers(Tools):
    """The ``Tools`` of random play: every opponent makes a random legal move, or a listed reply."""

    def __init__(self, environment: Any, rng: random.Random):
        self.environment, self.rng = environment, rng

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        return self.rng.choice(self.environment.moves(state))

    async def say(self, speaker: str, messages: Any, max_tokens: int, stop: Any) -> str:
        return self.rng.choice(self.environment.replies(None))


class RandomTurn(msgspec.Struct, frozen=True):
    """A position of random play and the action taken there."""

    task: Task
    state: Any
    action: Action


def random_play(game: Listing, count: int, seed: int, skill: float = 0.0) -> list[RandomTurn]:
    """Return ``count`` turns, shuffled, of whole episodes of random play. Raises ValueError. skill:
    the share of good moves; in an adapter that of tasks played until an episode succeeds."""
    rng, turns = random.Random(seed), list[RandomTurn]()

    async def play() -> None:
        tasks = map(game.task, itertools.count(FIRST_SEED))
        while len(turns) < count:
            task, episode = next(tasks), list[RandomTurn]()
            again = not isinstance(game, Game) and rng.random() < skill
            for _ in range(TRIES if again else 1):
                episode, success = await _episode(game, task, rng, skill)
                if success:
                    break
            if not episode:
                raise ValueError(f"{game.name} lists no replies: set warm_start.steps = 0")
            turns.extend(episode)
        await game.close()

    asyncio.run(play())
    rng.shuffle(turns)
    return turns[:count]


async def _episode(
    environment: Listing, task: Task, rng: random.Random, skill: float
) -> tuple[list[RandomTurn], bool]:
    players = RandomPlayers(environment, rng)
    state = await environment.open(environment.initial(task), players)
    turns: list[RandomTurn] = []
    while replies := _replies(environment, state, rng, skill):
        action = environment.read(state, rng.choice(replies))
        turns.append(RandomTurn(task, state, action))
        transition = await environment.step(state, action, players)
        if transition.done:
            return turns, transition.measures.get("success", 0.0) > 0
        state = transition.state
    return turns, False


def _replies(game: Listing, state: Any, rng: random.Random, skill: float) -> list[str]:
    if not isinstance(game, Game) or not (moves := game.moves(state)):
        return game.replies(state)
    good = game.good_moves(state) if skill and rng.random() < skill else []
    if not good:
        flags = [move for move in moves if game.notation(move).startswith("flag")]
        others = [move for move in moves if move not in flags]
        good = flags if flags and (not others or rng.random() < FLAGS) else others
    return [f"<action>{game.notation(move)}</action>" for move in good]


def legal_play(
    environment: Listing, text: Text, count: int, seed: int, skill: float = 0.0
) -> list[Example]:
    """Return the turns of ``random_play`` as the tokens of a rollout, whose prompt is encoded in
    two parts: that which all turns share, and the rest. The target is the action."""
    examples: list[Example] = []
    for turn in random_play(environment, count, seed, skill):
        parts = text.prompt(environment.prompt(turn.task, turn.state)).partition(SPLIT)[::2]
        prompt = [token for part in parts for token in text.encode(part).tolist()]
        action = text.encode(turn.action.text).tolist()
        examples.append(Example(prompt + action, len(prompt)))
    return examples


def ensure_legal_play(
    model: Path, environment: Listing, options: dict[str, Any], config: WarmStart, cache: Path,
    threads: int,
) -> Path:  # fmt: skip
    """Return the model after random play (``from_play``). Raises ValueError for a ``skill`` that
    the game cannot have."""
    game = isinstance(environment, Game)
    if config.skill and game and type(environment).good_moves is Game.good_moves:
        setting = f"warm_start.skill = {config.skill}"
        raise ValueError(f"{setting}: {environment.name!r} knows no good moves; set it to 0")
    shown = environment.template if game else environment.rules
    recipe = [environment.name, options, shown, msgspec.to_builtins(config)]
    recipe += [FIRST_SEED, FLAGS, COOLDOWN]

    def examples(count: int) -> list[Example]:
        return legal_play(environment, Text(str(model)), count, config.seed, config.skill)

    play = f"random legal {environment.name}"
    return from_play(model, play, recipe, [], examples, config, cache, threads, packing=not game)
