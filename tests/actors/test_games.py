"""What every game promises: moves, prompts, states and measures."""

import asyncio
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from coppice.actors.environments import registry
from coppice.actors.environments.base import SPLIT
from coppice.actors.environments.minesweeper.environment import MinesState
from coppice.actors.environments.sudoku.environment import SudokuState
from coppice.actors.environments.tictactoe.environment import TicTacToe, TicTacToeState
from tests.games import play

OPTIONS: dict[str, dict[str, Any]] = {
    "tictactoe": {"history": 2, "opponents": {"random": 1.0}},
    "sudoku": {"history": 2, "size": 4, "blanks": 8},
    "minesweeper": {"history": 2, "rows": 9, "columns": 12, "mines": 20},
    "sokoban": {"history": 2},
}


TOOLS: Any = SimpleNamespace(rng=random.Random(0))


@pytest.fixture(params=OPTIONS)
def game(request: pytest.FixtureRequest) -> Any:
    return registry.load(request.param, OPTIONS[request.param])


def opened(game: Any, seed: int) -> Any:
    return asyncio.run(game.open(game.initial(game.task(seed)), TOOLS))


def written(game: Any, move: tuple[int, ...]) -> str:
    return f"<action>{game.notation(move)}</action>"


def test_the_last_block_counts_and_a_reply_without_one_is_invalid(game: Any) -> None:
    state = opened(game, 3)
    first, *_, last = game.moves(state)
    assert game.read(state, f"{written(game, first)} or {written(game, last)}").move == last
    assert game.read(state, game.notation(first)).kind == "invalid"
    assert game.read(state, f"{written(game, first)} or <action>?</action>").kind == "invalid"


def test_states_travel_and_are_the_keys_of_a_dictionary(game: Any) -> None:
    state = opened(game, 2**40)
    action = game.read(state, written(game, game.moves(state)[0]))
    after = asyncio.run(game.step(state, action, TOOLS)).state
    for one in (state, after):
        plain = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(one)))
        again = msgspec.convert(plain, type(one))
        assert (again, hash(again)) == (one, hash(one))
    turn = game.judged(game.task(1), state, action, 3, 4)
    assert (turn.step, turn.move) == (3, list(action.move))


def test_the_placeholders_of_every_prompt_are_filled_and_its_head_is_shared(game: Any) -> None:
    for path in game.folder.glob("*.txt"):
        options = OPTIONS[game.name] | {"prompt": path.stem}
        options["history"] = 2 if "{past}" in path.read_text() else 0
        prompted: Any = registry.load(game.name, options)
        heads = set()
        for seed in (1, 2):
            state = opened(prompted, seed)
            for _ in range(2):
                content = prompted.prompt(prompted.task(seed), state)[0]["content"]
                texts = content if isinstance(content, list) else [{"text": content}]
                text = "".join(part.get("text", "") for part in texts)
                assert not re.search(r"\{\w+\}", text)
                heads.add(text.split(SPLIT)[0])
                last = prompted.notation(prompted.moves(state)[-1])
                state = play(prompted, state, last, tools=TOOLS)[-1].state
        assert len(heads) == 1


def test_an_episode_ends_with_all_its_measures(game: Any) -> None:
    rng, state, transition = random.Random(1), opened(game, 5), None
    while transition is None or not transition.done:
        move = game.notation(rng.choice(game.moves(state)))
        (transition,) = play(game, state, move, tools=TOOLS)
        state = transition.state
    assert set(transition.measures) == set(game.measured)
    turn = {"valid": 1.0, "reward": 0.5, "outcome": transition.outcome, **transition.measures}
    measures = game.measures(game.task(5), [turn])
    assert all(measures[name] == [value] for name, value in transition.measures.items())
    assert (measures["return"], measures["oracle"]) == ([transition.outcome], [0.5])
    assert game.headline in measures


@pytest.mark.parametrize(
    ("text", "history", "said"),
    [
        ("rules alone", 0, "has none of the placeholders"),
        ("rules {board}", 1, r"history = 1 has no effect: .* has no {past} placeholder"),
        ("Look: {picture}", 0, "sudoku draws no pictures"),
    ],
)
def test_an_unusable_prompt_is_refused(tmp_path: Path, text: str, history: int, said: str) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        registry.load("sudoku", {"prompt": str(path), "history": history})
    with pytest.raises(FileNotFoundError, match="one of sudoku, sudoku_compact, or a path"):
        registry.load("sudoku", {"prompt": "sudoko"})


class Careless(TicTacToe):
    measured: Any = "success"


class Broken(TicTacToe):
    def __init__(self) -> None:
        raise RuntimeError("no server")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Careless", "its measured = 'success': Expected `array`, got `str`"),
        ("Broken", "data.options of .*Broken: RuntimeError: no server"),
    ],
)
def test_an_environment_that_cannot_be_plugged_in_is_refused(name: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        registry.load(f"{__name__}:{name}", {})


SOLVED = "1234341221434321"
OPENED = "#11#111F..11...."
STATES: dict[str, Any] = {
    "tictactoe": TicTacToeState("....X....", "O", "rival"),
    "sudoku": SudokuState(4, "1..4.4.2" + SOLVED[8:], SOLVED, "1.34.4.2" + SOLVED[8:]),
    "minesweeper": MinesState(4, 4, 2, 0, OPENED, "*......*........"),
}
UNUSABLE = {
    "tictactoe": ["5", "0", "10", "1 2"],
    "sudoku": ["1 1 3", "1 5 3", "0 2 2", "1 2 5", "1 2 0", "1 2 x"],
    "minesweeper": ["reveal 1 2", "reveal 2 4", "flag 1 2", "reveal 0 1", "flag 5 1", "dig 1 1"],
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_an_unusable_action_loses_and_keeps_what_was_reached(name: str) -> None:
    rules: Any = registry.load(name, {})
    expected = {"tictactoe": None, "sudoku": 0.25, "minesweeper": pytest.approx(13 / 14)}[name]
    for text in UNUSABLE[name]:
        (end,) = play(rules, STATES[name], text)
        assert not rules.read(STATES[name], f"<action>{text}</action>").valid, text
        assert (end.done, end.outcome, end.measures["success"]) == (True, -1.0, 0), text
        assert end.measures.get("completion") == expected


@pytest.mark.parametrize(
    ("name", "hidden"),
    [("sudoku", {"solution": "1" * 81}), ("minesweeper", {"layout": "*" * 25, "seed": 1})],
)
def test_the_prompt_shows_the_board_and_never_the_solution(name: str, hidden: Any) -> None:
    rules: Any = registry.load(name, {})
    state = rules.initial(rules.task(5))
    (message,) = rules.prompt(rules.task(5), state)
    assert rules.view(state)["board"] in message["content"].split(SPLIT)[1]
    assert rules.prompt(rules.task(5), msgspec.structs.replace(state, **hidden)) == [message]


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("sudoku", {"size": 4}, "blanks = 40: expected 1 to 12 for size 4"),
        ("minesweeper", {"mines": 16}, "expected 1 to 15 on 5x5, .* one safe cell, must be free"),
        ("minesweeper", {"rows": 3, "columns": 3, "mines": 1}, "expected a board larger"),
        ("tictactoe", {"opponents": {}}, "opponents = {}"),
        ("tictactoe", {"opening": 4}, "opening = 4: .* at least 0 and at most 3"),
        ("sokoban", {"size": 4}, "size = 4: expected 5 to 8"),
        ("sokoban", {"prompt": "sokoban_compact"}, "history = 2 has no effect"),
        ("sokoban", {"side": 256}, "side = 256: expected 0, or a prompt that has"),
    ],
)
def test_an_impossible_option_is_refused(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        registry.load(name, options)
