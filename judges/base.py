"""The plug-ins of a judge process: judges, opponents (players) and speakers."""

import asyncio
import math
import reprlib
from collections.abc import Sequence
from typing import Any, ClassVar

from coppice.common.numbers import LARGEST
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import JudgedTurn, Judgement, SpeakRequest


class PlugIn:
    """What judges, players and speakers share. concurrency: requests in progress at once."""

    service_kind: ClassVar[str] = ""
    name: str = ""
    concurrency: int = 64

    @property
    def service(self) -> str:
        """The service that it offers, such as "judge.slate"."""
        return f"{self.service_kind}.{self.name}"

    async def start(self) -> None:
        """Acquire what the work needs. Called once, before the first request."""

    async def close(self) -> None:
        """Release what ``start`` acquired."""


class Judge(PlugIn):
    """Subclass this, set ``name`` and ``columns`` (the names of its scores), and write ``score``.
    limits: the lowest and the highest score; an answer beyond them is refused. environments: the
    names of the environments that it can judge, () for any. batch: most turns in one ``score``
    call. failed: how many replies of a model did not come so far."""

    service_kind = "judge"
    columns: Sequence[str] = ()
    limits: tuple[float, float] = (-LARGEST, LARGEST)
    environments: Sequence[str] = ()
    concurrency = 32
    batch: int = 32
    failed: int = 0

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        """Return one judgement per turn, in order, without columns that do not apply to it."""
        raise NotImplementedError(f"{type(self).__name__} does not implement score")


class RuleJudge(Judge):
    """A judge that scores each turn by itself, without waiting: write ``judge``. threaded: whether
    judging takes so long that it must leave the event loop."""

    concurrency = 256
    batch = 256
    threaded: ClassVar[bool] = False

    async def score(self, turns: list[JudgedTurn]) -> list[Judgement]:
        if self.threaded:
            return await asyncio.to_thread(lambda: [self.judge(turn) for turn in turns])
        return [self.judge(turn) for turn in turns]

    def judge(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of one turn."""
        raise NotImplementedError(f"{type(self).__name__} does not implement judge")


class Oracle(RuleJudge):
    """A rule judge of ``turn.state``: write ``judge_state``. Its ValueError says that the state is
    not one of the judge's environment, and becomes a DataFault."""

    def judge(self, turn: JudgedTurn) -> Judgement:
        try:
            return self.judge_state(turn)
        except ValueError as error:
            fault = f"judge {self.name}, task {turn.question}: its state is not one of"
            raise DataFault(f"{fault} {self.environments}: {error}") from None

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        """Return the judgement of one turn."""
        raise NotImplementedError(f"{type(self).__name__} does not implement judge_state")


class Player(PlugIn):
    """An opponent: subclass this, set ``name`` and write ``play``."""

    service_kind = "player"

    async def play(self, state: Any, seed: int) -> tuple[int, ...]:
        """Return a legal move in ``state`` (plain values). ``seed`` decides all randomness."""
        raise NotImplementedError(f"{type(self).__name__} does not implement play")


class Speaker(PlugIn):
    """A partner that replies in text: subclass this, set ``name`` and write ``speak``."""

    service_kind = "speaker"

    async def speak(self, request: SpeakRequest) -> str:
        """Return the reply to ``request.messages``, without a stop string."""
        raise NotImplementedError(f"{type(self).__name__} does not implement speak")


def checked(judge: Judge, turns: list[JudgedTurn], returned: Any) -> list[Judgement]:
    """Return what ``judge.score`` returned for ``turns``, with scores that are NaN or infinite
    moved to ``invalid``. Raises InfrastructureFault unless it is one Judgement per turn, of
    declared columns and numbers."""

    def wrong(what: str, wish: str) -> InfrastructureFault:
        return InfrastructureFault(f"judge {judge.name} returned {what}; expected {wish}")

    if not isinstance(returned, list | tuple):
        raise wrong(_short(returned), "a list of Judgement, one per turn")
    if len(returned) != len(turns):
        raise wrong(f"{len(returned)} judgements for {len(turns)} turns", "one per turn")
    judgements = []
    for judgement in returned:
        if not isinstance(judgement, Judgement):
            raise wrong(f"{_short(judgement)} for a turn", "a wire.messages.Judgement")
        if not isinstance(judgement.scores, dict):
            raise wrong(f"the scores {_short(judgement.scores)}", "a number for each column")
        if not isinstance(judgement.invalid, list | tuple | set):
            raise wrong(f"invalid = {_short(judgement.invalid)}", "a list of columns")
        if unknown := {*judgement.scores, *judgement.invalid} - {*judge.columns}:
            raise wrong(f"columns {sorted(unknown)}", f"declared ones of {list(judge.columns)}")
        if not isinstance(judgement.explanation, str):
            raise wrong(f"the explanation {_short(judgement.explanation)}", "a text")
        scores, invalid = dict[str, float](), set(judgement.invalid)
        for column, value in judgement.scores.items():
            try:  # text is refused, even if it reads like a number
                score = None if isinstance(value, str | bytes) else float(value)
            # a tensor of several values raises RuntimeError
            except (TypeError, ValueError, OverflowError, RuntimeError):
                score = None
            if score is None:
                wish = "a number, or the column in Judgement.invalid"
                raise wrong(f"{_short(value)} in column {column!r}", wish)
            if math.isfinite(score) and column not in invalid:
                scores[column] = score
            else:
                invalid.add(column)
        text = judgement.explanation.encode(errors="replace").decode()  # half a pair has no UTF-8
        judgements.append(Judgement(scores, sorted(invalid), text))
    return judgements


def _short(value: Any) -> str:
    return f"{reprlib.repr(value)} ({type(value).__name__})"
