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

from coppice.common import jsonl
from coppice.common.concurrency import gather
from coppice.common.numbers import Positive
from coppice.judges.base import Judge, checked
from coppice.judges.serve import BUILT_IN, make_worker
from coppice.tools.evaluating.examination import HOPELESS, TaskProgress
from coppice.tools.evaluating.folder import append, cut_torn_tail
from coppice.tools.finetuning.records import Trajectory, judged_turn, named_steps
from coppice.wire.faults import DataFault, Fault, InfrastructureFault
from coppice.wire.messages import JudgedTurn

COLUMN = "process"
"""If a judge has several columns, the score of a step is this one."""
REACHED = frozenset(
    "url api_key_env timeout_s patience_s attempts backoff_s concurrency wait_s".split()
)
"""Keys that say how an endpoint is reached. They may change between sessions."""

DEADLINE: dict[str, Any] = {
    "type": Positive,
    "default": 900.0,
    "metavar": "SECONDS",
    "help": "seconds for one step with all its attempts (default: %(default)g)",
}
"""How a parser adds --deadline."""


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


def lasting(judges: Sequence[JudgeSpec]) -> list[JudgeSpec]:
    """The judges without the keys that may change between sessions, and with the digests of their
    texts. Raises as ``make`` does."""

    def kept(value: Any) -> Any:
        nested = isinstance(value, dict)
        return {k: v for k, v in value.items() if k not in REACHED} if nested else value

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
        cut_torn_tail(path)
        try:
            lines = jsonl.lines(path, StepAnswer, "answers") if path.is_file() else ()
            self.found = {(a.judge, a.step): a for _, a in lines}
        except ValueError as error:
            remedy = "remove that line, then its step is asked again"
            raise InfrastructureFault(f"{error}: {remedy}") from None

    def add(self, answer: StepAnswer) -> None:
        append(self.path, answer)
        self.found[answer.judge, answer.step] = answer


async def ask_all(
    judges: Sequence[JudgeSpec], records: Sequence[Trajectory[Any]], path: Path, deadline_s: float,
    count_failed: bool = False,
) -> Answers:  # fmt: skip
    """Ask every judge about every step that has no answer in the file ``path``. May be cancelled at
    any moment and continued later.

    deadline_s: seconds per step. count_failed: failed steps are no fault. Raises Fault if a judge
    fails at ``HOPELESS`` steps in a row, or naming the first failed step of each judge.
    """
    answers = Answers(path)
    steps = {name: judged_turn(record, step) for name, record, step in named_steps(records)}
    failures = await gather(_ask(one, answers, steps, deadline_s) for one in judges)
    failed = []
    for one, of_judge in zip(judges, failures, strict=True):
        for name, reason in list(of_judge.items())[:1]:
            first = f"{len(of_judge)} steps failed, the first is {name}: {reason}"
            failed.append(f"judge {one.name}: {first}")
    if failed and not count_failed:
        raise InfrastructureFault("\n".join(failed))
    return answers


async def _ask(
    spec: JudgeSpec, answers: Answers, steps: dict[str, JudgedTurn], deadline_s: float
) -> dict[str, str]:
    """Ask one judge about the steps without an answer. Returns the reasons of the steps that
    failed."""
    judge, name = make(spec), spec.name
    column = COLUMN if COLUMN in judge.columns else judge.columns[0]
    left = [step for step in steps if (name, step) not in answers.found]
    progress = TaskProgress(len(steps), "steps", len(steps) - len(left), f"{name}: ")
    room, failures, in_a_row = asyncio.Semaphore(judge.concurrency), dict[str, str](), 0

    async def ask(step: str) -> None:
        nonlocal in_a_row
        async with room:
            if in_a_row >= HOPELESS:  # work that has failed may go on before it is cancelled
                return
            reason, score, said, before = "", None, "", judge.failed
            try:
                async with asyncio.timeout(deadline_s):
                    judgements = await judge.score([steps[step]])
                (judgement,) = checked(judge, [steps[step]], judgements)
                score, said = judgement.scores.get(column), judgement.explanation
                # The judge does not say which of its concurrent steps failed, so all of them are
                # asked again.
                reason = "" if score is not None or judge.failed == before else said or "no answer"
            except Fault as fault:
                reason = str(fault)
            except TimeoutError:
                reason = f"no judgement within {deadline_s:g} s (--deadline)"
            except Exception as error:  # noqa: BLE001
                reason = f"it raised {type(error).__name__}: {error}"
            if reason:
                failures[step] = reason
                in_a_row += 1
                if in_a_row >= HOPELESS:
                    what = f"{name}: {HOPELESS} steps in a row were not judged"
                    raise InfrastructureFault(f"{what}; the last: {reason}")
                return
            if score is not None and not 0 <= score <= 1:
                expected = "expected S/M, a number from 0 to 1"
                raise DataFault(f"{name} scored {step} {score:g}: {expected}")
            in_a_row = 0
            answers.add(StepAnswer(name, step, score, said.strip()))
            progress.one()

    if left:
        await judge.start()
        try:
            await gather(map(ask, left))
        finally:
            await judge.close()
    return failures
