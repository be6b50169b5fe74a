"""Goals: prices and caps, synthetic and human goals, and the splits."""

import itertools
from collections import Counter

import pytest

from coppice.actors.environments.webshop.goals import NO_CAP, draw_cap, make_goals, split
from coppice.actors.environments.webshop.invented import catalogue
from coppice.actors.environments.webshop.reward import reward

PRODUCTS = catalogue()
GOALS = make_goals(PRODUCTS, human=False)


def test_a_cap_is_one_of_the_three_larger_multiples_of_ten_with_the_known_chances() -> None:
    counts = Counter(draw_cap(12.0, str(seed))[0] for seed in range(6000))
    assert set(counts) == {30.0, 40.0, 50.0}
    for cap, chance in ((30.0, 1 / 6), (40.0, 1 / 3), (50.0, 1 / 2)):
        assert abs(counts[cap] / 6000 - chance) < 0.03
    assert draw_cap(979.0, "x") == (990.0, ", and price lower than 990.00 dollars")
    assert draw_cap(980.0, "x") == (NO_CAP, "")


def test_synthetic_goals_are_all_combinations_of_sorted_option_groups() -> None:
    product = max(PRODUCTS, key=lambda one: len(one.options))
    own = [goal for goal in GOALS if goal.product is product]
    first, second = sorted(product.options)
    pairs = itertools.product(product.options[first], product.options[second])
    assert {tuple(goal.values) for goal in own} == set(pairs)
    for goal in own:
        asks = f" with {first}: {goal.values[0]}, and {second}: {goal.values[1]}"
        assert goal.instruction.startswith(product.instruction + asks)
        assert goal.options == tuple(zip((first, second), goal.values, strict=True))
    assert len({goal.cap for goal in own}) == 1


def test_no_product_has_goals_in_two_parts_of_the_split_by_products() -> None:
    training, held_out = (
        {GOALS[i].product.asin for i in part} for part in split(GOALS, "products")
    )
    assert training.isdisjoint(held_out)
    assert len(training) + len(held_out) == 1000
    assert len(held_out) == 200


def test_the_released_split_holds_out_the_first_500_goals_and_shares_products() -> None:
    training, held_out = split(GOALS, "released")
    assert held_out == list(range(500))
    assert training == list(range(500, len(GOALS)))
    assert {GOALS[i].product.asin for i in training} & {GOALS[i].product.asin for i in held_out}


@pytest.mark.parametrize("how", ["products", "released"])
def test_a_split_that_leaves_a_part_empty_is_refused(how: str) -> None:
    with pytest.raises(ValueError, match="expected more products or goals"):
        split([goal for goal in GOALS if goal.product is PRODUCTS[0]], how)


def test_every_goal_of_the_invented_shop_can_be_bought_perfectly() -> None:
    for goal in GOALS:
        assert reward(goal.product, goal.values, goal) == 1.0, goal.instruction


def test_the_invented_shop_has_the_size_of_the_original() -> None:
    names = {product.name for product in PRODUCTS}
    assert len({product.asin for product in PRODUCTS}) == len(names) == len(PRODUCTS) == 1000
    assert 6000 < len(GOALS) < 10_000
    assert all(len(product.asin) == 10 and product.nouns for product in PRODUCTS)
    assert catalogue() == PRODUCTS
    assert catalogue(seed=8) != PRODUCTS
