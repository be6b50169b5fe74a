"""A process of judges, opponents and speakers: ``python -m coppice.judges.serve PROCESS.json``."""

import asyncio
import inspect
import logging
import operator
import sys
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common import loop, options
from coppice.common.concurrency import settle
from coppice.common.numbers import LARGEST, Count
from coppice.common.process import begin
from coppice.judges.base import Judge, Player, PlugIn, Speaker, checked
from coppice.wire import messages as wire
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.keys import PeerKeys, connection
from coppice.wire.service import Call, Handler, Service

BUILT_IN = {
    "exact_match": "coppice.judges.exact_match:ExactMatch",
    "slate_rules": "coppice.judges.slate:SlateRules",
    "slate": "coppice.judges.slate:Slate",
    "slate_em": "coppice.judges.slate:SlateEm",
    "pprm": "coppice.judges.pprm:Pprm",
    "pprm_rules": "coppice.judges.pprm_rules:PprmRules",
    "reward_model": "coppice.judges.reward_model:RewardModel",
    "sotopia": "coppice.judges.sotopia:SotopiaJudge",
    "sotopia_rules": "coppice.judges.sotopia:SotopiaRules",
    "tictactoe": "coppice.judges.oracles.tictactoe:TicTacToeOracle",
    "sudoku": "coppice.judges.oracles.sudoku:SudokuOracle",
    "minesweeper": "coppice.judges.oracles.minesweeper:MinesweeperOracle",
    "sokoban": "coppice.judges.oracles.sokoban:SokobanOracle",
    "webshop": "coppice.judges.oracles.webshop:WebShopOracle",
    "bfcl": "coppice.judges.oracles.bfcl:BfclOracle",
}
PLAYERS = {
    "tictactoe_mcts": "coppice.judges.oracles.tictactoe:MctsPlayer",
    "tictactoe_minimax": "coppice.judges.oracles.tictactoe:MinimaxPlayer",
}
SPEAKERS = {"chat": "coppice.judges.llm:Chat", "frozen": "coppice.judges.llm:Frozen"}
log = logging.getLogger("judges.serve")
KINDS = {"judge": BUILT_IN, "player": PLAYERS, "speaker": SPEAKERS}
"""The built-in judges, opponents and speakers. They are imported only when a run uses them."""
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_EXPECTED = "expected a subclass of judges.base.Judge with a name and columns, Player or Speaker"


def built_in_service(name: str) -> str:
    """Return the service that a name in [judges.use] offers, "" for a plug-in, whose class names
    the service."""
    return next((f"{kind}.{name}" for kind, names in KINDS.items() if name in names), "")


class JudgeProcess(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a judge process. judges: options by built-in name or "module:Class"."""

    name: str
    run: str
    judges: dict[str, dict[str, Any]]


_METHODS = {Judge: "score", Player: "play", Speaker: "speak"}


def make_worker(spec: str, settings: dict[str, Any]) -> PlugIn:
    """Return the judge, opponent or speaker with a built-in name, or of ``module:Class``. Raises
    ValueError, which says what was expected."""
    built_in = {**BUILT_IN, **PLAYERS, **SPEAKERS}
    place = built_in.get(spec, spec)
    if ":" not in place:
        options.check_choice(f"judge {spec!r}", spec, built_in, ", or module:Class")
    kind = options.imported(f"judge {spec!r}", place)
    if not isinstance(kind, type):
        raise ValueError(f"judge {spec!r}: {place.partition(':')[2]} is no class; {_EXPECTED}")
    arguments = options.checked(f"judges.use.{spec}", spec, kind.__init__, settings, ("self",))
    parameters = inspect.signature(kind).parameters.values()
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in _REST]
    if missing := [name for name in required if name not in arguments]:
        raise ValueError(f"judges.use.{spec}: {spec} needs {missing}: see docs/judges.md")
    try:
        worker = kind(**arguments)
    except Exception as error:  # noqa: BLE001
        cause = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        raise ValueError(f"judges.use.{spec}: {cause}{error}") from None
    whole = isinstance(worker, Player | Speaker) or (isinstance(worker, Judge) and worker.columns)
    if not whole or not worker.name:
        raise ValueError(f"judge {spec!r}: {_EXPECTED}")
    method = next(name for base, name in _METHODS.items() if isinstance(worker, base))
    if not inspect.iscoroutinefunction(inspect.unwrap(getattr(worker, method))):
        raise ValueError(f"judge {spec!r}: {method} is no coroutine: write async def {method}")
    kinds = {"concurrency": Count}
    if isinstance(worker, Judge):
        kinds |= {"batch": Count, "limits": tuple[float, float], "columns": tuple[str, ...]}
    for name, hint in kinds.items():
        value = getattr(worker, name)
        try:
            msgspec.convert(value, hint)
            if name == "limits" and not all(abs(one) <= LARGEST for one in value):
                raise ValueError(f"expected two numbers of at most {LARGEST:g}")
            if name == "limits" and value[0] > value[1]:
                raise ValueError("expected the lower one first")
        except ValueError as error:  # msgspec's are, too
            raise ValueError(f"judge {spec!r}: {name} = {value!r}: {error}") from None
    return worker


Item = tuple[wire.JudgedTurn, asyncio.Future[wire.Judgement]]


_OF_A_TURN = DataFault, ValueError, TypeError, LookupError, AttributeError, ArithmeticError
"""What a judge raises for a turn that it cannot read: another worker could not either."""


class Batcher:
    """Scores the turns of concurrent requests together, at most ``judge.batch`` at a time.

    A turn is queued, taken into a batch, scored, and answered. A turn whose request was cancelled
    is dropped before it is scored."""

    def __init__(self, judge: Judge):
        self.judge = judge
        self._queue: deque[Item] = deque()
        self._room = asyncio.Semaphore(judge.concurrency)
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, request: wire.JudgeRequest, call: Call) -> wire.JudgeResult:
        """Handle a request of the service: return one judgement per turn."""
        event_loop = asyncio.get_running_loop()
        items: list[Item] = [(turn, event_loop.create_future()) for turn in request.turns]
        self._queue.extend(items)
        task = asyncio.create_task(self._drain())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return wire.JudgeResult(list(await asyncio.gather(*(future for _, future in items))))
        finally:
            for _, future in items:
                future.cancel()

    async def _drain(self) -> None:
        async with self._room:
            while self._queue:
                size = min(self.judge.batch, len(self._queue))
                await self._answer([self._queue.popleft() for _ in range(size)])

    async def _answer(self, items: list[Item]) -> None:
        items = [item for item in items if not item[1].done()]
        if not items:
            return
        try:
            answers: Sequence[wire.Judgement | Exception] = await self._judgements(items)
        except Exception as error:
            if isinstance(error, _OF_A_TURN) and len(items) > 1:
                # one bad turn must not fail the other turns of its batch
                for item in items:
                    await self._answer([item])
                return
            if isinstance(error, _OF_A_TURN) and not isinstance(error, DataFault):
                log.exception("judge %s fails at one turn", self.judge.name)
                cause = f"{type(error).__name__}: {error}"
                error = DataFault(f"judge {self.judge.name} fails at one turn: {cause}")
            answers = [error] * len(items)
        for (_, future), answer in zip(items, answers, strict=True):
            settle(future, answer)

    async def _judgements(self, items: list[Item]) -> list[wire.Judgement]:
        """Score the turns. Scoring is cancelled when nobody waits for any of them any more."""
        turns = [turn for turn, _ in items]
        scoring = asyncio.ensure_future(self.judge.score(turns))

        def left(_: object) -> None:
            if all(future.done() for _, future in items):
                scoring.cancel()

        for _, future in items:
            future.add_done_callback(left)
        try:
            return checked(self.judge, turns, await scoring)
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            fault = f"judge {self.judge.name} cancelled its own scoring"
            raise InfrastructureFault(fault) from None


def answering(worker: Player | Speaker) -> Handler:
    """Return the service handler of an opponent or a speaker, which answers at most
    ``worker.concurrency`` requests at once."""
    room = asyncio.Semaphore(worker.concurrency)

    async def handle(request: Any, call: Call) -> wire.PlayResult | wire.SpeakResult:
        async with room:
            if isinstance(worker, Speaker):
                if isinstance(said := await worker.speak(request), str):
                    return wire.SpeakResult(said.encode(errors="replace").decode())
                raise InfrastructureFault(f"{worker.name} said {said!r}: expected a text")
            cells = await worker.play(request.state, request.seed)
            cells = [*cells] if isinstance(cells, list | tuple) else [cells]
            try:
                return wire.PlayResult([*map(operator.index, cells)])  # NumPy's, too
            except TypeError:
                fault = f"{worker.name} played {cells!r}: expected integers"
                raise InfrastructureFault(fault) from None

    return handle


async def serve(
    workers: Sequence[PlugIn], name: str, endpoint: str, keys: PeerKeys | None, signals: bool = True
) -> None:
    """Offer the services of all workers until drained."""
    judges = [worker for worker in workers if isinstance(worker, Judge)]
    handlers: dict[str, Handler] = {judge.service: Batcher(judge).handle for judge in judges}
    handlers |= {w.service: answering(w) for w in workers if isinstance(w, Player | Speaker)}
    capacity = sum(worker.concurrency for worker in workers)
    for worker in workers:
        await worker.start()
    try:
        await Service(name, handlers, capacity).run(endpoint, keys, signals)
    finally:
        for worker in workers:
            await worker.close()


def main() -> None:
    process = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=JudgeProcess)
    begin()
    judges = [make_worker(spec, settings) for spec, settings in process.judges.items()]
    endpoint, keys = connection(Path(process.run))
    loop.run(serve(judges, process.name, endpoint, keys))


if __name__ == "__main__":
    main()
