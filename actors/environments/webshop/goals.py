"""Goals: what an episode asks for. They are made from products in the two ways of WebShop,
synthetic and human."""

import itertools
import random
from collections.abc import Sequence

import msgspec

from coppice.actors.environments.webshop.products import Product

NO_CAP = 1_000_000.0
CAPS = [10.0 * tens for tens in range(1, 100)]
NEAREST_CAPS = 4
"""A price cap is one of this many multiples of ten above the price."""
SHUFFLE_SEED = 233
"""The released code's seed for the order of the goals."""
RELEASED_HELD_OUT = 500
HELD_OUT_PRODUCTS = 0.2
"""The share of products whose goals are held out by the split "products"."""


class Goal(msgspec.Struct, frozen=True):
    """What to buy. cap: the highest price, in dollars. options: (group, value) pairs, or values
    alone in a human goal.

    product: the goal's own product, from which name, query and category are taken.
    """

    product: Product
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[tuple[str, str], ...] | tuple[str, ...]
    cap: float

    @property
    def wish(self) -> tuple[str, frozenset[str], object]:
        """The kind of product, its attributes and its options, whatever the price."""
        return self.product.query, frozenset(self.attributes), self.options

    @property
    def values(self) -> list[str]:
        return [option if isinstance(option, str) else option[1] for option in self.options]


def make_goals(products: Sequence[Product], human: bool) -> list[Goal]:
    """Return the goals of all products in shuffled order, which every process has alike."""
    of = _human if human else _synthetic
    goals = [goal for product in products for goal in of(product)]
    random.Random(SHUFFLE_SEED).shuffle(goals)
    return goals


def _synthetic(product: Product) -> list[Goal]:
    """Return one goal for each combination of option values. They share one price cap."""
    if not product.instruction:
        return []
    if not product.instruction_attributes:
        raise ValueError(
            f"product {product.asin}: an instruction without instruction_attributes; expected at"
            " least one, since the reward divides by their number"
        )
    cap, text = draw_cap(product.price, f"cap/{product.asin}")
    names = sorted(product.options)
    goals = []
    for values in itertools.product(*(product.options[name] for name in names)):
        options = tuple(zip(names, values, strict=True))
        wish = ", and ".join(f"{name}: {value}" for name, value in options)
        instruction = f"{product.instruction}{f' with {wish}' if wish else ''}{text}"
        goals.append(Goal(product, instruction, product.instruction_attributes, options, cap))
    return goals


def _human(product: Product) -> list[Goal]:
    """Return the goals that people wrote. An instruction without attributes makes none."""
    goals = []
    for number, written in enumerate(product.human):
        if written.attributes:
            cap, text = draw_cap(product.price, f"cap/{product.asin}/{number}")
            instruction = written.instruction.strip(".") + text
            goals.append(Goal(product, instruction, written.attributes, written.options, cap))
    return goals


def draw_cap(price: float, seed: str) -> tuple[float, str]:
    """Return the price cap and its text: the larger of two different multiples of ten among the
    four next above the price.

    seed: decides the draw, so that every process sees the same cap. The released code draws without
    a seed.
    """
    above = [cap for cap in CAPS if cap > price][:NEAREST_CAPS]
    if len(above) < 2:
        return NO_CAP, ""
    cap = max(random.Random(seed).sample(above, 2))
    return cap, f", and price lower than {cap:.2f} dollars"


def split(goals: Sequence[Goal], how: str) -> tuple[list[int], list[int]]:
    """Return the indices of the training goals and of the held-out goals.

    how: "products" holds out every goal of a fifth of the products, and trains on no goal with the
    ``wish`` of a held-out one; "released" holds out the first 500 goals, so that products are
    shared. Raises ValueError if a part is empty.
    """
    unseen: set[object] = set()
    if how == "products":
        asins = sorted({goal.product.asin for goal in goals})
        random.Random(SHUFFLE_SEED).shuffle(asins)
        kept = set(asins[: max(1, round(HELD_OUT_PRODUCTS * len(asins)))])
        held_out = [index for index, goal in enumerate(goals) if goal.product.asin in kept]
        unseen = {goals[index].wish for index in held_out}
    else:
        held_out = list(range(len(goals)))[:RELEASED_HELD_OUT]
    others = sorted(set(range(len(goals))).difference(held_out))
    training = [index for index in others if goals[index].wish not in unseen]
    if not training or not held_out:
        raise ValueError(
            f"split = {how!r}: {len(goals)} goals leave {len(training)} for training and"
            f" {len(held_out)} held out; expected more products or goals"
        )
    return training, held_out
