"""Products of the shop, read from dictionaries or files of WebShop's original layout
(docs/webshop.md)."""

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from coppice.common.jsonl import whole

NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""The attributes of a product for which the attribute file has none."""
DEFAULT_PRICE = 100.0
LONGEST_ASIN = 10
PATH_SEPARATOR = "\u203a"
"""Stands between the parts of a product category."""


class Human(msgspec.Struct, frozen=True):
    """An instruction that a person wrote for a product, with the attributes and option values that
    it asks for."""

    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]


class Product(msgspec.Struct, frozen=True):
    """One product. price: dollars. tag: the price as the pages show it. options: values by group.

    instruction: the start of the product's synthetic goals, "" if it has none. nouns: the nouns of
    the name, in lower case and with duplicates.
    """

    asin: str
    name: str
    query: str
    category: str
    product_category: str
    description: str
    bullets: tuple[str, ...]
    price: float
    tag: str
    options: dict[str, tuple[str, ...]]
    attributes: tuple[str, ...]
    instruction: str
    instruction_attributes: tuple[str, ...]
    human: tuple[Human, ...]
    nouns: tuple[str, ...]


def read_products(products: str, attributes: str, human: str) -> list[Product]:
    """Return the products of three files in the original layout. human: "" for none. Each
    product has a further list "nouns", of its name's. One whose asin is longer than ten characters,
    "nan" or a repetition is left out.

    Raises FileNotFoundError for a missing file and ValueError for a file of another layout.
    """
    layout = "a JSON file of WebShop's layout (docs/webshop.md)"
    described = whole(Path(attributes), dict, layout)
    instructions = whole(Path(human), dict, layout) if human else {}
    try:
        rows: dict[str, dict[str, Any]] = {}
        for row in whole(Path(products), list, layout):
            if row["asin"] != "nan" and len(row["asin"]) <= LONGEST_ASIN:
                rows.setdefault(row["asin"], row)
        return [
            product_of(row, described.get(asin, {}), instructions.get(asin, ()))
            for asin, row in rows.items()
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{products = }, {attributes = }: {type(error).__name__}: {error}; expected the layout"
            " of WebShop's items_shuffle and items_ins_v2, and nouns (docs/webshop.md)"
        ) from None


def product_of(
    row: Mapping[str, Any], described: Mapping[str, Any], human: Sequence[Mapping[str, Any]] = ()
) -> Product:
    """Return the product of a row of the product file, with its nouns, and its rows of the files of
    attributes and of human instructions."""
    bullets, (price, tag) = row["small_description"], _price(row.get("pricing"), row["asin"])
    keys = ("instruction", "instruction_attributes", "instruction_options")
    people = [[one[key] for key in keys] for one in human]
    groups = row.get("customization_options") or {}
    return Product(
        asin=row["asin"],
        name=row["name"],
        query=row["query"].lower().strip(),
        category=row["category"],
        product_category=row["product_category"],
        description=row["full_description"] or "",
        bullets=tuple(bullets) if isinstance(bullets, list | tuple) else (bullets or "",),
        price=price,
        tag=tag,
        options={
            name.lower(): tuple(one["value"].strip().replace("/", " | ").lower() for one in values)
            for name, values in groups.items()
            if values is not None
        },
        attributes=tuple(described.get("attributes", NO_ATTRIBUTES)),
        instruction=described.get("instruction") or "",
        instruction_attributes=tuple(described.get("instruction_attributes") or ()),
        human=tuple(Human(said, tuple(asks), tuple(values)) for said, asks, values in people),
        nouns=tuple(row["nouns"]),
    )


def _price(pricing: str | None, asin: str) -> tuple[float, str]:
    """Return the price in dollars and its tag. The price of a range is drawn uniformly, and the
    draw depends on the product alone."""
    found = re.findall(r"\$\s*([\d,]*\.?\d+)", pricing or "")
    numbers = [float(number.replace(",", "")) for number in found] or [DEFAULT_PRICE]
    if len(numbers) == 1:
        return numbers[0], f"${numbers[0]}"
    low, high = numbers[:2]
    return random.Random(f"price/{asin}").uniform(low, high), f"${low} to ${high}"
