"""The embedded catalogue: 1,000 invented products, made from a seed and the words of
catalogue.toml. Those of one type share query, category and pool of attributes."""

import random
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from coppice.actors.environments.webshop.products import PATH_SEPARATOR, Product, product_of

SEED = 7
COUNT = 1000
SHOWN_ATTRIBUTES, ASKED_ATTRIBUTES = (4, 6), (2, 3)
"""How many attributes a product has, and how many of them its instruction asks for (least and
most)."""
RANGES, UNPRICED = 0.15, 0.02
"""The shares of products with a price range and without a price."""

WORDS = tomllib.loads((Path(__file__).parent / "catalogue.toml").read_text())
NOT_NOUNS = frozenset(WORDS["not_nouns"].split())
MOST_VALUES = {1: 6, 2: 4}
"""The most values of an option group by the number of a product's groups; the least is 2."""


class Kind(NamedTuple):
    """A type of product. path: its category, with ">" between the parts. heads: the ends of its
    names. pool: its attributes.

    groups: its option groups. low, high: the range of prices in dollars.
    """

    path: str
    query: str
    heads: str
    pool: str
    groups: str
    low: int
    high: int


KINDS = [Kind(*kind) for kind in WORDS["kinds"]]


def catalogue(seed: int = SEED, count: int = COUNT) -> list[Product]:
    """Return ``count`` products. The same seed makes the same products in every process."""
    rng = random.Random(seed)
    syllables, endings = WORDS["syllables"].split(), WORDS["endings"].split()
    brands: dict[str, None] = {}  # several products share each of them
    while len(brands) < max(1, count // 4):
        middle = rng.choice(syllables) * rng.randrange(2)
        brands[f"{rng.choice(syllables)}{middle}{rng.choice(endings)}".capitalize()] = None
    names = list(brands)
    return [_product(KINDS[n % len(KINDS)], n, names, rng) for n in range(count)]


def _product(kind: Kind, number: int, brands: Sequence[str], rng: random.Random) -> Product:
    attributes = rng.sample(WORDS["pools"][kind.pool].split(";"), rng.randint(*SHOWN_ATTRIBUTES))
    brand, head = rng.choice(brands), rng.choice(kind.heads.split("|"))
    line = rng.choice(WORDS["lines"].split())
    named = [attribute.title() for attribute in attributes[: rng.randint(1, 2)]]
    words = head.lower().replace("-", " ").replace("'", " ").split()
    row: dict[str, Any] = {
        "asin": f"C{number:03X}{rng.randrange(16**6):06X}",
        "name": f"{brand} {line} {head}, {', '.join(named)}",
        "nouns": [brand.lower(), *(word for word in words if word not in NOT_NOUNS)],
        "query": kind.query,
        "category": kind.path.split(" > ")[0].lower(),
        "product_category": kind.path.replace(">", PATH_SEPARATOR),
    }
    first, second = rng.sample(WORDS["praise"], 2)
    row["full_description"] = (
        f"The {head.lower()} of {brand} is made {first}. It is {rng.choice(attributes)}, and it is"
        f" chosen {second} too."
    )
    said = [attribute.capitalize() for attribute in rng.sample(attributes, len(attributes))]
    row["small_description"] = [f"{one}: made {rng.choice(WORDS['praise'])}" for one in said]
    low = rng.randint(kind.low, kind.high) + rng.choice((0.0, 0.49, 0.95, 0.99))
    chance = rng.random()
    row["pricing"] = f"${low:.2f}" if chance >= UNPRICED else None
    if UNPRICED <= chance < UNPRICED + RANGES:
        row["pricing"] = f"${low:.2f} - ${low * rng.uniform(1.1, 1.6):.2f}"
    row["customization_options"], groups = {}, kind.groups.split()
    for group in groups:
        values = WORDS["options"][group].split(";")
        count = rng.randint(2, min(MOST_VALUES[len(groups)], len(values)))
        kept = sorted(rng.sample(range(len(values)), count))
        name = WORDS["names"].get(group, group)
        row["customization_options"][name] = [{"value": values[place]} for place in kept]
    wanted = rng.sample(attributes, rng.randint(*ASKED_ATTRIBUTES))
    wish = f"Find me {', '.join(wanted)} {kind.query}"
    described = {"attributes": attributes, "instruction": wish, "instruction_attributes": wanted}
    return product_of(row, described)
