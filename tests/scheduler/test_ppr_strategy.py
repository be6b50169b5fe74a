"""PPR's rounds against scripted services: what is judged, with what, and after a crash."""

from pathlib import Path
from typing import Any

import pytest

from coppice.scheduler.growth.strategies import ppr
from coppice.wire.messages import JudgedTurn, Judgement, JudgeRequest, JudgeResult, Turn
from tests.scheduler.test_strategies import BAD, GOOD, RIGHT, Services, Stage

FOUND = "\n<information>Doc 1(Title: Bulgaria) Capital: Sofia</information>\n"


class Judged(Services):
    """Gives every turn the next of ``scores``; None is an invalid judgement. Keeps what it was
    shown."""

    def __init__(self, stage: Stage, scores: list[float | None]):
        super().__init__(stage.services.text, stage.services.script)
        self.scores, self.shown = scores, list[JudgedTurn]()

    async def call(self, service: str, request: Any, **settings: Any) -> Any:
        if service != "judge.pprm":
            return await super().call(service, request, **settings)
        assert isinstance(request, JudgeRequest)
        self.shown += request.turns
        scores = [self.scores.pop(0) for _ in request.turns]
        unread = Judgement({}, ["process"], "no score block")
        return JudgeResult([Judgement({"process": s}) if s is not None else unread for s in scores])


def judged_stage(folder: Path, llama: Path, says: Any, scores: Any, budget: int = 3) -> Stage:
    stage = Stage(folder, llama, [[said] for said in says], budget=budget, judge="pprm")
    stage.services = Judged(stage, scores)
    stage.use(dispatcher=stage.services)
    return stage


async def ran(
    tmp_path: Path, llama: Path, says: list[str], scores: list[float | None], budget: int = 3
) -> tuple[Stage, list[Turn]]:
    """A stage on which PPR has grown its tree, and the group."""
    stage = judged_stage(tmp_path, llama, says, scores, budget)
    await stage.grow(ppr)
    (group,) = stage.groups
    return stage, group


async def test_turns_are_judged_with_what_their_search_found(tmp_path: Path, llama: Path) -> None:
    stage, group = await ran(tmp_path, llama, [GOOD, BAD, RIGHT], [0.5, None])
    assert [turn.scores.get("process") for turn in group] == [0.5, None, None]
    assert [turn.scores.get("judge_valid") for turn in group] == [1.0, 0.0, None]
    assert (group[-1].scores["outcome"], stage.counts["invalid_judgements"]) == (1, 1)
    shown = [(turn.transcript, turn.response, turn.observation) for turn in stage.services.shown]
    assert shown == [("", GOOD, FOUND), (GOOD + FOUND, BAD, FOUND)]


async def test_the_budget_ends_the_rounds_without_an_answer(tmp_path: Path, llama: Path) -> None:
    _, group = await ran(tmp_path, llama, [GOOD, GOOD], [0.5], budget=2)
    assert [turn.scores.get("process") for turn in group] == [0.5, None]
    # the one of the final generation counts too (methods.md 2.4)
    assert (group[-1].scores["outcome"], group[-1].scores["searches"]) == (0, 2)


@pytest.mark.parametrize("kept", [2, 3, 4, 5])
async def test_a_tree_cut_off_anywhere_ends_with_every_turn_judged_once(
    tmp_path: Path, llama: Path, kept: int
) -> None:
    (tmp_path / "whole").mkdir()
    whole, _ = await ran(tmp_path / "whole", llama, [GOOD, BAD, RIGHT], [0.5, 1.0])
    nodes = list(whole.tree.nodes.values())[:kept]
    for node in nodes[-2:]:  # their judgements were on the way
        node.scores = {"valid": 1.0} if node.kind == "action" else {}
    left = [BAD, RIGHT] if kept < 4 else [RIGHT]
    stage = judged_stage(tmp_path, llama, left, [0.25] * 3)
    for node in nodes:
        stage.tree.put(node)
    await stage.grow(ppr)
    (group,) = stage.groups
    assert [turn.scores["process"] for turn in group[:-1]] == [0.25 if kept < 4 else 0.5, 0.25]
    assert [turn.turn for turn in group] == [1, 2, 3]
