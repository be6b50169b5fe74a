"""One real vLLM server for a whole test session, as tests.sglang_cpu.shared has one of SGLang, in
an environment of its own (COPPICE_VLLM_VENV), which is made first if need be."""

from typing import Any

from coppice.actors.config import ActorsConfig, ServedConfig
from coppice.actors.engines.servers import Launched
from coppice.actors.engines.vllm import VLLMEngine
from coppice.actors.engines.vllm_api import VLLMHttp
from coppice.research import venvs
from tests.sglang_cpu.shared import Shared

BLOCK = 32
"""Tokens of one block of the prefix cache, the fewest that vLLM takes on a CPU."""
FLAGS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "enforce_eager": True,
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "seed": 1,
}
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it would compile at the first request, for 20 s
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


class SharedVLLM(Shared):
    def launched(self, arguments: dict[str, Any]) -> Launched:
        python = str(venvs.python("vllm", "vllm_cpu"))
        vllm = ServedConfig(
            python=python, arguments=FLAGS, environment=VARIABLES, start_timeout_s=300.0
        )
        actors = ActorsConfig(max_batch=8, max_context=512, prefill_tokens=256, vllm=vllm)
        return Launched(VLLMHttp, str(self.model), actors)

    def engine(self) -> VLLMEngine:
        vllm = ServedConfig(way="url", urls=[self.url], api_key_env=self.key, update_timeout_s=60.0)
        actors = ActorsConfig(engine="vllm", max_batch=8, max_context=512, vllm=vllm)
        return VLLMEngine(str(self.model), actors)
