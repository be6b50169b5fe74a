"""The command coppice dev bench prints a table of benchmarks, each a ratio measured in one run.

A benchmark is a module here with ``run(**settings)``, which returns a ``result``.
"""

import argparse
import importlib
import json
import operator
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coppice.common.options import checked, command_parser, gave_up, option
from coppice.tools.bootstrap import ROOT

EXAMPLES = """\
  coppice dev bench prefill tree_training               two of them
  coppice dev bench memory --json                      with every measured value
  coppice dev bench decode --set rounds=1       an unknown setting is refused"""


def result(
    name: str, ratio: float, goal: float, better: str = "higher", **more: Any
) -> dict[str, Any]:
    """The result of a benchmark. better: "higher" or "lower". more: every measured value."""
    return {"name": name, "ratio": ratio, "goal": goal, "better": better} | more


def launch_command(run: Path, config: Path, settings: Mapping[str, object]) -> list[str]:
    """Return the command that trains ``config``, with changed settings, in the folder ``run``."""
    command = [sys.executable, str(ROOT / "tools" / "launch"), "--config", str(config)]
    command += ["--run-folder", str(run)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return command


def _names() -> list[str]:
    """The names of the benchmarks: the modules that define ``run``. They are read and not imported,
    which would cost seconds."""
    here = Path(__file__).parent
    return sorted(
        path.stem for path in here.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of coppice dev bench."""
    parser = command_parser(
        "coppice dev bench", "Measure benchmarks, each as a ratio with a goal.", EXAMPLES
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"any of {', '.join(_names())} (default: all)"
    )
    parser.add_argument("--json", action="store_true", help="also print every measured value")
    setting = "change a setting of the benchmarks, such as rounds=1 or model=NAME"
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help=setting)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run the named benchmarks (default: all). Return 0, or 1 if a goal is missed, or 2 for an
    unknown name or setting."""
    options, existing = parser().parse_args(arguments), _names()
    names = options.names or existing
    try:
        if unknown := set(names) - set(existing):
            raise ValueError(f"unknown {sorted(unknown)}; expected {existing}")
        settings = dict(option(text) for text in options.set)
        each = [
            checked("--set", f"benchmark {name}", _module(name).run, settings, ()) for name in names
        ]
    except ValueError as error:
        return gave_up("coppice dev bench", error)
    rows = [_module(name).run(**one) for name, one in zip(names, each, strict=True)]
    print(f"{'benchmark':<58} {'ratio':>8} {'goal':>8}")
    missed = 0
    for row in rows:
        sign, reaches = (">=", operator.ge) if row["better"] == "higher" else ("<=", operator.le)
        good = reaches(row["ratio"], row["goal"])
        missed += not good
        verdict = "" if good else "MISSED"
        print(f"{row['name']:<58} {row['ratio']:>8.3f} {sign} {row['goal']:<5} {verdict}")
        if options.json:
            print(json.dumps(row))
    return int(missed > 0)


def _module(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
