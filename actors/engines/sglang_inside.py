"""SGLang inside the actor's process: ``sglang.Engine``, called like SGLang's HTTP server.

The engine's tokenizer manager belongs to the event loop that calls it first. This module therefore
awaits the manager's coroutines; the blocking methods of ``sglang.Engine`` would run a second loop.
The engine spawns its children, so importing the main module must not run it.
"""

import asyncio
import contextlib
import multiprocessing
import os
from multiprocessing.process import BaseProcess
from typing import Any

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.sglang_api import FIXED, NO_DUMPS, Facts, Way, arguments, read_facts
from coppice.wire.faults import DataFault, InfrastructureFault

_STEP_S = 0.5
"""Seconds between two checks of the children."""


class Inside(Way):
    """The way "inside": one engine, loaded by ``start``, which is the only server."""

    name = "SGLang in this process"

    def __init__(self, model: str, config: ActorsConfig):
        super().__init__(self)
        self.config = config.sglang
        self.arguments: dict[str, Any] = arguments(model, config)
        self._late = ""
        self._engine: Any = None
        self._children: list[BaseProcess] = []

    async def start(self) -> None:
        """Load the model on this thread, with which the children end. Raises InfrastructureFault
        when the engine does not start. SGLang may end this process instead."""
        for name, value in NO_DUMPS.items():
            os.environ.setdefault(name, value)
        os.environ.update(FIXED)
        try:
            from sglang import Engine  # pyright: ignore
        except ImportError as error:
            raise InfrastructureFault(
                f"sglang cannot be imported here ({error}): install the sglang extra, set"
                ' actors.sglang.python to an interpreter that has it, or use way = "server"'
            ) from None
        try:
            self._engine = Engine(**self.arguments)
        except TypeError as error:
            raise InfrastructureFault(
                f"actors.sglang.arguments: {error}; expected fields of sglang's ServerArgs"
            ) from None
        except (ValueError, RuntimeError, EOFError, OSError) as error:
            raise InfrastructureFault(
                f"{self.name} did not start: {type(error).__name__}: {error}"
            ) from error
        self._children = multiprocessing.active_children()

    async def facts(self) -> Facts:
        info = self._engine.server_args.resolved_dict() | self._engine.get_model_info()
        info |= self._engine._scheduler_init_result.scheduler_infos[0]
        return read_facts(self.arguments["model_path"], info)

    async def generate(self, body: dict[str, Any]) -> Any:
        """Generate one or several sequences, like POST /generate."""
        from fastapi import HTTPException  # pyright: ignore
        from sglang.srt.managers.io_struct import GenerateReqInput  # pyright: ignore

        manager, limit = self._engine.tokenizer_manager, self.config.request_timeout_s
        try:
            async with asyncio.timeout(limit):
                # There is one answer. The loop must run to its end, which releases the lock that
                # updates wait for.
                answers = [
                    a async for a in manager.generate_request(GenerateReqInput(**body), None)
                ]
        except TimeoutError:
            raise InfrastructureFault(f"{self.name}: no answer within {limit:g} s") from None
        except HTTPException as error:
            raise InfrastructureFault(f"{self.name}: {error.status_code} {error.detail}") from None
        except ValueError as error:
            raise DataFault(f"{self.name} refused the request: {error}") from None
        return answers[-1]

    async def abort(self, names: list[str]) -> None:
        for name in names:
            self._engine.tokenizer_manager.abort_request(rid=name)

    async def call(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Do what POST ``path`` does. Raises InfrastructureFault when it fails or times out."""
        from sglang.srt.managers import io_struct  # pyright: ignore

        manager = self._engine.tokenizer_manager
        if path == "/abort_request":
            manager.abort_request(rid=body.get("rid", ""), abort_all=body.get("abort_all", False))
            return {}
        if self._late:  # its late answer would be taken for the answer to the next call of its kind
            raise InfrastructureFault(
                f"{self.name}: {self._late} was given up and has not ended: this actor must start"
                " anew"
            )
        # the coroutine behind a path has its name, and says which struct it takes
        name = "check_weights" if path == "/weights_checker" else path.removeprefix("/")
        method = getattr(manager, name)
        request = getattr(io_struct, method.__annotations__["obj"])(**body)
        running = asyncio.ensure_future(method(request))
        try:
            done = await asyncio.wait_for(asyncio.shield(running), timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._late = path
            running.add_done_callback(self._caught_up)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise InfrastructureFault(
                f"{self.name}: {path} took longer than {timeout_s:g} s"
            ) from None
        if done is None:
            return {}
        if isinstance(done, tuple):  # the checker adds ranks and checksum
            names = ("success", "message", "ranks", "per_engine_checksum")
            answer: dict[str, Any] = dict(zip(names, done, strict=False))
        else:
            answer = {"success": done.success, "message": done.error_message}
        if not answer["success"]:
            raise InfrastructureFault(f"{self.name}: {path} failed: {answer['message']}")
        return answer

    def _caught_up(self, ended: "asyncio.Future[Any]") -> None:
        self._late = ""
        with contextlib.suppress(asyncio.CancelledError):
            ended.exception()

    async def died(self) -> str:
        """Return the reason when a child has ended. SGLang may end this process first."""
        while not (dead := [child for child in self._children if not child.is_alive()]):
            await asyncio.sleep(_STEP_S)
        return f"{self.name}: its process {dead[0].name} ended with status {dead[0].exitcode}"

    async def close(self) -> None:
        """End the engine's children."""
        if self._engine is not None:
            self._engine.shutdown()
