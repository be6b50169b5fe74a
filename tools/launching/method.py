"""The one check of a method: compare what the scheme reads with what strategy, judge and
environment declare that they give."""

import difflib
from collections.abc import Callable, Iterable, Iterator
from inspect import signature
from typing import Any

import msgspec

from coppice.actors.environments.base import Environment
from coppice.common.declared import SchemeNeeds, StrategyGives
from coppice.judges.base import Judge, Worker
from coppice.learner import schemes
from coppice.learner.config import LearnerConfig
from coppice.learner.schemes import Scheme
from coppice.learner.update import corrections
from coppice.learner.update.plan import plan_of
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.rewards import COMPONENTS
from coppice.scheduler.growth.strategies import Strategy
from coppice.tools.launching.settings import Config

Served = dict[str, Worker]
"""The judges, opponents and speakers of [judges.use], by the service that each of them offers."""

_EXTENT = {"turns", "searches", "answered", "sampled_tokens", "response_tokens"}
"""Columns that the last turn of a trajectory of appended turns has if a judge gives the outcome
(``Context.finish``)."""


class Columns(msgspec.Struct, frozen=True):
    """Score columns by source. reward: why "reward" is missing, or "". unknown: a judge of
    [judges.outside] may give any column."""

    strategy: set[str]
    judge: set[str]
    environment: set[str]
    reward: str
    unknown: bool

    @property
    def all(self) -> set[str]:
        """The columns of all sources."""
        return (
            self.strategy
            | self.judge
            | self.environment
            | ({"reward"} if not self.reward else set())
        )


def option_table(section: str, key: str) -> str:
    """The table of a section ("scheduler.") that holds ``key``, if ``key`` is an option of a
    built-in plug-in of this section; "" otherwise."""
    functions: dict[str, list[Callable[..., Any]]] = {}
    if section == "scheduler.":
        functions["strategy_options"] = [
            strategies.load(name).function for name in strategies.names()
        ]
    if section == "learner.":
        functions["scheme_options"] = [schemes.load(name, {}).function for name in schemes.names()]
        functions["correction_options"] = list(corrections.CORRECTIONS.values())
    return next(
        (
            table
            for table, takers in functions.items()
            if any(key in signature(taker).parameters for taker in takers)
        ),
        "",
    )


def faults(config: Config, served: Served, environment: Environment) -> Iterator[str]:
    """Yield a column that the scheme reads and nobody gives, and choices that do not fit, with
    those that fit."""
    s, w = config.scheduler, config.learner
    scheme, strategy = (
        schemes.load(w.scheme, w.scheme_options),
        strategies.load(s.strategy, s.strategy_options),
    )
    judge = served.get(f"judge.{s.judge}")
    yield from _judge(s.judge, judge, environment)
    yield from _groups(scheme, strategy)
    if twice := sorted(_shared(scheme, strategy) & set(s.strategy_options)):
        yield (
            f"scheduler.strategy_options {twice}: scheduler.strategy = {s.strategy!r} selects by the advantage on which learner.scheme ="
            f" {w.scheme!r} trains: set them in learner.scheme_options alone"
        )
    yield from _strategy(config, strategy, environment)
    yield from _columns(
        config, scheme, strategy, columns_of(config, strategy.gives, served, environment)
    )
    yield from _models(config, scheme)
    yield from _rewards(config, scheme, strategy)


def strategy_options(config: Config) -> dict[str, Any]:
    """Return the strategy's options, with those that it shares with the scheme by whose advantage
    it selects."""
    s, w = config.scheduler, config.learner
    shared = _shared(
        schemes.load(w.scheme, w.scheme_options), strategies.load(s.strategy, s.strategy_options)
    )
    return s.strategy_options | {
        name: value for name, value in w.scheme_options.items() if name in shared
    }


def _shared(scheme: Scheme, strategy: Strategy) -> set[str]:
    """Return the options that are one setting of scheme and strategy."""
    if strategy.gives.selects_as != scheme.name:
        return set()
    return {*signature(strategy.function).parameters} & {*signature(scheme.function).parameters}


def _judge(name: str, judge: Worker | None, environment: Environment) -> Iterator[str]:
    if (
        isinstance(judge, Judge)
        and judge.environments
        and environment.name not in judge.environments
    ):
        yield f"scheduler.judge = {name!r} judges {' and '.join(judge.environments)} alone: data.environment is {environment.name!r}"


def mismatch(needs: SchemeNeeds, gives: StrategyGives) -> str:
    """The reason why a scheme cannot work with what a strategy ("{}" in the reason) emits, or ""."""
    if needs.group == "step" and gives.group != "step":
        return "compares the candidates of one prefix, and {} emits whole trajectories"
    if needs.group != "step" and gives.group == "step":
        return "reads whole trajectories, and {} emits the candidates of single steps"
    if needs.least > gives.size:
        return f"compares {needs.least} or more trajectories of one task, and {{}} emits {gives.size}, so every advantage would be 0"
    return ""


def _groups(scheme: Scheme, strategy: Strategy) -> Iterator[str]:
    fault = mismatch(scheme.needs, strategy.gives).format(f"scheduler.strategy = {strategy.name!r}")
    if not fault:
        return
    known = [strategies.load(name) for name in strategies.names()]
    fitting = [one.name for one in known if not mismatch(scheme.needs, one.gives)]
    elsewhere = {column for one in known for column in one.gives.purpose - strategy.gives.purpose}
    others = {name: schemes.load(name, {}).needs for name in schemes.names()}
    others = [
        name
        for name, needs in others.items()
        if not mismatch(needs, strategy.gives) and not needs.columns & elsewhere
    ]
    options = f" (now {strategy.options})" if strategy.options else ""
    yield (
        f"learner.scheme = {scheme.name!r} {fault}: expected scheduler.strategy of {fitting}, with options that fit{options}, or"
        f" learner.scheme of {others}"
    )


def _strategy(config: Config, strategy: Strategy, environment: Environment) -> Iterator[str]:
    s, gives = config.scheduler, strategy.gives
    if gives.group == "step" and gives.size > config.actors.max_batch:
        yield (
            f"scheduler.strategy = {s.strategy!r} samples groups of {gives.size}, which cannot decode together in actors.max_batch ="
            f" {config.actors.max_batch}"
        )
    if gives.needs_top and config.actors.engine == "sglang":
        yield (
            f"scheduler.strategy = {s.strategy!r} needs the most probable tokens, which actors.engine = 'sglang' does not report: expected"
            " actors.engine = 'local', or scheduler.strategy_options.top = 0 with a strategy that has this option"
        )
    if gives.needs_judge and s.judge == UNJUDGED:
        yield f"scheduler.judge = {UNJUDGED!r} leaves scheduler.strategy = {s.strategy!r} without scores: name a judge"
    if gives.needs_outcome_judge and not environment.outcome_judge:
        fitting = [
            name
            for name in strategies.names()
            if not strategies.load(name).gives.needs_outcome_judge
        ]
        yield (
            f"scheduler.strategy = {s.strategy!r} needs an environment whose outcomes a judge gives, such as search_qa:"
            f" data.environment is {environment.name!r}; expected scheduler.strategy of {fitting}"
        )
    idle = sorted(gives.reward_options & set(s.strategy_options))
    if idle and (s.judge == UNJUDGED or environment.rewarded_by_judge):
        yield f"scheduler.strategy_options {idle} have no effect without SLATE's rewards: remove them"


def columns_of(
    config: Config, gives: StrategyGives, served: Served, environment: Environment
) -> Columns:
    """The score columns of a run with this config and these plug-ins."""
    s = config.scheduler
    judge, outcome = (
        served.get(f"judge.{s.judge}"),
        served.get(f"judge.{environment.outcome_judge}"),
    )
    judged = {*judge.columns} if isinstance(judge, Judge) and gives.judged else set[str]()
    ended = set[str]()
    if gives.outcome:
        ended = {
            "outcome",
            *environment.measured,
            *(["step_reward"] if environment.gives_step_rewards else []),
        }
        if isinstance(outcome, Judge):
            ended |= {*outcome.columns, *(() if environment.fresh else _EXTENT)}
    reward = ""
    if s.judge == UNJUDGED:
        reward = "scheduler.judge is 'none'"
    elif not gives.rewarded:
        reward = f"scheduler.strategy = {s.strategy!r} makes none"
    elif environment.rewarded_by_judge:
        reward = (
            "" if "reward" in judged else f"judge {s.judge!r} must give it for {environment.name!r}"
        )
    elif not judged >= COMPONENTS:
        reward = f"it is made of {sorted(COMPONENTS)}, of which judge {s.judge!r} lacks {sorted(COMPONENTS - judged)}"
    outside = s.judge in config.judges.outside or environment.outcome_judge in config.judges.outside
    return Columns(
        {"valid", "truncated", *gives.columns, *gives.purpose}, judged, ended, reward, outside
    )


def _columns(config: Config, scheme: Scheme, strategy: Strategy, columns: Columns) -> Iterator[str]:
    s, reads, gives = config.scheduler, scheme.needs.columns, strategy.gives
    if gives.purpose and not reads & gives.purpose:
        yield (
            f"scheduler.strategy = {s.strategy!r} has no effect with learner.scheme = {scheme.name!r}, which reads none of"
            f" {sorted(gives.purpose)}: expected learner.scheme of {_reading(gives.purpose)}, or another strategy"
        )
    missing = sorted(reads - columns.all)
    if columns.unknown or not missing:
        return
    column = missing[0]
    near = difflib.get_close_matches(column, columns.all)
    why = (
        f" ({columns.reward})"
        if column == "reward"
        else f"; did you mean {' or '.join(map(repr, near))}?"
        if near
        else ""
    )
    fitting = [
        name
        for name in strategies.names()
        if column in {*(g := strategies.load(name).gives).columns, *g.purpose}
    ]
    offers = f"; scheduler.strategy of {fitting} gives it" if fitting else ""
    yield (
        f"learner.scheme = {scheme.name!r} reads column {column!r}, which nobody gives{why}{offers}. scheduler.strategy = {s.strategy!r}"
        f" gives {sorted(columns.strategy)}, scheduler.judge = {s.judge!r} gives {sorted(columns.judge)}, data.environment ="
        f" {config.data.environment!r} gives {sorted(columns.environment)}"
    )


def _reading(columns: Iterable[str]) -> list[str]:
    return [name for name in schemes.names() if schemes.load(name, {}).needs.columns & set(columns)]


def _models(config: Config, scheme: Scheme) -> Iterator[str]:
    """Only those of the learner's own models that the scheme reads may have a section."""
    w, needs = config.learner, scheme.needs
    for section in ("critic", "prm"):
        if getattr(w, section) is not None and section not in plan_of(w).models:
            yield f"learner.{section} has no effect with learner.scheme = {w.scheme!r} and its options: remove the section"
    if needs.prm_loss and (w.prm is None or w.prm.loss != needs.prm_loss):
        yield f"learner.scheme = {w.scheme!r} trains its reward model with learner.prm.loss = {needs.prm_loss!r}: set it"
    if "kl" in needs.models and w.kl_coef:
        yield (
            f"learner.scheme = {w.scheme!r} {_shown(w.scheme_options)} has the KL in its reward, and learner.kl_coef = {w.kl_coef} would"
            " count it again in the loss: set one of them to 0"
        )


def _rewards(config: Config, scheme: Scheme, strategy: Strategy) -> Iterator[str]:
    """Settings of the reward need a scheme that says which column it is, and dynamic sampling a
    scheme that compares within a group."""
    s, w, needs = config.scheduler, config.learner, scheme.needs
    keys = {
        key: getattr(w, key)
        for key in ("reward_scale", "reward_clip", "soft_overlong", "kl_reward_coef")
    }
    changed = [
        f"learner.{key} = {value}"
        for key, value in keys.items()
        if value != getattr(LearnerConfig(), key)
    ]
    if s.dynamic_sampling_budget:
        changed.append(f"scheduler.dynamic_sampling_budget = {s.dynamic_sampling_budget}")
        if needs.group == "batch" or strategy.gives.size < 2:
            yield (
                f"{changed[-1]} has no effect: learner.scheme = {w.scheme!r} and scheduler.strategy = {s.strategy!r} do not compare several"
                " trajectories of one task or step: set it to 0"
            )
    if w.kl_reward_coef and "kl_coef" in signature(scheme.function).parameters:
        yield (
            f"learner.kl_reward_coef = {w.kl_reward_coef}: learner.scheme = {w.scheme!r} charges each token its own KL: set"
            " learner.scheme_options.kl_coef instead"
        )
    if changed and not needs.reward_column:
        yield (
            f"{changed[0]}: learner.scheme = {w.scheme!r} makes the rewards of turns from {sorted(needs.columns)} itself, and a change of one of these"
            " columns would break its equations: remove it (learner.advantage_scale and advantage_clip change the advantages, and learner.kl_coef is"
            " a KL in the loss); a scheme of your own whose reward is one column declares SchemeNeeds.reward (docs/extend.md)"
        )


def _shown(options: dict[str, Any]) -> str:
    return f"with options {options}" if options else "with its default options"
