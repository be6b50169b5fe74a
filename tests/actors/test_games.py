"""What every game promises: moves, prompts, states and measures."""

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.environments import registry
from coppice.actors.environments.base import SPLIT

OPTIONS: dict[str, dict[str, Any]] = {
    "tictactoe": {"history": 2, "boxed": True, "opponents": {"random": 1.0}},
    "sudoku": {"history": 2, "boxed": True, "size": 4, "blanks": 8},
    "minesweeper": {"history": 2, "boxed": True, "rows": 9, "columns": 12, "mines": 20},
    "sokoban": {"history": 2},
}


class RandomTools:
    """Tools for the opponent "random"."""

    rng = random.Random(0)


TOOLS: Any = RandomTools()


@pytest.fixture(params=OPTIONS)
def game(request: pytest.FixtureRequest) -> Any:
    return registry.load(request.param, OPTIONS[request.param])


def opened(game: Any, seed: int) -> Any:
    return asyncio.run(game.open(game.initial(game.task(seed)), TOOLS))


def written(game: Any, move: tuple[int, ...]) -> str:
    return f"<action>{game.notation(move)}</action>"


def test_every_legal_move_is_read_from_its_own_notation(game: Any) -> None:
    state = opened(game, 3)
    moves = game.moves(state)
    assert len(set(moves)) == len(moves) > 1
    assert [game.read(state, reply).move for reply in game.replies(state)] == moves


def test_the_last_block_counts_and_a_reply_without_one_is_invalid(game: Any) -> None:
    state = opened(game, 3)
    first, *_, last = game.moves(state)
    assert game.read(state, f"{written(game, first)} or {written(game, last)}").move == last
    assert game.read(state, game.notation(first)).kind == "invalid"
    assert game.read(state, f"{written(game, first)} or <action>?</action>").kind == "invalid"
    if "boxed" in OPTIONS[game.name]:
        boxed = f"{written(game, first)} no: \\boxed{{{game.notation(last)}}}"
        assert game.read(state, boxed).move == last
        plain = registry.load(game.name, OPTIONS[game.name] | {"boxed": False})
        assert plain.read(state, boxed).move == first


def test_states_travel_and_are_the_keys_of_a_dictionary(game: Any) -> None:
    state = opened(game, 2**40)
    action = game.read(state, written(game, game.moves(state)[0]))
    after = asyncio.run(game.step(state, action, TOOLS)).state
    for one in (state, after):
        plain = msgspec.json.decode(msgspec.json.encode(msgspec.to_builtins(one)))
        again = msgspec.convert(plain, type(one))
        assert (again, hash(again)) == (one, hash(one))
    turn = game.judged(game.task(1), state, action, 3, 4)
    assert (turn.step, turn.budget) == (3, game.max_turns or 4)
    assert (turn.move, msgspec.convert(turn.state, type(state))) == (list(action.move), state)


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
                action = prompted.read(state, written(prompted, prompted.moves(state)[-1]))  # pyright: ignore
                state = asyncio.run(prompted.step(state, action, TOOLS)).state
        assert len(heads) == 1


def test_an_episode_ends_with_all_its_measures(game: Any) -> None:
    rng = random.Random(1)
    state, transition = opened(game, 5), None
    while transition is None or not transition.done:
        action = game.read(state, written(game, rng.choice(game.moves(state))))
        transition = asyncio.run(game.step(state, action, TOOLS))
        state = transition.state
    assert set(transition.measures) == set(game.measured)
    turn = {"valid": 1.0, "reward": 0.5, "outcome": transition.outcome, **transition.measures}
    measures = game.measures(game.task(5), [turn])
    assert {
        name: [value] for name, value in transition.measures.items()
    }.items() <= measures.items()
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
def test_a_prompt_that_cannot_work_is_refused(
    tmp_path: Path, text: str, history: int, said: str
) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=said):
        registry.load("sudoku", {"prompt": str(path), "history": history})
    with pytest.raises(FileNotFoundError, match="one of sudoku, sudoku_compact, or a path"):
        registry.load("sudoku", {"prompt": "sudoko"})
