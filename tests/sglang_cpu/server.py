"""The command that starts a CPU server of sglang with a tiny model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from . import environment

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
    "enable_metrics": True,
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


def command(model: Path, port: int, **flags: Any) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of a server of ``model`` on this machine only.

    ``flags`` are sglang's own, with underscores: ``api_key="..."``, ``admin_api_key="..."``,
    ``enable_lora=True``. They replace those in ``FLAGS``; one that is None or False is left out.
    """
    wanted = {"model_path": model, "host": "127.0.0.1", "port": port} | FLAGS | flags
    line = [str(environment.python()), "-m", "sglang.launch_server"]
    for name, value in wanted.items():
        if value is None or value is False:
            continue
        line.append("--" + name.replace("_", "-"))
        values = value if isinstance(value, list | tuple) else [] if value is True else [value]
        line.extend(str(one) for one in values)
    return line, variables()


def variables() -> dict[str, str]:
    """The environment in which any process that imports sglang runs here, an engine inside a script
    included."""
    return {**os.environ, **VARIABLES, "PYTHONPATH": str(SITE)}
