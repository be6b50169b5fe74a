"""The reward of a purchase, exactly as in WebShop's released code: type, attributes, options and price (docs/webshop.md)."""

from collections.abc import Sequence

import msgspec
from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from actors.environments.webshop.goals import Goal
from actors.environments.webshop.products import PATH_SEPARATOR, Product

COLOURS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown burgundy camel camo caramel champagne charcoal cheetah
chestnut chocolate christmas coffee cognac copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite grape
graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light lilac lime magenta maroon mauve merlot midnight mint
mocha multicolor mushroom mustard natural navy nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut wheat white wine yellow
""".split()  # noqa: SIM905 one word per line would hide the file
"""The 102 colour words of the released code, in its order."""
ALIKE = 85
"""Texts with a larger token set ratio count as equal."""
DIFFERENT_TYPE, BARELY_ALIKE = 0.5, 0.1


class Reward(msgspec.Struct, frozen=True):
    """The reward ``value`` of a purchase and its parts: the factor ``type``, the shares ``attributes`` and ``options``, and ``price`` (1 or 0).

    options: None for a goal without options.
    """

    value: float
    type: float
    attributes: float
    options: float | None
    price: float


def reward(product: Product, chosen: Sequence[str], goal: Goal) -> Reward:
    """Return the reward for buying ``product`` with the option values ``chosen``."""
    factor = type_factor(product, goal)
    attributes = sum(_has(product, attribute) for attribute in goal.attributes)
    values = [colour_of(value) for value in chosen]
    options = sum(any(similarity(value, asked) > ALIKE for value in values) for asked in map(colour_of, goal.options))
    price = float(product.price <= goal.cap)
    value = factor * (attributes + options + price) / (len(goal.attributes) + len(goal.options) + 1)
    share = options / len(goal.options) if goal.options else None
    return Reward(value, factor, attributes / len(goal.attributes), share, price)


def type_factor(product: Product, goal: Goal) -> float:
    """Return 1, .5, .1 or 0: how far the product is of the goal's type by query, category and the nouns of the names."""
    wanted = goal.product
    shared = len(set(product.nouns) & set(wanted.nouns))
    title = shared / len(wanted.nouns) if wanted.nouns else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return BARELY_ALIKE
    same = product.query == wanted.query or len(_parts(product) & _parts(wanted)) >= 2 or title > 0.2
    return 1.0 if same else DIFFERENT_TYPE


def colour_of(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """Return the first colour word that ``option`` contains, else ``option``. A pair contains a word only if one of its members equals it."""
    return next((colour for colour in COLOURS if colour in option), option)


def similarity(one: str | tuple[str, str], other: str | tuple[str, str]) -> int:
    """Return the token set ratio, 0 to 100, as the library thefuzz computes it."""
    return round(token_set_ratio(_plain(one), _plain(other)))


def _plain(text: str | tuple[str, str]) -> str:
    return default_process(str(text).encode("ascii", "ignore").decode())


def _has(product: Product, attribute: str) -> bool:
    """Return whether the product has an attribute. The goal's attribute is not lowered in its texts, so one with capitals is not found there."""
    if any(similarity(own, attribute) > ALIKE for own in product.attributes):
        return True
    texts = (product.name, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def _parts(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split(PATH_SEPARATOR)}
