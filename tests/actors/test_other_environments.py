"""What every adapter of another library's environments promises: pure steps, states that can be
stored, and episodes that do not disturb each other."""

import asyncio
import os
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from coppice.actors.environments.base import Environment
from coppice.actors.environments.others.in_process import Gymnasium, InThisPython, TextArena
from coppice.actors.environments.others.other_python import OtherPython
from coppice.actors.environments.others.worker import Turned


class Drawn(InThisPython):
    """A game of a library as many are: its object changes, and it draws from the process's random
    state, also while it is played."""

    name = "drawn"

    def __init__(self, copies: bool = True):
        self.copies, self.played = copies, 0
        super().__init__(horizon=6)

    def begin(self, seed: int) -> tuple[Any, Turned]:
        return [random.random()], Turned("begin")

    def turn(self, game: Any, action: str) -> Turned:
        if action == "bad":
            raise ValueError("no such action")
        self.played += 1
        game.append(game[-1] * random.random() + len(action))
        return Turned(str(game), random.random())


class _Talk:
    """The tools of an environment, of which a second player speaks."""

    async def say(
        self, speaker: str, messages: list[dict[str, str]], max_tokens: int, stop: list[str]
    ) -> str:
        await asyncio.sleep(0)
        return f"<action>[{len(messages[-1]['content']) % 9}]"  # determined by what it sees


def other(game: str, python: str = "", **arguments: Any) -> OtherPython:
    """Return a game in this Python, or in the one that a variable names. Without it the test is
    skipped."""
    path = os.environ.get(python) or pytest.skip(f"{python} names no Python") if python else ""
    return OtherPython(game, path, arguments)


def openenv(name: str, python: str = "") -> OtherPython:
    classes = {"environment": f"tests.openenv_shape:{name}", "action": "tests.openenv_shape:Add"}
    return other("openenv", python, **classes, field="number")


Talk: Any = _Talk
GEM, TEXTWORLD = "COPPICE_GEM_PYTHON", "COPPICE_TEXTWORLD_PYTHON"
OPENENV = "COPPICE_OPENENV_PYTHON"
ADAPTED: dict[str, tuple[Callable[[], Environment], list[str]]] = {
    "drawn": (Drawn, ["a", "bb", "ccc"]),
    "drawn, no copies": (lambda: Drawn(copies=False), ["a", "bb", "ccc"]),
    "FrozenLake": (lambda: Gymnasium("FrozenLake-v1"), ["right", "down", "left"]),
    "Taxi": (lambda: Gymnasium("Taxi-v4"), ["south", "east", "pickup"]),
    "CliffWalking": (lambda: Gymnasium("CliffWalking-v1"), ["up", "right", "down"]),
    "Blackjack": (lambda: Gymnasium("Blackjack-v1"), ["hit", "hit", "stick"]),
    "GuessTheNumber": (lambda: TextArena("GuessTheNumber-v0"), ["[5]", "[9]", "[2]"]),
    "2048": (lambda: TextArena("2048-v0"), ["[left]", "[up]", "[right]"]),
    "TicTacToe": (lambda: TextArena("TicTacToe-v0", players=2, second=0.5), ["[4]", "[0]", "[8]"]),
    "other Python": (lambda: other("tests.drawn_game:Drawn"), ["a", "bb", "ccc"]),
    "no copies there": (lambda: other("tests.drawn_game:Uncopied"), ["a", "bb", "ccc"]),
    "GEM 2048": (lambda: other("gem", GEM, id="game:Game2048-v0-easy"), ["left", "up", "right"]),
    "GEM Sudoku": (lambda: other("gem", GEM, id="game:Sudoku-v0-easy"), ["1 1 1", "1 1 2"]),
    "TextWorld": (lambda: other("textworld", TEXTWORLD), ["look", "inventory", "go north"]),
    "reasoning there": (
        lambda: other("reasoning_gym", name="word_ladder"),
        ["COLD,CORD", "x"],
    ),
    "OpenEnv": (lambda: openenv("Counting"), ["1", '{"number": 2}', "3"]),
    "the real OpenEnv": (lambda: openenv("Counting", OPENENV), ["1", '{"number": 2}', "3"]),
    "OpenEnv, no seed": (lambda: openenv("Unseeded"), ["1", "2", "9"]),
}


@pytest_asyncio.fixture(params=ADAPTED)
async def adapted(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Callable[[], Environment], list[str]]]:
    """A way to make the environment, and actions to play."""
    for package in ("gymnasium", "textarena", "reasoning_gym", "pydantic"):
        pytest.importorskip(package)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    environments: list[Any] = []
    make, actions = ADAPTED[request.param]

    def kept() -> Environment:
        environments.append(make())
        return environments[-1]

    yield kept, actions
    for environment in environments:
        if isinstance(environment, OtherPython):
            await environment.close()


def reply(action: str) -> str:
    return f"<action>{action}</action>"


async def act(environment: Any, state: Any, action: str) -> Any:
    return await environment.step(state, environment.read(state, reply(action)), Talk())


async def episode(
    environment: Any, seed: int, actions: list[str], between: Callable[[], Any] | None = None
) -> list[Any]:
    """Play actions until the end. Returns all states and transitions."""
    task = environment.task(seed)
    state = await environment.open(environment.initial(task), Talk())
    seen: list[Any] = [task, state, environment.prompt(task, state)]
    for action in actions:
        if between is not None:
            await between()
        transition = await act(environment, state, action)
        seen.append(transition)
        state = transition.state
        if transition.done:
            break
    return seen


@pytest.mark.second
async def test_an_episode_is_determined_by_seed_and_actions_whatever_is_played_between(
    adapted: tuple[Callable[[], Environment], list[str]],
) -> None:
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
async def test_a_step_changes_no_state_and_a_stored_state_goes_on(
    adapted: tuple[Callable[[], Environment], list[str]],
) -> None:
    make, actions = adapted
    environment: Any = make()
    _, state, _, *transitions = await episode(environment, 7, actions)
    for transition, action in zip(transitions, actions, strict=False):
        bytes_ = msgspec.json.encode(state)
        for anew in (environment, make()):
            stored = msgspec.json.decode(bytes_, type=type(state))
            assert (stored, hash(stored)) == (state, hash(state))
            assert await act(anew, stored, action) == transition
        assert msgspec.json.encode(state) == bytes_
        state = transition.state


async def test_siblings_are_copies_and_what_cannot_be_copied_is_played_again() -> None:
    for copies, played in ((True, 2 + 4), (False, 2 + 1 + 3 * 3)):
        environment: Any = Drawn(copies)
        state = environment.initial(environment.task(5))
        for action in ("a", "b"):
            state = (await act(environment, state, action)).state
        children = [await act(environment, state, "c") for _ in range(4)]
        assert len({child.state.seen for child in children}) == 1
        assert environment.played == played


async def test_an_unreadable_or_refused_action_ends_the_episode_with_what_it_earned() -> None:
    environment: Any = Drawn()
    state = environment.initial(environment.task(5))
    first = await act(environment, state, "a")
    for text in ("no block", "<action> </action>", reply("bad")):
        last = await environment.step(first.state, environment.read(first.state, text), Talk())
        assert (last.done, last.outcome, last.measures) == (True, first.reward, {"success": 0.0})


async def test_the_horizon_ends_an_episode() -> None:
    environment: Any = Drawn()
    seen = await episode(environment, 5, ["a"] * 9)
    assert [transition.done for transition in seen[3:]] == [False] * 5 + [True]
    assert seen[-1].outcome == pytest.approx(sum(transition.reward for transition in seen[3:]))


@pytest.mark.second
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Gymnasium("Taxi-v3"), "Taxi"),
        (lambda: Gymnasium("Pendulum-v1"), "Pendulum-v1"),
        (lambda: other("reasoning_gym", name="no_such_set"), "no_such_set"),
        (lambda: TextArena("NoGame-v0"), "TicTacToe-v0"),
        (lambda: TextArena("GermanWhist-v0", players=3), "players = 3: it does not begin: .*two-p"),
    ],
)
def test_an_environment_that_is_not_there_is_named(
    make: Callable[[], Environment], said: str
) -> None:
    for package in ("gymnasium", "textarena", "reasoning_gym"):
        pytest.importorskip(package)
    with pytest.raises(ValueError, match=said):
        make()


async def test_first_states_that_are_made_in_threads_do_not_disturb_each_other() -> None:
    expected = {seed: Drawn().initial(Drawn().task(seed)) for seed in range(40)}
    environment = Drawn()
    tasks = [environment.task(seed) for seed in expected]
    made = await asyncio.gather(*(asyncio.to_thread(environment.initial, task) for task in tasks))
    for state, alone in zip(made, expected.values(), strict=True):
        assert await act(environment, state, "a") == await act(Drawn(), alone, "a")
