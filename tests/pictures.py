"""Pictures of coloured squares, and a game that shows them."""

import io
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from coppice.actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition


def png(pixels: np.ndarray) -> bytes:
    """The PNG of uint8 [height, width, 3]."""
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def squares(seed: int, rows: int = 2, columns: int = 2, side: int = 28) -> bytes:
    colours = np.random.default_rng(seed).integers(0, 256, (rows, columns, 3), np.uint8)
    return png(colours.repeat(side, 0).repeat(side, 1))


class State(msgspec.Struct, frozen=True):
    """The seed of the colours now shown, and the number of turns so far."""

    seed: int
    turns: int = 0


class Colours(Environment):
    """Every text is a move. Its length picks the next colours; an even sum of the lengths'
    remainders wins."""

    name = "colours"
    pictures = True
    gives_step_rewards = True
    measured = ("success",)

    def __init__(self, turns: int = 2, side: int = 28):
        self.turns, self.side = turns, side

    def task(self, seed: int) -> Task:
        return Task(f"colours-{seed}", seed=seed)

    def initial(self, task: Task) -> State:
        return State(task.seed % 5)

    def prompt(self, task: Task, state: State) -> list[dict[str, Any]]:
        goal = {"type": "image", "image": squares(100, 2, 3, self.side)}
        now = {"type": "image", "image": squares(state.seed, 2, 2, self.side)}
        texts = [{"type": "text", "text": text} for text in ("From", f"to{SPLIT}", "how?")]
        return [{"role": "user", "content": [texts[0], goal, texts[1], now, texts[2]]}]

    def read(self, state: State, text: str) -> Action:
        return Action("move", text, move=(len(text) % 2,))

    async def step(self, state: State, action: Action, tools: Tools) -> Transition:
        assert action.move is not None
        after = State(2 * state.seed % 7 + action.move[0], state.turns + 1)
        if after.turns < self.turns:
            return Transition(after, "", False, reward=0.0)
        won = float(after.seed % 2 == 0)
        return Transition(after, "", True, won, {"success": won}, won)
