"""The calls of a vLLM server. Those that change weights are for development in vLLM's words: it
offers them with VLLM_SERVER_DEV_MODE=1 only, and asks no key for them."""

import hashlib
import re
from pathlib import Path
from typing import Any

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.servers import Facts, Http, Sampled
from coppice.actors.engines.weights import BaseWeights
from coppice.wire.faults import DataFault, InfrastructureFault

_EMPTY = hashlib.sha256(b"").hexdigest()
_BLOCKS = re.compile(r"^vllm:cache_config_info\{(.*)\}", re.MULTILINE)
START = "--enable-scale-out --logprobs-mode processed_logprobs --enable-prompt-tokens-details"


class VLLMHttp(Http):
    """Implements ``Http`` for vllm 0.32."""

    product, section = "vLLM", "vllm"
    generating, alive = "/inference/v1/generate", "/weight_info"
    adapters = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
    release, naming, lost = "vllm 0.32", "request_id", "does not exist"
    own = (
        "model", "host", "port", "api_key", "middleware", "enable_scale_out", "logprobs_mode",
        "enable_prompt_tokens_details", "api_server_count",
    )  # fmt: skip
    fixed = dict.fromkeys(
        "VLLM_SERVER_DEV_MODE VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_NO_USAGE_STATS".split(), "1"
    )

    _packed = False  # out of its checksum's sight, as vLLM does with weights on CPUs

    async def check(self) -> None:
        """Sample one token with top-k 1: its log-probability must be 0, as no other is left."""
        told = f"{self.name} is not started as an actor needs it: VLLM_SERVER_DEV_MODE=1 vllm serve"
        sampling = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0}
        probe = {"request_id": "coppice-probe", "token_ids": [0], "sampling_params": sampling}
        try:
            await self.client.get("/weight_info", timeout_s=30.0)
            (sample,) = await self.generate([probe], "coppice-probe", "")
        except (InfrastructureFault, DataFault) as fault:
            raise InfrastructureFault(f"{told} {START} ({fault})") from None
        if sample.logprobs != [0.0]:
            raise InfrastructureFault(f"{told} {START} (it gives log-probabilities before top-k)")

    def check_whole(self) -> None:
        if self._packed and "lm_head.weight" not in BaseWeights(Path(self.model)).shapes:
            raise InfrastructureFault(
                f"{self.name} runs on a CPU, where vllm 0.32 keeps the old output layer if it is"
                " tied to the embedding: train an adapter (learner.lora.rank)"
            )

    async def facts(self) -> Facts:
        model = (await self.client.get("/v1/models", timeout_s=30.0))["data"][0]
        metrics = (await self.client.send("GET", "/metrics", timeout_s=30.0)).decode()
        cache = dict(re.findall(r'(\w+)="(\d+)"', " ".join(_BLOCKS.findall(metrics))))
        info = await self.client.get("/weight_info", timeout_s=30.0)
        return Facts(
            capacity=int(cache.get("num_gpu_blocks", 0)) * int(cache.get("block_size", 0)),
            context=int(model.get("max_model_len") or 0),
            vocabulary=int(self.settings().get("vocab_size") or 0),
            version=str(info["weight_version"]),
        )

    async def generate(
        self, bodies: list[dict[str, Any]], salt: str, adapter: str
    ) -> list[Sampled]:
        (body,) = bodies
        fields = {"cache_salt": salt.replace("@", "-")} | ({"model": adapter} if adapter else {})
        answer = await self.call(self.generating, body | fields, self.timeout_s)
        try:
            usage = answer["usage"]
            cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
            return [_sampled(one, usage["prompt_tokens"], cached) for one in answer["choices"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise self.strange(error) from None

    async def stop(self, names: list[str]) -> None:
        # vLLM's name of a request begins with the kind of the call
        ids = [f"generate-tokens-{name}" for name in names]
        await self.send("/abort_requests", {"request_ids": ids}, 10.0)

    async def free(self) -> None:
        await self.go_on()

    async def pause(self) -> None:
        await self.call("/pause?mode=keep", {})
        await self.call("/reset_prefix_cache?reset_running_requests=true", {})

    async def go_on(self) -> None:
        await self.call("/resume", {})

    async def read(self, folder: str) -> None:
        place = {"weights_path": str(Path(folder).absolute())}
        await self.call("/collective_rpc", {"method": "reload_weights", "kwargs": place})

    async def rename(self, name: str) -> None:
        await self.call("/update_weight_version", {"new_version": name})

    async def checksum(self) -> tuple[str, frozenset[str]]:
        sums = (await self.call("/weight_checker", {"action": "checksum"})).get("checksums") or {}
        self._packed = _EMPTY in sums.values()
        told = repr(sorted(sums.items())).encode()
        return hashlib.sha256(told).hexdigest() if sums else "", frozenset(sums)

    @staticmethod
    def arguments(model: str, config: ActorsConfig, port: int, key: str) -> dict[str, Any]:
        return {
            "max_model_len": config.max_context,
            "max_num_seqs": config.max_batch,
            "max_num_batched_tokens": max(config.prefill_tokens, config.max_batch),
            **config.vllm.arguments,
            "model": model, "host": "127.0.0.1", "port": port, "api_key": [key],
            "enable_scale_out": True, "logprobs_mode": "processed_logprobs",
            "enable_prompt_tokens_details": True,
        }  # fmt: skip


def _sampled(choice: dict[str, Any], prompt: int, cached: int) -> Sampled:
    tokens = choice["token_ids"] or []
    logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
    if -9999.0 in logprobs:  # what vLLM says where it has none
        raise ValueError("a token without a log-probability")
    spans = choice["weight_versions"] or []
    return Sampled(tokens, logprobs, choice["finish_reason"], "", spans, prompt, cached)
