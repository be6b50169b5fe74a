"""SGLang under our dispatcher: its tokens a second against ``sglang.bench_serving`` on the same requests, and what its radix cache served of
SLATE's and MC-PR's prompts against the ideal.

ratio: ours over bench_serving's, which gives all requests at once; ours has a tree's steps wait for one another. ratio_at_once: ours over
the recorded requests given to our engine at once, without dispatcher and sockets. Both baselines begin with an empty cache.

Run by tools/gpu_check on random numbers in the shape of a 7B model; needs an interpreter with sglang (COPPICE_SGLANG_PYTHON, by default this
one). Not part of tools/bench, which runs anywhere. The seconds of weight updates are in ``gpu_updates``.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from actors.config import ActorsConfig, SGLangConfig
from actors.engines.radix import RadixCache
from actors.engines.sglang import SGLangEngine
from actors.worker import service
from scheduler.config import SchedulerConfig
from scheduler.context import Context, Shop
from scheduler.dispatch import Dispatcher
from scheduler.journal import Journal
from scheduler.strategies import mc_value
from scheduler.text import Text
from scheduler.together import together
from scheduler.tree import Tree
from tools.research.benches import bench_serving
from tools.research.benches.bench_serving import Server, Wanted
from tools.research.benches.game_shape import WHOLE, AnyText
from tools.research.benches.slate_shape import model_folder
from wire.messages import GenerateRequest, GenerateResult, Sampling

SHAPES = {
    "0.5b": {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
             "intermediate_size": 4864, "tie_word_embeddings": True},
    "3b": {"hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2,
           "intermediate_size": 11008, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944, "tie_word_embeddings": False},
}  # fmt: skip
"""Qwen2.5's, with 151,936 words."""
_IDEAL_BYTES = 2**30
"""Of the prompts that the ideal remembers, four bytes a token: more than any run here asks for."""
DEADLINE_S = 600.0
"""Of one request to the dispatcher."""
GOAL = 0.97
"""Of ``ratio``."""

Answered = list[tuple[GenerateRequest, GenerateResult]]


class Work(msgspec.Struct, frozen=True):
    """SLATE trees: tokens of each part. Then games of MC-PR: continuations of each state, tokens of a move, the prompt's name."""

    questions: int = 64
    steps: int = 4
    candidates: int = 5
    instruction: int = 512
    question: int = 64
    observation: int = 512
    action: int = 128
    games: int = 8
    continuations: int = 100
    move: int = 16
    prompt: str = WHOLE


class Recording:
    """Called as the dispatcher is; ``answered`` holds every request for samples with its result, in the order of the results."""

    def __init__(self, dispatcher: Dispatcher):
        self.dispatcher = dispatcher
        self.answered: Answered = []

    async def call(self, name: str, request: Any, **settings: Any) -> Any:
        """The same, noted."""
        result = await self.dispatcher.call(name, request, **settings)
        self.answered.append((request, result))
        return result


Grow = Callable[[Recording], Awaitable[None]]


def random_model(folder: Path, shape: dict[str, Any], tokenizer: Path, device: str) -> Path:
    """A model folder of random bfloat16 weights, drawn on ``device``, in one file, with another model's tokenizer files."""
    config = Qwen2Config(vocab_size=151936, max_position_embeddings=32768, **shape)
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100GB")
    for path in tokenizer.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    del model
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()  # the server measures what is free
    return folder


async def under_dispatcher(engine: SGLangEngine, grow: Grow) -> tuple[Answered, dict[str, Any]]:
    """What ``grow`` asked of dispatcher and actor service, from an empty cache, and what it cost.

    The ideal computes each distinct prompt token once; SGLang computes a prompt's last token for each sample, and once more to compute a
    prefix for several, which ideal_with_last_tokens adds. hit shares are of the prompt tokens of all samples.
    """
    await _flush(engine)
    with tempfile.TemporaryDirectory() as scratch:
        dispatcher = Dispatcher(f"ipc://{scratch}/scheduler", None)
        await dispatcher.start()
        actor = service(engine, "actor", engine.config.capacity)
        serving = asyncio.create_task(actor.run(dispatcher.endpoint, None, signals=False))
        recording = Recording(dispatcher)
        try:
            await dispatcher.wait_for("generate", 1, 60)
            before, start = engine.stats(), time.perf_counter()
            await grow(recording)
            seconds = time.perf_counter() - start
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            await dispatcher.close()
    answered = recording.answered
    prefilled = engine.stats()["prefilled_tokens"] - before.get("prefilled_tokens", 0)
    asked = sum(request.n * len(request.tokens) for request, _ in answered)
    ideal, reachable = _ideal(answered)
    return answered, {
        "seconds": seconds,
        "tokens_s": _sampled(answered) / seconds,
        "requests": len(answered),
        "samples": sum(request.n for request, _ in answered),
        "prompt_tokens": asked,
        "prefilled_tokens": prefilled,
        "ideal_prefill_tokens": ideal,
        "ideal_with_last_tokens": reachable,
        "prefilled_over_ideal": prefilled / reachable,
        "hit_share": 1 - prefilled / asked,
        "ideal_hit_share": 1 - reachable / asked,
    }


def _ideal(answered: Answered) -> tuple[int, int]:
    """Prompt tokens that one cache without bounds computes, and the same of one that computes last tokens again.

    It keeps all but the last token of each sample too, which was sampled but never computed.
    """
    seen, ideal, reachable = RadixCache(_IDEAL_BYTES), 0, 0
    for request, result in answered:
        new = seen.insert(request.tokens)
        ideal += new
        reachable += max(new, 1) + (request.n if request.n > 1 else 0)
        for sample in result.samples:
            seen.insert(np.concatenate([request.tokens, sample.tokens[:-1]]))
    return ideal, reachable


def _sampled(answered: Answered) -> int:
    return sum(len(sample.tokens) for _, result in answered for sample in result.samples)


async def _flush(engine: SGLangEngine) -> None:
    for server in engine.way.servers:
        await server.send("/flush_cache")


# ---------------------------------------------------------------------------------------------- what is grown


def slate(vocabulary: int, work: Work) -> Grow:
    """Trees of SLATE's shape out of random words, all at once; a step begins when the one before is there."""
    rng = np.random.default_rng(0)

    def words(count: int) -> np.ndarray:
        return rng.integers(min(1000, vocabulary // 4), vocabulary - 4, count).astype(np.int32)

    async def grow(recording: Recording) -> None:
        instruction = words(work.instruction)

        async def tree(prefix: np.ndarray) -> None:
            for _ in range(work.steps):
                request = GenerateRequest(prefix, work.candidates, Sampling(work.action, 1.0))
                result: GenerateResult = await recording.call("generate", request, deadline=DEADLINE_S)
                prefix = np.concatenate([prefix, result.samples[0].tokens, words(work.observation)])

        prefixes = [np.concatenate([instruction, words(work.question)]) for _ in range(work.questions)]
        await together(tree(prefix) for prefix in prefixes)

    return grow


def mc_pr(model: Path, work: Work, most: int) -> Grow:
    """Whole games by ``scheduler.strategies.mc_value``: from each state of a chain, continuations to the end of the game.

    A game of Tic-Tac-Toe in which every text is a legal move, against random play. most: samples of one request.
    """

    async def grow(recording: Recording) -> None:
        environment, counts = AnyText(work.prompt), Counter[str]()
        settings = SchedulerConfig(
            strategy="mc_value",
            judge="none",
            max_action_tokens=work.move,
            strategy_options={"continuations": work.continuations},
        )
        with tempfile.TemporaryDirectory() as scratch:
            journal = Journal(Path(scratch) / "journal.sqlite")
            shop = Shop(
                recording,  # pyright: ignore[reportArgumentType] (it is called as the dispatcher is)
                journal, Text(str(model)), environment, settings, counts, lambda tree, turns: None, most,
            )  # fmt: skip

            async def game(number: int) -> None:
                tree = Tree(number, "")
                context = Context(shop, settings, environment.task(number), tree, random.Random(number))
                await context.plant()
                await mc_value.grow(tree, context, work.continuations)

            try:
                await together(game(number) for number in range(work.games))
            finally:
                journal.close()

    return grow


# ---------------------------------------------------------------------------------------------- what it is compared with


async def at_once(engine: SGLangEngine, answered: Answered) -> float:
    """Tokens a second of the same requests given to the engine together."""
    await _flush(engine)
    start = time.perf_counter()
    results = await together(engine.generate(request) for request, _ in answered)
    seconds = time.perf_counter() - start
    return sum(len(sample.tokens) for result in results for sample in result.samples) / seconds


def samples(answered: Answered) -> Sequence[Wanted]:
    """Each sample by itself."""
    return [Wanted(request.tokens, len(s.tokens)) for request, result in answered for s in result.samples]


async def measure(engine: SGLangEngine, server: Server, work: Work) -> dict[str, Any]:
    """Everything of one started engine; printed as it comes, since a later part may fail. server: the engine's."""
    vocabulary = json.loads((server.model / "config.json").read_text())["vocab_size"]
    small = msgspec.structs.replace(work, questions=2, steps=1)
    await under_dispatcher(engine, slate(vocabulary, small))  # kernels are compiled here
    answered, trees = await under_dispatcher(engine, slate(vocabulary, work))
    _print("slate", trees)
    _, games = await under_dispatcher(engine, mc_pr(server.model, work, engine.config.max_batch))
    _print("mc_pr", games)
    together_s = await at_once(engine, answered)
    trees |= {"at_once_tokens_s": together_s, "ratio_at_once": trees["tokens_s"] / together_s}
    _print("ratio_at_once", trees["ratio_at_once"])
    bench_s = await bench_serving.tokens_s(server, samples(answered))
    trees |= {"bench_serving_tokens_s": bench_s, "ratio": trees["tokens_s"] / bench_s, "goal": GOAL}
    return {"slate": trees, "mc_pr": games}


def _print(name: str, found: Any) -> None:
    print(json.dumps({name: found}), flush=True)


def started(folder: Path, arguments: dict[str, Any]) -> SGLangEngine:
    """An engine with a server of its own on this machine's GPU, to be started."""
    python = os.environ.get("COPPICE_SGLANG_PYTHON", sys.executable)
    sglang = SGLangConfig(python=python, arguments={"dtype": "bfloat16", "skip_server_warmup": True} | arguments)
    config = ActorsConfig(
        engine="sglang", max_batch=512, capacity=256, max_context=8192, prefill_tokens=8192, sglang=sglang
    )
    return SGLangEngine(str(folder), config)


async def _one(name: str, tokenizer: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch), SHAPES[name], tokenizer, "cuda:0")
        engine = started(folder, {"mem_fraction_static": 0.6})
        await engine.start()
        way: Any = engine.way
        server = Server(way.front.url, way.arguments["api_key"], folder, engine.config.sglang.python)
        try:
            return await measure(engine, server, Work())
        finally:
            await engine.close()


def main() -> None:
    """Print JSON lines: parts as they come, then all."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="7b", choices=list(SHAPES), help="default %(default)s")
    name = parser.parse_args().size
    tokenizer = model_folder()  # of the default model: only its files are used
    print(json.dumps({"size": name} | asyncio.run(_one(name, tokenizer))), flush=True)


if __name__ == "__main__":
    main()
