"""Games that another Python plays: the contract is in test_other_environments.py; here is what a
process of one's own may do beside it."""

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coppice.actors.environments.registry import load
from coppice.wire.faults import DataFault, InfrastructureFault
from tests.actors.conftest import begun, openenv, played

Make = Callable[..., Any]


async def process_of(environment: Any, state: Any) -> int:
    return int((await played(environment, state, "process")).state.seen.partition("[")[0])


async def test_the_game_is_in_a_process_of_its_own_that_close_ends(other: Make) -> None:
    environment = other()
    state = await begun(environment)
    pid = await process_of(environment, state)
    assert pid != os.getpid() and await process_of(environment, state) == pid
    await environment.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.second
@pytest.mark.parametrize(
    ("action", "fault", "said"),
    [
        ("die", InfrastructureFault, "the process has died"),
        ("hang", InfrastructureFault, "no answer in"),
        ("fail", DataFault, "KeyError: 'a mistake of the library'"),
    ],
)
async def test_a_step_that_fails_is_a_fault_and_the_episode_goes_on_from_its_state(
    other: Make, action: str, fault: type[Exception], said: str
) -> None:
    environment = other()
    state = (await played(environment, await begun(environment), "a", "bb")).state
    expected = await played(environment, state, "ccc")
    before = await process_of(environment, state)
    environment._children[0].timeout_s = 1.0 if action == "hang" else 60.0
    with pytest.raises(fault, match=said):
        await played(environment, state, action)
    environment._children[0].timeout_s = 60.0
    assert await played(environment, state, "ccc") == expected
    assert (await process_of(environment, state) == before) == (fault is DataFault)


@pytest.mark.second
async def test_an_action_without_an_answer_is_tried_again_and_then_loses(other: Make) -> None:
    environment = other()
    state = await begun(environment)
    environment._children[0].timeout_s = 2.0
    with pytest.raises(InfrastructureFault, match="no answer in"):
        await played(environment, state, "hang")
    environment._children[0].timeout_s = 20.0
    await process_of(environment, state)
    environment._children[0].timeout_s = 2.0
    end = await played(environment, state, "hang")
    assert end.done and end.measures == {"success": 0.0}


async def test_a_beginning_without_an_answer_is_a_fault_of_its_task(
    other: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = other()

    async def ask(*_: Any) -> Any:
        raise InfrastructureFault("the process has died")

    monkeypatch.setattr(environment._children[0], "ask", ask)
    with pytest.raises(InfrastructureFault):
        await begun(environment)
    with pytest.raises(DataFault, match="of seed 7 after 0 actions gave no answer, twice"):
        await begun(environment)


async def test_a_cancelled_step_leaves_no_answer_for_the_next_one(other: Make) -> None:
    environment = other()
    state = await begun(environment)
    expected = [await played(environment, state, action) for action in ("a", "bb")]
    for ticks in range(8):
        step = asyncio.create_task(played(environment, state, "a"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        step.cancel()
        await asyncio.gather(step, return_exceptions=True)
        again = (played(environment, state, action) for action in ("a", "bb"))
        assert await asyncio.gather(*again) == expected


@pytest.mark.second
async def test_tasks_are_dealt_to_the_processes_and_a_task_stays_with_its_own(other: Make) -> None:
    environment = other(processes=2)
    states = [await begun(environment, seed) for seed in (1, 2, 3)]
    first, second, third = [await process_of(environment, state) for state in states]
    assert first == third != second


async def test_keys_of_this_process_do_not_reach_the_other(
    other: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "peeking.py").write_text(
        "import os\nclass Peek:\n    def begin(self, seed): return str(sorted(os.environ))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOME_API_KEY", "secret")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    state = await begun(other("peeking:Peek"))
    assert "PYTHONHASHSEED" in state.seen and "SOME_" not in state.seen


@pytest.mark.second
async def test_answers_of_a_set_have_the_librarys_partial_credit(other: Make) -> None:
    pytest.importorskip("reasoning_gym")
    primes = {"name": "prime_factorization", "min_value": 30, "max_value": 30}
    environment = other("reasoning_gym", arguments=primes)
    state = await begun(environment, 3)
    for answer, score in (("words", 0.0), ("5 \u00d7 6", 0.5), ("2 \u00d7 3 \u00d7 5", 1)):
        last = await played(environment, state, answer)
        assert (last.outcome, last.done) == (score, True)
        assert last.measures == {"success": float(score == 1)}
    assert await begun(environment, 3) == state


@pytest.mark.second
async def test_fields_of_openenv_are_seen_and_its_rewards_are_earned(other: Make) -> None:
    environment = other("openenv", arguments=openenv())
    state = await begun(environment)
    assert json.loads(state.seen) == {"total": 7, "drawn": 0}
    two = await played(environment, state, "1", '{"number": 2}')
    assert (json.loads(two.observation)["total"], two.reward, two.done) == (10, 0.2, False)
    last = await played(environment, two.state, "9")
    assert (last.done, last.outcome, last.measures) == (True, pytest.approx(1.2), {"success": 1.0})


@pytest.mark.second
@pytest.mark.parametrize("action", ["[4]", "42", "true", '"so"'])
async def test_a_bare_text_may_look_like_json(other: Make, action: str) -> None:
    environment = other("openenv", arguments=openenv("Listening", "words", "Say"))
    seen = (await played(environment, await begun(environment), action)).observation
    assert json.loads(seen)["total"] == 7 + len(action)


@pytest.mark.second
@pytest.mark.parametrize("action", ['{"number": "many"}', '{"number": 1, "more": 2}', "many"])
async def test_an_action_that_openenv_refuses_ends_the_episode(other: Make, action: str) -> None:
    environment = other("openenv", arguments=openenv(field="" if action == "many" else "number"))
    last = await played(environment, await begun(environment), '{"number": 5}', action)
    assert (last.done, last.outcome, last.measures) == (True, 0.5, {"success": 0.0})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"python": "/no/such/python"}, "/no/such/python"),
        ({"game": "gym"}, "expected one of .'gem', 'openenv', .*'textworld'., or module:Class"),
        ({"game": "tests.no_such_game:Drawn"}, "no_such_game"),
        ({"arguments": {"second": 1}}, "unexpected keyword argument 'second'"),
    ],
)
def test_what_cannot_be_started_is_refused_before_a_run(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    usable = {"game": "tests.drawn_game:Drawn"}
    with pytest.raises(ValueError, match=said):
        load("other_python", usable | options)
