"""The tiny board policy and its warm start on random legal play."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coppice.actors.environments import registry
from coppice.actors.environments.base import SPLIT
from coppice.actors.environments.game import Game
from coppice.actors.environments.others.mutable import Mutable
from coppice.scheduler.growth.text import Text
from coppice.tools.defaults import tiny
from coppice.tools.defaults.legal_play import FIRST_SEED, ensure_legal_play, legal_play, random_play
from coppice.tools.defaults.models import ensure_model
from coppice.tools.defaults.settings import WarmStart
from coppice.tools.defaults.warm_start import from_play

GAMES: dict[str, dict[str, Any]] = {
    "tictactoe": {"prompt": "tictactoe_compact"},
    "sudoku": {"prompt": "sudoku_compact", "size": 4, "blanks": 7},
    "minesweeper": {"prompt": "minesweeper_compact", "rows": 4, "columns": 4, "mines": 3},
    "sokoban": {"prompt": "sokoban_compact", "history": 0},
    "gymnasium": {"id": "FrozenLake-v1"},
    "textarena": {"id": "TicTacToe-v0", "players": 2, "actions": [f"[{n}]" for n in range(9)]},
    "other_python": {"game": "reasoning_gym", "arguments": {"name": "gcd"}},
}
CORE = tiny.board_tokenizer().backend_tokenizer


def game(name: str) -> Game | Mutable:
    made = registry.load(name, GAMES[name])
    assert isinstance(made, Game | Mutable)
    return made


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    return tiny.make_board(folder, hidden=32, layers=2, heads=4, intermediate=64)


@given(st.text(tiny.CHARACTERS, max_size=80))
@example("  two  spaces , and don't !\n\n <action>1 2</action>  ")
@example("<s>")
@settings(deadline=None, database=None)
def test_printable_text_survives_encoding_and_decoding(text: str) -> None:
    ids = CORE.encode(text, add_special_tokens=False).ids
    assert CORE.decode(ids, skip_special_tokens=False) == text
    assert CORE.token_to_id("<unk>") not in ids


def test_a_tiny_policy_is_made_by_name_once_and_the_same_each_time(tmp_path: Path) -> None:
    folder = ensure_model("tiny-board", tmp_path / "a")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert ensure_model("tiny-board", tmp_path / "a") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    again = ensure_model("tiny-board", tmp_path / "b")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", sorted(GAMES))
def test_an_example_is_the_prompt_of_a_position_and_a_legal_move(name: str, policy: Path) -> None:
    environment, text = game(name), Text(str(policy))
    turns, made = random_play(environment, 40, seed=3), legal_play(environment, text, 40, seed=3)
    assert random_play(environment, 40, seed=4) != turns
    assert len(turns) == len(made) == 40
    for turn, each in zip(turns, made, strict=True):
        shown = text.prompt(environment.prompt(turn.task, turn.state)).replace(SPLIT, "")
        assert text.tokenizer.decode(each.tokens[: each.start]) == shown
        action = environment.read(turn.state, text.tokenizer.decode(each.tokens[each.start :]))
        assert (action.kind, action) == ("move", turn.action)
        assert turn.task.seed >= FIRST_SEED


@pytest.mark.slow
def test_skill_is_the_share_of_good_moves(policy: Path, tmp_path: Path) -> None:
    environment: Any = game("sokoban")
    shares = []
    for skill in (0.0, 1.0):
        turns = random_play(environment, 1500, seed=1, skill=skill)
        solvable = [turn for turn in turns if environment.good_moves(turn.state)]
        good = sum(turn.action.move in environment.good_moves(turn.state) for turn in solvable)
        shares.append(good / len(solvable))
    assert 0.25 < shares[0] < 0.4
    assert shares[1] == 1
    refused = r"warm_start\.skill = 0\.5: 'tictactoe' knows no good moves; set it to 0"
    with pytest.raises(ValueError, match=refused):
        ensure_legal_play(policy, game("tictactoe"), {}, WarmStart(skill=0.5), tmp_path, threads=1)


@pytest.mark.slow
def test_the_warm_start_lowers_the_loss_and_is_made_once_for_a_model_and_a_recipe(
    policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def start(model: Path, steps: int) -> Path:
        config = WarmStart(steps=steps, rows=8, lr=3e-3, warmup=4)
        return ensure_legal_play(
            model, game("tictactoe"), GAMES["tictactoe"], config, tmp_path / "cache", 1
        )

    out = start(policy, 40)
    losses = [float(found) for found in re.findall(r"loss ([0-9.]+)", capfd.readouterr().out)]
    assert len(losses) == 10
    assert losses[-1] < 0.5 * losses[0]
    assert start(policy, 40) == out
    assert capfd.readouterr().out == ""
    other = tiny.make_board(tmp_path / "other", 1, hidden=32, layers=1, heads=2, intermediate=32)
    assert len({out, start(policy, 1), start(other, 1)}) == 3


class _Killer:
    """Ends the process that reads it, as the system does for memory."""

    def __reduce__(self) -> Any:
        return os._exit, (9,)


@pytest.mark.slow
def test_a_warm_start_that_the_system_kills_has_a_remedy(policy: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match=r"killed.*warm_start\.rows"):
        from_play(
            policy, "nothing", [], [], lambda count: [_Killer()] * count,  # pyright: ignore
            WarmStart(steps=1, rows=1), tmp_path, 1,
        )  # fmt: skip
