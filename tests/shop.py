"""The shop for whole runs with an untrained policy: data.environment = "tests.shop:AnyText"."""

import zlib

from coppice.actors.environments.base import Action
from coppice.actors.environments.webshop.environment import WebShop, WebShopState


class AnyText(WebShop):
    """A shop in which every text is an action: its checksum picks one of the page's, and most often
    one towards the goal's own product."""

    def read(self, state: WebShopState, text: str) -> Action:
        goal, checksum = self.goal(state), zlib.crc32(text.encode())
        names = list(self.store.clickables(state.place))
        if state.place.page == "search":
            return Action("search", text, goal.product.name.lower())
        right = (goal.product.asin.lower(), *goal.values, "buy now")
        towards = [name for name in names if name in right]
        offered = towards if towards and checksum % 4 else names
        pick = offered[checksum // 4 % len(offered)]
        return Action("click", text, move=(names.index(pick),))
