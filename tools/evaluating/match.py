"""The match of an evaluation: environment, opponents, oracle and player of the command line,
checked before anything is started."""

import argparse
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from coppice.actors.engines.endpoint import EndpointText
from coppice.actors.environments import registry
from coppice.actors.environments.base import POLICY, Environment, Task
from coppice.actors.environments.game import Game
from coppice.judges.base import Player as Opponent
from coppice.judges.base import PlugIn
from coppice.judges.serve import BUILT_IN, PLAYERS, make_worker
from coppice.scheduler.config import UNJUDGED, SchedulerConfig
from coppice.scheduler.evaluation.evaluation import BASELINES, lists_replies
from coppice.tools.evaluating import players
from coppice.tools.evaluating.players import Player, Trained, table

NO_MODEL = {name.removesuffix("_legal_move"): name for name in BASELINES}
"""The players of --baseline, by their names on the command line."""
SIMULATIONS = 1000
"""The simulations per move of the fixed opponent (methods.md 3.2)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything on which the result depends, saved as OUT/evaluation.json; a resumed evaluation
    must have the same settings.

    source: the model folder, the run, the endpoint's URL or the baseline. weights: the digest of
    local weights. sides: "half each", or "as drawn" by the environment's option second. opponents:
    those that are served, with their options. oracle: "" for none.
    """

    environment: str
    options: dict[str, Any]
    player: str
    source: str
    model: str = ""
    version: int = 0
    weights: str = ""
    fields: dict[str, Any] = {}
    games: int
    seed: int
    seeds: int
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    thinking: bool
    sides: str
    opponents: dict[str, dict[str, Any]]
    oracle: str
    oracle_options: dict[str, Any]


class HalfEach:
    """A game in which the opponent begins every second task, so exactly half of an even number of
    consecutive seeds."""

    def __init__(self, environments: Sequence[Game]):
        self.environments = environments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environments[0], name)

    def initial(self, task: Task) -> Any:
        """The first state. The seed of the task decides the player's side."""
        return self.environments[task.seed % 2].initial(task)

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """The measures for the side that was played."""
        return self.environments[task.seed % 2].measures(task, turns)


class Match(msgspec.Struct, frozen=True):
    """Everything that an evaluation needs; nothing is started or paid for yet."""

    settings: Settings
    environment: Environment
    workers: list[PlugIn]
    player: Player
    judge: str


def prepare(flags: argparse.Namespace) -> Match:
    """The match that a command line describes. Raises ValueError, OSError or MemoryError with the
    remedy."""
    check(flags)
    run = players.read_run(flags.run, flags.version) if flags.run else None
    options = table("--option", flags.option)
    same = run is not None and run.scheduler.environment == flags.environment
    # the run's own prompt, but the fixed opponents, because results must be comparable
    if run is not None and same:
        trained = run.scheduler.options | run.scheduler.scheduler.evaluation.options
        kept = {k: v for k, v in trained.items() if k not in ("opponents", "second")}
        options = kept | options
    environment = _environment(flags.environment, options)
    options, opponents, workers = _opponents(flags, environment, options)
    parameters = inspect.signature(type(environment).__init__).parameters
    halves = "second" in parameters and "second" not in options
    environment = _environment(flags.environment, options)
    if halves:
        each = [_environment(flags.environment, options | {"second": side}) for side in (0.0, 1.0)]
        environment: Any = HalfEach(each)
    outcome = environment.outcome_judge
    oracle = (
        environment.name if flags.oracle and environment.name in BUILT_IN and not outcome else ""
    )
    oracle_options = table("--oracle-option", flags.oracle_option)
    if oracle_options and not oracle and not outcome:
        raise ValueError(
            f"--oracle-option has no effect: {flags.environment} has no built-in oracle or judge"
        )
    judges = [
        _worker(name, oracle_options, "--oracle-option") for name in (oracle, outcome) if name
    ]
    speakers = _speakers(flags, environment)
    workers += [_worker(name, one, "--speaker-option") for name, one in speakers.items()]
    default = run.scheduler.scheduler if run is not None and same else SchedulerConfig()
    player = _player(flags, run, environment)
    settings = Settings(
        environment=flags.environment, options=options, games=flags.games, seed=flags.seed, seeds=flags.seeds,
        temperature=flags.temperature, top_p=flags.top_p, top_k=flags.top_k,
        max_tokens=flags.max_tokens or default.max_action_tokens, thinking=default.thinking and not flags.no_thinking,
        sides="half each" if halves else "as drawn", opponents=opponents | speakers, oracle=oracle, oracle_options=oracle_options,
        **player.described,
    )  # fmt: skip
    judge = judges[0].name if oracle else UNJUDGED
    return Match(settings, environment, [*workers, *judges], player, judge)


def _environment(name: str, options: dict[str, Any]) -> Any:
    try:
        environment = registry.load(name, options)
    except ValueError as error:
        message = (
            str(error).replace("data.environment = ", "ENV ").replace("data.options", "--option")
        )
        raise ValueError(message) from None
    if not registry.makes_tasks(environment):
        raise ValueError(
            f"ENV {name!r} reads task files: expected an environment that makes its own tasks (a game)"
        )
    return environment


def _opponents(
    flags: argparse.Namespace, environment: Environment, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[PlugIn]]:
    """The environment's options with its opponents, the options of the served opponents, and the
    players that serve them."""
    if not hasattr(environment, "opponents"):
        for flag in ("opponent", "simulations"):
            if getattr(flags, flag) is not None:
                raise ValueError(f"--{flag} has no effect: {flags.environment} has no opponent")
        return options, {}, []
    if "opponents" in options and flags.opponent:
        raise ValueError("--opponent and --option opponents: give one of them")
    mcts = f"{environment.name}_mcts"
    if "opponents" in options:
        specs = {name: name for name in options["opponents"]}
    else:
        asked = flags.opponent or mcts
        specs = {
            asked: f"{environment.name}_{asked}"
            if f"{environment.name}_{asked}" in PLAYERS
            else asked
        }
    served: dict[str, dict[str, Any]] = {}
    workers: list[PlugIn] = []
    for spec in specs.values():
        if spec != "random":
            served[spec] = {"simulations": flags.simulations or SIMULATIONS} if spec == mcts else {}
            workers.append(_worker(spec, served[spec], "--opponent"))
    if flags.simulations is not None and mcts not in served:
        raise ValueError(f"--simulations has no effect with the opponents {sorted(specs)}")
    if "opponents" not in options:
        name = workers[0].name if workers else "random"
        options = options | {"opponents": {name: 1.0}}
    return options, served, workers


def _speakers(flags: argparse.Namespace, environment: Environment) -> dict[str, dict[str, Any]]:
    """The options of the served speakers of a conversation, which are those of --speaker-option."""
    options, served = (
        table("--speaker-option", flags.speaker_option),
        {*environment.speakers} - {POLICY},
    )
    if options and not served:
        raise ValueError(
            f"--speaker-option has no effect: {flags.environment} asks no served speaker"
        )
    return dict.fromkeys(sorted(served), options)


def _worker(spec: str, options: dict[str, Any], flag: str) -> PlugIn:
    try:
        worker = make_worker(spec, options)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"{flag} {spec}: {error}") from None
    if flag == "--opponent" and not isinstance(worker, Opponent):
        raise ValueError(
            f"--opponent {spec} is no opponent: expected random, one of {sorted(PLAYERS)}, or module:Class"
        )
    return worker


# ----------------------------------------------------------------------------------------------
# player and checks


def _player(flags: argparse.Namespace, run: Trained | None, environment: Environment) -> Player:
    """Who plays. Raises ValueError."""
    if flags.baseline:
        if not lists_replies(environment):
            raise ValueError(
                f"--baseline: {flags.environment} lists no replies to choose from (Environment.replies)"
            )
        text: Any = EndpointText()  # stands for a Text
        described = {"player": "baseline", "source": flags.baseline}
        return Player(flags.baseline, described, text, lambda: None)
    if run is not None:
        return players.of_run(flags.run, run, flags)
    if flags.model:
        return players.of_model(flags.model, flags)
    if not environment.fresh:
        raise ValueError(f"--endpoint: {flags.environment} shows no fresh prompt each turn")
    return players.of_endpoint(flags)


def check(flags: argparse.Namespace) -> None:
    """Refuse values out of range and settings without effect. Raises ValueError."""
    players.check(flags, "games", "seeds")
    if flags.baseline and (flags.temperature or flags.max_tokens):
        raise ValueError(
            "--temperature and --max-tokens have no effect with --baseline: leave them out"
        )
    if flags.oracle_option and not flags.oracle:
        raise ValueError("--oracle-option has no effect with --no-oracle")
