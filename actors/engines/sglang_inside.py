"""SGLang inside the actor's process: ``sglang.Engine`` behind the calls that its HTTP server offers.

The engine's tokenizer manager lives in the event loop of whoever calls it first, so it is called by its coroutines; the blocking methods of
``sglang.Engine`` would run a loop inside ours.
"""

import asyncio
from typing import Any

import msgspec

from actors.config import ActorsConfig
from actors.engines.sglang_api import Facts, read_facts
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
}
"""Path of the HTTP server -> request struct and coroutine of the tokenizer manager."""
_ONE_ARGUMENT = frozenset({"pause_generation", "continue_generation"})


class Inside:
    """The way "inside". One server, which is also the front."""

    def __init__(self, model: str, config: ActorsConfig):
        self.config = config.sglang
        self.name = "SGLang in this process"
        self.servers = [self]
        self.arguments: dict[str, Any] = {
            "model_path": model,
            "weight_version": "0",
            "context_length": config.max_context,
            "max_running_requests": config.max_batch,
            "chunked_prefill_size": config.prefill_tokens,
            "enable_cache_report": True,
        } | config.sglang.arguments
        self._engine: Any = None

    async def start(self) -> None:
        """Load the model. It blocks this process, which serves nothing yet."""
        try:
            import sglang  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise InfrastructureFault(
                f"sglang cannot be imported here ({error}): install the gpu extra, set actors.sglang.python to an interpreter that"
                ' has it, or use actors.sglang.way = "server"'
            ) from None
        try:
            self._engine = sglang.Engine(**self.arguments)
        except TypeError as error:
            raise InfrastructureFault(
                f"actors.sglang.arguments: {error}; expected fields of sglang's ServerArgs"
            ) from None

    async def facts(self) -> Facts:
        """What the engine says of itself."""
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        return read_facts(
            self.arguments["model_path"], dict(info) | {"context_length": self.arguments["context_length"]}
        )

    async def generate(self, body: dict[str, Any]) -> Any:
        """One or several sequences, as POST /generate."""
        from sglang.srt.managers.io_struct import GenerateReqInput  # pyright: ignore[reportMissingImports]

        try:
            return await anext(self._engine.tokenizer_manager.generate_request(GenerateReqInput(**body), None))
        except ValueError as error:
            raise DataFault(f"{self.name} refused the request: {error}") from None

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
        try:
            done = await asyncio.wait_for(getattr(manager, method)(*arguments), timeout_s)
        except TimeoutError:
            raise InfrastructureFault(f"{self.name}: {path} took longer than {timeout_s:g} s") from None
        return _answer(path, done, self.name)

    async def died(self) -> str:
        """Never returns: SGLang ends its whole process, and so this actor, when one of its children dies."""
        await asyncio.Event().wait()
        return ""

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
        answer = msgspec.to_builtins(done)
    if not answer.get("success", True):
        raise InfrastructureFault(f"{name}: {path} failed: {answer.get('message') or answer.get('error_message')}")
    return answer
