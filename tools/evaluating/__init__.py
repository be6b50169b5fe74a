"""The command coppice evaluate: a game (ENV) or question answering (qa)."""

import argparse
import importlib
import sys
from typing import Any


def _module(name: str) -> Any:
    place = "qa.main" if name == "qa" else "games"
    return importlib.import_module(f"coppice.tools.evaluating.{place}")


def parser() -> argparse.ArgumentParser:
    """Return the parsers of coppice evaluate as one with subcommands, for shells."""
    from coppice.actors.environments import registry

    whole = argparse.ArgumentParser("coppice evaluate")
    commands = whole.add_subparsers()
    for name in (*registry.BUILT_IN, "qa"):
        commands.add_parser(name, parents=[_module(name).parser()], add_help=False, help=name)
    return whole


def main() -> int:
    """Run the command and return its exit status."""
    name = next(iter(sys.argv[1:]), "")
    return _module(name).main(sys.argv[2:] if name == "qa" else sys.argv[1:])
