"""The task sets of reasoning-gym: one question, one answer, a score between 0 and 1.

``pip install reasoning-gym``; data.environment = "reasoning_gym", data.options.name =
"basic_arithmetic".

Two kinds of sets belong in a process of their own (``other_python`` with game = "reasoning_gym"):
those that evaluate the policy's answer as a formula, such as countdown and puzzle24, which an
answer can keep busy for ever; and isomorphic_strings, polynomial_multiplication, ransom_note and
word_ladder, whose questions depend on the hashes of the process (PYTHONHASHSEED) beside the seed.
"""

import copy
import functools
import re
from typing import Any

import msgspec

from coppice.actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition
from coppice.wire.faults import DataFault

KEPT = 256
"""Questions that are kept for their answers; some sets take seconds to make one."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Asked(msgspec.Struct, frozen=True):
    """The state: the seed of the question, and the question."""

    seed: int
    question: str


class ReasoningGym(Environment):
    """name: a set. config: its settings. Every task is the first of the set with the task's own
    seed."""

    name = "reasoning_gym"
    measured = ("success",)
    headline = "return"
    stop = ["</answer>"]
    rewarded_by_judge = False
    gives_step_rewards = True

    def __init__(self, name: str, config: dict[str, Any] | None = None):
        try:
            import reasoning_gym
        except ModuleNotFoundError:
            raise ValueError("reasoning-gym is not installed: pip install reasoning-gym") from None

        def asked(seed: int) -> tuple[Any, dict[str, Any]]:
            questions = reasoning_gym.create_dataset(name, seed=seed, size=1, **(config or {}))
            return questions, questions[0]

        self._asked = functools.lru_cache(KEPT)(asked)
        try:
            self._asked(0)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"name = {name!r}, config = {config or {}}: {error}") from None
        self.set = name

    def task(self, seed: int) -> Task:
        """Return the question of ``seed``."""
        entry = self._asked(seed)[1]
        return Task(f"{self.set}-{seed}", entry["question"], [str(entry["answer"])], seed=seed)

    def initial(self, task: Task) -> Asked:
        """Return the state."""
        return Asked(task.seed, task.question)

    def prompt(self, task: Task, state: Asked) -> list[dict[str, Any]]:
        """Return one user message."""
        how = "Think, then write the answer alone between <answer> and </answer>."
        return [{"role": "user", "content": f"{how}\n{SPLIT}\n{task.question}"}]

    def read(self, state: Asked, text: str) -> Action:
        """Return the last answer."""
        answers = _ANSWER.findall(text)
        return (
            Action("answer", text, answer=answers[-1].strip())
            if answers
            else Action("invalid", text)
        )

    async def step(self, state: Asked, action: Action, tools: Tools) -> Transition:
        """Score the answer, with the library's partial credit. A reply without an answer scores 0,
        and so does one at which the library fails.

        Raises DataFault if the set makes another question of the seed than in the process that
        asked it.
        """
        score = 0.0
        if action.answer is not None:
            questions, entry = self._asked(state.seed)
            if entry["question"] != state.question:
                raise DataFault(
                    f"{self.set} makes another question of seed {state.seed} in this process: play it with data.environment = 'other_python'"
                )
            try:  # of a copy, because some sets write down in it what they score
                score = float(questions.score_answer(action.answer, copy.deepcopy(entry)))
            except Exception:  # noqa: BLE001
                score = 0.0
        return Transition(state, "", True, score, {"success": float(score >= 1)}, score)
