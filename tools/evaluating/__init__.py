"""The command coppice evaluate: a game (ENV) or question answering (qa)."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any


def subject(name: str) -> Any:
    """The module that measures: of questions, or of games."""
    place = "qa.evaluation" if name == "qa" else "games"
    return importlib.import_module(f"coppice.tools.evaluating.{place}")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    of, words = subject(next(iter(arguments), "")), 1 if arguments[:1] == ["qa"] else 0
    from coppice.tools.evaluating import examination

    command = "coppice evaluate" + " qa" * words
    return examination.run(command, of.parser(), of.prepare, arguments[words:])
