"""Environments of OpenEnv for its adapter in this process. Their bases have OpenEnv's published
shape, or are its own where COPPICE_OPENENV_REAL is set."""

import os
import random
from typing import Any

if os.environ.get("COPPICE_OPENENV_REAL"):
    from openenv.core.env_server.interfaces import Environment  # pyright: ignore
    from openenv.core.env_server.types import Action, Observation  # pyright: ignore
else:
    import abc

    import pydantic

    class Environment(abc.ABC):
        """As in openenv 0.10: an optional transform and rubric, and three abstract members."""

        def __init__(self, transform: Any = None, rubric: Any = None):
            self.transform, self.rubric = transform, rubric

        @abc.abstractmethod
        def reset(
            self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any
        ) -> Any: ...

        @abc.abstractmethod
        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any: ...

        @property
        @abc.abstractmethod
        def state(self) -> Any: ...

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


from tests.openenv_counter import classes

Counting, Add, Seen = classes(Environment, Action, Observation)


class Unseeded(Counting):
    """Its reset takes no seed, as that of some published environments: it draws from the random
    state of the process. It gives no reward."""

    def reset(self) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().reset(seed=random.randrange(20, 1000))

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        seen = super().step(action)
        seen.drawn, seen.reward = random.randrange(1000), None
        return seen
