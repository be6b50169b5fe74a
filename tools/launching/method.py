"""The key ``method``: one word brings the vetted parts of a method, as a layer under the file; the
words and their parts are the tables of ``configs/shared/methods.toml``. And the one check of these
parts: what the scheme reads against what strategy, judge and environment declare that they give."""

import copy
import difflib
import functools
import tomllib
import typing
from collections.abc import Iterator
from functools import partial
from inspect import signature
from typing import Any

from coppice.actors.environments.base import Environment
from coppice.common.declared import SchemeNeeds, StrategyGives
from coppice.common.options import check_choice, modules
from coppice.judges.base import Judge, PlugIn
from coppice.learner import schemes
from coppice.learner.config import LearnerConfig
from coppice.learner.schemes import Scheme
from coppice.learner.update import corrections
from coppice.learner.update.plan import plan_of
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.rewards import COMPONENTS, tries_out
from coppice.scheduler.growth.strategies import Strategy
from coppice.tools.bootstrap import ROOT
from coppice.tools.launching.settings import Config, setting

Tree = dict[str, Any]
"""The nested tables of a TOML file."""

NAMED = (("scheduler", "strategy"), ("learner", "scheme"), ("learner", "correction"))
"""Keys that name a part, whose options are in the key ``<part>_options`` beside them."""
_OWN = (("scheduler", "judge"), ("learner", "critic"), ("learner", "prm"))
"""Further parts that a config chooses for its method."""


@functools.cache
def bundles() -> dict[str, Tree]:
    """The tables of every method by its word."""
    return tomllib.loads((ROOT / "configs" / "shared" / "methods.toml").read_text("utf-8"))


def bundle(tree: Tree) -> Tree:
    """The parts of the method that ``tree`` names, {} for none. Raises ValueError."""
    method = tree.get("method", "")
    if not method or not isinstance(method, str):  # another type is refused with all others
        return {}
    check_choice(f"method = {method!r}", method, bundles())
    return copy.deepcopy(bundles()[method])


def merged(base: Tree, changes: Tree) -> Tree:
    """Apply changes to base: tables are merged key by key, every other value is replaced."""
    result = dict(base)
    for key, value in changes.items():
        old = base.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            value = merged(typing.cast(Tree, old), typing.cast(Tree, value))
        result[key] = value
    return result


def over(base: Tree, changes: Tree) -> Tree:
    """Apply changes to the tables of a file. If they name another method, what the file states for
    parts of its former method that the new one does not have goes. Raises ValueError."""
    old, new = bundle(base), bundle(changes)
    if not old or not new:
        return merged(base, changes)
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in base.items()}
    for section, part in NAMED:
        own = _section(kept, section)
        if part not in own and old[section].get(part) != new[section].get(part):
            own.pop(f"{part}_options", None)
    for section, part in _OWN:
        former, now = old[section].get(part), new[section].get(part)
        renamed = isinstance(former, str) and former != now
        if renamed or (former is not None and type(former) is not type(now)):
            _section(kept, section).pop(part, None)
    return merged(kept, changes)


def under(tree: Tree) -> Tree:
    """The tables over those of their method, without the options of the parts that ``tree`` chooses
    otherwise. Raises ValueError."""
    parts = bundle(tree)
    for section, part in NAMED if parts else ():
        own = parts[section].get(part)
        if _section(tree, section).get(part, own) != own:
            parts[section].pop(f"{part}_options", None)
    return merged(parts, tree)


def _section(tree: Tree, section: str) -> Tree:
    value = tree.get(section, {})
    return value if isinstance(value, dict) else {}  # another type is refused with all others


def using(section: str, part: str, name: str) -> list[str]:
    """The methods that have this part."""
    return [word for word, parts in bundles().items() if parts[section].get(part) == name]


Served = dict[str, PlugIn]
"""The judges, opponents and speakers of [judges.use], by the service that each of them offers."""

_EXTENT = {"turns", "searches", "answered", "sampled_tokens", "response_tokens"}
"""Columns that the last turn of a trajectory of appended turns has if a judge gives the outcome
(``Context.finish``)."""


def options() -> Iterator[str]:
    """The key of every option of a built-in strategy, scheme or correction."""
    grow, weigh = modules(strategies.__name__), modules(schemes.__name__)
    tables = {
        "scheduler.strategy_options": [strategies.load(name).function for name in grow],
        "learner.scheme_options": [schemes.load(name, {}).function for name in weigh],
        "learner.correction_options": corrections.CORRECTIONS.values(),
    }
    for table, functions in tables.items():
        yield from (f"{table}.{key}" for one in functions for key in signature(one).parameters)


def faults(config: Config, served: Served, environment: Environment) -> Iterator[str]:
    """Yield why the parts of the method do not fit each other, the judges or the environment."""
    s, w, say = config.scheduler, config.learner, partial(setting, config)
    scheme = schemes.load(w.scheme, w.scheme_options)
    strategy = strategies.load(s.strategy, s.strategy_options)
    reads, grows = say("learner.scheme"), say("scheduler.strategy")
    words = {*using("learner", "scheme", w.scheme), *using("scheduler", "strategy", s.strategy)}
    fitting = f"parts that fit, such as those of method = {' or '.join(map(repr, sorted(words)))}"
    remedy = f": expected {fitting}" if words else ""
    for name in (s.judge, environment.outcome_judge):
        judge = served.get(f"judge.{name}")
        own = judge.environments if isinstance(judge, Judge) else ()
        if own and environment.name not in own:
            alone = f"judges {' and '.join(own)} alone"
            yield f"judge {name!r} {alone}: data.environment is {environment.name!r}"
    outcome = served.get(f"judge.{environment.outcome_judge}")
    if isinstance(outcome, Judge) and "outcome" not in outcome.columns:
        gives = f"gives {sorted(outcome.columns)}: expected a judge with column 'outcome'"
        yield f"judge {environment.outcome_judge!r} of the outcomes {gives}"
    if fault := mismatch(scheme.needs, strategy.gives):
        yield f"{reads} {fault.format(grows)}{remedy}"
    if twice := sorted(_shared(scheme, strategy) & set(s.strategy_options)):
        selects = f"{grows} selects by the advantage on which {reads} trains"
        instead = "set them in learner.scheme_options alone"
        yield f"scheduler.strategy_options {twice}: {selects}: {instead}"
    yield from _strategy(config, strategy.gives, environment)
    if fault := _columns(config, scheme, strategy.gives, served, environment):
        yield f"{fault}{remedy}"
    judge = served.get(f"judge.{s.judge}")
    if isinstance(judge, Judge) and "outcome" in judge.columns:
        ends = "gives 'outcome' for every action, which is the end of an episode"
        yield f"{say('scheduler.judge')} {ends}: expected 'none' or a judge without that column"
    yield from _models(config, scheme)
    yield from _rewards(config, scheme, strategy.gives)


def mismatch(needs: SchemeNeeds, gives: StrategyGives) -> str:
    """Why a scheme cannot work with what a strategy ("{}" in the reason) emits, or ""."""
    if needs.group == "step" and gives.group != "step":
        return "compares the candidates of one prefix, and {} emits whole trajectories"
    if needs.group != "step" and gives.group == "step":
        return "reads whole trajectories, and {} emits the candidates of single steps"
    if needs.least > gives.size:
        several = f"{needs.least} or more trajectories of one task"
        return f"compares {several}, and {{}} emits {gives.size}, so every advantage would be 0"
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


def _strategy(config: Config, gives: StrategyGives, environment: Environment) -> Iterator[str]:
    s, say = config.scheduler, partial(setting, config)
    named, place = say("scheduler.strategy"), say("data.environment")
    if gives.group == "step" and gives.size > config.actors.max_batch:
        batch = say("actors.max_batch")
        yield f"{named} samples groups of {gives.size}, which cannot decode together in {batch}"
    if gives.needs_top and config.actors.served:
        expected = "expected actors.engine = 'local', or scheduler.strategy_options.top = 0"
        yield f"{named} needs the most probable tokens, which servers do not report: {expected}"
    if gives.needs_judge and s.judge == UNJUDGED and not tries_out(environment):
        yield f"scheduler.judge = {UNJUDGED!r} leaves {named} without scores: name a judge"
    if gives.needs_outcome_judge and not environment.outcome_judge:
        needed = "an environment whose outcomes a judge gives, such as search_qa"
        yield f"{named} needs {needed}, and {place}: expected another strategy, such as 'chain'"
    without = sorted(gives.reward_options & set(s.strategy_options))
    if without and (s.judge == UNJUDGED or environment.rewarded_by_judge):
        options = f"scheduler.strategy_options {without}"
        yield f"{options} have no effect without SLATE's rewards: remove them"


def _columns(
    config: Config, scheme: Scheme, gives: StrategyGives, served: Served, environment: Environment
) -> str:
    s, outside, say = config.scheduler, config.judges.outside, partial(setting, config)
    reads, grows, judges = say("learner.scheme"), say("scheduler.strategy"), say("scheduler.judge")
    if gives.purpose and not scheme.needs.columns & gives.purpose:
        none = f"which reads none of {sorted(gives.purpose)}"
        return f"{grows} has no effect with {reads}, {none}"
    if s.judge in outside or environment.outcome_judge in outside:
        return ""  # it may give any column
    judge, outcome = (served.get(f"judge.{n}") for n in (s.judge, environment.outcome_judge))
    judged = {*judge.columns} if isinstance(judge, Judge) and gives.judged else set[str]()
    ended = {"outcome", *environment.measured} if gives.outcome else set[str]()
    if gives.outcome and environment.gives_step_rewards:
        ended.add("step_reward")
    if gives.outcome and isinstance(outcome, Judge):
        ended |= {*outcome.columns, *(() if environment.fresh else _EXTENT)}
    own = {"valid", "truncated", *gives.columns, *gives.purpose}
    no_reward = ""
    if s.judge == UNJUDGED and not (gives.needs_judge and tries_out(environment)):
        no_reward = "scheduler.judge is 'none'"
    elif not gives.rewarded:
        no_reward = f"{grows} makes none"
    elif s.judge == UNJUDGED:
        pass
    elif environment.rewarded_by_judge and "reward" not in judged:
        no_reward = f"judge {s.judge!r} must give it for {environment.name!r}"
    elif not environment.rewarded_by_judge and not judged >= COMPONENTS:
        lacks = f"judge {s.judge!r} lacks {sorted(COMPONENTS - judged)}"
        no_reward = f"it is made of {sorted(COMPONENTS)}, of which {lacks}"
    given = own | judged | ended | (set() if no_reward else {"reward"})
    if (prm := plan_of(config.learner).prm) and prm.outcome not in given:
        return f"learner.prm.outcome = {prm.outcome!r}: expected one of the columns {sorted(given)}"
    missing = sorted(scheme.needs.columns - given)
    if not missing:
        return ""
    near = " or ".join(map(repr, difflib.get_close_matches(missing[0], given)))
    why = f"; did you mean {near}?" if near else ""
    why = f" ({no_reward})" if missing[0] == "reward" else why
    return (
        f"{reads} reads column {missing[0]!r}, which nobody gives{why}. {grows} gives"
        f" {sorted(own)}, {judges} gives {sorted(judged)}, {say('data.environment')} gives"
        f" {sorted(ended)}"
    )


def _models(config: Config, scheme: Scheme) -> Iterator[str]:
    w, needs, reads = config.learner, scheme.needs, setting(config, "learner.scheme")
    for section in ("critic", "prm"):
        if getattr(w, section) is not None and section not in plan_of(w).models:
            without = f"learner.{section} has no effect"
            yield f"{without} with {reads} and its options: remove the section"
    if needs.prm_loss and (w.prm is None or w.prm.loss != needs.prm_loss):
        yield f"{reads} trains its reward model with learner.prm.loss = {needs.prm_loss!r}: set it"
    if "kl" in needs.models and w.kl_coef:
        again = f"{setting(config, 'learner.kl_coef')} would count it again in the loss"
        yield f"{reads} has the KL in its reward, and {again}: set one of them to 0"


def _rewards(config: Config, scheme: Scheme, gives: StrategyGives) -> Iterator[str]:
    w, needs, default, say = config.learner, scheme.needs, LearnerConfig(), partial(setting, config)
    reads, keys = say("learner.scheme"), "reward_scale reward_clip soft_overlong kl_reward_coef"
    changed = [say(f"learner.{k}") for k in keys.split() if getattr(w, k) != getattr(default, k)]
    if changed and not needs.shaped:
        yield f"{changed[0]} has no effect: {reads} with its options reads no outcome; remove it"
    if config.scheduler.dynamic_sampling_budget:
        changed.append(say("scheduler.dynamic_sampling_budget"))
        if needs.group == "batch" or gives.size < 2:
            both = f"{reads} and {say('scheduler.strategy')} compare no trajectories of one task"
            yield f"{changed[-1]} has no effect: {both} or step: set it to 0"
    if w.kl_reward_coef and "kl_coef" in signature(scheme.function).parameters:
        remedy = "set learner.scheme_options.kl_coef instead"
        kl = say("learner.kl_reward_coef")
        yield f"{kl}: {reads} charges each token its own KL: {remedy}"
    if changed and not needs.reward_column:
        yield (
            f"{changed[0]}: {reads} makes the rewards of turns from {sorted(needs.columns)} itself,"
            " and a change of one column would break its equations: remove it"
            " (learner.advantage_scale and advantage_clip change the advantages, and"
            " learner.kl_coef is a KL in the loss), or declare SchemeNeeds.reward (docs/extend.md)"
        )
