"""An environment for benchmarks, in which all lengths are known: the text is made up, and every
answer is an action that a judge rewards.

Processes that compute nothing import this module too, so it imports nothing heavy.
"""

import random
import zlib

import msgspec

from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.judges.base import Judge
from coppice.wire.messages import JudgedTurn, Judgement


class EpisodeShape(msgspec.Struct, frozen=True):
    """The lengths of an episode. steps: actions per episode. The others count characters: shared
    begins every prompt, question is added per question, observation follows each action but the
    last."""

    steps: int
    shared: int
    question: int
    observation: int


class TextState(msgspec.Struct, frozen=True):
    """A question (its seed) and the number of actions taken so far."""

    seed: int
    step: int = 0


class AnyText(Environment):
    """Episodes of ``shape``, written in characters of ``alphabet``, each of which should be one
    token."""

    name = "any_text"
    headline = "reward"
    fresh = False

    def __init__(self, shape: EpisodeShape, alphabet: str):
        self.shape, self.alphabet = shape, alphabet

    def words(self, seed: str, count: int) -> str:
        """Return ``count`` characters that depend only on ``seed``."""
        return "".join(random.Random(seed).choices(self.alphabet, k=count))

    def task(self, seed: int) -> Task:
        """Return the question of ``seed``. Every seed has one."""
        return Task(f"any-text-{seed}", seed=seed)

    def initial(self, task: Task) -> TextState:
        return TextState(task.seed)

    def prompt(self, task: Task, state: TextState) -> list[dict[str, str]]:
        """Return the prompt: the text that all prompts share, then the question."""
        shared = self.words("head", self.shape.shared)
        content = shared + self.words(f"question {state.seed}", self.shape.question)
        return [{"role": "user", "content": content}]

    def read(self, state: TextState, text: str) -> Action:
        return Action("move", text)

    async def step(self, state: TextState, action: Action, tools: Tools) -> Transition:
        after = TextState(state.seed, state.step + 1)
        if after.step == self.shape.steps:
            return Transition(after, "", True, 0.0)
        return Transition(after, self.observation(after), False)

    def observation(self, after: TextState) -> str:
        """Return the text that follows the action that led to ``after``."""
        return self.words(f"observation {after}", self.shape.observation)


def reward(text: str) -> float:
    """Return a reward from 0 to 1. Two texts hardly ever have the same reward, so every group of
    texts has advantages."""
    return zlib.crc32(text.encode()) / 2**32


class Checksum(Judge):
    """A judge whose scores are those of ``reward``."""

    name = "checksum"
    columns = ("reward",)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """Return one reward per turn."""
        return [Judgement({"reward": reward(turn.response)}) for turn in turns]
