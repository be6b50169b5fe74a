"""Every tool has a help, which ends with examples that the tool would accept."""

import argparse
import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from coppice.tools import evaluating, main


def whole(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from whole(command)


def printed() -> dict[str, argparse.ArgumentParser]:
    """The parsers whose help a person can see, by the words before --help."""
    tools_ = [main.module_of(name).parser() for name in main.COMMANDS if name != "evaluate"]
    tools_ += [evaluating.subject(name).parser() for name in ("tictactoe", "qa")]
    return {parser.prog: parser for tool in tools_ for parser in whole(tool)}


SHELL = ("|", "&&", ">", "2>")
PARSERS = printed()
STAGES = ("coppice sft ", "coppice dev judge-bench ")
TOOLS = {name: parser for name, parser in PARSERS.items() if not name.startswith(STAGES)}


def examples(parser: argparse.ArgumentParser) -> list[str]:
    """The commands of a help's examples, without what they do, which stands behind two spaces."""
    _, _, text = parser.format_help().partition("\nexamples:\n")
    commands = re.findall(r"^  ((?:coppice|tools/test).*)$", text.replace("\\\n    ", ""), re.M)
    return [command.split("  ")[0] for command in commands]


def test_every_command_has_a_help_of_its_name() -> None:
    prefixes = [name.removeprefix("coppice ") for name in PARSERS]
    for name in main.COMMANDS:
        if name != "dev test":  # the executable's
            assert any(f"{prefix} ".startswith(f"{name} ") for prefix in prefixes), name


@pytest.mark.parametrize("name", TOOLS)
def test_a_help_ends_with_examples_that_the_tool_accepts(name: str) -> None:
    commands = examples(TOOLS[name])
    assert commands, "the help ends with `examples:`"
    for command in commands:
        assert command.startswith(name)
        try:
            words = itertools.takewhile(lambda word: word not in SHELL, shlex.split(command))
            TOOLS[name].parse_args([*words][len(name.split()) :])
        except SystemExit:
            pytest.fail(f"{command}: the parser refuses it")


def test_a_flag_chooses_another_command() -> None:
    assert main._mode("watch", ["RUN", "--status"]) == ("watch --status", ["RUN"])
    assert main._mode("watch", ["RUN"]) == ("watch", ["RUN"])


def test_the_reader_of_an_output_may_leave() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "coppice", "plan"]
    done = subprocess.run(words, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
