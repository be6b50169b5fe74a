"""Goals, synthetic and human, their splits, and the reward: nine known answers, and its rules."""

import itertools
from collections import Counter
from typing import Any

import msgspec
import pytest

from coppice.actors.environments.webshop.goals import NO_CAP, Goal, draw_cap, make_goals, split
from coppice.actors.environments.webshop.invented import catalogue
from coppice.actors.environments.webshop.products import PATH_SEPARATOR, Product, product_of
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


def test_no_product_and_no_wish_is_on_two_sides_of_the_split_by_products() -> None:
    training, held_out = ([GOALS[i] for i in part] for part in split(GOALS, "products"))
    asins, kept = ({goal.product.asin for goal in part} for part in (training, held_out))
    assert asins.isdisjoint(kept)
    assert len(asins) + len(kept) == 1000
    assert len(kept) == 200
    assert {goal.wish for goal in training}.isdisjoint(goal.wish for goal in held_out)


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
    assert 6000 < len(GOALS) < 10_000 and catalogue() == PRODUCTS


def product(name: str, query: str, path: str, *attributes: str, **texts: Any) -> Product:
    """The nouns of a product are all words of its name."""
    nouns = name.lower().replace("'s", "").replace("-", " ").split()
    row = {"asin": "A", "name": name, "nouns": nouns, "query": query, "category": ""}
    row |= {"product_category": path.replace(">", PATH_SEPARATOR), "full_description": ""}
    row |= {"small_description": ()} | texts
    return product_of(row, {"attributes": attributes})


CLOTHING, PATIO = "Clothing > Men > Shirts", "Patio > Furniture > Picnic"
TEE, WASH = "men's t-shirts", ("machine wash", "short sleeve")
COLLAR = {"full_description": "Has a short sleeve and a collar."}
BENCH = "Oak Coffee Table Drawer Shelf Storage Desk Cabinet Stand Rack Bench"
SHIRT = product("Alder Men's Cotton T-Shirt", TEE, f"{CLOTHING} > T-Shirts", *WASH)
POLOS = f"{CLOTHING} > Polos"
POLO = product("Birch Men's Polo Shirt", "polo shirts", POLOS, "machine washable", **COLLAR)
PICNIC = product(
    "Pine Picnic Table", "picnic tables", PATIO, "solid wood", small_description=["easy assemble"]
)
LAMP = product("Cedar Desk Lamp", TEE, "Home > Lighting > Lamps", *WASH)
G = Goal(SHIRT, "", SHIRT.attributes, (("color", "dark blue"), ("size", "x-large")), 30.0)
LONG = product(BENCH, "coffee tables", "Home > Furniture > Tables")
OAK = msgspec.structs.replace(LONG, nouns=LONG.nouns[:6])
H = Goal(OAK, "", ("Easy Assemble", "solid wood"), ("black",), NO_CAP)


@pytest.mark.parametrize(
    ("bought", "options", "price", "goal", "expected"),
    [
        (SHIRT, ["dark blue", "x-large"], 24, G, 1),
        (SHIRT, [], 24, G, 0.6),
        (SHIRT, ["light blue", "large"], 24, G, 1),
        (SHIRT, ["red", "small"], 31, G, 0.4),
        (POLO, ["navy", "x-large"], 30, G, 0.8),
        (PICNIC, ["matte black"], 999, H, 0.375),
        (PICNIC, ["matte black"], 999, msgspec.structs.replace(H, product=LONG), 0.075),
        (PICNIC, [], 999, msgspec.structs.replace(H, options=()), 1 / 3),
        (LAMP, ["dark blue", "x-large"], 24, G, 0),
    ],
)
def test_the_nine_known_answers(
    bought: Product, options: list[str], price: float, goal: Goal, expected: float
) -> None:
    value = reward(msgspec.structs.replace(bought, price=float(price)), options, goal)
    assert value == pytest.approx(expected, abs=1e-12)
