"""The command coppice evaluate qa measures question answering by runs, models and endpoints, and by
the papers' untrained baselines."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from coppice.common.options import command_parser
from coppice.tools.evaluating import examination, players
from coppice.tools.evaluating.examination import Prepared
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.evaluation import Answering, Result, markdown, notes, settings_of
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval, opening_of
from coppice.tools.evaluating.qa.rows import read_rows
from coppice.tools.evaluating.qa.scoring import MEASURES
from coppice.tools.evaluating.qa.sets import read_sets

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
    sets = "a .jsonl or .parquet file, or a hub data set owner/name[/folder][:split]; paper: the papers' seven"
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
    known = f"comma-separated, of {', '.join(sorted(methods.METHODS))} (default: search)"
    add("--method", help=known)
    prompt = "of search: short, search_r1 or a path (default: the run's, else search_r1)"
    add("--prompt", help=prompt)
    add("--topk", type=int, help="passages of a search (default: the run's, else 3)")
    budget = "turns of search, searches of the others (default: the run's, else 4); for one set with its name before it"
    add("--budget", action="append", type=_budget, default=[], metavar="[SET=]N", help=budget)
    forced = "search: force an answer when the budget is used up (default: as the run's strategy does, else yes)"
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
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--budget is given twice{f' for {twice[0]}' if twice[0] else ''}: give it once"
        )
    if not (flags.model or flags.run or flags.endpoint):
        raise ValueError("nobody to measure: give --model, --run or --endpoint")
    heldout = None
    if not flags.set:
        from coppice.tools.defaults.facts import ensure_facts
        from coppice.tools.defaults.settings import cache_folder  # imports torch

        heldout = ensure_facts(cache_folder()) / "heldout.jsonl"
    rows, retriever = read_rows(flags)
    sets = read_sets(flags.set, flags.questions, flags.seed, heldout)
    known = [one.name for one in sets]
    if unknown := [name for name in names if name and name not in known]:
        raise ValueError(
            f"--budget {unknown[0]}=..: expected a set of this table, {', '.join(known)}"
        )
    for note in [note for one in sets for note in one.notes]:
        print(note, file=sys.stderr)
    settings = settings_of(sets, flags.seed)

    def begin(out: Path) -> Answering:
        retrieval = None
        if retriever:
            identity = next(row.settings.retriever for row in rows if row.settings.retriever)
            opening = opening_of(retriever, flags.threads or 1)
            retrieval = CachedRetrieval(flags.cache or out / "retrieval.sqlite", identity, opening)

        def finished(table: Result) -> None:
            (out / "table.md").write_text(markdown(table, flags.measure) + "\n")

        return Answering(rows, sets, settings, out, retrieval, flags.concurrency, finished)

    shown = lambda result: "\n".join([markdown(result, flags.measure), *notes(result)])  # noqa: E731
    parts = [(row.name, row.settings) for row in rows]
    return Prepared("qa", settings, begin, shown, parts=parts)


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns its exit status."""
    return examination.run("coppice evaluate qa", parser(), prepare, arguments)
