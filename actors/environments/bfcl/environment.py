"""The Berkeley Function Calling Leaderboard as an environment: user turns come from the task, and a
reply without a call ends a turn. A state is the task and the replies so far, played again at each
step, which takes a few milliseconds."""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from coppice.actors.environments import base
from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.actors.environments.bfcl.calls import PYTHON, FunctionCall, read, write
from coppice.actors.environments.bfcl.leaderboard import CATEGORIES, Leaderboard, leaderboard
from coppice.actors.environments.bfcl.splits import divided
from coppice.common.numbers import Count
from coppice.common.tool_calls import MARKS
from coppice.wire.faults import DataFault

DONE = "Done."
"""How a reference ends a user turn."""
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}


class BfclState(msgspec.Struct, frozen=True):
    """An episode. task: the leaderboard's id. form: how calls are written. replies: all so far."""

    task: str
    form: str = PYTHON
    replies: tuple[str, ...] = ()


class Script(msgspec.Struct):
    """What the replies of a state say. turns: the calls by user turn and reply, the turn in
    progress last. offered: the functions so far. problem: of the last reply. over: no turn is left.
    """

    turns: list[list[Sequence[FunctionCall]]]
    offered: list[dict[str, Any]]
    problem: str = ""
    over: bool = False


class Bfcl(Environment):
    """categories: of the leaderboard. form: "python", or the notation of a model family. documents:
    of the functions: the leaderboard's "json", or short "signatures" (Python form). split:
    "functions" (no function that answers a training task of one turn answers a held-out one; tasks
    of one scenario stay together) or "all" (every task is held out, to compare with the
    leaderboard). api: a class, such as "GorillaFileSystem", that tasks of several turns must use;
    "" for any. horizon: the most replies with calls in a user turn; one more fails the episode.
    appended: False makes each turn a fresh prompt, as endpoints need. wheel: its path, or ""."""

    name = "bfcl"
    marks = MARKS

    def __init__(
        self,
        categories: Sequence[str] = CATEGORIES,
        form: Literal["python", "hermes", "llama3", "mistral"] = PYTHON,
        documents: Literal["json", "signatures"] = "json",
        split: Literal["functions", "all"] = "functions",
        api: str = "",
        horizon: Count = 20,
        appended: bool = True,
        wheel: str = "",
    ):
        if unknown := sorted({*categories} - {*CATEGORIES}):
            raise ValueError(f"categories: {unknown}: expected some of {', '.join(CATEGORIES)}")
        if form != PYTHON and documents != "json":
            raise ValueError(f"documents = {documents!r} has no effect with form = {form!r}")
        self.categories, self.form, self.short = categories, form, documents == "signatures"
        self.split, self.api, self.horizon, self.wheel = split, api, horizon, wheel
        self.fresh = self.begins_with_prompt = not appended

    @functools.cached_property
    def board(self) -> Leaderboard:
        """The leaderboard, which is fetched when it is first needed."""
        return leaderboard(self.wheel)

    @functools.cached_property
    def sides(self) -> tuple[list[str], list[str]]:
        """The ids of the training and of the held-out tasks."""
        training, held_out = divided(self.board, self.categories, self.split == "all")
        return [*filter(self._kept, training)], [*filter(self._kept, held_out)]

    def _kept(self, name: str) -> bool:
        classes = self.board.entry(name).classes
        return not (self.api and classes) or self.api in classes

    def task(self, seed: int) -> Task:
        """Return the task of ``seed``; consecutive seeds give different ones. Raises DataFault if
        the split leaves none."""
        if not (ids := self.sides[seed in base.HELD_OUT_SEEDS]):
            settings = f"split = {self.split!r} and api = {self.api!r}"
            raise DataFault(f"bfcl: {settings} leave no task of these categories")
        entry = self.board.entry(ids[(seed - base.HELD_OUT_SEEDS.start) % len(ids)])
        return Task(entry.id, entry.turns[0][-1]["content"], seed=seed, source=entry.category)

    def initial(self, task: Task) -> BfclState:
        return BfclState(self.board.entry(task.id).id, self.form)

    def prompt(self, task: Task, state: BfclState) -> list[dict[str, Any]]:
        """Return the conversation so far: the leaderboard's words, with the functions in the system
        message for the Python form."""
        entry = self.board.entry(state.task)
        messages = [*entry.turns[0]]
        if state.form == PYTHON:
            words = self.board.prompts._DEFAULT_SYSTEM_PROMPT
            system = words.format(functions=self._listed(entry.functions))
            if messages[0]["role"] == "system":
                system = f"{system}\n\n{messages.pop(0)['content']}"
            messages.insert(0, {"role": "system", "content": system})
        if self.fresh:
            messages[-1] = messages[-1] | {"content": messages[-1]["content"] + base.SPLIT}
            for count, reply in enumerate(state.replies):
                before = BfclState(state.task, state.form, state.replies[:count])
                messages += [{"role": "assistant", "content": reply}, *self._after(before, reply)]
        return messages

    def tools(self, state: BfclState) -> list[dict[str, Any]]:
        """Return the functions of the first turn. Those that come later stand in a user message,
        because what was rendered stays as it is."""
        first = self.board.entry(state.task).functions
        functions = json.dumps(first if state.form != PYTHON else [])
        for name, kind in JSON_TYPES.items():
            functions = functions.replace(f'"type": "{name}"', f'"type": "{kind}"')
        return [{"type": "function", "function": one} for one in json.loads(functions)]

    def read(self, state: BfclState, text: str) -> Action:
        """Return the calls, an answer without calls, or an invalid action, which ends the user turn
        as an answer does: so does the leaderboard."""
        before, after = self.script(state), self.script(state, text)
        called = after.turns[len(before.turns) - 1] != before.turns[-1]
        return Action("invalid" if after.problem else "call" if called else "answer", text)

    async def step(self, state: BfclState, action: Action, tools: Tools) -> Transition:
        script, entry = self.script(state, action.text), self.board.entry(state.task)
        reached = msgspec.structs.replace(state, replies=(*state.replies, action.text))
        given_up = not script.over and len(script.turns[-1]) > self.horizon
        if script.over or given_up:
            verdict = self.board.verdict(entry, script.turns[:-1] if given_up else script.turns)
            seen = "" if verdict["valid"] else f"The leaderboard says {verdict['error_type']}."
            return Transition(reached, seen, True, float(verdict["valid"]))
        messages = self._after(state, action.text)
        if self.fresh:
            return Transition(reached, "\n".join(one["content"] for one in messages), False)
        return Transition(reached, "", False, messages=messages, after=len(state.replies))

    def replies(self, state: BfclState) -> list[str]:
        """Return the reference's next reply, and one that ends the user turn: the baseline "first"
        plays the references."""
        entry, turns = self.board.entry(state.task), self.script(state).turns
        if entry.classes:
            left = entry.answer[len(turns) - 1][sum(map(len, turns[-1])) :]
            calls = left if len(left) > self.horizon else left[:1]
        elif entry.category == "live_relevance":
            calls = [FunctionCall(entry.functions[0]["name"], "{}")]
        else:
            calls = [possible(answer, entry.functions) for answer in entry.answer]
        return [write(state.form, calls) if calls else DONE, DONE]

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return the measures of an episode, its return under the name of its category too."""
        measures = super().measures(task, turns)
        return measures | ({task.source: measures["return"]} if "return" in measures else {})

    def script(self, state: BfclState, *more: str) -> Script:
        """Return what the replies of a state, and ``more``, say."""
        entry = self.board.entry(state.task)
        script = Script([[]], entry.functions)
        for reply in (*state.replies, *more):
            names = tuple(function["name"] for function in script.offered)
            calls, script.problem = read(state.form, reply, names)
            script.turns[-1] += [calls] if calls else []
            last = len(script.turns) == len(entry.turns)
            script.over = not entry.classes or (last and not calls)
            if not (calls or script.over):
                script.offered = script.offered + entry.added.get(len(script.turns), [])
                script.turns.append([])
        return script

    def _after(self, state: BfclState, reply: str) -> list[dict[str, str]]:
        """Return the messages that follow a reply: the results of its calls, or the next turn's."""
        entry, turns = self.board.entry(state.task), self.script(state, reply).turns
        number = len(turns) - 1
        if len(turns) > len(self.script(state).turns):
            if number not in entry.added:
                return entry.turns[number]
            words = self.board.prompts.DEFAULT_USER_PROMPT_FOR_ADDITIONAL_FUNCTION_PROMPTING
            content = words.format(functions=self._listed(entry.added[number]))
            return [{"role": "user", "content": content}]
        results = self.board.replayed(entry, turns)[1][-len(turns[-1][-1]) :]
        names = [str(call) if state.form == PYTHON else call.name for call in turns[-1][-1]]
        pairs = zip(names, results, strict=True)
        told = [{"role": "tool", "name": name, "content": result} for name, result in pairs]
        return [{"role": "user", "content": repr(told)}] if state.form == PYTHON else told

    def _listed(self, functions: Sequence[dict[str, Any]]) -> str:
        return (
            "\n".join(map(signature, functions)) if self.short else json.dumps(functions, indent=4)
        )


def signature(function: dict[str, Any]) -> str:
    """Return a function's name, its parameters with types ("?" marks the optional ones), and the
    first sentence of its description."""
    needed, properties = function["parameters"]["required"], function["parameters"]["properties"]
    each = (f"{k}{'?' * (k not in needed)}: {one['type']}" for k, one in properties.items())
    # the documents of the executable classes begin with a sentence about the class
    said = function["description"].rpartition("Tool description: ")[2].partition(". ")[0]
    return f"{function['name']}({', '.join(each)}): {said.rstrip('.')}."


def possible(answer: dict[str, Any], functions: Sequence[dict[str, Any]]) -> FunctionCall:
    """Return the first possible answer of a call, without arguments that may be left out."""
    ((name, options),) = answer.items()
    (parameters,) = [one["parameters"] for one in functions if one["name"] == name]
    values = _first(options, parameters["required"])
    for key, value in values.items():
        # in dictionaries, and in those in lists, each key has possible values of its own
        if isinstance(value, list):
            values[key] = [_first(one) if isinstance(one, dict) else one for one in value]
        elif isinstance(value, dict):
            values[key] = _first(value)
    return FunctionCall(name, repr(values))


def _first(options: dict[str, list[Any]], needed: Sequence[str] = ()) -> dict[str, Any]:
    """The first value of each key. options: possible values, with "" if the key may be missing."""
    kept = {key: several for key, several in options.items() if key in needed or "" not in several}
    return {key: next((v for v in several if v != ""), "") for key, several in kept.items()}
