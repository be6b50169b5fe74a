"""Frozen lake on random maps, with the exact chances of its oracle (docs/replication/trees.md).

A lake's rules are gymnasium's FrozenLake: four steps, a step slides to a side with a chance, a hole
ends the episode. Here the map is drawn by the task's seed, an episode has a budget of turns, and
the best chance to arrive is known in every state by backward induction over the turns left.
"""

import random
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from coppice.actors.environments.base import HELD_OUT_SEEDS, Task, Tools, Transition
from coppice.actors.environments.game import Game
from coppice.common.numbers import Count, Share
from coppice.judges.base import Oracle
from coppice.wire.messages import JudgedTurn, Judgement

WORDS = ("left", "down", "right", "up")
"""In gymnasium's order, so that a slide to either side is the next and the last word."""
STEPS = ((0, -1), (1, 0), (0, 1), (-1, 0))
HOLES = 0.2
"""The chance that a cell is a hole, as in gymnasium's random maps."""


class LakeState(msgspec.Struct, frozen=True):
    """An episode under way. lake: the rows of the map without breaks: S, F, H, G. place: the cell.
    turn: the turns used. steady, turns: of the environment."""

    lake: str
    place: int
    turn: int
    steady: float
    turns: int
    past: tuple[str, ...] = ()
    over: bool = False


class Lake(Game):
    """The rules. size: of the square map. steady: the chance that a step goes where it was meant;
    it slides to either side with half the rest each. turns: the budget of an episode. Held-out
    maps and training maps are never the same map."""

    name = "lake"
    headline = "success"
    folder = Path(__file__).parent
    loss = 0.0
    measured = ("success",)

    def __init__(self, size: Count = 8, steady: Share = 0.9, turns: Count = 24):
        super().__init__("lake")
        self.size, self.steady, self.max_turns = size, steady, turns

    def initial(self, task: Task) -> LakeState:
        lake = drawn(self.size, task.seed, task.seed in HELD_OUT_SEEDS)
        return LakeState(lake, 0, 0, self.steady, self.max_turns)

    def view(self, state: LakeState) -> dict[str, str]:
        """{row}: the map without breaks, where P is the player. {left}: the turns left."""
        row = state.lake[: state.place] + "P" + state.lake[state.place + 1 :]
        return {"row": row, "left": str(self.max_turns - state.turn)}

    def move(self, text: str) -> tuple[int, ...] | None:
        word = text.strip().lower()
        return (WORDS.index(word),) if word in WORDS else None

    def moves(self, state: LakeState) -> list[tuple[int, ...]]:
        return [] if state.over else [(way,) for way in range(4)]

    def good_moves(self, state: LakeState) -> list[tuple[int, ...]]:
        chances = arrivals(state)
        return [(way,) for way in range(4) if chances[way] >= chances.max() - TIE]

    def notation(self, move: tuple[int, ...]) -> str:
        return WORDS[move[0]]

    async def apply(self, state: LakeState, move: tuple[int, ...], tools: Tools) -> Transition:
        draw, way = tools.rng.random(), move[0]
        if draw >= state.steady:
            way += 1 if draw < (1 + state.steady) / 2 else -1
        place = moved(self.size, state.place, way % 4)
        after = msgspec.structs.replace(state, place=place)
        ends = {"H": 0.0, "G": 1.0}
        return self.turned(after, "", ends.get(state.lake[place]))

    def lost(self, state: LakeState) -> dict[str, float]:
        return {"success": float(state.lake[state.place] == "G")}


TIE = 1e-9
"""Chances that differ by less are equal."""


class LakeOracle(Oracle):
    """reward: what the column "reward" is: "optimal" (1 for a step with the best chance to arrive
    in the turns left, else 0) or "lead" (see below).

    chance: of arriving after this step, played well from there on. lead: the chance that the step
    costs against the best, at most 0. best: the chance of the best step. valid_share: the share of
    best steps among the four."""

    name = "lake"
    environments = ("lake",)
    columns = ("reward", "optimal", "lead", "chance", "best", "valid_share")
    concurrency = 64
    batch = 64
    threaded = True

    def __init__(self, reward: Literal["optimal", "lead"] = "optimal"):
        self.reward = reward

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        chances = arrivals(msgspec.convert(turn.state, LakeState))
        best, chance = chances.max(), 0.0 if turn.move is None else chances[turn.move[0]]
        optimal = float(turn.move is not None and chance >= best - TIE)
        scores = {
            "optimal": optimal,
            "lead": float(chance - best),
            "chance": float(chance),
            "best": float(best),
            "valid_share": float((chances >= best - TIE).mean()),
        }
        return Judgement({"reward": scores[self.reward], **scores})


@lru_cache(4096)
def drawn(size: int, seed: int, held_out: bool) -> str:
    """Return a map on which the goal can be reached, of the held-out or the training maps."""
    rng = random.Random(f"lake/{size}/{seed}")
    while True:
        cells = ["H" if rng.random() < HOLES else "F" for _ in range(size * size)]
        cells[0], cells[-1] = "S", "G"
        lake = "".join(cells)
        if is_held_out(lake) == held_out and values(lake, 1.0, 4 * size)[-1][0] > 0:
            return lake


def is_held_out(lake: str) -> bool:
    """Return whether a map is one of the eighth that is held out."""
    return random.Random(lake).random() < 1 / 8


def moved(size: int, place: int, way: int) -> int:
    """Return the cell after one step; the edge stops it."""
    row, column = place // size + STEPS[way][0], place % size + STEPS[way][1]
    return row * size + column if 0 <= row < size and 0 <= column < size else place


@lru_cache(4096)
def values(lake: str, steady: float, turns: int) -> np.ndarray:
    """Return the best chance to arrive, float64 [turns + 1, cells]: by the turns left, and cell."""
    cells = np.array(list(lake))
    table = [(cells == "G").astype(float)]
    for _ in range(turns):
        chance = _by_step(lake, steady, table[-1]).max(1)
        table.append(np.where(cells == "G", 1.0, np.where(cells == "H", 0.0, chance)))
    return np.array(table)


def arrivals(state: LakeState) -> np.ndarray:
    """Return the chance to arrive after each of the four steps, float64 [4]."""
    left = state.turns - state.turn
    later = values(state.lake, state.steady, state.turns)[left - 1]
    return _by_step(state.lake, state.steady, later)[state.place]


def _by_step(lake: str, steady: float, later: np.ndarray) -> np.ndarray:
    """Return the chances by cell and step, float64 [cells, 4]. later: by the cell reached."""
    size = int(len(lake) ** 0.5)
    reached = later[_places(size)]
    slides = np.roll(reached, -1, 1) + np.roll(reached, 1, 1)
    return steady * reached + (1 - steady) / 2 * slides


@lru_cache(8)
def _places(size: int) -> Any:
    """Return the cell that a step reaches, int [cells, 4]."""
    return np.array([[moved(size, place, way) for way in range(4)] for place in range(size * size)])
