"""A judge as a worker process: it batches requests (at most ``judge.batch`` turns), checks scores
and classifies faults.

The launcher starts ``python -m coppice.judges.serve PROCESS.json``. ``coppice serve module:Class --run RUN``
plugs a judge into a live run, and ``judges.invitations`` lets one in from another machine.
"""

import argparse
import asyncio
import inspect
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common import loop, options
from coppice.common.options import command_parser
from coppice.common.process import begin
from coppice.judges import invitations
from coppice.judges.base import Judge, checked
from coppice.judges.players import Player
from coppice.judges.speakers import Speaker
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.keys import Invitation, PeerKeys
from coppice.wire.messages import (
    JudgedTurn,
    Judgement,
    JudgeRequest,
    JudgeResult,
    PlayResult,
    SpeakResult,
)
from coppice.wire.service import Call, Handler, Service

BUILT_IN = {
    "exact_match": "coppice.judges.exact_match:ExactMatch",
    "slate_rules": "coppice.judges.slate_rules:SlateRules",
    "slate": "coppice.judges.slate:Slate",
    "slate_em": "coppice.judges.slate_em:SlateEm",
    "pprm": "coppice.judges.pprm:Pprm",
    "pprm_rules": "coppice.judges.pprm_rules:PprmRules",
    "reward_model": "coppice.judges.reward_model:RewardModel",
    "sotopia": "coppice.judges.sotopia:SotopiaJudge",
    "sotopia_rules": "coppice.judges.sotopia_rules:SotopiaRules",
    "tictactoe": "coppice.judges.oracles.tictactoe:TicTacToeOracle",
    "sudoku": "coppice.judges.oracles.sudoku:SudokuOracle",
    "minesweeper": "coppice.judges.oracles.minesweeper:MinesweeperOracle",
    "sokoban": "coppice.judges.oracles.sokoban:SokobanOracle",
    "webshop": "coppice.judges.oracles.webshop:WebShopOracle",
}
PLAYERS = {
    "tictactoe_mcts": "coppice.judges.oracles.tictactoe:MctsPlayer",
    "tictactoe_minimax": "coppice.judges.oracles.tictactoe:MinimaxPlayer",
}
SPEAKERS = {"chat": "coppice.judges.speakers:Chat", "frozen": "coppice.judges.speakers:Frozen"}
KINDS = {"judge": BUILT_IN, "player": PLAYERS, "speaker": SPEAKERS}
"""The built-in judges, opponents and speakers. They are imported only when a run uses them."""
Worker = Judge | Player | Speaker


def built_in_service(name: str) -> str:
    """Return the service that a name in [judges.use] offers, "" for a plug-in, whose class names
    the service."""
    return next((f"{kind}.{name}" for kind, names in KINDS.items() if name in names), "")


def service_of(worker: Worker) -> str:
    """Return the service that a judge, an opponent or a speaker offers."""
    kind = (
        "judge"
        if isinstance(worker, Judge)
        else "player"
        if isinstance(worker, Player)
        else "speaker"
    )
    return f"{kind}.{worker.name}"


class JudgeProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a judge process. judges: constructor options by built-in name or "module:Class"."""

    name: str
    run: str
    judges: dict[str, dict[str, Any]]


_EXPECTED = "expected a subclass of judges.base.Judge with a name and columns, of judges.players.Player or of judges.speakers.Speaker"


def make_worker(spec: str, settings: dict[str, Any]) -> Worker:
    """Return the judge, opponent or speaker with a built-in name, or of ``module:Class``. Raises
    ValueError, which says what was expected."""
    built_in = {**BUILT_IN, **PLAYERS, **SPEAKERS}
    place = built_in.get(spec, spec)
    if ":" not in place:
        options.known(f"judge {spec!r}", spec, built_in, ", or module:Class")
    kind = options.imported(f"judge {spec!r}", place)
    if not isinstance(kind, type):
        raise ValueError(f"judge {spec!r}: {place.partition(':')[2]} is no class; {_EXPECTED}")
    arguments = options.checked(f"judges.use.{spec}", spec, kind.__init__, settings, ("self",))
    if missing := [name for name in _required(kind) if name not in arguments]:
        raise ValueError(f"judges.use.{spec}: {spec} needs {missing}: see docs/judges.md")
    try:
        worker = kind(**arguments)
    except ValueError as error:
        raise ValueError(f"judges.use.{spec}: {error}") from None
    except Exception as error:  # noqa: BLE001
        raise ValueError(f"judges.use.{spec}: {type(error).__name__}: {error}") from None
    named = bool(getattr(worker, "name", ""))
    if not (isinstance(worker, Player | Speaker) and named) and not (
        isinstance(worker, Judge) and named and worker.columns
    ):
        raise ValueError(f"judge {spec!r}: {_EXPECTED}")
    return worker


def _required(kind: Callable[..., Any]) -> list[str]:
    """Return the options that have no default."""
    named = (
        p
        for p in inspect.signature(kind).parameters.values()
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    )
    return [parameter.name for parameter in named if parameter.default is parameter.empty]


class Batcher:
    """Scores the turns of concurrent requests together, at most ``judge.batch`` at a time.

    A turn is queued, taken into a batch, scored, and answered. A turn whose request was cancelled
    is dropped before it is scored."""

    def __init__(self, judge: Judge):
        self.judge = judge
        self.counts: Counter[str] = Counter()
        self.busy_s = 0.0
        self._queue: asyncio.Queue[tuple[JudgedTurn, asyncio.Future[Judgement]]] = asyncio.Queue()
        self._room = asyncio.Semaphore(judge.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, request: JudgeRequest, call: Call) -> JudgeResult:
        """Handle a request of the service: return one judgement per turn."""
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
                taken = [
                    self._queue.get_nowait()
                    for _ in range(min(self.judge.batch, self._queue.qsize()))
                ]
                live = [(turn, future) for turn, future in taken if not future.done()]
                # one bad turn must not fail the other turns of its batch
                if live and not await self._score(live):
                    for item in live:
                        if not item[1].done():
                            await self._score([item])

    async def _score(self, items: list[tuple[JudgedTurn, asyncio.Future[Judgement]]]) -> bool:
        """Score and answer ``items``. Return False, without an answer, if a data fault of several
        turns must be traced to one of them."""
        start = time.monotonic()
        turns = [turn for turn, _ in items]
        scoring = asyncio.ensure_future(self.judge.score(turns))
        for _, future in items:  # scoring is cancelled when nobody waits for it any more
            future.add_done_callback(
                lambda _: scoring.cancel() if all(f.done() for _, f in items) else None
            )
        try:
            judgements, bad = checked(self.judge, turns, await scoring)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            self.counts["abandoned"] += 1
            for _, future in items:
                if not future.done():
                    future.set_exception(
                        InfrastructureFault(f"judge {self.judge.name} cancelled its own scoring")
                    )
            return True
        except Exception as error:  # noqa: BLE001
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
        """Return counters for the heartbeat."""
        own = getattr(self.judge, "stats", dict)()
        return {**self.counts, "busy_s": self.busy_s, **own}


async def serve(
    workers: Sequence[Worker], name: str, endpoint: str, keys: PeerKeys | None, signals: bool = True
) -> None:
    """Offer ``judge.<name>`` for each judge, and ``player.<name>`` or ``speaker.<name>`` for the
    other workers, until drained."""
    batchers = {service_of(judge): Batcher(judge) for judge in workers if isinstance(judge, Judge)}
    handlers: dict[str, Handler] = {
        service: batcher.handle for service, batcher in batchers.items()
    }
    handlers |= {
        service_of(worker): answering(worker) for worker in workers if not isinstance(worker, Judge)
    }
    capacity = sum(worker.concurrency for worker in workers)

    def stats() -> dict[str, float]:
        return {
            f"{service}.{key}": value
            for service, b in batchers.items()
            for key, value in b.stats().items()
        }

    for worker in workers:
        await worker.start()
    try:
        await Service(name, handlers, capacity, stats).run(endpoint, keys, signals)
    finally:
        for worker in workers:
            await worker.close()


def answering(worker: Player | Speaker) -> Handler:
    """Return the service handler of an opponent or a speaker, which answers at most
    ``worker.concurrency`` requests at once."""
    room = asyncio.Semaphore(worker.concurrency)

    # a PlayRequest or a SpeakRequest
    async def handle(request: Any, call: Call) -> PlayResult | SpeakResult:
        async with room:
            if isinstance(worker, Player):
                return PlayResult(list(await worker.play(request.state, request.seed)))
            return SpeakResult(await worker.speak(request))

    return handle


def connection(run: Path, role: str = "judge") -> tuple[str, PeerKeys]:
    """Return the endpoint and a role's keys of a started run. Raises FileNotFoundError, which names
    the remedy."""
    try:
        return (run / "endpoint").read_text().strip(), PeerKeys.load(run / "keys", role)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(
            f"{run} is not a started run ({error}): start it with coppice launch first"
        ) from None


EXAMPLES = """\
  coppice serve my_judge:Brevity --run RUN              a judge of your own
  coppice serve pprm --run RUN --option max_tokens=512  a built-in one
  coppice serve --run RUN --invite judge.brevity --to invitation.json
  coppice serve my_judge:Brevity --invite-file invitation.json"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice serve."""
    parser = command_parser(
        "coppice serve",
        "Plug a judge, an opponent or a speaker into a live run,\nor invite one from another machine.",
        EXAMPLES,
    )
    parser.add_argument(
        "judge", nargs="?", metavar="JUDGE", help="module:Class, or a built-in name"
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--run", type=Path, metavar="RUN", help="folder of the live run")
    where.add_argument(
        "--invite-file",
        type=Path,
        metavar="FILE",
        help="the invitation to a run on another machine",
    )
    option = "an argument of the class, its value in TOML; repeatable"
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    parser.add_argument(
        "--name", default=None, help="worker name (default: the judge's, with -plugin)"
    )
    invitations.add_flags(parser)
    return parser


def plug_in(arguments: list[str] | None = None) -> int:
    """Run the command coppice serve and return its exit status."""
    command = parser()
    asked = command.parse_args(arguments)
    begin()
    try:
        if asked.invite or asked.revoke:
            return invitations.run(asked)
        if asked.judge is None:
            command.error("name the judge that is served, as module:Class or a built-in name")
        endpoint, keys = _reached(asked)
        worker = make_worker(asked.judge, dict(options.option(text) for text in asked.option))
    except (OSError, ValueError) as error:
        print(f"coppice serve: {error}", file=sys.stderr)
        return 2
    offered = service_of(worker) + (f" {list(worker.columns)}" if isinstance(worker, Judge) else "")
    while True:
        print(f"serving {offered} to {endpoint}; Ctrl-C drains and leaves", flush=True)
        try:
            loop.run(serve([worker], asked.name or f"{worker.name}-plugin", endpoint, keys))
            return 0
        # the scheduler refused this worker, or a model server does not answer
        except (Fault, OSError) as error:
            before, endpoint = endpoint, _endpoint_now(asked)
            if endpoint in (before, ""):
                print(f"coppice serve: {error}", file=sys.stderr)
                return 1


def _reached(asked: argparse.Namespace) -> tuple[str, PeerKeys]:
    """Return the endpoint and the keys of the run folder or of the invitation."""
    if asked.invite_file is None:
        return connection(asked.run)
    invitation = Invitation.read(asked.invite_file)
    return invitation.endpoint, invitation


def _endpoint_now(asked: argparse.Namespace) -> str:
    """Return the run's current endpoint, "" if it has none. A resumed run has a new endpoint and
    the same keys."""
    try:
        return _reached(asked)[0]
    except (FileNotFoundError, ValueError):
        return ""


def main() -> None:
    """Run the judge process that the launcher starts."""
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JudgeProcess)
    begin()
    judges = [make_worker(spec, settings) for spec, settings in process.judges.items()]
    endpoint, keys = connection(Path(process.run))
    loop.run(serve(judges, process.name, endpoint, keys))


if __name__ == "__main__":
    main()
