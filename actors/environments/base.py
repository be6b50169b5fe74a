"""The environment contract: states are immutable values and stepping is pure, so branching is free and a crash loses nothing."""

from typing import Any, Protocol

import msgspec

from wire.messages import JudgedTurn, Passage


class Task(msgspec.Struct, frozen=True):
    """One problem as it stands in a task file. ``evidence``: the supporting passages "Title\\nField: value", one a hop."""

    id: str
    question: str
    golds: list[str]
    evidence: list[str] = []
    hops: int = 1
    source: str = ""


class Rejected(msgspec.Struct, frozen=True):
    """A task that cannot work, with the reason: it is quarantined, never silently dropped."""

    where: str
    reason: str


class Action(msgspec.Struct, frozen=True):
    """A parsed action. kind: "search", "answer" or "invalid" (then query and answer are None)."""

    kind: str
    text: str
    think: str | None = None
    query: str | None = None
    answer: str | None = None

    @property
    def valid(self) -> bool:
        return self.kind != "invalid"


class Transition(msgspec.Struct, frozen=True):
    """What a step leads to; ``observation`` is the text appended for the policy to read ("" when done)."""

    state: Any
    observation: str
    done: bool


class Tools(Protocol):
    """The slow services an environment may await while it steps."""

    async def retrieve(self, query: str, topk: int) -> list[Passage]: ...


class Environment(Protocol):
    """Pure rules of one kind of task; holds no state of any episode."""

    stop: list[str]
    """Strings that end an action."""
    forced_prefix: str
    """Text that forces a final answer once the budget of steps is used up."""

    def initial(self, task: Task) -> Any: ...

    def prompt(self, task: Task) -> list[dict[str, str]]: ...

    def parse(self, text: str) -> Action: ...

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition: ...

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn: ...
