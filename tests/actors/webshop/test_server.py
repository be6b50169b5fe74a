"""The client of a WebShop server, against a real HTTP server that serves the embedded shop under
the original routes and markup."""

import asyncio
import html
import json
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from coppice.actors.environments import registry
from coppice.actors.environments.base import Transition
from coppice.actors.environments.webshop.environment import WebShop
from coppice.actors.environments.webshop.episode import Shopping
from coppice.actors.environments.webshop.reward import reward
from coppice.actors.environments.webshop.server import State, WebShopServer, read_page
from coppice.actors.environments.webshop.shop import Place
from coppice.wire.faults import DataFault, InfrastructureFault

NOBODY: Any = None
EMBEDDED = WebShop(split="released")


def link(*parts: Any) -> str:
    return "".join("/" + urllib.parse.quote(str(part), safe="") for part in parts)


class Handler(BaseHTTPRequestHandler):
    """The routes /SESSION, /search_results, /item_page, /item_sub_page and /done of the original
    server."""

    sessions: list[str] = []
    requests: list[str] = []

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        form = urllib.parse.parse_qs(self.rfile.read(length).decode())
        if "search_query" in form:
            words = form["search_query"][0].lower().split(" ")
            self.send_response(302)
            self.send_header("Location", f"{link('search_results')}{self.path}{link(words, 1)}")
            self.end_headers()
        else:
            self.do_GET()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        parts = [urllib.parse.unquote(part) for part in self.path.strip("/").split("/")]
        kind = parts.pop(0) if hasattr(self, f"_{parts[0]}") else "index"
        session, *rest = parts
        if session not in self.sessions:
            self.sessions.append(session)
        goal = EMBEDDED.goals[int(session.split("_")[-1])]
        body = getattr(self, f"_{kind}")(session, goal, *rest).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def _page(self, goal: Any, content: str) -> str:
        return (
            "<!DOCTYPE html><html><head><title>WebShop</title><script>var x = '<b>';</script></head><body><!-- note -->\n"
            f'<div id="instruction-text"><h4>Instruction: <br>{html.escape(goal.instruction)}</h4></div>\n{content}</body></html>'
        )

    def _form(self, name: str, *address: str) -> str:
        return f'<form method="post" action="{link(*address)}"><button type="submit" class="btn">{html.escape(name)}</button></form>\n'

    def _index(self, session: str, goal: Any) -> str:
        return self._page(
            goal,
            f'<form method="post" action="/{session}"><input id="search_input" type="text" name="search_query"/>'
            '<button class="btn btn-success" type="submit"><i class="glyphicon"></i>Search</button></form>',
        )

    def _search_results(self, session: str, goal: Any, words: str, number: str) -> str:
        query, at = " ".join(json.loads(words.replace("'", '"'))), int(number)
        found, here = EMBEDDED.shop.search.results(query), ("search_results", session, words)
        content = self._form("Back to Search", session)
        content += f"<h3>Page {at} (Total results: {len(found)})</h3>"
        content += self._form("< Prev", *here, str(at - 1)) if at > 1 else ""
        content += self._form("Next >", *here, str(at + 1))
        for asin in EMBEDDED.shop.listed(Place("results", query, at)):
            one = EMBEDDED.shop.products[asin]
            href = link("item_page", session, asin, words, number, "{}")
            content += f'<h4><a class="product-link" href="{href}">{asin}</a></h4><h4>{html.escape(one.name)}</h5><h5>{one.tag}</h6>'
        return self._page(goal, content)

    def _item_page(
        self, session: str, goal: Any, asin: str, words: str, number: str, options: str
    ) -> str:
        one, chosen = EMBEDDED.shop.products[asin], json.loads(options)
        here = (session, asin, words, number)
        content = self._form("Back to Search", session)
        content += self._form("< Prev", "search_results", session, words, number)
        for name, values in one.options.items():
            content += f"<h4>{name}</h4>"
            for value in values:
                url = link("item_page", *here, json.dumps(chosen | {name: value}))
                content += f'<input type="radio" name="{name}" value="{value}" data-url="{url}"><label>{value}</label>\n'
        content += f"<h2>{html.escape(one.name)}</h2><h4>Price: {one.tag}</h4><h4>Rating: N.A.</h4>"
        for sub in ("Description", "Features", "Reviews"):
            content += self._form(sub, "item_sub_page", *here, sub, options)
        return self._page(goal, content + self._form("Buy Now", "done", session, asin, options))

    def _item_sub_page(
        self, session: str, goal: Any, asin: str, words: str, number: str, sub: str, options: str
    ) -> str:
        one = EMBEDDED.shop.products[asin]
        texts = {"Description": [one.description], "Features": one.bullets}.get(sub, [])
        back = self._form("Back to Search", session)
        back += self._form("< Prev", "item_page", session, asin, words, number, options)
        return self._page(goal, back + "".join(f"<p> {html.escape(text)} </p>\n" for text in texts))

    def _done(self, session: str, goal: Any, asin: str, options: str) -> str:
        value = reward(EMBEDDED.shop.products[asin], list(json.loads(options).values()), goal)
        return (
            f"<html><body><h1>Thank you for shopping with us!</h1><p><pre>CODE</pre> (Paste it.)</p>"
            f'<h3 id="reward">Your score (min 0.0, max 1.0)<pre>{value}</pre></h3></body></html>'
        )


@pytest.fixture
def url() -> Iterator[str]:
    Handler.sessions.clear()
    Handler.requests.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def step(environment: Shopping, state: Any, command: str) -> Transition:
    action = environment.read(state, f"<think>x</think><action>{command}</action>")
    return asyncio.run(environment.step(state, action, NOBODY))


def walk(number: int) -> list[str]:
    """Commands that visit every kind of page and buy the goal's product perfectly."""
    goal = EMBEDDED.goals[number]
    visit = [f"search[{goal.product.name}]", f"click[{goal.product.asin}]", "click[< prev]"]
    return [
        *visit, "click[next >]", "click[back to search]", *visit[:1], "click[next >]", "click[< prev]", f"click[{goal.product.asin}]",
        f"click[{goal.values[0]}]", "click[features]", "click[< prev]", "click[description]", "click[< prev]", "click[reviews]",
        "click[< prev]", "click[nonsense]", *(f"click[{value}]" for value in goal.values[1:]), "click[buy now]",
    ]  # fmt: skip


@pytest.mark.parametrize("pages", ["text", "text_rich"])
def test_a_server_shows_and_rewards_what_the_embedded_shop_does(url: str, pages: Any) -> None:
    remote = WebShopServer(url, goals=7000, horizon=30, pages=pages)
    local = WebShop(split="released", horizon=30, pages=pages)
    task = remote.task(1234)
    same = msgspec.structs.replace(task, id=task.id.replace("_server", ""))
    theirs, ours = remote.initial(task), local.initial(same)
    outcome = None
    for command in walk(ours.goal):
        assert remote.prompt(task, theirs) == local.prompt(task, ours)
        there, here = step(remote, theirs, command), step(local, ours, command)
        for name in ("done", "outcome", "measures", "reward"):
            assert getattr(there, name) == getattr(here, name)
        theirs, ours, outcome = there.state, here.state, here.outcome
    assert outcome == 10.0
    assert len(Handler.sessions) == 1


def test_branches_are_replayed_in_sessions_of_their_own(url: str) -> None:
    remote = WebShopServer(url, goals=7000)
    state = remote.initial(remote.task(7))
    goal = EMBEDDED.goals[state.goal]
    results = step(remote, state, f"search[{goal.product.name}]").state
    item = step(remote, results, f"click[{goal.product.asin}]").state
    plain = msgspec.json.decode(msgspec.json.encode(item), type=State)
    assert (plain, hash(plain)) == (item, hash(item))
    assert len(Handler.sessions) == 1
    bought = step(remote, plain, "click[buy now]")
    assert len(Handler.sessions) == 1
    chosen = step(remote, item, f"click[{goal.values[0]}]")
    assert len(Handler.sessions) == 2
    again = step(WebShopServer(url, goals=7000), item, "click[buy now]")
    assert len(Handler.sessions) == 3
    assert bought.measures == again.measures
    assert chosen.state.actions[:-1] == item.actions
    better = step(remote, chosen.state, "click[buy now]")
    assert len(Handler.sessions) == 3
    assert better.measures["score"] > bought.measures["score"] > 0


def test_actions_without_effect_ask_the_server_for_nothing(url: str) -> None:
    remote = WebShopServer(url, goals=7000)
    state = remote.initial(remote.task(7))
    before = len(Handler.requests)
    after = step(remote, state, "click[buy now]")
    assert (after.state.actions, after.state.step, after.state.page) == ((), 1, state.page)
    assert len(Handler.requests) == before


def test_another_page_on_replay_is_a_data_fault(url: str) -> None:
    state = WebShopServer(url, goals=7000).initial(WebShopServer(url).task(7))
    moved = msgspec.structs.replace(state, page="elsewhere")
    with pytest.raises(DataFault, match="shows another page"):
        step(WebShopServer(url), moved, "search[mug]")


def test_a_server_that_does_not_answer_is_an_infrastructure_fault() -> None:
    remote = WebShopServer("http://127.0.0.1:9", timeout_s=2.0)
    with pytest.raises(
        InfrastructureFault, match=r"expected a running WebShop server at data.options.url"
    ):
        remote.initial(remote.task(7))


def test_a_server_s_goals_are_split_as_released() -> None:
    remote = registry.load("webshop_server", {"goals": 600})
    assert isinstance(remote, WebShopServer)
    for first, goals in ((0, range(500, 600)), (2**30, range(500))):
        tasks = [remote.task(first + seed) for seed in range(1000)]
        assert {int(task.id.rpartition("-")[2]) for task in tasks} == set(goals)
    with pytest.raises(ValueError, match="expected more than the 500"):
        registry.load("webshop_server", {"goals": 500})


def test_a_page_of_the_older_templates_is_read_too() -> None:

    page = read_page(
        "<div><h4>Instruction: buy a mug</h4><button class='btn'>Search</button></div>",
        "http://x/s",
        set(),
    )
    assert page.instruction == "buy a mug"
    assert page.targets == {"search": ("http://x/s", True)}
    assert page.reward is None
    with pytest.raises(DataFault, match="without an instruction"):
        read_page("<h4>Not found</h4>", "http://x/s", set()).shown(rich=False)
