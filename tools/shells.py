"""The command coppice completion: print a script with which a shell completes ``coppice``. shtab
writes it from the parsers."""

import argparse
import sys
from pathlib import Path

import shtab

from coppice.common.options import command_parser
from coppice.tools import main as commands

EXAMPLES = """\
  coppice completion bash > FILE     then, in ~/.bashrc: source FILE
  coppice completion zsh > FILE      then, in ~/.zshrc: eval "$(<FILE)"
  coppice completion fish > FILE     then, in config.fish: source FILE"""


def whole() -> argparse.ArgumentParser:
    """Return the parser of ``coppice`` with all its subcommands."""
    parser = argparse.ArgumentParser("coppice")
    top = parser.add_subparsers()
    of_dev = top.add_parser("dev", help="for developers of Coppice").add_subparsers()
    for name, inner in commands.parsers():
        if " --" in name:  # its flag belongs to the command before it
            continue
        mark(inner)
        place = of_dev if name.startswith("dev ") else top
        what = commands.COMMANDS[name][1]
        place.add_parser(name.removeprefix("dev "), parents=[inner], add_help=False, help=what)
    return parser


def mark(parser: argparse.ArgumentParser) -> None:
    """Say how the values of the arguments are completed: those of choices are known, the others
    follow from their names and types."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                mark(command)
        elif str(action.metavar).startswith("RUN"):
            action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
        elif action.type is Path:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice completion."""
    what = "Print a script that completes this command in a shell."
    parser = command_parser("coppice completion", what, EXAMPLES)
    parser.add_argument("shell", choices=["bash", "fish", "zsh"], help="bash, fish or zsh")
    return parser


def main() -> int:
    """Run the command and return its exit status."""
    sys.stdout.write(shtab.complete(whole(), parser().parse_args().shell))
    return 0
