"""The shop: pages in both renderings, what can be clicked, and where it leads."""

import msgspec
import pytest

from coppice.actors.environments.webshop.pages import observation, page_text, pieces
from coppice.actors.environments.webshop.products import made
from coppice.actors.environments.webshop.shop import Place, Shop

ROWS = [
    {
        "asin": f"B{number}", "name": f"Oak Mug {number}", "query": " Mugs ", "category": "kitchen",
        "product_category": "Kitchen › Mugs", "full_description": f"A mug numbered {number}.",  # noqa: RUF001
        "small_description": ["Holds tea", "Made of clay"], "pricing": "$12.50" if number else "$10 - $20", "nouns": ["oak", "mug"],
        "customization_options": {"Color": [{"value": " Red "}, {"value": "Blue/Grey"}], "Size": [{"value": "one"}, {"value": "red"}], "Fit": None},
    }
    for number in range(25)
]  # fmt: skip
SHOP = Shop(made(ROWS, {}))
TASK = "Find me a mug"
RESULTS = SHOP.searched(Place(), "mug")
ITEM = SHOP.clicked(RESULTS, "b0")


def text(place: Place, rich: bool = False) -> str:
    return page_text(pieces(SHOP, place, TASK), rich)


def test_the_pages_in_text_are_those_of_the_released_templates() -> None:
    assert text(Place()) == "WebShop [SEP] Instruction: [SEP] Find me a mug [SEP] Search"
    parts = text(RESULTS).split(" [SEP] ")
    assert parts[:5] == [
        "Instruction:",
        TASK,
        "Back to Search",
        "Page 1 (Total results: 25)",
        "Next >",
    ]
    assert parts[5:11] == ["B0", "Oak Mug 0", "$10.0 to $20.0", "B1", "Oak Mug 1", "$12.5"]
    assert len(parts) == 5 + 3 * 10
    second = text(SHOP.clicked(RESULTS, "next >")).split(" [SEP] ")
    assert second[2:6] == ["Back to Search", "Page 2 (Total results: 25)", "< Prev", "Next >"]
    assert text(ITEM) == (
        "Instruction: [SEP] Find me a mug [SEP] Back to Search [SEP] < Prev [SEP] color [SEP] red [SEP] blue | grey [SEP] size [SEP] one [SEP] red"
        " [SEP] Oak Mug 0 [SEP] Price: $10.0 to $20.0 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now"
    )
    head = "Instruction: [SEP] Find me a mug [SEP] Back to Search [SEP] < Prev"
    assert text(SHOP.clicked(ITEM, "description")) == f"{head} [SEP] A mug numbered 0."
    assert text(SHOP.clicked(ITEM, "features")) == f"{head} [SEP] Holds tea [SEP] Made of clay"
    assert text(SHOP.clicked(ITEM, "reviews")) == head


def test_the_rich_pages_mark_what_is_clickable_and_what_was_clicked() -> None:
    chosen = SHOP.clicked(ITEM, "one")
    assert text(chosen, rich=True).splitlines() == [
        "You have clicked one.", "Instruction:", TASK, "[button] Back to Search [button_]", "[button] < Prev [button_]",
        "color", "  [button] red [button_]", "  [button] blue | grey [button_]",
        "size", "  [clicked button] one [clicked button_]", "  [button] red [button_]",
        "Oak Mug 0", "Price: $10.0 to $20.0", "Rating: N.A.", "[button] Description [button_]", "[button] Features [button_]",
        "[button] Reviews [button_]", "[button] Buy Now [button_]",
    ]  # fmt: skip
    both = text(SHOP.clicked(chosen, "blue | grey"), rich=True)
    assert both.startswith("You have clicked one.\nYou have clicked blue | grey.\nInstruction:\n")
    back = text(SHOP.clicked(chosen, "< prev"), rich=True)
    assert "\n\n[clicked button] B0 [clicked button_]\nOak Mug 0\n" in back
    assert "\n\n[button] B1 [button_]\n" in back


def test_an_observation_is_what_follows_the_instruction() -> None:
    assert observation(pieces(SHOP, Place(), TASK), rich=False) == "'Search'"
    assert (
        observation(pieces(SHOP, SHOP.clicked(ITEM, "reviews"), TASK), rich=False)
        == "'Back to Search' [SEP] '< Prev'"
    )


def test_what_can_be_clicked_is_listed_in_order() -> None:
    assert list(SHOP.clickables(Place())) == ["search"]
    asins = [f"b{number}" for number in range(10)]
    assert list(SHOP.clickables(RESULTS)) == ["back to search", "next >", *asins]
    assert list(SHOP.clickables(SHOP.clicked(RESULTS, "next >")))[:3] == [
        "back to search",
        "< prev",
        "next >",
    ]
    buttons = ["back to search", "< prev", "description", "features", "reviews", "buy now"]
    assert list(SHOP.clickables(ITEM)) == [*buttons, "red", "blue | grey", "one"]
    assert list(SHOP.clickables(SHOP.clicked(ITEM, "features"))) == ["back to search", "< prev"]


def test_equal_values_of_two_groups_choose_the_last_group() -> None:
    assert SHOP.clicked(ITEM, "red").options == (("size", "red"),)


def test_a_choice_replaces_the_earlier_one_of_its_group_and_survives_sub_pages() -> None:
    chosen = SHOP.clicked(SHOP.clicked(SHOP.clicked(ITEM, "one"), "blue | grey"), "red")
    assert dict(chosen.options) == {"size": "red", "color": "blue | grey"}
    assert SHOP.clicked(SHOP.clicked(chosen, "description"), "< prev") == chosen


def test_leaving_an_item_forgets_its_options_but_not_the_query() -> None:
    place = SHOP.clicked(SHOP.clicked(SHOP.clicked(RESULTS, "next >"), "b11"), "one")
    assert SHOP.clicked(place, "< prev") == Place("results", "mug", 2, visited=("B11",))
    assert SHOP.searched(place, "clay") == Place("results", "clay", visited=("B11",))
    assert SHOP.clicked(place, "back to search") == Place()


def test_pages_go_on_beyond_the_results() -> None:
    place = RESULTS
    for _ in range(5):
        place = SHOP.clicked(place, "next >")
    assert place.number == 6
    assert list(SHOP.clickables(place)) == ["back to search", "< prev", "next >"]
    assert "Page 6 (Total results: 25)" in text(place)


def test_at_most_fifty_results_without_those_that_share_no_word() -> None:
    many = Shop(
        made([{**row, "asin": f"{row['asin']}{more}"} for row in ROWS for more in "xyz"], {})
    )
    assert len(many.search.results("mug")) == 50
    assert SHOP.search.results("bicycle") == ()
    assert SHOP.search.results("the") == ()
    assert SHOP.search.results("numbered 7")[0] == "B7"


def test_equal_scores_keep_the_order_of_the_products() -> None:
    assert SHOP.search.results("mugs")[:4] == ("B0", "B1", "B2", "B3")


@pytest.mark.parametrize("command", ["<r> mug", "<q> mugs", "<c> kitchen", "<a> x mug"])
def test_the_released_back_doors_of_search_are_ordinary_words(command: str) -> None:
    assert set(SHOP.search.results(command)) <= set(SHOP.products)
    assert SHOP.searched(Place(), command).page == "results"


def test_another_catalogue_has_another_digest() -> None:
    other = Shop([msgspec.structs.replace(one, price=1.0) for one in SHOP.products.values()])
    assert other.digest != SHOP.digest
