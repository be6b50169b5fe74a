"""The one check of a method's parts: what the scheme reads against what strategy, judge and
environment declare that they give."""

import difflib
from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

import msgspec

from coppice.actors.environments.base import Environment
from coppice.common.declared import SchemeNeeds, StrategyGives
from coppice.judges.base import Judge, PlugIn
from coppice.learner import schemes
from coppice.learner.config import LearnerConfig
from coppice.learner.schemes import Scheme
from coppice.learner.update import corrections
from coppice.learner.update.plan import plan_of
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.rewards import COMPONENTS
from coppice.scheduler.growth.strategies import Strategy
from coppice.tools.launching.bundles import using
from coppice.tools.launching.settings import Config

Served = dict[str, PlugIn]
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
        given = self.strategy | self.judge | self.environment
        return given if self.reward else given | {"reward"}


def option_table(section: str, key: str) -> str:
    """The table of a section ("scheduler.") that holds ``key``, if ``key`` is an option of a
    built-in plug-in of this section; "" otherwise."""
    functions: dict[str, list[Callable[..., Any]]] = {}
    if section == "scheduler.":
        functions["strategy_options"] = [strategies.load(n).function for n in strategies.names()]
    if section == "learner.":
        functions["scheme_options"] = [schemes.load(n, {}).function for n in schemes.names()]
        functions["correction_options"] = list(corrections.CORRECTIONS.values())
    for table, takers in functions.items():
        if any(key in signature(taker).parameters for taker in takers):
            return table
    return ""


def faults(config: Config, served: Served, environment: Environment) -> Iterator[str]:
    """Yield why the parts of the method do not fit each other, the judges or the environment."""
    s, w = config.scheduler, config.learner
    scheme = schemes.load(w.scheme, w.scheme_options)
    strategy = strategies.load(s.strategy, s.strategy_options)
    judge = served.get(f"judge.{s.judge}")
    fitting = sorted(
        {*using("learner", "scheme", w.scheme), *using("scheduler", "strategy", s.strategy)}
    )
    remedy = (
        f": expected parts that fit, such as those of method = {' or '.join(map(repr, fitting))}"
        if fitting
        else ""
    )
    if (
        isinstance(judge, Judge)
        and judge.environments
        and environment.name not in judge.environments
    ):
        yield f"scheduler.judge = {s.judge!r} judges {' and '.join(judge.environments)} alone: data.environment is {environment.name!r}"
    if fault := mismatch(scheme.needs, strategy.gives):
        fault = fault.format(f"scheduler.strategy = {s.strategy!r}")
        yield f"learner.scheme = {w.scheme!r} {fault}{remedy}"
    if twice := sorted(_shared(scheme, strategy) & set(s.strategy_options)):
        yield (
            f"scheduler.strategy_options {twice}: scheduler.strategy = {s.strategy!r} selects by the advantage on which learner.scheme ="
            f" {w.scheme!r} trains: set them in learner.scheme_options alone"
        )
    yield from _strategy(config, strategy, environment)
    columns = columns_of(config, strategy.gives, served, environment)
    if fault := _columns(config, scheme, strategy, columns):
        yield f"{fault}{remedy}"
    yield from _models(config, scheme)
    yield from _rewards(config, scheme, strategy)


def mismatch(needs: SchemeNeeds, gives: StrategyGives) -> str:
    """The reason why a scheme cannot work with what a strategy ("{}" in the reason) emits, or ""."""
    if needs.group == "step" and gives.group != "step":
        return "compares the candidates of one prefix, and {} emits whole trajectories"
    if needs.group != "step" and gives.group == "step":
        return "reads whole trajectories, and {} emits the candidates of single steps"
    if needs.least > gives.size:
        return f"compares {needs.least} or more trajectories of one task, and {{}} emits {gives.size}, so every advantage would be 0"
    return ""


def strategy_options(config: Config) -> dict[str, Any]:
    """Return the strategy's options, with those that it shares with the scheme by whose advantage
    it selects."""
    s, w = config.scheduler, config.learner
    scheme = schemes.load(w.scheme, w.scheme_options)
    shared = _shared(scheme, strategies.load(s.strategy, s.strategy_options))
    return s.strategy_options | {k: v for k, v in w.scheme_options.items() if k in shared}


def _shared(scheme: Scheme, strategy: Strategy) -> set[str]:
    if strategy.gives.selects_as != scheme.name:
        return set()
    return {*signature(strategy.function).parameters} & {*signature(scheme.function).parameters}


def _strategy(config: Config, strategy: Strategy, environment: Environment) -> Iterator[str]:
    """What the strategy needs of engine, judge and environment."""
    s, gives, named = config.scheduler, strategy.gives, f"scheduler.strategy = {strategy.name!r}"
    if gives.group == "step" and gives.size > config.actors.max_batch:
        yield f"{named} samples groups of {gives.size}, which cannot decode together in actors.max_batch = {config.actors.max_batch}"
    if gives.needs_top and config.actors.engine == "sglang":
        yield (
            f"{named} needs the most probable tokens, which actors.engine = 'sglang' does not report: expected actors.engine = 'local',"
            " or scheduler.strategy_options.top = 0 with a strategy that has this option"
        )
    if gives.needs_judge and s.judge == UNJUDGED:
        yield f"scheduler.judge = {UNJUDGED!r} leaves {named} without scores: name a judge"
    if gives.needs_outcome_judge and not environment.outcome_judge:
        yield (
            f"{named} needs an environment whose outcomes a judge gives, such as search_qa: data.environment is {environment.name!r};"
            " expected another strategy, such as 'chain'"
        )
    idle = sorted(gives.reward_options & set(s.strategy_options))
    if idle and (s.judge == UNJUDGED or environment.rewarded_by_judge):
        yield f"scheduler.strategy_options {idle} have no effect without SLATE's rewards: remove them"


def columns_of(
    config: Config, gives: StrategyGives, served: Served, environment: Environment
) -> Columns:
    """The score columns of a run with this config and these plug-ins."""
    s, outside = config.scheduler, config.judges.outside
    judge = served.get(f"judge.{s.judge}")
    outcome = served.get(f"judge.{environment.outcome_judge}")
    judged = {*judge.columns} if isinstance(judge, Judge) and gives.judged else set[str]()
    ended = set[str]()
    if gives.outcome:
        ended = {"outcome", *environment.measured}
        if environment.gives_step_rewards:
            ended.add("step_reward")
        if isinstance(outcome, Judge):
            ended |= {*outcome.columns, *(() if environment.fresh else _EXTENT)}
    reward = ""
    if s.judge == UNJUDGED:
        reward = "scheduler.judge is 'none'"
    elif not gives.rewarded:
        reward = f"scheduler.strategy = {s.strategy!r} makes none"
    elif environment.rewarded_by_judge and "reward" not in judged:
        reward = f"judge {s.judge!r} must give it for {environment.name!r}"
    elif not environment.rewarded_by_judge and not judged >= COMPONENTS:
        reward = f"it is made of {sorted(COMPONENTS)}, of which judge {s.judge!r} lacks {sorted(COMPONENTS - judged)}"
    own = {"valid", "truncated", *gives.columns, *gives.purpose}
    unknown = s.judge in outside or environment.outcome_judge in outside
    return Columns(own, judged, ended, reward, unknown)


def _columns(config: Config, scheme: Scheme, strategy: Strategy, columns: Columns) -> str:
    """Why what the scheme reads and what is there for it do not agree, or ""."""
    s, reads, purpose = config.scheduler, scheme.needs.columns, strategy.gives.purpose
    if purpose and not reads & purpose:
        return (
            f"scheduler.strategy = {s.strategy!r} has no effect with learner.scheme = {scheme.name!r}, which reads none of"
            f" {sorted(purpose)}"
        )
    missing = sorted(reads - columns.all)
    if columns.unknown or not missing:
        return ""
    near = " or ".join(map(repr, difflib.get_close_matches(missing[0], columns.all)))
    why = f"; did you mean {near}?" if near else ""
    if missing[0] == "reward":
        why = f" ({columns.reward})"
    return (
        f"learner.scheme = {scheme.name!r} reads column {missing[0]!r}, which nobody gives{why}. scheduler.strategy = {s.strategy!r}"
        f" gives {sorted(columns.strategy)}, scheduler.judge = {s.judge!r} gives {sorted(columns.judge)}, data.environment ="
        f" {config.data.environment!r} gives {sorted(columns.environment)}"
    )


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
            f"learner.scheme = {w.scheme!r} with options {scheme.options} has the KL in its reward, and learner.kl_coef = {w.kl_coef} would"
            " count it again in the loss: set one of them to 0"
        )


def _rewards(config: Config, scheme: Scheme, strategy: Strategy) -> Iterator[str]:
    """Settings of the reward need a scheme that says which column it is, and dynamic sampling a
    scheme that compares within a group."""
    s, w, needs, default = config.scheduler, config.learner, scheme.needs, LearnerConfig()
    keys = ("reward_scale", "reward_clip", "soft_overlong", "kl_reward_coef")
    changed = [
        f"learner.{k} = {getattr(w, k)}" for k in keys if getattr(w, k) != getattr(default, k)
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
