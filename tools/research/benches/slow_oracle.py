"""The engine does not wait for an oracle: chains of Tic-Tac-Toe with an oracle that answers late, against one that answers at once.

The late oracle takes a log-normal time for each turn. A third case adds one await: a turn waits for the judgement of the turn before, as
if chains scored before they played on. All three cases have the same tasks and seeds, and play all games at once in one batch.

play_s: seconds until the engine's last answer. wall_s: seconds until the last judgement, for which the last turns wait in any case. busy:
the share of play_s in which the engine computed. The ratio compares these shares, because other load on the machine changes them least.
"""

import asyncio
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from judges.oracles.tictactoe import TicTacToeOracle
from scheduler.config import SchedulerConfig
from scheduler.context import Context
from scheduler.tree import Node
from tools.research.benches import game_shape
from wire.messages import JudgedTurn, Judgement

GAMES, ROUNDS, MAX_BATCH = 96, 3, 64
MEDIAN_S, SIGMA = 0.15, 1.3
GOAL = 0.9


class LateOracle(TicTacToeOracle):
    """Answers exactly after median_s exp(sigma z) seconds, with z standard normal drawn per turn. median_s = 0 answers at once."""

    concurrency = 4096
    batch = 1

    def __init__(self, median_s: float, sigma: float = SIGMA, seed: int = 0):
        super().__init__(kind="minimax")
        self.median_s, self.sigma, self.rng = median_s, sigma, random.Random(seed)
        self.delays: list[float] = []

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        self.delays.append(self.median_s * self.rng.lognormvariate(0.0, self.sigma))
        await asyncio.sleep(self.delays[-1])
        return await super().score(turns)


class Awaiting(Context):
    """A context whose turns wait for the judgement of the turn before."""

    def __init__(self, *options: Any):
        super().__init__(*options)
        self.told: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def judge(self, nodes: Sequence[Node]) -> None:
        """Judge the nodes, then mark each of them as judged."""
        await super().judge(nodes)
        for node in nodes:
            self.told[node.id].set()

    async def step(self, node: Node) -> Node | None:
        """Step after the judgement of the node."""
        await self.told[node.id].wait()
        return await super().step(node)


async def _measure(model: Path, folder: Path, games: int, median_s: float, kind: type[Context]) -> dict[str, float]:
    judge = LateOracle(median_s)
    settings = SchedulerConfig(strategy="chain", judge=judge.name, max_action_tokens=game_shape.ACTION_TOKENS)
    engine = game_shape.engine(model, MAX_BATCH)
    async with game_shape.opened(game_shape.Services(engine, [judge])) as services:
        counts = await game_shape.play(services, model, folder, games, settings, kind)
        wall = time.monotonic() - services.start_s
        played = services.answered_s - services.start_s
        return {
            "play_s": played,
            "wall_s": wall,
            "busy": engine.busy_s / played,
            "turns": counts["actions"],
            "longest_delay_s": max(judge.delays),
        }


def run(games: int = GAMES, rounds: int = ROUNDS, median_s: float = MEDIAN_S) -> dict[str, Any]:
    """Run all three cases in alternating rounds. Every value is the median over rounds."""
    kinds = {"at_once": (0.0, Context), "late": (median_s, Context), "awaited": (median_s, Awaiting)}
    by_round: list[dict[str, dict[str, float]]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = game_shape.policy(folder)
        asyncio.run(_measure(model, folder, 8, 0.0, Context))  # starts threads and libraries
        for _ in range(rounds):
            measured = {name: asyncio.run(_measure(model, folder, games, *options)) for name, options in kinds.items()}
            by_round.append(measured)
    row = {"name": "engine busy in play: late oracle / oracle that answers at once", "goal": GOAL, "better": "higher"}
    row |= {"ratio": _ratio(by_round, "late", "busy"), "awaited_ratio": _ratio(by_round, "awaited", "busy")}
    row |= {
        "play_ratio": _ratio(by_round, "late", "play_s"),
        "awaited_play_ratio": _ratio(by_round, "awaited", "play_s"),
    }
    row |= {"games": games, "median_s": median_s, "sigma": SIGMA}
    return row | {
        f"{name}_{key}": statistics.median(measured[name][key] for measured in by_round)
        for name in kinds
        for key in by_round[0][name]
    }


def _ratio(by_round: list[dict[str, dict[str, float]]], name: str, key: str) -> float:
    return statistics.median(measured[name][key] / measured["at_once"][key] for measured in by_round)
