"""The WebShop oracle: it judges whether an action brings a perfect purchase nearer
(docs/webshop.md), by the smallest number of actions that buy the goal's own product."""

from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.webshop.environment import WebShop, WebShopState
from coppice.actors.environments.webshop.goals import Goal
from coppice.actors.environments.webshop.reward import reward
from coppice.actors.environments.webshop.store import BUY, PER_PAGE, SUB_PAGES, Store, StorePlace
from coppice.judges.base import Oracle
from coppice.wire.messages import JudgedTurn, Judgement


class WebShopOracle(Oracle):
    """Scores an action by the distance to a perfect purchase. options: those of the environment, if
    it does not sell the invented products.

    Column "reward": 1 for an action that lessens the distance and for a perfect purchase, -1 for an
    action that does nothing because it cannot be read or clicked, else 0. Column "distance": the
    actions that were needed before it. Raises DataFault for a turn of another environment or
    catalogue.
    """

    name = "webshop"
    environments = ("webshop",)
    columns = ("reward", "distance")

    def __init__(self, options: dict[str, Any] | None = None):
        environment: Any = registry.load("webshop", options or {})
        self.environment: WebShop = environment

    def judge_state(self, turn: JudgedTurn) -> Judgement:
        state = msgspec.convert(turn.state, WebShopState)
        goal, store, place = self.environment.goal(state), self.environment.store, state.place
        before, names = distance(store, place, goal), list(store.clickables(place))
        move = turn.move[0] if turn.move else -1
        name = names[move] if 0 <= move < len(names) else ""
        value, why = 0.0, "no nearer to the purchase"
        if not turn.query and not name:
            value, why = -1.0, "no action that can be taken"
        elif not turn.query and name == BUY:
            perfect = reward(store.products[place.asin], place.chosen, goal) == 1
            wrong = "not the product and options of the goal"
            value, why = (1.0, "a perfect purchase") if perfect else (0.0, wrong)
        else:
            query = turn.query
            after = store.searched(place, query) if query else store.clicked(place, name)
            if distance(store, after, goal) < before:
                value, why = 1.0, "nearer to the purchase"
        scores = {"reward": value, "distance": float(before)}
        return Judgement(scores, explanation=f"{why}; {before} actions were needed")


def distance(store: Store, place: StorePlace, goal: Goal) -> int:
    """Return the smallest number of actions from ``place`` to the purchase of the goal's own
    product with its options."""
    asin, options = goal.product.asin, goal.product.options
    # The values of a human goal belong to the groups that offer them; others cannot be chosen.
    groups = {value: group for group, values in options.items() for value in values}
    wanted = {groups[value]: value for value in goal.values if value in groups}
    purchase = len(wanted) + 1
    name = goal.product.name.lower()
    routes = [1 + _pages(store, name, asin, 1) + purchase]
    on_item = place.page == "item" or place.page in SUB_PAGES
    if on_item and place.asin == asin:
        left = sum(dict(place.options).get(group) != value for group, value in wanted.items())
        routes.append((place.page in SUB_PAGES) + left + 1)
    if place.page != "search":
        back = (place.page == "item") + 2 * (place.page in SUB_PAGES)
        routes.append(back + _pages(store, place.query, asin, place.number) + purchase)
    return min(routes)


def _pages(store: Store, query: str, asin: str, number: int) -> int:
    """Return the clicks from page ``number`` of a query's results to the product's page, a large
    number if it is not among them."""
    results = store.results(query)
    return abs(results.index(asin) // PER_PAGE + 1 - number) + 1 if asin in results else 1000
