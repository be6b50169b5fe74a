"""The WebShop oracle: its distances against a breadth-first search of the shop, and the rewards of
turns."""

import itertools
import random

import msgspec
import pytest

from coppice.actors.environments.webshop.environment import WebShopState
from coppice.actors.environments.webshop.goals import Goal, make_goals
from coppice.actors.environments.webshop.invented import catalogue
from coppice.actors.environments.webshop.store import BUY, Store, StorePlace
from coppice.judges.oracles.webshop import WebShopOracle, distance
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn
from tests import games

ORACLE = WebShopOracle()
SHOP = ORACLE.environment


def judge(turns: list[JudgedTurn]) -> list[dict[str, float]]:
    return games.scores(ORACLE, turns)


def turn(state: WebShopState, command: str) -> JudgedTurn:
    task = msgspec.structs.replace(SHOP.task(0), id=f"webshop-{state.goal}")
    action = SHOP.read(state, f"<think>x</think><action>{command}</action>")
    return SHOP.judged(task, state, action, 1, 4)


def after(state: WebShopState, command: str) -> WebShopState:
    return games.play(SHOP, state, command)[-1].state


def shortest(shop: Store, place: StorePlace, goal: Goal) -> int:
    """The fewest clicks and searches for the product's name that buy it with its options."""
    level, seen, steps = {msgspec.structs.replace(place, visited=())}, set(), 1
    while True:
        seen |= level
        onward: set[StorePlace] = set()
        for at in level:
            names = shop.clickables(at)
            if (
                BUY in names
                and at.asin == goal.product.asin
                and set(map(str, goal.options)) <= set(map(str, at.options))
            ):
                return steps
            places = [shop.clicked(at, name) for name in names]
            places.append(shop.searched(at, goal.product.name.lower()))
            onward |= {
                msgspec.structs.replace(one, visited=(), options=tuple(sorted(one.options)))
                for one in places
            } - seen
        level, steps = onward, steps + 1


@pytest.mark.second
def test_distances_are_those_of_a_breadth_first_search() -> None:
    products = catalogue(count=66)
    shop, goals, rng = Store(products), make_goals(products, human=False), random.Random(3)
    for goal in rng.sample(goals, 12):
        place = StorePlace()
        for _ in range(8):
            assert distance(shop, place, goal) == shortest(shop, place, goal), place
            moves = [name for name in shop.clickables(place) if name != BUY]
            own = [name for name in moves if name in (goal.product.asin.lower(), *goal.values)]
            chance = rng.random()
            if place.page == "search" or chance < 0.15:
                queries = [goal.product.name.lower(), goal.product.query, "solid wood"]
                place = shop.searched(place, rng.choice(queries))
            else:
                place = shop.clicked(place, rng.choice(own if own and chance < 0.5 else moves))


def test_distances_are_exact_where_the_name_leads_to_a_later_page() -> None:
    first = catalogue(count=1)[0]
    alike = [
        msgspec.structs.replace(first, asin=f"B{number}", options={"size": ("one", "two")})
        for number in range(25)
    ]
    shop, goal = Store(alike), Goal(alike[23], "", ("x",), (("size", "two"),), 1e6)
    third = StorePlace("results", first.name.lower(), 3)
    other, own = shop.clicked(third, "b21"), shop.clicked(third, "b23")
    chosen = shop.clicked(own, "two")
    places = [StorePlace(), third, shop.clicked(third, "< prev"), other]
    places += [shop.clicked(other, "features"), own, chosen, shop.clicked(own, "one")]
    places += [shop.clicked(chosen, "reviews"), msgspec.structs.replace(third, number=1)]
    places.append(StorePlace("results", "zebra"))
    expected = [6, 3, 4, 4, 5, 2, 1, 2, 2, 5, 6]
    assert [distance(shop, place, goal) for place in places] == expected
    assert [shortest(shop, place, goal) for place in places] == expected


def test_detours_are_worth_nothing_and_unusable_actions_less() -> None:
    goal, state = SHOP.goals[0], WebShopState(0, SHOP.store.digest)
    listed = after(state, f"search[{goal.product.name}]")
    item = after(listed, f"click[{goal.product.asin}]")
    values = itertools.chain(*goal.product.options.values())
    wrong = next(value for value in values if value not in goal.values)
    chosen = after(item, f"click[{goal.values[0]}]")
    expected = {
        (state, "search[zebra]"): 0,
        (listed, "click[next >]"): 0,
        (listed, "click[back to search]"): 0,
        (listed, f"search[{goal.product.name}]"): 0,
        (item, "click[features]"): 0,
        (item, f"click[{wrong}]"): 0,
        (item, "click[buy now]"): 0,
        (chosen, f"click[{goal.values[0]}]"): 0,
        (after(item, "click[features]"), "click[< prev]"): 1,
        (after(listed, "click[next >]"), "click[< prev]"): 1,
        (item, "click[nothing]"): -1,
        (item, "look around"): -1,
    }
    judgements = judge([turn(*key) for key in expected])
    assert [judgement["reward"] for judgement in judgements] == list(expected.values())


def test_a_state_of_another_shop_is_a_data_fault() -> None:
    state = WebShopState(0, "another")
    plain = JudgedTurn("t", [], "", "", 1, 4, state=msgspec.to_builtins(state))
    with pytest.raises(DataFault, match="catalogue 'another'"):
        judge([plain])
    with pytest.raises(DataFault, match="its state is not one of"):
        judge([msgspec.structs.replace(plain, state={"board": "x"})])
