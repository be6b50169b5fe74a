"""The page of coppice trees --html: what it holds, and what a person can do in a browser."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, sync_playwright

from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.inspecting.dump import main

TAKES = "document.title = 'taken'"
EVIL = f'</script><script>{TAKES}</script><img src=x onerror="{TAKES}"> Lima & more'
LARGE = 5000
FLAGS = "no-sandbox disable-gpu no-first-run disable-background-networking disable-sync".split()


def journal(folder: Path, *trees: Tree) -> None:
    log = Journal(folder / "journal.sqlite")
    for place, tree in enumerate(trees):
        log.start_tree(tree, place, 3)
        log.close_tree(tree)
    log.close()


def tree(number: int, text: str, steps: int) -> Tree:
    grown = Tree(number, f"task{number}")
    tip = grown.add(None, "prompt", np.arange(4, dtype=np.int32), f"Question {number}?")
    for step in range(steps):
        action = None
        for k in range(2):
            tokens, said = np.arange(3, dtype=np.int32), f"{text} {step}.{k}"
            scores = {"reward": k - 0.5, "advantage": 2.0 * k - 1}
            action = grown.add(tip, "action", tokens, said, scores=scores)
            action.chosen, action.notes = bool(k), {"rules": "because"}
            action.logprobs = np.array([-0.1, -2.0, -0.3], np.float32)
            action.versions = np.full(3, step, np.int32)
        assert action is not None
        seen = np.arange(2, dtype=np.int32)
        tip = grown.add(action, "observation", seen, f"found {step}", chosen=True)
    return grown


@pytest.fixture
def page(tmp_path: Path) -> Path:
    journal(tmp_path, tree(1, "search", 2), tree(2, EVIL, 1), tree(3, "answer", 3))
    assert main([str(tmp_path), "--all", "--html", str(tmp_path / "trees.html")]) == 0
    return tmp_path / "trees.html"


def held(page: Path) -> Any:
    """The data of a page, read as a browser does: up to the first end of the element."""
    element = r'<script type="application/json" id="data">(.*?)</script>'
    (data,) = re.findall(element, page.read_text(), re.DOTALL)
    return json.loads(data)


def test_the_page_holds_every_node_and_no_markup_of_a_rollout(page: Path) -> None:
    trees = held(page)["trees"]
    assert [(one["tree"], len(one["nodes"])) for one in trees] == [(1, 7), (2, 4), (3, 10)]
    action = trees[1]["nodes"][1]
    assert action["text"] == f"{EVIL} 0.0"
    assert action["scores"] == {"reward": -0.5, "advantage": -1.0}
    assert action["logprobs"] == [-0.1, -2.0, -0.3]
    assert (action["pieces"], action["versions"]) == (["0", "1", "2"], [0, 0, 0])
    assert "<img" not in page.read_text() and page.read_text().count("<script") == 2
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.read_text())


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    programs = ("chromium", "chromium-browser", "google-chrome")
    if (program := next(filter(None, map(shutil.which, programs)), None)) is None:
        pytest.skip("no Chromium on PATH (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        flags = [f"--{flag}" for flag in (*FLAGS, "disable-component-update")]
        chromium = playwright.chromium.launch(executable_path=program, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture
def window(browser: Any) -> Iterator[Page]:
    """A window that fails the test for any error of the page and any request beyond the file."""
    window = browser.new_page(viewport={"width": 1900, "height": 900})
    wrong: list[str] = []
    window.on("pageerror", lambda error: wrong.append(str(error)))
    window.on("console", lambda said: wrong.append(said.text))
    outside = lambda request: not request.url.endswith("/trees.html")  # noqa: E731
    window.on("request", lambda request: wrong.append(request.url) if outside(request) else None)
    yield window
    window.close()
    assert not wrong


def shown(window: Page) -> list[str]:
    boxes = window.locator("[role=treeitem] b").all_inner_texts()
    return [box.split("\n")[0].split(" adv")[0] for box in boxes]


def test_a_node_is_read_folded_and_found(page: Path, window: Page) -> None:
    window.goto(page.as_uri())
    assert window.title().endswith("3 prefix trees")
    assert shown(window)[-2:] == ["action 4", "action 1"]
    window.click("text=action 4")
    said = window.inner_text("#details")
    expected = ("search 1.0", "reward\t-0.5", "Said by rules", "lowest -2 at “1”")
    assert [text for text in expected if text not in said] == []
    window.keyboard.press("ArrowLeft")  # to the parent, observation 3
    assert "observation 3" in window.inner_text("#details h2")
    window.keyboard.press("ArrowLeft")  # fold it
    assert len(shown(window)) == 4
    assert window.get_attribute("[aria-selected=true]", "aria-expanded") == "false"
    window.keyboard.press("/")
    window.keyboard.type("SEARCH 1.1")
    assert window.inner_text("#found") == "1 nodes here"
    window.keyboard.press("Enter")  # opens the fold
    assert "action 5" in window.inner_text("#details h2") and len(shown(window)) == 7
    assert window.inner_text("#details mark") == "search 1.1"


def test_the_keyboard_alone_reaches_every_node_and_tree(page: Path, window: Page) -> None:
    window.goto(page.as_uri())
    window.focus("[role=treeitem][tabindex='0']")
    seen = []
    for _ in range(7):
        seen.append(window.inner_text("#details h2"))
        window.keyboard.press("ArrowDown")
    assert len(set(seen)) == 7
    window.keyboard.press("Home")
    window.keyboard.press("ArrowRight")
    assert window.inner_text("#details h2") == "action 2"
    window.keyboard.press("Enter")
    assert window.evaluate("document.activeElement.id") == "details"
    window.keyboard.press("Escape")
    for key, number in (("]", 2), ("]", 3), ("]", 3), ("[", 2)):
        window.keyboard.press(key)
        assert window.inner_text("nav [aria-current]").split()[0] == str(number)
    assert window.title() != "taken" and EVIL[:20] in window.inner_text("[data-node='2']")
    window.goto(page.as_uri() + "#3:4")
    window.reload()
    assert window.inner_text("#details h2") == "action 4"  # a link to a node


def test_of_thousands_of_nodes_only_those_in_view_are_drawn(tmp_path: Path, window: Page) -> None:
    large = Tree(0, "large")
    tips = [large.add(None, "prompt", np.arange(2, dtype=np.int32), "q")]
    while len(large.nodes) < LARGE:
        tip = tips.pop(0)
        for k in range(4):
            text, two = f"node {len(large.nodes)}", np.arange(2, dtype=np.int32)
            action = large.add(tip, "action", two, text, chosen=not k)
            tips += [large.add(action, "observation", two, "o", chosen=not k)] * (k < 2)
    journal(tmp_path, large)
    assert main([str(tmp_path), "--html", str(tmp_path / "trees.html")]) == 0
    window.goto((tmp_path / "trees.html").as_uri())
    assert 1 < window.locator("[role=treeitem]").count() < 100
    last = max(large.nodes)
    window.evaluate(f"location.hash = '#0:{last}'")  # a link within the page
    window.wait_for_selector(f"[data-node='{last}'][aria-selected=true]")
