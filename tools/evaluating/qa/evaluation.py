"""Answer the questions of all sets in every row. An interruption costs at most the replies that
were under way.

Invariant: a question is a tree of OUT/ROW/journal.sqlite and counts once in its row. An interrupted
question repeats the replies in its journal and takes its searches from the cache; only the rest is
generated.
"""

import functools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coppice.actors.environments.base import Task
from coppice.common.atomic import write_whole
from coppice.scheduler.concurrency import gather
from coppice.scheduler.config import UNJUDGED
from coppice.scheduler.evaluation.evaluation import Estimate, estimate
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.folder import Kept, Ledger, Measured
from coppice.tools.evaluating.in_process import InProcess, Seat, config_of
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval
from coppice.tools.evaluating.qa.rows import Player, Row, RowSettings
from coppice.tools.evaluating.qa.scoring import COUNTS, MEASURES, TOKENS, score, unanswered
from coppice.tools.evaluating.qa.sets import MULTI_HOP, QuestionSet
from coppice.wire.faults import InfrastructureFault
from coppice.wire.messages import Sample

_COUNTERS = (
    "prompt_tokens",
    "cached_tokens",
    "prefilled_tokens",
    "decoded_tokens",
    "busy_s",
    "requests",
    "retries",
)


class SetSettings(msgspec.Struct, frozen=True, omit_defaults=True):
    """A column. rejected: rows of the file that cannot work; reasons: their number by reason.
    digest: of the questions and golds."""

    name: str
    source: str
    questions: int
    rejected: int
    digest: str
    reasons: dict[str, int] = {}


class TableSettings(msgspec.Struct, frozen=True):
    """The settings that all rows of a table share, saved as OUT/evaluation.json. seed: chooses the
    subset of each set."""

    sets: list[SetSettings]
    seed: int


class RowResult(msgspec.Struct, frozen=True):
    """OUT/ROW/result.json. sets: the measures by set. macro: means of the sets' means; multi_hop:
    the same over the four multi-hop sets, if the table has them. failed: the reasons of the
    questions that could not be finished and scored 0, by set/task. seconds, generated_tokens,
    queries, hits (queries that the cache answered) and engine (its counters): over all sessions
    that were not killed.
    """

    name: str
    settings: RowSettings
    sets: dict[str, dict[str, Measured]]
    macro: dict[str, Estimate]
    multi_hop: dict[str, Estimate]
    failed: dict[str, str]
    seconds: float
    generated_tokens: int
    queries: int
    hits: int
    engine: dict[str, float]


class Result(msgspec.Struct, frozen=True):
    """OUT/result.json: every finished row of the folder, whichever command finished it, in the
    order in which they finished."""

    settings: TableSettings
    rows: list[RowResult]


def settings_of(sets: Sequence[QuestionSet], seed: int) -> TableSettings:
    """The settings that all rows share."""
    columns = [
        SetSettings(s.name, s.source, len(s.tasks), sum(s.rejected.values()), s.digest, s.rejected)
        for s in sets
    ]
    return TableSettings(columns, seed)


class Evaluation:
    """All rows of a command. ``play`` may be cancelled at any moment and continued later; then
    ``close``. finished: gets each new table."""

    def __init__(
        self, rows: Sequence[Row], sets: Sequence[QuestionSet], settings: TableSettings, out: Path,
        retrieval: CachedRetrieval | None, concurrency: int, finished: Callable[[Result], None] = lambda result: None,
    ):  # fmt: skip
        self.rows, self.sets, self.settings, self.out = rows, sets, settings, out
        self.retrieval, self.concurrency, self.finished = retrieval, concurrency, finished
        self.tasks = [(one.name, task) for one in sets for task in one.tasks]
        self.services: InProcess | None = None
        self.serving: Player | None = None

    async def play(self) -> Result:
        """Answer the questions that are not answered yet. Raises Fault if they cannot go on,
        NotStarted if they cannot begin."""
        for file in self.out.glob("*/result.json"):
            if _decoded(file, RowResult) is None:
                print(
                    f"{file} is torn, so its row is left out: run it again, its answers are kept",
                    file=sys.stderr,
                )
        unfinished = [
            row for row in self.rows if not (self.out / row.name / "result.json").is_file()
        ]
        if self.retrieval is not None and any(row.settings.retriever for row in unfinished):
            await self.retrieval.open()
        for row in self.rows:
            await self._row(row)
            result = self._so_far()
            write_whole(self.out / "result.json", result)
            self.finished(result)
        return self._so_far()

    def _so_far(self) -> Result:
        """The table of all rows whose folders hold a result."""
        before = _decoded(self.out / "result.json", Result)
        first = [row.name for row in before.rows] if before else []
        files = {file.parent.name: file for file in self.out.glob("*/result.json")}
        order = dict.fromkeys([*first, *(row.name for row in self.rows), *sorted(files)])
        rows = [_decoded(files[name], RowResult) for name in order if name in files]
        return Result(self.settings, [row for row in rows if row is not None])

    async def _row(self, row: Row) -> None:
        folder = self.out / row.name
        kept = Kept(folder, len(self.tasks), "questions", "not be answered", self.concurrency)
        ledger = Ledger(folder, "questions", kept.progress.start_s)
        try:
            if kept.before < len(self.tasks):
                print(
                    f"{row.name}: {len(self.tasks) - kept.before} questions",
                    file=sys.stderr,
                    flush=True,
                )
                services = await self._serve(row.player)
                start = self._stats(services)
                ledger.open(
                    lambda: {
                        key: value - start[key] for key, value in self._stats(services).items()
                    }
                )
            answering = _Answering(row, kept, self.services)
            scores = await gather(
                answering.question(i, *asked) for i, asked in enumerate(self.tasks)
            )
            ledger.close(kept.now)
            if not kept.now and not kept.before:
                reason = next(iter(kept.undone.values()), "there is none")
                raise InfrastructureFault(
                    f"{row.name}: no question could be answered; the first reason: {reason}"
                )
            write_whole(folder / "result.json", self._result(row, scores, kept.undone, ledger))
        finally:
            ledger.close(kept.now)
            kept.journal.close()

    # ------------------------------------------------------------------------------------------
    # services

    async def _serve(self, player: Player) -> InProcess:
        """Start the services with this player's engine, or keep them if they run already. Raises
        NotStarted."""
        if self.services is not None and self.serving is player:
            return self.services
        await self._rest()
        engine = player.make()
        more = {"retrieve": self.retrieval.handle} if self.retrieval is not None else {}
        self.services, self.serving = InProcess(engine, [], more), player
        await self.services.begin(player.load)
        return self.services

    def _stats(self, services: InProcess) -> dict[str, float]:
        stats = services.engine.stats() if services.engine is not None else {}
        asked = self.retrieval.counts if self.retrieval is not None else Counter[str]()
        counters = {key: stats.get(key, 0.0) for key in _COUNTERS}
        return counters | {"queries": asked["queries"], "hits": asked["hits"]}

    async def _rest(self) -> None:
        if self.services is not None:
            services, self.services, self.serving = self.services, None, None
            await services.close()

    async def close(self) -> None:
        """Release everything. The answers stay in the folder."""
        await self._rest()
        if self.retrieval is not None:
            await self.retrieval.close()

    # ------------------------------------------------------------------------------------------
    # results

    def _result(
        self, row: Row, scores: list[dict[str, float]], failed: dict[str, str], ledger: Ledger
    ) -> RowResult:
        measured: dict[str, dict[str, Measured]] = {}
        first = 0
        for one in self.sets:
            measured[one.name] = summary(
                scores[first : first + len(one.tasks)], row.settings.player == "endpoint"
            )
            first += len(one.tasks)
        multi = [measured[name] for name in MULTI_HOP if name in measured]
        spent = ledger.total()
        count = {
            key: int(spent.engine.get(key, 0)) for key in ("decoded_tokens", "queries", "hits")
        }
        return RowResult(
            row.name, row.settings, measured, macro(list(measured.values())),
            macro(multi) if len(multi) == len(MULTI_HOP) else {}, failed, spent.seconds,
            count["decoded_tokens"], count["queries"], count["hits"],
            {key: value for key, value in spent.engine.items() if key in _COUNTERS},
        )  # fmt: skip


T = TypeVar("T", Result, RowResult)


def _decoded(file: Path, kind: type[T]) -> T | None:
    """A stored result, None if the file is missing or torn; a lost result can be computed again
    from the journals."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind) if file.is_file() else None
    except msgspec.DecodeError:
        return None


def summary(scores: Sequence[dict[str, float]], in_bytes: bool = False) -> dict[str, Measured]:
    """Each measure over the questions of one set. in_bytes: the journal holds bytes, so measures in
    tokens are left out."""
    measures = {}
    for name in MEASURES:
        values = [score[name] for score in scores if name in score]
        if values and not (in_bytes and name in TOKENS):
            e = _of_counts(values) if name in COUNTS else estimate(values)
            measures[name] = Measured(e.mean, e.half, len(values))
    return measures


def _of_counts(values: Sequence[float]) -> Estimate:
    """Mean and 1.96 standard errors, even if every count is 0 or 1 (``estimate`` would treat such
    values as proportions)."""
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, n - 1)
    return Estimate(mean, 1.96 * math.sqrt(variance / n))


def macro(sets: Sequence[dict[str, Measured]]) -> dict[str, Estimate]:
    """The mean of the n sets' means, for each measure that all sets have. The sets are independent:
    half width sqrt(sum half^2) / n."""
    means, n = {}, len(sets)
    for name in MEASURES:
        if all(name in one for one in sets):
            half = math.sqrt(math.fsum(one[name].half ** 2 for one in sets)) / n
            means[name] = Estimate(math.fsum(one[name].mean for one in sets) / n, half)
    return means


class _Answering:
    """Answers the questions of one row. services: None if all questions were answered before."""

    def __init__(self, row: Row, kept: Kept, services: InProcess | None):
        self.row, self.kept, self.services = row, kept, services
        s = row.settings
        self.answer = methods.load(s.method).answer
        self.config = config_of(s, UNJUDGED, budget=s.how.budget)

    async def question(self, position: int, of: str, task: Task) -> dict[str, float]:
        """The scores of one question, from the last action of its tree. of: the name of its set."""
        grow = functools.partial(self._grow, of, task)
        tree = await self.kept.task(
            position, task.id, self.row.settings.version, grow, f"{of}/{task.id}"
        )
        if tree is None:
            return unanswered()
        return {
            name: value for name, value in tree.actions()[-1].scores.items() if name in MEASURES
        }

    async def _grow(self, of: str, task: Task, tree: Tree, said: list[Sample]) -> None:
        assert self.services is not None, "nothing was started"
        seat: Any = Seat(self.services, said)
        counts: Counter[str] = Counter()
        how = self.row.settings.how
        how = msgspec.structs.replace(how, budget=self.row.settings.budgets.get(of, how.budget))
        config = msgspec.structs.replace(self.config, budget=how.budget)
        runtime = Runtime(
            seat, self.kept.journal, self.row.player.text, self.row.environment, config, counts,
            lambda tree, turns: None,
        )  # fmt: skip
        # The draws are the same again after an interruption.
        context = Context(runtime, task, tree, random.Random(f"heldout/{tree.id}"))
        await self.answer(tree, context, how)
        final = tree.actions()[-1]
        final.scores |= score(tree, task.golds, counts["retrievals"])
        final.scores["outcome"] = final.scores["em"]  # coppice trees shows this column
        context.changed([final])
