"""The command coppice report: one page, or a picture, that shows one or several runs."""

import argparse
import sys
from pathlib import Path

from coppice.common.options import command_parser
from coppice.tools.inspecting import sections
from coppice.tools.inspecting.figures import save
from coppice.tools.inspecting.runs import RunFolder, check_metrics, grouped, read

EXAMPLES = """\
  coppice report runs/slate-tiny-20261123-090049    report.html of one run
  coppice report A=slate B=slate C=slate D=grpo     three seeds against one run
  coppice report RUN --out curves.png --metric learner/kl --metric score/reward"""
SUFFIXES = (".html", ".png", ".svg")


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice report."""
    parser = command_parser(
        "coppice report",
        "Show runs on one HTML page, or as a picture. The page needs no network and no\n"
        "other file. Runs may be live, stopped, failed or old.",
        EXAMPLES,
    )
    add, runs = parser.add_argument, "run folders; those of one NAME are seeds of one group"
    add("runs", nargs="+", metavar="RUN[=NAME]", help=runs)
    out, page = "FILE.html, .png or .svg (default: %(default)s)", Path("report.html")
    add("--out", type=Path, default=page, metavar="FILE", help=out)
    metric = "draw this metric of metrics.jsonl; repeatable"
    add("--metric", action="append", default=[], metavar="NAME", help=metric)
    against = "curves against updates (default) or seconds"
    add("--against", choices=["version", "time/run"], default="version", help=against)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    command = parser()
    options = command.parse_args(arguments)
    out: Path = options.out
    if out.suffix not in SUFFIXES:
        command.error(f"--out {out}: expected a name that ends with {', '.join(SUFFIXES)}")
    try:
        runs = [_named(text) for text in options.runs]
        check_metrics(runs, options.metric)
        groups = grouped(runs)
        if len({(run.name, run.folder.resolve()) for run in runs}) < len(runs):
            raise ValueError(
                "a run is given twice under one name: leave one out, or give it another name"
            )
        if out.suffix == ".html":
            parts = sections.sections(groups, options.against, options.metric)
            out.write_bytes(sections.html(f"Coppice report: {', '.join(groups)}", parts))
        else:
            save(sections.picture(groups, options.against, options.metric), out)
    except (OSError, ValueError) as error:
        print(f"coppice report: {error}", file=sys.stderr)
        return 2
    table = sections.results(groups)
    print(table.markdown() if table.rows else "no held-out evaluation yet")
    print(f"report: {out}")
    return 0


def _named(text: str) -> RunFolder:
    """Read FOLDER or FOLDER=NAME; both may have a = in them. Raises ValueError."""
    folder, name = text, ""
    while not Path(folder).is_dir() and "=" in folder:
        folder, _, last = folder.rpartition("=")
        name = f"{last}={name}" if name else last
    return read(Path(folder), name or None)
