"""Products of the shop, read from dictionaries or files of WebShop's original layout
(docs/webshop.md)."""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""The attributes of a product for which the attribute file has none."""
DEFAULT_PRICE = 100.0
LONGEST_ASIN = 10
PATH_SEPARATOR = "\u203a"
"""Stands between the parts of a product category."""
NOUNS = ("NOUN", "PROPN")
"""The parts of speech that decide whether two products are of one type."""


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


def read_products(products: str, attributes: str, human: str, pipeline: str) -> list[Product]:
    """Return the products of three files in the original layout. human: "" for none. pipeline: of
    spaCy, for names without the field "nouns".

    Raises FileNotFoundError for a missing file and ValueError for a file of another layout.
    """
    rows = _json(products, list)
    described = _json(attributes, dict)
    instructions = _json(human, dict) if human else {}
    try:
        return made(rows, described, instructions, lambda names: spacy_nouns(names, pipeline))
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"products = {products!r}, attributes = {attributes!r}: {type(error).__name__}: {error}; expected the layout of"
            " WebShop's items_shuffle and items_ins_v2 (docs/webshop.md)"
        ) from None


def made(
    rows: Sequence[Mapping[str, Any]],
    attributes: Mapping[str, Mapping[str, Any]],
    human: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    nouns: Callable[[Sequence[str]], list[tuple[str, ...]]] = lambda names: [() for _ in names],
) -> list[Product]:
    """Return the products of rows in the original layout. A row whose asin is longer than ten
    characters, "nan" or a repetition is left out. nouns: finds the nouns of names without the field
    "nouns"."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in rows:
        if row["asin"] != "nan" and len(row["asin"]) <= LONGEST_ASIN:
            first.setdefault(row["asin"], row)
    unknown = [row["name"] for row in first.values() if "nouns" not in row]
    parsed = dict(zip(unknown, nouns(unknown), strict=True)) if unknown else {}
    return [
        _product(row, attributes.get(asin, {}), (human or {}).get(asin, ()), parsed)
        for asin, row in first.items()
    ]


def spacy_nouns(names: Sequence[str], pipeline: str) -> list[tuple[str, ...]]:
    """Return the lower-case nouns of each name. pipeline: the name or the folder of a spaCy
    pipeline that tags parts of speech.

    Raises ValueError with the remedy if spaCy or the pipeline is not installed.
    """
    missing = "spaCy is not installed"
    try:
        import spacy  # pyright: ignore[reportMissingImports] (an extra)

        missing = f"spaCy has no pipeline {pipeline!r}"
        parser = spacy.load(pipeline, exclude=["parser", "ner"])
    except (ImportError, OSError):
        raise ValueError(
            f"{missing}, and it finds the nouns of product names: install the extra `webshop` and the pipeline"
            " (python -m spacy download en_core_web_sm), or give each product of the file a list `nouns`"
        ) from None
    return [
        tuple(token.text.lower() for token in document if token.pos_ in NOUNS)
        for document in parser.pipe(list(names))
    ]


def _product(
    row: Mapping[str, Any],
    described: Mapping[str, Any],
    human: Sequence[Mapping[str, Any]],
    parsed: Mapping[str, tuple[str, ...]],
) -> Product:
    bullets = row["small_description"]
    price, tag = _price(row.get("pricing"), row["asin"])
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
        options=_options(row.get("customization_options") or {}),
        attributes=tuple(described.get("attributes", NO_ATTRIBUTES)),
        instruction=described.get("instruction") or "",
        instruction_attributes=tuple(described.get("instruction_attributes") or ()),
        human=tuple(
            Human(
                one["instruction"],
                tuple(one["instruction_attributes"]),
                tuple(one["instruction_options"]),
            )
            for one in human
        ),
        nouns=tuple(row["nouns"] if "nouns" in row else parsed.get(row["name"], ())),
    )


def _options(
    groups: Mapping[str, Sequence[Mapping[str, Any]] | None],
) -> dict[str, tuple[str, ...]]:
    return {
        name.lower(): tuple(one["value"].strip().replace("/", " | ").lower() for one in contents)
        for name, contents in groups.items()
        if contents is not None
    }


def _price(pricing: str | None, asin: str) -> tuple[float, str]:
    """Return the price in dollars and its tag. The price of a range is drawn uniformly, and the
    draw depends on the product alone."""
    found = re.findall(r"\$\s*([\d,]*\.?\d+)", pricing or "")
    numbers = [float(number.replace(",", "")) for number in found]
    if not numbers:
        return DEFAULT_PRICE, f"${DEFAULT_PRICE}"
    if len(numbers) == 1:
        return numbers[0], f"${numbers[0]}"
    low, high = numbers[:2]
    return random.Random(f"price/{asin}").uniform(low, high), f"${low} to ${high}"


def _json(path: str, kind: type) -> Any:
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"webshop: no file {path!r}; expected a JSON file of WebShop's layout (docs/webshop.md)"
        )
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except msgspec.DecodeError as error:
        raise ValueError(
            f"webshop: {path!r}: {error}; expected a JSON file of WebShop's layout"
        ) from None
