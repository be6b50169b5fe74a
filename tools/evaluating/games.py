"""The command coppice evaluate measures a player on the tasks that an environment makes, with
intervals, in one process.

Invariant: every game is a tree of OUT/journal.sqlite and counts once, however often the evaluation
was interrupted.
"""

import argparse
import functools
import random
import shlex
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.base import HELD_OUT_SEEDS, Task
from coppice.common.atomic import write_whole
from coppice.common.options import command_parser
from coppice.judges.serve import PLAYERS
from coppice.scheduler.concurrency import gather
from coppice.scheduler.evaluation.evaluation import summarise
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating import players
from coppice.tools.evaluating.folder import Kept, Ledger, Measured, claim, conduct, own_folder
from coppice.tools.evaluating.in_process import InProcess, Seat, config_of, without_model
from coppice.tools.evaluating.match import NO_MODEL, SIMULATIONS, Match, Settings, prepare
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Sample


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


# ----------------------------------------------------------------------------------------------
# command line


EXAMPLES = """\
  coppice evaluate tictactoe --run RUN --games 200       a run's newest weights
  coppice evaluate sudoku --run RUN --version best       its best ones
  coppice evaluate minesweeper --baseline random         what chance reaches
  coppice evaluate sokoban --endpoint http://127.0.0.1:30000/v1 --endpoint-model m
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
    parser.add_argument(
        "environment", metavar="ENV", help=f"one of {', '.join(registry.KNOWN)}, or module:Class"
    )
    _add_players(parser)
    _add_games(parser.add_argument_group("games"))
    parser.add_argument(
        "--out",
        type=Path,
        help="folder; an evaluation in it is continued (default: evaluations/ENV-TIME)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON instead of a table"
    )
    parser.add_argument(
        "--concurrency", type=int, default=16, help="games played at once (default: %(default)s)"
    )
    return parser


def _add_players(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("player").add_mutually_exclusive_group(required=True)
    one.add_argument("--model", metavar="NAME", help="a model folder, a built-in name or a hub id")
    one.add_argument(
        "--run",
        type=Path,
        metavar="RUN",
        help="a run folder: its newest weights, and its settings of ENV",
    )
    one.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, up to /v1")
    one.add_argument(
        "--baseline",
        choices=sorted(NO_MODEL),
        help="no model: a random reply of those listed, or the first",
    )
    players.add_endpoint(parser)
    players.add_local(parser)
    players.add_actions(parser)


def _add_games(games: Any) -> None:
    games.add_argument(
        "--games", type=int, default=100, help="games per set of tasks (default: %(default)s)"
    )
    games.add_argument(
        "--seed", type=int, default=HELD_OUT_SEEDS.start, help="first task seed (default: held-out)"
    )
    games.add_argument(
        "--seeds", type=int, default=1, help="the number of sets of tasks (default: %(default)s)"
    )
    games.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of ENV, a TOML value; repeatable",
    )
    games.add_argument(
        "--opponent",
        metavar="NAME",
        help=f"random, one of {', '.join(PLAYERS)}, or module:Class (default: MCTS)",
    )
    games.add_argument(
        "--simulations", type=int, help=f"simulations of the MCTS opponent (default: {SIMULATIONS})"
    )
    oracle = "label moves by the built-in oracle (default: yes)"
    games.add_argument("--oracle", action=argparse.BooleanOptionalAction, default=True, help=oracle)
    games.add_argument(
        "--oracle-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of the oracle or of the outcome's judge; repeatable",
    )
    games.add_argument(
        "--speaker-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="option of a served partner; repeatable",
    )


# ----------------------------------------------------------------------------------------------
# playing


class Evaluation:
    """The games of one match in one folder. ``play`` may be cancelled at any moment and continued
    later; then ``close``."""

    def __init__(self, match: Match, out: Path, concurrency: int):
        self.match, self.settings, self.out = match, match.settings, out
        self.services = InProcess(match.engine, match.workers)
        self.started = False
        s = match.settings
        self.kept = Kept(out, s.games * s.seeds, "games", "not be played", concurrency)
        self.ledger = Ledger(out, "games", self.kept.progress.start_s)
        self.config = config_of(s, match.judge, strategy="chain")
        # The dispatcher is None here, because each game's seat takes its place.
        self.runtime = Runtime(
            None,  # pyright: ignore[reportArgumentType]
            self.kept.journal, match.text, match.environment, self.config, Counter(), lambda tree, turns: None,
        )  # fmt: skip

    async def _start(self) -> None:
        """Start the services, with the weights of the run's version. Raises NotStarted."""
        self.started = True
        await self.services.begin(self.match.load)
        self.ledger.open(self.match.engine.stats if self.match.engine is not None else dict)

    async def play(self) -> Result:
        """Play the games that are not played yet. Raises Fault if they cannot go on, NotStarted if
        they cannot begin."""
        s = self.settings
        if self.kept.before < s.games * s.seeds:
            await self._start()
        games = await gather(self._game(position) for position in range(s.games * s.seeds))
        pairs = [pair for pair in games if pair is not None]
        unplayed = self.kept.undone
        if not pairs:
            raise InfrastructureFault(
                f"no game could be played; the last reason: {list(unplayed.values())[-1]}"
            )
        self.ledger.close(self.kept.now)
        spent = self.ledger.total()
        by_seed = []
        for k in range(s.seeds):
            first = s.seed + k * s.games
            ours = [(task, tree) for task, tree in pairs if first <= task.seed < first + s.games]
            by_seed.append(self._measured(first, ours))
        result = Result(
            s, self.match.environment.headline, self._measured(s.seed, pairs), by_seed, unplayed,
            spent.seconds, int(spent.engine.get("decoded_tokens", 0)), spent.engine,
        )  # fmt: skip
        write_whole(self.out / "result.json", result)
        return result

    async def _game(self, position: int) -> tuple[Task, Tree] | None:
        task: Task = self.match.environment.task(self.settings.seed + position)  # pyright: ignore[reportAttributeAccessIssue]
        grow = functools.partial(self._grow, task)
        tree = await self.kept.task(position, task.id, self.settings.version, grow)
        return (task, tree) if tree is not None else None

    async def _grow(self, task: Task, tree: Tree, said: list[Sample]) -> None:
        # The draws are the same as in a run's held-out evaluation of this task, and the same again
        # after an interruption.
        rng = random.Random(f"heldout/{tree.id}")
        # The partner's replies would not be the same again, so an interrupted conversation begins
        # anew.
        seat = Seat(self.services, [] if self.match.environment.speakers else said)
        if self.settings.player == "baseline":  # a baseline makes the same moves again by itself
            name, rules = NO_MODEL[self.settings.source], self.match.environment
            seat = Seat(self.services, [], without_model(name, rules, self.match.text, task, tree))
        runtime = msgspec.structs.replace(self.runtime, dispatcher=seat)
        context = Context(runtime, task, tree, rng)
        await context.plant()
        await strategies.load("chain")(tree, context)

    def _measured(self, seed: int, pairs: list[tuple[Task, Tree]]) -> SeedResult:
        counts: Counter[str] = Counter()
        for task, tree in pairs:
            turns = [{**action.scores, "forced": float(action.forced)} for action in tree.actions()]
            counts.update(
                {
                    name: len(values)
                    for name, values in self.match.environment.measures(task, turns).items()
                }
            )
        summary = summarise(self.settings.version, self.match.environment, pairs)
        estimates = summary.measures.items()
        measures = {
            name: Measured(e.mean, e.half, counts[name]) for name, e in estimates if counts[name]
        }
        return SeedResult(seed, len(pairs), measures)

    async def close(self) -> None:
        """Release everything. The finished games stay in the folder."""
        self.ledger.close(self.kept.now)
        self.kept.journal.close()
        if self.started:
            await self.services.close()


# ---------------------------------------------------------------------------------------------- the
# printed result


def lines(result: Result) -> str:
    """The result as a table: the overall measures, and the means of each set of tasks if there are
    several sets."""
    s = result.settings
    names = sorted(result.overall.measures, key=lambda name: (name != result.headline, name))
    each = result.by_seed if len(result.by_seed) > 1 else []
    rows = [["measure", "mean ±95%", "n", *(f"seed {one.seed}" for one in each)]]
    for name in names:
        m = result.overall.measures[name]
        means = [f"{one.measures[name].mean:.3f}" if name in one.measures else "-" for one in each]
        rows.append([name, f"{m.mean:.3f} ±{m.half:.3f}", str(m.n), *means])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    printed = [f"{s.environment}, {result.overall.games} games, {_player(s)}{_against(s)}"]
    printed += [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    for task, reason in list(result.unplayed.items())[:3]:
        printed.append(f"not played: {task}: {reason}")
    if len(result.unplayed) > 3:
        printed.append(f"not played: {len(result.unplayed) - 3} more, see result.json")
    return "\n".join(
        [*printed, f"{result.seconds:.0f} s, {result.generated_tokens} generated tokens"]
    )


def _player(s: Settings) -> str:
    how = (
        ""
        if s.player == "baseline"
        else ", greedy"
        if s.temperature == 0
        else f", temperature {s.temperature:g}"
    )
    name = {"run": f"{s.source} version {s.version}", "endpoint": f"{s.model} at {s.source}"}.get(
        s.player, s.source
    )
    return f"{s.player} {name}{how}"


def _against(s: Settings) -> str:
    if "opponents" not in s.options:
        return ""
    shown = [" ".join([name, *(f"{k}={v}" for k, v in s.opponents.get(name, {}).items())]) for name in s.options["opponents"]]  # fmt: skip
    return f", against {' or '.join(shown)}"


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    flags = parser().parse_args(arguments)
    try:
        match = prepare(flags)
        out = flags.out or own_folder(match.environment.name)
        lock = claim(out, match.settings)
    except (OSError, ValueError, MemoryError) as error:
        print(f"coppice evaluate: {error}", file=sys.stderr)
        return 2
    with lock:
        return _report(flags, match, out, arguments)


def _report(flags: argparse.Namespace, match: Match, out: Path, arguments: list[str]) -> int:
    again = shlex.join(
        ["coppice evaluate", *arguments, *([] if flags.out else ["--out", str(out)])]
    )
    result = conduct(lambda: Evaluation(match, out, flags.concurrency), again, "played")
    if isinstance(result, int):
        return result
    print(
        msgspec.json.encode(result).decode()
        if flags.json
        else f"{lines(result)}\nresult {out / 'result.json'}"
    )
    return 0
