"""A judge as a worker process: requests become batches of at most ``judge.batch`` turns, scores are checked, faults classified.

``python -m judges.serve PROCESS.json`` is started by the launcher; ``tools/serve module:Class --run RUN`` plugs into a live run.
"""

import argparse
import asyncio
import inspect
import logging
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from judges.base import Judge, checked
from judges.players import Player
from wire import loop, options
from wire.faults import DataFault, Fault, InfrastructureFault
from wire.messages import JudgedTurn, Judgement, JudgeRequest, JudgeResult, PlayRequest, PlayResult
from wire.service import Call, Handler, Service
from wire.sockets import RunKeys

BUILT_IN = {
    "exact_match": "judges.exact_match:ExactMatch",
    "slate_rules": "judges.slate_rules:SlateRules",
    "slate": "judges.slate:Slate",
    "slate_em": "judges.slate_em:SlateEm",
    "pprm": "judges.pprm:Pprm",
    "pprm_rules": "judges.pprm_rules:PprmRules",
    "reward_model": "judges.reward_model:RewardModel",
    "tictactoe": "judges.oracles.tictactoe:TicTacToeOracle",
    "sudoku": "judges.oracles.sudoku:SudokuOracle",
    "minesweeper": "judges.oracles.minesweeper:MinesweeperOracle",
}
PLAYERS = {
    "tictactoe_mcts": "judges.oracles.tictactoe:MctsPlayer",
    "tictactoe_minimax": "judges.oracles.tictactoe:MinimaxPlayer",
}
"""Built-in judges and opponents, imported when they are asked for."""


def built_in_service(name: str) -> str:
    """The service that a name of [judges.use] offers; "" for a plug-in, which announces its own."""
    return f"judge.{name}" if name in BUILT_IN else f"player.{name}" if name in PLAYERS else ""


def service_of(worker: Judge | Player) -> str:
    """The service that a judge or an opponent offers."""
    return f"judge.{worker.name}" if isinstance(worker, Judge) else f"player.{worker.name}"


class JudgeProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A judge process. judges: built-in name or "module:Class" -> constructor options."""

    name: str
    run: str
    judges: dict[str, dict[str, Any]]


_EXPECTED = "expected a subclass of judges.base.Judge with a name and columns, or of judges.players.Player"


def make_worker(spec: str, given: dict[str, Any]) -> Judge | Player:
    """A built-in judge or opponent by name, or ``module:Class``. Raises ValueError saying what was expected."""
    place = BUILT_IN.get(spec) or PLAYERS.get(spec) or spec
    if ":" not in place:
        options.known(f"judge {spec!r}", spec, [*BUILT_IN, *PLAYERS], ", or module:Class")
    kind = options.imported(f"judge {spec!r}", place)
    if not isinstance(kind, type):
        raise ValueError(f"judge {spec!r}: {place.partition(':')[2]} is no class; {_EXPECTED}")
    taken = options.checked(f"judges.use.{spec}", spec, kind.__init__, given, ("self",))
    if missing := [name for name in _required(kind) if name not in taken]:
        raise ValueError(f"judges.use.{spec}: {spec} needs {missing}: see docs/judges.md")
    try:
        made = kind(**taken)
    except ValueError as error:
        raise ValueError(f"judges.use.{spec}: {error}") from None
    except Exception as error:  # noqa: BLE001 whatever a plug-in raises while it is made is what is wrong with it
        raise ValueError(f"judges.use.{spec}: {type(error).__name__}: {error}") from None
    named = bool(getattr(made, "name", ""))
    if not (isinstance(made, Player) and named) and not (isinstance(made, Judge) and named and made.columns):
        raise ValueError(f"judge {spec!r}: {_EXPECTED}")
    return made


def _required(kind: Callable[..., Any]) -> list[str]:
    """Options without a default."""
    given = (p for p in inspect.signature(kind).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return [parameter.name for parameter in given if parameter.default is parameter.empty]


class Batcher:
    """Turns of concurrent requests scored together, at most ``judge.batch`` at a time."""

    def __init__(self, judge: Judge):
        self.judge = judge
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._queue: asyncio.Queue[tuple[JudgedTurn, asyncio.Future[Judgement]]] = asyncio.Queue()
        self._room = asyncio.Semaphore(judge.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, request: JudgeRequest, call: Call) -> JudgeResult:
        """Service handler: one judgement a turn."""
        loop_ = asyncio.get_running_loop()
        waiting: list[asyncio.Future[Judgement]] = [loop_.create_future() for _ in request.turns]
        for item in zip(request.turns, waiting, strict=True):
            self._queue.put_nowait(item)
        task = asyncio.create_task(self._drain())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return JudgeResult(list(await asyncio.gather(*waiting)))
        finally:
            for future in waiting:
                future.cancel()

    async def _drain(self) -> None:
        async with self._room:
            while not self._queue.empty():
                taken = [self._queue.get_nowait() for _ in range(min(self.judge.batch, self._queue.qsize()))]
                live = [(turn, future) for turn, future in taken if not future.done()]
                if live and not await self._score(live):  # one bad turn must not condemn the others of its batch
                    for item in live:
                        if not item[1].done():
                            await self._score([item])

    async def _score(self, items: list[tuple[JudgedTurn, asyncio.Future[Judgement]]]) -> bool:
        """Answer ``items``; False, and no answer, when a data fault of one of several has to be told from the others."""
        start = time.monotonic()
        turns = [turn for turn, _ in items]
        scoring = asyncio.ensure_future(self.judge.score(turns))
        for _, future in items:  # a judge that hangs keeps its place only while somebody waits for it
            future.add_done_callback(lambda _: scoring.cancel() if all(f.done() for _, f in items) else None)
        try:
            judgements, bad = checked(self.judge, turns, await scoring)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self.counts["abandoned"] += 1
            for _, future in items:
                if not future.done():
                    future.set_exception(InfrastructureFault(f"judge {self.judge.name} cancelled its own scoring"))
            return True
        except Exception as error:  # noqa: BLE001 whatever a plug-in raises is the answer to the requests it was scoring
            self.counts["raised"] += 1
            if isinstance(error, DataFault) and len(items) > 1:
                return False
            for _, future in items:
                if not future.done():
                    future.set_exception(error)
            return True
        finally:
            self.busy_s += time.monotonic() - start
        self.counts["turns"] += len(turns)
        self.counts["invalid"] += bad
        for (_, future), judgement in zip(items, judgements, strict=True):
            if not future.done():
                future.set_result(judgement)
        return True

    def stats(self) -> dict[str, float]:
        """Counters for the heartbeat."""
        own = getattr(self.judge, "stats", dict)()
        return {**self.counts, "busy_s": self.busy_s, **own}


async def serve(
    workers: list[Judge | Player], name: str, endpoint: str, keys: RunKeys | None, signals: bool = True
) -> None:
    """Offer ``judge.<name>`` for each judge and ``player.<name>`` for each opponent until drained."""
    batchers = {service_of(judge): Batcher(judge) for judge in workers if isinstance(judge, Judge)}
    handlers: dict[str, Handler] = {service: batcher.handle for service, batcher in batchers.items()}
    handlers |= {service_of(player): playing(player) for player in workers if isinstance(player, Player)}
    capacity = sum(worker.concurrency for worker in workers)

    def stats() -> dict[str, float]:
        return {f"{service}.{key}": value for service, b in batchers.items() for key, value in b.stats().items()}

    for worker in workers:
        await worker.start()
    try:
        await Service(name, handlers, capacity, stats).run(endpoint, keys, signals)
    finally:
        for worker in workers:
            await worker.close()


def playing(player: Player) -> Handler:
    """The service handler of an opponent, at most ``player.concurrency`` moves at once."""
    room = asyncio.Semaphore(player.concurrency)

    async def handle(request: PlayRequest, call: Call) -> PlayResult:
        async with room:
            return PlayResult(list(await player.play(request.state, request.seed)))

    return handle


def connection(run: Path) -> tuple[str, RunKeys]:
    """Endpoint and keys of a started run; raises FileNotFoundError with the remedy."""
    try:
        return (run / "endpoint").read_text().strip(), RunKeys.load(run / "keys")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"{run} is not a started run ({error}): start it with tools/launch first") from None


def plug_in(arguments: list[str] | None = None) -> int:
    """The command tools/serve; returns its exit status."""
    parser = argparse.ArgumentParser(prog="tools/serve", description="Plug a judge or an opponent into a live run.")
    parser.add_argument("judge", help="module:Class, or a built-in name")
    parser.add_argument("--run", required=True, type=Path, help="folder of the live run")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="constructor option")
    parser.add_argument("--name", default=None, help="worker name (default: the judge's)")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    try:
        endpoint, keys = connection(given.run)
        worker = make_worker(given.judge, dict(option(text) for text in given.option))
    except (OSError, ValueError) as error:
        print(f"tools/serve: {error}", file=sys.stderr)
        return 2
    what = service_of(worker) + (f" {list(worker.columns)}" if isinstance(worker, Judge) else "")
    while True:
        print(f"serving {what} to {endpoint}; Ctrl-C drains and leaves", flush=True)
        try:
            loop.run(serve([worker], given.name or f"{worker.name}-plugin", endpoint, keys))
            return 0
        except (Fault, OSError) as error:  # Rejected, or a model server that does not answer
            before, endpoint = endpoint, _endpoint_now(given.run)
            if endpoint in (before, ""):
                print(f"tools/serve: {error}", file=sys.stderr)
                return 1


def _endpoint_now(run: Path) -> str:
    """A resumed run has another endpoint than before, and the same keys; "" when it has none."""
    try:
        return connection(run)[0]
    except FileNotFoundError:
        return ""


def option(text: str) -> tuple[str, Any]:
    """KEY=VALUE; the value is read as TOML, a bare word is a string. Raises ValueError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"option {text!r}: expected KEY=VALUE")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def main() -> None:
    """The launcher's judge process."""
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JudgeProcess)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    judges = [make_worker(spec, given) for spec, given in process.judges.items()]
    endpoint, keys = connection(Path(process.run))
    loop.run(serve(judges, process.name, endpoint, keys))


if __name__ == "__main__":
    main()
