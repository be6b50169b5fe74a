"""The command coppice evaluate: a game (ENV) or question answering (qa)."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any


def subject(name: str) -> Any:
    """The module that measures: of questions, or of games."""
    place = "qa.evaluation" if name == "qa" else "games"
    return importlib.import_module(f"coppice.tools.evaluating.{place}")


def parser() -> argparse.ArgumentParser:
    """Return the parsers of coppice evaluate as one with subcommands, for shells."""
    from coppice.actors.environments import registry

    whole = argparse.ArgumentParser("coppice evaluate")
    commands = whole.add_subparsers()
    for name in (*registry.BUILT_IN, "qa"):
        commands.add_parser(name, parents=[subject(name).parser()], add_help=False, help=name)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    of, words = subject(next(iter(arguments), "")), 1 if arguments[:1] == ["qa"] else 0
    from coppice.tools.evaluating import examination

    command = "coppice evaluate" + " qa" * words
    return examination.run(command, of.parser(), of.prepare, arguments[words:])
