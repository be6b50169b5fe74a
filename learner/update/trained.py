"""Which turns a scheme trains on. A missing score is no score: a trajectory without it enters no
statistic and gets the advantage 0."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import numpy as np

from coppice.learner.update.statistics import within
from coppice.learner.update.table import TurnTable
from coppice.learner.update.targets import Estimate

P = ParamSpec("P")
R = TypeVar("R", np.ndarray, Estimate)
Rule = Callable[..., np.ndarray]
"""A function of the table and the scheme's options that returns, as bool [turns], which turns
train."""


def scored(name: str) -> Rule:
    """Return the rule that a trajectory trains if it has its score (``Trajectories.total``). name:
    the score column, or the option that names it."""

    def rule(table: TurnTable, **options: object) -> np.ndarray:
        trajectories = table.trajectories()
        return ~np.isnan(trajectories.total(table.column(str(options.get(name, name)))))[
            trajectories.of
        ]

    return rule


def spread(name: str) -> Rule:
    """Return the rule of ``scored``, which also leaves a question out whose trajectories all score
    the same, if the option ``leave_out_equal`` is True: whitening over a batch would give it an
    advantage that compares nothing."""

    def rule(table: TurnTable, leave_out_equal: bool, **options: object) -> np.ndarray:
        kept = scored(name)(table, **options)
        if not leave_out_equal:
            return kept
        trajectories = table.trajectories()
        totals = trajectories.total(table.column(str(options.get(name, name))))
        known, differs = ~np.isnan(totals), np.zeros(len(totals), bool)
        differs[known] = (
            within(trajectories.tree[known], totals[known], lambda x: np.full(len(x), np.ptp(x)))
            > 0
        )
        return kept & differs[trajectories.of]

    return rule


def trains_on(
    rule: Rule,
) -> Callable[[Callable[Concatenate[TurnTable, P], R]], Callable[Concatenate[TurnTable, P], R]]:
    """Decorate a scheme's function, which then sees only the turns that train by ``rule``. The
    tokens of the others get 0.

    The function's attribute ``trains`` is the rule, so that the trainer leaves the same turns out
    of the whole update.
    """

    def decorate(
        function: Callable[Concatenate[TurnTable, P], R],
    ) -> Callable[Concatenate[TurnTable, P], R]:
        signature = inspect.signature(function)

        def trains(*arguments: object, **options: object) -> np.ndarray:
            bound = signature.bind(*arguments, **options)
            bound.apply_defaults()
            return rule(**bound.arguments)

        @functools.wraps(function)
        def restricted(table: TurnTable, *arguments: P.args, **options: P.kwargs) -> R:
            kept = trains(table, *arguments, **options)
            if kept.all():
                return function(table, *arguments, **options)
            tokens = table.per_token(kept)
            if kept.any():
                result: Any = function(table.only(kept), *arguments, **options)
            else:
                result = (
                    Estimate(np.zeros(0), np.zeros(0))
                    if signature.return_annotation is Estimate
                    else np.zeros(0)
                )
            if not isinstance(result, Estimate):
                return cast(R, _placed(result, tokens))
            returns = None if result.returns is None else _placed(result.returns, tokens)
            trained = (
                None if result.trained is None else _placed(result.trained, tokens).astype(bool)
            )
            return cast(R, Estimate(_placed(result.advantages, tokens), returns, trained))

        restricted.trains = trains  # pyright: ignore[reportAttributeAccessIssue]
        return restricted

    return decorate


def _placed(values: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    placed = np.zeros(len(tokens))
    placed[tokens] = values
    return placed
