"""The common part of the games: each turn a fresh prompt shows the full state, and an unusable
action ends the episode as a loss (methods.md 3.1).

A prompt file has the placeholders of its game ({board}, ..) and {past}, and {picture} in a game
that draws its states. The text before the first placeholder is the same in every turn.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import base
from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.common.numbers import Natural
from coppice.wire.messages import JudgedTurn

ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
PICTURE = "{picture}"
TRIES, STRIDE = 256, 1_000_003
"""Try n of a task draws its board with the seed ``seed + n * STRIDE`` (methods.md 3.3)."""


class Game(Environment):
    """Base of the games. A subclass sets ``name``, ``headline`` and ``folder``, and writes
    ``initial``, ``view``, ``move``, ``moves``, ``notation``, ``apply`` and ``lost``.

    prompt: the name of a .txt file in ``folder``, or a path with a slash. history: how many earlier
    moves of the policy {past} lists. stop_at_action: end the generation at "</action>"; must be off
    if the policy may write the tag while it thinks.
    """

    name = ""
    folder = Path(__file__).parent
    """Where the prompts of the game are."""
    measured: Sequence[str] = ("success", "completion")
    loss = -1.0
    """The outcome of an episode that an invalid or illegal action ended."""
    max_turns = 0
    """The game's own budget of turns; 0 for none."""

    def __init__(self, prompt: str, history: Natural = 0, stop_at_action: bool = True):
        path, self.template = base.prompt_template(prompt, self.folder)
        placeholders, file = set(_PLACEHOLDER.findall(self.template)), f"prompt file {path} has"
        if not {"board", "row", "picture"} & placeholders:
            raise ValueError(f"{file} none of the placeholders {{board}}, {{row}}, {{picture}}")
        self.pictures = PICTURE in self.template
        if self.pictures and type(self).picture is Game.picture:
            raise ValueError(f"{file} a {PICTURE} placeholder, and {self.name} draws no pictures")
        if history and "past" not in placeholders:
            raise ValueError(f"history = {history} has no effect: {file} no {{past}} placeholder")
        self.history, self.stop = history, ["</action>"] if stop_at_action else []

    # ----------------------------------------------------------------------------- of each game

    def view(self, state: Any) -> dict[str, str]:
        """Return the texts of the prompt's placeholders, including {board}."""
        raise NotImplementedError

    def picture(self, state: Any) -> bytes:
        """Return the PNG that {picture} shows. A game need not have one."""
        raise NotImplementedError

    def move(self, text: str) -> tuple[int, ...] | None:
        """Return the move written in an action block, None when it cannot be read."""
        raise NotImplementedError

    def moves(self, state: Any) -> list[tuple[int, ...]]:
        """Return all legal moves in a fixed order, none when the game is over."""
        raise NotImplementedError

    def good_moves(self, state: Any) -> list[tuple[int, ...]]:
        """Return the moves that a warm start with ``skill`` imitates. By default there are none."""
        return []

    def notation(self, move: tuple[int, ...]) -> str:
        """Return the text of a move, in the form that ``move`` reads."""
        raise NotImplementedError

    async def apply(self, state: Any, move: tuple[int, ...], tools: Tools) -> Transition:
        """Play a legal move, and the opponent's answer if there is one."""
        raise NotImplementedError

    def lost(self, state: Any) -> dict[str, float]:
        """Return the measures of an episode that ends in ``state``."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------- the contract

    def task(self, seed: int) -> Task:
        return Task(f"{self.name}-{seed}", seed=seed)

    def prompt(self, task: Task, state: Any) -> list[dict[str, Any]]:
        """Return one user message with the rules, then the state."""
        shown = {**self.view(state), "past": "\n".join(getattr(state, "past", ())) or "none"}
        rules = _PLACEHOLDER.split(self.template, maxsplit=1)[0]
        state_part = self.template[len(rules) :]
        filled = _PLACEHOLDER.sub(lambda match: shown.get(match[1], match[0]), state_part)
        text = f"{rules}{base.SPLIT}{filled}"
        if not self.pictures:
            return [{"role": "user", "content": text}]
        before, after = ({"type": "text", "text": part} for part in text.split(PICTURE, 1))
        image = {"type": "image", "image": self.picture(state)}
        return [{"role": "user", "content": [before, image, after]}]

    def replies(self, state: Any) -> list[str]:
        return [f"<action>{self.notation(move)}</action>" for move in self.moves(state)]

    def read(self, state: Any, text: str) -> Action:
        """Return the action of the last action block, checked against the rules."""
        blocks = ACTION.findall(text)
        move = self.move(blocks[-1]) if blocks else None
        if move is None:
            return Action("invalid", text)
        return Action("move" if move in self.moves(state) else "illegal", text, move=move)

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition:
        """Play the action. An illegal one ends the episode as a loss (methods.md 3.1)."""
        if not action.valid or action.move is None:
            return self.outgrown(state)
        return await self.apply(state, action.move, tools)

    def outgrown(self, state: Any) -> Transition:
        return Transition(state, "", True, self.loss, self.lost(state))

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn:
        return super().judged(task, state, action, step, self.max_turns or budget)

    def remember(self, past: tuple[str, ...], line: str) -> tuple[str, ...]:
        """Return the last ``history`` lines, with ``line`` at the end."""
        return (*past, line)[-self.history :] if self.history else ()

    def turned(self, state: Any, line: str, outcome: float | None) -> Transition:
        """Return the transition to ``state`` after one more turn, which ``line`` describes.
        Running out of turns has the outcome 0."""
        turn = state.turn + 1
        outcome = 0.0 if outcome is None and turn >= self.max_turns else outcome
        over, past = outcome is not None, self.remember(state.past, line)
        after = msgspec.structs.replace(state, turn=turn, past=past, over=over)
        return Transition(after, "", over, outcome, self.lost(after) if over else {})


def labelled(board: str, columns: int, box: int = 0) -> str:
    """Return the board as a grid with R1.. and C1.. labels.

    box: draw lines between the boxes of as many rows and columns; 0 draws none.
    """
    rows, box = len(board) // columns, box or len(board)
    side, width = len(f"R{rows}"), len(f"C{columns}")

    def line(label: str, cells: Sequence[str]) -> str:
        words = [cell.rjust(width) for cell in cells]
        parts = [" ".join(words[at : at + box]) for at in range(0, columns, box)]
        return f"{label:<{side}} {' | '.join(parts)}"

    lines = [line("", [f"C{column + 1}" for column in range(columns)])]
    rule = " " * (side + 1) + re.sub(r"[^|]", "-", lines[0][side + 1 :]).replace("|", "+")
    for row in range(rows):
        if row and row % box == 0:
            lines.append(rule)
        lines.append(line(f"R{row + 1}", board[row * columns : (row + 1) * columns]))
    return "\n".join(lines)
