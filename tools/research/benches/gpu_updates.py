"""Seconds of one policy update into SGLang by each transport: whole weights from the learner's memory and from a file, and a rank-16 adapter
on all linear layers, alone or merged by the actor.

The servers are separate from those of ``gpu_sglang``: they accept adapters, which may lower the throughput measured there, and have no CUDA
graphs, which would only slow the start. No requests run during an update. The seconds count from the actor's call to the proof of the new
weights, without the learner's work before the call (writing files, digests).
"""

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from actors.engines.sglang import SGLangEngine
from learner.giver import Giver, Snapshot
from learner.publish import Published, fingerprint, publish
from tools.research.benches.gpu_sglang import SHAPES, random_model, started
from tools.research.benches.slate_shape import model_folder
from wire import digest
from wire.messages import LoadRequest
from wire.published import FILES, Manifest

RANK = 16
"""The rank in the learner's LoraConfig and in SLATE."""
OUT_OF_MEMORY = ("tensor", "distributed")
TRANSPORTS = (*OUT_OF_MEMORY, "disk", "adapter", "merged")
"""The order matters: each transport must bring weights that differ from those that the server holds."""


class Adapter:
    """A policy that trains an adapter, as far as ``learner.publish`` needs one. Its model has shapes and no weights."""

    lora = True

    def __init__(self, folder: Path, rank: int):
        with torch.device("meta"):
            bare: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            settings = LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear", lora_dropout=0.0)  # pyright: ignore
            self.model: Any = get_peft_model(bare, settings)

    def gathered(self) -> dict[str, torch.Tensor]:
        """Return small random weights in the learner's float32."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: 0.01 * torch.randn(p.shape, device="cpu") for name, p in trained.items()}


async def updates(
    engine: SGLangEngine, folder: Path, device: str, transports: tuple[str, ...] = TRANSPORTS, rank: int = RANK
) -> dict[str, float]:
    """Return the seconds by transport for a started engine of the model in ``folder``, and print each as soon as it is measured."""
    seconds: dict[str, float] = {}
    giver = Giver()
    try:
        for version, transport in enumerate(transports, engine.version + 1):
            with tempfile.TemporaryDirectory() as scratch:
                published = _published(version, transport, folder, Path(scratch), giver, device, rank)
                way = "lora" if transport in ("adapter", "merged") else "weights"
                engine.weights.config = msgspec.structs.replace(engine.config.sglang, **{way: transport})
                seconds[transport] = (await engine.load(LoadRequest(version, published.path, published.digest))).seconds
            print(json.dumps({"transport": transport, "update_s": seconds[transport]}), flush=True)
    finally:
        giver.close()
    return seconds


def _published(
    version: int, transport: str, model: Path, scratch: Path, giver: Giver, device: str, rank: int
) -> Published:
    """Publish the version as the learner does."""
    if transport in ("adapter", "merged"):
        return publish(Adapter(model, rank), version, scratch, keep=1)  # pyright: ignore[reportArgumentType]
    stored = model / FILES["full"]
    if transport == "disk":
        os.symlink(stored, scratch / FILES["full"])
        manifest = Manifest(version, "full", digest.safetensors_file(stored))
    else:
        own = {name: tensor * (1 + version / 100) for name, tensor in load_file(stored, device=device).items()}
        manifest = Manifest(version, "full", fingerprint(own), False, giver.offer(Snapshot(version, own)))
    manifest.write(scratch)
    return Published(version, str(scratch), manifest.digest)


async def _one(name: str, tokenizer: Path, transports: tuple[str, ...]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch), SHAPES[name], tokenizer, "cuda:0")
        graphs = {"cuda_graph_backend_decode": "disabled", "cuda_graph_backend_prefill": "disabled"}
        adapters = {"enable_lora": True, "max_lora_rank": RANK, "max_loras_per_batch": 2}
        engine = started(folder, {"mem_fraction_static": 0.4} | graphs | adapters)
        await engine.start()
        try:
            return await updates(engine, folder, "cuda:0", transports)
        finally:
            await engine.close()


def possible() -> tuple[str, ...]:
    """Return the transports that this machine supports. A broadcast needs one GPU per rank, or none at all."""
    return tuple(name for name in TRANSPORTS if name != "distributed" or torch.cuda.device_count() != 1)


def main() -> None:
    """Print JSON lines: the seconds of each transport when they are measured, then all of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="7b", choices=list(SHAPES), help="default %(default)s")
    parser.add_argument("--without", nargs="+", default=[], choices=TRANSPORTS, help="transports to leave out")
    options = parser.parse_args()
    transports = tuple(name for name in possible() if name not in options.without)
    seconds = asyncio.run(_one(options.size, model_folder(), transports))
    print(json.dumps({"size": options.size, "update_s": seconds}), flush=True)


if __name__ == "__main__":
    main()
