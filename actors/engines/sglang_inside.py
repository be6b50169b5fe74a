"""SGLang inside the actor's process: ``sglang.Engine`` behind the calls that its HTTP server offers.

The engine's tokenizer manager lives in the event loop of whoever calls it first, so it is called by its coroutines; the blocking methods of
``sglang.Engine`` would run a loop inside ours. Its children are spawned: the main module must be importable without running.
"""

import asyncio
import multiprocessing
import os
from multiprocessing.process import BaseProcess
from typing import Any

from actors.config import ActorsConfig
from actors.engines.sglang_api import FIXED, NO_DUMPS, Facts, arguments, read_facts
from wire.faults import DataFault, InfrastructureFault

_CALLS = {
    "/update_weights_from_disk": ("UpdateWeightFromDiskReqInput", "update_weights_from_disk"),
    "/update_weights_from_tensor": ("UpdateWeightsFromTensorReqInput", "update_weights_from_tensor"),
    "/update_weights_from_distributed": ("UpdateWeightsFromDistributedReqInput", "update_weights_from_distributed"),
    "/init_weights_update_group": ("InitWeightsUpdateGroupReqInput", "init_weights_update_group"),
    "/destroy_weights_update_group": ("DestroyWeightsUpdateGroupReqInput", "destroy_weights_update_group"),
    "/begin_weight_update": ("BeginWeightUpdateReqInput", "begin_weight_update"),
    "/end_weight_update": ("EndWeightUpdateReqInput", "end_weight_update"),
    "/pause_generation": ("PauseGenerationReqInput", "pause_generation"),
    "/continue_generation": ("ContinueGenerationReqInput", "continue_generation"),
    "/load_lora_adapter": ("LoadLoRAAdapterReqInput", "load_lora_adapter"),
    "/unload_lora_adapter": ("UnloadLoRAAdapterReqInput", "unload_lora_adapter"),
    "/weights_checker": ("CheckWeightsReqInput", "check_weights"),
    "/update_weight_version": ("UpdateWeightVersionReqInput", "update_weight_version"),
}
"""Path of the HTTP server -> request struct and coroutine of the tokenizer manager."""
_ONE_ARGUMENT = frozenset({"pause_generation", "continue_generation", "update_weight_version"})
_STEP_S = 0.5
"""Between two looks at the children, seconds."""


class Inside:
    """The way "inside". One server, which is also the front."""

    def __init__(self, model: str, config: ActorsConfig):
        self.config = config.sglang
        self.name = "SGLang in this process"
        self.servers = [self]
        self.arguments: dict[str, Any] = arguments(model, config)
        self._late = ""
        self._engine: Any = None
        self._children: list[BaseProcess] = []

    async def start(self) -> None:
        """Load the model, on this thread: the children end with the thread that started them. It serves nothing yet.

        Raises InfrastructureFault when it does not come up, or ends this process where a child of SGLang fails.
        """
        for name, value in NO_DUMPS.items():
            os.environ.setdefault(name, value)
        os.environ.update(FIXED)
        try:
            from sglang import Engine  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        except ImportError as error:
            raise InfrastructureFault(
                f"sglang cannot be imported here ({error}): install the gpu extra, set actors.sglang.python to an interpreter that"
                ' has it, or use actors.sglang.way = "server"'
            ) from None
        try:
            self._engine = Engine(**self.arguments)
        except TypeError as error:
            raise InfrastructureFault(
                f"actors.sglang.arguments: {error}; expected fields of sglang's ServerArgs"
            ) from None
        except (ValueError, RuntimeError, EOFError, OSError) as error:
            raise InfrastructureFault(f"{self.name} did not start: {type(error).__name__}: {error}") from error
        self._children = multiprocessing.active_children()

    async def facts(self) -> Facts:
        """What the engine says of itself."""
        info = self._engine.server_args.resolved_dict() | self._engine._scheduler_init_result.scheduler_infos[0]
        return read_facts(self.arguments["model_path"], info | self._engine.get_model_info())

    async def generate(self, body: dict[str, Any]) -> Any:
        """One or several sequences, as POST /generate."""
        from fastapi import HTTPException  # pyright: ignore[reportMissingImports]
        from sglang.srt.managers.io_struct import GenerateReqInput  # pyright: ignore[reportMissingImports]

        answers: list[Any] = []
        try:
            async with asyncio.timeout(self.config.request_timeout_s):
                async for answer in self._engine.tokenizer_manager.generate_request(GenerateReqInput(**body), None):
                    answers.append(
                        answer
                    )  # one; it is run to its end, where it lets go of the lock that updates wait for
        except TimeoutError:
            raise InfrastructureFault(f"{self.name}: no answer within {self.config.request_timeout_s:g} s") from None
        except HTTPException as error:
            raise InfrastructureFault(f"{self.name}: {error.status_code} {error.detail}") from None
        except ValueError as error:
            raise DataFault(f"{self.name} refused the request: {error}") from None
        return answers[-1]

    async def abort(self, names: list[str]) -> None:
        """Stop these requests."""
        for name in names:
            self._engine.tokenizer_manager.abort_request(rid=name)

    async def call(self, path: str, body: dict[str, Any], timeout_s: float, attempts: int = 1) -> dict[str, Any]:
        """What POST ``path`` of the server does. Raises InfrastructureFault when it fails or takes longer."""
        from sglang.srt.managers import io_struct  # pyright: ignore[reportMissingImports]

        manager = self._engine.tokenizer_manager
        if path == "/abort_request":
            manager.abort_request(rid=body.get("rid", ""), abort_all=body.get("abort_all", False))
            return {}
        kind, method = _CALLS[path]
        request = getattr(io_struct, kind)(**body)
        arguments = (request,) if method in _ONE_ARGUMENT else (request, None)
        if self._late:  # its answer, when it comes, would be taken for that of the next call of its kind
            raise InfrastructureFault(
                f"{self.name}: {self._late} was given up and has not ended: this actor must start anew"
            )
        running = asyncio.ensure_future(getattr(manager, method)(*arguments))
        try:
            done = await asyncio.wait_for(asyncio.shield(running), timeout_s)
        except (TimeoutError, asyncio.CancelledError) as error:
            self._late = path
            running.add_done_callback(self._caught_up)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise InfrastructureFault(f"{self.name}: {path} took longer than {timeout_s:g} s") from None
        return _answer(path, done, self.name)

    def _caught_up(self, ended: "asyncio.Future[Any]") -> None:
        """The call that nobody waits for any more is over."""
        self._late = ""
        if not ended.cancelled():
            ended.exception()

    async def died(self) -> str:
        """Returns when a child has ended. Where one was killed or failed, SGLang may end this whole process first."""
        while True:
            for child in self._children:
                if not child.is_alive():
                    return f"{self.name}: its process {child.name} ended with status {child.exitcode}"
            await asyncio.sleep(_STEP_S)

    async def close(self) -> None:
        """End the engine's children."""
        if self._engine is not None:
            self._engine.shutdown()


def _answer(path: str, done: Any, name: str) -> dict[str, Any]:
    """The JSON that the server would answer. Raises InfrastructureFault where it would say that it failed."""
    if done is None:
        return {}
    if isinstance(done, tuple):  # success, message, and for the checker ranks and checksum
        more = ["ranks", "per_engine_checksum"] if path == "/weights_checker" else []
        answer: dict[str, Any] = dict(zip(["success", "message", *more], done, strict=False))
    else:
        answer = {"success": done.success, "message": done.error_message}
    if not answer["success"]:
        raise InfrastructureFault(f"{name}: {path} failed: {answer['message']}")
    return answer
