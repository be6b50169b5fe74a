"""What the games share: the full state in a fresh prompt each turn, the last action block, an invalid action ends as a loss.

A prompt file of prompts/ has the placeholders of its game ({board}, ..) and {past}; what stands before the first placeholder is the
same in every turn and is prefilled once. Action: ``<action> .. </action>`` (methods.md 3.1); the last block counts, so that a policy
may think first.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition

PROMPTS = Path(__file__).parent / "prompts"

_BLOCK = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_BLOCK_OR_BOX = re.compile(r"<action>(.*?)</action>|\\boxed\{([^{}]*)\}", re.DOTALL)
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


class Game(Environment):
    """Base of the games. A subclass sets ``name`` and ``headline``, and writes ``initial``, ``view``, ``move``, ``legal``, ``apply``.

    prompt: a file of prompts/ without ending, or a path with a slash. history: how many earlier moves of the policy {past} lists.
    boxed: accept ``\\boxed{..}`` as an action too. stop_at_action: end the generation at "</action>"; off for a policy that may
    write the tag while it thinks.
    """

    name = ""
    measured: Sequence[str] = ("success", "completion")
    loss = -1.0
    """Outcome of an episode that an invalid or illegal action ended."""

    def __init__(self, prompt: str, history: int = 0, boxed: bool = False, stop_at_action: bool = True):
        path = PROMPTS / f"{prompt}.txt" if "/" not in prompt else Path(prompt)
        if not path.is_file():
            known = ", ".join(sorted(p.stem for p in PROMPTS.glob(f"{self.name}*.txt")))
            raise FileNotFoundError(
                f"prompt {prompt!r}: no file {path}; expected one of {known}, or a path with a slash"
            )
        if history < 0:
            raise ValueError(f"history = {history}: expected 0 (the state alone) or more earlier moves")
        self.template = path.read_text().strip()
        found = _PLACEHOLDER.search(self.template)
        if found is None or not {"board", "row"} & set(_PLACEHOLDER.findall(self.template)):
            raise ValueError(f"prompt file {path} has neither a {{board}} nor a {{row}} placeholder")
        if history and "{past}" not in self.template:
            raise ValueError(f"history = {history} has no effect: prompt file {path} has no {{past}} placeholder")
        self._shared = found.start()
        self.history, self.stop = history, ["</action>"] if stop_at_action else []
        self._pattern = _BLOCK_OR_BOX if boxed else _BLOCK

    # ------------------------------------------------------------------------------------------ of each game

    def initial(self, task: Task) -> Any:
        """The first state of the task."""
        raise NotImplementedError

    def view(self, state: Any) -> dict[str, str]:
        """Texts for the prompt's placeholders; {board} among them."""
        raise NotImplementedError

    def move(self, text: str) -> tuple[int, ...] | None:
        """The move written in an action block, None when it cannot be read."""
        raise NotImplementedError

    def legal(self, state: Any, move: tuple[int, ...]) -> bool:
        """May ``move`` be played in ``state``?"""
        raise NotImplementedError

    def moves(self, state: Any) -> list[tuple[int, ...]]:
        """All legal moves, in a fixed order; empty when the game is over."""
        raise NotImplementedError

    def notation(self, move: tuple[int, ...]) -> str:
        """The text of a move as ``move`` reads it."""
        raise NotImplementedError

    async def apply(self, state: Any, move: tuple[int, ...], tools: Tools) -> Transition:
        """A legal move, and the opponent's answer if there is one."""
        raise NotImplementedError

    def lost(self, state: Any) -> dict[str, float]:
        """Measures of an episode that an unusable action ended in ``state``."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ the contract

    def task(self, seed: int) -> Task:
        """The task of ``seed``."""
        return Task(f"{self.name}-{seed}", seed=seed)

    def prompt(self, task: Task, state: Any) -> list[dict[str, str]]:
        """One user message: the rules, then the state."""
        past = "\n".join(getattr(state, "past", ())) or "none"
        shown = {**self.view(state), "past": past}
        head, tail = self.template[: self._shared], self.template[self._shared :]
        filled = _PLACEHOLDER.sub(lambda match: shown[match[1]] if match[1] in shown else match[0], tail)
        return [{"role": "user", "content": f"{head}{SPLIT}{filled}"}]

    def read(self, state: Any, text: str) -> Action:
        """The last action block, checked against the rules."""
        blocks = [next((g for g in found.groups() if g is not None), "") for found in self._pattern.finditer(text)]
        move = self.move(blocks[-1]) if blocks else None
        if move is None:
            return Action("invalid", text)
        return Action("move" if self.legal(state, move) else "illegal", text, move=move)

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition:
        """Play the action; one that is not legal ends the episode as a loss (methods.md 3.1)."""
        if not action.valid or action.move is None:
            return Transition(state, "", True, self.loss, self.lost(state))
        return await self.apply(state, action.move, tools)

    def remember(self, past: tuple[str, ...], line: str) -> tuple[str, ...]:
        """The last ``history`` lines with ``line`` at the end."""
        return (*past, line)[-self.history :] if self.history else ()
