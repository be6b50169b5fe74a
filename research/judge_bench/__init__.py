"""The command coppice dev judge-bench: NVProcessBench (methods.md 2.5), records of judged search
trajectories. ``build`` makes them from labelled trajectories, ``measure`` runs judges on them."""

import argparse
import sys
from collections.abc import Sequence

from coppice.common.options import command_parser, gave_up
from coppice.research.judge_bench import building, measuring
from coppice.tools.evaluating import examination

COMMAND = "coppice dev judge-bench"
EXAMPLES = """\
  coppice dev judge-bench measure --judge pprm_rules --baseline random
  coppice dev judge-bench measure --judge my_judge:Brevity --bench f.jsonl
  coppice dev judge-bench build labelled.jsonl --size 100 --out bench.jsonl"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice dev judge-bench."""
    parser = command_parser(COMMAND, "Measure process judges on labelled steps.", EXAMPLES)
    commands = parser.add_subparsers(dest="command", required=True)
    words = "how often judges agree with the labels of steps"
    measuring.add_flags(commands.add_parser("measure", help=words))
    words = "build a balanced benchmark from labelled trajectories"
    building.add_flags(commands.add_parser("build", help=words))
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    flags = parser().parse_args(arguments)
    if flags.command == "measure":
        return examination.run(COMMAND, parser(), measuring.prepare, arguments)
    try:
        building.write(flags)
    except (OSError, ValueError) as error:
        return gave_up(COMMAND, error)
    return 0
