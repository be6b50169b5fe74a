"""Warm start for games: a policy that writes legal moves and nothing more, learnt from uniformly random play.

The task seeds begin at ``FIRST_SEED``, where neither training nor held-out tasks are. Every example has exactly the token format of a
rollout, and its target is one random legal move of the position, so that no skill is taught: that is left to reinforcement learning.
"""

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any

import msgspec

from actors.environments.base import SPLIT, Action, Task
from actors.environments.game import Game
from scheduler.text import Text
from tools.warm_start import Example, WarmStart, fine_tune
from wire.messages import Passage

FIRST_SEED = 2_000_000_000
FLAGS = 0.1
"""The share of flags among random moves in Minesweeper: with more, most of a board would never be seen open."""
COOLDOWN = 0.4
"""The share of the steps over which the learning rate falls to 0: the last per cents of legal moves need it."""


class RandomPlayers:
    """The ``Tools`` of random play: every opponent takes any legal move."""

    def __init__(self, environment: Game, rng: random.Random):
        self.environment, self.rng = environment, rng

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        """Games retrieve nothing."""
        raise NotImplementedError(f"a game has no passages to give for {query!r}")

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """A uniformly random move of the position."""
        return self.rng.choice(self.environment.moves(state))


def legal_play(environment: Game, text: Text, count: int, seed: int, first_seed: int = FIRST_SEED) -> list[Example]:
    """``count`` positions of random legal episodes, shuffled, each with the move played there as target."""
    rng = random.Random(seed)
    made: list[Example] = []
    number = first_seed
    while len(made) < count:
        made += asyncio.run(_episode(environment, text, environment.task(number), rng))
        number += 1
    rng.shuffle(made)
    return made[:count]


async def _episode(environment: Game, text: Text, task: Task, rng: random.Random) -> list[Example]:
    players = RandomPlayers(environment, rng)
    state = await environment.open(environment.initial(task), players)
    made: list[Example] = []
    done = not environment.moves(state)
    while not done:
        move = _random_move(environment, state, rng)
        written = f"<action>{environment.notation(move)}</action>"
        prompt = rendered(environment, text, task, state)
        made.append(Example(prompt + text.encode(written).tolist(), len(prompt)))
        transition = await environment.step(state, Action("move", written, move=move), players)
        state, done = transition.state, transition.done
    return made


def rendered(environment: Game, text: Text, task: Task, state: Any) -> list[int]:
    """Tokens of the prompt as a rollout has them: what all turns share and the rest are encoded apart."""
    parts = text.prompt(environment.prompt(task, state)).split(SPLIT)
    return [token for part in parts for token in text.encode(part).tolist()]


def _random_move(environment: Game, state: Any, rng: random.Random) -> tuple[int, ...]:
    moves = environment.moves(state)
    flags = [move for move in moves if environment.notation(move).startswith("flag")]
    others = [move for move in moves if move not in flags]
    return rng.choice(flags if flags and (not others or rng.random() < FLAGS) else others)


def ensure_legal_play(
    model: Path,
    environment: Game,
    options: dict[str, Any],
    config: WarmStart,
    cache: Path,
    threads: int,
) -> Path:
    """The warm-started model, cached by everything it depends on; ``model`` itself when config.steps is 0."""
    if config.steps == 0:
        return model
    recipe = [environment.name, options, environment.template, msgspec.to_builtins(config), FIRST_SEED, FLAGS, COOLDOWN]
    digest = hashlib.sha256(msgspec.json.encode(recipe, order="sorted"))
    for path in sorted(model.glob("*.json")) + sorted(model.glob("*.safetensors")):
        digest.update(path.read_bytes())
    out = cache / "warm_start" / digest.hexdigest()[:16]
    if (out / "config.json").is_file():
        return out
    print(
        f"warm start on random legal {environment.name}, {config.steps} steps of {config.rows} examples"
        " (cached afterwards)",
        flush=True,
    )
    examples = legal_play(environment, Text(str(model)), config.steps * config.rows, config.seed)
    cooldown = int(COOLDOWN * config.steps)
    fine_tune(model, examples, out, config.steps, config.rows, config.lr, config.warmup, threads, cooldown)
    return out
