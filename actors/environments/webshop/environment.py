"""The embedded shop as an environment: an episode is one purchase, and each turn is a fresh prompt
that shows the page and the last turns."""

from typing import Literal

import msgspec

from coppice.actors.environments.base import Task
from coppice.actors.environments.webshop.episode import Outcome, Pages, Shopping, Think
from coppice.actors.environments.webshop.goals import Goal, make_goals
from coppice.actors.environments.webshop.goals import split as parted
from coppice.actors.environments.webshop.invented import catalogue
from coppice.actors.environments.webshop.pages import observation, pieces
from coppice.actors.environments.webshop.products import read_products
from coppice.actors.environments.webshop.reward import reward
from coppice.actors.environments.webshop.shop import BUY, SEARCH, Place, Shop
from coppice.common.numbers import Count, Natural
from coppice.wire.faults import DataFault


class State(msgspec.Struct, frozen=True):
    """An episode under way. goal: its index in the catalogue named by ``catalogue``. past: the last
    pages, each with the reply's action."""

    goal: int
    catalogue: str
    place: Place = Place()
    step: int = 0
    past: tuple[tuple[str, str], ...] = ()


class WebShop(Shopping):
    """The shop. Without options it sells 1,000 invented products. The other options are those of
    ``Shopping``.

    split: "products" (no product has training and held-out goals) or "released" (the first 500
    goals are held out). products, attributes, human: paths of files in the original layout.
    human_goals: take the goals that people wrote. pipeline: of spaCy, for products without nouns.
    """

    name = "webshop"

    def __init__(
        self,
        pages: Pages = "text",
        horizon: Count = 10,
        history: Natural = 2,
        split: Literal["products", "released"] = "products",
        products: str = "",
        attributes: str = "",
        human: str = "",
        human_goals: bool = False,
        pipeline: str = "en_core_web_sm",
        outcome: Outcome = "success",
        think: Think = "required",
    ):
        super().__init__(pages, horizon, history, outcome, think)
        paired = bool(products) == bool(attributes)
        if not paired or (human and not products) or human_goals != bool(human):
            raise ValueError(
                f"products = {products!r}, attributes = {attributes!r}, human = {human!r}, human_goals = {human_goals}: expected the first two"
                " together, and a file `human` exactly if human_goals is on"
            )
        goods = catalogue()
        if products:
            goods = read_products(products, attributes, human, pipeline)
        self.shop = Shop(goods)
        self.goals = make_goals(goods, human_goals)
        self.training, self.held_out = parted(self.goals, split)

    def initial(self, task: Task) -> State:
        return State(int(task.id.rpartition("-")[2]), self.shop.digest)

    def goal(self, state: State) -> Goal:
        """Return the goal of an episode. Raises DataFault for a state of another catalogue."""
        if state.catalogue != self.shop.digest or not 0 <= state.goal < len(self.goals):
            raise DataFault(
                f"webshop: the state belongs to goal {state.goal} of catalogue {state.catalogue!r}, and this shop has {len(self.goals)} goals of"
                f" {self.shop.digest!r}; give the same products, attributes, human and human_goals"
            )
        return self.goals[state.goal]

    def instruction(self, state: State) -> str:
        return self.goal(state).instruction

    def page(self, state: State) -> str:
        return observation(pieces(self.shop, state.place, self.instruction(state)), self.rich)

    def clickables(self, state: State) -> list[str]:
        return list(self.shop.clickables(state.place))

    def replies(self, state: State) -> list[str]:
        """Return a search for the whole instruction, where the page offers a search, and a click on
        every other name."""
        names = self.clickables(state)
        commands = [f"search[{self.instruction(state)}]"] if SEARCH in names else []
        commands += [f"click[{name}]" for name in names if name != SEARCH]
        return [f"<think>any</think><action>{command}</action>" for command in commands]

    def anchor(self, state: State) -> str:
        """Return the page with the chosen options, which the rendering "text" does not show."""
        return "\n".join([self.page(state), *map(" = ".join, sorted(state.place.options))])

    async def go(self, state: State, query: str, name: str) -> tuple[State, float | None]:
        if name == BUY:
            product = self.shop.products[state.place.asin]
            return state, reward(product, state.place.chosen, self.goal(state))
        shop, place = self.shop, state.place
        place = shop.searched(place, query) if query else shop.clicked(place, name)
        return msgspec.structs.replace(state, place=place), None
