"""The reward of WebShop: the nine known answers, and its rules one by one."""

from typing import Any

import msgspec
import pytest

from coppice.actors.environments.webshop.goals import NO_CAP, Goal
from coppice.actors.environments.webshop.products import PATH_SEPARATOR, Product, product_of
from coppice.actors.environments.webshop.reward import colour_of, reward, similarity, type_factor


def product(name: str, query: str, path: str, *attributes: str, **texts: Any) -> Product:
    """The nouns of a product are all words of its name."""
    nouns = name.lower().replace("'s", "").replace("-", " ").split()
    row = {"asin": "A", "name": name, "nouns": nouns, "query": query, "category": ""}
    row |= {"product_category": path.replace(">", PATH_SEPARATOR), "full_description": ""}
    row |= {"small_description": ()} | texts
    return product_of(row, {"attributes": attributes})


CLOTHING, PATIO = "Clothing > Men > Shirts", "Patio > Furniture > Picnic"
TEE, WASH = "men's t-shirts", ("machine wash", "short sleeve")
COLLAR = "Has a short sleeve and a collar."
SHIRT = product("Alder Men's Cotton T-Shirt", TEE, f"{CLOTHING} > T-Shirts", *WASH)
POLO = product(
    "Birch Men's Polo Shirt",
    "polo shirts",
    f"{CLOTHING} > Polos",
    "machine washable",
    full_description=COLLAR,
)
PICNIC = product(
    "Pine Picnic Table", "picnic tables", PATIO, "solid wood", small_description=["easy assemble"]
)
LAMP = product("Cedar Desk Lamp", TEE, "Home > Lighting > Lamps", *WASH)
G = Goal(SHIRT, "", SHIRT.attributes, (("color", "dark blue"), ("size", "x-large")), 30.0)
LONG = product(
    "Oak Coffee Table Drawer Shelf Storage Desk Cabinet Stand Rack Bench",
    "coffee tables",
    "Home > Furniture > Tables",
)
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


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        *[("dark blue", "blue"), ("titanium", "tan"), ("standard", "tan"), ("large", "large")],
        *[(("color", "red"), "red"), (("color", "dark blue"), ("color", "dark blue"))],
    ],
)
def test_the_first_colour_word_replaces_an_option(
    option: str | tuple[str, str], expected: str | tuple[str, str]
) -> None:
    assert colour_of(option) == expected


def test_similarity_is_rounded_and_ignores_case_marks_and_order() -> None:
    assert similarity("machine washable", "machine wash") == 86
    assert similarity("Wash, Machine!", "machine wash") == 100
    assert similarity(("size", "x-large"), "large") == 100


def test_type_falls_to_a_half_without_shared_query_category_or_title() -> None:
    replace = msgspec.structs.replace
    alike = replace(PICNIC, query="coffee tables")
    assert (type_factor(PICNIC, H), type_factor(alike, H)) == (0.5, 1.0)
    assert type_factor(replace(PICNIC, product_category=OAK.product_category), H) == 1.0
    nameless = replace(H, product=replace(OAK, nouns=()))
    assert (type_factor(alike, nameless), type_factor(PICNIC, nameless)) == (1.0, 0.5)
