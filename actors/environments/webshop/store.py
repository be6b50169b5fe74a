"""The rules of the embedded shop: where a click or a search leads, and its pages as text, in the
renderings "text" and "text_rich" of WebShop. Search is BM25 over the products' texts, with the
settings of WebShop's Lucene index. Places are values, so any place can be left in several ways."""

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


class StorePlace(msgspec.Struct, frozen=True):
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
        return [value for _, value in self.options]


class Store:
    """Products and their search. ``products`` is read by asin; ``digest`` names the catalogue;
    ``results`` gives the asins of at most 50 products that share a word with a query, best first.

    The order of equal scores is that of the products, so results are the same in every process.
    """

    def __init__(self, products: Sequence[Product]):
        self.products = {product.asin: product for product in products}
        self.digest = hashlib.sha256(msgspec.msgpack.encode(list(products))).hexdigest()[:12]
        self._stemmer = Stemmer.Stemmer("porter")
        self._index = bm25s.BM25(method="lucene", k1=K1, b=B)
        self._index.index(self._tokens(list(map(_text, products))), show_progress=False)
        self.results = lru_cache(REMEMBERED)(self._results)

    def _results(self, query: str) -> tuple[str, ...]:
        (words,) = self._tokens([query])
        if not words:
            return ()
        scores, asins = self._index.get_scores(words), list(self.products)
        best = np.lexsort((np.arange(len(scores)), -scores))[:MOST_RESULTS]
        return tuple(asins[place] for place in best if scores[place] > 0)

    def _tokens(self, texts: list[str]) -> Any:
        return bm25s.tokenize(
            [text.lower().replace("'s", "") for text in texts],
            token_pattern=r"(?u)\b\w+\b",
            stopwords="english",
            stemmer=self._stemmer,
            return_ids=False,
            show_progress=False,
        )

    def listed(self, place: StorePlace) -> tuple[str, ...]:
        """Return the asins that a results page shows."""
        first = (place.number - 1) * PER_PAGE
        return self.results(place.query)[first : first + PER_PAGE]

    def clickables(self, place: StorePlace) -> dict[str, str]:
        """Return what can be clicked, in lower case and in order, with its kind: "button", "link",
        or "option:GROUP".

        Two options with equal values are one clickable, which belongs to the last of their groups
        (as in the released code).
        """
        buttons, names = [BACK, PREVIOUS], dict[str, str]()
        if place.page == SEARCH:
            buttons = [SEARCH]
        elif place.page == "results":
            buttons = [BACK, *[PREVIOUS] * (place.number > 1), NEXT]
            names = {asin.lower(): "link" for asin in self.listed(place)}
        elif place.page == "item":
            buttons += [*SUB_PAGES, BUY]
            for name, values in self.products[place.asin].options.items():
                names |= dict.fromkeys(values, f"option:{name}")
        return dict.fromkeys(buttons, "button") | names

    def searched(self, place: StorePlace, query: str) -> StorePlace:
        """Return the first page of a query's results. Product and options are forgotten."""
        return StorePlace("results", query, visited=place.visited)

    def clicked(self, place: StorePlace, name: str) -> StorePlace:
        """Return where a click on one of ``clickables`` leads. "search" and "buy now" lead nowhere:
        a purchase ends the episode."""
        kind, replace = self.clickables(place)[name], msgspec.structs.replace
        if kind == "link":
            asin = next(asin for asin in self.listed(place) if asin.lower() == name)
            seen = place.visited if asin in place.visited else (*place.visited, asin)
            return replace(place, page="item", asin=asin, visited=seen)
        if kind.startswith("option:"):
            options = dict(place.options) | {kind.removeprefix("option:"): name}
            return replace(place, options=tuple(options.items()))
        if name in (NEXT, PREVIOUS) and place.page == "results":
            return replace(place, number=place.number + (1 if name == NEXT else -1))
        if name == PREVIOUS and place.page == "item":
            return replace(place, page="results", asin="", options=())
        if name in (PREVIOUS, *SUB_PAGES):
            return replace(place, page="item" if name == PREVIOUS else name)
        return StorePlace() if name == BACK else place


def _text(product: Product) -> str:
    options = (f"{name}: {', '.join(values)}" for name, values in product.options.items())
    texts = (product.name, product.description, *product.bullets[:1], ", and ".join(options))
    return " ".join(texts)


# --------------------------------------------------------------------------------------- pages


class Piece(msgspec.Struct, frozen=True):
    """One visible string of a page. kind: "text", "button", "link" (a product) or "option".
    clicked: a chosen option or a visited product."""

    text: str
    kind: str = "text"
    clicked: bool = False


def pieces(store: Store, place: StorePlace) -> list[Piece]:
    """Return the strings of a page below the instruction, from top to bottom."""
    if place.page == SEARCH:
        return [Piece("Search", "button")]
    back, previous = Piece("Back to Search", "button"), Piece("< Prev", "button")
    if place.page == "results":
        total = len(store.results(place.query))
        shown = [back, Piece(f"Page {place.number} (Total results: {total})")]
        shown += [previous] * (place.number > 1) + [Piece("Next >", "button")]
        for asin in store.listed(place):
            product = store.products[asin]
            link = Piece(asin, "link", asin in place.visited)
            shown += [link, Piece(product.name), Piece(product.tag)]
        return shown
    product, shown = store.products[place.asin], [back, previous]
    if place.page in SUB_PAGES:  # there are no reviews
        texts = {"description": (product.description,), "features": product.bullets}
        return shown + [Piece(text) for text in texts.get(place.page, ()) if text.strip()]
    for name, values in product.options.items():
        shown.append(Piece(name))
        shown += [Piece(value, "option", value in place.chosen) for value in values]
    shown += map(Piece, (product.name, f"Price: {product.tag}", "Rating: N.A."))
    buttons = ("Description", "Features", "Reviews", "Buy Now")
    return shown + [Piece(name, "button") for name in buttons]


def observation(shown: Sequence[Piece], rich: bool) -> str:
    """Return a page as the prompts of the released agents show it: in "text", each string in single
    quotes; in "text_rich", one string per line, with marks of what is clickable."""
    if not rich:
        return " [SEP] ".join(f"'{piece.text.strip()}'" for piece in shown)
    chosen = [piece.text.strip() for piece in shown if piece.kind == "option" and piece.clicked]
    lines = [f"You have clicked {value}." for value in reversed(chosen)]
    for piece in shown:
        mark, text = "clicked button" if piece.clicked else "button", piece.text.strip()
        start = {"link": "\n", "option": "  "}.get(piece.kind, "")
        lines.append(text if piece.kind == "text" else f"{start}[{mark}] {text} [{mark}_]")
    return "\n".join(lines)
