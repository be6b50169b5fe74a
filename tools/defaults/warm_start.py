"""Supervised warm starts, after which a policy writes usable actions: examples in exactly the
tokens of a rollout, the loss over the action tokens. Here those of a pretrained model: a few steps
on synthetic traces, stopped early on purpose, of the warm split and the passages of the index."""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.common.process import Killed, in_subprocess
from coppice.judges.retriever.encoder import Encoder
from coppice.judges.retriever.index import Index
from coppice.learner.fine_tune import Example, Recipe, fine_tune
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.facts import Fact
from coppice.tools.defaults.settings import WarmStart
from coppice.wire.messages import Passage

_NEED = (
    "I need the {field} of {title}.",
    "To answer, I must look up the {field} of {title}.",
    "I should search for {title} and its {field}.",
    "Let me find the {field} of {title}.",
)
_BRIDGE = (
    "First I need the one whose {field} is {value}.",
    "I must find which has {field} {value}.",
    "Let me find out what has the {field} {value}.",
)
DTYPE = "float32"
"""Number type of every warm start, so that machines agree. Training in bfloat16 gives a fifth of
the weights other values on another processor. In float32 only the order of sums differs, and after
saving in bfloat16 two of 100,000 weights differ (docs/engines.md)."""
_FOUND = (
    "The {field} is {value}.",
    "It says that the {field} of {title} is {value}.",
    "Now I know: {value}.",
)


class _Row(msgspec.Struct):
    question: str
    golden_answers: list[str]
    evidence: list[Fact]
    hops: int


def traces(
    rows: Sequence[_Row], text: Text, environment: SearchQA, index: Index, count: int,
    config: WarmStart,
) -> list[Example]:  # fmt: skip
    """Return ``count`` single turns, shuffled, of synthetic episodes."""
    rng = random.Random(config.seed)
    by_hops = {hops: [row for row in rows if row.hops == hops] for hops in (1, 2)}
    by_hops = {hops: rng.sample(own, k=len(own)) for hops, own in by_hops.items()}
    examples: list[Example] = []
    while len(examples) < count and any(by_hops.values()):
        wanted = 2 if rng.random() < config.two_hop else 1
        row = (by_hops[wanted] or by_hops[3 - wanted]).pop()
        examples += _episode(row, text, environment, index, rng)
    rng.shuffle(examples)
    return examples[:count]


class Written:
    """An episode as it is written: its tokens so far, and an example for each action."""

    def __init__(self, text: Text, prompt: str):
        self.text, self.tokens, self.examples = text, text.encode(prompt).tolist(), list[Example]()

    def act(self, action: str) -> None:
        """Add what the policy writes."""
        start = len(self.tokens)
        self.see(action)
        self.examples.append(Example(self.tokens, start))

    def see(self, observation: str) -> None:
        """Add what the policy reads."""
        self.tokens = self.tokens + self.text.encode(observation).tolist()


def _episode(
    row: _Row, text: Text, environment: SearchQA, index: Index, rng: random.Random
) -> list[Example]:
    question = environment.template.replace("{question}", row.question)
    written = Written(text, text.prompt([{"role": "user", "content": question}]))
    for hop, fact in enumerate(row.evidence):
        field = fact.field.lower()
        words = {"field": field, "title": fact.title, "value": fact.value}
        if hop == 0 and len(row.evidence) == 2:
            think, query = rng.choice(_BRIDGE), f"{field} {fact.value}"
        else:
            think, query = rng.choice(_NEED), f"{fact.title} {field}"
        written.act(f"<think> {think.format(**words)} </think> <search> {query} </search>")
        (passages,) = index.search([query], environment.topk)
        shown = f"{fact.field}: {fact.value}"
        if not any(p.title == fact.title and p.text == shown for p in passages):
            passages[0] = Passage(fact.passage_id, fact.title, shown, 1.0)
        written.see(environment.render(passages))
    last = row.evidence[-1]
    think = rng.choice(_FOUND).format(field=last.field.lower(), title=last.title, value=last.value)
    written.act(f"<think> {think} </think> <answer> {row.golden_answers[0]} </answer>")
    return written.examples


def ensure_warm_start(
    model: Path, facts: Path, index: Path, encoder: str, environment: SearchQA, config: WarmStart,
    cache: Path, threads: int,
) -> Path:  # fmt: skip
    """Return the model after its traces (``from_play``)."""

    def examples(count: int) -> list[Example]:
        torch.set_num_threads(threads)
        lines = (facts / "warm.jsonl").read_bytes().splitlines()
        rows = [msgspec.json.decode(line, type=_Row) for line in lines if line.strip()]
        found = Index(index, Encoder(encoder, threads))
        return traces(rows, Text(str(model)), environment, found, count, config)

    recipe = [*environment.shown, msgspec.to_builtins(config), encoder]
    sources = [facts / "warm.jsonl"]
    return from_play(model, "traces", recipe, sources, examples, config, cache, threads, 0.0)


COOLDOWN = 0.4
"""The share of a tiny policy's steps, at the end, over which the learning rate falls to 0. Without
it a few per cent of the actions stay unusable."""


def from_play(
    model: Path, play: str, recipe: list[Any], sources: Sequence[Path],
    examples: Callable[[int], Sequence[Example]], config: WarmStart, cache: Path, threads: int,
    cooldown: float = COOLDOWN,
) -> Path:  # fmt: skip
    """Return ``model`` after it has learnt from examples of ``play``, or ``model`` itself when
    config.steps is 0. The result is cached by ``recipe`` and by the bytes of ``sources`` and of the
    model. examples: makes as many examples as asked for. Raises MemoryError."""
    if config.steps == 0:
        return model
    digest = hashlib.sha256(msgspec.json.encode([*recipe, DTYPE], order="sorted"))
    for path in [*sources, *sorted(model.glob("*.json")), *sorted(model.glob("*.safetensors"))]:
        digest.update(path.read_bytes())
    out = cache / "warm_start" / digest.hexdigest()[:16]
    if (out / "config.json").is_file():
        return out
    steps = f"{config.steps} steps of {config.rows} examples"
    print(f"warm start on {play}, {steps} (cached afterwards)", flush=True)
    trained = Recipe(
        steps=config.steps, batch=config.rows, lr=config.lr, warmup=config.warmup, dtype=DTYPE,
        cooldown=int(cooldown * config.steps),
    )  # fmt: skip
    try:
        in_subprocess(fine_tune, model, examples(config.steps * config.rows), out, trained, threads)
    except Killed:
        raise MemoryError(
            "the warm start's process was killed, most likely for memory: free some, or set"
            " warm_start.rows lower"
        ) from None
    return out
