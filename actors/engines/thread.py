"""One thread that does what is asked of it, in order, and steps while there is work; it knows nothing of what a step is.

Invariant: whatever is asked is answered or failed. A RuntimeError or ValueError (memory, a model that fails) fails what is open, and the
thread goes on; any other error ends it, as does one that never goes away: ``FAILED_STEPS`` steps that fail with none between that succeeds.
A thread that has ended fails everything and takes nothing more; unless it was closed, ``died`` tells why.

    serving --failed step--> serving          serving --close--> ended          serving --other error, or one that stays--> ended, died
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from wire.faults import InfrastructureFault

log = logging.getLogger("actors.engines.thread")

FAILED_STEPS = 3
"""So many, one after another, end the thread: memory that was short fails one step, after a CUDA assert none succeeds in this process."""
_CLOSED = "the engine's thread has ended: it was closed"


class EngineThread:
    """Runs three functions of its owner, on its thread only.

    busy: is there a step to do? step: do it. fail: free what open requests hold, also what a failure left half changed, and fail them with
    this reason; how many there were.
    """

    def __init__(self, busy: Callable[[], bool], step: Callable[[], None], fail: Callable[[str], int]):
        self._busy, self._step, self._fail = busy, step, fail
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread: threading.Thread | None = None
        self.ended = ""
        """Why nothing is taken any more; "" until then."""
        self._death: Future[str] = Future()
        self._gate = threading.Lock()
        self._unanswered: set[Future[Any]] = set()
        """Of all that was asked, under the gate."""

    # ------------------------------------------------------------------------------------------ any thread

    def start(self) -> None:
        """Begin with what was asked before."""
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """End when all that was asked before is done; what is open then is failed."""
        self._commands.put(None)
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)

    async def died(self) -> str:
        """Returns, with the reason, when an error has ended the thread; never after ``close``."""
        return await asyncio.shield(asyncio.wrap_future(self._death))  # who stops listening must not cancel it

    def tell(self, command: Callable[[], None]) -> None:
        """Have ``command`` done, for which nobody waits; nothing once the thread has ended."""
        self._commands.put(command)

    def ask(self, future: Future[Any], command: Callable[[], None]) -> None:
        """Have ``command`` done, after which ``future`` is answered sooner or later; should the thread end before, that fails it.

        Raises InfrastructureFault when the thread has ended.
        """
        with self._gate:
            if self.ended:
                raise InfrastructureFault(self.ended)
            self._unanswered.add(future)
            self._commands.put(command)
        future.add_done_callback(self._answered)

    async def run(self, work: Callable[[], Any]) -> Any:
        """What ``work`` returns. Raises InfrastructureFault when it fails in a way that leaves the thread as it was."""
        future: Future[Any] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():  # its caller has left
                return
            try:
                future.set_result(work())
            except (RuntimeError, KeyError, ValueError, OSError) as error:
                future.set_exception(InfrastructureFault(f"{type(error).__name__}: {error}"))

        self.ask(future, command)
        return await asyncio.wrap_future(future)

    def _answered(self, future: Future[Any]) -> None:
        with self._gate:
            self._unanswered.discard(future)

    # ------------------------------------------------------------------------------------------ the thread

    def _work(self) -> None:
        """Whatever ends it, nobody waits for ever."""
        try:
            self._serve()
            self._fail(_CLOSED)
        except BaseException as error:
            self._end(f"the engine's thread has ended: {error!r}")
            self._death.set_result(self.ended)
            raise  # its traceback goes to standard error
        self._end(_CLOSED)

    def _end(self, reason: str) -> None:
        """Take nothing more, and fail all that is not answered."""
        with self._gate:
            self.ended = reason
            left = list(self._unanswered)
        for future in left:
            with contextlib.suppress(InvalidStateError):  # its caller left just now
                future.set_exception(InfrastructureFault(reason))

    def _serve(self) -> None:
        """Commands as they come, else a step; until closed. Raises RuntimeError when steps fail one after another."""
        failed_steps = 0
        while True:
            try:
                command = self._commands.get(block=not self._busy())
            except queue.Empty:
                command = self._step
            if command is None:
                return
            is_step = command is self._step
            try:
                command()
            except (RuntimeError, ValueError) as error:  # out of memory, or a model that fails
                failed_steps += is_step
                if failed_steps == FAILED_STEPS:
                    reason = f"{FAILED_STEPS} steps failed one after another, the last with: {error}"
                    raise RuntimeError(reason) from error
                log.exception("a step failed, and with it %d requests", self._fail(f"engine step failed: {error}"))
            else:
                failed_steps = 0 if is_step else failed_steps
