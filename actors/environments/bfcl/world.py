"""The live objects of one task of the leaderboard: the wheel's own classes, called by name."""

import contextlib
import copy
import decimal
import inspect
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from coppice.actors.environments.bfcl.calls import FunctionCall

GROWING, LARGEST = ("exponent", "precision", "decimal_places"), 1000
"""Arguments, and their largest size: the classes compute with larger ones for minutes."""
LARGEST_STATE = 10**5
"""The characters of the public state, with their paths, from which nothing is copied: copies of
directories into each other double it. The leaderboard's largest state has 33,176."""


class BfclWorld:
    """Objects of ``kinds`` as ``config`` describes them, and their public methods by name. Nothing
    here is shared with another world."""

    def __init__(self, kinds: Mapping[str, Callable[[], Any]], config: dict[str, Any], long: bool):
        self.instances = {name: kind() for name, kind in kinds.items()}
        self.methods: dict[str, Callable[..., Any]] = {}
        for name, one in self.instances.items():
            if hasattr(one, "_load_scenario"):
                one._load_scenario(copy.deepcopy(config.get(name, {})), long_context=long)
            public = inspect.getmembers(one, inspect.ismethod)
            self.methods |= {key: method for key, method in public if not key.startswith("_")}

    def run(self, call: FunctionCall) -> str:
        """Return the result of a call as the leaderboard's executor writes it."""
        values = call.values()
        try:
            if call.name not in self.methods:
                raise NameError(f"name {call.name!r} is not defined")
            if max(abs(values.get(key, 0)) for key in GROWING) > LARGEST:
                raise ValueError(f"one of {GROWING} is above {LARGEST}")
            if call.name == "cp" and sum(map(len, _leaves(self.instances, ""))) > LARGEST_STATE:
                raise ValueError(f"the state has more than {LARGEST_STATE} characters")
            with decimal.localcontext():
                result = self.methods[call.name](**values)
            with contextlib.suppress(TypeError, ValueError):
                return json.dumps(result) if isinstance(result, dict) else str(result)
            return str(result)
        except Exception as error:  # noqa: BLE001 - whatever the policy's arguments raise
            return f"Error during execution: {error}"

    def leaves(self) -> Counter[str]:
        """Return the public state as a multiset of paths with values. Raises RecursionError where a
        directory holds itself."""
        return Counter(_leaves(self.instances, ""))


def _leaves(value: Any, path: str) -> list[str]:
    if hasattr(value, "__dict__"):
        value = {k: v for k, v in vars(value).items() if not k.startswith("_") and k != "parent"}
    if isinstance(value, dict):
        return [path, *(leaf for k, one in value.items() for leaf in _leaves(one, f"{path}.{k}"))]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one, f"{path}[]")]
    return [f"{path} = {value!r}"]
