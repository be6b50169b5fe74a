"""The command coppice completion: print a script with which a shell completes the commands of tools/.
shtab writes it from their parsers."""

import argparse
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import shtab

from coppice.common.options import command_parser
from coppice.tools.bootstrap import ROOT

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
_coppice_run_dirs() { [[ $1 == */* ]] && compgen -d -- "$1" || compgen -d -- "runs/$1" || compgen -d -- "$1"; }
_coppice_config_files() { [[ $1 == */* ]] && compgen -f -- "$1" || compgen -G "configs/$1*.toml" || compgen -f -- "$1"; }
""",
    "zsh": "_coppice_runs() { _alternative 'runs:run:compadd -f - runs/*(/N)' 'folders:folder:_files -/' }\n",
    "fish": "",
}


def parsers() -> Iterator[argparse.ArgumentParser]:
    """Yield the parser of every executable of tools/, from the module that the executable starts."""
    for path in sorted((ROOT / "tools").iterdir()):
        if path.is_file() and (
            module := re.search(r'^    start\("([\w.]+):', path.read_text(), re.MULTILINE)
        ):
            yield importlib.import_module(module[1]).parser()


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
    """Return the script for a shell. A command is known by its path: from the project's folder, and
    whole."""
    parts = [PREAMBLE[shell]]
    for parser in parsers():
        mark(parser)
        text = shtab.complete(parser, shell)
        whole, function = ROOT / parser.prog, f"_shtab_{shtab.wordify(parser.prog)}"
        if shell == "bash":
            text += f"\ncomplete -o bashdefault -F {function} ./{parser.prog} '{whole}'"
        elif shell == "zsh":
            text += (
                # zsh takes ./ for a path below the folder
                f"\ncompdef {function} '{ROOT}/./{parser.prog}' '{whole}'"
            )
        else:  # fish finds a command with a slash by its whole path only
            text = text.replace(f"complete -c {parser.prog}", f"complete -p '{whole}'")
        parts.append(text)
    return "\n".join(parts)


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice completion."""
    parser = command_parser(
        "coppice completion", "Print a script that completes these commands in a shell.", EXAMPLES
    )
    parser.add_argument(
        "shell", choices=sorted(PREAMBLE), metavar="SHELL", help="bash, zsh or fish"
    )
    return parser


def main() -> int:
    """Run the command and return its exit status."""
    sys.stdout.write(script(parser().parse_args().shell))
    return 0
