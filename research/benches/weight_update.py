"""The pause of generation during a weight update over the seconds of the whole load.

The embedded engine samples from the default model while an adapter and then all weights are loaded.
The pause is the longest time between two steps minus the median.

``python -m coppice.research.benches.weight_update --size 7b`` measures the seconds of one update
into SGLang by each transport, from the actor's call to the proof of the new weights; coppice dev
gpu-check runs it. No requests run then."""

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from coppice.actors.engines.local import LocalEngine
from coppice.actors.engines.sglang import SGLangEngine
from coppice.learner.model.publish import publish, sums
from coppice.learner.model.ranks import Ranks
from coppice.learner.model.weight_server import WeightServer, grouped
from coppice.research.benches import prefill as shape
from coppice.research.benches import result
from coppice.research.benches.gpu_sglang import serving, size_option
from coppice.tools.defaults.models import DEFAULT
from coppice.wire import digest
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from coppice.wire.published import FILES, Manifest, Weights

SAMPLES, PROMPT = 8, 64
RANK = 16
TRANSPORTS = ("distributed", "disk", "adapter")
"""The order matters: each transport must bring weights that differ from those that the server
holds."""


def adapter(base: Path, folder: Path) -> Weights:
    """Publish an adapter of random weights on all linear layers, as the learner does."""
    policy: Any = AdapterPolicy(base, RANK)
    return publish(policy, 1, folder, keep=1)


def whole(base: Path, folder: Path) -> Weights:
    """Save all weights with a small change."""
    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = {n: (p.detach() * 1.001).contiguous() for n, p in model.named_parameters()}
    save_file(weights, folder / FILES["full"], metadata={"format": "pt"})
    manifest = Manifest(2, "full", digest.safetensors_file(folder / FILES["full"]))
    manifest.write(folder)
    return Weights(2, str(folder), manifest.digest)


async def measure(
    engine: LocalEngine, make: Callable[[Path, Path], Weights], base: Path
) -> dict[str, float]:
    """Measure one load in the middle of a generation."""
    with tempfile.TemporaryDirectory() as scratch:
        published = make(base, Path(scratch))
        arrivals: list[float] = []
        step = engine.batch.step

        def recorded(version: int) -> Any:
            arrivals.append(time.perf_counter())
            return step(version)

        engine.batch.step = recorded
        rng, vocabulary = np.random.default_rng(published.version), engine.model.config.vocab_size
        prompt = shape.words(rng, vocabulary, PROMPT)
        sampling = Sampling(400, 1.0, seed=1)
        running = asyncio.create_task(engine.generate(GenerateRequest(prompt, SAMPLES, sampling)))
        while len(arrivals) < 10:
            await asyncio.sleep(0.05)
        loaded = await engine.load(LoadRequest(*msgspec.structs.astuple(published)))
        seen = len(arrivals)
        while len(arrivals) < seen + 10:
            await asyncio.sleep(0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        engine.batch.step = step
        gaps = np.diff(arrivals)
        usual = statistics.median(gaps)
        pause = float(gaps.max() - usual)
        size = sum(file.stat().st_size for file in Path(published.path).glob("*.safetensors"))
        return {"load_s": loaded.seconds, "pause_s": pause, "mb": size / 1e6}


async def _measure(model: str) -> dict[str, Any]:
    base = shape.model_folder(model)
    engine = await shape.engine(base)
    rows = {make.__name__: await measure(engine, make, base) for make in (adapter, whole)}
    await engine.close()
    ratio = rows["whole"]["pause_s"] / rows["whole"]["load_s"]
    return result("weight update: generation paused / whole load", ratio, 0.6, "lower", **rows)


def run(model: str = DEFAULT) -> dict[str, Any]:
    """Return the seconds of both loads and their pauses."""
    return asyncio.run(_measure(model))


# ------------------------------------------------------------------------------ updates into SGLang


class AdapterPolicy:
    """A policy that trains an adapter, as far as ``learner.publish`` needs one. Its model has
    shapes and no weights."""

    lora = True

    def __init__(self, folder: Path, rank: int):
        self.ranks = Ranks(60.0)
        with torch.device("meta"):
            bare: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            settings = LoraConfig(
                r=rank, lora_alpha=4 * rank, target_modules="all-linear", lora_dropout=0.0
            )  # pyright: ignore
            self.model: Any = get_peft_model(bare, settings)

    def gathered(self, keep: bool = True) -> dict[str, torch.Tensor]:
        """Return small random weights in the learner's float32."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: 0.01 * torch.randn(p.shape, device="cpu") for name, p in trained.items()}


async def updates(
    engine: SGLangEngine, folder: Path, device: str, transports: tuple[str, ...] = TRANSPORTS,
    rank: int = RANK,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds by transport for a started engine of the model in ``folder``, and print
    each as soon as it is measured."""
    seconds: dict[str, float] = {}
    os.environ.setdefault("NCCL_CUMEM_ENABLE", "0")  # as the learner does
    offers = WeightServer()
    try:
        for version, transport in enumerate(transports, engine.version + 1):
            with tempfile.TemporaryDirectory() as scratch:
                published = _published(
                    version, transport, folder, Path(scratch), offers, device, rank
                )
                wanted: Any = "auto" if transport == "adapter" else transport
                engine.weights.wanted = wanted
                loaded = await engine.load(LoadRequest(*msgspec.structs.astuple(published)))
                seconds[transport] = loaded.seconds
            print(json.dumps({"transport": transport, "update_s": seconds[transport]}), flush=True)
    finally:
        offers.close()
    return seconds


def _published(
    version: int, transport: str, model: Path, scratch: Path, offers: WeightServer, device: str,
    rank: int,
) -> Weights:  # fmt: skip
    """Publish the version as the learner does."""
    if transport == "adapter":
        policy: Any = AdapterPolicy(model, rank)
        return publish(policy, version, scratch, keep=1)
    stored = model / FILES["full"]
    if transport == "disk":
        os.symlink(stored, scratch / FILES["full"])
        manifest = Manifest(version, "full", digest.safetensors_file(stored))
    else:
        weights = load_file(stored, device=device).items()
        own = {name: tensor * (1 + version / 100) for name, tensor in weights}
        parts = ({name: own[name] for name in names} for names in grouped(own))
        proof = digest.total(sums(own))
        manifest = Manifest(version, "full", proof, False, offers.offer(version, parts))
    manifest.write(scratch)
    return Weights(version, str(scratch), manifest.digest)


async def _served(size: str, transports: tuple[str, ...]) -> dict[str, float]:
    graphs = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
    adapters = {"enable_lora": True, "max_lora_rank": RANK, "max_loras_per_batch": 2}
    async with serving(size, {"mem_fraction_static": 0.4} | graphs | adapters) as (engine, folder):
        last = f"cuda:{torch.cuda.device_count() - 1}"  # NCCL takes no GPU twice
        return await updates(engine, folder, last, transports)


def possible() -> tuple[str, ...]:
    """Return the transports that this machine supports. A broadcast needs one GPU per rank, or none
    at all."""
    return tuple(
        name for name in TRANSPORTS if name != "distributed" or torch.cuda.device_count() != 1
    )


def main() -> None:
    """Print JSON lines: the seconds of each transport when they are measured, then all of them."""
    size = size_option()
    seconds = asyncio.run(_served(size, possible()))
    print(json.dumps({"size": size, "update_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
