"""Pictures from the environment to the engine and the learner."""

import random
from pathlib import Path
from typing import Any

import pytest

from coppice.common import vision
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.strategies import chain
from coppice.scheduler.growth.text import Text
from coppice.wire import arrays
from coppice.wire.messages import GenerateRequest, GenerateResult, Request
from tests.agent_stage import Staged
from tests.pictures import Colours, squares
from tests.scheduler.test_strategies import sample

GOAL = squares(100, 2, 3)


class Services:
    """An engine that says a few letters, and keeps the requests as they arrive over the wire."""

    def __init__(self, text: Text):
        self.text, self.requests = text, list[GenerateRequest]()
        self.rng = random.Random(0)

    async def call(self, service: str, request: GenerateRequest, **_: Any) -> GenerateResult:
        frames = arrays.encode(Request(1, service, 1.0), request)
        self.requests.append(arrays.decode_body([bytes(each) for each in frames], GenerateRequest))
        said = ["a" * self.rng.randint(1, 4) for _ in range(request.n)]
        return GenerateResult([sample(self.text, each) for each in said], 0, 0)


def test_a_placeholder_becomes_the_tokens_of_its_picture(seeing: Path) -> None:
    text = Text(str(seeing))
    messages = Colours().prompt(Colours().task(3), Colours().initial(Colours().task(3)))
    shown = text.prompt(messages).replace("\x1e", "|")
    picture = "<|vision_start|><|image_pad|><|vision_end|>"
    assert shown == f"<|user|>From{picture}to|{picture}how?<|assistant|>"
    tokens = text.encode(shown, [(1, squares(100, 2, 3)), (7, squares(3))])
    assert [(run.number, run.end - run.start) for run in vision.runs(tokens)] == [(1, 6), (7, 4)]
    kept = tokens[tokens >= 0]
    decoded = text.tokenizer.decode(kept.tolist(), skip_special_tokens=False)
    assert decoded == shown.replace("<|image_pad|>", "")
    assert text.encode(shown).tolist().count(262) == 2
    with pytest.raises(ValueError, match="a prompt of 1 pictures has 2 placeholders"):
        text.encode(shown, [(1, GOAL)])


async def test_every_request_has_the_pictures_of_its_prefix_and_no_others(
    tmp_path: Path, seeing: Path
) -> None:
    colours, text = Colours(turns=3), Text(str(seeing))
    services, settings = Services(text), SchedulerConfig(judge="none")
    stage = Staged(tmp_path / "journal", text, services, colours, colours.task(3), settings)
    tree = await stage.grow(chain)
    assert len(services.requests) == 3
    for request, node in zip(services.requests, tree.actions(), strict=True):
        prompt = tree.parent(node)
        assert prompt is not None
        shown = [run.number for run in vision.runs(request.tokens)]
        assert len(shown) == 2 == len(set(request.images))
        assert [request.images[number] for number in shown] == [GOAL, squares(prompt.state["seed"])]
        assert request.tokens.tolist() == tree.prefix(prompt).tolist()
    root = tree.nodes[0]
    assert stage.journal.pictures(root.tokens) == {1: GOAL}
    assert "<|image_pad|>" in root.text
