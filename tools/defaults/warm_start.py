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

from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.task_files import load_tasks
from coppice.common.atomic import drafted
from coppice.common.process import Killed, in_subprocess
from coppice.judges.evidence import content_words, holds, shown
from coppice.judges.retriever.encoder import Encoder
from coppice.judges.retriever.index import Index
from coppice.learner.fine_tune import Example, Recipe, train
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults.settings import WarmStart

_NEED = (
    "I need to find {query}.",
    "To answer, I must look up {query}.",
    "I should search for {query}.",
    "Let me find {query}.",
)
DTYPE = "float32"
"""Number type of every warm start, so that machines agree. Training in bfloat16 gives a fifth of
the weights other values on another processor. In float32 only the order of sums differs, and after
saving in bfloat16 two of 100,000 weights differ (docs/engines.md)."""
_FOUND = ("The answer is {answer}.", "It says {answer}.", "Now I know: {answer}.")


def traces(
    tasks: Sequence[Task], text: Text, environment: SearchQA, index: Index, count: int,
    config: WarmStart,
) -> list[Example]:  # fmt: skip
    """Return at most ``count`` single turns, shuffled, of episodes in which each search shows what
    it was made for: the next supporting passage, or a gold answer if the task names no passages.
    Raises ValueError if no task has such an episode."""
    rng = random.Random(config.seed)
    several = {both: [task for task in tasks if (task.hops > 1) == both] for both in (False, True)}
    several = {both: rng.sample(own, k=len(own)) for both, own in several.items()}
    examples: list[Example] = []
    while len(examples) < count and any(several.values()):
        wanted = rng.random() < config.two_hop
        task = (several[wanted] or several[not wanted]).pop()
        examples += _episode(task, text, environment, index, rng)
    if not examples:
        raise ValueError(
            f"warm_start.steps: no search with words of a question shows a supporting passage or a"
            f" gold answer, in any of {len(tasks)} questions: check that the corpus holds the"
            " answers and that evidence has its titles and texts, or set it to 0"
        )
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


def queries(question: str, passage: str, seen: Sequence[str]) -> list[str]:
    """Return texts that a reader of ``question`` and of the passages ``seen`` could search for in
    order to find ``passage``: its title, if they name it, with the question's words that it has,
    and all words of the question."""
    title = passage.partition("\n")[0]
    words = [word for word in question.rstrip("?.!").split() if content_words(word)]
    inside = content_words(passage) - content_words(title)
    rest = [word for word in words if content_words(word) <= inside]
    familiar = content_words(" ".join([question, *seen]))
    named = [title] if content_words(title) <= familiar else []
    return [query for query in (" ".join([*named, *rest]), " ".join(words)) if query.strip()]


def _episode(
    task: Task, text: Text, environment: SearchQA, index: Index, rng: random.Random
) -> list[Example]:
    """An episode of templates, or no turn at all if a search shows another thing."""
    written, seen = Written(text, text.prompt(environment.prompt(task))), list[str]()
    for passage in task.evidence or [""]:
        for query in queries(task.question, passage, seen):
            (passages,) = index.search([query], environment.topk)
            result = environment.render(passages)
            if shown(passage, [result]) if passage else holds(result, task.golds):
                break
        else:
            return []
        think = rng.choice(_NEED).format(query=query)
        written.act(f"<think> {think} </think> <search> {query} </search>")
        written.see(result)
        seen.append(result)
    think = rng.choice(_FOUND).format(answer=task.golds[0])
    written.act(f"<think> {think} </think> <answer> {task.golds[0]} </answer>")
    return written.examples


def ensure_warm_start(
    model: Path, sources: Sequence[str], index: Path, encoder: str, environment: SearchQA,
    config: WarmStart, cache: Path, threads: int,
) -> Path:  # fmt: skip
    """Return the model after its traces (``from_play``). sources: of the tasks."""
    tasks, _ = load_tasks(sources)

    def examples(count: int) -> list[Example]:
        torch.set_num_threads(threads)
        found = Index(index, Encoder(encoder, threads))
        return traces(tasks, Text(str(model)), environment, found, count, config)

    recipe = [*environment.shown, msgspec.to_builtins(config), encoder, _NEED, _FOUND, tasks]
    manifest = [index / "manifest.json"]
    return from_play(model, "traces", recipe, manifest, examples, config, cache, threads, 0.0)


COOLDOWN = 0.4
"""The share of a tiny policy's steps, at the end, over which the learning rate falls to 0. Without
it a few per cent of the actions stay unusable."""


def from_play(
    model: Path, play: str, recipe: list[Any], sources: Sequence[Path],
    examples: Callable[[int], Sequence[Example]], config: WarmStart, cache: Path, threads: int,
    cooldown: float = COOLDOWN, packing: bool = False,
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
        cooldown=int(cooldown * config.steps), packing=packing,
    )  # fmt: skip
    try:
        with drafted(out, replace=True) as draft:
            learnt = examples(config.steps * config.rows)
            in_subprocess(train, model, learnt, draft, trained, threads)
    except Killed:
        raise MemoryError(
            "the warm start's process was killed, most likely for memory: free some, or set"
            " warm_start.rows lower"
        ) from None
    return out
