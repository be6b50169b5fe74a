"""The WebShop environment: replies, prompts, steps, tasks, product files of the original layout,
and the pages of the shop."""

import json
from pathlib import Path
from typing import Any

import pytest

from coppice.actors.environments import registry
from coppice.actors.environments.base import SPLIT, Task, Transition
from coppice.actors.environments.webshop.environment import WebShop, read_reply
from coppice.actors.environments.webshop.products import product_of
from coppice.actors.environments.webshop.store import Store, StorePlace, observation, pieces
from coppice.scheduler.growth.tasks import GeneratedTasks
from coppice.tools.defaults.legal_play import FIRST_SEED
from tests import games

SHOP = WebShop()


def said(command: str) -> str:
    return f"<think> so </think><action>{command}</action>"


UNREADABLE = [said("search[]"), said("buy[red]"), "<action>click[red]</action>"]
UNREADABLE += ["<think>so</think>click[red]", "<think>\u597d</think><action>click[red]</action>"]


def play(environment: WebShop, task: Task, commands: list[str]) -> list[Transition]:
    return games.play(environment, environment.initial(task), *commands)


def perfect(environment: WebShop, task: Task) -> list[str]:
    goal = environment.goal(environment.initial(task))
    clicks = [goal.product.asin, *goal.values, "Buy Now"]
    return [f"search[{goal.product.name}]", *(f"click[{name}]" for name in clicks)]


def test_a_reply_is_read_as_documented() -> None:
    read: dict[str, tuple[Any, ...]] = {
        said("search[Red mug]"): ("search", "red mug", None),
        said(" click[RED] "): ("click", None, (3,)),
        said("click[< Prev]"): ("click", None, (1,)),
        said("click[blue]"): ("click", None, None),
        said("search[a]") + "<action>click[red]</action>": ("search", "a", None),
        "<THINK>so</THINK><ACTION>click[red]</ACTION>": ("click", None, (3,)),
        **dict.fromkeys(UNREADABLE, ("invalid", None, None)),
    }
    for text, expected in read.items():
        action = read_reply(text, ["back to search", "< prev", "buy now", "red"], "required")
        assert (action.kind, action.argument, action.move) == expected, text
        assert action.valid == (action.kind != "invalid")
    assert read_reply(said("click[search]"), ["search"], "required").move is None


@pytest.mark.parametrize(("outcome", "imperfect"), [("success", 0.0), ("score", 10 * 2 / 3)])
def test_a_purchase_ends_the_episode_with_its_outcome(outcome: Any, imperfect: float) -> None:
    environment = WebShop(outcome=outcome)
    tasks = [environment.task(seed) for seed in range(99)]
    goals = [environment.goal(environment.initial(task)) for task in tasks]
    asked = [(len(goal.attributes), len(goal.options)) for goal in goals]
    task = tasks[asked.index((3, 2))]
    commands = perfect(environment, task)
    *before, last = play(environment, task, commands)
    assert {(transition.done, transition.reward) for transition in before} == {(False, 0.0)}
    assert (last.done, last.outcome, last.reward) == (True, 10.0, 10.0)
    assert last.measures == {"success": 1.0, "score": 100.0}
    # no options: (3 + 0 + 1) / 6
    (*_, last) = play(environment, task, [*commands[:2], "click[buy now]"])
    assert last.measures == {"success": 0.0, "score": pytest.approx(100 * 2 / 3)}
    assert last.outcome == pytest.approx(imperfect)


def test_an_episode_without_a_purchase_ends_at_the_horizon_with_nothing() -> None:
    made = play(SHOP, SHOP.task(5), ["search[mug]", "click[x]", *["click[next >]"] * 8])
    assert [transition.done for transition in made] == [False] * 9 + [True]
    first, last = [transition.observation for transition in made if transition.observation]
    assert "does nothing here" in first and "used up without a purchase" in last
    assert (made[-1].outcome, made[-1].reward) == (0.0, 0.0)
    assert made[-1].measures == {"success": 0.0, "score": 0.0}


def test_the_task_stands_before_the_split_and_the_page_after_it() -> None:
    task = SHOP.task(5)
    *_, last = play(SHOP, task, ["search[lamp]", "<no block>", "click[next >]"])
    first = SHOP.prompt(task, SHOP.initial(task))[0]["content"].split(SPLIT)
    head, tail = SHOP.prompt(task, last.state)[0]["content"].split(SPLIT)
    assert head == first[0]
    instruction = SHOP.goal(last.state).instruction
    assert instruction in head
    assert instruction not in tail
    assert "Actions taken: 3\n[Observation 2: 'Back to Search' [SEP] 'Page 1" in tail
    assert ", Action 3: 'click[next >]']\nCurrent page: 'Back to Search' [SEP] 'Page 2" in tail


def test_equal_situations_have_equal_anchors_whatever_came_before() -> None:
    task = SHOP.task(9)
    search, product, *choices, _ = perfect(SHOP, task)
    direct = play(SHOP, task, [search, product])[-1].state
    detour = ["search[lamp]", search, "nonsense", product, "click[features]", "click[< prev]"]
    around = play(SHOP, task, detour)[-1].state
    assert direct != around
    assert SHOP.anchor(direct) == SHOP.anchor(around)
    chosen = play(SHOP, task, [search, product, choices[0]])[-1].state
    assert SHOP.anchor(chosen) != SHOP.anchor(direct)


@pytest.mark.parametrize("split", ["products", "released"])
def test_held_out_seeds_draw_held_out_goals_and_training_seeds_others(split: Any) -> None:
    environment = WebShop(split=split)
    tasks = GeneratedTasks(environment.task, 0)
    drawn = {environment.initial(tasks.at(position)).goal for position in range(3000)}
    held_out = {environment.initial(task).goal for task in tasks.held_out(128)}
    assert drawn <= set(environment.training) and held_out <= set(environment.held_out)
    assert len(held_out) == 128
    assert environment.initial(environment.task(FIRST_SEED)).goal in environment.training


def files(folder: Path) -> dict[str, Any]:
    """Write three products in the original layout. Return the environment's options."""
    colours = [{"value": "Red/Blue ", "image": None}, {"value": "green"}]
    same = {"query": "Mugs ", "category": "kitchen", "product_category": "Kitchen \u203a Mugs"}
    same |= {"full_description": None, "small_description": "Holds tea", "images": ["x"]}
    same |= {"customization_options": {"Color": colours}, "nouns": ["mug"]}
    made = {"Alder Mug": "", "Birch Mug": "$1,005.50", "Cedar Mug": "$10.00 - $20.00"}
    rows: list[dict[str, Any]] = [
        {"asin": f"B{number}", "name": name, "pricing": price, **same}
        for number, (name, price) in enumerate(made.items())
    ]
    rows += [{"asin": "nan"}, {"asin": "B0"}, {"asin": "eleven-long"}]
    wish = {"instruction": "Find me clay mugs", "instruction_attributes": ["clay"]}
    wish |= {"attributes": ["clay"]}
    other = wish | {"instruction_attributes": ["tea"]}  # a wish that the other side has not
    described = {"B0": wish, "B2": other, "B1": {"attributes": ["clay"]}}
    asks = {"instruction_attributes": ["clay"], "instruction_options": ["green"]}
    people = [{"instruction": "i want a clay mug..", **asks}]
    people += [{"instruction": "anything", **{key: [] for key in asks}}]
    human = {"B1": people, "B2": [people[0] | {"instruction_attributes": ["tea"]}]}
    contents = {"products": rows, "attributes": described, "human": human}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {name: str(folder / f"{name}.json") for name in ("products", "attributes")}


def test_products_of_the_original_layout_are_read_by_path(tmp_path: Path) -> None:
    environment = WebShop(**files(tmp_path))
    products = environment.store.products
    assert list(products) == ["B0", "B1", "B2"]
    assert products["B0"].options == {"color": ("red | blue", "green")}
    first, second, third = [product.price for product in products.values()]
    assert (first, second, products["B2"].tag) == (100.0, 1005.5, "$10.0 to $20.0")
    assert 10 <= third <= 20 and WebShop(**files(tmp_path)).store.products["B2"].price == third
    assert [goal.product.asin for goal in environment.goals].count("B0") == 2
    assert {goal.product.asin for goal in environment.goals} == {"B0", "B2"}
    assert len(environment.goals) == 4


def test_human_goals_ask_for_values_without_groups(tmp_path: Path) -> None:
    environment = WebShop(**files(tmp_path), human=str(tmp_path / "human.json"))
    assert sorted(goal.product.asin for goal in environment.goals) == ["B1", "B2"]
    goal = next(goal for goal in environment.goals if goal.product.asin == "B1")
    assert goal.options == ("green",)
    # no multiple of ten up to 990 lies above the price
    assert goal.instruction == "i want a clay mug"
    task = Task(f"webshop-{environment.goals.index(goal)}")
    commands = ["search[birch mug]", "click[b1]", "click[green]", "click[buy now]"]
    *_, last = play(environment, task, commands)
    assert last.measures["success"] == 1.0


def test_missing_and_foreign_files_are_refused_with_the_reason(tmp_path: Path) -> None:
    options = files(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"no file 'nowhere.json'"):
        registry.load("webshop", {**options, "products": "nowhere.json"})
    (tmp_path / "products.json").write_text('[{"asin": "B0"}]')
    with pytest.raises(ValueError, match=r"KeyError: .*items_shuffle.*nouns"):
        registry.load("webshop", options)


def test_wrong_options_are_refused() -> None:
    for name, said in (("pages", "pages"), ("products", "expected the first two together")):
        with pytest.raises(ValueError, match=said):
            registry.load("webshop", {name: "a.json"})


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
