"""The classes, under the name by which sglang looks for them."""

import importlib
import os
from typing import Any

from safetensors.torch import save_file
from sglang.srt.mem_cache.pool_host import common  # pyright: ignore

MODULES = os.environ.get("COPPICE_CPU_MODELS", "llama qwen2 qwen3 gemma3_causal").split()
LOADED = os.environ.get("COPPICE_LOADED", "")
"""The file in which a test finds what a model holds after each of its ``load_weights``."""

common._cuda_host_register = lambda *_: None  # of what a server keeps to report experts


def recorded(model: Any) -> Any:
    load = model.load_weights

    def load_weights(self: Any, *args: Any, **options: Any) -> None:
        load(self, *args, **options)
        held = {name: one.detach().contiguous() for name, one in self.named_parameters()}
        save_file(held, LOADED)

    model.load_weights = load_weights if LOADED else load
    return model


def classes(module: str) -> list[Any]:
    entry: Any = importlib.import_module(f"sglang.srt.models.{module}").EntryClass
    return [recorded(model) for model in (entry if isinstance(entry, list) else [entry])]


EntryClass = [model for module in MODULES for model in classes(module)]

if "deepseek_v2" in MODULES:
    deepseek: Any = importlib.import_module(
        "sglang.srt.models.deepseek_common.attention_backend_handler"
    )
    latent = deepseek.AttnForwardMethod.MLA  # torch_native reads no other cache of these models
    deepseek.AttentionBackendRegistry.register("torch_native", lambda *_: latent)
