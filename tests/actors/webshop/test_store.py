"""The embedded shop: pages in both renderings, what can be clicked, and where it leads."""

from typing import Any

from coppice.actors.environments.webshop.products import product_of
from coppice.actors.environments.webshop.store import Store, StorePlace, observation, pieces

GROUPS: dict[str, Any] = {
    "Color": [{"value": " Red "}, {"value": "Blue/Grey"}],
    "Size": [{"value": "one"}, {"value": "red"}],
    "Fit": None,
}


def mug(number: int, **fields: Any) -> dict[str, Any]:
    row = {"asin": f"B{number}", "name": f"Oak Mug {number}", "nouns": ["oak", "mug"]}
    row |= {"query": " Mugs ", "category": "kitchen", "product_category": "Kitchen \u203a Mugs"}
    row |= {"full_description": f"A mug numbered {number}.", "customization_options": GROUPS}
    row |= {"pricing": "$12.50" if number else "$10 - $20"}
    return row | {"small_description": ["Holds tea", "Made of clay"]} | fields


STORE = Store([product_of(mug(number), {}) for number in range(25)])
RESULTS = STORE.searched(StorePlace(), "mug")
ITEM = STORE.clicked(RESULTS, "b0")
BACK = "'Back to Search' [SEP] '< Prev'"


def text(place: StorePlace, rich: bool = False) -> str:
    return observation(pieces(STORE, place), rich)


def test_the_pages_in_text_are_those_of_the_released_templates() -> None:
    assert text(StorePlace()) == "'Search'"
    parts = text(STORE.clicked(RESULTS, "next >")).split(" [SEP] ")
    assert parts[1:4] == ["'Page 2 (Total results: 25)'", "'< Prev'", "'Next >'"]
    assert parts[4:7] == ["'B10'", "'Oak Mug 10'", "'$12.5'"] and len(parts) == 4 + 3 * 10
    assert text(ITEM) == (
        f"{BACK} [SEP] 'color' [SEP] 'red' [SEP] 'blue | grey' [SEP] 'size' [SEP] 'one'"
        " [SEP] 'red' [SEP] 'Oak Mug 0' [SEP] 'Price: $10.0 to $20.0' [SEP] 'Rating: N.A.'"
        " [SEP] 'Description' [SEP] 'Features' [SEP] 'Reviews' [SEP] 'Buy Now'"
    )
    features = f"{BACK} [SEP] 'Holds tea' [SEP] 'Made of clay'"
    assert text(STORE.clicked(ITEM, "features")) == features
    assert text(STORE.clicked(ITEM, "reviews")) == BACK


def test_the_rich_pages_mark_what_is_clickable_and_what_was_clicked() -> None:
    chosen = STORE.clicked(ITEM, "one")
    whole, sizes = text(chosen, rich=True), "size\n  [clicked button] one [clicked button_]\n"
    assert whole.startswith("You have clicked one.\n[button] Back to Search [button_]\n")
    assert sizes + "  [button] red [button_]\nOak Mug 0\n" in whole
    back = text(STORE.clicked(chosen, "< prev"), rich=True)
    assert "[clicked button] B0 [clicked button_]" in back and "[button] B1 [button_]" in back


def test_a_choice_replaces_the_earlier_one_of_its_group_and_survives_sub_pages() -> None:
    # of two groups with equal values the last is chosen
    assert STORE.clicked(ITEM, "red").options == (("size", "red"),)
    chosen = STORE.clicked(STORE.clicked(STORE.clicked(ITEM, "one"), "blue | grey"), "red")
    assert dict(chosen.options) == {"size": "red", "color": "blue | grey"}
    assert STORE.clicked(STORE.clicked(chosen, "description"), "< prev") == chosen


def test_leaving_an_item_forgets_its_options_but_not_the_query() -> None:
    place = STORE.clicked(STORE.clicked(STORE.clicked(RESULTS, "next >"), "b11"), "one")
    assert STORE.clicked(place, "< prev") == StorePlace("results", "mug", 2, visited=("B11",))
    assert STORE.searched(place, "clay") == StorePlace("results", "clay", visited=("B11",))
    assert STORE.clicked(place, "back to search") == StorePlace()


def test_at_most_fifty_results_in_the_order_of_the_products_that_share_a_word() -> None:
    many = Store([product_of(mug(number, asin=f"C{number}"), {}) for number in range(75)])
    assert len(many.results("mug")) == 50
    assert STORE.results("bicycle") == STORE.results("the") == ()
    assert STORE.results("numbered 7")[0] == "B7"
    assert STORE.results("mugs")[:4] == ("B0", "B1", "B2", "B3")
