"""The task sets of reasoning-gym: one question, one answer, a score between 0 and 1.

``pip install reasoning-gym``; data.environment = "reasoning_gym", data.options.name =
"basic_arithmetic".

Two kinds of sets belong in a process of their own (``other_python`` with game = "reasoning_gym"):
those that evaluate the policy's answer as a formula, such as countdown and puzzle24, which an
answer can keep busy for ever; and isomorphic_strings, polynomial_multiplication, ransom_note and
word_ladder, whose questions depend on the hashes of the process (PYTHONHASHSEED) beside the seed.
"""

import functools
from typing import Any

from coppice.actors.environments.base import Action, Task, Tools, Transition
from coppice.actors.environments.others.in_other_python.libraries import Reasoning
from coppice.actors.environments.others.in_other_python.worker import Turned
from coppice.actors.environments.others.mutable import InThisPython, Played
from coppice.wire.faults import DataFault


class ReasoningGym(InThisPython):
    """name: a set. config: its settings. Every task is the first of the set with the task's own
    seed."""

    name = "reasoning_gym"
    tag = "answer"
    format = "Think, then write the answer alone between <answer> and </answer>."
    copies = False

    def __init__(self, name: str, config: dict[str, Any] | None = None):
        super().__init__(horizon=1)
        try:
            import reasoning_gym  # noqa: F401
        except ModuleNotFoundError:
            raise ValueError("reasoning-gym is not installed: pip install reasoning-gym") from None
        self.set, self._make = name, functools.partial(Reasoning, name, **(config or {}))
        try:
            self.task(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"name = {name!r}, config = {config or {}}: {error}") from None

    def allowed(self, text: str) -> str | None:
        return text.strip()  # an empty answer is scored by the library, too

    def begin(self, seed: int) -> tuple[Reasoning, Turned]:
        game = self._make()
        return game, Turned(game.begin(seed))

    def turn(self, game: Reasoning, action: str) -> Turned:
        return Turned(*game.turn(action))

    def task(self, seed: int) -> Task:
        """Return the question of ``seed``."""
        question, answer = self.stands(seed, (), None).seen, self._make().ask(seed)[1]["answer"]
        return Task(f"{self.set}-{seed}", question, [str(answer)], seed=seed)

    def initial(self, task: Task) -> Played:
        return Played(task.seed, task.question)

    async def step(self, state: Played, action: Action, tools: Tools) -> Transition:
        """Score the answer. A reply without an answer scores 0.

        Raises DataFault if the set makes another question of the seed than in the process that
        asked it.
        """
        if self.stands(state.seed, (), None).seen != state.seen:
            raise DataFault(
                f"{self.set} makes another question of seed {state.seed} in this process: play it"
                " with data.environment = 'other_python'"
            )
        return await super().step(state, action, tools)
