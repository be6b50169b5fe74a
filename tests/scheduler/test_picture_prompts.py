"""Pictures from the environment to the engine and the learner: tokens, journal, resume, messages."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.common import vision
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.rollouts import outcomes, position_before
from coppice.scheduler.growth.services import Shop
from coppice.scheduler.growth.strategies import chain
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.scheduler.ledger.stream import Stream
from coppice.wire import arrays
from coppice.wire.messages import GenerateRequest, GenerateResult, Request, Sample, TrainGroup, Turn
from tests.pictures import Colours, squares

GOAL = squares(100, 2, 3)


class Services:
    """An engine that says a few letters, and keeps the requests as they arrive over the wire."""

    def __init__(self, text: Text):
        self.text, self.requests = text, list[GenerateRequest]()
        self.rng = random.Random(0)

    async def call(self, service: str, request: GenerateRequest, **_: Any) -> GenerateResult:
        frames = arrays.encode(Request(1, service, 1.0), request)
        self.requests.append(
            arrays.decode_body([bytes(frame) for frame in frames], GenerateRequest)
        )
        tokens = [self.text.encode("a" * self.rng.randint(1, 4)) for _ in range(request.n)]
        zeros = [(np.zeros(len(t), np.float32), np.zeros(len(t), np.int32)) for t in tokens]
        return GenerateResult(
            [Sample(t, *z, "stop") for t, z in zip(tokens, zeros, strict=True)], 0, 0
        )


class Stage:
    def __init__(self, run: Path, model: Path):
        self.journal, self.text = Journal(run / "journal"), Text(str(model))
        self.services: Any = Services(self.text)
        self.groups: list[list[Turn]] = []
        self.settings = msgspec.structs.replace(SchedulerConfig(), judge="none")
        self.shop = Shop(
            self.services,
            self.journal,
            self.text,
            Colours(turns=3),
            self.settings,
            Counter(),
            self._emit,
        )

    def _emit(self, tree: Tree, turns: list[Turn]) -> None:
        self.journal.save_group(tree, len(self.groups), turns)
        self.groups.append(turns)

    async def grow(self, tree: Tree) -> Context:
        context = Context(self.shop, self.shop.environment.task(3), tree, random.Random(1))  # pyright: ignore
        await context.plant()
        await chain.grow(tree, context)
        return context


@pytest.fixture
def stage(tmp_path: Path, seeing: Path) -> Stage:
    stage = Stage(tmp_path, seeing)
    stage.journal.start_tree(Tree(0, "colours-3"), 0, 0)
    return stage


def test_a_placeholder_becomes_the_tokens_of_its_picture(seeing: Path) -> None:
    text = Text(str(seeing))
    messages = Colours().prompt(Colours().task(3), Colours().initial(Colours().task(3)))
    shown = text.prompt(messages).replace("\x1e", "|")
    assert shown == (
        "<|user|>From<|vision_start|><|image_pad|><|vision_end|>to|<|vision_start|><|image_pad|><|vision_end|>how?<|assistant|>"
    )
    tokens = text.encode(shown, [(1, squares(100, 2, 3)), (7, squares(3))])
    assert [(run.number, run.end - run.start) for run in vision.runs(tokens)] == [(1, 6), (7, 4)]
    kept = tokens[tokens >= 0]
    assert text.tokenizer.decode(kept.tolist(), skip_special_tokens=False) == shown.replace(
        "<|image_pad|>", ""
    )
    assert text.encode(shown).tolist().count(262) == 2
    with pytest.raises(ValueError, match="a prompt of 1 pictures has 2 placeholders"):
        text.encode(shown, [(1, GOAL)])


def test_parts_of_text_alone_are_the_text_for_every_model(seeing: Path, llama: Path) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for folder in (seeing, llama):
        assert (
            Text(str(folder)).prompt([{"role": "user", "content": parts}])
            == "<|user|>ab<|assistant|>"
        )


def test_a_model_that_reads_text_only_is_refused(llama: Path) -> None:
    with pytest.raises(
        ValueError, match="cannot read: expected a model of type qwen2_vl or qwen2_5_vl"
    ):
        Text(str(llama)).prompt(
            Colours().prompt(Colours().task(1), Colours().initial(Colours().task(1)))
        )


async def test_every_request_has_the_pictures_of_its_prefix_and_no_others(stage: Stage) -> None:
    tree = Tree(0, "colours-3")
    await stage.grow(tree)
    assert len(stage.services.requests) == 3
    for request, node in zip(stage.services.requests, tree.actions(), strict=True):
        prompt = tree.parent(node)
        assert prompt is not None
        shown = [run.number for run in vision.runs(request.tokens)]
        assert len(shown) == 2 == len(set(request.images))
        assert [request.images[number] for number in shown] == [GOAL, squares(prompt.state["seed"])]
        assert request.tokens.tolist() == tree.prefix(prompt).tolist()
    root = tree.nodes[0]
    assert stage.journal.pictures(root.tokens) == {1: GOAL}
    assert "<|image_pad|>" in root.text


async def test_a_picture_is_stored_once_and_keeps_its_number_after_a_restart(
    stage: Stage, tmp_path: Path, seeing: Path
) -> None:
    tree = Tree(0, "colours-3")
    await stage.grow(tree)
    first = {n: stage.journal.pictures(node.tokens) for n, node in tree.nodes.items()}
    stage.journal.close()
    again = Stage(tmp_path, seeing)
    (row,) = again.journal.trees()
    back = again.journal.tree(row)
    assert {n: again.journal.pictures(node.tokens) for n, node in back.nodes.items()} == first
    assert all((node.tokens == tree.nodes[n].tokens).all() for n, node in back.nodes.items())
    assert again.journal.picture(GOAL) == 1
    fresh = again.journal.picture(squares(77))
    assert fresh not in {number for pictures in first.values() for number in pictures}
    assert again.journal.picture(squares(77)) == fresh
    readonly = Journal(tmp_path / "journal", readonly=True)
    assert readonly.pictures(back.nodes[0].tokens) == {1: GOAL}


async def test_continuations_outside_the_tree_see_the_pictures_of_their_states(
    stage: Stage,
) -> None:
    tree = Tree(0, "colours-3")
    context = await stage.grow(tree)
    stage.services.requests.clear()
    action = tree.actions()[0]
    values = await outcomes(context, position_before(context, action), 4)
    assert len(values) == 4
    for request in stage.services.requests:
        shown = [run.number for run in vision.runs(request.tokens)]
        assert sorted(shown) == sorted(request.images)
        assert request.images[shown[0]] == GOAL


async def test_the_learner_gets_each_picture_with_the_node_that_shows_it(stage: Stage) -> None:
    tree = Tree(0, "colours-3")
    await stage.grow(tree)
    sent = list[TrainGroup]()

    class Learner:
        async def call(self, service: str, request: TrainGroup, **_: Any) -> None:
            frames = arrays.encode(Request(1, service, 1.0), request)
            sent.append(arrays.decode_body([bytes(frame) for frame in frames], TrainGroup))
            raise InterruptedError

    learner: Any = Learner()
    stream = Stream(learner, stage.journal, lambda _: None)  # pyright: ignore
    with pytest.raises(InterruptedError):
        await stream._send(tree, 0, stage.groups[0])
    (group,) = sent
    by_id = {node.id: node for node in group.nodes}
    assert by_id[0].images == {1: GOAL}
    for node in group.nodes:
        assert list(node.images) == vision.numbers(node.tokens)
    assert sum(len(node.images) for node in group.nodes) == 4
