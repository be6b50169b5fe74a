"""The WebShop oracle: it judges whether an action brings a perfect purchase nearer
(docs/webshop.md).

The distance of a place is the smallest number of actions that buy the goal's own product with its
options from there: a search for the product's name if need be, clicks to its results page and on
its code, one click for each option not yet chosen, and the purchase.
"""

from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.webshop.environment import State, WebShop
from coppice.actors.environments.webshop.goals import Goal
from coppice.actors.environments.webshop.reward import reward
from coppice.actors.environments.webshop.shop import BUY, PER_PAGE, SUB_PAGES, Place, Shop
from coppice.judges.base import Oracle
from coppice.wire.messages import JudgedTurn, Judgement


class WebShopOracle(Oracle):
    """Scores an action by the distance to a perfect purchase. options: those of the environment, if
    it does not sell the invented products.

    Column "reward": 1 for an action that lessens the distance and for a perfect purchase, -1 for an
    action that does nothing because it cannot be read or clicked, else 0. Column "distance": the
    actions that were needed before it. Raises DataFault for a turn of another environment or
    catalogue, and for a server's shop, whose products are not known.
    """

    name = "webshop"
    environments = ("webshop",)
    columns = ("reward", "distance")

    def __init__(self, options: dict[str, Any] | None = None):
        self.environment: WebShop = registry.load("webshop", options or {})  # pyright: ignore[reportAttributeAccessIssue]

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        state = msgspec.convert(turn.state, State)
        goal, shop = self.environment.goal(state), self.environment.shop
        before = distance(shop, state.place, goal)
        value, why = self._value(turn, state.place, goal, before)
        return Judgement(
            {"reward": value, "distance": float(before)},
            explanation=f"{why}; {before} actions were needed",
        )

    def _value(self, turn: JudgedTurn, place: Place, goal: Goal, before: int) -> tuple[float, str]:
        shop, clickables = self.environment.shop, list(self.environment.shop.clickables(place))
        if turn.query:
            after = shop.searched(place, turn.query)
        elif turn.move and 0 <= turn.move[0] < len(clickables):
            name = clickables[turn.move[0]]
            if name == BUY:
                if reward(shop.products[place.asin], place.chosen, goal) == 1:
                    return 1.0, "a perfect purchase"
                return 0.0, "not the product and options of the goal"
            after = shop.clicked(place, name)
        else:
            return -1.0, "no action that can be taken"
        nearer = distance(shop, after, goal) < before
        return float(nearer), "nearer to the purchase" if nearer else "no nearer to the purchase"


def distance(shop: Shop, place: Place, goal: Goal) -> int:
    """Return the smallest number of actions from ``place`` to the purchase of the goal's own
    product with its options."""
    asin, wanted = goal.product.asin, _wanted(goal)
    purchase = len(wanted) + 1
    name = goal.product.name.lower()
    routes = [1 + _pages(shop, name, asin, 1) + purchase]
    on_item = place.page == "item" or place.page in SUB_PAGES
    if on_item and place.asin == asin:
        left = sum(dict(place.options).get(group) != value for group, value in wanted.items())
        routes.append((place.page in SUB_PAGES) + left + 1)
    if place.page != "search":
        back = (place.page == "item") + 2 * (place.page in SUB_PAGES)
        routes.append(back + _pages(shop, place.query, asin, place.number) + purchase)
    return min(routes)


def _pages(shop: Shop, query: str, asin: str, number: int) -> int:
    """Return the clicks from page ``number`` of a query's results to the product's page, a large
    number if it is not among them."""
    results = shop.search.results(query)
    return abs(results.index(asin) // PER_PAGE + 1 - number) + 1 if asin in results else 1000


def _wanted(goal: Goal) -> dict[str, str]:
    """Return the option values to choose by group. The values of a human goal belong to the groups
    that offer them; others cannot be chosen."""
    clickable = {value: group for group, values in goal.product.options.items() for value in values}
    return {clickable[value]: value for value in goal.values if value in clickable}
