"""The command ``coppice``. Each subcommand is a module with ``parser`` and ``main``, imported when
it is asked for; a flag may choose another module (``coppice watch --audit``)."""

import argparse
import difflib
import importlib
import os
import signal
import sys
from typing import Any

from coppice.common.options import command_parser
from coppice.tools.bootstrap import CHECKOUT, ROOT, ensure

COMMANDS = {
    "launch": ("tools.launching.command", "train a policy, or go on with a run"),
    "watch": ("tools.inspecting.watch", "show a run live, and pause, drain or stop it"),
    "watch --status": ("tools.launching.status", "explain a run on one page"),
    "watch --audit": ("tools.inspecting.audit", "check that every task was trained exactly once"),
    "trees": ("tools.inspecting.dump", "print prefix trees of a run, or query them"),
    "report": ("tools.inspecting.report", "draw the curves of runs on one page"),
    "evaluate": ("tools.evaluating", "measure a policy on a game or on questions"),
    "serve": ("judges.command", "plug a judge into a live run"),
    "serve --model": ("tools.launching.serve_model", "serve a model to OpenAI's clients"),
    "plan": ("tools.planning.command", "predict what a run takes"),
    "index": ("tools.defaults.index_corpus", "build a retrieval index"),
    "sft": ("tools.finetuning.command", "fine-tune a judge or a policy"),
    "export": ("tools.inspecting.export", "write the policy of a run for transformers"),
    "dev new": ("tools.launching.new_project", "make a folder for your own questions"),
    "dev bench": ("research.benches", "measure benchmarks, each a ratio with a goal"),
    "dev chaos": ("tests.chaos", "strike a small run with faults"),
    "dev theory": ("research.theories", "measure what the papers claim"),
    "dev replicate": ("research.replication", "run a study of several arms and seeds"),
    "dev judge-bench": ("research.judge_bench", "build a benchmark of judges, and measure them"),
    "dev gpu-check": ("research.gpu_checks", "run every check that needs a GPU"),
    "dev test": ("tests.check", "lint, type-check and test the project"),
}
"""Subcommand, perhaps with the flag that chooses it -> module of the package, help."""
_NEEDS_DEV = ("dev test", "dev gpu-check")
EXAMPLES = """\
  coppice launch --actors 4 --learner 4     train the default run
  coppice trees RUN                         look at its trees
  coppice COMMAND --help                    options and examples of a command"""


def main() -> int:
    """Run the subcommand of the command line and return its exit status."""
    try:
        try:
            return _run(sys.argv[1:])
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        try:
            print(flush=True)
        except BrokenPipeError:  # the reader of the output (head, less) has left
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        raise


def _run(words: list[str]) -> int:
    if words[:1] == ["dev"] and len(words) > 1 and not words[1].startswith("-"):
        words[:2] = [f"dev {words[1]}"]
    name, options = words[0] if words else "", words[1:]
    if name in ("", "dev", "-h", "--help"):
        parser().print_help()
        return 0 if name else 2
    if name not in COMMANDS or " --" in name:
        near = difflib.get_close_matches(name, [c for c in COMMANDS if " --" not in c], 1)
        guess = f"did you mean {near[0]!r}?" if near else "coppice --help lists the commands"
        sys.exit(f"coppice: {name!r} is no command; {guess}")
    name, options = _mode(name, options)
    ensure(*(["dev"] if name in _NEEDS_DEV else []))
    sys.argv[1:] = options
    module = module_of(name)
    return module.plug_in() if name == "serve" else module.main()


def _mode(name: str, options: list[str]) -> tuple[str, list[str]]:
    """Return the command that a flag among the options chooses, and its own options."""
    for place, option in enumerate(options):
        flag, _, value = option.partition("=")
        if f"{name} {flag}" in COMMANDS:
            others = [*options[:place], *([value] if value else []), *options[place + 1 :]]
            return f"{name} {flag}", others
    return name, options


def parser() -> argparse.ArgumentParser:
    """Return a parser that knows the names of the subcommands, for help and for errors."""
    parser = command_parser("coppice", "Train language-model agents on prefix trees.", EXAMPLES)
    shown = [name for name in COMMANDS if not name.startswith("dev ")]
    own = [name for name in COMMANDS if name.startswith("dev ")]
    listed, of_dev = (
        "\n".join(f"  {name:<16} {COMMANDS[name][1]}" for name in names) for names in (shown, own)
    )
    developers = f"for developers of Coppice:\n{of_dev}"
    parser.epilog = f"commands:\n{listed}\n\n{developers}\n\n{parser.epilog}"
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    return parser


def module_of(name: str) -> Any:
    place = COMMANDS[name][0]
    if not place.startswith("tests."):
        return importlib.import_module(f"coppice.{place}")
    if not CHECKOUT:
        sys.exit(f"coppice {name} needs a checkout of Coppice: this is an installed wheel")
    sys.path.insert(0, str(ROOT))
    return importlib.import_module(place)
