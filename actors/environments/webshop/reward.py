"""The reward of a purchase, exactly as in WebShop's released code: type, attributes, options and
price (docs/webshop.md)."""

from collections.abc import Sequence

from rapidfuzz.fuzz import token_set_ratio
from rapidfuzz.utils import default_process

from coppice.actors.environments.webshop.goals import Goal
from coppice.actors.environments.webshop.products import PATH_SEPARATOR, Product

COLOURS = """
alabaster apricot aqua ash asphalt azure banana beige black blue blush bordeaux bronze brown
burgundy camel camo caramel champagne charcoal cheetah chestnut chocolate christmas coffee cognac
copper coral cranberry cream crystal dark denim eggplant elephant espresso fuchsia gold granite
grape graphite grass gray green grey heather indigo ivory ivy khaki lavender lemon leopard light
lilac lime magenta maroon mauve merlot midnight mint mocha multicolor mushroom mustard natural navy
nude olive orange peach pewter pink plum purple rainbow red rose royal rust sand sapphire seashell
silver skull slate steel stone stonewash sunflower tan taupe teal tiger turquoise violet walnut
wheat white wine yellow
""".split()
"""The 102 colour words of the released code, in its order."""
ALIKE = 85
"""Texts with a larger token set ratio count as equal."""
DIFFERENT_TYPE, BARELY_ALIKE = 0.5, 0.1


def reward(product: Product, chosen: Sequence[str], goal: Goal) -> float:
    """Return the reward, 0 to 1, for buying ``product`` with the option values ``chosen``."""
    attributes = sum(_has(product, attribute) for attribute in goal.attributes)
    values = [colour_of(value) for value in chosen]
    wishes = map(colour_of, goal.options)
    options = sum(any(similarity(value, wish) > ALIKE for value in values) for wish in wishes)
    right = attributes + options + (product.price <= goal.cap)
    return type_factor(product, goal) * right / (len(goal.attributes) + len(goal.options) + 1)


def type_factor(product: Product, goal: Goal) -> float:
    """Return 1, .5, .1 or 0: how far the product is of the goal's type by query, category and the
    nouns of the names."""
    wanted = goal.product
    shared = len(set(product.nouns) & set(wanted.nouns))
    title = shared / len(wanted.nouns) if wanted.nouns else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return BARELY_ALIKE
    same = product.query == wanted.query or len(_parts(product) & _parts(wanted)) >= 2
    return 1.0 if same or title > 0.2 else DIFFERENT_TYPE


def colour_of(option: str | tuple[str, str]) -> str | tuple[str, str]:
    """Return the first colour word that ``option`` contains, else ``option``. A pair contains a
    word only if one of its members equals it."""
    return next((colour for colour in COLOURS if colour in option), option)


def similarity(one: str | tuple[str, str], other: str | tuple[str, str]) -> int:
    """Return the token set ratio, 0 to 100, as the library thefuzz computes it."""
    return round(token_set_ratio(_plain(one), _plain(other)))


def _plain(text: str | tuple[str, str]) -> str:
    return default_process(str(text).encode("ascii", "ignore").decode())


def _has(product: Product, attribute: str) -> bool:
    """Return whether the product has an attribute. The goal's attribute is not lowered in its
    texts, so one with capitals is not found there."""
    if any(similarity(own, attribute) > ALIKE for own in product.attributes):
        return True
    texts = (product.name, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def _parts(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split(PATH_SEPARATOR)}
