"""Chains and Monte Carlo values on the real games, with an engine that plays scripted or random
legal moves."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.environments.game import Game
from coppice.actors.environments.sudoku.environment import Sudoku
from coppice.actors.environments.tictactoe.environment import TicTacToe
from coppice.common.concurrency import gather
from coppice.judges.oracles.sudoku import SudokuOracle
from coppice.judges.oracles.tictactoe import MinimaxPlayer, TicTacToeOracle
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth import rollouts
from coppice.scheduler.growth.strategies import chain, mc_value
from coppice.scheduler.growth.text import Text
from coppice.wire import messages as wire
from coppice.wire.faults import DataFault, InfrastructureFault
from tests.agent_stage import Staged
from tests.scheduler.test_strategies import sample


class Services:
    """Real oracles and players; an engine that answers from the prompt's list of legal moves. move:
    the policy in its place."""

    move: Callable[[str], str]

    def __init__(self, text: Text, game: Game):
        self.text, self.judged, self.rng = text, 0, random.Random(5)
        plays = isinstance(game, TicTacToe)
        self.oracle: Any = TicTacToeOracle(kind="minimax") if plays else SudokuOracle()
        self.move = self._in_tictactoe if plays else self._in_sudoku
        self.generated: list[wire.GenerateRequest] = []
        self.hold: asyncio.Event | None = None

    async def call(self, service: str, request: Any, **_: Any) -> Any:
        if isinstance(request, wire.GenerateRequest):
            self.generated.append(request)
            prompt = self.text.decode(request.tokens)
            samples = [
                sample(self.text, self.move(prompt.replace("<|assistant|>", "").strip()))
                for _ in range(request.n)
            ]
            return wire.GenerateResult(samples, len(request.tokens), 0)
        if isinstance(request, wire.PlayRequest):
            assert service == "player.tictactoe_minimax"
            return wire.PlayResult(list(await MinimaxPlayer().play(request.state, request.seed)))
        assert isinstance(request, wire.JudgeRequest)
        if self.hold is not None:
            await self.hold.wait()
        self.judged += len(request.turns)
        return wire.JudgeResult(await self.oracle.score(request.turns))

    def _in_tictactoe(self, prompt: str) -> str:
        return f"<action>{self.rng.choice(prompt.splitlines()[-1].split())}</action>"

    def _in_sudoku(self, prompt: str) -> str:
        cell = self.rng.choice([i for i, c in enumerate(prompt[-16:]) if c == "."])
        return f"<action>{cell // 4 + 1} {cell % 4 + 1} {self.rng.randint(1, 4)}</action>"


def staged(folder: Path, llama: Path, game: Game) -> Staged:
    """A context over those services."""
    chosen, text = SchedulerConfig(judge="oracle", max_action_tokens=40), Text(str(llama))
    world = text, Services(text, game), game, game.task(3), chosen
    return Staged(folder / "journal", *world, most=8)


def tictactoe(**options: Any) -> TicTacToe:
    chosen: dict[str, Any] = {"opponents": {"random": 1.0}} | options
    return TicTacToe(prompt="tictactoe_compact", **chosen)


def sudoku(**options: Any) -> Sudoku:
    return Sudoku(prompt="sudoku_compact", size=4, blanks=4, **options)


async def test_a_half_grown_chain_judges_what_was_not_judged(tmp_path: Path, llama: Path) -> None:
    stage = staged(tmp_path, llama, sudoku())
    stage.services.hold = asyncio.Event()
    growing = asyncio.create_task(stage.grow(chain))
    async with asyncio.timeout(10):
        while len(stage.services.generated) < 2:
            await asyncio.sleep(0.001)
    growing.cancel()
    await asyncio.gather(growing, return_exceptions=True)
    stage.services.hold = None
    tree = stage.reread()
    before = tree.actions()
    assert before and all("reward" not in action.scores for action in before)
    await stage.grow(chain, tree)
    (turns,) = stage.groups
    assert [turn.node for turn in turns][: len(before)] == [action.id for action in before]
    assert all("reward" in turn.scores for turn in turns)
    assert [turn.turn for turn in turns] == list(range(1, len(turns) + 1))


async def test_continuations_do_not_change_the_episode(tmp_path: Path, llama: Path) -> None:
    """The opponent's draws of the chain are the same whether its states are valued or not."""
    boards, grown = [], list[Any]([(chain, {}), (mc_value, {"continuations": 6})])
    for strategy, options in grown:
        (folder := tmp_path / str(len(options))).mkdir()
        stage = staged(folder, llama, tictactoe())
        stage.services.move = lambda prompt: (
            f"<action>{prompt.splitlines()[-1].split()[0]}</action>"
        )
        await stage.grow(strategy, **options)
        prompts = [node for node in stage.tree.nodes.values() if node.kind == "prompt"]
        boards.append([node.state["board"] for node in prompts])
    assert boards[0] == boards[1]


async def test_every_state_has_a_monte_carlo_value_and_error(tmp_path: Path, llama: Path) -> None:
    stage = staged(tmp_path, llama, sudoku(terminate_on_wrong=True))
    await stage.grow(mc_value, continuations=20)
    (turns,) = stage.groups
    assert "outcome" in turns[-1].scores
    for turn in turns:
        value = turn.scores["mc_value"]
        assert -1 <= value <= 1
        share = (value + 1) / 2  # outcomes are +1 or -1
        expected = 2 * (share * (1 - share) / 19) ** 0.5
        assert turn.scores["mc_error"] == pytest.approx(expected)
    assert stage.counts["continuation_steps"] >= 20 * len(turns)
    assert stage.counts["environment_steps"] == len(turns)


async def test_the_continuations_of_a_state_are_one_request(tmp_path: Path, llama: Path) -> None:
    stage = staged(tmp_path, llama, tictactoe())
    await stage.grow(mc_value, continuations=20)
    first = stage.services.generated[0].tokens.tolist()
    from_first = [r for r in stage.services.generated if r.tokens.tolist() == first]
    # the chain's own turn, then 20 continuations, at most 8 a request
    assert [r.n for r in from_first] == [1, 8, 8, 4]
    total = sum(r.n for r in stage.services.generated)
    assert total == stage.counts["environment_steps"] + stage.counts["continuation_steps"]


async def test_concurrent_work_has_one_fate() -> None:
    done = list[int]()

    async def work(number: int) -> int:
        await asyncio.sleep(0.001 * number)
        if number == 3:
            raise InfrastructureFault("three")
        done.append(number)
        return number

    assert await gather(work(i) for i in (2, 1)) == [2, 1]
    with pytest.raises(InfrastructureFault, match="three"):
        await gather(work(i) for i in (1, 3, 200))
    assert done == [1, 2, 1] and len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize(("strategy", "options"), [(chain, {}), (mc_value, {"continuations": 4})])
async def test_after_a_crash_no_finished_game_is_played_or_valued_again(
    tmp_path: Path, llama: Path, strategy: Any, options: Any
) -> None:
    game = tictactoe(opponents={"tictactoe_minimax": 1.0})
    stage = staged(tmp_path, llama, game)
    await stage.grow(strategy, **options)
    (turns,) = stage.groups
    asked = len(stage.services.generated)
    tree = stage.reread()
    tree.groups.clear()  # as if the crash had come just before the group
    await stage.grow(strategy, tree, **options)
    assert len(stage.services.generated) == asked
    assert stage.groups[1] == turns


class WholeLoss(Sudoku):
    """Declares its loss as a person may: without a point."""

    loss = -1


async def test_a_continuation_that_outgrows_the_context_counts_as_lost(
    tmp_path: Path, llama: Path
) -> None:
    context = staged(tmp_path, llama, WholeLoss("sudoku_compact", size=4, blanks=4)).anew()
    await context.plant()
    (action,) = await context.generate(await context.tip(), 1)
    context.runtime = msgspec.structs.replace(context.runtime, longest=60)
    before = rollouts.position_before(context, action)
    assert await rollouts.outcomes(context, before, 8) == [-1.0] * 8


async def test_a_continuation_that_never_ends_is_a_fault_of_its_task(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = staged(tmp_path, llama, Sudoku("sudoku_compact", size=4, blanks=4)).anew()
    await context.plant()
    (action,) = await context.generate(await context.tip(), 1)
    monkeypatch.setattr("coppice.scheduler.growth.context.MOST_TURNS", 2)
    with pytest.raises(DataFault, match="an episode of sudoku has 2 turns and goes on"):
        await rollouts.outcomes(context, rollouts.position_before(context, action), 8)
