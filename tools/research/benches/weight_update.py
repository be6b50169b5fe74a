"""The pause of generation during a weight update over the seconds of the whole load. Sampling goes on while the file is verified.

The embedded engine samples from the default model while an adapter and then all weights are loaded. The pause is the longest gap between
two tokens of one sample minus the median gap. Lost tokens are those that would have been sampled during the pause; none is discarded.
"""

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from actors.engines.local import LocalEngine
from tools.defaults.models import DEFAULT
from tools.research.benches import slate_shape as shape
from wire import digest
from wire.messages import GenerateRequest, LoadRequest, Sampling
from wire.published import FILES, Manifest

SAMPLES, PROMPT = 8, 64
RANK = 16


def adapter(base: Path, folder: Path) -> Manifest:
    """Save an adapter of random weights on all linear layers, as the learner publishes it."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            tensors[f"base_model.model.{name}.lora_A.weight"] = torch.randn(RANK, module.in_features) * 1e-3
            tensors[f"base_model.model.{name}.lora_B.weight"] = torch.randn(module.out_features, RANK) * 1e-3
    (folder / "adapter_config.json").write_text(json.dumps({"lora_alpha": 2 * RANK, "r": RANK}))
    return _save(tensors, folder, 1, "lora")


def whole(base: Path, folder: Path) -> Manifest:
    """Save all weights with a small change."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return _save({n: (p.detach() * 1.001).contiguous() for n, p in model.named_parameters()}, folder, 2, "full")


def _save(tensors: dict[str, torch.Tensor], folder: Path, version: int, kind: Any) -> Manifest:
    save_file(tensors, folder / FILES[kind], metadata={"format": "pt"})
    manifest = Manifest(version, kind, digest.safetensors_file(folder / FILES[kind]))
    manifest.write(folder)
    return manifest


async def measure(engine: LocalEngine, make: Callable[[Path, Path], Manifest], base: Path) -> dict[str, float]:
    """Measure one load in the middle of a generation."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        manifest = make(base, folder)
        arrivals: list[float] = []

        def arrived(index: int, tokens: list[int], logprobs: list[float]) -> None:
            if index == 0:
                arrivals.append(time.perf_counter())

        prompt = shape.words(np.random.default_rng(manifest.version), engine.model.config.vocab_size, PROMPT)
        sampling = Sampling(400, 1.0, seed=1)
        running = asyncio.create_task(engine.generate(GenerateRequest(prompt, SAMPLES, sampling), arrived))
        while len(arrivals) < 10:
            await asyncio.sleep(0.05)
        loaded = await engine.load(LoadRequest(manifest.version, scratch, manifest.digest))
        seen = len(arrivals)
        while len(arrivals) < seen + 10:
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        gaps = np.diff(arrivals)
        step = statistics.median(gaps)
        pause = float(gaps.max() - step)
        size = (folder / FILES[manifest.kind]).stat().st_size
        return {"load_s": loaded.seconds, "pause_s": pause, "tokens_lost": pause * SAMPLES / step, "mb": size / 1e6}


async def _measure(model: str) -> dict[str, Any]:
    base = shape.model_folder(model)
    engine = await shape.engine(base)
    rows = {"adapter": await measure(engine, adapter, base), "whole": await measure(engine, whole, base)}
    await engine.close()
    ratio = rows["whole"]["pause_s"] / rows["whole"]["load_s"]
    row = {"name": "weight update: generation paused / whole load", "ratio": ratio, "goal": 0.6, "better": "lower"}
    return row | rows


def run(model: str = DEFAULT) -> dict[str, Any]:
    """Return the seconds of both loads and their pauses."""
    return asyncio.run(_measure(model))
