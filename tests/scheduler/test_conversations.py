"""Conversations grow in one tree: both sides stand in it, the trained side's tokens alone are
trained, and a half-grown tree goes on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from coppice.actors.environments.sotopia.environment import Sotopia
from coppice.judges.sotopia import SotopiaRules
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.strategies import full
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.wire import messages as wire
from coppice.wire.faults import InfrastructureFault
from tests.agent_stage import Staged
from tests.scheduler.test_strategies import sample

LIMIT = 5


class Services:
    """The real rule judge; whoever speaks names a price, which depends on who speaks. The policy
    samples at most ``left`` replies."""

    def __init__(self, text: Text):
        self.text, self.left = text, 10**6
        self.asked: list[tuple[str, str]] = []

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        if isinstance(request, wire.JudgeRequest):
            assert service == "judge.sotopia_rules"
            return wire.JudgeResult(await SotopiaRules().score(request.turns))
        if isinstance(request, wire.SpeakRequest):
            self.asked.append((service, request.messages[0]["content"]))
            return wire.SpeakResult(self._reply("42 euros"))
        assert isinstance(request, wire.GenerateRequest)
        if not self.left:
            raise InfrastructureFault("the actor is gone")
        self.left -= 1
        prompt = self.text.decode(request.tokens)
        self.asked.append((service, prompt))
        price = "42 euros" if "your turn, Tobin" in prompt else "43 euros"
        said = sample(self.text, self._reply(price))
        return wire.GenerateResult([said] * request.n, len(request.tokens), 0)

    def _reply(self, words: str) -> str:
        return json.dumps({"action_type": "speak", "argument": words})


def staged(folder: Path, llama: Path, **options: Any) -> Staged:
    """A context over those services, for the seller of the lamp against a buyer."""
    environment, text = Sotopia(turns=LIMIT, **options), Text(str(llama))
    world = text, Services(text), environment, environment.task(0), SchedulerConfig(judge="none")
    return Staged(folder / "journal", *world, most=8)


def told(tree: Tree, trajectory: int) -> list[str]:
    """What the nodes of a trajectory say, in order, without the prompts."""
    nodes = [n for n in tree.nodes.values() if n.trajectory == trajectory and n.kind != "prompt"]
    return [json.loads(n.text)["argument"] if n.kind == "action" else n.text for n in nodes]


async def test_both_speakers_stand_in_the_tree_one_is_trained(tmp_path: Path, llama: Path) -> None:
    stage = staged(tmp_path, llama)
    await stage.grow(full, k=2)
    turn = ["43 euros", 'Tobin Hask said: "42 euros"']
    for trajectory in (0, 1):
        expected = [*turn * 2, turn[0], "The conversation is over."]
        assert told(stage.tree, trajectory) == expected
    (group,) = stage.groups
    assert [turn.turn for turn in group] == [1, 2, 3] * 2
    assert all("43 euros" in stage.tree.nodes[turn.node].text for turn in group)
    assert all(turn.scores["valid"] == 1 for turn in group)
    last = [turn.scores for turn in group if turn.turn == 3]
    assert [(s["goal"], s["outcome"]) for s in last] == [(0, 0)] * 2 and "secret" not in last[0]
    assert not any("goal" in turn.scores for turn in group if turn.turn < 3)
    # what is counted of search trajectories
    assert "turns" not in last[0] and "searches" not in last[0]
    assert stage.counts["spoken_replies"] == 4


async def test_a_served_partner_is_asked_by_name_and_may_begin(tmp_path: Path, llama: Path) -> None:
    stage = staged(tmp_path, llama, partner="ann", side="second")
    await stage.grow(full, k=1)
    speakers = [service for service, _ in stage.services.asked]
    assert speakers == ["speaker.ann", "generate"] * 2 + ["speaker.ann"]
    first = next(n for n in stage.tree.nodes.values() if n.kind == "prompt" and n.parent == 0)
    assert 'the other person said: "42 euros"' in first.text
    # both said 42 euros: the buyer pays no more than 45
    assert stage.groups[0][-1].scores["goal"] == 10


@pytest.mark.parametrize("left", range(1, 10))
async def test_a_half_grown_conversation_goes_on(tmp_path: Path, llama: Path, left: int) -> None:
    stage = staged(tmp_path, llama)
    stage.services.left = left
    with pytest.raises(InfrastructureFault):
        await stage.grow(full, k=2)
    half = stage.reread()
    kept = [n.id for n in half.nodes.values() if n.kind == "action"]
    stage.services.left = 10**6
    await stage.grow(full, half, k=2)
    whole = stage.reread()
    for trajectory in (0, 1):
        prices = [len(re.findall("euros", text)) for text in told(whole, trajectory)]
        assert prices == [1, 1, 1, 1, 1, 0]
    assert set(kept) <= {turn.node for turn in stage.groups[0]}
