"""The command coppice trees: find prefix trees of a run in its journal, which may be that of a live
run, and show them."""

import argparse
import importlib
import json
import shutil
import sqlite3
from pathlib import Path

import polars as pl

from coppice.common.numbers import Count
from coppice.common.options import command_parser, gave_up
from coppice.common.terminal import visible
from coppice.scheduler.ledger.journal import Journal, TreeRow
from coppice.tools.evaluating.examination import table as aligned
from coppice.tools.inspecting import drawing, frames, replay, side_by_side

EXAMPLES = """\
  coppice trees RUN                            the last finished tree
  coppice trees RUN --where "reward > 0.5"     trees by their columns, in SQL
  coppice trees RUN --surprising 3 --full      largest advantages, judges' words
  coppice trees RUN --diff OTHER               another run on the same questions
  coppice trees RUN --judge --again slate_em   another judge on the same turns
  coppice trees RUN --groups --where "spread = 0" --count step,version"""
LISTED = "tree status version actions reward spread outcome invalid age_s question".split()
OF_GROUPS = "tree parent version step candidates texts reward spread advantage question chosen"


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    try:
        with frames.opened(options.run) as journal:
            show(journal, options)
    except (OSError, ValueError, OverflowError, sqlite3.DatabaseError) as error:
        damaged = f"{options.run} is no journal of a run, or a damaged one ({error})"
        database = isinstance(error, sqlite3.DatabaseError)
        return gave_up("coppice trees", damaged if database else error)
    return 0


def parser() -> argparse.ArgumentParser:
    what = "Find prefix trees and print them; * marks the candidate that was continued."
    usage = "coppice trees RUN [which trees] [how]"
    parser = command_parser("coppice trees", what, EXAMPLES, usage)
    parser.add_argument("run", type=Path, metavar="RUN", help="run folder, or a journal file")
    trees = parser.add_argument_group("which trees (default: the last finished one)")
    which, order = trees.add_argument, trees.add_mutually_exclusive_group().add_argument
    which("--tree", type=int, help="this tree")
    which("--heldout", action="store_true", help="trees of held-out evaluations")
    which("--where", metavar="SQL", help="a condition on the columns of --columns")
    which("--text", metavar="REGEX", help="trees in which the text of a node matches")
    order("--sort", metavar="COLUMN", help="by this column, the largest first")
    surprising = "the N trees with the largest advantage, up or down"
    order("--surprising", type=Count, help=surprising)
    which("--reverse", action="store_true", help="with --sort: the smallest first")
    which("--limit", type=Count, help="at most N trees")
    which("--all", action="store_true", help="print every tree found, not a list of them")
    which("--groups", action="store_true", help="the candidates of one place, instead of trees")
    which("--count", metavar="COLUMNS", help="how many there are for each value of these columns")
    how = parser.add_argument_group("how").add_mutually_exclusive_group().add_argument
    how("--list", action="store_true", help="one line per tree (default when several are found)")
    how("--columns", action="store_true", help="the columns that --where and --sort take")
    how("--json", action="store_true", help="JSON, one tree per line")
    how("--sql", metavar="QUERY", help="a query in SQL over trees, groups, nodes, turns and tokens")
    page = "a page to click through, one file for all trees found"
    how("--html", type=Path, metavar="FILE", help=page)
    how("--diff", nargs="+", metavar="OTHER", help="another run; or the numbers of two trees")
    judge = "do the scores of the judges, or of this column, agree with the outcomes below?"
    how("--judge", nargs="?", const="", metavar="COLUMN", help=judge)
    add, again = parser.add_argument, "another judge on the same turns, by name or module:Class"
    add("--again", metavar="JUDGE", help=f"with --judge: {again}")
    option = "an argument of that judge's class, its value in TOML; repeatable"
    add("--option", action="append", default=[], metavar="KEY=VALUE", help=option)
    newest = "with --html or --tokens: log-probabilities under the newest policy, too"
    add("--newest", action="store_true", help=newest)
    add("--tokens", action="store_true", help="the log-probability of every sampled token")
    add("--full", action="store_true", help="whole texts, with the judges' explanations")
    return parser


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    command = parser()
    options = command.parse_args(arguments)
    if options.newest and not (options.html or options.tokens):
        command.error("--newest has an effect with --html or --tokens")
    if options.judge is not None and (options.groups or options.count or options.sort):
        command.error("--judge tells of turns: leave --groups, --count and --sort out")
    if options.count and (options.html or options.json):
        command.error("--count prints numbers: leave --html and --json out")
    if options.sql and (options.text or options.tree or _several(options)):
        command.error("--sql says itself which rows: leave the options that look for trees out")
    if options.again and options.judge is None:
        command.error("--again has an effect with --judge")
    if options.reverse and not options.sort:
        command.error("--reverse has no effect without --sort")
    if len(options.diff or ()) > (1 if _several(options) else 2):
        command.error("--diff names its two trees: leave the options that look for others out")
    return options


def _several(options: argparse.Namespace) -> bool:
    """Whether the command line asks for more than the last tree."""
    ways = "all list columns where text limit sort surprising groups count".split()
    return options.judge is not None or any(getattr(options, way) for way in ways)


def show(journal: Journal, options: argparse.Namespace) -> None:
    """Print what the command line asks for. Raises ValueError for what is not there."""
    width = shutil.get_terminal_size((120, 40)).columns
    if options.diff:
        _diff(options, width)
        return
    if options.sql:
        split = "heldout" if options.heldout else "train"
        _print(frames.sql(options.run, options.sql, split), width)
        return
    rows, table, below = find(journal, options)
    version, newest = replay.newest(journal, rows, options.run) if options.newest else (None, {})
    if options.columns:
        print("\n".join(f"{name:<24} {kind}" for name, kind in table.schema.items()))
    elif options.judge is not None:
        judges = importlib.import_module("coppice.research.judge_trial")
        print(visible("\n".join(judges.tried(journal, table, below, options))))
    elif options.count:
        by = [*dict.fromkeys(options.count.split(","))]
        check_columns("--count", by, table)
        _print(table.group_by(by).len("count").sort(by), width)
    elif options.html:
        text = drawing.html(journal, rows, options.run, version, newest, options.surprising)
        options.html.write_text(text, encoding="utf-8")
        print(f"{options.html}: {len(rows)} trees, {options.html.stat().st_size / 2**20:.1f} MiB")
    elif options.json:
        for row in rows:
            print(visible(json.dumps(drawing.as_json(journal, row), ensure_ascii=False)))
    elif options.groups:
        _print(table.select(name for name in OF_GROUPS.split() if name in table.columns), width)
    elif options.list or (len(rows) > 1 and not (options.all or options.full or options.tokens)):
        _print(table.select(name for name in LISTED if name in table.columns), width)
    else:
        words = replay.tokenizer(options.run) if options.tokens else None
        detail = drawing.Detail(width, options.full, options.tokens, words, newest)
        if version is not None:
            print(f"newest: version {version}")
        for row in rows:
            print(visible(drawing.as_text(journal, row, detail)) + "\n")


def _print(table: pl.DataFrame, width: int) -> None:
    cells = [[_cell(value) for value in row] for row in table.rows()]
    lines = (line[:width].rstrip() for line in aligned([table.columns, *cells]))
    print(visible("\n".join(lines)))


def check_columns(option: str, names: list[str], table: pl.DataFrame) -> None:
    """Raises ValueError for a name that is no column. option: that has the names."""
    for name in names:
        if name not in table.columns:
            columns = ", ".join(table.columns)
            raise ValueError(f"{option} {name}: no such column; expected one of {columns}")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else " ".join(str(value).split())


def _diff(options: argparse.Namespace, width: int) -> None:
    run, other, trees = options.run, options.run, options.diff
    if len(trees) == 1:
        other = Path(trees[0])
        both, said = side_by_side.joined(run, other, options.where)
        print(said)
        if len(both) > 1:
            shown = both.filter(pl.col("change") != 0).head(options.limit or 20)
            _print(shown.select(side_by_side.SHOWN), width)
            return
        trees = both.select("tree", "tree_other").row(0)
    print(visible(side_by_side.aligned_steps(((run, trees[0]), (other, trees[1])), width)))


def find(
    journal: Journal, options: argparse.Namespace
) -> tuple[list[TreeRow], pl.DataFrame, pl.DataFrame]:
    """Return the trees that the command line asks for, with their rows of ``frames.trees`` and
    ``frames.nodes``. Raises ValueError if none."""
    if options.tree is not None:
        rows = journal.trees("id=?", options.tree)
    else:
        split = "heldout" if options.heldout else "train"
        one = "1" if _several(options) else "id = (SELECT MAX(id) FROM trees WHERE {})"
        for wanted in ("split=?1 AND status != 'growing'", "split=?1"):
            if rows := journal.trees(f"{wanted} AND {one.format(wanted)}", split):
                break
    if not rows:
        last = journal.next_tree() - 1
        held = f"trees 0 to {last}" if last >= 0 else "no tree yet"
        raise ValueError(f"no such tree: the journal holds {held}")
    below = frames.nodes(journal, rows)
    table = frames.trees(journal, rows, below)
    of = "groups" if options.groups else "trees" if options.judge is None else "turns"
    if of != "trees":
        table = getattr(frames, of)(table, below)
    many, table = len(table), filtered(table, below, options)
    table = table if of == "turns" else ordered(table, options)
    if table.is_empty():
        raise ValueError(f"none of {many} {of} matches")
    chosen, by_id = table["tree"].unique(maintain_order=True), {row.id: row for row in rows}
    return [by_id[one] for one in chosen], table, below.filter(pl.col("tree").is_in(chosen))


def filtered(table: pl.DataFrame, below: pl.DataFrame, options: argparse.Namespace) -> pl.DataFrame:
    """Return the trees that meet --where and --text. Raises ValueError for a condition that cannot
    be read."""
    table = frames.where(table, options.where)
    try:
        if options.text:
            places = below.filter(pl.col("text").str.contains(options.text))["tree"].unique()
            table = table.filter(pl.col("tree").is_in(places.to_list()))
    except pl.exceptions.PolarsError as error:
        raise ValueError(f"--text takes a regular expression: {error}") from None
    return table


def ordered(table: pl.DataFrame, options: argparse.Namespace) -> pl.DataFrame:
    """Return the trees in the order that is asked for, the newest first by default, and no more
    than asked for. Raises ValueError."""
    if options.surprising:
        names = [name for name in ("advantage", "reward", "outcome") if name in table.columns]
        if not names:
            lacking = "the run has none of the columns advantage, reward and outcome"
            raise ValueError(f"--surprising: {lacking}; use --sort COLUMN")
        size = pl.max_horizontal(pl.col(f"{names[0]}_{end}").abs() for end in ("max", "min"))
        return table.sort(size, descending=True, nulls_last=True).head(options.surprising)
    if options.sort:
        check_columns("--sort", [options.sort], table)
        table = table.sort(options.sort, descending=not options.reverse, nulls_last=True)
    elif options.tree is None and not options.all:
        table = table.reverse()
    return table if options.limit is None else table.head(options.limit)
