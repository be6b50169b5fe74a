"""The pages of the shop as text, in the two renderings "text" and "text_rich" of WebShop."""

from collections.abc import Sequence

import msgspec

from coppice.actors.environments.webshop.products import Product
from coppice.actors.environments.webshop.shop import SUB_PAGES, Place, Shop

SEPARATOR = " [SEP] "
RATING = "Rating: N.A."


class Piece(msgspec.Struct, frozen=True):
    """One visible string of a page. kind: "text", "button", "link" (a product) or "option".
    clicked: a chosen option or a visited product."""

    text: str
    kind: str = "text"
    clicked: bool = False


def pieces(shop: Shop, place: Place, instruction: str) -> list[Piece]:
    """Return the strings of a page from top to bottom. Empty strings are left out."""
    task = [Piece("Instruction:"), Piece(instruction)]
    if place.page == "search":
        shown = [Piece("WebShop"), *task, Piece("Search", "button")]
    elif place.page == "results":
        shown = [*task, BACK, *_results(shop, place)]
    else:
        product = shop.products[place.asin]
        content = _sub_page(product, place) if place.page in SUB_PAGES else _item(product, place)
        shown = [*task, BACK, PREVIOUS, *content]
    return [piece for piece in shown if piece.text.strip()]


def page_text(shown: Sequence[Piece], rich: bool) -> str:
    """Return a page as WebShop's modes "text" (strings with separators) or "text_rich" (one string
    per line, with marks of what is clickable)."""
    if not rich:
        return SEPARATOR.join(piece.text.strip() for piece in shown)
    chosen = [piece.text.strip() for piece in shown if piece.kind == "option" and piece.clicked]
    lines = [f"You have clicked {value}." for value in reversed(chosen)]
    return "\n".join([*lines, *map(_rich, shown)])


def observation(shown: Sequence[Piece], rich: bool) -> str:
    """Return what follows the instruction on a page, as the prompts of the released agents show it:
    in "text", each string in single quotes."""
    task = next(at for at, piece in enumerate(shown) if piece.text == "Instruction:")
    rest = shown[task + 2 :]
    if rich:
        return page_text(rest, True)
    return SEPARATOR.join(f"'{piece.text.strip()}'" for piece in rest)


def _rich(piece: Piece) -> str:
    mark, text = ("clicked button" if piece.clicked else "button"), piece.text.strip()
    before = {"link": "\n", "option": "  "}.get(piece.kind, "")
    return text if piece.kind == "text" else f"{before}[{mark}] {text} [{mark}_]"


BACK, PREVIOUS = Piece("Back to Search", "button"), Piece("< Prev", "button")


def _results(shop: Shop, place: Place) -> list[Piece]:
    total = len(shop.search.results(place.query))
    shown = [Piece(f"Page {place.number} (Total results: {total})")]
    shown += [PREVIOUS] if place.number > 1 else []
    shown += [Piece("Next >", "button")]
    for asin in shop.listed(place):
        product = shop.products[asin]
        link = Piece(asin, "link", asin in place.visited)
        shown += [link, Piece(product.name), Piece(product.tag)]
    return shown


def _item(product: Product, place: Place) -> list[Piece]:
    shown: list[Piece] = []
    for name, values in product.options.items():
        options = [Piece(value, "option", value in place.chosen) for value in values]
        shown += [Piece(name), *options]
    shown += [Piece(product.name), Piece(f"Price: {product.tag}"), Piece(RATING)]
    buttons = ("Description", "Features", "Reviews", "Buy Now")
    return shown + [Piece(name, "button") for name in buttons]


def _sub_page(product: Product, place: Place) -> list[Piece]:
    """Return the content of a sub-page. There are no reviews."""
    texts = {"description": (product.description,), "features": product.bullets}
    return [Piece(text) for text in texts.get(place.page, ())]
