"""The judge of outcomes, which hangs once: the first process that scores a turn never ends."""

from pathlib import Path

from coppice.judges.exact_match import ExactMatch
from coppice.wire.messages import JudgedTurn, Judgement


class Hanging(ExactMatch):
    def __init__(self, gate: str):
        super().__init__()
        self.gate = Path(gate)

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        if not self.gate.exists():
            self.gate.touch()
            self.never_ends()
        return await super().score(turns)

    def never_ends(self) -> None:
        while True:
            pass
