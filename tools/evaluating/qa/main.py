"""The command coppice evaluate qa measures question answering by runs, models and endpoints, and by
the papers' untrained baselines."""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.common.options import command_parser
from coppice.scheduler.config import UNJUDGED, SchedulerConfig
from coppice.scheduler.growth import strategies
from coppice.tools.evaluating import examination, players
from coppice.tools.evaluating.examination import PolicyRow, Prepared, repeated
from coppice.tools.evaluating.in_process import config_of
from coppice.tools.evaluating.players import MeasuredPolicy
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.endpoint import ChatEngine, ChatText
from coppice.tools.evaluating.qa.evaluation import (
    QaEvaluation,
    QaTable,
    RowSettings,
    markdown,
    notes,
    settings_of,
)
from coppice.tools.evaluating.qa.methods import How
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval, identity_of, opening_of
from coppice.tools.evaluating.qa.scoring import MEASURES
from coppice.tools.evaluating.qa.sets import read_sets

_OPTIONS = {"prompt": "search_r1", "topk": 3}
"""The environment's options of a policy that is no run."""
EXAMPLES = """\
  coppice evaluate qa --run RUN                          the built-in questions
  coppice evaluate qa --run RUN --version 0 --questions 200
  coppice evaluate qa --model FOLDER --set dev=dev.jsonl --retriever FOLDER
  coppice evaluate qa --model FOLDER --method cot,rag,search --measure f1"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice evaluate qa."""
    parser = command_parser(
        "coppice evaluate qa",
        "Measure question answering: a table of methods and models by question sets.",
        EXAMPLES,
        "coppice evaluate qa [questions] [players] [methods] [options]",
    )
    title = "questions (default: the built-in held-out ones, as one_hop and two_hop)"
    add = parser.add_argument_group(title).add_argument
    hub = "a hub data set owner/name[/folder][:split]"
    sets = f"a .jsonl or .parquet file, or {hub}; paper: the papers' seven"
    add("--set", action="append", default=[], metavar="NAME=SOURCE", help=sets)
    add("--questions", type=int, help="size of each set's fixed subset (default: all)")
    add("--seed", type=int, default=0, help="seed of the subset (default: %(default)s)")
    title = "players (at least one; --model and --run may be repeated)"
    add = parser.add_argument_group(title).add_argument
    model = "a model folder, a built-in name or a hub id"
    add("--model", action="append", default=[], metavar="NAME", help=model)
    own = "a run folder: its newest weights and its settings"
    add("--run", type=Path, action="append", default=[], metavar="RUN", help=own)
    add("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, up to /v1")
    players.add_players(parser)
    add = parser.add_argument_group("methods").add_argument
    every = f"comma-separated, of {', '.join(sorted(methods.METHODS))} (default: search)"
    add("--method", help=every)
    prompt = "of search: short, search_r1 or a path (default: the run's, else search_r1)"
    add("--prompt", help=prompt)
    add("--topk", type=int, help="passages of a search (default: the run's, else 3)")
    budget = "turns of search, searches of the others (default: the run's, else 4); SET: of one set"
    add("--budget", action="append", type=_budget, default=[], metavar="[SET=]N", help=budget)
    forced = "search: force an answer after the budget (default: as the run's strategy, else yes)"
    add("--forced", action=argparse.BooleanOptionalAction, default=None, help=forced)
    retriever = "index folder, URL of a Search-R1 server, or the word default (default: the run's)"
    add("--retriever", metavar="PLACE", help=retriever)
    cache = "file that keeps found passages (default: OUT/retrieval.sqlite)"
    add("--cache", type=Path, help=cache)
    add = parser.add_argument
    out = "folder; a table in it is continued and may get rows (default: evaluations/qa-TIME)"
    examination.add_output(parser, "qa", out)
    shown = f"what the table shows, one of {', '.join(MEASURES)} (default: %(default)s)"
    add("--measure", choices=MEASURES, default="em", metavar="NAME", help=shown)
    add("--concurrency", type=int, default=16, help="questions at once (default: %(default)s)")
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
    players.check(flags, "questions", "topk")
    names = [name for name, _ in flags.budget]
    if (twice := repeated(names)) is not None:
        of_set = f" for {twice}" if twice else ""
        raise ValueError(f"--budget is given twice{of_set}: give it once")
    if not (flags.model or flags.run or flags.endpoint):
        raise ValueError("nobody to measure: give --model, --run or --endpoint")
    rows, retriever = read_rows(flags)
    sets = read_sets(flags.set, flags.questions, flags.seed)
    columns = [one.name for one in sets]
    if unknown := [name for name in names if name and name not in columns]:
        expected = f"expected a set of this table, {', '.join(columns)}"
        raise ValueError(f"--budget {unknown[0]}=..: {expected}")
    for note in [note for one in sets for note in one.notes]:
        print(note, file=sys.stderr)
    settings = settings_of(sets, flags.seed)

    async def work(out: Path) -> QaTable:
        retrieval = None
        if retriever:
            identity = next(row.settings.retriever for row in rows if row.settings.retriever)
            opening = opening_of(retriever, flags.threads or 1)
            retrieval = CachedRetrieval(flags.cache or out / "retrieval.sqlite", identity, opening)

        def finished(table: QaTable) -> None:
            (out / "table.md").write_text(markdown(table, flags.measure) + "\n")

        return await QaEvaluation(
            rows, sets, settings, out, retrieval, flags.concurrency, finished
        ).run()

    shown = lambda table: "\n".join([markdown(table, flags.measure), *notes(table)])  # noqa: E731
    parts = [(row.name, row.settings) for row in rows]
    return Prepared("qa", settings, work, shown, parts=parts)


def read_rows(flags: argparse.Namespace) -> tuple[list[PolicyRow], str]:
    """The rows of the command line, each a policy with a method, and the retriever as a folder or
    URL ("" if no row retrieves).

    Raises ValueError, OSError or MemoryError with the remedy.
    """
    wanted = list(dict.fromkeys((flags.method or "search").split(",")))
    retrieving = {name for name in wanted if methods.load(name).retrieves}
    for flag in ("prompt", "forced"):
        if getattr(flags, flag) is not None and "search" not in wanted:
            raise ValueError(f"--{flag} has no effect without the method search")
    if flags.topk is not None and not retrieving:
        raise ValueError("--topk has no effect: none of the methods retrieves")
    everyone = [players.of_model(name, flags) for name in flags.model]
    for path in flags.run:
        run = players.read_run(path, flags.version)
        if (environment := run.scheduler.environment) != "search_qa":
            trained = f"was trained on {environment!r}: expected a run of 'search_qa'"
            raise ValueError(f"--run {path} {trained}")
        # Other methods have longer prompts than the run, whose own context is no limit here.
        everyone.append(players.of_run(path, run, flags, players.MAX_CONTEXT))
    if flags.endpoint:
        everyone.append(players.of_endpoint(flags, ChatEngine, ChatText))
    retriever = _retriever(flags) if retrieving else ""
    identity = identity_of(retriever) if retrieving else ""
    rows = [
        _row(flags, name, policy, identity if name in retrieving else "")
        for policy in everyone
        for name in wanted
    ]
    if twice := repeated([row.name for row in rows]):
        remedy = "measure models of the same name in folders of their own"
        raise ValueError(f"two rows would be named {twice}: {remedy}")
    return rows, retriever


class _Backend(msgspec.Struct, frozen=True):
    backend: str


class _Retriever(msgspec.Struct, frozen=True):
    """The only field of RUN/processes/retriever.json that is read."""

    retriever: _Backend


def _row(
    flags: argparse.Namespace, method: str, policy: MeasuredPolicy, identity: str
) -> PolicyRow:
    search, run = method == "search", policy.own
    own = run.scheduler if run is not None and search else None
    options = run.options | run.scheduler.evaluation.options if run is not None else _OPTIONS
    overrides = {"prompt": flags.prompt, "topk": flags.topk}
    options = options | {key: value for key, value in overrides.items() if value is not None}
    environment: Any = registry.load("search_qa", options)
    # as the held-out evaluation of a run with this strategy does
    forces = own is None or strategies.load(own.strategy).examined_by == "chain"
    forced = flags.forced if flags.forced is not None else forces
    budgets = dict(flags.budget)
    budget = budgets.pop("", 0) or (own.budget if own else How().budget)
    template = hashlib.sha256(environment.template.encode()).hexdigest()[:12]
    thinking = (run.scheduler if run is not None else SchedulerConfig()).thinking
    settings = RowSettings(
        method=method, options=options if search else {},
        prompts=template if search else methods.digest(method),
        how=How(environment.topk, budget, forced and search), budgets=budgets, retriever=identity,
        **policy.described, temperature=flags.temperature, top_p=flags.top_p, top_k=flags.top_k,
        max_tokens=flags.max_tokens or (own or SchedulerConfig()).max_action_tokens,
        max_context=policy.max_context, thinking=thinking and not flags.no_thinking,
    )  # fmt: skip
    config = config_of(settings, UNJUDGED, budget=budget)
    return PolicyRow(f"{method}.{policy.name}", settings, policy, environment, config)


def _retriever(flags: argparse.Namespace) -> str:
    """The folder or URL of the retriever: the one of --retriever, else the runs' own, else the
    built-in corpus."""
    if flags.retriever not in (None, "default"):
        return flags.retriever
    files = [run / "processes" / "retriever.json" for run in flags.run]
    saved = [players.saved(file, _Retriever) for file in files if file.is_file()]
    backends = {one.retriever.backend for one in saved}
    if flags.retriever is None and backends:
        if len(backends) > 1:
            remedy = "say with --retriever which one all rows use"
            raise ValueError(f"the runs searched in {sorted(backends)}: {remedy}")
        return backends.pop()
    from coppice.tools.defaults.facts import ensure_facts
    from coppice.tools.defaults.index_corpus import ensure_index
    from coppice.tools.defaults.settings import cache_folder

    cache = cache_folder()
    corpus = ensure_facts(cache) / "corpus.jsonl"
    return str(ensure_index(corpus, "minilm", cache, flags.threads or 1))


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns its exit status."""
    return examination.run("coppice evaluate qa", parser(), prepare, arguments)
