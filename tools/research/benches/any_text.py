"""An environment of trees whose lengths are all known, for benchmarks: made-up text, any answer to it is an action, a judge rewards.

Light, because processes of a run import it that compute nothing.
"""

import random
import zlib
from collections.abc import Mapping, Sequence

import msgspec

from actors.environments.base import Action, Environment, Task, Tools, Transition
from judges.base import Judge
from wire.messages import JudgedTurn, Judgement


class Shape(msgspec.Struct, frozen=True):
    """steps: of an episode. shared, question, observation: characters that all prompts begin with, that a question adds, that follow
    each action but the last."""

    steps: int
    shared: int
    question: int
    observation: int


class State(msgspec.Struct, frozen=True):
    """A question and how many actions were taken."""

    seed: int
    step: int = 0


class AnyText(Environment):
    """Episodes of ``shape``, written in ``alphabet``, of which the tokenizer should make a token a character."""

    name = "any_text"
    headline = "reward"
    fresh = False

    def __init__(self, shape: Shape, alphabet: str):
        self.shape, self.alphabet = shape, alphabet

    def words(self, seed: str, count: int) -> str:
        """``count`` characters that follow from ``seed``."""
        return "".join(random.Random(seed).choices(self.alphabet, k=count))

    def task(self, seed: int) -> Task:
        """Every seed is a question."""
        return Task(f"any-text-{seed}", seed=seed)

    def initial(self, task: Task) -> State:
        return State(task.seed)

    def prompt(self, task: Task, state: State) -> list[dict[str, str]]:
        """What all prompts share, then the question."""
        shared = self.words("head", self.shape.shared)
        return [{"role": "user", "content": shared + self.words(f"question {state.seed}", self.shape.question)}]

    def read(self, state: State, text: str) -> Action:
        return Action("move", text)

    def parse_forced(self, text: str) -> Action:
        return Action("move", text)

    async def step(self, state: State, action: Action, tools: Tools) -> Transition:
        after = State(state.seed, state.step + 1)
        if after.step == self.shape.steps:
            return Transition(after, "", True, 0.0)
        return Transition(after, self.observation(after), False)

    def observation(self, after: State) -> str:
        """What follows the action that led to ``after``."""
        return self.words(f"observation {after}", self.shape.observation)

    def judged(self, task: Task, state: State, action: Action, step: int, budget: int) -> JudgedTurn:
        return JudgedTurn(task.id, [], "", action.text, step, budget)

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        return {}


def reward(text: str) -> float:
    """From 0 to 1, and hardly ever the same for two texts, so that every group of them has advantages."""
    return zlib.crc32(text.encode()) / 2**32


class Checksum(Judge):
    """``reward`` as a judge."""

    name = "checksum"
    columns = ("reward",)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """One reward for each turn."""
        return [Judgement({"reward": reward(turn.response)}) for turn in turns]
