"""Answer the questions of all sets in every row. An interruption costs at most the replies that
were under way: an interrupted question repeats the replies in its journal and takes its searches
from the cache."""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from coppice.actors.environments.base import Task
from coppice.common.atomic import write_whole
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.evaluation.evaluation import Estimate, estimate
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating.examination import Evaluation, PolicyRow, SampleMean, sample_mean
from coppice.tools.evaluating.in_process import ResumedCalls
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.methods import How
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval
from coppice.tools.evaluating.qa.scoring import COUNTS, MEASURES, TOKENS, score
from coppice.tools.evaluating.qa.sets import MULTI_HOP, QuestionSet

_COUNTERS = (
    "prompt_tokens cached_tokens prefilled_tokens decoded_tokens busy_s requests retries".split()
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


class RowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the questions on which a row's result depends, saved as
    OUT/ROW/evaluation.json.

    source: model folder, run or URL. weights: their digest, "" for an endpoint. options: the
    environment's, for the method search. prompts: digest of the method's prompts. budgets: the
    budgets of sets that differ from how.budget. retriever: what answers the method's queries, "" if
    it has none.
    """

    method: str
    player: str
    source: str
    model: str = ""
    version: int = 0
    weights: str = ""
    fields: dict[str, Any] = {}
    options: dict[str, Any]
    prompts: str
    how: How
    budgets: dict[str, int] = {}
    retriever: str
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    max_context: int
    thinking: bool


class RowResult(msgspec.Struct, frozen=True):
    """OUT/ROW/result.json. sets: the measures by set. macro: means of the sets' means; multi_hop:
    the same over the four multi-hop sets, if the table has them. failed: the reasons of the
    questions that could not be finished and scored 0, by set/task. seconds, generated_tokens,
    queries, hits (queries that the cache answered) and engine (its counters): over all sessions
    that were not killed.
    """

    name: str
    settings: RowSettings
    sets: dict[str, dict[str, SampleMean]]
    macro: dict[str, Estimate]
    multi_hop: dict[str, Estimate]
    failed: dict[str, str]
    seconds: float
    generated_tokens: int
    queries: int
    hits: int
    engine: dict[str, float]


class QaTable(msgspec.Struct, frozen=True):
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


class QaEvaluation(Evaluation):
    """The questions of all rows of a command. finished: gets each new table."""

    unit, done = "questions", "answered"

    def __init__(
        self, rows: Sequence[PolicyRow], sets: Sequence[QuestionSet], settings: TableSettings,
        out: Path, retrieval: CachedRetrieval | None, concurrency: int,
        finished: Callable[[QaTable], None] = lambda table: None,
    ):  # fmt: skip
        tasks = [(one.name, task) for one in sets for task in one.tasks]
        handlers = {"retrieve": retrieval.handle} if retrieval is not None else {}
        super().__init__(out, tasks, concurrency, handlers=handlers)
        self.rows, self.sets, self.settings = rows, sets, settings
        self.retrieval, self.finished = retrieval, finished

    async def run(self) -> QaTable:
        """See ``Evaluation.run``."""
        try:
            return await super().run()
        finally:
            if self.retrieval is not None:
                await self.retrieval.close()

    async def play(self) -> QaTable:
        """Answer the questions that are not answered yet."""
        for file in self.out.glob("*/result.json"):
            if _decoded(file, RowResult) is None:
                torn = f"{file} is torn, so its row is left out: run it again, its answers are kept"
                print(torn, file=sys.stderr)
        unfinished = [r for r in self.rows if not (self.out / r.name / "result.json").is_file()]
        if self.retrieval is not None and any(row.settings.retriever for row in unfinished):
            await self.retrieval.open()
        for row in self.rows:
            write_whole(self.out / row.name / "result.json", await self._answered(row))
            table = self._so_far()
            write_whole(self.out / "result.json", table)
            self.finished(table)
        return self._so_far()

    def _so_far(self) -> QaTable:
        """The table of all rows whose folders hold a result."""
        before = _decoded(self.out / "result.json", QaTable)
        first = [row.name for row in before.rows] if before else []
        files = {file.parent.name: file for file in self.out.glob("*/result.json")}
        order = dict.fromkeys([*first, *(row.name for row in self.rows), *sorted(files)])
        rows = [_decoded(files[name], RowResult) for name in order if name in files]
        return QaTable(self.settings, [row for row in rows if row is not None])

    def config(self, row: PolicyRow, of: str) -> SchedulerConfig:
        """The row's settings with the budget of a set."""
        s: RowSettings = row.settings
        return msgspec.structs.replace(row.config, budget=s.budgets.get(of, s.how.budget))

    async def grow(self, row: PolicyRow, of: str, context: Context, calls: ResumedCalls) -> None:
        """Answer a question, and score the last action of its tree."""
        tree, settings = context.tree, row.settings
        how = msgspec.structs.replace(settings.how, budget=context.settings.budget)
        await methods.load(settings.method).answer(tree, context, how)
        final = tree.actions()[-1]
        final.scores |= score(tree, context.task.golds, context.runtime.counts["retrievals"])
        final.scores["outcome"] = final.scores["em"]  # coppice trees shows this column
        context.changed([final])

    def outcome(self, task: Task, tree: Tree | None) -> dict[str, float]:
        """The question's scores; all are 0 if it could not be finished, for example because its
        prompt exceeds the context."""
        if tree is None:
            return dict.fromkeys(("em", "f1", "em_two_blocks", "em_slate", "answered"), 0.0)
        final = tree.actions()[-1].scores
        return {name: value for name, value in final.items() if name in MEASURES}

    def stats(self) -> dict[str, float]:
        """The engine's counters, and those of the retrieval."""
        stats = super().stats()
        queries = self.retrieval.counts if self.retrieval is not None else {}
        counters = {key: stats.get(key, 0.0) for key in _COUNTERS}
        return counters | {key: queries.get(key, 0) for key in ("queries", "hits")}

    async def _answered(self, row: PolicyRow) -> RowResult:
        examined = await self.examine(row)
        measured, first = {}, 0
        for one in self.sets:
            scores = examined.outcomes[first : first + len(one.tasks)]
            measured[one.name] = _summary(scores, row.settings.player == "endpoint")
            first += len(one.tasks)
        multi = [measured[name] for name in MULTI_HOP if name in measured]
        costs, engine = examined.costs, examined.costs.engine
        tokens, queries, hits = (
            int(engine.get(key, 0)) for key in ("decoded_tokens", "queries", "hits")
        )
        return RowResult(
            row.name, row.settings, measured, macro(list(measured.values())),
            macro(multi) if len(multi) == len(MULTI_HOP) else {}, examined.undone, costs.seconds,
            tokens, queries, hits, {k: value for k, value in engine.items() if k in _COUNTERS},
        )  # fmt: skip


T = TypeVar("T", QaTable, RowResult)


def _decoded(file: Path, kind: type[T]) -> T | None:
    """A stored result, None if the file is missing or torn; a lost result can be computed again
    from the journals."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind) if file.is_file() else None
    except msgspec.DecodeError:
        return None


def _summary(scores: Sequence[dict[str, float]], in_bytes: bool) -> dict[str, SampleMean]:
    """Each measure over the questions of one set. in_bytes: the journal holds bytes, so measures in
    tokens are left out."""
    measures = {}
    for name in MEASURES:
        values = [score[name] for score in scores if name in score]
        if values and not (in_bytes and name in TOKENS):
            measures[name] = sample_mean(values, _of_counts if name in COUNTS else estimate)
    return measures


def _of_counts(values: Sequence[float]) -> Estimate:
    """Mean and 1.96 standard errors, even if every count is 0 or 1 (``estimate`` would treat such
    values as proportions)."""
    n = len(values)
    mean = math.fsum(values) / n
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, n - 1)
    return Estimate(mean, 1.96 * math.sqrt(variance / n))


def macro(sets: Sequence[dict[str, SampleMean]]) -> dict[str, Estimate]:
    """The mean of the n sets' means, for each measure that all sets have. The sets are independent:
    half width sqrt(sum half^2) / n."""
    means, n = {}, len(sets)
    for name in MEASURES:
        if all(name in one for one in sets):
            half = math.sqrt(math.fsum(one[name].half ** 2 for one in sets)) / n
            means[name] = Estimate(math.fsum(one[name].mean for one in sets) / n, half)
    return means


# ----------------------------------------------------------------------------------------------
# the printed table


def markdown(table: QaTable, measure: str = "em") -> str:
    """A table as in the papers: one row per method and model, one column per set, and the macro
    mean. Cells are mean ± half width of the 95% interval of one measure."""
    sets = table.settings.sets
    several = any(row.multi_hop for row in table.rows)
    head = ["method", "model", *(f"{s.name} ({s.questions})" for s in sets), "mean"]
    head += ["multi-hop mean"] if several else []
    digits = 1 if measure in COUNTS else 3
    lines = [head, ["---"] * len(head)]
    for row in table.rows:
        model = row.name.removeprefix(f"{row.settings.method}.")
        if row.settings.temperature:
            model += f", temperature {row.settings.temperature:g}"
        means = [*(row.sets[s.name].get(measure) for s in sets), row.macro.get(measure)]
        means += [row.multi_hop.get(measure)] if several else []
        cells = [f"{m.mean:.{digits}f} ±{m.half:.{digits}f}" if m else "-" for m in means]
        lines.append([row.settings.method, model, *cells])
    rows = ["| " + " | ".join(cells) + " |" for cells in lines]
    legend = f"{measure}, mean ±95%; mean is over the sets' means (questions in brackets)."
    return "\n".join([*rows, "", legend])


def notes(table: QaTable) -> list[str]:
    """The costs of each row, the questions that could not be finished, and the rows of files that
    cannot be used."""
    notes = []
    for row in table.rows:
        queries = f"{row.queries} queries ({row.hits} from the cache)"
        took = f"{row.seconds:.0f} s, {row.generated_tokens} generated tokens, {queries}"
        notes.append(f"{row.name}: {took}")
        unfinished = [f"{task}: {reason}" for task, reason in list(row.failed.items())[:2]]
        if len(row.failed) > 2:
            unfinished.append(f"{len(row.failed) - 2} more, see {row.name}/result.json")
        notes += [f"  not finished, scored 0: {text}" for text in unfinished]
    for one in table.settings.sets:
        if one.rejected:
            reasons = ", ".join(f"{count} {reason}" for reason, count in one.reasons.items())
            notes.append(f"{one.name}: {one.rejected} rows of its file cannot be used: {reasons}")
    return notes
