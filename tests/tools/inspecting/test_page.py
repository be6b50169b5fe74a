"""The page of coppice trees --html: what it holds, and what a person can do in a browser."""

import itertools
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
from coppice.tools.finetuning.command import main as sft
from coppice.tools.inspecting import drawing
from coppice.tools.inspecting.dump import main
from tests.tools.said import Said

TAKES = "document.title = 'taken'"
EVIL = f'</script><script>{TAKES}</script><img src=x onerror="{TAKES}"> Lima & more'
LARGE = 5000
FLAGS = "no-sandbox disable-gpu no-first-run disable-background-networking disable-sync".split()


def journal(folder: Path, *trees: Tree) -> None:
    log = Journal(folder / "journal.sqlite")
    for place, tree in enumerate(trees):
        log.start_tree(tree, place, 3 * tree.id)
        log.close_tree(tree)
    log.close()


def tree(number: int, text: str, steps: int, task: str = "") -> Tree:
    grown = Tree(number, task or f"task{number}")
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
    outside = lambda request: not request.url.startswith(("file:", "blob:"))  # noqa: E731
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
    assert window.get_attribute(".node[aria-selected=true]", "aria-expanded") == "false"
    window.keyboard.press("/")
    window.keyboard.type("SEARCH 1.1")
    assert window.inner_text("#found") == "1 of 3 trees; 1 nodes here"
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
        assert window.get_attribute("nav [aria-selected=true]", "data-tree") == str(number)
    assert window.title() != "taken" and EVIL[:20] in window.inner_text("[data-node='2']")
    window.goto(page.as_uri() + "#3:4")
    window.reload()
    assert window.inner_text("#details h2") == "action 4"  # a link to a node
    for key, part in (("Escape", "list"), ("ArrowUp", "list"), ("Enter", ""), ("Escape", "list")):
        window.keyboard.press(key)
        assert window.evaluate("document.activeElement.id") == part


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


def test_of_thousands_of_trees_only_those_in_view_are_drawn(tmp_path: Path, window: Page) -> None:
    trees = [tree(number, "search", 1) for number in range(LARGE)]
    journal(tmp_path, *trees)
    assert main([str(tmp_path), "--all", "--html", str(tmp_path / "trees.html")]) == 0
    window.goto((tmp_path / "trees.html").as_uri())
    assert 1 < window.locator(".row").count() < 40
    window.fill("#search", "4321?")
    assert window.inner_text(".row span") == "Question 4321?"
    assert window.locator(".row").count() == 1
    window.keyboard.press("Enter")
    assert window.inner_text("#question") == "Question 4321?"


def test_a_surprising_tree_opens_at_its_node_in_view_and_a_phone_has_three_screens(
    tmp_path: Path, window: Page
) -> None:
    grown = tree(1, "search", 9)
    grown.nodes[26].scores["advantage"] = -7.0
    journal(tmp_path, grown)
    assert main([str(tmp_path), "--surprising", "1", "--html", str(tmp_path / "trees.html")]) == 0
    window.set_viewport_size({"width": 390, "height": 800})
    window.goto((tmp_path / "trees.html").as_uri())
    parts, seen = ("nav", "main", "aside"), []
    for place in (".row", "[aria-selected=true].node", "#back", "#back"):
        seen.append([part for part in parts if window.is_visible(part)])
        if place == ".node":
            assert window.inner_text(f"{place} b").startswith("action 26")
        window.click(place)  # what is out of view cannot be clicked
    assert seen == [["nav"], ["main"], ["aside"], ["main"]] and window.is_visible("nav")
    assert window.evaluate("document.documentElement.scrollWidth") <= 390


def test_the_versions_of_one_question_stand_side_by_side(tmp_path: Path, window: Page) -> None:
    asked = [tree(1, "look", 1, "t"), tree(2, "search", 1, "t"), tree(3, "answer", 1)]
    journal(tmp_path, *asked, tree(4, "search", 2, "t"))
    options = ["--where", "tree = 2", "--html", str(tmp_path / "trees.html")]
    assert main([str(tmp_path), *options]) == 0
    window.goto((tmp_path / "trees.html").as_uri())
    assert window.locator(".row").count() == 1  # the others are beside it only
    assert window.inner_text("#version") == "6 (2 of 3)"
    window.keyboard.press("v")
    assert window.locator(".column h2").all_inner_texts() == [f"Version {n}" for n in (3, 6, 12)]
    fresh = [text.count("new") for text in window.locator(".column").all_inner_texts()]
    assert fresh == [0, 2, 2]  # of the last tree, only the second step is new
    window.focus("#slider")
    window.keyboard.press("ArrowRight")
    assert window.inner_text(".column.now h2") == "Version 12"
    window.click(".column.now button >> nth=2")
    assert window.inner_text("#details h2") == "action 5" and window.is_visible("#view")


def test_marks_are_saved_read_back_and_become_rows(page: Path, window: Page, said: Said) -> None:
    window.add_init_script("delete window.showSaveFilePicker")
    window.goto(page.as_uri() + "#3:2")
    window.keyboard.press("g")
    window.fill("#note", "the right field")
    window.click("[data-node='1']")
    for key in "bbu":  # the second one takes the mark back
        window.keyboard.press(key)
    assert "marked good" in window.inner_text("[data-node='2']")
    with window.expect_download() as download:
        window.keyboard.press("s")
    file = page.parent / "marks.jsonl"
    download.value.save_as(file)
    assert "1 good" in window.inner_text("#row-3")
    query = "SELECT tree, node, mark, note FROM turns WHERE mark IS NOT NULL ORDER BY node"
    rows = said(main, page.parent, "--sql", query).splitlines()[1:]
    marked = [["3", "1", "unsure"], ["3", "2", "good", "the", "right", "field"]]
    assert [row.split() for row in rows] == marked
    assert main([str(page.parent), "--all", "--html", str(page)]) == 0
    assert held(page)["marks"][0]["note"] == "the right field"
    out = page.parent.parent / f"{page.parent.name}.jsonl"
    said(sft, "marked", page.parent, "--marks", "good", "--out", out)
    row = {"completion": "answer 0.1", "prompt": "Question 3?", "group": "task3"}
    assert [json.loads(line) for line in out.read_text().splitlines()] == [row]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"tree":1,"node":1,"mark":"fine","task":"task1"}', "'fine'"),
        ('{"tree":1,"node":0,"mark":"good","task":"task1"}', "no candidate 0 of task 'task1'"),
        ('{"tree":1,"node":1,"mark":"good","task":"other"}', "the mark is of another run"),
    ],
)
def test_a_bad_mark_is_refused_with_its_line(page: Path, line: str, words: str, said: Said) -> None:
    (page.parent / "marks.jsonl").write_text(f"\n{line}\n")
    refusal = said(main, page.parent, "--all", status=2)
    assert "marks.jsonl:2: " in refusal and words in refusal and "take" in refusal


def test_every_text_has_a_contrast_of_at_least_four_and_a_half() -> None:
    script = Path(drawing.__file__).with_name("page_tree.js").read_text()
    faded = float(re.findall(r"FADED = ([\d.]+)", script)[0])
    for colours in schemes("page.html"):
        pairs = [("on-hit", colours["hit"])]
        for face in (colours["paper"], colours["card"]):
            pairs += [(text, face) for text in ("ink", "dim", "mark")]
            for sign in ("low", "high"):  # the strongest tint
                mixed = zip(colours[sign], face, strict=True)
                pairs.append(("ink", [faded * tint + (1 - faded) * of for tint, of in mixed]))
        for text, face in pairs:
            assert contrast(colours[text], face) >= 4.5, (text, face)
    for colours in schemes("report.html"):
        for text, face in itertools.product(("ink", "quiet", "link"), ("ground", "card")):
            assert contrast(colours[text], colours[face]) >= 4.5, (text, face)


def schemes(page: str) -> list[dict[str, list[float]]]:
    """The colours of the light and the dark scheme."""
    css = Path(drawing.__file__).with_name(page).read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): ([^;]+);", one)) for one in css.split("\n") if ":root" in one
    )
    return [{name: rgb(of) for name, of in names.items()} for names in (light, light | dark)]


def rgb(value: str) -> list[float]:
    if not value.startswith("#"):
        return [float(part) for part in value.split(",")]
    digits = value[1:] if len(value) == 7 else "".join(2 * digit for digit in value[1:])
    return [float(int(digits[i : i + 2], 16)) for i in (0, 2, 4)]


def contrast(text: list[float], face: list[float]) -> float:
    """The contrast of WCAG 2."""
    one, other = sorted((luminance(text), luminance(face)))
    return (other + 0.05) / (one + 0.05)


def luminance(colour: list[float]) -> float:
    """The relative luminance of WCAG 2."""
    shares = [part / 255 for part in colour]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
