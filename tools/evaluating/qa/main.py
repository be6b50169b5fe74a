"""The command coppice evaluate qa measures question answering by runs, models and endpoints, and by
the papers' untrained baselines."""

import argparse
import shlex
import sys
from pathlib import Path

import msgspec

from coppice.common.options import command_parser
from coppice.tools.evaluating import players
from coppice.tools.evaluating.folder import claim, conduct, own_folder
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.evaluation import Evaluation, Result, settings_of
from coppice.tools.evaluating.qa.retrieval import CachedRetrieval, opening_of
from coppice.tools.evaluating.qa.rows import Row, read_rows
from coppice.tools.evaluating.qa.scoring import MEASURES
from coppice.tools.evaluating.qa.sets import QuestionSet, read_sets
from coppice.tools.evaluating.qa.table import markdown, notes

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
    questions = parser.add_argument_group(
        "questions (default: the built-in held-out ones, as one_hop and two_hop)"
    )
    questions.add_argument(
        "--set", action="append", default=[], metavar="NAME=SOURCE",
        help="a .jsonl or .parquet file, or a hub data set owner/name[/folder][:split]; paper: the papers' seven"
    )  # fmt: skip
    questions.add_argument(
        "--questions", type=int, help="size of each set's fixed subset (default: all)"
    )
    questions.add_argument(
        "--seed", type=int, default=0, help="seed of the subset (default: %(default)s)"
    )
    who = parser.add_argument_group("players (at least one; --model and --run may be repeated)")
    who.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model folder, a built-in name or a hub id",
    )
    own = "a run folder: its newest weights and its settings"
    who.add_argument("--run", type=Path, action="append", default=[], metavar="RUN", help=own)
    who.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, up to /v1")
    players.add_endpoint(parser)
    players.add_local(parser)
    players.add_actions(parser)
    how = parser.add_argument_group("methods")
    how.add_argument(
        "--method", help=f"comma-separated, of {', '.join(methods.known())} (default: search)"
    )
    how.add_argument(
        "--prompt",
        help="of search: short, search_r1 or a path (default: the run's, else search_r1)",
    )
    how.add_argument("--topk", type=int, help="passages of a search (default: the run's, else 3)")
    how.add_argument(
        "--budget", action="append", type=_budget, default=[], metavar="[SET=]N",
        help="turns of search, searches of the others (default: the run's, else 4); for one set with its name before it"
    )  # fmt: skip
    forced = "search: force an answer when the budget is used up (default: as the run's strategy does, else yes)"
    how.add_argument("--forced", action=argparse.BooleanOptionalAction, default=None, help=forced)
    retriever = "index folder, URL of a Search-R1 server, or the word default (default: the run's)"
    how.add_argument("--retriever", metavar="PLACE", help=retriever)
    how.add_argument(
        "--cache", type=Path, help="file that keeps found passages (default: OUT/retrieval.sqlite)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        help="folder; a table in it is continued and may get rows (default: evaluations/qa-TIME)",
    )
    parser.add_argument(
        "--measure",
        choices=MEASURES,
        default="em",
        metavar="NAME",
        help=f"what the table shows, one of {', '.join(MEASURES)} (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the result as JSON instead of a table"
    )
    parser.add_argument(
        "--concurrency", type=int, default=16, help="questions at once (default: %(default)s)"
    )
    return parser


def check(flags: argparse.Namespace) -> None:
    """Refuse values out of range and settings without effect. Raises ValueError."""
    counts = (
        "questions",
        "concurrency",
        "topk",
        "timeout",
        "attempts",
        "max_tokens",
        "threads",
        "max_context",
    )
    players.check(flags, counts)
    names = [name for name, _ in flags.budget]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(
            f"--budget is given twice{f' for {twice[0]}' if twice[0] else ''}: give it once"
        )
    if not (flags.model or flags.run or flags.endpoint):
        raise ValueError("nobody to measure: give --model, --run or --endpoint")


def prepare(flags: argparse.Namespace) -> tuple[list[QuestionSet], list[Row], str]:
    """The sets, rows and retriever of a command line. Raises ValueError, OSError or MemoryError
    with the remedy."""
    check(flags)
    heldout = None
    if not flags.set:
        from coppice.tools.defaults.facts import ensure_facts
        from coppice.tools.defaults.settings import cache_folder  # imports torch

        heldout = ensure_facts(cache_folder()) / "heldout.jsonl"
    rows, retriever = read_rows(flags)
    sets = read_sets(flags.set, flags.questions, flags.seed, heldout)
    known = [one.name for one in sets]
    if unknown := [name for name, _ in flags.budget if name and name not in known]:
        raise ValueError(
            f"--budget {unknown[0]}=..: expected a set of this table, {', '.join(known)}"
        )
    return sets, rows, retriever


def _budget(text: str) -> tuple[str, int]:
    """A value of --budget as (set, budget). The set is "" if the budget is for all sets."""
    name, _, count = text.rpartition("=")
    if not count.isdecimal() or int(count) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected a number above 0, alone or as SET=N")
    return name, int(count)


def main(arguments: list[str]) -> int:
    """Run the command. Returns its exit status."""
    flags = parser().parse_args(arguments)
    try:
        sets, rows, retriever = prepare(flags)
        for note in [note for one in sets for note in one.notes]:
            print(note, file=sys.stderr)
        out = flags.out or own_folder("qa")
        settings = settings_of(sets, flags.seed)
        lock = claim(out, settings, [(row.name, row.settings) for row in rows])
    except (OSError, ValueError, MemoryError) as error:
        print(f"coppice evaluate qa: {error}", file=sys.stderr)
        return 2
    again = shlex.join(
        ["coppice evaluate", "qa", *arguments, *([] if flags.out else ["--out", str(out)])]
    )

    def evaluation() -> Evaluation:
        retrieval = None
        if retriever:
            identity = next(row.settings.retriever for row in rows if row.settings.retriever)
            opening = opening_of(retriever, flags.threads or 1)
            retrieval = CachedRetrieval(flags.cache or out / "retrieval.sqlite", identity, opening)
        return Evaluation(rows, sets, settings, out, retrieval, flags.concurrency, finished)

    def finished(table: Result) -> None:
        (out / "table.md").write_text(markdown(table, flags.measure) + "\n")

    with lock:
        result = conduct(evaluation, again, "answered")
    return result if isinstance(result, int) else _report(flags, result, out)


def _report(flags: argparse.Namespace, result: Result, out: Path) -> int:
    shown = "\n".join([markdown(result, flags.measure), *notes(result)])
    print(
        msgspec.json.encode(result).decode()
        if flags.json
        else f"{shown}\nresult {out / 'result.json'}"
    )
    return 0
