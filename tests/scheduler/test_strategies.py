"""Strategies against scripted services; the real ones run in tests/e2e."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.actors.environments.base import Task, TurnedAway
from coppice.actors.environments.others.in_process import Gymnasium
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.learner.schemes import slate as slate_scheme
from coppice.learner.update.table import TurnTable
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.rollouts import outcomes, position_before
from coppice.scheduler.growth.strategies import chain, full, ppr, slate
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.wire import messages as wire
from coppice.wire.faults import DataFault
from tests.agent_stage import Staged

GOOD, BAD = (f"<think> t </think> <search> {query} </search>" for query in ("good", "bad"))
RIGHT, WRONG = (f"<think> t </think> <answer> {text} </answer>" for text in ("Sofia", "Rome"))
WORTH = {"good": 1.0, "bad": -1.0, "Sofia": 1.0, "Rome": -1.0}
NOTHING = "I do not know."
TASK = Task("t1", "What is the capital of Bulgaria?", ["Sofia"])


def sample(text: Text, said: str, version: int = 0) -> wire.Sample:
    """A sample of a text, with log-probabilities of -1."""
    tokens = text.encode(said)
    logprobs, versions = (np.full(len(tokens), value) for value in (-1, version))
    return wire.Sample(tokens, logprobs.astype(np.float32), versions.astype(np.int32), "stop")


class Services:
    """A dispatcher whose engine says what the script holds, one list of texts a generate call."""

    def __init__(self, text: Text, script: list[list[str]], invalid: list[str] | None = None):
        self.text, self.script, self.invalid = text, script, invalid or []
        self.requests: list[Any] = []

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        self.requests.append(request)
        if isinstance(request, wire.GenerateRequest):
            texts = self.script.pop(0)
            assert len(texts) == request.n
            samples = [sample(self.text, said) for said in texts]
            return wire.GenerateResult(samples, len(request.tokens), 0)
        if isinstance(request, wire.RetrieveRequest):
            return wire.RetrieveResult([[wire.Passage("1", "Bulgaria", "Capital: Sofia", 1.0)]])
        assert isinstance(request, wire.JudgeRequest)
        judged = self._outcome if service == "judge.exact_match" else self._judge
        return wire.JudgeResult([judged(turn) for turn in request.turns])

    def _outcome(self, turn: Any) -> wire.Judgement:
        if "outcome" in self.invalid:
            return wire.Judgement({}, ["outcome"])
        return wire.Judgement({"outcome": float(turn.answer == "Sofia"), "f1": 0.0})

    def _judge(self, turn: Any) -> wire.Judgement:
        column = "query" if turn.answer is None else "answer"
        scores = {"think": 0.0, column: WORTH[str(turn.query or turn.answer)]}
        invalid = [name for name in scores if name in self.invalid]
        return wire.Judgement({k: v for k, v in scores.items() if k not in invalid}, invalid)


class Stage(Staged):
    """A context over scripted services."""

    services: Any

    def __init__(
        self,
        tmp_path: Path,
        llama: Path,
        script: list[list[str]],
        invalid: list[str] | None = None,
        budget: int = 2,
        **options: Any,
    ):
        text, settings = Text(str(llama)), SchedulerConfig(budget=budget, **options)
        world = Services(text, script, invalid), SearchQA("short", 1), TASK
        super().__init__(tmp_path / "journal", text, *world, settings)
        self.context = self.anew(seed=0)

    def use(self, **changes: Any) -> None:
        """Begin the context anew with these changes of the runtime."""
        self.runtime = msgspec.structs.replace(self.runtime, **changes)
        self.context = self.anew(seed=0)

    async def grow(self, strategy: Any, tree: Tree | None = None, **options: Any) -> Tree:
        await self.context.plant()
        options = {"k": 3, **options} if strategy is slate else options
        await strategy.grow(self.tree, self.context, **options)
        return self.tree

    def rewards(self) -> list[list[float]]:
        return [[turn.scores["reward"] for turn in group] for group in self.groups]


async def test_slate_emits_all_candidates_and_continues_one(tmp_path: Path, llama: Path) -> None:
    stage = Stage(tmp_path, llama, [[GOOD, BAD, NOTHING], [RIGHT, RIGHT, RIGHT]])
    await stage.grow(slate)
    assert stage.rewards() == [[1, -1, -2], [1, 1, 1]]
    assert [turn.turn for group in stage.groups for turn in group] == [1, 1, 1, 2, 2, 2]
    tip = stage.tree.tip()
    assert tip.scores["outcome"] == 1
    kinds = [node.kind for node in stage.tree.path(tip)]
    assert kinds == ["prompt", "action", "observation", "action"]


async def test_a_used_up_budget_forces_an_untrained_answer(tmp_path: Path, llama: Path) -> None:
    stage = Stage(tmp_path, llama, [[GOOD] * 3, [BAD] * 3, [" Sofia </answer>"]])
    await stage.grow(slate)
    assert len(stage.groups) == 2
    tip = stage.tree.tip()
    assert tip.forced
    assert tip.scores["outcome"] == 1
    assert "reward" not in tip.scores
    assert tip.id not in {turn.node for group in stage.groups for turn in group}


async def test_slate_selects_by_the_advantage_that_it_trains(tmp_path: Path, llama: Path) -> None:
    stage = Stage(tmp_path, llama, [[GOOD, BAD, NOTHING], [RIGHT] * 3])
    await stage.grow(slate, ddof=0, eps=0.5)
    zero, one = np.zeros(3, np.int64), np.ones(3, np.int64)
    reward = {"reward": np.array(stage.rewards()[0])}
    table = TurnTable(zero, zero, np.arange(3), one, one, reward)
    trained = slate_scheme.advantages(table, ddof=0, eps=0.5)
    np.testing.assert_allclose([turn.scores["advantage"] for turn in stage.groups[0]], trained)


class Anew(SearchQA):
    """Each turn is a fresh prompt: rules, where they end, and the number of steps."""

    fresh = True
    rules = "Count.\x1e"

    def prompt(self, task: Task, state: Any = None) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"{self.rules} Now {len(state.steps)}."}]


@pytest.mark.parametrize(("rules", "shared"), [("Count.\x1e", True), ("Count.", False)])
async def test_a_fresh_prompt_is_shown_whole_where_nothing_says_what_turns_share(
    tmp_path: Path, llama: Path, rules: str, shared: bool
) -> None:
    stage, environment = Stage(tmp_path, llama, [[BAD], [RIGHT]]), Anew("short", 1)
    environment.rules = rules
    stage.use(environment=environment)
    tree = await stage.grow(chain)
    assert tree.nodes[0].text.endswith("Count.") == shared
    shown = [tree.nodes[0].text + place.text for place in map(tree.parent, tree.actions()) if place]
    assert [text.partition("Count.")[2][:7] for text in shown] == [" Now 0.", " Now 1."]


async def test_a_fresh_prompt_whose_shared_part_changes_is_a_fault_of_its_task(
    tmp_path: Path, llama: Path
) -> None:
    stage, environment = Stage(tmp_path, llama, [[BAD], [RIGHT]]), Anew("short", 1)
    stage.use(environment=environment)
    await stage.context.plant()
    environment.rules = "Count on.\x1e"
    with pytest.raises(DataFault, match=r"prompt of search_qa has '.*Count on\.' before SPLIT"):
        await chain.grow(stage.tree, stage.context)


@pytest.mark.parametrize("strategy", [chain, ppr])
async def test_an_environment_that_ends_no_episode_is_a_fault_of_its_task(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch, strategy: Any
) -> None:
    monkeypatch.setattr("coppice.scheduler.growth.context.MOST_TURNS", 3)
    stage = Stage(tmp_path, llama, [[BAD]] * 4, budget=9)
    with pytest.raises(DataFault, match="an episode of search_qa has 3 turns and goes on"):
        await stage.grow(strategy)


class Ending(SearchQA):
    """Its episodes are dropped at their second turn."""

    async def step(self, state: Any, action: Any, tools: Any) -> Any:
        if action.kind == "answer":
            raise TurnedAway("its request was refused")
        return await super().step(state, action, tools)


class Slow(Services):
    """Its judge of turns answers after the environment."""

    async def call(self, service: str, request: Any, **settings: Any) -> Any:
        if isinstance(request, wire.JudgeRequest):
            await asyncio.sleep(0.05)
        return await super().call(service, request, **settings)


@pytest.mark.parametrize("strategy", [chain, full, ppr])
async def test_a_dropped_episode_is_not_trained_though_its_judge_comes_later(
    tmp_path: Path, llama: Path, strategy: Any
) -> None:
    stage = Stage(tmp_path, llama, [[GOOD], [RIGHT]], budget=3)
    services = Slow(stage.services.text, stage.services.script)
    stage.use(environment=Ending("short", 1), dispatcher=services)
    options: dict[str, Any] = {"k": 1} if strategy is full else {}
    await stage.grow(strategy, **options)
    assert stage.tree.actions()[-1].notes["dropped"] == "its request was refused"
    assert stage.groups == []


async def test_a_question_with_the_separator_of_fresh_prompts_keeps_its_end(
    tmp_path: Path, llama: Path
) -> None:
    services = Stage(tmp_path, llama, []).context.services
    services.task = Task("t1", "Which capital\x1eis it, in Bulgaria?", ["Sofia"])
    head, tail = services.rendered(services.environment.initial(services.task))
    assert "Which capitalis it, in Bulgaria?" in head.text
    assert tail.text == ""


async def test_candidates_of_a_failing_judge_have_one_score(tmp_path: Path, llama: Path) -> None:
    script = [[RIGHT, GOOD, RIGHT], [RIGHT] * 3]
    stage = Stage(tmp_path, llama, script, invalid=["think", "query", "answer"])
    await stage.grow(slate)
    assert all("reward" not in turn.scores for turn in stage.groups[0])
    assert [turn.scores["advantage"] for turn in stage.groups[0]] == [0, 0, 0]


async def test_without_a_judge_slate_takes_the_rewards_of_steps(
    tmp_path: Path, llama: Path
) -> None:
    pytest.importorskip("gymnasium")
    script = [["<action>up</action>", "<action>right</action>", NOTHING]]
    stage = Stage(tmp_path, llama, script, judge="none")
    stage.use(environment=Gymnasium("CliffWalking-v1", horizon=1))
    await stage.grow(slate)
    assert stage.rewards() == [[-1, -100, -2]]
    assert sum("outcome" in node.scores for node in stage.tree.nodes.values()) == 1


@pytest.mark.parametrize(("strategy", "count"), [(slate, 3), (full, 1), (chain, 1), (ppr, 1)])
async def test_a_trajectory_that_outgrows_the_context_ends_as_a_failure_alone(
    tmp_path: Path, llama: Path, strategy: Any, count: int
) -> None:
    script = [[GOOD] * count, [RIGHT]][: 1 + (strategy is full)]
    options: Any = {"k": 2} if strategy is full else {}
    stage = Stage(tmp_path, llama, script, budget=4, max_action_tokens=8)
    await stage.context.plant()
    texts = stage.tree.nodes[0].text, GOOD, stage.runtime.environment.forced_prefix
    stage.use(longest=8 + sum(len(stage.runtime.text.encode(text)) for text in texts))
    await stage.grow(strategy, **options)
    (group,) = stage.groups
    assert len(group) == options.get("k", count)
    action = stage.tree.actions()[-1]
    assert (action.scores["outcome"], stage.counts["outgrown_trajectories"]) == (0, 1)
    assert "exceed the context" in action.notes["ended"]
    assert stage.services.script == []

    asked = len(stage.services.requests)  # a restart finds the tree as ended
    stage.journal.close_tree(stage.tree)
    again = stage.anew(stage.reread())
    await again.plant()
    assert await again.onward(await again.tip()) is None
    assert len(stage.services.requests) == asked


async def test_a_continuation_without_room_fails_and_one_of_unknown_outcome_does_not_count(
    tmp_path: Path, llama: Path
) -> None:
    stage = Stage(tmp_path, llama, [[GOOD], [RIGHT]], budget=4, max_action_tokens=8)
    await stage.grow(chain)
    place = position_before(stage.context, stage.tree.actions()[0])
    stage.use(longest=len(place.prefix) // 4 + len(stage.runtime.text.encode(GOOD)) + 8)
    stage.services.script = [[GOOD, RIGHT]]
    assert await outcomes(stage.context, place, 2) == [0.0, 1.0]
    stage.services.script, stage.services.invalid = [[RIGHT]], ["outcome"]
    assert await outcomes(stage.context, place, 1) == []


async def test_a_step_of_slate_is_one_transaction(tmp_path: Path, llama: Path) -> None:
    stage = Stage(tmp_path, llama, [[GOOD, GOOD, GOOD]] * 3 + [[RIGHT, RIGHT, RIGHT]], budget=4)
    statements = list[str]()
    stage.journal._db.set_trace_callback(statements.append)
    await stage.grow(slate)
    assert len(stage.groups) == statements.count("COMMIT") == 4
    stage.journal.close_tree(stage.tree)  # with the outcome, which is judged after the last group
    await stage.journal.written()
    assert statements.count("COMMIT") == 5
    written = [each for each in statements if each.startswith("INSERT OR REPLACE INTO nodes")]
    assert len(written) == len(stage.tree.nodes) + 1
    back, kept = stage.reread().nodes, stage.tree.nodes
    assert {n: node.scores for n, node in back.items()} == {n: kept[n].scores for n in kept}


def test_nodes_that_the_journal_lacks_leave_their_numbers_unused() -> None:
    tree = Tree(0, "t")
    root = tree.add(None, "prompt", np.zeros(1, np.int32), "")
    *_, kept = [tree.add(root, "action", np.zeros(1, np.int32), "") for _ in range(3)]
    back = Tree(0, "t")
    for node in (root, kept):
        back.put(node)
    assert back.add(root, "action", np.zeros(1, np.int32), "").id == kept.id + 1
