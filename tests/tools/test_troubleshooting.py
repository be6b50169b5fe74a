"""docs/troubleshooting.md quotes the program's messages, and has an entry for each of a failure."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from coppice.tools.launching.settings import Config
from tests.tools.said import known_setting

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FOLDERS = (
    "wire common scheduler learner actors/engines judges tools/launching tools/defaults".split()
)
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
MORE = "actors/worker.py actors/environments/task_files.py tools/bootstrap.py".split()
MORE += ["actors/environments/others/mutable.py"]
FILES += [ROOT / name for name in MORE]
TREES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in FILES}
HOLE = "\0"
"""A value that a message names, in a template. The page writes it as three dots."""
LETTERS = 12
"""A message with fewer letters of its own says only what its values say."""
FAULTS = (
    "InfrastructureFault DataFault JournalError CheckpointError DamagedError PackingError Rejected"
    " MemoryError TimeoutError Refused"
).split()
SAID = "alerts.say self._say screen.say self.screen.say log.warning log.error log.exception".split()
FUNCTIONS = {
    "tools/launching/failures.py": ("cause_of", "remedy"),
    "tools/launching/rules.py": ("doubts",),
    "tools/launching/record.py": ("no_space",),
    "tools/launching/watchdog.py": ("_stopped_process", "_silent", "_stalled"),
    "tools/launching/status.py": ("main", "gather", "_read_journal"),
    "tools/launching/control.py": ("_worker", "stop", "_running"),
    "tools/launching/memory.py": ("memory_warning", "number_type"),
    "tools/launching/command.py": ("resolve", "main", "_told", "_launch"),
    "tools/bootstrap.py": ("ensure", "_run"),
    "learner/update/corrections.py": ("doubts",),
    "learner/update/watch.py": ("warnings", "_length", "_validity"),
    "learner/model/optimizer.py": ("step",),
    "learner/model/checkpoint.py": ("restore_newest",),
    "scheduler/telemetry/alerts.py": ("take",),
    "scheduler/main.py": ("main",),
    "actors/environments/task_files.py": ("unusable", "too_few", "load_tasks"),
    "wire/keys.py": ("load",),
}
"""Whose sentences a person reads although nothing is raised or said there."""


def template(node: ast.expr) -> str:
    """The text of a string expression, with a HOLE for each value; "" if it is no string."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"%[sdr]|%\.\d[a-z]", HOLE, text)
        case ast.JoinedStr(values=parts):
            values = [str(p.value) if isinstance(p, ast.Constant) else HOLE for p in parts]
            return "".join(values)
    return ""


def templates(tree: ast.AST) -> Iterator[str]:
    """Every string of the code below ``tree`` except docstrings."""
    silent: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            silent.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            silent |= {id(part) for part in node.values}
        if isinstance(node, ast.expr) and id(node) not in silent and (text := template(node)):
            yield text


def pattern(quoted: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(part.strip()) for part in quoted.split("...")))


def letters(text: str) -> int:
    return sum(letter.isalpha() for letter in text)


CODE = {" ".join(text.split()) for tree in TREES.values() for text in templates(tree)}
QUOTED = re.findall(r"\*\*`+ ?(.+?) ?`+\*\*", PAGE)


def told() -> Iterator[tuple[str, str]]:
    """Messages that a person can meet, as (place, template)."""
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            match node:
                case ast.Raise(exc=ast.Call(func=ast.Name(id=fault), args=[message, *_])) if (
                    fault in FAULTS
                ):
                    yield f"{name}:{node.lineno}", template(message)
                case ast.Call(func=called, args=[message, *_]) if ast.unparse(called) in SAID:
                    yield f"{name}:{node.lineno}", template(message)
                case ast.FunctionDef(name=function) | ast.AsyncFunctionDef(name=function):
                    begun = ("coppice launch", "coppice watch")
                    for text in templates(node) if function in FUNCTIONS.get(name, ()) else ():
                        if " " in text and not text.startswith(begun):
                            yield f"{name}: {function}", text


@pytest.mark.second
def test_every_quoted_message_is_one_of_the_code() -> None:
    assert len(QUOTED) > 100, "the quoted messages were not found"
    assert [quoted for quoted in QUOTED if letters(quoted) < LETTERS] == []
    unknown = [q for q in QUOTED if not any(pattern(q).search(text) for text in CODE)]
    assert unknown == []


def test_every_message_of_a_failure_has_an_entry() -> None:
    messages = {" ".join(text.split()): place for place, text in told() if letters(text) >= LETTERS}
    assert len(messages) > 150, "the messages were not found"
    patterns = [pattern(quoted) for quoted in QUOTED]
    missing = [
        f"{place}: {text.replace(HOLE, '...')}"
        for text, place in messages.items()
        if not any(p.search(text) for p in patterns)
    ]
    assert missing == [], "write what it means and what to do into docs/troubleshooting.md"


def test_every_rule_of_the_audit_has_an_entry() -> None:
    tree = ast.parse((ROOT / "tools/inspecting/audit.py").read_text())
    rules = {
        template(node.args[0])
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Violation"
    }
    assert len(rules) > 8, "the rules were not found"
    assert [rule for rule in rules if f"`{rule}`" not in PAGE] == []


def test_every_setting_that_the_page_names_exists() -> None:
    own = re.sub(r"\*\*`+ ?.+? ?`+\*\*", "", PAGE)
    rooms = "scheduler|learner|actors|data|model|judges|warm_start|retriever"
    named = set(re.findall(rf"[` ](({rooms})\.[a-z_.]*[a-z])[`=]", own))
    assert len(named) > 20, "the settings were not found"
    logs = {"scheduler.log", "scheduler.out"}
    assert [
        key for key, _ in named if key not in logs and not known_setting(Config, key.split("."))
    ] == []
