"""SGLang under our dispatcher: its tokens a second against the same requests given to the engine at once, the share that its radix cache served
against the ideal, and the seconds of a weight update by each transport.

Run by tools/gpu_check on weights of random numbers in the shapes of 0.5B, 3B and 7B models; needs an interpreter with sglang
(COPPICE_SGLANG_PYTHON, by default this one). Not part of tools/bench, which runs anywhere.
"""

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen2Config

from actors.config import ActorsConfig, SGLangConfig
from actors.engines.sglang import SGLangEngine
from actors.worker import service
from learner.giver import Giver, Snapshot
from learner.publish import fingerprint
from scheduler.dispatch import Dispatcher
from tools.benches.slate_shape import model_folder
from wire import digest
from wire.messages import GenerateRequest, GenerateResult, LoadRequest, Sampling
from wire.published import FILES, Manifest

SHAPES = {
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "tie_word_embeddings": True},
    "3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
           "intermediate_size": 11008, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "tie_word_embeddings": False},
}  # fmt: skip
"""Qwen2.5's, with 151,936 words."""

_CONTINUATIONS = 100
"""Of a step in MC-PR, where the engine takes as many at once."""
TRANSPORTS = ("disk", "tensor", "distributed")


class Work(msgspec.Struct, frozen=True):
    """SLATE trees: tokens of each part. continuations: of each step of MC-PR's chains, from the step's prefix."""

    questions: int = 64
    steps: int = 4
    candidates: int = 5
    instruction: int = 512
    question: int = 64
    observation: int = 512
    action: int = 128
    continuations: int = 0


def random_model(folder: Path, shape: dict[str, Any], tokenizer: Path) -> Path:
    """A model folder of random bfloat16 weights with another model's tokenizer files."""
    config = Qwen2Config(vocab_size=151936, max_position_embeddings=32768, **shape)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for path in tokenizer.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


async def throughput(engine: SGLangEngine, vocabulary: int, work: Work) -> dict[str, Any]:
    """Trees through dispatcher and actor service, then the recorded requests straight to the engine, all at once."""
    recorded: list[GenerateRequest] = []
    with tempfile.TemporaryDirectory() as scratch:
        dispatcher = Dispatcher(f"ipc://{scratch}/scheduler", None)
        await dispatcher.start()
        actor = service(engine, "actor", engine.config.capacity)
        serving = asyncio.create_task(actor.run(dispatcher.endpoint, None, signals=False))
        try:
            await dispatcher.wait_for("generate", 1, 60)
            before = engine.stats()
            start = time.perf_counter()
            sampled = await _trees(dispatcher, vocabulary, work, recorded)
            ours = sampled / (time.perf_counter() - start)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await dispatcher.close()
    after = engine.stats()
    await _flush(engine)
    start = time.perf_counter()
    results = await asyncio.gather(*(engine.generate(request) for request in recorded))
    bare = sum(len(s.tokens) for r in results for s in r.samples) / (time.perf_counter() - start)
    prefilled = after["prefilled_tokens"] - before.get("prefilled_tokens", 0)
    best = work.instruction + work.questions * (work.question + (work.steps - 1) * (work.observation + 1))
    return {
        "ratio": ours / bare,
        "tokens_s": ours,
        "bare_tokens_s": bare,
        "prefilled_tokens": prefilled,
        "ideal_prefill_tokens": best,
        "ideal_with_last_tokens": best + sum(request.n for request in recorded),
    }


async def _trees(dispatcher: Dispatcher, vocabulary: int, work: Work, recorded: list[GenerateRequest]) -> int:
    rng = np.random.default_rng(0)

    def words(count: int) -> np.ndarray:
        return rng.integers(min(1000, vocabulary // 4), vocabulary - 4, count).astype(np.int32)

    instruction = words(work.instruction)

    async def sample(prefix: np.ndarray, n: int) -> GenerateResult:
        request = GenerateRequest(prefix, n, Sampling(work.action, 1.0))
        recorded.append(request)
        return await dispatcher.call("generate", request, deadline=600.0)

    async def grow(prefix: np.ndarray) -> int:
        sampled = 0
        for _ in range(work.steps):
            samples = (await sample(prefix, work.candidates)).samples
            rest = (await sample(prefix, work.continuations)).samples if work.continuations else []
            sampled += sum(len(one.tokens) for one in [*samples, *rest])
            prefix = np.concatenate([prefix, samples[0].tokens, words(work.observation)])
        return sampled

    prefixes = [np.concatenate([instruction, words(work.question)]) for _ in range(work.questions)]
    return sum(await asyncio.gather(*map(grow, prefixes)))


async def _flush(engine: SGLangEngine) -> None:
    for server in engine.way.servers:
        await server.send("/flush_cache")


async def updates(engine: SGLangEngine, folder: Path, device: str) -> dict[str, float]:
    """Seconds of one update of all weights by each transport."""
    seconds = {}
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    giver = Giver()
    try:
        # A broadcast needs a GPU a rank; between processes of one CPU it is possible, and slow.
        alone = device.startswith("cuda") and torch.cuda.device_count() < 2
        for version, wanted in enumerate(("disk", "tensor") if alone else TRANSPORTS, engine.version + 1):
            tensors = {n: (p.detach() * (1 + version / 100)).contiguous() for n, p in model.named_parameters()}
            with tempfile.TemporaryDirectory() as scratch:
                made = _published(version, wanted, tensors, Path(scratch), giver, device)
                engine.weights.config = msgspec.structs.replace(engine.config.sglang, weights=wanted)
                loaded = await engine.load(LoadRequest(version, scratch, made.digest))
            seconds[wanted] = loaded.seconds
    finally:
        giver.close()
    return seconds


def _published(
    version: int, wanted: str, tensors: dict[str, torch.Tensor], folder: Path, giver: Giver, device: str
) -> Manifest:
    if wanted == "disk":
        save_file(tensors, folder / FILES["full"], metadata={"format": "pt"})
        made = Manifest(version, "full", digest.safetensors_file(folder / FILES["full"]))
    else:
        own = {name: tensor.to(device) for name, tensor in tensors.items()}
        made = Manifest(version, "full", fingerprint(own), False, giver.offer(Snapshot(version, own)))
    made.write(folder)
    return made


async def measure(engine: SGLangEngine, folder: Path, work: Work, device: str) -> dict[str, Any]:
    """Everything of one started engine."""
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    await throughput(
        engine, vocabulary, msgspec.structs.replace(work, questions=2, steps=1)
    )  # kernels are compiled here
    await _flush(engine)
    found = await throughput(engine, vocabulary, work)
    await _flush(engine)
    most = min(_CONTINUATIONS, engine.config.max_batch)
    chains = msgspec.structs.replace(work, questions=max(1, work.questions // 8), candidates=1, continuations=most)
    found["mc_pr"] = await throughput(engine, vocabulary, chains)
    print(json.dumps(found), flush=True)  # whatever the updates do
    return found | {"update_s": await updates(engine, folder, device)}


async def _one(name: str, tokenizer: Path) -> dict[str, Any]:
    python = os.environ.get("COPPICE_SGLANG_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch), SHAPES[name], tokenizer)
        gc.collect()
        sglang = SGLangConfig(python=python, arguments={"mem_fraction_static": 0.5, "dtype": "bfloat16"})
        config = ActorsConfig(
            engine="sglang", max_batch=512, capacity=256, max_context=8192, prefill_tokens=8192, sglang=sglang
        )
        engine = SGLangEngine(str(folder), config)
        await engine.start()
        try:
            return await measure(engine, folder, Work(), "cuda:0")
        finally:
            await engine.close()


def main() -> None:
    """Print one JSON line a model size."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sizes", nargs="*", default=list(SHAPES))
    given = parser.parse_args()
    tokenizer = model_folder()  # of the default model: only its files are used
    for name in given.sizes:
        print(json.dumps({"size": name} | asyncio.run(_one(name, tokenizer))), flush=True)


if __name__ == "__main__":
    main()
