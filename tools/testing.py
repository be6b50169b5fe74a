"""The command line of tools/test. Its help is printed here; all arguments go to tools/check.py as they are."""

import argparse
import sys

from tools import check
from wire.options import command_parser

EXAMPLES = """\
  tools/test --quick                            without slow tests
  tools/test tests/scheduler                    one folder
  tools/test --quick tests/learner -k critic    other options are pytest's"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of tools/test, for its help and for completion."""
    parser = command_parser("tools/test", "Lint, type-check and test the project.", EXAMPLES)
    parser.add_argument("--quick", action="store_true", help="leave out slow tests and the second numerical run")
    parser.add_argument("-k", metavar="WORDS", help="only the tests whose names match, as all options of pytest")
    parser.add_argument("tests", nargs="*", metavar="TESTS", help="folders, files or single tests (default: tests)")
    return parser


def main() -> int:
    """Run the command and return its exit status."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        parser().print_help()
        return 0
    return check.main()
