"""The command coppice evaluate measures a policy on the tasks that an environment makes, with
intervals, in one process."""

import argparse
import inspect
import random
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from coppice.actors.engines.endpoint import EndpointText
from coppice.actors.environments import registry
from coppice.actors.environments.base import HELD_OUT_SEEDS, POLICY, Environment, Task
from coppice.actors.environments.game import Game
from coppice.common.atomic import write_whole
from coppice.common.numbers import Count, Natural
from coppice.common.options import command_parser
from coppice.judges.base import Player as Opponent
from coppice.judges.base import PlugIn
from coppice.judges.serve import BUILT_IN, PLAYERS, make_worker
from coppice.scheduler.config import UNJUDGED, SchedulerConfig
from coppice.scheduler.evaluation.evaluation import BASELINES, lists_replies, pooled
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating import examination, players
from coppice.tools.evaluating.examination import Evaluation, PolicyRow, Prepared, SampleMean
from coppice.tools.evaluating.in_process import ResumedCalls
from coppice.tools.evaluating.players import MeasuredPolicy, PlayerSettings, key_values
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, GenerateResult, Sample

NO_MODEL = {name.removesuffix("_legal_move"): name for name in BASELINES}
"""The players of --baseline, by their names on the command line."""
SIMULATIONS = 1000
"""The simulations per move of the fixed opponent (methods.md 3.2)."""


class MatchSettings(PlayerSettings, frozen=True, kw_only=True):
    """Everything on which the result depends, saved as OUT/evaluation.json; a resumed evaluation
    must have the same settings.

    sides: "half each", or "as drawn" by the environment's option second. opponents: those that are
    served, with their options. oracle: "" for none.
    """

    environment: str
    games: int
    seed: int
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
        return self.environments[task.seed % 2].measures(task, turns)


class GamesResult(msgspec.Struct, frozen=True):
    """OUT/result.json. seconds, generated_tokens, engine: summed over all sessions that were not
    killed."""

    settings: MatchSettings
    headline: str
    games: int
    measures: dict[str, SampleMean]
    unplayed: dict[str, str]
    seconds: float
    generated_tokens: int
    engine: dict[str, float]


EXAMPLES = """\
  coppice evaluate tictactoe --run RUN --games 200       a run's newest weights
  coppice evaluate sudoku --run RUN --version best       its best ones
  coppice evaluate minesweeper --baseline random         what chance reaches
  coppice evaluate sokoban --endpoint http://127.0.0.1:9/v1 --endpoint-model m
coppice evaluate qa --help: question answering"""


def parser() -> argparse.ArgumentParser:
    what = "Measure a player on an environment that makes its own tasks (a game)."
    usage = "coppice evaluate ENV PLAYER [options]"
    parser = command_parser("coppice evaluate", what, EXAMPLES, usage)
    games = f"one of {', '.join(registry.BUILT_IN)}, or module:Class"
    parser.add_argument("environment", metavar="ENV", help=games)
    players.add_players(parser)
    baseline = "instead of a player with a model: a random reply of those listed, or the first"
    parser.add_argument("--baseline", choices=sorted(NO_MODEL), help=baseline)
    add = parser.add_argument_group("games").add_argument
    add("--games", type=Count, default=100, help="number of tasks (default: %(default)s)")
    start = HELD_OUT_SEEDS.start
    add("--seed", type=Natural, default=start, help="first task seed (default: held-out)")
    opponent = f"random, one of {', '.join(PLAYERS)}, or module:Class (default: MCTS)"
    add("--opponent", metavar="NAME", help=opponent)
    add("--simulations", type=Count, help=f"of the MCTS opponent (default: {SIMULATIONS})")
    oracle = argparse.BooleanOptionalAction
    add("--oracle", action=oracle, default=True, help="label moves by the built-in oracle")
    value: Any = {"action": "append", "default": [], "metavar": "KEY=VALUE"}
    add("--option", **value, help="option of ENV, a TOML value; repeatable")
    words = "option of the oracle or of the outcome's judge; repeatable"
    add("--oracle-option", **value, help=words)
    add("--speaker-option", **value, help="option of a served partner; repeatable")
    examination.add_output(parser, "ENV")
    return parser


def prepare(flags: argparse.Namespace) -> Prepared:
    """The evaluation of a command line. Raises ValueError, OSError or MemoryError with the
    remedy."""
    players.check(flags)
    if len(flags.model) + len(flags.run) + bool(flags.endpoint) + bool(flags.baseline) != 1:
        raise ValueError("expected one player: --model, --run, --endpoint or --baseline")
    if flags.baseline and (flags.temperature or flags.max_tokens):
        useless = "--temperature and --max-tokens have no effect with --baseline"
        raise ValueError(f"{useless}: leave them out")
    if flags.oracle_option and not flags.oracle:
        raise ValueError("--oracle-option has no effect with --no-oracle")
    options, default = key_values("--option", flags.option), SchedulerConfig()
    if not flags.run:  # a wrong word is said before a model is loaded
        _environment(flags.environment, options)
    (policy,) = players.policies(flags) or [_baseline(flags)]
    run = policy.own
    # the run's own prompt, but the fixed opponents, because results must be comparable
    if run is not None and run.environment == flags.environment:
        default, own = run.scheduler, run.options | run.scheduler.evaluation.options
        options = {k: v for k, v in own.items() if k not in ("opponents", "second")} | options
    environment = _environment(flags.environment, options)
    parameters = inspect.signature(type(environment).__init__).parameters
    if "appended" in parameters and not (flags.model or flags.run):
        options = {"appended": False} | options  # only tokens can be appended to
        environment = _environment(flags.environment, options)
    if flags.baseline and not lists_replies(environment):
        lacking = f"{flags.environment} lists no replies to choose from (Environment.replies)"
        raise ValueError(f"--baseline: {lacking}")
    if flags.endpoint and not environment.fresh:
        raise ValueError(f"--endpoint: {flags.environment} shows no fresh prompt each turn")
    options, opponents, workers = _opponents(flags, environment, options)
    shared = "second" in parameters and "second" not in options
    halves = shared and isinstance(environment, Game)
    if shared and getattr(environment, "players", 1) > 1:  # TextArena, which draws each task's side
        options = options | {"second": 0.5}
    environment = _environment(flags.environment, options)
    if halves:
        each = [_environment(flags.environment, options | {"second": side}) for side in (0.0, 1.0)]
        environment: Any = HalfEach(each)
    outcome, name = environment.outcome_judge, environment.name
    oracle = name if flags.oracle and name in BUILT_IN and not outcome else ""
    oracle_options = key_values("--oracle-option", flags.oracle_option)
    if oracle_options and not (oracle or outcome):
        lacking = f"{flags.environment} has no built-in oracle or judge"
        raise ValueError(f"--oracle-option has no effect: {lacking}")
    judges = [_worker(one, oracle_options, "--oracle-option") for one in (oracle, outcome) if one]
    speakers = {*environment.speakers} - {POLICY}
    spoken = key_values("--speaker-option", flags.speaker_option)
    if spoken and not speakers:
        lacking = f"{flags.environment} asks no served speaker"
        raise ValueError(f"--speaker-option has no effect: {lacking}")
    opponents |= dict.fromkeys(sorted(speakers), spoken)
    workers += [_worker(one, spoken, "--speaker-option") for one in sorted(speakers)]
    settings = MatchSettings(
        environment=flags.environment, options=options, games=flags.games, seed=flags.seed,
        sides="half each" if halves else "as drawn", opponents=opponents,
        oracle=oracle, oracle_options=oracle_options,
        **players.sampled(flags, policy, default, default.thinking),
    )  # fmt: skip
    config = settings.config(judges[0].name if oracle else UNJUDGED, strategy="chain")
    row = PolicyRow("", settings, policy, environment, config)
    workers += judges
    try:
        tasks = [environment.task(seed) for seed in range(flags.seed, flags.seed + flags.games)]
    except DataFault as fault:
        raise ValueError(fault) from None

    def work(out: Path) -> Coroutine[Any, Any, GamesResult]:
        return GamesEvaluation(row, tasks, workers, out, flags.concurrency).run()

    return Prepared(name, settings, work, lines, "played")


def _environment(name: str, options: dict[str, Any]) -> Any:
    try:
        environment = registry.load(name, options)
    except ValueError as error:
        said = str(error).replace("data.environment = ", "ENV ")
        raise ValueError(said.replace("data.options", "--option")) from None
    if not registry.makes_tasks(environment):
        expected = "an environment that makes its own tasks (a game)"
        raise ValueError(f"ENV {name!r} reads task files: expected {expected}")
    return environment


def _opponents(
    flags: argparse.Namespace, environment: Environment, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, dict[str, Any]], list[PlugIn]]:
    """The environment's options with its opponents, the options of the served opponents, and the
    workers that serve them."""
    if not hasattr(environment, "opponents"):
        for flag in ("opponent", "simulations"):
            if getattr(flags, flag) is not None:
                raise ValueError(f"--{flag} has no effect: {flags.environment} has no opponent")
        return options, {}, []
    if "opponents" in options and flags.opponent:
        raise ValueError("--opponent and --option opponents: give one of them")
    mcts, own = f"{environment.name}_mcts", f"{environment.name}_{flags.opponent}"
    chosen = own if own in PLAYERS else flags.opponent or mcts
    names = list(options.get("opponents", [chosen]))
    simulations = {"simulations": flags.simulations or SIMULATIONS}
    served = {name: simulations if name == mcts else {} for name in names if name != "random"}
    workers = [_worker(name, one, "--opponent") for name, one in served.items()]
    if flags.simulations is not None and mcts not in served:
        raise ValueError(f"--simulations has no effect with the opponents {sorted(names)}")
    default = {workers[0].name if workers else "random": 1.0}
    return {"opponents": default} | options, served, workers


def _worker(spec: str, options: dict[str, Any], flag: str) -> PlugIn:
    try:
        worker = make_worker(spec, options)
    except (ValueError, ImportError, AttributeError) as error:
        raise ValueError(f"{flag} {spec}: {error}") from None
    if flag == "--opponent" and not isinstance(worker, Opponent):
        expected = f"random, one of {sorted(PLAYERS)}, or module:Class"
        raise ValueError(f"--opponent {spec} is no opponent: expected {expected}")
    return worker


def _baseline(flags: argparse.Namespace) -> MeasuredPolicy:
    text: Any = EndpointText()  # stands for a Text
    described = {"player": "baseline", "source": flags.baseline}
    return MeasuredPolicy(flags.baseline, described, text, lambda: None)


class GamesEvaluation(Evaluation):
    """The games of one match in one folder."""

    unit, done = "games", "played"

    def __init__(
        self, row: PolicyRow, tasks: Sequence[Task], workers: Sequence[PlugIn], out: Path,
        concurrency: int,
    ):  # fmt: skip
        self.row = row
        super().__init__(out, [("", task) for task in tasks], concurrency, workers)

    async def play(self) -> GamesResult:
        """Play the games that are not played yet."""
        examined, environment = await self.examine(self.row), self.row.environment
        games, costs = [game for game in examined.outcomes if game is not None], examined.costs
        values = pooled(environment, games).items()
        measures = {name: examination.sample_mean(several) for name, several in values}
        result = GamesResult(
            self.row.settings, environment.headline, len(games), measures, examined.undone,
            costs.seconds, int(costs.engine.get("decoded_tokens", 0)), costs.engine,
        )  # fmt: skip
        write_whole(self.out / "result.json", result)
        return result

    async def grow(self, row: PolicyRow, context: Context, calls: ResumedCalls) -> None:
        if row.settings.player == "baseline":
            self._without_model(context, calls)
        if calls.generate is not None or row.environment.speakers:
            # A baseline makes the same moves again by itself; a partner's replies would not be the
            # same again, so an interrupted conversation begins anew.
            calls.said.clear()
            context.runtime.journal.uproot(context.tree.id)
        await context.plant()
        await strategies.load("chain")(context.tree, context)

    def _without_model(self, context: Context, calls: ResumedCalls) -> None:
        """Let a baseline (scheduler/evaluation/evaluation.py) reply in the state at the tip of the
        tree."""
        environment, task, tree = self.row.environment, context.task, context.tree
        name = NO_MODEL[self.row.settings.source]
        rng = random.Random(f"{name}/{task.id}")

        async def generate(request: GenerateRequest) -> GenerateResult:
            state = environment.initial(task)  # a partner may speak before the tree has a state
            if tree.nodes and (kept := tree.tip().state):
                state = msgspec.convert(kept, type(state))
            tokens = self.row.policy.text.encode(BASELINES[name](environment.replies(state), rng))
            n = len(tokens)
            sample = Sample(tokens, np.zeros(n, np.float32), np.zeros(n, np.int32), "stop")
            return GenerateResult([sample], len(request.tokens), 0)

        calls.generate = generate

    def outcome(self, task: Task, tree: Tree | None) -> tuple[Task, Tree] | None:
        return (task, tree) if tree is not None else None


def lines(result: GamesResult) -> str:
    """The result as a table of the measures, the headline first."""
    s, measures, rows = result.settings, result.measures, [["measure", "mean ±95%", "n"]]
    for name in sorted(measures, key=lambda name: (name != result.headline, name)):
        rows.append([name, str(measures[name]), str(measures[name].n)])
    how = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}"
    sources = {"run": f"{s.source} version {s.version}", "endpoint": f"{s.model} at {s.source}"}
    who = f"{s.player} {sources.get(s.player, s.source)}"
    who += "" if s.player == "baseline" else f", {how}"
    if "opponents" in s.options:
        served = [(name, s.opponents.get(name, {})) for name in s.options["opponents"]]
        shown = [" ".join([name, *(f"{k}={v}" for k, v in own.items())]) for name, own in served]
        who += f", against {' or '.join(shown)}"
    printed = [f"{s.environment}, {result.games} games, {who}", *examination.table(rows)]
    printed += [f"not played: {task}: {why}" for task, why in list(result.unplayed.items())[:3]]
    if len(result.unplayed) > 3:
        printed.append(f"not played: {len(result.unplayed) - 3} more, see result.json")
    printed.append(f"{result.seconds:.0f} s, {result.generated_tokens} generated tokens")
    return "\n".join(printed)
