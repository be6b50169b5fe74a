"""Prompt tokens that a SLATE judge's server computes with the built-in order of the prompts, over those of one prompt per component.

The prompts hold the same words in three orders: "apart" (a component's rules around the context, as in the paper's listing), "tail" (one
head, then the context, then the rules with the graded text) and "head" (the rules of all components first, the built-in order). Counts
are those of a server that computes every distinct prefix once. ``served`` reads them from a real server with a tiny random model.

``tools/bench judge_prefix --json --set real=true`` prints the counts of docs/judges.md, also those of the server.
"""

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from aiohttp import web

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from actors.serving.server import Server, runner
from judges.llm import ChatEndpoint
from judges.slate import Slate
from judges.templates import PROMPTS
from tools.defaults.models import DEFAULT, ensure_model
from tools.defaults.settings import cache_folder
from tools.research.benches.slate_shape import random_copy
from wire.messages import JudgedTurn

ORDERS = ("apart", "tail", "head")
GOAL = 0.35
_PLACE = "What is known so far:\n{context}\n"
_TINY = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1 << 14,
}  # fmt: skip
"""The shape of the real server's model."""
_WORDS = ("river", "capital", "which", "founded", "of", "the", "in", "city", "author", "born", "year", "film", "find")


class Shape(msgspec.Struct, frozen=True):
    """Lengths of SLATE trees with k candidates per step, whose last step answers. Lengths count words of about one token each."""

    questions: int = 4
    candidates: int = 5
    steps: int = 4
    step_words: int = 600
    think_words: int = 80
    query_words: int = 12


# ---------------------------------------------------------------------------------------------- the orders


def templates(order: str) -> dict[str, str]:
    """Return the three templates in ``order``, made of the built-in words."""
    whole = {column: (PROMPTS / f"slate_{column}.txt").read_text() for column in Slate.columns}
    if order == "head":
        return whole
    intro, think, query, answer, form = whole["think"].partition(_PLACE)[0].strip().split("\n\n")
    texts = {}
    for column, rules in zip(Slate.columns, (think, query, answer), strict=True):
        graded = whole[column].partition(_PLACE)[2].strip()
        body, _, task = graded.rpartition("\n\n")
        named = f"{intro} {task}" if order == "apart" else intro
        texts[column] = "\n\n".join([named, _PLACE.strip(), body, rules, form, *([task] if order == "tail" else [])])
    return texts


def turns(shape: Shape, seed: int = 0) -> list[list[JudgedTurn]]:
    """Return the candidates of every step, in the order in which SLATE's trees ask for their scores."""
    groups, rng = [], random.Random(seed)

    def words(count: int) -> str:
        return " ".join(rng.choice(_WORDS) for _ in range(count))

    contexts = [f"Question: {words(20)}?" for _ in range(shape.questions)]
    for step in range(1, shape.steps + 1):
        for index, context in enumerate(contexts):
            last = step == shape.steps
            shown = {"query": None, "answer": ""} if last else {}
            groups.append(
                [
                    JudgedTurn("Q", [words(3)], context, "", step, shape.steps, think=words(shape.think_words),
                               query=None if last else words(shape.query_words), answer=words(3) if shown else None)
                    for _ in range(shape.candidates)
                ]
            )  # fmt: skip
            contexts[index] += f"\nThinking: {words(shape.think_words)}\nRetrieved: {words(shape.step_words)}"
    return groups


@contextlib.contextmanager
def written(order: str) -> Any:
    """Write the templates in ``order`` to files and yield their paths by column."""
    with tempfile.TemporaryDirectory() as folder:
        for column, text in templates(order).items():
            (Path(folder) / column).write_text(text)
        yield {column: str(Path(folder) / column) for column in Slate.columns}


# ---------------------------------------------------------------------------------------------- counts


def counted(order: str, shape: Shape, tokenizer: tokenizers.Tokenizer) -> dict[str, int]:
    """Count "prompt", all tokens of all prompts, and "prefilled", the tokens after the longest prefix shared with an earlier prompt."""
    seen: set[int] = set()
    total = 0
    with written(order) as paths:
        judge = Slate(ChatEndpoint("http://127.0.0.1:1/v1", "m"), paths)
    for prompt in (p for step in turns(shape) for turn in step for p in judge.prompts(turn).values()):
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        total += len(ids)
        key = 0
        for token in ids:
            key = hash((key, token))
            seen.add(key)
    return {"prompt": total, "prefilled": len(seen)}


@contextlib.asynccontextmanager
async def server(folder: Path, config: ActorsConfig) -> AsyncIterator[tuple[LocalEngine, str]]:
    """Start a server of the embedded engine; yield the engine and the server's URL; close both."""
    engine = LocalEngine(str(folder), config)
    await engine.start()
    web_runner = runner(Server(engine, folder))
    await web_runner.setup()
    await web.TCPSite(web_runner, "127.0.0.1", 0).start()
    try:
        yield engine, f"http://127.0.0.1:{web_runner.addresses[0][1]}/v1"
    finally:
        await web_runner.cleanup()
        await engine.close()


async def served(order: str, steps: Sequence[list[JudgedTurn]], folder: Path, config: ActorsConfig) -> dict[str, int]:
    """Return the engine's own counts after a judge has scored every step over HTTP."""
    async with server(folder, config) as (engine, url):
        with written(order) as paths:
            judge = Slate(ChatEndpoint(url, folder.name, max_tokens=2), paths)
        await judge.start()
        try:
            for candidates in steps:
                await judge.score(candidates)
        finally:
            await judge.close()
        names = ("prompt_tokens", "cached_tokens", "prefilled_tokens")
        assert not judge.counts["failed"], "the server refused a prompt"
        return {name: int(engine.stats()[name]) for name in names}


def run(real: bool = False) -> dict[str, Any]:
    """Return the ratio of the built-in order to "apart", and all counts. real: also ask a real server, with one question of two steps."""
    folder = ensure_model(DEFAULT, cache_folder())
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    counts = {order: counted(order, Shape(), tokenizer) for order in ORDERS}
    row = {
        "name": "judge prompt tokens computed, rules and context first",
        "ratio": counts["head"]["prefilled"] / counts["apart"]["prefilled"],
        "goal": GOAL,
        "better": "lower",
        "counts": counts,
    }
    if not real:
        return row
    with tempfile.TemporaryDirectory() as scratch:
        small = random_copy(Path(scratch) / "tiny", **_TINY)
        config = ActorsConfig(dtype="float32", max_context=4096, max_batch=16, kv_cache_gib=1.0)
        steps = turns(Shape(questions=1, steps=2))
        return row | {"served": {order: asyncio.run(served(order, steps, small, config)) for order in ORDERS}}
