"""The environment contract: states are immutable values and stepping is pure, so branching is free and a crash loses nothing."""

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from wire.messages import JudgedTurn, Passage

SPLIT = "\x1e"
"""In a prompt's content: before it stands what every turn of the episode shares, after it the state of this turn."""


class Task(msgspec.Struct, frozen=True):
    """One problem: as it stands in a task file, or made from ``seed`` by a game.

    ``evidence``: the supporting passages "Title\\nField: value", one a hop.
    """

    id: str
    question: str = ""
    golds: list[str] = []
    evidence: list[str] = []
    hops: int = 1
    source: str = ""
    seed: int = 0


class Rejected(msgspec.Struct, frozen=True):
    """A task that cannot work, with the reason: it is quarantined, never silently dropped."""

    where: str
    reason: str


class Action(msgspec.Struct, frozen=True):
    """A parsed action.

    kind: "search" or "answer" (search QA), "move" (a legal move of a game), "illegal" (well-formed, against the rules) or
    "invalid" (not readable). move: the game's own integers, None when there is none.
    """

    kind: str
    text: str
    think: str | None = None
    query: str | None = None
    answer: str | None = None
    move: tuple[int, ...] | None = None

    @property
    def valid(self) -> bool:
        return self.kind not in ("invalid", "illegal")


class Transition(msgspec.Struct, frozen=True):
    """What a step leads to; ``observation`` is the text appended for the policy to read ("" when done, and in games).

    outcome: the episode's return when it ends here and the rules alone decide it. measures: named results of a finished episode,
    such as success and completion.
    """

    state: Any
    observation: str
    done: bool
    outcome: float | None = None
    measures: dict[str, float] = {}


class Tools(Protocol):
    """The slow services an environment may await while it steps, and its randomness."""

    rng: random.Random

    async def retrieve(self, query: str, topk: int) -> list[Passage]: ...

    async def play(self, player: str, state: Any) -> tuple[int, ...]:
        """The move of the opponent served as ``player.<player>``."""
        ...


class Environment(Protocol):
    """Pure rules of one kind of task; holds no state of any episode. States are frozen, hashable structs.

    A subclass writes ``initial``, ``prompt``, ``read`` and ``step``; what it does not say otherwise holds for a game whose rules end the
    episode and whose judge gives the reward (docs/extend.md).
    """

    name: str
    stop: list[str] = []
    """Strings that end an action."""
    forced_prefix: str = ""
    """Text that forces a final answer once the budget of steps is used up; "": episodes end by the rules alone."""
    outcome_judge: str = ""
    """The judge that gives the outcome of a finished episode; "": the last transition says it."""
    measured: Sequence[str] = ()
    """Score columns that the last turn of an episode has beside "outcome": the keys of ``Transition.measures``."""
    headline: str = "return"
    """The measure to look at first."""
    fresh: bool = True
    """Each turn is a new prompt that shows the state; otherwise observations are appended to one growing text."""
    rewarded_by_judge: bool = True
    """The judge sees every action and its column "reward" is the reward; otherwise SLATE's composite of its columns is."""

    def initial(self, task: Task) -> Any:
        """The first state; may take long (a generated puzzle)."""
        ...

    async def open(self, state: Any, tools: Tools) -> Any:
        """The state in which the policy acts first (an opponent that begins has moved)."""
        return state

    def prompt(self, task: Task, state: Any) -> list[dict[str, str]]:
        """Chat messages for the policy to act on; ``SPLIT`` separates what all turns share."""
        ...

    def read(self, state: Any, text: str) -> Action:
        """The action that generated text means in ``state``."""
        ...

    def parse_forced(self, text: str) -> Action:
        """The action generated after ``forced_prefix``."""
        return Action("invalid", text)

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition:
        """What ``action`` leads to."""
        ...

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn:
        """What a judge or an oracle sees of ``action`` taken in ``state``."""
        return JudgedTurn(
            question=task.question or task.id,
            golds=task.golds,
            context="",
            response=action.text,
            step=step,
            budget=budget,
            state=msgspec.to_builtins(state),
            move=None if action.move is None else list(action.move),
        )

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Named results of a finished episode from its turns' score columns, in order; "forced" is 1 for a forced answer.

        By default: return, turns, what the last turn measured, and per turn valid and oracle (its reward; of a binary oracle a share).
        """
        last = turns[-1]
        results = {"return": [last["outcome"]], "turns": [float(len(turns))]}
        results |= {name: [last[name]] for name in self.measured if name in last}
        results |= {"valid": [turn["valid"] for turn in turns if "valid" in turn]}
        return results | {"oracle": [turn["reward"] for turn in turns if "reward" in turn]}


class Generator(Protocol):
    """An environment that makes its own tasks."""

    def task(self, seed: int) -> Task:
        """The task of ``seed``: the same on every machine."""
        ...
