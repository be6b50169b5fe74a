"""The rules of the shop: where a click or a search leads. Search is BM25 over the products' texts,
with the settings of WebShop's Lucene index. Places are values, so any place can be
left in several ways."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import bm25s
import msgspec
import numpy as np
import Stemmer

from coppice.actors.environments.webshop.products import Product

PER_PAGE = 10
SEARCH, BACK, NEXT, PREVIOUS, BUY = "search", "back to search", "next >", "< prev", "buy now"
SUB_PAGES = ("description", "features", "reviews")
MOST_RESULTS = 50
K1, B = 0.9, 0.4
REMEMBERED = 10_000
"""How many queries keep their results: every page that a query leads to asks for them again."""


class Place(msgspec.Struct, frozen=True):
    """Where a customer is. page: "search", "results", "item" or a sub-page of the item.

    number: of the results page, from 1. asin: the product of the item's page and of its sub-pages.
    options: chosen values by group. visited: the products seen since the last return to the search
    page.
    """

    page: str = SEARCH
    query: str = ""
    number: int = 1
    asin: str = ""
    options: tuple[tuple[str, str], ...] = ()
    visited: tuple[str, ...] = ()

    @property
    def chosen(self) -> list[str]:
        """The chosen option values."""
        return [value for _, value in self.options]


class Search:
    """An index of products. The order of equal scores is that of the products, so results are the
    same in every process."""

    def __init__(self, products: Sequence[Product]):
        self.asins = [product.asin for product in products]
        self._stemmer = Stemmer.Stemmer("porter")
        self._index = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._index.index(
            self._tokens([_text(product) for product in products]), show_progress=False
        )
        self.results = lru_cache(REMEMBERED)(self._results)

    def _results(self, query: str) -> tuple[str, ...]:
        """Return the asins of at most 50 products that share a word with the query, best first."""
        (words,) = self._tokens([query])
        if not words:
            return ()
        scores = self._index.get_scores(words)
        best = np.lexsort((np.arange(len(scores)), -scores))[:MOST_RESULTS]
        return tuple(self.asins[place] for place in best if scores[place] > 0)

    def _tokens(self, texts: list[str]) -> Any:
        return bm25s.tokenize(
            [text.lower().replace("'s", "") for text in texts],
            token_pattern=r"(?u)\b\w+\b",
            stopwords="english",
            stemmer=self._stemmer,
            return_ids=False,
            show_progress=False,
        )


def _text(product: Product) -> str:
    options = ", and ".join(
        f"{name}: {', '.join(values)}" for name, values in product.options.items()
    )
    return " ".join([product.name, product.description, *product.bullets[:1], options])


class Shop:
    """Products and their search. ``products`` is read by asin; ``digest`` names the catalogue."""

    def __init__(self, products: Sequence[Product]):
        self.products = {product.asin: product for product in products}
        self.search = Search(products)
        self.digest = hashlib.sha256(msgspec.msgpack.encode(list(products))).hexdigest()[:12]

    def listed(self, place: Place) -> tuple[str, ...]:
        """Return the asins that a results page shows."""
        first = (place.number - 1) * PER_PAGE
        return self.search.results(place.query)[first : first + PER_PAGE]

    def clickables(self, place: Place) -> dict[str, str]:
        """Return what can be clicked, in lower case and in order, with its kind: "button", "link",
        or "option:GROUP".

        Two options with equal values are one clickable, which belongs to the last of their groups
        (as in the released code).
        """
        if place.page == SEARCH:
            return {SEARCH: "button"}
        if place.page == "results":
            buttons = [BACK, *([PREVIOUS] if place.number > 1 else []), NEXT]
            return dict.fromkeys(buttons, "button") | {
                asin.lower(): "link" for asin in self.listed(place)
            }
        if place.page in SUB_PAGES:
            return dict.fromkeys((BACK, PREVIOUS), "button")
        shown: dict[str, str] = dict.fromkeys((BACK, PREVIOUS, *SUB_PAGES, BUY), "button")
        for name, values in self.products[place.asin].options.items():
            shown |= dict.fromkeys(values, f"option:{name}")
        return shown

    def searched(self, place: Place, query: str) -> Place:
        """Return the first page of a query's results. Product and options are forgotten."""
        return Place("results", query, visited=place.visited)

    def clicked(self, place: Place, name: str) -> Place:
        """Return where a click on one of ``clickables`` leads. "search" and "buy now" lead nowhere:
        a purchase ends the episode."""
        kind = self.clickables(place)[name]
        if kind == "link":
            asin = next(asin for asin in self.listed(place) if asin.lower() == name)
            seen = place.visited if asin in place.visited else (*place.visited, asin)
            return msgspec.structs.replace(place, page="item", asin=asin, visited=seen)
        if kind.startswith("option:"):
            options = dict(place.options) | {kind.removeprefix("option:"): name}
            return msgspec.structs.replace(place, options=tuple(options.items()))
        if name in (NEXT, PREVIOUS) and place.page == "results":
            return msgspec.structs.replace(place, number=place.number + (1 if name == NEXT else -1))
        if name == PREVIOUS:
            if place.page == "item":
                return Place("results", place.query, place.number, visited=place.visited)
            return msgspec.structs.replace(place, page="item")
        if name in SUB_PAGES:
            return msgspec.structs.replace(place, page=name)
        return Place() if name == BACK else place
