"""Ask judges about the steps of records. Each answer is appended to a file before it counts.

Invariant: a judge is asked about a step until it answers. A failed endpoint is no answer; an output
that cannot be read is an answer. A step whose answer is in the file is never asked again.
"""

import asyncio
import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.judges.base import Judge, checked
from coppice.judges.serve import BUILT_IN, make_worker
from coppice.scheduler.concurrency import gather
from coppice.tools.evaluating.examination import HOPELESS, TaskProgress
from coppice.tools.evaluating.folder import append, cut_torn_tail
from coppice.tools.evaluating.judge_bench import record
from coppice.tools.evaluating.judge_bench.record import Trajectory
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import JudgedTurn

COLUMN = "process"
"""If a judge has several columns, the score of a step is this one."""
DEADLINE_S = 900.0
"""Seconds for one judgement, with the judge's own attempts. A judge that takes longer hangs."""


class JudgeSpec(msgspec.Struct, frozen=True):
    """A judge as ``judges.serve.make_worker`` takes it. name: the name under which its answers are
    filed.

    texts: digest of the judge's templates and, for a plug-in, of its source file; "" if they do not
    matter.
    """

    name: str
    spec: str
    options: dict[str, Any] = {}
    texts: str = ""


REACHED = frozenset(
    "url api_key_env timeout_s patience_s attempts backoff_s concurrency wait_s".split()
)
"""Keys that say how an endpoint is reached. They may change between sessions."""


def lasting(judges: Sequence[JudgeSpec]) -> list[JudgeSpec]:
    """The judges without the keys that may change between sessions, and with the digests of their
    texts. Raises as ``make`` does."""

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: below for key, below in value.items() if key not in REACHED}

    specs = []
    for one in judges:
        judge = make(one)
        templates: dict[str, str] = getattr(judge, "templates", {})
        texts = [f"{part}\0{text}" for part, text in sorted(templates.items())]
        if one.spec not in BUILT_IN and (source := inspect.getsourcefile(type(judge))):
            texts.append(Path(source).read_text())
        digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12] if texts else ""
        options = {key: kept(value) for key, value in one.options.items()}
        specs.append(JudgeSpec(one.name, one.spec, options, digest))
    return specs


class StepAnswer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of the file. score: S/M in [0, 1], None if the output could not be read; text: the
    judge's output."""

    judge: str
    step: str
    score: float | None
    text: str = ""


def make(spec: JudgeSpec) -> Judge:
    """Make the judge. Raises ValueError if it does not exist or does not score a step by one
    number."""
    judge = make_worker(spec.spec, spec.options)
    if not isinstance(judge, Judge):
        raise ValueError(f"{spec.spec!r} judges nothing: expected a judge")
    if COLUMN not in judge.columns and len(judge.columns) != 1:
        columns = f"judge {judge.name} has the columns {list(judge.columns)}"
        raise ValueError(f"{columns}: expected {COLUMN!r}, or one column")
    return judge


class Answers:
    """The file of answers, which the caller must have locked. found: the answers by judge and step.

    A torn last line, left by a killed session, is removed. Raises InfrastructureFault that names a
    line which is no answer.
    """

    def __init__(self, path: Path):
        self.path = path
        self.found: dict[tuple[str, str], StepAnswer] = {}
        cut_torn_tail(path)
        try:
            lines = record.lines(path, StepAnswer) if path.is_file() else ()
            self.found = {(a.judge, a.step): a for _, a in lines}
        except ValueError as error:
            remedy = "remove that line, then its step is asked again"
            raise InfrastructureFault(f"{error}: {remedy}") from None

    def add(self, answer: StepAnswer) -> None:
        """Append an answer to the file."""
        append(self.path, answer)
        self.found[answer.judge, answer.step] = answer


class _Asking:
    """Asks one judge about the steps without an answer. failures: the reasons by step."""

    def __init__(self, spec: JudgeSpec, answers: Answers, deadline_s: float):
        self.name, self.judge = spec.name, make(spec)
        self.answers, self.deadline_s = answers, deadline_s
        columns = self.judge.columns
        self.column = COLUMN if COLUMN in columns else columns[0]
        self.room = asyncio.Semaphore(self.judge.concurrency)
        self.failures: dict[str, str] = {}
        self.failed_in_a_row = 0

    async def all(self, steps: Sequence[tuple[str, JudgedTurn]]) -> None:
        left = [step for step in steps if (self.name, step[0]) not in self.answers.found]
        before = len(steps) - len(left)
        self.progress = TaskProgress(len(steps), "steps", before, f"{self.name}: ")
        if left:
            await self.judge.start()
            try:
                await gather(self._one(name, turn) for name, turn in left)
            finally:
                await self.judge.close()

    async def _one(self, name: str, turn: JudgedTurn) -> None:
        async with self.room:
            # Work that has failed may go on for a moment before it is cancelled.
            if self.failed_in_a_row >= HOPELESS:
                return None
            before = self._failed()
            try:
                async with asyncio.timeout(self.deadline_s):
                    judgements = await self.judge.score([turn])
                (judgement,), _ = checked(self.judge, [turn], judgements)
            except Fault as fault:
                return self._fail(name, str(fault))
            except TimeoutError:
                return self._fail(name, f"no judgement within {self.deadline_s:g} s (--deadline)")
            score = judgement.scores.get(self.column)
            if score is None and self._failed() > before:
                # The judge does not say which of its concurrent steps failed, so all of them are
                # asked again.
                return self._fail(name, judgement.explanation)
            if score is not None and not 0 <= score <= 1:
                expected = "expected S/M, a number from 0 to 1"
                raise DataFault(f"{self.name} scored {name} {score:g}: {expected}")
            self.failed_in_a_row = 0
            self.answers.add(StepAnswer(self.name, name, score, judgement.explanation.strip()))
            return self.progress.one()

    def _failed(self) -> float:
        return getattr(self.judge, "stats", dict)().get("failed", 0.0)

    def _fail(self, name: str, reason: str) -> None:
        self.failures[name] = reason
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= HOPELESS:
            what = f"{self.name}: {HOPELESS} steps in a row were not judged"
            raise InfrastructureFault(f"{what}; the last: {reason}")


async def ask_all(
    judges: Sequence[JudgeSpec], records: Sequence[Trajectory[Any]], path: Path,
    deadline_s: float = DEADLINE_S, count_failed: bool = False,
) -> Answers:  # fmt: skip
    """Ask every judge about every step that has no answer in the file ``path``. May be cancelled at
    any moment and continued later.

    deadline_s: seconds per step. count_failed: failed steps are no fault. Raises Fault if a judge
    fails at ``HOPELESS`` steps in a row, or naming the first failed step of each judge.
    """
    answers = Answers(path)
    steps = [
        (record.step_id(r, number), record.judged_turn(r, step))
        for r in records
        for number, step in enumerate(r.steps, 1)
    ]
    working = [_Asking(one, answers, deadline_s) for one in judges]
    await gather(one.all(steps) for one in working)
    failed = []
    for one in working:
        for name, reason in list(one.failures.items())[:1]:
            first = f"{len(one.failures)} steps failed, the first is {name}: {reason}"
            failed.append(f"judge {one.name}: {first}")
    if failed and not count_failed:
        failed.append("--count-failed counts such steps as wrong")
        raise InfrastructureFault("\n".join(failed))
    return answers
