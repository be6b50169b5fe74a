"""Seconds of one policy update into SGLang by each transport: whole weights from the learner's memory and from a file, and a rank-16 adapter
on all linear layers, alone or merged by the actor.

On servers of their own, started for adapters and without CUDA graphs: adapters may cost the throughput that ``gpu_sglang`` measures, and
graphs cost a start that no update needs. Idle servers: no requests run beside an update. Seconds are from the actor's call to the proof;
what the learner does before (writing files, digests) is not in them.
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
"""LoraConfig's of the learner, and SLATE's."""
OUT_OF_MEMORY = ("tensor", "distributed")
TRANSPORTS = (*OUT_OF_MEMORY, "disk", "adapter", "merged")
"""In this order each brings other weights than the server held."""


class Adapter:
    """What ``learner.publish`` asks of a policy that trains an adapter; its model has shapes and no weights."""

    lora = True

    def __init__(self, folder: Path, rank: int):
        with torch.device("meta"):
            bare: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
            settings = LoraConfig(r=rank, lora_alpha=4 * rank, target_modules="all-linear", lora_dropout=0.0)  # pyright: ignore
            self.model: Any = get_peft_model(bare, settings)

    def gathered(self) -> dict[str, torch.Tensor]:
        """Small random numbers in the learner's float32."""
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: 0.01 * torch.randn(p.shape, device="cpu") for name, p in trained.items()}


async def updates(
    engine: SGLangEngine, folder: Path, device: str, transports: tuple[str, ...] = TRANSPORTS, rank: int = RANK
) -> dict[str, float]:
    """Seconds by transport of a started engine of the model in ``folder``; a line is printed for each as it comes."""
    seconds: dict[str, float] = {}
    giver = Giver()
    try:
        for version, wanted in enumerate(transports, engine.version + 1):
            with tempfile.TemporaryDirectory() as scratch:
                made = _published(version, wanted, folder, Path(scratch), giver, device, rank)
                way = "lora" if wanted in ("adapter", "merged") else "weights"
                engine.weights.config = msgspec.structs.replace(engine.config.sglang, **{way: wanted})
                seconds[wanted] = (await engine.load(LoadRequest(version, made.path, made.digest))).seconds
            print(json.dumps({"transport": wanted, "update_s": seconds[wanted]}), flush=True)
    finally:
        giver.close()
    return seconds


def _published(
    version: int, wanted: str, model: Path, scratch: Path, giver: Giver, device: str, rank: int
) -> Published:
    """The version as the learner publishes it."""
    if wanted in ("adapter", "merged"):
        return publish(Adapter(model, rank), version, scratch, keep=1)  # pyright: ignore[reportArgumentType]
    stored = model / FILES["full"]
    if wanted == "disk":
        os.symlink(stored, scratch / FILES["full"])
        made = Manifest(version, "full", digest.safetensors_file(stored))
    else:
        own = {name: tensor * (1 + version / 100) for name, tensor in load_file(stored, device=device).items()}
        made = Manifest(version, "full", fingerprint(own), False, giver.offer(Snapshot(version, own)))
    made.write(scratch)
    return Published(version, str(scratch), made.digest)


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
    """The transports that this machine can do: a broadcast needs a GPU a rank, or none at all."""
    return tuple(name for name in TRANSPORTS if name != "distributed" or torch.cuda.device_count() != 1)


def main() -> None:
    """Print JSON lines: each transport's seconds as they come, then all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="7b", choices=list(SHAPES), help="default %(default)s")
    parser.add_argument("--without", nargs="+", default=[], choices=TRANSPORTS, help="transports to leave out")
    options = parser.parse_args()
    wanted = tuple(name for name in possible() if name not in options.without)
    found = asyncio.run(_one(options.size, model_folder(), wanted))
    print(json.dumps({"size": options.size, "update_s": found}), flush=True)


if __name__ == "__main__":
    main()
