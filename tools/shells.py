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
# Below, runs of the folder runs/ and configs of configs/ are offered first, and a path that is
# typed is completed as a path.
RUNS = {
    "bash": "_coppice_run_dirs",
    "zsh": "_coppice_runs",
    "fish": "(ls -d runs/*/ 2>/dev/null; __fish_complete_directories)",
}
CONFIGS = {
    "bash": "_coppice_config_files",
    "zsh": "_files -g '*.toml'",
    "fish": "(ls configs/*.toml 2>/dev/null; __fish_complete_suffix .toml)",
}
PREAMBLE = {
    "bash": """\
_coppice_run_dirs() {
  [[ $1 == */* ]] && compgen -d -- "$1" || compgen -d -- "runs/$1" || compgen -d -- "$1"
}
_coppice_config_files() {
  [[ $1 == */* ]] && compgen -f -- "$1" || compgen -G "configs/$1*.toml" || compgen -f -- "$1"
}
""",
    "zsh": """\
_coppice_runs() { _alternative 'runs:run:compadd -f - runs/*(/N)' 'folders:folder:_files -/' }
""",
    "fish": "",
}


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
            action.complete = RUNS  # pyright: ignore[reportAttributeAccessIssue]
        elif action.dest == "config":
            action.complete = CONFIGS  # pyright: ignore[reportAttributeAccessIssue]
        elif action.type is Path:
            action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]


def script(shell: str) -> str:
    """Return the script for a shell."""
    return PREAMBLE[shell] + shtab.complete(whole(), shell)


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice completion."""
    what, shells = "Print a script that completes this command in a shell.", sorted(PREAMBLE)
    parser = command_parser("coppice completion", what, EXAMPLES)
    parser.add_argument("shell", choices=shells, metavar="SHELL", help="bash, zsh or fish")
    return parser


def main() -> int:
    """Run the command and return its exit status."""
    sys.stdout.write(script(parser().parse_args().shell))
    return 0
