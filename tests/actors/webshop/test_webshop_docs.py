"""The table of docs/webshop.md, measured again. Run it with -s to see the numbers."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from coppice.actors.environments.webshop.environment import WebShop, WebShopState
from coppice.tools.launching.config import load
from tests import games

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "docs" / "webshop.md").read_text()
SHOP = WebShop()
GOALS = [SHOP.initial(SHOP.task(2**30 + seed)).goal for seed in range(500)]


def words(state: WebShopState) -> str:
    return SHOP.goal(state).instruction.partition(", and price")[0]


def start(number: int) -> WebShopState:
    return msgspec.structs.replace(SHOP.initial(SHOP.task(0)), goal=number)


def play(number: int, player: Callable[[WebShopState], str]) -> dict[str, float]:
    """The measures of one episode."""
    state = start(number)
    while True:
        (transition,) = games.play(SHOP, state, player(state))
        if transition.done:
            return transition.measures
        state = transition.state


def first_result(state: WebShopState, choose: bool) -> str:
    place = state.place
    if place.page == "search":
        return f"search[{words(state)}]"
    if place.page == "results":
        return f"click[{list(SHOP.store.clickables(state.place))[2]}]"
    groups = SHOP.store.products[place.asin].options
    asked = [
        value
        for name, values in groups.items()
        for value in values
        if f"{name}: {value}" in SHOP.goal(state).instruction and (name, value) not in place.options
    ]
    return f"click[{asked[0]}]" if choose and asked else "click[buy now]"


def row(beginning: str) -> list[float]:
    """The numbers of a row of the table."""
    (line,) = (line for line in TEXT.splitlines() if line.startswith(f"| {beginning} |"))
    return [float(part) for part in line.split("|")[2].split(",")]


def test_the_ranks_are_those_of_the_table() -> None:
    ranks = []
    for number in GOALS:
        goal = SHOP.goals[number]
        results = SHOP.store.results(words(start(number)).lower())
        ranks.append(results.index(goal.product.asin) if goal.product.asin in results else 1000)
    shares = [sum(rank < most for rank in ranks) / 500 for most in (1, 10, 50)]
    print("ranks", shares)
    first = "the goal's product is the first result for its instruction"
    names = (first, ".. on the first page", ".. among the 50 results")
    assert [row(name) for name in names] == [[round(share, 3)] for share in shares]


@pytest.mark.slow
def test_the_players_are_those_of_the_table() -> None:
    rng = random.Random(0)

    def random_clicks(state: WebShopState) -> str:
        names = list(SHOP.store.clickables(state.place))
        return f"search[{words(state)}]" if names == ["search"] else f"click[{rng.choice(names)}]"

    players: dict[str, Callable[[WebShopState], str]] = {
        "search the instruction, then random clicks: success, score": random_clicks,
        "search, open the first result, buy": lambda state: first_result(state, choose=False),
    }
    last = "search, open the first result, choose the options that the instruction names, buy"
    players[last] = lambda state: first_result(state, choose=True)
    for name, player in players.items():
        measures = [play(number, player) for number in GOALS]
        columns = ("success", "score")
        success, score = (sum(one[column] for one in measures) / 500 for column in columns)
        print(name, success, score)
        assert row(name) == [round(success, 3), round(score, 1)]


def test_the_size_of_the_invented_shop_is_as_told() -> None:
    assert f"with {len(SHOP.goals):,} goals" in TEXT
    assert f"of {len({product.query for product in SHOP.store.products.values()})} types" in TEXT


def test_the_config_of_the_page_is_accepted(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```toml\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)
    (tmp_path / "own.toml").write_text(f'name = "own"\n{block}')
    assert load(tmp_path / "own.toml", []).data.environment == "webshop"
