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
    """Pure rules of one kind of task; holds no state of any episode. States are frozen, hashable structs."""

    name: str
    stop: list[str]
    """Strings that end an action."""
    forced_prefix: str
    """Text that forces a final answer once the budget of steps is used up; "": episodes end by the rules alone."""
    outcome_judge: str
    """The judge that gives the outcome of a finished episode; "": the last transition says it."""
    measured: Sequence[str]
    """Score columns that the last turn of an episode has beside "outcome": the keys of ``Transition.measures``."""
    headline: str
    """The measure to look at first."""
    fresh: bool
    """Each turn is a new prompt that shows the state; otherwise observations are appended to one growing text."""
    rewarded_by_judge: bool
    """The judge sees every action and its column "reward" is the reward; otherwise SLATE's composite of its columns is."""

    def initial(self, task: Task) -> Any:
        """The first state; may take long (a generated puzzle)."""
        ...

    async def open(self, state: Any, tools: Tools) -> Any:
        """The state in which the policy acts first (an opponent that begins has moved)."""
        ...

    def prompt(self, task: Task, state: Any) -> list[dict[str, str]]:
        """Chat messages for the policy to act on; ``SPLIT`` separates what all turns share."""
        ...

    def read(self, state: Any, text: str) -> Action:
        """The action that generated text means in ``state``."""
        ...

    def parse_forced(self, text: str) -> Action:
        """The action generated after ``forced_prefix``."""
        ...

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition: ...

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn: ...

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Named results of a finished episode from its turns' score columns, in order; "forced" is 1 for a forced answer."""
        ...


class Generator(Protocol):
    """An environment that makes its own tasks."""

    def task(self, seed: int) -> Task:
        """The task of ``seed``: the same on every machine."""
        ...
