"""The whole loop of Coppice in one process: ``.venv/bin/python examples/one_update.py``. A run uses
the same classes, but engine, judge, scheduler and learner are processes that work at once."""

import asyncio
import itertools
import random
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, set_seed

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.judges.base import Judge
from coppice.learner.config import LearnerConfig, LearnerProcess, LoraConfig
from coppice.learner.model.publish import publish
from coppice.learner.model.ranks import Ranks
from coppice.learner.update.batches import Inbox
from coppice.learner.update.table import build
from coppice.learner.update.trainer import Trainer
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.strategies import slate
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating.in_process import InProcess
from coppice.wire.messages import JudgedTurn, Judgement, LoadRequest, TrainGroup, TreeClosed, Turn

QUESTIONS, CANDIDATES, STEPS = 8, 5, 3


class Number(msgspec.Struct, frozen=True):
    last: int
    turns: int = 0


class Counting(Environment):
    """The policy reads a digit and should say the next one. Then it reads the right one."""

    name, fresh = "counting", False

    def initial(self, task: Task) -> Number:
        return Number(task.seed % 10)

    def prompt(self, task: Task, state: Number) -> list[dict[str, str]]:
        return [{"role": "user", "content": str(state.last)}]

    def read(self, state: Number, text: str) -> Action:
        digit = text.strip().isdigit()
        return Action("move", text, move=(int(text),)) if digit else Action("invalid", text)

    async def step(self, state: Number, action: Action, tools: Tools) -> Transition:
        after, done = Number((state.last + 1) % 10, state.turns + 1), state.turns + 1 == STEPS
        shown = "" if done else f" {after.last}"
        return Transition(after, shown, done, outcome=1.0 if done else None)


class NextDigit(Judge):
    """1 for the next digit, 0 for another one, -1 for no digit."""

    name, columns = "next_digit", ("reward",)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        rewards = list[float]()
        for turn in turns:
            right = (msgspec.convert(turn.state, Number).last + 1) % 10
            rewards.append(-1.0 if turn.move is None else float(turn.move[0] == right))
        return [Judgement({"reward": reward}) for reward in rewards]


def save_model(folder: Path) -> None:
    """Write a random Llama with one layer whose tokens are the ten digits."""
    numbers = {word: number for number, word in enumerate(["<pad>", "</s>", *"0123456789"])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<pad>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()  # pyright: ignore
    words = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")
    words.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    words.save_pretrained(folder)
    set_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(words), eos_token_id=1, pad_token_id=0, num_hidden_layers=1,
        hidden_size=64, intermediate_size=128, num_attention_heads=4,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


async def grow(runtime: Runtime, inbox: Inbox, number: int, version: int) -> None:
    """Grow one tree by SLATE: sample candidates, have them judged, emit them, continue one."""
    tree, task = Tree(number, f"task {number}"), Task(f"task {number}", seed=number)
    runtime.journal.start_tree(tree, number, version)
    context = Context(runtime, task, tree, random.Random(number))
    await context.plant()
    await slate.grow(tree, context, k=CANDIDATES)
    runtime.journal.close_tree(tree)
    inbox.close(TreeClosed(tree.id, tree.groups))


async def main(run: Path, updates: int) -> list[float]:
    """Make ``updates`` updates in folder ``run``. Return the mean reward of each."""
    model = str(run / "model")
    save_model(Path(model))
    engine = LocalEngine(model, ActorsConfig(dtype="float32", max_context=64))
    services: Any = InProcess(engine, [NextDigit()])  # in a run: the dispatcher, with workers
    await services.start()
    learning = LearnerConfig(scheme="slate", lr=1e-2, dtype="float32", lora=LoraConfig(rank=0))
    process = LearnerProcess("learner", str(run), 0, model, QUESTIONS, 1.0, learning)
    trainer, journal = Trainer(process, Ranks(60)), Journal(run / "journal.sqlite")
    inbox, groups = Inbox(QUESTIONS, {}), itertools.count()

    def emit(tree: Tree, turns: list[Turn]) -> None:  # the judged candidates of one step
        tree.groups.append(next(groups))
        journal.save_group(tree, tree.groups[-1], turns)
        path = {node.id: node for turn in turns for node in tree.path(tree.nodes[turn.node])}
        sent = [node.travels({}) for node in path.values()]
        inbox.add(TrainGroup(tree.groups[-1], tree.id, sent, turns))

    settings = SchedulerConfig(judge="next_digit", max_action_tokens=1, budget=STEPS)
    runtime = Runtime(services, journal, Text(model), Counting(), settings, Counter(), emit)
    rewards = list[float]()
    for update in range(updates):
        # 1. Trees grow, here one after the other; in a run they grow at once, during the updates.
        for number in range(update * QUESTIONS, (update + 1) * QUESTIONS):
            await grow(runtime, inbox, number, trainer.version)
        batch = inbox.take(inbox.ready() or [], trainer.version)
        # 2. A scheme is a function from the table of turns to one advantage per token.
        table = build(batch.groups, {(tree, node.id): node for tree, node in batch.nodes})
        advantages = trainer.scheme(table).advantages
        rewards.append(float(table.column("reward").mean()))
        # 3. The learner packs the paths into a forest, computes each node once, and steps.
        trainer.update(batch)
        # 4. The engine loads the weights of the new version and proves that they arrived.
        new = publish(trainer.policy, trainer.version, run, keep=1)
        await engine.load(LoadRequest(new.version, new.path, new.digest))
        told = f"mean reward {rewards[-1]:+.2f}, advantages up to {abs(advantages).max():.2f}"
        print(f"version {new.version:2}: {told}")
    await services.close()
    return rewards


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(Path(folder), int(sys.argv[1]) if sys.argv[1:] else 20))
