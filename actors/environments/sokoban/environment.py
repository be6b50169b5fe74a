"""Sokoban: push every box onto a target, one step of the player per turn (methods.md 4.6).

A blocked step is legal and changes nothing, and so does a reply that cannot be read. The episode
ends with the solution or after ``horizon`` turns, not where the solution is lost.
"""

import io
from functools import cache
from math import isqrt
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from PIL import Image

from coppice.actors.environments.base import HELD_OUT_SEEDS, Action, Task, Tools, Transition
from coppice.actors.environments.game import Game
from coppice.actors.environments.sokoban import rooms
from coppice.actors.environments.sokoban.rooms import Room, parse, pushed, written
from coppice.common.numbers import Count, Natural

WORDS = ("up", "down", "left", "right")
STEP, ON_TARGET, SOLUTION = -0.1, 1.0, 10.0
"""What a step, a box that comes onto a target, and the solution bring."""
HELD_OUT_SHARE = 8
"""One layout in eight is held out."""
ROW_PLACED = "*"
"""The box on a target in {row}, which a character tokenizer of ASCII must be able to read."""


class SokobanState(msgspec.Struct, frozen=True):
    """An episode under way. board: see ``rooms``. turn: turns used. score: the rewards so far.
    past: the last boards and what was done there. over: no move can be made any more."""

    board: str
    turn: int = 0
    score: float = 0.0
    past: tuple[str, ...] = ()
    over: bool = False


class Sokoban(Game):
    """The Sokoban rules. prompt, stop_at_action: see ``Game``. history: how many earlier turns
    {past} shows.

    size: of the square room, outer walls included. boxes: 1 to 3. horizon: turns until the episode
    ends. split: with "rooms", the walls and targets of a held-out room occur in no training room,
    however turned or mirrored; with "released", held-out rooms only have other seeds. outcome:
    the episode's "return", or its "success" (1 or 0). side: the pixels of a side of {picture}; 0
    draws 16 per cell. An action is exactly one of the four words, in any case.
    """

    name = "sokoban"
    headline = "success"
    gives_step_rewards = True
    folder = Path(__file__).parent

    def __init__(
        self, prompt: str = "sokoban", history: Natural = 2, stop_at_action: bool = True,
        size: int = 6, boxes: int = 1, horizon: Count = 15,
        split: Literal["rooms", "released"] = "rooms",
        outcome: Literal["return", "success"] = "return", side: Natural = 0,
    ):  # fmt: skip
        super().__init__(prompt, history, stop_at_action)
        for option, value, expected in (("size", size, rooms.SIZES), ("boxes", boxes, rooms.BOXES)):
            if value not in expected:
                raise ValueError(f"{option} = {value}: expected {expected[0]} to {expected[-1]}")
        if side and not self.pictures:
            wish = "expected 0, or a prompt that has a {picture}: sokoban_picture"
            raise ValueError(f"side = {side}: {wish}")
        self.size, self.boxes, self.max_turns, self.side = size, boxes, horizon, side
        self.split, self.outcome = split, outcome

    def initial(self, task: Task) -> SokobanState:
        held_out = task.seed in HELD_OUT_SEEDS

        def wanted(room: Room) -> bool:
            return self.split == "released" or held_out == is_held_out(room)

        room = rooms.generate(self.size, self.boxes, task.seed, self.max_turns, wanted)
        return SokobanState(written(room))

    def view(self, state: SokobanState) -> dict[str, str]:
        """{board}: one line per row. {row}: the cells inside the outer walls without a break.
        {left}: the turns left. {size} and {boxes} are the room's."""
        lines = [state.board[at : at + self.size] for at in range(0, len(state.board), self.size)]
        return {
            "board": shown(state.board),
            "row": "".join(line[1:-1] for line in lines[1:-1]).replace(rooms.PLACED, ROW_PLACED),
            "left": str(self.max_turns - state.turn),
            "size": str(self.size),
            "boxes": str(self.boxes),
        }

    def picture(self, state: SokobanState) -> bytes:
        return picture(state.board, self.side)

    def anchor(self, state: SokobanState) -> str:
        return shown(state.board)

    def move(self, text: str) -> tuple[int, ...] | None:
        word = text.strip().lower()
        return (WORDS.index(word),) if word in WORDS else None

    def moves(self, state: SokobanState) -> list[tuple[int, ...]]:
        """Return up, down, left and right, also against walls."""
        return [] if state.over else [(direction,) for direction in range(len(WORDS))]

    def good_moves(self, state: SokobanState) -> list[tuple[int, ...]]:
        return [] if state.over else [(way,) for way in rooms.optimal(parse(state.board))]

    def notation(self, move: tuple[int, ...]) -> str:
        return WORDS[move[0]]

    async def step(self, state: SokobanState, action: Action, tools: Tools) -> Transition:
        """Take a step. An invalid action changes nothing, but costs the step and the turn."""
        move = action.move if action.valid else None
        before = parse(state.board)
        after = before if move is None else pushed(before, move[0])
        reward = STEP + ON_TARGET * (after.placed - before.placed) + SOLUTION * after.solved
        over = after.solved or state.turn + 1 >= self.max_turns
        word = self.notation(move) if move else "nothing, because the reply could not be read"
        past = self.remember(state.past, f"{shown(state.board)}\nYou did: {word}\n")
        # all rewards are tenths, so this only removes rounding errors
        score = round(state.score + reward, 1)
        reached = SokobanState(written(after), state.turn + 1, score, past, over)
        if not over:
            return Transition(reached, "", False, reward=reward)
        outcome = score if self.outcome == "return" else float(after.solved)
        return Transition(reached, shown(reached.board), True, outcome, self.lost(reached), reward)

    def outgrown(self, state: SokobanState) -> Transition:
        """Return the end that the last turn would bring in ``state``, which is not solved."""
        outcome = state.score if self.outcome == "return" else 0.0
        return Transition(state, "", True, outcome, self.lost(state))

    def lost(self, state: SokobanState) -> dict[str, float]:
        """Return success (1 when every box is on a target) and completion (the share of the boxes
        on targets)."""
        position = parse(state.board)
        return {
            "success": float(position.solved),
            "completion": position.placed / position.boxes.bit_count(),
        }


def is_held_out(room: Room) -> bool:
    """Return whether the split "rooms" holds a room out. All rooms with the same walls and targets
    are on the same side."""
    return rooms.layout_digest(room)[0] % HELD_OUT_SHARE == 0


def shown(board: str) -> str:
    """Return a board with one line per row and a space between its glyphs."""
    size = isqrt(len(board))
    return "\n".join(" ".join(board[at : at + size]) for at in range(0, len(board), size))


def picture(board: str, side: int = 0) -> bytes:
    """Return a board as a PNG of ``side`` x ``side`` RGB pixels, whose sprites repeat the nearest
    pixel. 0: 16 pixels per cell."""
    image = pixels(board)
    at = np.arange(side or len(image)) * len(image) // (side or len(image))
    file = io.BytesIO()
    Image.fromarray(image[at][:, at]).save(file, "PNG", compress_level=9)
    return file.getvalue()


def pixels(board: str) -> np.ndarray:
    """Return the colours of a board, uint8 [height, width, 3]."""
    size, cells = isqrt(len(board)), [_sprites()[glyph] for glyph in board]
    return np.concatenate([np.hstack(cells[at : at + size]) for at in range(0, len(board), size)])


@cache
def _sprites() -> dict[str, np.ndarray]:
    """Return the sprite of every glyph, uint8 [16, 16, 3]. They show the kinds of cell of
    the released code with other pixels; the player stands on the frame of a target."""
    sheet = np.asarray(Image.open(Path(__file__).with_name("sprites.png")).convert("RGB"))
    return dict(zip(rooms.GLYPHS, np.split(sheet, len(rooms.GLYPHS), axis=1), strict=True))
