"""The command coppice evaluate: a game (ENV), question answering (qa), or judges of processes
(nvprocess)."""

import argparse
import importlib
import sys
from typing import Any

MODULES = {
    "qa": "coppice.tools.evaluating.qa.main",
    "nvprocess": "coppice.tools.evaluating.judge_bench.evaluate",
}
"""What is measured by a module of its own; any other first word is a game."""


def _module(name: str) -> Any:
    return importlib.import_module(MODULES.get(name, "coppice.tools.evaluating.games"))


def parser() -> argparse.ArgumentParser:
    """Return the parsers of coppice evaluate as one with subcommands, for shells."""
    from coppice.actors.environments import registry

    whole = argparse.ArgumentParser("coppice evaluate")
    commands = whole.add_subparsers()
    for name in (*registry.BUILT_IN, *MODULES):
        commands.add_parser(name, parents=[_module(name).parser()], add_help=False, help=name)
    return whole


def main() -> int:
    """Run the command and return its exit status."""
    name = next(iter(sys.argv[1:]), "")
    return _module(name).main(sys.argv[2:] if name in MODULES else sys.argv[1:])
