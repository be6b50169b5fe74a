"""The command coppice evaluate measures a player on the tasks that an environment makes, with
intervals, in one process."""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.base import HELD_OUT_SEEDS, Task
from coppice.common.atomic import write_whole
from coppice.common.options import command_parser
from coppice.judges.serve import PLAYERS
from coppice.scheduler.evaluation.evaluation import summarise
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating import examination, players
from coppice.tools.evaluating.examination import Examination, Measured, Prepared, Row
from coppice.tools.evaluating.in_process import Seat, config_of, without_model
from coppice.tools.evaluating.match import NO_MODEL, SIMULATIONS, Match, Settings, prepare


class SeedResult(msgspec.Struct, frozen=True):
    """The measures of the games whose task seeds begin at ``seed``."""

    seed: int
    games: int
    measures: dict[str, Measured]


class Result(msgspec.Struct, frozen=True):
    """OUT/result.json. seconds, generated_tokens, engine: summed over all sessions that were not
    killed."""

    settings: Settings
    headline: str
    overall: SeedResult
    by_seed: list[SeedResult]
    unplayed: dict[str, str]
    seconds: float
    generated_tokens: int
    engine: dict[str, float]


EXAMPLES = """\
  coppice evaluate tictactoe --run RUN --games 200       a run's newest weights
  coppice evaluate sudoku --run RUN --version best       its best ones
  coppice evaluate minesweeper --baseline random         what chance reaches
  coppice evaluate sokoban --endpoint http://127.0.0.1:9/v1 --endpoint-model m
coppice evaluate qa --help: question answering
coppice evaluate nvprocess --help: judges of processes"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice evaluate ENV."""
    parser = command_parser(
        "coppice evaluate",
        "Measure a player on an environment that makes its own tasks (a game).",
        EXAMPLES,
        "coppice evaluate ENV PLAYER [options]",
    )
    known = f"one of {', '.join(registry.KNOWN)}, or module:Class"
    parser.add_argument("environment", metavar="ENV", help=known)
    one = parser.add_argument_group("player").add_mutually_exclusive_group(required=True)
    add = one.add_argument
    add("--model", metavar="NAME", help="a model folder, a built-in name or a hub id")
    run = "a run folder: its newest weights, and its settings of ENV"
    add("--run", type=Path, metavar="RUN", help=run)
    add("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, up to /v1")
    baseline = "no model: a random reply of those listed, or the first"
    add("--baseline", choices=sorted(NO_MODEL), help=baseline)
    players.add_players(parser)
    add = parser.add_argument_group("games").add_argument
    add("--games", type=int, default=100, help="games per set of tasks (default: %(default)s)")
    seed = "first task seed (default: held-out)"
    add("--seed", type=int, default=HELD_OUT_SEEDS.start, help=seed)
    add("--seeds", type=int, default=1, help="the number of sets of tasks (default: %(default)s)")
    opponent = f"random, one of {', '.join(PLAYERS)}, or module:Class (default: MCTS)"
    add("--opponent", metavar="NAME", help=opponent)
    simulations = f"simulations of the MCTS opponent (default: {SIMULATIONS})"
    add("--simulations", type=int, help=simulations)
    oracle = "label moves by the built-in oracle (default: yes)"
    add("--oracle", action=argparse.BooleanOptionalAction, default=True, help=oracle)
    for flag, words in (
        ("--option", "option of ENV, a TOML value; repeatable"),
        ("--oracle-option", "option of the oracle or of the outcome's judge; repeatable"),
        ("--speaker-option", "option of a served partner; repeatable"),
    ):
        add(flag, action="append", default=[], metavar="KEY=VALUE", help=words)
    examination.add_output(parser, "ENV")
    at_once = "games played at once (default: %(default)s)"
    parser.add_argument("--concurrency", type=int, default=16, help=at_once)
    return parser


class Games(Examination[Result]):
    """The games of one match in one folder."""

    unit, done = "games", "played"

    def __init__(self, match: Match, out: Path, concurrency: int):
        s, self.match = match.settings, match
        make: Any = match.environment
        tasks = [("", make.task(s.seed + number)) for number in range(s.games * s.seeds)]
        super().__init__(out, tasks, concurrency, match.workers)

    async def play(self) -> Result:
        """Play the games that are not played yet."""
        s, environment = self.match.settings, self.match.environment
        config = config_of(s, self.match.judge, strategy="chain")
        examined = await self.examine(Row("", s, self.match.player, environment, config))
        games = [game for game in examined.outcomes if game is not None]
        by_seed = []
        for first in range(s.seed, s.seed + s.games * s.seeds, s.games):
            ours = [game for game in games if first <= game[0].seed < first + s.games]
            by_seed.append(self._measured(first, ours))
        spent = examined.spent
        result = Result(
            s, environment.headline, self._measured(s.seed, games), by_seed, examined.undone,
            spent.seconds, int(spent.engine.get("decoded_tokens", 0)), spent.engine,
        )  # fmt: skip
        write_whole(self.out / "result.json", result)
        return result

    async def grow(self, row: Row, of: str, context: Context, seat: Seat) -> None:
        """Play a game."""
        if self.match.settings.player == "baseline":
            name = NO_MODEL[self.match.settings.source]
            seat.generate = without_model(
                name, row.environment, row.player.text, context.task, context.tree
            )
        if seat.generate is not None or row.environment.speakers:
            # A baseline makes the same moves again by itself; a partner's replies would not be the
            # same again, so an interrupted conversation begins anew.
            seat.said.clear()
        await context.plant()
        await strategies.load("chain")(context.tree, context)

    def outcome(self, task: Task, tree: Tree | None) -> tuple[Task, Tree] | None:
        """The game."""
        return (task, tree) if tree is not None else None

    def _measured(self, seed: int, games: list[tuple[Task, Tree]]) -> SeedResult:
        environment, counts = self.match.environment, Counter[str]()
        for task, tree in games:
            turns = [{**action.scores, "forced": float(action.forced)} for action in tree.actions()]
            measures = environment.measures(task, turns)
            counts.update({name: len(values) for name, values in measures.items()})
        estimates = summarise(self.match.settings.version, environment, games).measures.items()
        measured = {n: Measured(e.mean, e.half, counts[n]) for n, e in estimates if counts[n]}
        return SeedResult(seed, len(games), measured)


def lines(result: Result) -> str:
    """The result as a table: the overall measures, and the means of each set of tasks if there are
    several sets."""
    s, measures = result.settings, result.overall.measures
    each = result.by_seed if len(result.by_seed) > 1 else []
    rows = [["measure", "mean ±95%", "n", *(f"seed {one.seed}" for one in each)]]
    for name in sorted(measures, key=lambda name: (name != result.headline, name)):
        means = [f"{one.measures[name].mean:.3f}" if name in one.measures else "-" for one in each]
        rows.append([name, str(measures[name]), str(measures[name].n), *means])
    printed = [f"{s.environment}, {result.overall.games} games, {_player(s)}{_against(s)}"]
    printed += examination.table(rows)
    for task, reason in list(result.unplayed.items())[:3]:
        printed.append(f"not played: {task}: {reason}")
    if len(result.unplayed) > 3:
        printed.append(f"not played: {len(result.unplayed) - 3} more, see result.json")
    printed.append(f"{result.seconds:.0f} s, {result.generated_tokens} generated tokens")
    return "\n".join(printed)


def _player(s: Settings) -> str:
    if s.player == "baseline":
        return f"baseline {s.source}"
    how = "greedy" if s.temperature == 0 else f"temperature {s.temperature:g}"
    names = {"run": f"{s.source} version {s.version}", "endpoint": f"{s.model} at {s.source}"}
    return f"{s.player} {names.get(s.player, s.source)}, {how}"


def _against(s: Settings) -> str:
    if "opponents" not in s.options:
        return ""
    options = {name: s.opponents.get(name, {}).items() for name in s.options["opponents"]}
    shown = [" ".join([name, *(f"{k}={v}" for k, v in more)]) for name, more in options.items()]
    return f", against {' or '.join(shown)}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status."""

    def prepared(flags: argparse.Namespace) -> Prepared:
        match = prepare(flags)
        begin = lambda out: Games(match, out, flags.concurrency)  # noqa: E731
        return Prepared(match.environment.name, match.settings, begin, lines, "played")

    arguments = sys.argv[1:] if arguments is None else arguments
    return examination.run("coppice evaluate", parser(), prepared, arguments)
