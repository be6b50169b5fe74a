"""A Sokoban oracle that is wrong on a share of all steps: how well must a step reward know to help?
(The study oprl-threshold, docs/replication/oprl.md.)"""

import zlib

import msgspec

from coppice.actors.environments.sokoban.environment import SokobanState
from coppice.common.numbers import Share
from coppice.judges.oracles.sokoban import SokobanOracle
from coppice.wire.messages import JudgedTurn, Judgement


class FlippedSokoban(SokobanOracle):
    """The column "label" is "optimal", turned for a share ``flip`` of all pairs of a position and a
    step. A pair is always turned or never: a model that is wrong is wrong each time it looks."""

    name = "sokoban_flipped"
    columns = (*SokobanOracle.columns, "label")

    def __init__(self, flip: Share = 0.0):
        super().__init__("binary")
        self.flip = flip

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        judgement = super().judge_state(turn)
        board = msgspec.convert(turn.state, SokobanState).board
        draw = zlib.crc32(f"{board} {turn.move}".encode()) / 2**32
        right = judgement.scores["optimal"]
        judgement.scores["label"] = 1 - right if draw < self.flip else right
        return judgement
