"""The command coppice evaluate qa measures question answering by runs, models and endpoints, and by
the papers' untrained baselines: a table of methods and models by question sets.

An interruption costs at most the replies that were under way: an interrupted question repeats the
replies in its journal and takes its searches from the cache.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.base import Task
from coppice.common.atomic import write_whole
from coppice.common.jsonl import readable
from coppice.common.numbers import Count, Natural
from coppice.common.options import command_parser
from coppice.judges.config import RetrieverConfig
from coppice.judges.retriever.worker import RetrieverProcess
from coppice.scheduler.config import UNJUDGED, SchedulerConfig
from coppice.scheduler.evaluation.evaluation import Estimate
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.tree import Tree
from coppice.tools.evaluating import examination, players
from coppice.tools.evaluating.examination import Evaluation, PolicyRow, Prepared, SampleMean
from coppice.tools.evaluating.in_process import ResumedCalls
from coppice.tools.evaluating.judged import saved
from coppice.tools.evaluating.players import MeasuredPolicy, PlayerSettings
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.endpoint import ChatEngine
from coppice.tools.evaluating.qa.methods import How
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval, config_of
from coppice.tools.evaluating.qa.scoring import COUNTS, MEASURES, TOKENS, score
from coppice.tools.evaluating.qa.sets import MULTI_HOP, QuestionSet, SetSettings, read_sets

_OPTIONS = {"prompt": "search_r1", "topk": 3}
"""The environment's options of a policy that is no run."""
_COUNTERS = "prompt_tokens cached_tokens prefilled_tokens decoded_tokens busy_s requests retries"


class TableSettings(msgspec.Struct, frozen=True):
    """The settings that all rows of a table share, saved as OUT/evaluation.json. seed: chooses the
    subset of each set."""

    sets: list[SetSettings]
    seed: int


class RowSettings(PlayerSettings, frozen=True, kw_only=True):
    """Everything but the questions on which a row's result depends, saved as
    OUT/ROW/evaluation.json.

    options: the environment's, for the method search. prompts: digest of the method's prompts.
    budgets: the budgets of sets that differ from how.budget. retriever: what answers the method's
    queries, "" if it has none.
    """

    method: str
    prompts: str
    how: How
    budgets: dict[str, int] = {}
    retriever: str
    max_context: int


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


EXAMPLES = """\
  coppice evaluate qa --run RUN                          the built-in questions
  coppice evaluate qa --run RUN --version 0 --questions 200
  coppice evaluate qa --model FOLDER --set dev=dev.jsonl --retriever FOLDER
  coppice evaluate qa --model FOLDER --method cot,rag,search --measure f1"""


def parser() -> argparse.ArgumentParser:
    what = "Measure question answering: a table of methods and models by question sets."
    usage = "coppice evaluate qa [questions] [players] [methods] [options]"
    parser = command_parser("coppice evaluate qa", what, EXAMPLES, usage)
    add = parser.add_argument_group("questions (default: the built-in held-out ones)").add_argument
    sets = ".jsonl, .parquet or owner/name[/folder][:split] of the hub; paper: the papers' seven"
    add("--set", action="append", default=[], metavar="NAME=SOURCE", help=sets)
    add("--questions", type=Count, help="size of each set's fixed subset (default: all)")
    add("--seed", type=Natural, default=0, help="seed of the subset (default: %(default)s)")
    players.add_players(parser)
    add, switch = parser.add_argument_group("methods").add_argument, argparse.BooleanOptionalAction
    add("--method", help="search (the default), or baselines of docs/qa.md, with commas")
    add("--prompt", help="of search: short, search_r1 or a path (default: the run's, or search_r1)")
    add("--topk", type=Count, help="passages of a search (default: the run's, else 3)")
    budget = "turns of search, or searches, [of one set] (default: the run's, else 4)"
    add("--budget", action="append", type=_budget, default=[], metavar="[SET=]N", help=budget)
    add("--forced", action=switch, help="search: force an answer (default: as the run, else yes)")
    retriever = "index folder, URL of a Search-R1 server, or the word default (default: the run's)"
    add("--retriever", metavar="PLACE", help=retriever)
    add("--cache", type=Path, help="file of found passages (default: OUT/retrieval.sqlite)")
    out = "folder; a table in it is continued and may get rows (default: evaluations/qa-TIME)"
    examination.add_output(parser, "qa", out)
    shown = f"what the table shows, one of {', '.join(MEASURES)} (default: %(default)s)"
    parser.add_argument("--measure", choices=MEASURES, default="em", metavar="NAME", help=shown)
    return parser


def _budget(text: str) -> tuple[str, int]:
    """A value of --budget as (set, budget). The set is "" if the budget is for all sets."""
    name, _, count = text.rpartition("=")
    if not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0, alone or as SET=N")
    return name, int(count)


def prepare(flags: argparse.Namespace) -> Prepared:
    """The evaluation of a command line. Raises ValueError, OSError or MemoryError with the
    remedy."""
    players.check(flags)
    names = [name for name, _ in flags.budget]
    if (twice := examination.repeated(names)) is not None:
        of_set = f" for {twice}" if twice else ""
        raise ValueError(f"--budget is given twice{of_set}: give it once")
    if not (flags.model or flags.run or flags.endpoint):
        raise ValueError("nobody to measure: give --model, --run or --endpoint")
    rows, retriever, identity = read_rows(flags)
    sets = read_sets(flags.set, flags.questions, flags.seed)
    columns = [one.settings.name for one in sets]
    if unknown := [name for name in names if name and name not in columns]:
        expected = f"expected a set of this table, {', '.join(columns)}"
        raise ValueError(f"--budget {unknown[0]}=..: {expected}")
    for note in [note for one in sets for note in one.notes]:
        print(note, file=sys.stderr)
    settings = TableSettings([one.settings for one in sets], flags.seed)

    async def work(out: Path) -> QaTable:
        retrieval = None
        if retriever:
            cache = flags.cache or out / "retrieval.sqlite"
            retrieval = CachedRetrieval(cache, identity, retriever)
        try:
            return await QaEvaluation(
                rows, sets, settings, out, retrieval, flags.concurrency, flags.measure
            ).run()
        finally:
            if retrieval is not None:
                await retrieval.close()

    def shown(table: QaTable) -> str:
        return "\n".join([markdown(table, flags.measure), *notes(table)])

    parts = [(row.name, row.settings) for row in rows]
    return Prepared("qa", settings, work, shown, parts=parts)


def read_rows(flags: argparse.Namespace) -> tuple[list[PolicyRow], RetrieverConfig | None, str]:
    """The rows of the command line, each a policy with a method, and the retriever with a text that
    names it (None and "" if no row retrieves).

    Raises ValueError, OSError or MemoryError with the remedy.
    """
    wanted = list(dict.fromkeys((flags.method or "search").split(",")))
    retrieving = {name for name in wanted if methods.load(name).retrieves}
    for flag in ("prompt", "forced"):
        if getattr(flags, flag) is not None and "search" not in wanted:
            raise ValueError(f"--{flag} has no effect without the method search")
    if flags.topk is not None and not retrieving:
        raise ValueError("--topk has no effect: none of the methods retrieves")
    # Other methods have longer prompts than the run, whose own context is no limit here.
    everyone = players.policies(flags, players.MAX_CONTEXT, ChatEngine)
    for path, trained in ((p.described["source"], p.own.environment) for p in everyone if p.own):
        if trained != "search_qa":
            expected = "expected a run of 'search_qa'"
            raise ValueError(f"--run {path} was trained on {trained!r}: {expected}")
    retriever, identity = _retriever(flags) if retrieving else (None, "")
    rows = [
        _row(flags, name, policy, identity if name in retrieving else "")
        for policy in everyone
        for name in wanted
    ]
    if twice := examination.repeated([row.name for row in rows]):
        remedy = "measure models of the same name in folders of their own"
        raise ValueError(f"two rows would be named {twice}: {remedy}")
    return rows, retriever, identity


def _row(
    flags: argparse.Namespace, method: str, policy: MeasuredPolicy, identity: str
) -> PolicyRow:
    search, run, options = method == "search", policy.own, _OPTIONS
    own, thinking = SchedulerConfig(budget=How().budget), SchedulerConfig().thinking
    forced = True
    if run is not None:
        options = run.options | run.scheduler.evaluation.options
        thinking = run.scheduler.thinking
        if search:
            own = run.scheduler
            # as the held-out evaluation of a run with this strategy does
            forced = strategies.load(own.strategy).examined_by == "chain"
    overrides = {"prompt": flags.prompt, "topk": flags.topk}
    options = options | {key: value for key, value in overrides.items() if value is not None}
    environment: Any = registry.load("search_qa", options)
    forced = flags.forced if flags.forced is not None else forced
    budgets = dict(flags.budget)
    budget = budgets.pop("", own.budget)
    template = hashlib.sha256(environment.template.encode()).hexdigest()[:12]
    settings = RowSettings(
        method=method, options=options if search else {},
        prompts=template if search else methods.load(method).prompts,
        how=How(environment.topk, budget, forced and search), budgets=budgets, retriever=identity,
        max_context=policy.max_context, **players.sampled(flags, policy, own, thinking),
    )  # fmt: skip
    config = settings.config(UNJUDGED, budget=budget)
    return PolicyRow(f"{method}.{policy.name}", settings, policy, environment, config, budgets)


def _retriever(flags: argparse.Namespace) -> tuple[RetrieverConfig, str]:
    """The retriever and a text that names it: the one of --retriever, else the runs' own, else the
    built-in corpus."""
    threads = flags.threads or 1
    if flags.retriever not in (None, "default"):
        return config_of(flags.retriever, threads)
    files = [run / "processes" / "retriever.json" for run in flags.run]
    runs = [saved(file, RetrieverProcess) for file in files if file.is_file()]
    if flags.retriever is None and runs:
        used = (config_of(r.backend, threads, r.search) for r in (one.retriever for one in runs))
        own = {identity: config for config, identity in used}
        if len(own) > 1:
            remedy = "say with --retriever which one all rows use"
            raise ValueError(f"the runs searched in {' and in '.join(sorted(own))}: {remedy}")
        ((identity, config),) = own.items()
        return config, identity
    from coppice.tools.defaults.facts import ensure_facts
    from coppice.tools.defaults.index_corpus import ensure_index
    from coppice.tools.defaults.settings import cache_folder

    cache = cache_folder()
    corpus = ensure_facts(cache) / "corpus.jsonl"
    return config_of(str(ensure_index(corpus, "minilm", cache, threads)), threads)


class QaEvaluation(Evaluation):
    """The questions of all rows of a command. measure: what OUT/table.md shows."""

    unit, done = "questions", "answered"

    def __init__(
        self, rows: Sequence[PolicyRow], sets: Sequence[QuestionSet], settings: TableSettings,
        out: Path, retrieval: CachedRetrieval | None, concurrency: int, measure: str,
    ):  # fmt: skip
        tasks = [(one.settings.name, task) for one in sets for task in one.tasks]
        handlers = {"retrieve": retrieval.handle} if retrieval is not None else {}
        super().__init__(out, tasks, concurrency, handlers=handlers)
        self.rows, self.settings = rows, settings
        self.retrieval, self.measure = retrieval, measure

    async def play(self) -> QaTable:
        """Answer the questions that are not answered yet."""
        for file in self.out.glob("*/result.json"):
            if readable(file, RowResult) is None:
                torn = f"{file} is torn, so its row is left out: run it again, its answers are kept"
                print(torn, file=sys.stderr)
        unfinished = [r for r in self.rows if not (self.out / r.name / "result.json").is_file()]
        if self.retrieval is not None and any(row.settings.retriever for row in unfinished):
            await self.retrieval.open()
        for row in self.rows:
            write_whole(self.out / row.name / "result.json", await self._answered(row))
            table = self._so_far()
            write_whole(self.out / "result.json", table)
            (self.out / "table.md").write_text(markdown(table, self.measure) + "\n")
        return self._so_far()

    def _so_far(self) -> QaTable:
        """The table of all rows whose folders hold a result."""
        before = readable(self.out / "result.json", QaTable)
        first = [row.name for row in before.rows] if before else []
        files = {file.parent.name: file for file in self.out.glob("*/result.json")}
        order = dict.fromkeys([*first, *(row.name for row in self.rows), *sorted(files)])
        rows = [readable(files[name], RowResult) for name in order if name in files]
        return QaTable(self.settings, [row for row in rows if row is not None])

    async def grow(self, row: PolicyRow, context: Context, calls: ResumedCalls) -> None:
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
        return super().stats() | (self.retrieval.counts if self.retrieval is not None else {})

    async def _answered(self, row: PolicyRow) -> RowResult:
        examined = await self.examine(row)
        in_bytes = row.settings.player == "endpoint"  # so measures in tokens are left out
        measures = [name for name in MEASURES if not (in_bytes and name in TOKENS)]
        measured: dict[str, dict[str, SampleMean]] = {}
        first = 0
        for one in self.settings.sets:
            scores = examined.outcomes[first : first + one.questions]
            values = {name: [own[name] for own in scores if name in own] for name in measures}
            measured[one.name] = {
                name: examination.sample_mean(found, name in COUNTS)
                for name, found in values.items()
                if found
            }
            first += one.questions
        multi = [measured[name] for name in MULTI_HOP if name in measured]
        engine = examined.costs.engine
        counts = "decoded_tokens", "queries", "hits"
        tokens, queries, hits = (int(engine.get(key, 0)) for key in counts)
        return RowResult(
            row.name, row.settings, measured, macro(list(measured.values())),
            macro(multi) if len(multi) == len(MULTI_HOP) else {}, examined.undone,
            examined.costs.seconds, tokens, queries, hits,
            {key: engine.get(key, 0.0) for key in _COUNTERS.split()},
        )  # fmt: skip


def macro(sets: Sequence[dict[str, SampleMean]]) -> dict[str, Estimate]:
    """The mean of the n sets' means, for each measure that all sets have. The sets are independent:
    half width sqrt(sum half^2) / n."""
    means, n = {}, len(sets)
    for name in MEASURES:
        if all(name in one for one in sets):
            half = math.sqrt(math.fsum(one[name].half ** 2 for one in sets)) / n
            means[name] = Estimate(math.fsum(one[name].mean for one in sets) / n, half)
    return means


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
