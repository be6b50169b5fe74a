"""The reward of WebShop: the nine known answers, and its rules one by one."""

from typing import Any

import msgspec
import pytest

from coppice.actors.environments.webshop.goals import NO_CAP, Goal
from coppice.actors.environments.webshop.products import PATH_SEPARATOR, Product
from coppice.actors.environments.webshop.reward import colour_of, reward, similarity, type_factor


def product(
    name: str,
    nouns: str,
    query: str,
    path: str,
    attributes: list[str],
    price: float = 0.0,
    **texts: Any,
) -> Product:
    return Product(
        asin="A", name=name, query=query, category="", product_category=path.replace(">", PATH_SEPARATOR), price=price,
        description=texts.get("description", ""), bullets=tuple(texts.get("bullets", ())), tag="", options={},
        attributes=tuple(attributes), instruction="", instruction_attributes=(), human=(), nouns=tuple(nouns.split()),
    )  # fmt: skip


SHIRT = product(
    "Alder Men's Cotton T-Shirt", "alder men cotton t shirt", "men's t-shirts", "Clothing > Men > Shirts > T-Shirts",
    ["machine wash", "short sleeve"],
)  # fmt: skip
POLO = product(
    "Birch Men's Polo Shirt", "birch men polo shirt", "polo shirts", "Clothing > Men > Shirts > Polos",
    ["machine washable"], description="Has a short sleeve and a collar.",
)  # fmt: skip
PICNIC = product(
    "Pine Picnic Table", "pine picnic table", "picnic tables", "Patio > Furniture > Picnic", ["solid wood"],
    bullets=["easy assemble"],
)  # fmt: skip
LAMP = product(
    "Cedar Desk Lamp",
    "cedar desk lamp",
    "men's t-shirts",
    "Home > Lighting > Lamps",
    ["machine wash", "short sleeve"],
)
G = Goal(SHIRT, "", SHIRT.attributes, (("color", "dark blue"), ("size", "x-large")), 30.0)
OAK = product(
    "Oak Coffee Table Drawer Shelf Storage", "oak coffee table drawer shelf storage", "coffee tables",
    "Home > Furniture > Tables", [],
)  # fmt: skip
H = Goal(OAK, "", ("Easy Assemble", "solid wood"), ("black",), NO_CAP)
LONG = msgspec.structs.replace(
    H,
    product=msgspec.structs.replace(
        OAK, nouns=(*OAK.nouns, *["desk", "cabinet", "stand", "rack", "bench"])
    ),
)


@pytest.mark.parametrize(
    ("bought", "options", "price", "goal", "expected"),
    [
        (SHIRT, ["dark blue", "x-large"], 24, G, 1),
        (SHIRT, [], 24, G, 0.6),
        (SHIRT, ["light blue", "large"], 24, G, 1),
        (SHIRT, ["red", "small"], 31, G, 0.4),
        (POLO, ["navy", "x-large"], 30, G, 0.8),
        (PICNIC, ["matte black"], 999, H, 0.375),
        (PICNIC, ["matte black"], 999, LONG, 0.075),
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
        ("dark blue", "blue"), ("titanium", "tan"), ("standard", "tan"), ("large", "large"), (("color", "red"), "red"),
        (("color", "dark blue"), ("color", "dark blue")),
    ],
)  # fmt: skip
def test_the_first_colour_word_replaces_an_option(
    option: str | tuple[str, str], expected: str | tuple[str, str]
) -> None:
    assert colour_of(option) == expected


def test_similarity_is_rounded_and_ignores_case_marks_and_order() -> None:
    assert similarity("machine washable", "machine wash") == 86
    assert similarity("Wash, Machine!", "machine wash") == 100
    assert similarity(("size", "x-large"), "large") == 100


def test_type_falls_to_a_half_without_shared_query_category_or_title() -> None:
    alike = msgspec.structs.replace(PICNIC, query="coffee tables")
    assert type_factor(PICNIC, H) == 0.5
    assert type_factor(alike, H) == 1.0
    assert (
        type_factor(msgspec.structs.replace(PICNIC, product_category=OAK.product_category), H)
        == 1.0
    )
    nameless = msgspec.structs.replace(H, product=msgspec.structs.replace(OAK, nouns=()))
    assert type_factor(alike, nameless) == 1.0
    assert type_factor(PICNIC, nameless) == 0.5
