"""Warm start for function calling: the references of training tasks, as they would be played."""

import asyncio
import itertools
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoTokenizer

from coppice.actors.environments.base import HELD_OUT_SEEDS, Task, Tools
from coppice.actors.environments.bfcl.environment import Bfcl
from coppice.learner.fine_tune import Example
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.settings import WarmStart
from coppice.tools.defaults.warm_start import Written, from_play


def references(environment: Bfcl, text: Text, end: str, count: int, seed: int) -> list[Example]:
    """Return ``count`` replies of training tasks, each with the conversation before it as in a
    rollout. The replies of an episode stay together, so that a batch shares what they read. end:
    the token that ends a reply."""
    examples: list[Example] = []
    tasks = map(environment.task, itertools.count(HELD_OUT_SEEDS.stop + seed))
    while len(examples) < count:
        examples += asyncio.run(_episode(environment, next(tasks), text, end))
    return examples[:count]


async def _episode(environment: Bfcl, task: Task, text: Text, end: str) -> list[Example]:
    state = environment.initial(task)
    messages, tools = environment.prompt(task, state), environment.tools(state)
    written = Written(text, text.prompt(messages, tools=tools))
    while True:
        reply = environment.replies(state)[0]
        written.act(reply + end)
        transition = await environment.step(state, environment.read(state, reply), Tools())
        if transition.done:
            return written.examples
        written.see(text.after(text.encode(end), transition.messages or []))
        state = transition.state


def ensure_references(
    model: Path, environment: Bfcl, options: dict[str, Any], config: WarmStart, cache: Path,
    threads: int,
) -> Path:  # fmt: skip
    def examples(count: int) -> list[Example]:
        end = str(AutoTokenizer.from_pretrained(model).eos_token)
        return references(environment, Text(str(model)), end, count, config.seed)

    recipe = [environment.name, options, msgspec.to_builtins(config)]
    play = "references of the leaderboard"
    return from_play(model, play, recipe, [], examples, config, cache, threads, packing=True)
