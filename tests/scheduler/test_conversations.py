"""Conversations grow in one tree: both sides stand in it, the trained side's tokens alone are
trained, and a half-grown tree goes on."""

import asyncio
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.actors.environments.sotopia.environment import Sotopia
from coppice.judges.sotopia import SotopiaRules
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.rollouts import outcomes, position_before
from coppice.scheduler.growth.services import Shop
from coppice.scheduler.growth.strategies import full
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import (
    GenerateRequest,
    GenerateResult,
    Judgement,
    JudgeRequest,
    JudgeResult,
    Sample,
    SpeakRequest,
    SpeakResult,
    Turn,
)

LIMIT = 5


class Services:
    """The real rule judge; whoever speaks names a price, which depends on who speaks. The policy
    samples at most ``left`` replies."""

    def __init__(self, text: Text):
        self.text, self.left, self.judged, self.invalid = text, 10**6, 0, False
        self.asked: list[tuple[str, str]] = []

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        if isinstance(request, JudgeRequest):
            assert service == "judge.sotopia_rules"
            self.judged += 1
            if self.invalid:
                return JudgeResult([Judgement({}, ["outcome", "goal"], "unreadable")])
            return JudgeResult(await SotopiaRules().score(request.turns))
        if isinstance(request, SpeakRequest):
            self.asked.append((service, request.messages[0]["content"]))
            return SpeakResult(self._reply("42 euros"))
        assert isinstance(request, GenerateRequest)
        if not self.left:
            raise InfrastructureFault("the actor is gone")
        self.left -= 1
        prompt = self.text.decode(request.tokens)
        self.asked.append((service, prompt))
        tokens = self.text.encode(
            self._reply("42 euros" if "your turn, Tobin" in prompt else "43 euros")
        )
        sample = Sample(
            tokens, np.full(len(tokens), -1, np.float32), np.zeros(len(tokens), np.int32), "stop"
        )
        return GenerateResult([sample] * request.n, len(request.tokens), 0)

    def _reply(self, words: str) -> str:
        return json.dumps({"action_type": "speak", "argument": words})


class Stage:
    """A context over those services, for the seller of the lamp against a buyer."""

    def __init__(self, folder: Path, llama: Path, seed: int = 0, **options: Any):
        self.environment = Sotopia(turns=LIMIT, **options)
        text = Text(str(llama))
        self.services: Any = Services(text)
        self.groups: list[list[Turn]] = []
        self.counts: Counter[str] = Counter()
        self.settings = SchedulerConfig(judge="none")
        self.journal = Journal(folder / "journal")
        self.shop = Shop(
            self.services,
            self.journal,
            text,
            self.environment,
            self.settings,
            self.counts,
            self._emit,
            most=8,
        )
        self.task = self.environment.task(seed)
        self.tree = Tree(0, self.task.id)
        self.journal.start_tree(self.tree, 0, 0)

    def _emit(self, tree: Tree, turns: list[Turn]) -> None:
        self.journal.save_group(tree, len(self.groups), turns)
        self.groups.append(turns)

    def context(self, tree: Tree | None = None) -> Context:
        return Context(self.shop, self.task, tree or self.tree, random.Random(1))

    async def grow(self, tree: Tree | None = None, k: int = 2) -> None:
        context = self.context(tree)
        await context.plant()
        await full.grow(tree or self.tree, context, k)

    def reread(self) -> Tree:
        (row,) = self.journal.trees()
        return self.journal.tree(row)


def told(tree: Tree, trajectory: int) -> list[str]:
    """What the nodes of a trajectory say, in order, without the prompts."""
    nodes = [n for n in tree.nodes.values() if n.trajectory == trajectory and n.kind != "prompt"]
    return [json.loads(n.text)["argument"] if n.kind == "action" else n.text for n in nodes]


async def test_both_speakers_are_in_the_tree_and_the_trained_side_alone_is_trained(
    tmp_path: Path, llama: Path
) -> None:
    stage = Stage(tmp_path, llama)
    await stage.grow()
    partner = 'Tobin Hask said: "42 euros"'
    for trajectory in (0, 1):
        assert told(stage.tree, trajectory) == [
            "43 euros", partner, "43 euros", partner, "43 euros", "The conversation is over."
        ]  # fmt: skip
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


async def test_a_served_partner_is_asked_by_its_name_and_begins_if_it_is_the_first(
    tmp_path: Path, llama: Path
) -> None:
    stage = Stage(tmp_path, llama, partner="ann", side="second")
    await stage.grow(k=1)
    speakers = [service for service, _ in stage.services.asked]
    assert speakers == ["speaker.ann", "generate"] * 2 + ["speaker.ann"]
    first = next(n for n in stage.tree.nodes.values() if n.kind == "prompt" and n.parent == 0)
    assert 'the other person said: "42 euros"' in first.text
    # both said 42 euros: the buyer pays no more than 45
    assert stage.groups[0][-1].scores["goal"] == 10


@pytest.mark.parametrize("left", range(1, 10))
async def test_a_half_grown_tree_goes_on_where_the_journal_ends(
    tmp_path: Path, llama: Path, left: int
) -> None:
    stage = Stage(tmp_path, llama)
    stage.services.left = left
    with pytest.raises(InfrastructureFault):
        await stage.grow()
    half = stage.reread()
    kept = [n.id for n in half.nodes.values() if n.kind == "action"]
    stage.services.left = 10**6
    await stage.grow(half)
    whole = stage.reread()
    for trajectory in (0, 1):
        assert [len(re.findall("euros", text)) for text in told(whole, trajectory)] == [
            1,
            1,
            1,
            1,
            1,
            0,
        ]
    assert set(kept) <= {turn.node for turn in stage.groups[0]}


async def test_after_a_crash_before_the_judgement_the_partner_is_not_asked_again(
    tmp_path: Path, llama: Path
) -> None:
    stage = Stage(tmp_path, llama, partner="ann")
    stage.environment.turns = 2
    reached = asyncio.Event()
    call = stage.services.call

    async def stuck(service: str, request: Any, **settings: Any) -> Any:
        if isinstance(request, JudgeRequest):
            stage.journal.save_nodes(stage.tree)  # as another trajectory's transaction does
            reached.set()
            await asyncio.Event().wait()
        return await call(service, request, **settings)

    stage.services.call = stuck
    growing = asyncio.create_task(stage.grow(k=1))
    await reached.wait()
    growing.cancel()
    await asyncio.gather(growing, return_exceptions=True)
    stage.services.call = call
    asked = len(stage.services.asked)
    half = stage.reread()
    assert told(half, 0)[1].startswith("Tobin Hask said") and not stage.groups
    await stage.grow(half, k=1)
    assert len(stage.services.asked) == asked
    assert told(half, 0) == ["43 euros", 'Tobin Hask said: "42 euros"\nThe conversation is over.']
    assert "goal" in stage.groups[0][0].scores


async def test_a_conversation_without_a_valid_outcome_is_counted_and_not_trained(
    tmp_path: Path, llama: Path
) -> None:
    stage = Stage(tmp_path, llama)
    stage.services.invalid = True
    await stage.grow()
    assert stage.groups == []
    assert stage.counts["invalid_outcomes"] == 2
    last = stage.tree.actions(0)[-1]
    assert last.invalid == ["goal", "outcome"] and last.notes == {"sotopia_rules": "unreadable"}
    assert "outcome" not in last.scores


async def test_a_continuation_is_judged_by_the_whole_conversation(
    tmp_path: Path, llama: Path
) -> None:
    stage = Stage(tmp_path, llama, side="second", partner="ann")
    await stage.grow(k=1)
    context = stage.context()
    context.state_type = type(stage.environment.initial(stage.task))
    values = await outcomes(context, position_before(context, stage.tree.actions(0)[-1]), 3)
    assert values == [1.0] * 3
    assert msgspec.to_builtins(context.state(stage.tree.actions(0)[-1]))["trained"] == 1
