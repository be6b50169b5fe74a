"""What an evaluation plays: the command line's environment, opponents, oracle and player, checked before anything is started."""

import argparse
import inspect
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from actors.config import ActorProcess, ActorsConfig
from actors.engines.base import Engine
from actors.engines.endpoint import Endpoint, EndpointEngine, EndpointText
from actors.environments import registry
from actors.environments.base import Environment, Task
from actors.environments.game import Game
from judges.base import Judge
from judges.players import Player
from judges.serve import BUILT_IN, PLAYERS, make_worker
from scheduler import baselines
from scheduler.config import SchedulerConfig, SchedulerProcess
from scheduler.text import Text
from tools.in_process import UNJUDGED
from wire.messages import LoadRequest

NO_MODEL = {name.removesuffix("_legal_move"): name for name in baselines.PLAYERS}
"""The players of --baseline."""
SIMULATIONS = 1000
"""Of the fixed opponent (methods.md 3.2)."""


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What the result depends on, saved as OUT/evaluation.json; a resumed evaluation must have the same.

    source: the model folder, the run, the endpoint's URL or the baseline. sides: "half each", or "as drawn" by the option second.
    opponents: the served ones, with their options. oracle: "" for none.
    """

    environment: str
    options: dict[str, Any]
    player: str
    source: str
    model: str = ""
    version: int = 0
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
    """A game in which the opponent begins every second task: exactly half of consecutive seeds."""

    def __init__(self, environments: Sequence[Game]):
        self.environments = environments

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environments[0], name)

    def initial(self, task: Task) -> Any:
        """The first state, with the side of the task's seed."""
        return self.environments[task.seed % 2].initial(task)

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Those of the side played."""
        return self.environments[task.seed % 2].measures(task, turns)


class Match(msgspec.Struct, frozen=True):
    """Everything an evaluation needs, before anything is started or paid for. load: weights to put over the model's."""

    settings: Settings
    environment: Environment
    workers: list[Judge | Player]
    engine: Engine | None
    text: Text
    judge: str
    load: LoadRequest | None = None


def prepare(given: argparse.Namespace) -> Match:
    """The match of a command line. Raises ValueError, OSError or MemoryError with the remedy."""
    check(given)
    run = _read_run(given) if given.run else None
    options = table("--option", given.option)
    same = run is not None and run.scheduler.environment == given.environment
    if run is not None and same:  # the prompt it was trained with, but not the opponents: those are the measure's
        trained = run.scheduler.options | run.scheduler.scheduler.evaluation.options
        kept = {k: v for k, v in trained.items() if k not in ("opponents", "second")}
        options = kept | options
    environment = _environment(given.environment, options)
    options, opponents, workers = _opponents(given, environment, options)
    halves = "second" in inspect.signature(type(environment).__init__).parameters and "second" not in options
    environment = _environment(given.environment, options)
    if halves:
        each = [_environment(given.environment, options | {"second": side}) for side in (0.0, 1.0)]
        environment: Any = HalfEach(each)
    oracle = environment.name if given.oracle and environment.name in BUILT_IN else ""
    oracle_options = table("--oracle-option", given.oracle_option)
    if oracle_options and not oracle:
        raise ValueError(f"--oracle-option has no effect: {given.environment} has no built-in oracle")
    judges = ([_worker(oracle, oracle_options, "--oracle-option")] if oracle else []) + (
        [_worker(environment.outcome_judge, {}, "")] if environment.outcome_judge else []
    )
    default = run.scheduler.scheduler if run is not None and same else SchedulerConfig()
    settings = Settings(
        environment=given.environment, options=options, games=given.games, seed=given.seed, seeds=given.seeds,
        temperature=given.temperature, top_p=given.top_p, top_k=given.top_k,
        max_tokens=given.max_tokens or default.max_action_tokens, thinking=default.thinking and not given.no_thinking,
        sides="half each" if halves else "as drawn", opponents=opponents, oracle=oracle, oracle_options=oracle_options,
        **_player(given, run, environment),
    )  # fmt: skip
    engine, text = _engine(given, settings, run)
    judge = judges[0].name if oracle else UNJUDGED
    return Match(settings, environment, [*workers, *judges], engine, text, judge, run.load if run else None)


def _environment(name: str, options: dict[str, Any]) -> Any:
    try:
        made = registry.load(name, options)
    except ValueError as error:
        said = str(error).replace("data.environment = ", "ENV ").replace("data.options", "--option")
        raise ValueError(said) from None
    if not registry.makes_tasks(made):
        raise ValueError(f"ENV {name!r} reads task files: expected an environment that makes its own tasks (a game)")
    return made


def _opponents(
    given: argparse.Namespace, environment: Environment, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[Judge | Player]]:
    """The environment's options with its opponents, and the players that serve them with their options."""
    if not hasattr(environment, "opponents"):
        for flag in ("opponent", "simulations"):
            if getattr(given, flag) is not None:
                raise ValueError(f"--{flag} has no effect: {given.environment} has no opponent")
        return options, {}, []
    if "opponents" in options and given.opponent:
        raise ValueError("--opponent and --option opponents: give one of them")
    mcts = f"{environment.name}_mcts"
    if "opponents" in options:
        specs = {name: name for name in options["opponents"]}
    else:
        asked = given.opponent or mcts
        specs = {asked: f"{environment.name}_{asked}" if f"{environment.name}_{asked}" in PLAYERS else asked}
    served: dict[str, dict[str, Any]] = {}
    players: list[Judge | Player] = []
    for spec in specs.values():
        if spec != "random":
            served[spec] = {"simulations": given.simulations or SIMULATIONS} if spec == mcts else {}
            players.append(_worker(spec, served[spec], "--opponent"))
    if given.simulations is not None and mcts not in served:
        raise ValueError(f"--simulations has no effect with the opponents {sorted(specs)}")
    if "opponents" not in options:
        name = players[0].name if players else "random"
        options = options | {"opponents": {name: 1.0}}
    return options, served, players


def _worker(spec: str, options: dict[str, Any], flag: str) -> Judge | Player:
    try:
        made = make_worker(spec, options)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"{flag} {spec}: {error}") from None
    if flag == "--opponent" and not isinstance(made, Player):
        raise ValueError(
            f"--opponent {spec} is no opponent: expected random, one of {sorted(PLAYERS)}, or module:Class"
        )
    return made


# ---------------------------------------------------------------------------------------------- the player


class Trained(msgspec.Struct, frozen=True):
    """A run folder as a player: its process files, and the weights to load (None: those of its model folder)."""

    scheduler: SchedulerProcess
    actor: ActorProcess
    load: LoadRequest | None


def _read_run(given: argparse.Namespace) -> Trained:
    """The run and its version. Raises ValueError or FileNotFoundError."""
    folder = given.run / "processes"
    if not (folder / "scheduler.json").is_file():
        raise FileNotFoundError(f"--run {given.run}: no processes/scheduler.json there; expected the folder of a run")
    scheduler = msgspec.json.decode((folder / "scheduler.json").read_bytes(), type=SchedulerProcess)
    actor = msgspec.json.decode((folder / "actor-0.json").read_bytes(), type=ActorProcess)
    kept = {int(path.name[1:]): path for path in (given.run / "weights").glob("v??????")}
    version = max(kept, default=0) if given.version is None else given.version
    if version and version not in kept:
        raise ValueError(f"--version {version}: {given.run} keeps {sorted(kept)} (learner.keep), and 0")
    load = None
    if version:
        digest = msgspec.json.decode((kept[version] / "manifest.json").read_bytes())["digest"]
        load = LoadRequest(version, str(kept[version].resolve()), digest)
    return Trained(scheduler, actor, load)


def _player(given: argparse.Namespace, run: Trained | None, environment: Any) -> dict[str, Any]:
    """The player's part of the settings. Raises ValueError."""
    if given.baseline:
        if not isinstance(environment, (Game, HalfEach)):
            raise ValueError(f"--baseline: {given.environment} lists no legal moves, as a subclass of Game does")
        return {"player": "baseline", "source": given.baseline}
    if run is not None:
        version = run.load.version if run.load else 0
        return {"player": "run", "source": str(given.run.resolve()), "model": run.actor.model, "version": version}
    if given.model:
        from tools.assets import cache_folder  # these import torch
        from tools.model import ensure_model

        try:
            folder = ensure_model(given.model, cache_folder())
        except (FileNotFoundError, ValueError) as error:
            raise ValueError(
                f"--model {given.model}: {str(error).removeprefix(f'model.name = {given.model!r}: ')}"
            ) from None
        return {"player": "model", "source": str(folder)}
    if not environment.fresh:
        raise ValueError(f"--endpoint: {given.environment} shows no fresh prompt each turn")
    parts = urlsplit(given.endpoint)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or "@" in parts.netloc:
        raise ValueError("--endpoint: expected http(s)://host[:port]/v1, without a key (see --api-key-env)")
    fields = table("--endpoint-field", given.endpoint_field)
    return {"player": "endpoint", "source": given.endpoint, "model": given.endpoint_model, "fields": fields}


def _engine(given: argparse.Namespace, settings: Settings, run: Trained | None) -> tuple[Engine | None, Any]:
    """What generates, not started, and its text."""
    if settings.player == "baseline":
        return None, EndpointText()
    if settings.player == "endpoint":
        given_too = {"timeout_s": given.timeout, "attempts": given.attempts, "api_key_env": given.api_key_env}
        given_too = {key: value for key, value in given_too.items() if value is not None}
        endpoint = Endpoint(
            settings.source, settings.model, concurrency=given.concurrency, fields=settings.fields, **given_too
        )
        return EndpointEngine(endpoint), EndpointText()
    from transformers.utils import logging  # these import torch, which the other players do without

    from actors.engines.local import LocalEngine

    logging.disable_progress_bar()
    config = run.actor.actors if run else ActorsConfig(max_context=4096)
    room = max(config.max_batch, min(given.concurrency, 64))
    config = msgspec.structs.replace(
        config,
        max_batch=room,
        max_context=given.max_context or config.max_context,
        threads=given.threads or config.threads,
    )
    folder = run.actor.model if run else settings.source
    return LocalEngine(folder, config), Text(folder)


# ---------------------------------------------------------------------------------------------- checks


def check(given: argparse.Namespace) -> None:
    """Refuses values out of range and settings without effect. Raises ValueError."""
    for name in ("games", "seeds", "concurrency", "timeout", "attempts", "max_tokens", "threads", "max_context"):
        value = getattr(given, name)
        if value is not None and value <= 0:
            raise ValueError(f"{_flag(name)} {value}: expected more than 0")
    if not (given.temperature == 0 or given.temperature >= 1e-3):
        raise ValueError(f"--temperature {given.temperature}: expected 0 (greedy) or at least 0.001")
    if not 0 < given.top_p <= 1 or given.top_k < 0 or given.seed < 0:
        raise ValueError("--top-p: expected above 0 and at most 1; --top-k and --seed: expected 0 or more")
    if given.temperature == 0 and (given.top_p, given.top_k) != (1.0, 0):
        raise ValueError("--top-p and --top-k have no effect with --temperature 0: leave them out")
    if given.endpoint and not given.endpoint_model:
        raise ValueError("--endpoint needs --endpoint-model, the name of a model served there")
    local = "--model or --run"
    needs = dict.fromkeys(("endpoint_model", "api_key_env", "endpoint_field", "timeout", "attempts"), "--endpoint")
    needs |= {"version": "--run", "threads": local, "max_context": local, "no_thinking": local}
    for name, needed in needs.items():
        if getattr(given, name) not in (None, [], False) and not any(
            getattr(given, _name(flag)) for flag in needed.split(" or ")
        ):
            raise ValueError(f"{_flag(name)} has no effect without {needed}")
    if given.baseline and (given.temperature or given.max_tokens):
        raise ValueError("--temperature and --max-tokens have no effect with --baseline: leave them out")
    if given.oracle_option and not given.oracle:
        raise ValueError("--oracle-option has no effect with --no-oracle")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def table(flag: str, texts: list[str]) -> dict[str, Any]:
    """KEY=VALUE texts; a value is read as TOML, a bare word is a string. Raises ValueError."""
    made = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ValueError(f"{flag} {text!r}: expected KEY=VALUE")
        try:
            made[key] = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            made[key] = value
    return made
