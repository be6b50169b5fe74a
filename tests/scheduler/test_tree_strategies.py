"""The tree methods' strategies: where trajectories fork, what they share, and what a crash leaves
to do."""

import itertools
import math
import random
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.strategies.chain import episode
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Fork, Node, Tree
from coppice.wire.messages import GenerateRequest, GenerateResult, Judgement, Sample
from tests.scheduler.test_strategies import BAD, GOOD, NOTHING, RIGHT, WRONG, Services, Stage

SAYS = [GOOD, GOOD, BAD, RIGHT, WRONG, NOTHING]
DECISIONS = "gbSRI"
"""The first letters in which the texts differ after what they share; the policy is least certain of
them."""


class Player(Services):
    """Says one of ``says``, decided by the prefix and the seed; a begun action is ended as it
    began. Dies after ``calls`` calls."""

    def __init__(self, stage: Stage, says: list[str], calls: int = 10**6):
        super().__init__(stage.services.text, [])
        self.root, self.says, self.calls = stage, says, calls

    async def call(self, service: str, request: Any, **settings: Any) -> Any:
        self.calls -= 1
        if self.calls < 0:
            raise ConnectionError("the engine is gone")
        if not isinstance(request, GenerateRequest):
            return await super().call(service, request, **settings)
        self.requests.append(request)
        text = self.text.decode(request.tokens)
        begun = text.removeprefix(self.root.tree.nodes[0].text).rpartition("</information>\n")[2]
        begun = begun.rpartition("\n")[2] if "could not be used" in begun else begun
        choices = [says for says in self.says if says.startswith(begun)] or [" Sofia </answer>"]
        begun = begun if choices[0].startswith(begun) else ""
        asked = request.tokens.tobytes() + str(request.sampling.seed).encode()
        draw = random.Random(zlib.crc32(asked))
        said = [draw.choice(choices)[len(begun) :] for _ in range(request.n)]
        return GenerateResult([self._one(text, request) for text in said], 0, 0)

    def _one(self, said: str, request: GenerateRequest) -> Sample:
        tokens = self.text.encode(said)[: request.sampling.max_tokens]
        unsure = [self.text.decode(tokens[i : i + 1]) in DECISIONS for i in range(len(tokens))]
        even = [{1: math.log(0.5), 2: math.log(0.5)}] * len(tokens)
        top = even if request.sampling.top_logprobs else None
        logprobs = np.where(unsure, -5, -0.5).astype(np.float32)
        return Sample(tokens, logprobs, np.full(len(tokens), 3, np.int32), "stop", top)


Grown = Callable[..., Awaitable[Stage]]


@pytest.fixture
def play(tmp_path: Path, llama: Path) -> Callable[..., Stage]:
    """Makes stages whose engine plays, without a judge of turns: the outcome is exact match."""

    def made(
        says: list[str] = SAYS, budget: int = 3, folder: str = "", calls: int = 10**6
    ) -> Stage:
        (tmp_path / folder).mkdir(exist_ok=True)
        stage = Stage(tmp_path / folder, llama, [], budget=budget, judge="none")
        stage.use(dispatcher=Player(stage, says, calls))
        stage.services = stage.runtime.dispatcher
        return stage

    return made


@pytest.fixture
def grown(play: Callable[..., Stage]) -> Grown:
    """Makes stages on which a strategy has grown a tree, all of which was emitted."""

    async def made(name: str, says: list[str] = SAYS, stay: int = 3, **options: Any) -> Stage:
        stage = play(says, stay)
        await grow(stage, name, **options)
        check_emitted(stage, groups=options["trees"] if name == "tree_grpo" else 1)
        return stage

    return made


async def grow(stage: Stage, name: str, **options: Any) -> None:
    await stage.context.plant()
    await strategies.load(name, options)(stage.tree, stage.context)


def numbers(stage: Stage) -> list[int]:
    return sorted({node.trajectory for node in stage.tree.nodes.values() if node.kind == "action"})


def first(tree: Tree, trajectory: int) -> Node:
    """The first action that a trajectory sampled itself."""
    actions = (node for node in tree.nodes.values() if node.kind == "action")
    return next(node for node in actions if node.trajectory == trajectory)


def trained(tree: Tree, trajectory: int) -> list[Node]:
    return [action for action in tree.actions(trajectory) if not action.forced]


def flat(tree: Tree, trajectory: int) -> list[int]:
    """The trained tokens of a trajectory, from its first turn on."""
    return [int(token) for action in trained(tree, trajectory) for token in action.tokens]


def check_emitted(stage: Stage, groups: int) -> None:
    """Every trajectory is emitted once, with all its own and shared turns in order, an outcome on
    the last; one request per own action."""
    assert len(stage.groups) == groups
    emitted = []
    for group in stage.groups:
        for i in {turn.trajectory for turn in group}:
            turns = [turn for turn in group if turn.trajectory == i]
            emitted.append([turn.node for turn in turns])
            assert [turn.turn for turn in turns] == list(range(1, len(turns) + 1))
            last = [False] * (len(turns) - 1) + [True]
            assert ["outcome" in turn.scores for turn in turns] == last
    expected = ([node.id for node in trained(stage.tree, n)] for n in numbers(stage))
    assert sorted(emitted) == sorted(expected)
    requests = sum(isinstance(request, GenerateRequest) for request in stage.services.requests)
    assert requests == sum(node.kind == "action" for node in stage.tree.nodes.values())


async def fork_of(stage: Stage, kept: int) -> Node:
    """Trajectory 1, forked after ``kept`` tokens of the first turn of trajectory 0."""
    await stage.context.plant()
    (action, *_) = await episode(stage.tree, stage.context)
    await episode(stage.tree, stage.context, trajectory=1, fork=Fork(action, kept))
    return first(stage.tree, 1)


async def test_a_fork_inside_an_action_keeps_tokens_and_logprobs(play: Any) -> None:
    stage = play([GOOD, BAD])
    kept = len(stage.runtime.text.encode("<think> t </think> <search>"))
    action, start = await fork_of(stage, kept), stage.tree.nodes[1]
    assert (action.kept, action.parent) == (kept, start.parent)
    assert action.text in (GOOD, BAD)
    for name in ("tokens", "logprobs"):
        assert getattr(action, name)[:kept].tolist() == getattr(start, name)[:kept].tolist()
    assert action.logprobs is not None and action.versions is not None
    assert len(action.logprobs) == len(action.versions) == len(action.tokens)
    asked = [r for r in stage.services.requests if isinstance(r, GenerateRequest)]
    request = next(r for r in asked if len(r.tokens) == len(stage.tree.nodes[0].tokens) + kept)
    assert request.tokens.tolist() == [*stage.tree.nodes[0].tokens, *start.tokens[:kept]]
    assert request.sampling.max_tokens == stage.settings.max_action_tokens - kept


async def test_a_fork_inside_a_stop_string_moves_before_it(play: Any) -> None:
    stage = play([GOOD])
    whole = stage.runtime.text.encode(GOOD)
    ends = [stage.runtime.text.decode(whole[:i]) for i in range(len(whole))]
    inside = next(i for i, text in enumerate(ends) if text.endswith("</sea"))
    action = await fork_of(stage, inside)
    kept = stage.runtime.text.decode(action.tokens[: action.kept])
    assert kept == "<think> t </think> <search> good "
    assert action.text == GOOD


async def test_tree_grpo_emits_each_tree_as_a_group(grown: Grown) -> None:
    stage = await grown("tree_grpo", trees=3, nodes=2, rounds=2)
    assert numbers(stage) == list(range(3 * (1 + 2 * 2)))
    for group in stage.groups:
        assert len({turn.trajectory for turn in group}) == 5
        own = {turn.node for turn in group}
        for node in own:  # forks leave trajectories of their own tree
            path = stage.tree.path(stage.tree.nodes[node])
            assert {above.id for above in path if above.kind == "action"} <= own


async def test_tree_grpo_draws_places_uniformly_and_no_leaf(grown: Grown) -> None:
    stage = await grown("tree_grpo", [GOOD], 4, trees=1, nodes=90, rounds=1)
    steps = Counter(first(stage.tree, number).step for number in range(1, 91))
    # the prompt and the ends of three turns; the last turn ends in a forced answer
    assert sorted(steps) == [1, 2, 3, 4]
    # 22.5 each, three standard deviations of 4.1
    assert all(10 <= count <= 36 for count in steps.values()), steps


async def test_treerl_forks_before_the_least_probable_tokens(grown: Grown) -> None:
    stage = await grown("treerl", trees=2, tokens=1, rounds=2, continuations=3)
    assert numbers(stage) == list(range(2 * (1 + 2 * 1 * 3)))
    for number in range(2, 14):
        action = first(stage.tree, number)
        # "I do not know." is unsure of its first letter
        assert action.text.startswith("<think>") or action.kept == 0
        assert stage.runtime.text.decode(action.tokens[action.kept : action.kept + 1]) in DECISIONS


async def test_treepo_divides_unfinished_paths_by_segments(grown: Grown, llama: Path) -> None:
    segment = len(Text(str(llama)).encode(GOOD)) + 5
    options = {"leaves": 8, "segment": segment, "divergence": 2, "first_divergence": 2}
    stage = await grown("treepo", [GOOD], **options)  # all paths have three turns
    assert numbers(stage) == list(range(8))
    begins = []
    for n in range(8):
        own = first(stage.tree, n)
        before = [action for action in stage.tree.actions(n) if action.step < own.step]
        begins.append(own.kept + sum(len(action.tokens) for action in before))
    assert begins == [0, 0, segment, segment, *[2 * segment] * 4]


async def test_treepo_gives_children_of_ended_paths_to_others(grown: Grown, llama: Path) -> None:
    # inside the second turn of a search
    segment = max(len(Text(str(llama)).encode(says)) for says in (GOOD, RIGHT)) + 2
    options = {"leaves": 16, "segment": segment, "divergence": 4, "first_divergence": 4}
    stage = await grown("treepo", [GOOD, RIGHT], depth=2, **options)
    going = {n: first(stage.tree, n).id for n in range(4) if first(stage.tree, n).text == GOOD}
    assert 0 < len(going) < 4
    # The four paths have 16 children. Those that ended keep their own leaf, and the others share
    # the rest; the last gets the remainder.
    each, spare = divmod(16 - (4 - len(going)), len(going))
    forks = Counter(stage.tree.nodes[first(stage.tree, n).parent].parent for n in range(4, 16))
    shares = [each - 1] * (len(going) - 1) + [each - 1 + spare]
    assert [forks[node] for node in going.values()] == shares


async def test_treepo_fills_up_its_leaves_from_segment_ends(grown: Grown) -> None:
    options = {"leaves": 9, "segment": 9, "depth": 3, "first_divergence": 2}
    stage = await grown("treepo", [RIGHT, WRONG], **options)  # every path ends in its first turn
    assert numbers(stage) == list(range(9))
    assert {first(stage.tree, n).kept for n in range(9)} <= {0, 9, 18}
    assert [first(stage.tree, n).kept for n in range(6)] == [0, 0, 9, 9, 18, 18]


async def test_spo_weighs_leaves_by_the_branchings_above_them(grown: Grown, llama: Path) -> None:
    one = len(Text(str(llama)).encode(RIGHT))
    stage = await grown("spo", [GOOD, RIGHT], 2, branching=[4, 3], segment=one)
    last = [turn for turn in stage.groups[0] if "weight" in turn.scores]
    weights = {turn.trajectory: turn.scores["weight"] for turn in last}
    short = [n for n in range(4) if len(flat(stage.tree, n)) <= one]
    assert 0 < len(short) < 4
    for n in range(4):
        assert weights[n] == pytest.approx(1 / 4 if n in short else 1 / 12)
    assert len(weights) == 4 + 2 * (4 - len(short))
    assert sum(weights.values()) == pytest.approx(1)
    # forks share exactly the first segment with the path that they left
    segments = [flat(stage.tree, n)[:one] for n in range(4) if n not in short]
    for n in range(4, len(weights)):
        assert flat(stage.tree, n)[:one] in segments


@pytest.mark.parametrize(("base", "begins"), [(0.0, {1: 3}), (1.0, {2: 1, 3: 2})])
async def test_arpo_forks_after_turns_but_the_last_and_fills_its_budget_with_fresh_trajectories(
    grown: Grown, base: float, begins: dict[int, int]
) -> None:
    stage = await grown("arpo", [GOOD], budget=4, initial=1, base=base, weight=0.0)
    # base = 1: after turn 1 the only trajectory forks, after turn 2 both do. Trajectories 1, 2 and
    # 3 begin at turns 2, 3 and 3.
    assert Counter(first(stage.tree, n).step for n in range(1, 4)) == begins


async def test_arpo_forks_where_the_entropy_of_top_tokens_rose(grown: Grown) -> None:
    options = {"budget": 6, "initial": 5, "base": 0.0, "weight": 1e6, "first": 30}
    stage = await grown("arpo", [NOTHING, GOOD], **options)
    asked = [r for r in stage.services.requests if isinstance(r, GenerateRequest)]
    assert {r.sampling.top_logprobs for r in asked} == {10}
    entropies: Any = first(stage.tree, 0).entropies
    np.testing.assert_allclose(entropies, math.log(2), rtol=1e-6)

    def looked_at(action: Node) -> int:
        """All tokens have one entropy: a turn with more of its first 30 is more uncertain."""
        return min(30, len(action.tokens))

    fork = first(stage.tree, 5)
    if fork.step > 1:
        before = stage.tree.actions(5)[: fork.step - 1]
        assert looked_at(before[-1]) > looked_at(before[0])
    paths = map(stage.tree.actions, range(5))
    rose = [any(looked_at(b) > looked_at(path[0]) for b in path[1:-1]) for path in paths]
    assert (fork.step > 1) == any(rose)


OPTIONS: dict[str, dict[str, Any]] = {
    "tree_grpo": {"trees": 2, "nodes": 1, "rounds": 2},
    "treerl": {"trees": 2, "tokens": 1, "continuations": 2},
    "treepo": {"leaves": 5, "segment": 30},
    "spo": {"branching": [2, 2], "segment": 30},
    "arpo": {"budget": 5, "initial": 2, "base": 0.8},
}


@pytest.mark.parametrize("name", OPTIONS)
async def test_a_tree_that_died_is_emitted_once(play: Callable[..., Stage], name: str) -> None:
    for calls in range(0, 36, 5):
        stage = play(folder=str(calls), calls=calls)
        with suppress(ConnectionError):
            await grow(stage, name, **OPTIONS[name])
        stage.services.calls = 10**6
        stage.tree = stage.reread()
        stage.context = stage.anew(stage.tree, seed=0)
        await grow(stage, name, **OPTIONS[name])  # after a finished tree this must add nothing
        assert len(stage.groups) == (OPTIONS[name]["trees"] if name == "tree_grpo" else 1)
        leaves = {"tree_grpo": 6, "treerl": 6, "treepo": 5, "arpo": 5}.get(name)
        assert leaves in (None, len(numbers(stage)))
        own = {node.id for n in numbers(stage) for node in trained(stage.tree, n)}
        assert {turn.node for group in stage.groups for turn in group} == own
        for n in numbers(stage):
            steps = [action.step for action in stage.tree.actions(n)]
            assert steps == list(range(1, len(steps) + 1))


async def test_a_trajectory_whose_outcome_is_unknown_is_left_out(play: Any) -> None:
    stage, asked = play(), itertools.count()
    judge = stage.services._outcome
    unknown = Judgement({}, ["outcome"])
    stage.services._outcome = lambda turn: unknown if next(asked) == 5 else judge(turn)
    await grow(stage, "treerl", trees=3, tokens=1, continuations=1)
    (left,) = {n.trajectory for n in stage.tree.nodes.values() if "outcome" in n.invalid}
    (group,) = stage.groups
    assert sorted({turn.trajectory for turn in group} | {left}) == numbers(stage)
    assert left not in {turn.trajectory for turn in group}
