"""Every strategy runs in every environment, and every scheme trains on what they emit together:
real rules and oracles, random actions."""

import inspect
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coppice.actors.environments import registry
from coppice.actors.environments.base import Environment, Task
from coppice.common.options import modules
from coppice.judges.base import Judge
from coppice.judges.exact_match import ExactMatch
from coppice.judges.oracles.bfcl import BfclOracle
from coppice.judges.oracles.tictactoe import TicTacToeOracle
from coppice.judges.oracles.webshop import WebShopOracle
from coppice.judges.pprm_rules import PprmRules
from coppice.judges.slate import SlateRules
from coppice.judges.sotopia import SotopiaRules
from coppice.learner import schemes
from coppice.learner.update import table
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.text import Text
from coppice.tools.launching.method import mismatch
from coppice.wire import messages as wire
from tests.agent_stage import Staged
from tests.scheduler.test_strategies import sample

BUDGET = 4
SMALL: dict[str, Any] = dict.fromkeys(("k", "continuations", "trees", "initial"), 2)
SMALL |= {"branching": [2, 3], "segment": 9, "leaves": 5, "budget": 4}
MODELS = ("prm", "value", "kl", "log_ratio")


class World(msgspec.Struct, frozen=True):
    """An environment, its judges by service, and ``act``, which writes some action for a prompt."""

    environment: Environment
    judges: dict[str, Judge]
    act: Callable[[random.Random, str], str]
    task: Task | None = None


class Readable(Judge):
    """1 for a turn that can be read: no built-in judge scores single turns of a conversation."""

    name = "own"
    columns = ("reward",)

    async def score(self, turns: list[wire.JudgedTurn]) -> list[wire.Judgement]:
        return [wire.Judgement({"reward": float("action_type" in turn.response)}) for turn in turns]


def searching(rng: random.Random, prompt: str) -> str:
    answers = [f"<answer> {town} </answer>" for town in ("Sofia", "Rome")]
    return f"<think> t </think> {rng.choice(['<search> capital </search>', '?', *answers])}"


def shopping(rng: random.Random, prompt: str) -> str:
    actions = re.findall(r"'(click\[.*?\]|search\[.*?\])',", prompt)
    return f"<action>{rng.choice(actions).replace('<your query>', 'shirt')}</action>"


def talking(rng: random.Random, prompt: str) -> str:
    words = [f'{{"action_type": "speak", "argument": "{n} percent"}}' for n in (8, 9)]
    return rng.choice(["?", *words])


def calling(rng: random.Random, prompt: str) -> str:
    return rng.choice(["[pwd()]", "[ls()] [", "Done.", "Done."])


def marking(rng: random.Random, prompt: str) -> str:
    return f"<action>{rng.randint(1, 9)}</action>"


CAPITAL = Task("q", "What is the capital of Bulgaria?", ["Sofia"], ["Bulgaria\nCapital: Sofia"])
WORLDS = {
    "search_qa": World(
        registry.load("search_qa", {"prompt": "short", "topk": 1}),
        {"judge.own": SlateRules(), "judge.exact_match": ExactMatch()}, searching, CAPITAL,
    ),
    "tictactoe": World(
        registry.load("tictactoe", {"opponents": {"random": 1.0}}),
        {"judge.own": TicTacToeOracle(kind="minimax")}, marking,
    ),
    "webshop": World(
        registry.load("webshop", {"think": "optional", "horizon": 4}),
        {"judge.own": WebShopOracle()}, shopping,
    ),
    "sotopia": World(
        registry.load("sotopia", {"turns": 6}),
        {"judge.own": Readable(), "judge.sotopia_rules": SotopiaRules()}, talking,
    ),
    "bfcl": World(
        registry.load("bfcl", {"categories": ["multi_turn_base"], "documents": "signatures"}),
        {"judge.own": BfclOracle()}, calling,
    ),
}  # fmt: skip


class Services:
    """A dispatcher with the world's real judges, one passage for every query, and an engine that
    acts at random."""

    def __init__(self, text: Text, world: World):
        self.text, self.world, self.rng = text, world, random.Random(1)

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        if service == "generate":
            return self._generate(request)
        if service == "retrieve":
            return wire.RetrieveResult([[wire.Passage("1", "Bulgaria", "Capital: Sofia", 1.0)]])
        assert isinstance(request, wire.JudgeRequest)
        return wire.JudgeResult(await self.world.judges[service].score(request.turns))

    def _generate(self, request: wire.GenerateRequest) -> wire.GenerateResult:
        prompt = self.text.decode(request.tokens)
        said = [self.world.act(self.rng, prompt) for _ in range(request.n)]
        samples = [sample(self.text, each) for each in said]
        return wire.GenerateResult(samples, len(request.tokens), 0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", modules(strategies.__name__))
@pytest.mark.parametrize("name", WORLDS)
async def test_every_strategy_in_every_world_gives_groups_that_schemes_train_on(
    tmp_path: Path, llama: Path, name: str, strategy: str, request: pytest.FixtureRequest
) -> None:
    if name == "bfcl":
        request.getfixturevalue("bfcl_wheel")
    world, loaded = WORLDS[name], strategies.load(strategy)
    takes = inspect.signature(loaded.function).parameters
    options = {key: value for key, value in SMALL.items() if key in takes}
    if loaded.gives.needs_outcome_judge and not world.environment.outcome_judge:
        pytest.skip("the strategy asks the judge of the outcome")
    groups = await grown(tmp_path, llama, world, strategies.load(strategy, options), trees=2)
    nodes = {(group.tree, node.id): node for group in groups for node in group.nodes}
    turns = table.build(groups, nodes)
    every = [schemes.load(one, {}) for one in modules(schemes.__name__)]
    trained = [one for one in every if one.needs.columns <= set(turns.scores)]
    gives = strategies.load(strategy, options).gives
    fitting = [one for one in trained if not mismatch(one.needs, gives)]
    assert fitting, f"no scheme trains on {sorted(turns.scores)}"
    rng = np.random.default_rng(0)
    columns = {model: rng.normal(0, 1, int(turns.tokens.sum())) for model in MODELS}
    for scheme in fitting:
        estimate = scheme(msgspec.structs.replace(turns, token_scores=columns))
        assert np.isfinite(estimate.advantages).all(), scheme
        assert len(estimate.advantages) == turns.tokens.sum(), scheme


async def grown(
    tmp_path: Path, llama: Path, world: World, strategy: Any, trees: int
) -> list[wire.TrainGroup]:
    """Grow several trees to their ends. Every tree is read from the journal, as after a restart."""
    text, groups = Text(str(llama)), list[wire.TrainGroup]()
    judges = world.judges | {"judge.pprm": PprmRules()}
    services = Services(text, msgspec.structs.replace(world, judges=judges))
    judge = "pprm" if strategy.name == "ppr" else "own"
    settings = SchedulerConfig(judge=judge, budget=BUDGET, max_action_tokens=40)
    for i in range(trees):
        environment: Any = world.environment
        task = world.task or environment.task(i)
        parts = text, services, environment, task, settings
        stage = Staged(tmp_path / f"journal-{i}", *parts, most=8)
        context = stage.anew(seed=i)
        await context.plant()
        await strategy(stage.tree, context)
        nodes, pictures = stage.reread().nodes.values(), stage.journal.pictures
        sent = [node.travels(pictures(node.tokens)) for node in nodes]
        for turns in stage.groups:
            groups.append(wire.TrainGroup(len(groups), i, sent, turns))
    assert groups, "nothing was emitted"
    return groups
