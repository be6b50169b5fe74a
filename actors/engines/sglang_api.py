"""The calls of an SGLang server."""

import asyncio
import base64
import re
from pathlib import Path
from typing import Any

import numpy as np

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.servers import Facts, Http, Sampled
from coppice.actors.engines.weights import BaseWeights
from coppice.wire.faults import InfrastructureFault

_AT_RANK = re.compile(r"@\d+$")
"""A router that knows the data-parallel ranks of a server lists each as URL@RANK."""
_UNADAPTED = re.compile(r"^visual\.|embed|lm_head|\.experts\.|\.gate\.|\.router\.")
"""Weights without adapters, among them those of experts and of their routers."""
_ROWS = ("input_ids", "rid", "sampling_params", "image_data", "extra_key", "lora_path")
"""Fields of a body that have one value per sample, where there are several."""


class SGLangHttp(Http):
    """Implements ``Http`` for sglang 0.5.23."""

    product, section = "SGLang", "sglang"
    generating, alive = "/generate", "/model_info"
    adapters = "/load_lora_adapter", "/unload_lora_adapter"
    release, naming, lost = "sglang 0.5.23", "rid", "never been loaded"
    own = ("model_path", "host", "port", "api_key", "weight_version")
    # without these, after a child has died SGLang spends 65 s on dumps before it ends
    defaults = {"SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0"}
    # if the second were 1, log-probabilities would be those before temperature
    fixed = {"SGL_FORCE_SHUTDOWN": "1", "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}

    async def workers(self) -> dict[str, str] | None:
        try:
            workers = (await self.client.get("/workers", timeout_s=10.0))["workers"]
            return {_AT_RANK.sub("", one["url"]).rstrip("/"): one["id"] for one in workers}
        except InfrastructureFault as fault:
            if "HTTP 404" in str(fault):
                return None
            raise
        except (KeyError, TypeError) as error:
            raise InfrastructureFault(
                f"{self.url}/workers answered what the router of sglang-router 0.3.2 does not"
                f" ({type(error).__name__}: {error})"
            ) from None

    async def facts(self) -> Facts:
        info = await self.client.get("/server_info", timeout_s=30.0)
        # /model_info has what updates have changed since the start
        info |= await self.client.get("/model_info", timeout_s=30.0)
        settings = self.settings()
        return Facts(
            capacity=int(info.get("max_total_num_tokens") or 0),
            context=int(info.get("context_length") or settings.get("max_position_embeddings") or 0),
            vocabulary=int(settings.get("vocab_size") or 0),
            device=str(info.get("device") or ""),
            tp=int(info.get("tp_size") or 1),
            version=str(info.get("weight_version") or ""),
            mask=int(info.get("sampling_mask_max_tokens") or 4096),
        )

    async def generate(
        self, bodies: list[dict[str, Any]], salt: str, adapter: str
    ) -> list[Sampled]:
        fields = {"extra_key": salt} | ({"lora_path": adapter} if adapter else {})
        rows = [body | fields for body in bodies]
        body = rows[0]
        if len(rows) > 1:
            body = body | {key: [one[key] for one in rows] for key in _ROWS if key in body}
        answer = await self.call("/generate", body, self.timeout_s)
        answers = answer if isinstance(answer, list) else [answer]
        try:
            return [_sampled(one, body) for one in answers]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.strange(error) from None

    async def stop(self, names: list[str]) -> None:
        if not names:
            await self.call("/abort_request", {"rid": "", "abort_all": True})
        for name in names:
            await self.call("/abort_request", {"rid": name}, 10.0)

    async def free(self) -> None:
        calls = ("/end_weight_update", "/continue_generation")
        await asyncio.gather(*(self.call(path, {}, 10.0) for path in calls), return_exceptions=True)

    async def pause(self) -> None:
        await self.call("/pause_generation", {"mode": "retract"})

    async def go_on(self) -> None:
        await self.call("/continue_generation", {})

    async def hold_memory(self, held: bool) -> None:
        path = "/resume_memory_occupation" if held else "/release_memory_occupation"
        await self.call(path, {"tags": ["kv_cache", "weights"]})

    async def read(self, folder: str) -> None:
        await self.call("/update_weights_from_disk", {"model_path": folder, "flush_cache": True})

    async def rename(self, name: str) -> None:
        body = {"new_version": name, "abort_all_requests": False}
        await self.call("/update_weight_version", body)

    async def checksum(self) -> tuple[str, frozenset[str]]:
        answer = await self.call("/weights_checker", {"action": "checksum"})
        tensors = (answer.get("ranks") or [{}])[0].get("checksums") or ()
        return str(answer.get("per_engine_checksum") or ""), frozenset(tensors)

    @staticmethod
    def arguments(model: str, config: ActorsConfig, port: int, key: str) -> dict[str, Any]:
        own = config.sglang.arguments
        derived = own.get("enable_lora") and "lora_target_modules" not in own
        adapters = {"lora_target_modules": linear_layers(Path(model))} if derived else {}
        # a released server must go on without the learner, which may have died
        released = ("enable_memory_saver", "enable_weights_cpu_backup")
        return {
            "model_path": model,
            "weight_version": "0",
            "context_length": config.max_context,
            "max_running_requests": config.max_batch,
            "chunked_prefill_size": config.prefill_tokens,
            "enable_cache_report": True,
            "enable_fp32_lm_head": True,  # as the learner's
            **adapters,
            **dict.fromkeys(released if config.sglang.colocated else (), True),
        } | own | {"host": "127.0.0.1", "port": port, "api_key": key}  # fmt: skip


def _sampled(answer: Any, body: dict[str, Any]) -> Sampled:
    cuts, experts = "return_sampling_mask" in body, None
    meta, tokens = answer["meta_info"], answer.get("output_ids") or []
    reason = meta.get("finish_reason") or {}
    logprobs = [row[0] for row in meta.get("output_token_logprobs") or []]
    if cuts and tokens:
        logprobs = np.ravel(meta["output_token_sampling_logprobs"]).tolist()
    if text := meta.get("routed_experts"):
        told = np.frombuffer(base64.b64decode(text), np.int32).astype(np.int16)
        start = body["routed_experts_start_len"]
        experts = told.reshape(int(meta["prompt_tokens"]) + len(tokens) - 1 - start, -1)
    whole = [{"version": meta.get("weight_version"), "start": 0, "end": len(tokens)}]
    return Sampled(
        tokens, logprobs, reason.get("type") or "", reason.get("message") or "",
        meta.get("weight_versions") or whole,
        int(meta.get("prompt_tokens") or 0), int(meta.get("cached_tokens") or 0),
        answer.get("prompt_token_ids") or [],
        meta["output_token_sampling_mask"] if cuts and tokens else None, experts,
    )  # fmt: skip


def linear_layers(model: Path) -> list[str]:
    """Names of the layers that the learner's adapters change (``TreeModel``)."""
    shapes = BaseWeights(model).shapes
    paths = (
        name.removesuffix(".weight").rpartition(".")
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight") and not _UNADAPTED.search(name)
    )
    convolves = (name.rpartition(".conv1d.")[0] for name in shapes if ".conv1d." in name)
    kernels = {f"{place}.out_proj" for place in convolves}
    return sorted({layer for place, _, layer in paths if f"{place}.{layer}" not in kernels})
