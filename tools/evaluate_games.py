"""The command tools/evaluate: a player's measures on an environment's own tasks, with intervals, in one process.

Invariant: every game is a tree of OUT/journal.sqlite and counts once, however often the evaluation was interrupted.
"""

import argparse
import asyncio
import fcntl
import random
import shlex
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from actors.environments import registry
from actors.environments.base import Task
from judges.serve import PLAYERS
from scheduler import strategies
from scheduler.config import SchedulerConfig
from scheduler.context import Context, Shop
from scheduler.evaluation import summarise
from scheduler.journal import Journal, JournalError
from scheduler.tasks import HELD_OUT_SEEDS
from scheduler.together import together
from scheduler.tree import Node, Tree
from tools.evaluate_match import NO_MODEL, SIMULATIONS, Match, Settings, prepare
from tools.in_process import InProcess, Seat, without_model
from wire import loop
from wire.faults import DataFault, Fault, InfrastructureFault
from wire.messages import Sample

INTERRUPTED = 130
PATIENCE_S = 3600.0
"""Deadline of a call: an engine or an opponent of this process cannot be replaced by another one."""
GAUGES = ("version", "running", "kv_cache_bytes")
"""Of an engine's stats, what cannot be summed over sessions."""
HOPELESS = 10
"""So many games that could not be played, before one that could, end the evaluation."""


class Measured(msgspec.Struct, frozen=True):
    """Mean and half width of the 95% interval over ``n`` values: games, or turns for what is measured of each turn."""

    mean: float
    half: float
    n: int


class Found(msgspec.Struct, frozen=True):
    """The games whose task seeds begin at ``seed``."""

    seed: int
    games: int
    measures: dict[str, Measured]


class Result(msgspec.Struct, frozen=True):
    """OUT/result.json. seconds, generated_tokens, engine: over all sessions that were not killed."""

    settings: Settings
    headline: str
    overall: Found
    by_seed: list[Found]
    unplayed: dict[str, str]
    seconds: float
    generated_tokens: int
    engine: dict[str, float]


class Session(msgspec.Struct, frozen=True):
    """A line of OUT/sessions.jsonl: what was spent between a start and its end or interruption."""

    games: int
    seconds: float
    engine: dict[str, float]


# ---------------------------------------------------------------------------------------------- command line


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="tools/evaluate", description="Measure a player on an environment that makes its own tasks (a game)."
    )
    parser.add_argument("environment", metavar="ENV", help=f"one of {', '.join(registry.KNOWN)}, or module:Class")
    _add_players(parser)
    _add_games(parser.add_argument_group("games"))
    parser.add_argument(
        "--out", type=Path, help="folder; an evaluation that is there goes on (default: evaluations/ENV-TIME)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.add_argument("--concurrency", type=int, default=16, help="games played at once (default: %(default)s)")
    return parser.parse_args(arguments)


def _add_players(parser: argparse.ArgumentParser) -> None:
    one = parser.add_argument_group("player").add_mutually_exclusive_group(required=True)
    one.add_argument("--model", help="a model folder, a built-in name or a hub id")
    one.add_argument("--run", type=Path, help="a run folder: its newest weights, and its settings of ENV")
    one.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, up to /v1")
    one.add_argument("--baseline", choices=sorted(NO_MODEL), help="without a model: any, or the first, legal move")
    remote = parser.add_argument_group("with --endpoint")
    remote.add_argument("--endpoint-model", metavar="NAME", help="the model to ask for")
    remote.add_argument("--api-key-env", metavar="VARIABLE", help="the environment variable that holds the API key")
    remote.add_argument(
        "--endpoint-field", action="append", default=[], metavar="KEY=VALUE", help="more of each request"
    )
    remote.add_argument("--timeout", type=float, help="seconds of one attempt (300)")
    remote.add_argument("--attempts", type=int, help="attempts of one request (6)")
    local = parser.add_argument_group("with --model or --run")
    local.add_argument("--version", type=int, help="of --run: this version instead of the newest, 0 for the first")
    local.add_argument("--no-thinking", action="store_true", help="ask a chat template that knows the switch for none")
    local.add_argument("--threads", type=int, help="compute threads (1)")
    local.add_argument("--max-context", type=int, help="prompt and action, tokens (default: the run's, else 4096)")
    actions = parser.add_argument_group("actions")
    actions.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    actions.add_argument("--top-p", type=float, default=1.0)
    actions.add_argument("--top-k", type=int, default=0)
    actions.add_argument("--max-tokens", type=int, help="of one action (default: the run's, else 500)")


def _add_games(games: Any) -> None:
    games.add_argument("--games", type=int, default=100, help="games a seed (default: %(default)s)")
    games.add_argument("--seed", type=int, default=HELD_OUT_SEEDS, help="first task seed (default: of held-out tasks)")
    games.add_argument("--seeds", type=int, default=1, help="repeat with so many sets of tasks")
    games.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of ENV, a TOML value")
    games.add_argument("--opponent", help=f"random, one of {', '.join(PLAYERS)}, or module:Class (default: MCTS)")
    games.add_argument("--simulations", type=int, help=f"of the MCTS opponent ({SIMULATIONS})")
    oracle = "label moves by the built-in oracle (default: yes)"
    games.add_argument("--oracle", action=argparse.BooleanOptionalAction, default=True, help=oracle)
    games.add_argument("--oracle-option", action="append", default=[], metavar="KEY=VALUE", help="of the oracle")


# ---------------------------------------------------------------------------------------------- playing


class NotStarted(RuntimeError):
    """The player cannot be had: a model that does not fit, a key that is not set."""


class Evaluation:
    """The games of one match in one folder. ``play`` may be cancelled at any moment and gone on with later."""

    def __init__(self, match: Match, out: Path, concurrency: int):
        self.match, self.settings, self.out = match, match.settings, out
        self.services = InProcess(match.engine, match.workers)
        self.room = asyncio.Semaphore(concurrency)
        self.unplayed: dict[str, str] = {}
        self.started = self.spending = False
        self.played = 0
        self.start_s = time.monotonic()
        s = match.settings
        self.config = SchedulerConfig(
            strategy="chain", k=1, judge=match.judge, temperature=s.temperature, top_p=s.top_p, top_k=s.top_k,
            max_action_tokens=s.max_tokens, thinking=s.thinking,
            generate_deadline_s=PATIENCE_S, judge_deadline_s=PATIENCE_S,
        )  # fmt: skip
        self.journal = Journal(out / "journal.sqlite")
        self.rows = {row.id: row for row in self.journal.trees("split='heldout'")}
        # The dispatcher is each game's seat.
        self.shop = Shop(
            None,  # pyright: ignore[reportArgumentType]
            self.journal, match.text, match.environment, self.config, Counter(), lambda tree, nodes, turns: None,
        )  # fmt: skip

    async def _start(self) -> None:
        """The services, with the weights of the run's version. Raises NotStarted."""
        self.started = True
        try:
            await self.services.start()
        except (OSError, ValueError, MemoryError) as error:
            raise NotStarted(str(error)) from error
        if self.match.load is not None and self.match.engine is not None:
            await self.match.engine.load(self.match.load)
        self.spending = True

    async def play(self) -> Result:
        """Play what is not played yet. Raises Fault when it cannot go on, NotStarted when it cannot begin."""
        s = self.settings
        if sum(row.status == "closed" for row in self.rows.values()) < s.games * s.seeds:
            await self._start()
        found = await together(self._game(position) for position in range(s.games * s.seeds))
        pairs = [pair for pair in found if pair is not None]
        if not pairs:
            raise InfrastructureFault(f"no game could be played; the last reason: {list(self.unplayed.values())[-1]}")
        spent = self._spent()
        by_seed = []
        for k in range(s.seeds):
            first = s.seed + k * s.games
            ours = [(task, tree) for task, tree in pairs if first <= task.seed < first + s.games]
            by_seed.append(self._found(first, ours))
        result = Result(
            s, self.match.environment.headline, self._found(s.seed, pairs), by_seed, self.unplayed,
            spent.seconds, int(spent.engine.get("decoded_tokens", 0)), spent.engine,
        )  # fmt: skip
        (self.out / "result.json").write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1))
        return result

    async def _game(self, position: int) -> tuple[Task, Tree] | None:
        async with self.room:
            task: Task = self.match.environment.task(self.settings.seed + position)  # pyright: ignore[reportAttributeAccessIssue]
            before = self.rows.get(position)
            if before is not None and before.status == "closed":
                return task, self.journal.tree(before)
            said = self.journal.tree(before).actions() if before is not None else []
            tree = Tree(position, task.id, "heldout")
            self.journal.start_tree(tree, position, self.settings.version)
            try:
                await self._grow(task, tree, [_sample(node) for node in said])
            except DataFault as fault:
                self._give_up(tree, str(fault))
                return None
            self.journal.close_tree(position)
            self.played += 1
            self._progress()
            return task, tree

    async def _grow(self, task: Task, tree: Tree, said: list[Sample]) -> None:
        # The same draws as in a run's held-out evaluation of this task, and again the same after an interruption.
        rng = random.Random(f"heldout/{tree.id}")
        context = Context(self.shop, self.config, task, tree, rng)
        seat = Seat(self.services, said)
        if self.settings.player == "baseline":  # it says the same again by itself
            game: Any = self.match.environment
            seat = Seat(
                self.services, [], without_model(NO_MODEL[self.settings.source], game, self.match.text, context)
            )
        context.shop = msgspec.structs.replace(self.shop, dispatcher=seat)
        await context.plant()
        await strategies.load("chain")(tree, context)

    def _give_up(self, tree: Tree, reason: str) -> None:
        self.journal.close_tree(tree.id, "quarantined", reason)
        self.unplayed[tree.task] = reason
        closed = any(row.status == "closed" for row in self.rows.values())
        if len(self.unplayed) >= HOPELESS and not self.played and not closed:
            raise InfrastructureFault(f"the first {HOPELESS} games could not be played; the last reason: {reason}")

    def _found(self, seed: int, pairs: list[tuple[Task, Tree]]) -> Found:
        counts: Counter[str] = Counter()
        for task, tree in pairs:
            turns = [{**action.scores, "forced": float(action.forced)} for action in tree.actions()]
            counts.update({name: len(values) for name, values in self.match.environment.measures(task, turns).items()})
        found = summarise(self.settings.version, self.match.environment, pairs)
        measures = {name: Measured(e.mean, e.half, counts[name]) for name, e in found.measures.items() if counts[name]}
        return Found(seed, len(pairs), measures)

    def _progress(self) -> None:
        """A line at every tenth of the games."""
        total = self.settings.games * self.settings.seeds
        done = self.played + sum(row.status == "closed" for row in self.rows.values())
        if done * 10 // total != (done - 1) * 10 // total:
            print(f"{done} of {total} games, {time.monotonic() - self.start_s:.0f} s", file=sys.stderr, flush=True)

    def _spent(self) -> Session:
        """This session and those before it."""
        path = self.out / "sessions.jsonl"
        if self.spending:
            engine = self.match.engine.stats() if self.match.engine is not None else {}
            counters = {key: value for key, value in engine.items() if key not in GAUGES}
            made = Session(self.played, round(time.monotonic() - self.start_s, 3), counters)
            with path.open("ab") as file:
                file.write(msgspec.json.encode(made) + b"\n")
            self.spending = False
        sessions = [msgspec.json.decode(line, type=Session) for line in path.open("rb")] if path.exists() else []
        total: Counter[str] = Counter()
        for session in sessions:
            total.update(session.engine)
        return Session(sum(s.games for s in sessions), round(sum(s.seconds for s in sessions), 3), dict(total))

    async def close(self) -> None:
        """Release everything; what was played stays."""
        self._spent()
        self.journal.close()
        if self.started:
            await self.services.close()


def _sample(action: Node) -> Sample:
    """What an action's node was made of."""
    assert action.logprobs is not None, "no action"
    assert action.versions is not None, "no action"
    return Sample(action.tokens, action.logprobs, action.versions, action.finish)  # pyright: ignore[reportArgumentType]


# ---------------------------------------------------------------------------------------------- what is said


def lines(result: Result) -> str:
    """The result as a table: overall, and the means of each seed where there are several."""
    s = result.settings
    names = sorted(result.overall.measures, key=lambda name: (name != result.headline, name))
    each = result.by_seed if len(result.by_seed) > 1 else []
    rows = [["measure", "mean ±95%", "n", *(f"seed {found.seed}" for found in each)]]
    for name in names:
        m = result.overall.measures[name]
        means = [f"{found.measures[name].mean:.3f}" if name in found.measures else "-" for found in each]
        rows.append([name, f"{m.mean:.3f} ±{m.half:.3f}", str(m.n), *means])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    made = [f"{s.environment}, {result.overall.games} games, {_player(s)}{_against(s)}"]
    made += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for task, reason in list(result.unplayed.items())[:3]:
        made.append(f"not played: {task}: {reason}")
    if len(result.unplayed) > 3:
        made.append(f"not played: {len(result.unplayed) - 3} more, see result.json")
    return "\n".join([*made, f"{result.seconds:.0f} s, {result.generated_tokens} generated tokens"])


def _player(s: Settings) -> str:
    how = "" if s.player == "baseline" else ", greedy" if s.temperature == 0 else f", temperature {s.temperature:g}"
    name = {"run": f"{s.source} version {s.version}", "endpoint": f"{s.model} at {s.source}"}.get(s.player, s.source)
    return f"{s.player} {name}{how}"


def _against(s: Settings) -> str:
    if "opponents" not in s.options:
        return ""
    shown = [" ".join([name, *(f"{k}={v}" for k, v in s.opponents.get(name, {}).items())]) for name in s.options["opponents"]]  # fmt: skip
    return f", against {' or '.join(shown)}"


def claim(out: Path, settings: Settings) -> Any:
    """The folder for this evaluation alone, its lock held by the file returned. Raises ValueError when it holds another."""
    saved = out / "evaluation.json"
    if out.exists() and not saved.is_file() and any(path.name != "lock" for path in out.iterdir()):
        raise ValueError(f"--out {out}: it holds something else (no evaluation.json); choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    lock = (out / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ValueError(
            f"--out {out} is in use by another evaluation: stop that one, or choose another folder"
        ) from None
    given = msgspec.to_builtins(settings)
    if saved.is_file():
        before = msgspec.json.decode(saved.read_bytes())
        for key in sorted({*given, *before}):
            if before.get(key) != given.get(key):
                lock.close()
                raise ValueError(
                    f"--out {out} was begun with {key} = {before.get(key)!r}, now it is {given.get(key)!r}:"
                    " give the same settings, or choose another folder"
                )
    else:
        saved.write_bytes(msgspec.json.format(msgspec.json.encode(settings), indent=1))
    return lock


async def run(evaluation: Evaluation) -> Result | None:
    """Play to the end, or to a signal (None)."""
    work = asyncio.create_task(evaluation.play())
    try:
        return work.result() if await loop.or_signal(work) else None
    finally:
        await evaluation.close()


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = parse(arguments)
    try:
        match = prepare(given)
        out = given.out or Path("evaluations") / time.strftime(f"{match.environment.name}-%Y%m%d-%H%M%S")
        lock = claim(out, match.settings)
    except (OSError, ValueError, MemoryError) as error:
        print(f"tools/evaluate: {error}", file=sys.stderr)
        return 2
    with lock:
        return _report(given, match, out, arguments)


def _report(given: argparse.Namespace, match: Match, out: Path, arguments: list[str]) -> int:
    again = shlex.join(["tools/evaluate", *arguments, *([] if given.out else ["--out", str(out)])])
    try:
        result = loop.run(run(Evaluation(match, out, given.concurrency)))
    except NotStarted as error:
        print(f"tools/evaluate: {error}", file=sys.stderr)
        return 2
    except (Fault, JournalError) as fault:
        print(f"tools/evaluate: {fault}\nwhat was played is kept; go on with: {again}", file=sys.stderr)
        return 1
    if result is None:
        print(f"stopped; go on with: {again}", file=sys.stderr)
        return INTERRUPTED
    print(msgspec.json.encode(result).decode() if given.json else f"{lines(result)}\nresult {out / 'result.json'}")
    return 0
