"""What every adapter of another library's environments promises: pure steps, states that can be
stored, and episodes that do not disturb each other."""

import asyncio
import os
import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from coppice.actors.environments import base
from coppice.actors.environments.base import POLICY, Diverged, Dropped, Environment
from coppice.actors.environments.bfcl.environment import Bfcl
from coppice.actors.environments.others.in_process import Gymnasium, InThisPython, TextArena
from coppice.actors.environments.others.worker import Turned
from tests import drawn_game
from tests.actors.conftest import begun, openenv, played


class Drawn(InThisPython):
    name = "drawn"

    def __init__(self, copies: bool = True):
        self.copies, self.played = copies, 0
        super().__init__(horizon=6)

    def begin(self, seed: int) -> tuple[Any, Turned]:
        game = drawn_game.Drawn()
        return game, Turned(game.begin(seed))

    def turn(self, game: Any, action: str) -> Turned:
        self.played += 1
        return Turned(*game.turn(action))


class Talk:
    """The tools of an environment, of which a second player speaks."""

    async def say(
        self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]
    ) -> str:
        await asyncio.sleep(0)
        return f"<action>[{len(messages[-1]['content']) % 9}]"  # determined by what it sees


GEM, TEXTWORLD, OPENENV = (f"COPPICE_{name}_PYTHON" for name in ("GEM", "TEXTWORLD", "OPENENV"))
"""Variables that name another Python; without them their games are skipped."""
HERE: dict[str, tuple[Callable[[], Environment], list[str]]] = {
    "drawn": (Drawn, ["a", "bb", "ccc"]),
    "drawn, no copies": (lambda: Drawn(copies=False), ["a", "bb", "ccc"]),
    "BFCL": (
        lambda: Bfcl(["multi_turn_base"], "hermes"),
        ['<tool_call>{"name": "ls", "arguments": {}}</tool_call>', "<no call", "<none"],
    ),
    "FrozenLake": (
        lambda: Gymnasium("FrozenLake-v1", arguments={"map_name": None}),
        ["right", "down", "left"],
    ),
    "GuessTheNumber": (lambda: TextArena("GuessTheNumber-v0"), ["[5]", "[9]", "[2]"]),
    "TicTacToe": (lambda: TextArena("TicTacToe-v0", players=2, second=0.5), ["[4]", "[0]", "[8]"]),
}
THERE: dict[str, tuple[str, str, Callable[[], dict[str, Any]], list[str]]] = {
    "other Python": ("tests.drawn_game:Drawn", "", dict, ["a", "bb", "ccc"]),
    "no copies there": ("tests.drawn_game:Uncopied", "", dict, ["a", "bb", "ccc"]),
    "GEM 2048": ("gem", GEM, lambda: {"id": "game:Game2048-v0-easy"}, ["left", "up", "right"]),
    "TextWorld": ("textworld", TEXTWORLD, dict, ["look", "inventory", "go north"]),
    "reasoning": ("reasoning_gym", "", lambda: {"name": "word_ladder"}, ["COLD,CORD", "x"]),
    "OpenEnv": ("openenv", "", openenv, ["1", '{"number": 2}', "3"]),
    "the real OpenEnv": ("openenv", OPENENV, openenv, ["1", '{"number": 2}', "3"]),
    "OpenEnv, no seed": ("openenv", "", lambda: openenv("Unseeded"), ["1", "2", "9"]),
}
Adapted = tuple[Callable[[], Any], list[str]]


@pytest.fixture(params=[*HERE, *THERE])
def adapted(request: pytest.FixtureRequest, other: Callable[..., Any]) -> Adapted:
    for package in ("gymnasium", "textarena", "reasoning_gym"):
        pytest.importorskip(package)
    if request.param == "BFCL":
        request.getfixturevalue("bfcl_wheel")
    if request.param in HERE:
        return HERE[request.param]
    game, python, arguments, actions = THERE[request.param]
    path = os.environ.get(python) or pytest.skip(f"{python} names no Python") if python else ""
    return lambda: other(game, python=path, arguments=arguments()), actions


async def episode(
    environment: Any, seed: int, actions: list[str], between: Callable[[], Any] | None = None
) -> list[Any]:
    task, state = environment.task(seed), await begun(environment, seed, Talk())
    seen: list[Any] = [task, state, environment.prompt(task, state)]
    for action in actions:
        if between is not None:
            await between()
        seen.append(await played(environment, state, action, tools=Talk()))
        state = seen[-1].state
        if seen[-1].done:
            break
    return seen


@pytest.mark.second
async def test_an_episode_is_determined_by_seed_and_actions_alone(adapted: Adapted) -> None:
    make, actions = adapted
    environment, other = make(), make()
    random.seed(1)
    alone = await episode(environment, 7, actions)
    random.seed(2)

    async def between() -> None:
        random.random()
        await episode(environment, 8, actions)
        await episode(other, 9, actions[::-1])

    before = random.getstate()
    assert await episode(environment, 7, actions) == alone  # from the cache
    assert random.getstate() == before, "an episode changed the process's random state"
    assert await episode(environment, 7, actions, between) == alone
    assert await episode(make(), 7, actions, between) == alone  # another process


@pytest.mark.second
async def test_a_step_changes_no_state_and_a_stored_state_goes_on(adapted: Adapted) -> None:
    make, actions = adapted
    environment, anew = make(), make()
    _, state, _, *transitions = await episode(environment, 7, actions)
    for transition, action in zip(transitions, actions, strict=False):
        bytes_ = msgspec.json.encode(state)
        for one in (environment, anew):
            stored = msgspec.json.decode(bytes_, type=type(state))
            assert (stored, hash(stored)) == (state, hash(state))
            assert await played(one, stored, action, tools=Talk()) == transition
        assert msgspec.json.encode(state) == bytes_
        state = transition.state


async def test_siblings_are_copies_and_what_cannot_be_copied_is_played_again() -> None:
    for copies, steps in ((True, 2 + 4), (False, 2 + 1 + 3 * 3)):
        environment = Drawn(copies)
        state = (await played(environment, await begun(environment), "a", "b")).state
        children = [await played(environment, state, "c") for _ in range(4)]
        assert len({child.state.seen for child in children}) == 1
        assert environment.played == steps


async def test_an_unreadable_or_refused_action_ends_the_episode_with_what_it_earned() -> None:
    environment = Drawn()
    first = await played(environment, await begun(environment), "a")
    for text in ("<no block", "<action> </action>", "bad"):
        last = await played(environment, first.state, text)
        assert (last.done, last.outcome, last.measures) == (True, first.reward, {"success": 0.0})


async def test_a_game_that_shows_something_else_when_played_again_is_dropped() -> None:
    first = await played(Drawn(), await begun(Drawn()), "a")
    with pytest.raises(Diverged, match=r"drawn, seed \d+: after 1 actions, played again"):
        await played(Drawn(), msgspec.structs.replace(first.state, seed=99), "b")


async def test_the_horizon_ends_an_episode() -> None:
    seen = await episode(Drawn(), 5, ["a"] * 9)
    assert [transition.done for transition in seen[3:]] == [False] * 5 + [True]
    assert seen[-1].outcome == pytest.approx(sum(transition.reward for transition in seen[3:]))


@pytest.mark.second
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gymnasium("Taxi-v3"), "Taxi"),
        (lambda: Gymnasium("CartPole-v1"), r"renders \['human', 'rgb_array'\], expected 'ansi'"),
        (lambda: TextArena("NoGame-v0"), "TicTacToe-v0"),
        (lambda: TextArena("GuessTheNumber-v0", second=0.5), "without effect with one player"),
        (lambda: TextArena("GermanWhist-v0", players=3), "players = 3: it does not begin: .*two-p"),
    ],
)
def test_a_missing_environment_is_named(make: Callable[[], Environment], said: str) -> None:
    for package in ("gymnasium", "textarena"):
        pytest.importorskip(package)
    with pytest.raises(ValueError, match=said):
        make()


async def test_first_states_that_are_made_in_threads_do_not_disturb_each_other() -> None:
    expected = {seed: Drawn().initial(Drawn().task(seed)) for seed in range(40)}
    environment = Drawn()
    tasks = [environment.task(seed) for seed in expected]
    made = await asyncio.gather(*(asyncio.to_thread(environment.initial, task) for task in tasks))
    for state, alone in zip(made, expected.values(), strict=True):
        assert await played(environment, state, "a") == await played(Drawn(), alone, "a")


async def test_a_game_that_ends_before_the_policy_acts_is_dropped() -> None:
    pytest.importorskip("textarena")

    class Nonsense(base.Tools):
        async def say(self, *_: Any, **__: Any) -> str:
            return "nonsense"

    environment, tools = TextArena("TicTacToe-v0", players=2, second=1.0), Nonsense()
    state = await environment.open(environment.initial(environment.task(3)), tools)
    with pytest.raises(Dropped, match="over before the policy acted"):
        await environment.step(state, environment.read(state, "<action>[4]</action>"), tools)
    assert environment.speakers == (POLICY,), (
        "whose replies an interrupted evaluation asks for anew"
    )


def test_what_a_library_cannot_play_is_no_refused_action() -> None:
    class Old:
        def step(self, move: int) -> tuple[int, float, bool, dict[str, int]]:
            return 0, 0.0, False, {}

    environment: Any = Gymnasium("FrozenLake-v1")
    with pytest.raises(RuntimeError, match="FrozenLake-v1 cannot play 'left': not enough values"):
        environment.turn(Old(), "left")
