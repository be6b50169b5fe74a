"""Environments of OpenEnv for its adapter. Their bases are the library's own, or have its published
shape where it is not installed."""

import random
from typing import Any

try:
    from openenv.core.env_server.interfaces import Environment  # pyright: ignore
    from openenv.core.env_server.types import Action, Observation  # pyright: ignore
except ModuleNotFoundError:
    import pydantic

    class Environment:
        def __init__(self, transform: Any = None, rubric: Any = None):
            self.transform, self.rubric = transform, rubric

    class _Strict(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(
            extra="forbid", validate_assignment=True, arbitrary_types_allowed=True
        )
        metadata: dict[str, Any] = {}

    class Action(_Strict):
        pass

    class Observation(_Strict):
        done: bool = False
        reward: bool | int | float | None = None


class Add(Action):  # pyright: ignore
    number: int


class Say(Action):  # pyright: ignore
    words: str


class Seen(Observation):  # pyright: ignore
    total: int
    drawn: int


class Counting(Environment):  # pyright: ignore
    """Adds up numbers, and draws one of its own each time; 9 ends it."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Any:
        if seed == 13:
            raise RuntimeError("no episode of this seed")
        self.total, self.rng = seed or 0, random.Random(seed)
        return Seen(total=self.total, drawn=0, done=False, reward=0.0)

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        if action.number < 0:
            raise RuntimeError("only upwards")
        self.total += action.number
        seen = {"total": self.total, "drawn": self.rng.randrange(100)}
        return Seen(**seen, done=action.number == 9, reward=action.number / 10)

    @property
    def state(self) -> Any:
        return {"total": self.total}


class Unseeded(Counting):
    """Its reset takes no seed, as that of some published environments: it draws from the random
    state of the process. It gives no reward."""

    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset(seed=random.randrange(20, 1000))

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        seen = super().step(action)
        seen.drawn, seen.reward = random.randrange(1000), None
        return seen


class Listening(Counting):
    """Adds up the letters of texts."""

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        self.total += len(action.words)
        return Seen(total=self.total, drawn=0, done=False, reward=0.0)
