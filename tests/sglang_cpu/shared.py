"""One real SGLang server for a whole test session, started as an actor starts its own: on a CPU in
an environment of its own (COPPICE_SGLANG_VENV), which is made first if need be."""

import asyncio
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.servers import Launched
from coppice.actors.engines.sglang import SGLangEngine
from coppice.actors.engines.sglang_api import SGLangHttp
from coppice.research import venvs

SITE = Path(__file__).resolve().parent / "site"

FLAGS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "llguidance",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "disable_overlap_schedule": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.5,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "chunked_prefill_size": 256,
    "random_seed": 1,
    "sleep_on_idle": True,  # its scheduler would poll without a pause, beside all other tests
    "enable_cache_report": True,
}
VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    # without it, every model sglang knows is imported at start
    "SGLANG_EXTERNAL_MODEL_PACKAGE": "cpu_models",
    # llguidance compiles the masking of logits, and does not end here for minutes
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}

GPU_FLAGS: dict[str, Any] = {
    "dtype": "bfloat16",  # SGLang's RMSNorm for GPUs takes no float32
    "attention_backend": "triton",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 16384,
    "random_seed": 1,
}
LORA: dict[str, Any] = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_lora_rank": 8,
    "max_loras_per_batch": 3,
}


def config(**settings: Any) -> SGLangConfig:
    """Settings of a server that starts here. arguments: more of them. With a GPU, of the sglang
    that is installed for it."""
    more, variables = settings.pop("arguments", {}), settings.pop("environment", {})
    if torch.cuda.is_available():
        python = os.environ.get("COPPICE_SGLANG_PYTHON", sys.executable)
        arguments = GPU_FLAGS | {key: value for key, value in more.items() if key != "lora_backend"}
        return SGLangConfig(python=python, arguments=arguments, start_timeout_s=600.0, **settings)
    return SGLangConfig(
        python=str(venvs.python("sglang", "sglang_cpu")), arguments=FLAGS | more, start_timeout_s=300.0,
        environment=VARIABLES | {"PYTHONPATH": str(SITE)} | variables, **settings,
    )  # fmt: skip


class Shared:
    """The server, whose event loop runs in a thread, for tests with loops of their own."""

    def __init__(self, model: Path, arguments: dict[str, Any]):
        self.model = model
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.way = self.launched(arguments)
        self.key = f"COPPICE_TEST_SERVER_KEY_{self.url.rpartition(':')[2]}"
        """The variable that holds the server's key."""
        os.environ[self.key] = self.way.key
        self._run(self.way.start())

    def launched(self, arguments: dict[str, Any]) -> Launched:
        sglang = config(arguments=arguments)
        actors = ActorsConfig(max_batch=8, max_context=512, prefill_tokens=256, sglang=sglang)
        return Launched(SGLangHttp, str(self.model), actors)

    @property
    def url(self) -> str:
        return self.way.front.url

    def engine(self) -> Any:
        sglang = SGLangConfig(
            way="url", urls=[self.url], api_key_env=self.key, update_timeout_s=60.0
        )
        actors = ActorsConfig(max_batch=8, max_context=512, sglang=sglang)
        return SGLangEngine(str(self.model), actors)

    def close(self) -> None:
        self._run(self.way.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
