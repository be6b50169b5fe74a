"""Rollout strategies. Each file has ``async def grow(tree, ctx, **options)``, which starts from
``tree.tip()``, and ``gives(**options)``, which declares what it emits. EVALUATION may name the
strategy of the held-out tasks ("chain" otherwise). ``scheduler.strategy`` names a file, or a user's
"module:grow"."""

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from coppice.common.declared import StrategyGives
from coppice.common.options import checked, declared, plugin, with_defaults


class Strategy(msgspec.Struct, frozen=True):
    """A strategy with its options. examined_by: the strategy that does the held-out tasks."""

    name: str
    function: Callable[..., Awaitable[None]]
    options: dict[str, Any]
    gives: StrategyGives
    examined_by: str

    def __call__(self, tree: Any, ctx: Any) -> Awaitable[None]:
        return self.function(tree, ctx, **self.options)


def load(name: str, options: dict[str, Any] | None = None) -> Strategy:
    """The strategy ``name``. Raises ValueError that names the strategies, or this one's options."""
    setting = f"scheduler.strategy = {name!r}"
    module, function = plugin(setting, name, __name__, "grow")
    options = checked(
        "scheduler.strategy_options", f"strategy {name!r}", function, options or {}, ("tree", "ctx")
    )
    gives = declared(setting, module, "gives", StrategyGives, with_defaults(function, options))
    return Strategy(name, function, options, gives, getattr(module, "EVALUATION", "chain"))


def evaluation(name: str, options: dict[str, Any]) -> Strategy:
    """The strategy of held-out tasks in a run of ``name``, with those ``options`` that it takes."""
    examined = load(load(name, options).examined_by)
    takes = inspect.signature(examined.function).parameters
    return load(examined.name, {key: value for key, value in options.items() if key in takes})
