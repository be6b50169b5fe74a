"""SLATE trees on two real actors whose caches are too small: what is prefilled, and what the scheduler said would be."""

from pathlib import Path

import pytest

from scheduler.fleet import Fleet
from scheduler.placement import Load
from tools.research.benches import fleet_shape, pressure
from tools.research.benches.fleet_shape import HEAD, OBSERVATION, QUESTION, STEPS, Setting
from tools.research.benches.routers import Arrival, Router

pytestmark = pytest.mark.slow

QUESTIONS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fleet_shape.policy(tmp_path_factory.mktemp("fleet"))


@pytest.fixture(scope="module")
def whole(model: Path) -> Setting:
    return pressure.whole(model, QUESTIONS)


def test_with_all_the_cache_the_trees_need_prefill_is_ideal_but_for_the_second_actors_head(
    model: Path, whole: Setting
) -> None:
    found = fleet_shape.measure(model, Fleet(STEPS), whole)
    letters = 26  # questions that begin with the same letters share them
    ideal = HEAD + QUESTIONS * (QUESTION + (STEPS - 1) * (OBSERVATION + 1))
    assert ideal - QUESTIONS * 2 <= found.ideal <= ideal
    assert found.ideal + HEAD <= found.prefilled <= found.ideal + HEAD + 2 * letters
    assert found.ratio <= pressure.GOAL
    assert min(found.requests.values()) >= QUESTIONS * STEPS // 4
    error = abs(found.forecast.predicted - found.forecast.reported)
    assert error <= 0.005 * found.forecast.prompt  # two prompts of one engine step may both compute a shared token


@pytest.mark.parametrize("scale", [0.5, 0.25])
def test_under_pressure_less_is_prefilled_than_in_the_order_of_arrival(
    model: Path, whole: Setting, scale: float
) -> None:
    ours = fleet_shape.measure(model, Fleet(STEPS), pressure.part(whole, scale))
    arrival = fleet_shape.measure(model, Arrival(), pressure.part(whole, scale))
    assert ours.prefilled < 0.9 * arrival.prefilled
    assert ours.forecast.prompt == ours.prompt


def test_the_router_knows_a_head_from_a_prefix_by_its_share_alone() -> None:
    loads = [Load("a", 0, 8), Load("b", 0, 8)]

    def pick(router: Router, prompt: str, loads: list[Load] = loads) -> str:
        tokens = "".join(letter * 4 for letter in prompt).encode()
        worker = router.pick(tokens, len(prompt), loads)
        router.sent[worker].insert(tokens)
        return worker

    router = Router(threshold=0.5)
    assert [pick(router, prompt) for prompt in ("hhhhx", "hhhhy", "hhz", "qqqqqqqqqqqqqqqqqqqqqqq", "hhhhyy")] == [
        *("a", "a", "a", "b", "a")
    ]
    busy = [Load("a", 70, 99), Load("b", 2, 99)]
    assert pick(router, "hhhhx", busy) == "b"
    assert (
        pick(router, "rr", [Load("a", 65, 99), Load("b", 2, 99)]) == "a"
    )  # no further apart than 64: the smaller tree
