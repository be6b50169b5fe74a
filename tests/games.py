"""A game for whole runs with an untrained policy, named "tests.games:AnyText" in data.environment,
and what tests of environments share."""

import asyncio
import zlib
from typing import Any

import msgspec

from coppice.actors.environments.base import Action, Transition
from coppice.actors.environments.tictactoe.environment import TicTacToe, TicTacToeState
from coppice.judges.base import Judge, checked
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn


class AnyText(TicTacToe):
    """Tic-Tac-Toe in which every text is a legal move, the one its checksum picks."""

    def read(self, state: TicTacToeState, text: str) -> Action:
        moves = self.moves(state)
        return Action("move", text, move=moves[zlib.crc32(text.encode()) % len(moves)])


def play(environment: Any, state: Any, *actions: str, tools: Any = None) -> list[Transition]:
    """The transitions of actions, or of whole replies, which begin with "<"."""
    transitions: list[Transition] = []
    for action in actions:
        reply = action if action.startswith("<") else f"<think>x</think><action>{action}</action>"
        step = environment.step(state, environment.read(state, reply), tools)
        transitions.append(asyncio.run(step))
        state = transitions[-1].state
    return transitions


def scores(judge: Judge, turns: list[JudgedTurn]) -> list[dict[str, float]]:
    made = checked(judge, turns, asyncio.run(judge.score(turns)))
    assert not any(judgement.invalid for judgement in made)
    return [judgement.scores for judgement in made]


def travelled(turns: list[JudgedTurn]) -> list[JudgedTurn]:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(turns), type=list[JudgedTurn])


def refused(judge: Judge, state: Any) -> bool:
    turn = JudgedTurn("other-7", [], "", "", 1, 4, state=state, move=[0, 0, 1])
    try:
        asyncio.run(judge.score([turn]))
    except DataFault as error:
        return f"judge {judge.name}, task other-7: its state is not one of" in str(error)
    return False
