"""A thread that carries out commands in order, and runs steps while there is work.

Invariant: every request is answered or failed. A RuntimeError or ValueError (no memory, a failing
model) fails the requests that the thread has taken, and the thread goes on. Any other error ends
the thread, and so do ``FAILED_STEPS`` failed steps without a successful one between them.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from coppice.wire.faults import InfrastructureFault

log = logging.getLogger("actors.engines.thread")

FAILED_STEPS = 3
"""This many failed steps in a row end the thread: after a CUDA assert every step fails."""
_CLOSED = "the engine's thread has ended: it was closed"


class EngineThread:
    """Runs three functions on its own thread. busy: whether there is a step to run. step: run it.
    free: after a failure, free the memory of all requests."""

    def __init__(
        self, busy: Callable[[], bool], step: Callable[[], None], free: Callable[[], None]
    ):
        self._busy, self._step, self._free = busy, step, free
        self._commands: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.ended = ""
        """The reason why the thread accepts no more requests, "" while it does."""
        self._death: Future[str] = Future()
        self._gate = threading.Lock()
        self._open: set[Future[Any]] = set()
        """Open requests, running once the thread has taken them. The gate guards this set."""

    def start(self) -> None:
        """Start the thread, which begins with the commands given before."""
        self._thread.start()

    async def close(self) -> None:
        """End the thread after the commands given before. Open requests then fail."""
        self._commands.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join)

    async def died(self) -> str:
        """Return the reason when an error has ended the thread; never return after ``close``."""
        # a caller that stops waiting must not cancel it
        return await asyncio.shield(asyncio.wrap_future(self._death))

    def tell(self, command: Callable[[], None]) -> None:
        """Have ``command`` carried out, without waiting. A thread that has ended ignores it."""
        self._commands.put(command)

    def ask(self, future: Future[Any], take: Callable[[], None]) -> None:
        """Have ``take`` carried out, which must lead to an answer in ``future``, unless the future
        is cancelled before. Raises InfrastructureFault when the thread has already ended."""

        def command() -> None:
            if future.set_running_or_notify_cancel():
                take()

        with self._gate:
            if self.ended:
                raise InfrastructureFault(self.ended)
            self._open.add(future)
            self._commands.put(command)
        future.add_done_callback(self._answered)

    async def run(self, work: Callable[[], Any]) -> Any:
        """Run ``work`` on the thread and return its result. Raises InfrastructureFault."""
        future: Future[Any] = Future()

        def take() -> None:
            try:
                future.set_result(work())
            except (RuntimeError, KeyError, ValueError, OSError) as error:
                future.set_exception(InfrastructureFault(f"{type(error).__name__}: {error}"))

        self.ask(future, take)
        return await asyncio.wrap_future(future)

    def _answered(self, future: Future[Any]) -> None:
        with self._gate:
            self._open.discard(future)

    def _work(self) -> None:
        """Serve, then fail everything that is still open, so that nobody waits forever."""
        reason = _CLOSED
        try:
            self._serve()
            self._free()
        except BaseException as error:
            reason = f"the engine's thread has ended: {error!r}"
            raise  # Python prints the traceback to standard error
        finally:
            with self._gate:
                self.ended, left = reason, {*self._open}
            self._fail(reason, left)
            if reason != _CLOSED:
                self._death.set_result(reason)

    def _fail(self, reason: str, futures: set[Future[Any]]) -> None:
        for future in futures:
            with contextlib.suppress(InvalidStateError):  # the caller left just now
                future.set_exception(InfrastructureFault(reason))

    def _serve(self) -> None:
        """Carry out commands as they arrive, otherwise steps, until closed."""
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
                    steps = f"{FAILED_STEPS} steps failed one after another"
                    raise RuntimeError(f"{steps}, the last with: {error}") from error
                self._free()
                with self._gate:
                    taken = {future for future in self._open if future.running()}
                log.exception("a step failed, and with it %d requests", len(taken))
                self._fail(f"engine step failed: {error}", taken)
            else:
                failed_steps = 0 if is_step else failed_steps
