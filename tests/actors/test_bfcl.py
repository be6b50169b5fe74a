"""The Berkeley Function Calling Leaderboard: its references score 1, altered ones 0, and whatever a
policy writes is data."""

import itertools
import json
import random
from typing import Any

import pytest

from coppice.actors.environments.base import Task
from coppice.actors.environments.bfcl.calls import FunctionCall, read, write
from coppice.actors.environments.bfcl.environment import DONE, Bfcl, BfclState
from coppice.actors.environments.bfcl.leaderboard import ANSWERED, CATEGORIES, MULTI_TURN
from coppice.judges.oracles.bfcl import BfclOracle

TOOLS: Any = None
pytestmark = pytest.mark.usefixtures("bfcl_wheel")


async def referred(environment: Bfcl, name: str) -> list[Any]:
    """The transitions of the reference's replies."""
    seen, state = list[Any](), environment.initial(Task(name))
    while not (seen and seen[-1].done):
        action = environment.read(state, environment.replies(state)[0])
        seen.append(await environment.step(state, action, TOOLS))
        state = seen[-1].state
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("form", ["python", "hermes", "mistral"])
async def test_every_reference_scores_1_but_those_that_nothing_can_solve(form: Any) -> None:
    environment = Bfcl(form=form)
    names = [name for category in CATEGORIES for name in environment.board.entries(category)]
    failed = {name for name in names if (await referred(environment, name))[-1].outcome != 1}
    # a required list, or a parameter, has no possible answer; the third has another name there
    wrong = {"live_simple_106-63-0", "live_simple_112-68-0", "live_multiple_862-181-3"}
    # the last calls a function one turn before it is offered, which tools cannot
    wrong |= {"live_multiple_964-207-0", *["multi_turn_miss_func_49"] * (form != "python")}
    assert failed == wrong


def altered(call: FunctionCall, rng: random.Random) -> FunctionCall:
    values = call.values()
    keys = [key for key in values if type(values[key]) in (str, int, float)]
    if not keys:
        return FunctionCall(f"{call.name}_", call.arguments)
    key = rng.choice(keys)
    values[key] += "x" if isinstance(values[key], str) else 7
    return FunctionCall(call.name, repr(values))


@pytest.mark.slow
async def test_more_than_200_altered_references_score_0_and_no_other_effect_scores_1() -> None:
    environment, rng, zeros = Bfcl(), random.Random(0), 0
    board = environment.board
    for category in (*MULTI_TURN, *ANSWERED):
        entries = board.entries(category)
        for name in rng.sample(sorted(entries), min(19, len(entries))):
            entry, reply = entries[name], environment.replies(BfclState(name))[0]
            turns = [[[call] for call in turn] for turn in entry.answer]
            turns = turns if entry.classes else [[[*read("python", reply, ())[0]]]]
            before = board.replayed(entry, turns)
            calls = rng.choice(rng.choice([turn for turn in turns if turn]))
            place = rng.randrange(len(calls))
            calls[place] = altered(calls[place], rng)
            if board.verdict(entry, turns)["valid"]:
                world, results = board.replayed(entry, turns)
                assert entry.classes, name
                assert (world.leaves(), results) == (before[0].leaves(), before[1]), name
            else:
                zeros += 1
    assert zeros >= 200


async def test_copies_of_directories_into_each_other_are_refused_from_a_size_on() -> None:
    environment, state = Bfcl(), BfclState("multi_turn_base_1")
    names = [(f"d{n}", "d0") for n in range(1, 19)]  # each copy of d0 goes into d0
    calls = [f"cp(source='{a}', destination='{b}')" for new in names for a, b in (new[::-1], new)]
    reply = f"[mkdir(dir_name='d0'), {', '.join(calls)}]"
    seen = await environment.step(state, environment.read(state, reply), TOOLS)
    assert json.dumps(seen.messages).count("more than 100000 characters") > 4


def test_no_function_answers_training_and_held_out_tasks() -> None:
    environment, answering, scenarios = Bfcl(), list[set[str]](), list[set[str]]()
    for side in environment.sides:
        tasks = [environment.board.entry(name) for name in side]
        single = [task for task in tasks if task.category in ANSWERED]
        answering.append({name for task in single for call in task.answer for name in call})
        scenarios.append({task.id.rpartition("_")[2] for task in tasks if task.classes})
    assert not (answering[0] & answering[1] or scenarios[0] & scenarios[1])
    assert len({*environment.sides[0], *environment.sides[1]}) == 4291
    assert {*Bfcl(["parallel"]).sides[1]} < {*environment.sides[1]}
    assert not Bfcl(split="all").sides[0]


HOSTILE = [
    "[__import__('os').system('x')]", "[cd(folder=__import__('os').getcwd())]", "[f(a=1 + 1)]",
    "[" * 3000, "[f(a=" + "(" * 500, "[f(a=1e999)]", "[f(a={[]: 1})]", "[f(a=b'x')]", "[\0]",
    "[f(a=0x" + "f" * 9000 + ")]", "[lambda: 1]", "[f()()]", f"[{'f(), ' * 99}]",
]  # fmt: skip
ERRORS = {
    "_load_scenario(scenario={})": "not defined", "__init__()": "not defined",
    "power(base=9, exponent=99999999)": "above 1000",
    "round_number(number=5, decimal_places=-3000000)": "above 1000",
    "power(base=100000, exponent=1000)": "Exceeds the limit", "cat('x')": "missing 1 required",
    "f(**{'a': 1})": "not defined", "mv(source=[], destination={})": "unhashable",
}  # fmt: skip


@pytest.mark.parametrize(("reply", "result"), [*((r, "") for r in HOSTILE), *ERRORS.items()])
async def test_a_reply_is_parsed_and_never_evaluated(reply: str, result: str) -> None:
    environment = Bfcl()
    entries = environment.board.entries("multi_turn_base").values()
    wanted = {"MathAPI" if "number" in reply or "power" in reply else "GorillaFileSystem"}
    state = BfclState(next(one.id for one in entries if wanted <= {*one.classes}))
    action = environment.read(state, reply)
    assert action.kind == ("call" if result else "invalid")
    transition = await environment.step(state, action, TOOLS)
    assert result in json.dumps(transition.messages)
    assert not transition.done  # the call's result, or the next user turn


async def test_the_oracle_tells_needed_harmless_and_wrong_calls_apart() -> None:
    environment, oracle = Bfcl(form="hermes"), BfclOracle()

    def reward(state: BfclState, reply: str) -> float:
        action = environment.read(state, reply)
        return oracle.judge(environment.judged(Task(""), state, action, 1, 1)).scores["reward"]

    seen = await referred(environment, "multi_turn_base_1")
    states = [BfclState("multi_turn_base_1", "hermes"), *(one.state for one in seen)]
    moves = itertools.pairwise(states)
    assert {reward(state, after.replies[-1]) for state, after in moves} == {1.0}
    for name, arguments, wish in (
        ("pwd", "{}", 0.0), ("mkdir", "{'dir_name': 'new'}", -1.0), ("cd", "{'folder': 'no'}", -1.0)
    ):  # fmt: skip
        assert reward(states[0], write("hermes", [FunctionCall(name, arguments)])) == wish
    assert reward(states[0], DONE) == reward(states[0], "<tool_call>") == -1
    pwd = write("hermes", [FunctionCall("pwd", "{}")])
    action = environment.read(states[0], pwd)
    after = (await environment.step(states[0], action, TOOLS)).state
    assert reward(after, pwd) == -1  # stalling


def test_the_oracle_tells_right_functions_with_wrong_values_from_other_replies() -> None:
    environment, oracle = Bfcl(), BfclOracle()
    state = BfclState("simple_python_0")
    reference, called = environment.replies(state)[0], environment.board.entry(state.task).functions
    (call,) = read("python", reference, ())[0]
    wrong = altered(call, random.Random(0))
    other = FunctionCall(f"{called[0]['name']}_", call.arguments)
    judged = [
        environment.judged(Task(""), state, environment.read(state, reply), 1, 1)
        for reply in (reference, write("python", [wrong]), write("python", [other]), DONE)
    ]
    assert [oracle.judge(one).scores["reward"] for one in judged] == [1, 0, -1, -1]
