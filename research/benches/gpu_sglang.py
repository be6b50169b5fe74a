"""SGLang under our dispatcher: its tokens per second against ``sglang.bench_serving`` on the same
requests, and the share of SLATE's and MC-PR's prompts that its radix cache served, against the
ideal. coppice dev gpu-check runs it on random weights; it needs an interpreter with sglang
(COPPICE_SGLANG_PYTHON, or else this one) and a GPU, so coppice dev bench leaves it out.

bench_serving gets requests that the server has answered before: the same prompts, the same numbers
of sampled tokens, temperature 1, and log-probabilities. It has no data set of token ids, but passes
unknown fields of its "openai" data set on, and ``input_ids`` replaces the chat message there. It
sends all requests at once, each sample as a request of its own, while our steps of a tree wait for
one another; ``ratio_at_once`` sends ours at once too. Both begin with an empty cache.
"""

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from coppice.actors.config import ActorsConfig, SGLangConfig
from coppice.actors.engines.radix import RadixCache
from coppice.actors.engines.sglang import SGLangEngine
from coppice.actors.environments.base import Action
from coppice.actors.environments.tictactoe.environment import TicTacToe
from coppice.actors.worker import service
from coppice.common.concurrency import gather
from coppice.research.benches.prefill import TreeShape, grow_trees, model_folder
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.dispatch.dispatcher import Dispatcher
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.strategies import mc_value
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.wire.messages import GenerateRequest, GenerateResult

_FIELDS = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size"
_SIZES = {
    "0.5b": (896, 24, 14, 2, 4864), "3b": (2048, 36, 16, 2, 11008), "7b": (3584, 28, 28, 4, 18944),
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    name: dict(zip(_FIELDS.split(), sizes, strict=True)) | {"tie_word_embeddings": name != "7b"}
    for name, sizes in _SIZES.items()
}
"""The shapes of Qwen2.5 models. All have a vocabulary of 151,936 words."""
_IDEAL_BYTES = 2**30
"""Bytes for the prompts that the ideal cache remembers, at four bytes per token. No run here needs
as much."""
DEADLINE_S = 600.0
"""Seconds for one request to the dispatcher."""
GOAL = 0.97
"""The goal of ``ratio``."""

LONGEST_S = 150.0
"""Seconds after which the process of bench_serving is killed."""
_SHOWN = 3000
"""Characters of its output that an error quotes."""
WHOLE, COMPACT = "tictactoe", "tictactoe_compact"
"""Names of prompts: one with all rules (about 1,000 tokens of the tiny policy), one with the bare
position (about 25 tokens)."""

Answered = list[tuple[GenerateRequest, GenerateResult]]


class TreeWork(msgspec.Struct, frozen=True):
    """The work of one measurement. trees: SLATE's. MC-PR games: their number, continuations per
    state, tokens of a move, and the name of the prompt."""

    trees: TreeShape = TreeShape(64, 4, 5, 512, question=64, observation=512, action=128)
    games: int = 8
    continuations: int = 100
    move: int = 16
    prompt: str = WHOLE


class SGLangServer(msgspec.Struct, frozen=True):
    """A running server. model: a folder with its tokenizer. python, environment: interpreter and
    variables of the measuring process."""

    url: str
    key: str
    model: Path
    python: str
    environment: dict[str, str] = {}


class WantedSample(msgspec.Struct, frozen=True):
    """One sample: its prompt, int32 [prompt], and its number of tokens."""

    prompt: np.ndarray
    tokens: int


class AnyMove(TicTacToe):
    """Tic-Tac-Toe against random play in which every text is a legal move, chosen by the checksum
    of the text."""

    def __init__(self, prompt: str):
        super().__init__(prompt=prompt, opponents={"random": 1.0})

    def read(self, state: Any, text: str) -> Action:
        """Return a valid action for any text."""
        moves = self.moves(state)
        return Action("move", text, move=moves[zlib.crc32(text.encode()) % len(moves)])


class Recording:
    """Stands for the dispatcher; ``answered`` holds every request with its result, in the order of
    the results."""

    def __init__(self, dispatcher: Dispatcher):
        self.dispatcher = dispatcher
        self.answered: Answered = []

    async def call(self, name: str, request: Any, **settings: Any) -> Any:
        """Make the dispatcher's call and record it."""
        result = await self.dispatcher.call(name, request, **settings)
        self.answered.append((request, result))
        return result


Grow = Callable[[Recording], Awaitable[None]]


def random_model(folder: Path, shape: dict[str, Any], tokenizer: Path, device: str) -> Path:
    """Make a model folder of random bfloat16 weights, drawn on ``device``, in one file, with the
    tokenizer files of another model."""
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
        torch.cuda.empty_cache()  # the server takes its share of the free memory
    return folder


async def under_dispatcher(engine: SGLangEngine, grow: Grow) -> tuple[Answered, dict[str, Any]]:
    """Run ``grow`` through dispatcher and actor service from an empty cache. Return its requests
    with their results, and the costs.

    The ideal computes each distinct prompt token once. SGLang computes a prompt's last token once
    per sample, and once more if several samples share the prefix; ideal_with_last_tokens adds
    these. Hit shares refer to the prompt tokens of all samples.
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
    prompted = sum(request.n * len(request.tokens) for request, _ in answered)
    ideal, reachable = _ideal(answered)
    return answered, {
        "seconds": seconds, "tokens_s": _sampled(answered) / seconds, "requests": len(answered),
        "samples": sum(request.n for request, _ in answered), "prompt_tokens": prompted,
        "prefilled_tokens": prefilled, "ideal_prefill_tokens": ideal,
        "ideal_with_last_tokens": reachable, "prefilled_over_ideal": prefilled / reachable,
        "hit_share": 1 - prefilled / prompted, "ideal_hit_share": 1 - reachable / prompted,
    }  # fmt: skip


def _ideal(answered: Answered) -> tuple[int, int]:
    """Count the prompt tokens that one unbounded cache computes, and those of a cache that computes
    last tokens again.

    Both keep the samples too, except the last token of each, which was sampled but never computed.
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
        await server.client.send("POST", "/flush_cache", attempts=1)


# ------------------------------------------------------------------------- the trees that are grown


def slate(vocabulary: int, shape: TreeShape) -> Grow:
    """Grow trees of SLATE's shape."""

    async def grow(recording: Recording) -> None:
        call = partial(recording.call, "generate", deadline=DEADLINE_S)
        await grow_trees(call, vocabulary, shape)

    return grow


def mc_pr(model: Path, work: TreeWork, most: int) -> Grow:
    """Play whole games by ``scheduler.strategies.mc_value``: from each state of a chain,
    continuations go to the end of the game.

    The game is Tic-Tac-Toe against random play, in which every text is a legal move. most: the most
    samples of one request.
    """

    async def grow(recording: Recording) -> None:
        environment, counts = AnyMove(work.prompt), Counter[str]()
        settings = SchedulerConfig(
            strategy="mc_value", judge="none", max_action_tokens=work.move,
            strategy_options={"continuations": work.continuations},
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as scratch:
            journal = Journal(Path(scratch) / "journal.sqlite")
            calls: Any = recording  # it is called as the dispatcher is
            emit = lambda tree, turns: None  # noqa: E731
            text = Text(str(model))
            runtime = Runtime(calls, journal, text, environment, settings, counts, emit, most)

            async def game(number: int) -> None:
                tree = Tree(number, "")
                context = Context(runtime, environment.task(number), tree, random.Random(number))
                await context.plant()
                await mc_value.grow(tree, context, work.continuations)

            try:
                await gather(game(number) for number in range(work.games))
            finally:
                journal.close()

    return grow


# ------------------------------------------------------------------------------------ the baselines


async def at_once(engine: SGLangEngine, answered: Answered) -> float:
    """Return the tokens per second of the same requests when the engine gets all at once."""
    await _flush(engine)
    start = time.perf_counter()
    results = await gather(engine.generate(request) for request, _ in answered)
    seconds = time.perf_counter() - start
    return sum(len(sample.tokens) for result in results for sample in result.samples) / seconds


async def bench_serving(server: SGLangServer, wanted: Sequence[WantedSample]) -> float:
    """Return the sampled tokens per second. Raises RuntimeError, with the end of the output, if
    bench_serving fails or does other work."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        message = [{"role": "user", "content": "-"}]
        rows = [
            {"messages": message, "max_tokens": one.tokens, "input_ids": one.prompt.tolist()}
            for one in wanted
        ]
        (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = _command(server, _tokenizer(server.model, folder), folder, len(rows))
        output = await _run(server, command, folder)
        try:
            result = json.loads((folder / "found.jsonl").read_text())
        except (OSError, ValueError) as error:
            told = f"sglang.bench_serving left no result ({error})"
            raise RuntimeError(f"{told}:\n{output}") from None
    _check(result, wanted, output)
    return float(result["output_throughput"])


def _tokenizer(model: Path, folder: Path) -> Path:
    """Copy the model's tokenizer and add a chat template, which not every model has. Nothing that
    the template renders is sent."""
    copy = folder / "tokenizer"
    copy.mkdir()
    for path in [*model.glob("token*"), *model.glob("special*"), model / "config.json"]:
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return copy


def _command(server: SGLangServer, tokenizer: Path, folder: Path, count: int) -> list[str]:
    # There are no warm-up requests: they would hold the chat message alone, which /generate does
    # not accept.
    settings = {
        "backend": "sglang", "base-url": server.url, "model": tokenizer, "tokenizer": tokenizer,
        "dataset-name": "openai", "dataset-path": folder / "requests.jsonl", "num-prompts": count,
        "temperature": 1.0, "warmup-requests": 0, "output-file": folder / "found.jsonl",
    }  # fmt: skip
    switches = [
        "--return-logprob", "--disable-stream", "--disable-tqdm", "--flush-cache",
        "--output-details",
    ]  # fmt: skip
    named = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [server.python, "-m", "sglang.bench_serving", *named, *switches]


async def _run(server: SGLangServer, command: list[str], folder: Path) -> str:
    """Run the command and return the end of its output. The key is passed in a variable, because
    everyone can read command lines. Raises TimeoutExpired after ``LONGEST_S``."""
    own = {"OPENAI_API_KEY": server.key, "PYTHONUNBUFFERED": "1"}
    done = await asyncio.to_thread(
        subprocess.run, command, cwd=folder, env=os.environ | server.environment | own,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", timeout=LONGEST_S,
    )  # fmt: skip
    output = done.stdout.replace(server.key or "\0", "(key)")[-_SHOWN:]
    if done.returncode:
        raise RuntimeError(f"sglang.bench_serving failed (status {done.returncode}):\n{output}")
    return output


def _check(result: dict[str, Any], wanted: Sequence[WantedSample], output: str) -> None:
    """Raises RuntimeError unless every request was answered with the intended numbers of prompt
    tokens and sampled tokens."""
    if errors := [error for error in result["errors"] if error]:
        failed = f"{len(errors)} of {len(wanted)} requests failed, the first"
        raise RuntimeError(f"sglang.bench_serving: {failed}: {errors[0][-_SHOWN:]}")
    for quantity, got, expected in (
        ("prompt lengths", result["input_lens"], [len(one.prompt) for one in wanted]),
        ("sampled tokens", result["output_lens"], [one.tokens for one in wanted]),
    ):
        if got != expected:
            told = f"{quantity} {got[:8]}.., expected {expected[:8]}.."
            version = "is it the one of sglang 0.5.23?"
            raise RuntimeError(f"sglang.bench_serving: {told}: {version}\n{output}")


async def measure(engine: SGLangEngine, server: SGLangServer, work: TreeWork) -> dict[str, Any]:
    """Measure everything on one started engine and print each part at once, since a later part may
    fail. server: the engine's server."""
    vocabulary = json.loads((server.model / "config.json").read_text())["vocab_size"]
    small = msgspec.structs.replace(work.trees, questions=2, steps=1)
    await under_dispatcher(engine, slate(vocabulary, small))  # compiles the kernels
    answered, trees = await under_dispatcher(engine, slate(vocabulary, work.trees))
    _print("slate", trees)
    _, games = await under_dispatcher(engine, mc_pr(server.model, work, engine.config.max_batch))
    _print("mc_pr", games)
    together_s = await at_once(engine, answered)
    trees |= {"at_once_tokens_s": together_s, "ratio_at_once": trees["tokens_s"] / together_s}
    _print("ratio_at_once", trees["ratio_at_once"])
    # each sample as a request of its own
    wanted = [
        WantedSample(request.tokens, len(one.tokens))
        for request, result in answered
        for one in result.samples
    ]
    bench_s = await bench_serving(server, wanted)
    trees |= {"bench_serving_tokens_s": bench_s, "ratio": trees["tokens_s"] / bench_s, "goal": GOAL}
    return {"slate": trees, "mc_pr": games}


def _print(name: str, value: Any) -> None:
    print(json.dumps({name: value}), flush=True)


@contextlib.asynccontextmanager
async def serving(size: str, arguments: dict[str, Any]) -> AsyncIterator[tuple[SGLangEngine, Path]]:
    """A started engine with its own server on this machine's GPU, for a random model of ``SHAPES``,
    and the model's folder. Of the default model only the tokenizer files are used."""
    arguments = {"dtype": "bfloat16", "skip_server_warmup": True} | arguments
    python = os.environ.get("COPPICE_SGLANG_PYTHON", sys.executable)
    config = ActorsConfig(
        engine="sglang", max_batch=512, capacity=256, max_context=8192, prefill_tokens=8192,
        sglang=SGLangConfig(python=python, arguments=arguments),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = random_model(Path(scratch), SHAPES[size], model_folder(), "cuda:0")
        engine = SGLangEngine(str(folder), config)
        await engine.start()
        try:
            yield engine, folder
        finally:
            await engine.close()


def size_option() -> str:
    """Return the size that the command line names."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", default="7b", choices=list(SHAPES), help="default %(default)s")
    return parser.parse_args().size


async def _one(size: str) -> dict[str, Any]:
    async with serving(size, {"mem_fraction_static": 0.6}) as (engine, folder):
        way: Any = engine.way
        key, python = way.arguments["api_key"], engine.config.sglang.python
        return await measure(engine, SGLangServer(way.front.url, key, folder, python), TreeWork())


def main() -> None:
    """Print JSON lines: each part when it is measured, then everything."""
    size = size_option()
    print(json.dumps({"size": size} | asyncio.run(_one(size))), flush=True)


if __name__ == "__main__":
    main()
