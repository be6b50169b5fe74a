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
from coppice.actors.environments.webshop.environment import Shopping, WebShop
from coppice.actors.environments.webshop.reward import reward
from coppice.actors.environments.webshop.server import (
    WebShopPage,
    WebShopServer,
    WebShopServerState,
)
from coppice.actors.environments.webshop.store import StorePlace
from coppice.wire.faults import DataFault, InfrastructureFault

NOBODY: Any = None
EMBEDDED = WebShop(split="released")


def link(*parts: Any) -> str:
    return "".join("/" + urllib.parse.quote(str(part), safe="") for part in parts)


class Handler(BaseHTTPRequestHandler):
    """The routes /SESSION, /search_results, /item_page, /item_sub_page and /done of the original
    server."""

    sessions: set[str] = set()
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
        if kind == "index":
            self.sessions.add(session)
        if session not in self.sessions:
            self.send_error(500)  # as the original after a restart
            return
        goal = EMBEDDED.goals[int(session.split("_")[-1])]
        body = getattr(self, f"_{kind}")(session, goal, *rest).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def _page(self, goal: Any, content: str) -> str:
        return (
            "<!DOCTYPE html><html><head><title>WebShop</title><script>var x = '<b>';</script></head>"
            '<body><!-- note -->\n<div id="instruction-text"><h4>Instruction: <br>'
            f"{html.escape(goal.instruction)}</h4></div>\n{content}</body></html>"
        )

    def _form(self, name: str, *address: str) -> str:
        button = f'<button type="submit" class="btn">{html.escape(name)}</button>'
        return f'<form method="post" action="{link(*address)}">{button}</form>\n'

    def _index(self, session: str, goal: Any) -> str:
        return self._page(
            goal,
            f'<form method="post" action="/{session}"><input type="text" name="search_query"/>'
            '<button class="btn" type="submit"><i class="glyphicon"></i>Search</button></form>',
        )

    def _search_results(self, session: str, goal: Any, words: str, number: str) -> str:
        query, at = " ".join(json.loads(words.replace("'", '"'))), int(number)
        found, here = EMBEDDED.store.search.results(query), ("search_results", session, words)
        content = self._form("Back to Search", session)
        content += f"<h3>Page {at} (Total results: {len(found)})</h3>"
        content += self._form("< Prev", *here, str(at - 1)) if at > 1 else ""
        content += self._form("Next >", *here, str(at + 1))
        for asin in EMBEDDED.store.listed(StorePlace("results", query, at)):
            one = EMBEDDED.store.products[asin]
            href = link("item_page", session, asin, words, number, "{}")
            content += f'<h4><a class="product-link" href="{href}">{asin}</a></h4>'
            content += f"<h4>{html.escape(one.name)}</h5><h5>{one.tag}</h6>"
        return self._page(goal, content)

    def _item_page(
        self, session: str, goal: Any, asin: str, words: str, number: str, options: str
    ) -> str:
        one, chosen = EMBEDDED.store.products[asin], json.loads(options)
        here = (session, asin, words, number)
        content = self._form("Back to Search", session)
        content += self._form("< Prev", "search_results", session, words, number)
        for name, values in one.options.items():
            content += f"<h4>{name}</h4>"
            for value in values:
                url = link("item_page", *here, json.dumps(chosen | {name: value}))
                content += f'<input type="radio" value="{value}" data-url="{url}">'
                content += f"<label>{value}</label>\n"
        content += f"<h2>{html.escape(one.name)}</h2><h4>Price: {one.tag}</h4><h4>Rating: N.A.</h4>"
        for sub in ("Description", "Features", "Reviews"):
            content += self._form(sub, "item_sub_page", *here, sub, options)
        return self._page(goal, content + self._form("Buy Now", "done", session, asin, options))

    def _item_sub_page(
        self, session: str, goal: Any, asin: str, words: str, number: str, sub: str, options: str
    ) -> str:
        one = EMBEDDED.store.products[asin]
        texts = {"Description": [one.description], "Features": one.bullets}.get(sub, [])
        back = self._form("Back to Search", session)
        back += self._form("< Prev", "item_page", session, asin, words, number, options)
        return self._page(goal, back + "".join(f"<p> {html.escape(text)} </p>\n" for text in texts))

    def _done(self, session: str, goal: Any, asin: str, options: str) -> str:
        value = reward(EMBEDDED.store.products[asin], list(json.loads(options).values()), goal)
        return (
            "<html><body><h1>Thank you for shopping with us!</h1><p><pre>CODE</pre> (Paste it.)</p>"
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
    name, asin, (value, *values) = goal.product.name, goal.product.asin, goal.values
    clicks = [asin, "< prev", "next >", "back to search"]
    again = ["next >", "< prev", asin, value, "features", "< prev", "description", "< prev"]
    again += ["reviews", "< prev", "nonsense", *values, "buy now"]
    visits = [f"search[{name}]", *(f"click[{click}]" for click in clicks), f"search[{name}]"]
    return visits + [f"click[{click}]" for click in again]


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


def test_branches_go_on_from_a_stored_state_also_after_a_restart_of_the_server(url: str) -> None:
    remote = WebShopServer(url, goals=7000)
    state = remote.initial(remote.task(7))
    goal = EMBEDDED.goals[state.goal]
    results = step(remote, state, f"search[{goal.product.name}]").state
    item = step(remote, results, f"click[{goal.product.asin}]").state
    plain = msgspec.json.decode(msgspec.json.encode(item), type=WebShopServerState)
    assert (plain, hash(plain)) == (item, hash(item))
    chosen = step(remote, item, f"click[{goal.values[0]}]").state
    bought = step(remote, plain, "click[buy now]")
    better = step(remote, chosen, "click[buy now]")
    assert better.measures["score"] > bought.measures["score"] > 0
    Handler.sessions.clear()
    again = step(WebShopServer(url, goals=7000), item, "click[buy now]")
    assert again.measures == bought.measures


def test_actions_without_effect_ask_the_server_for_nothing(url: str) -> None:
    remote = WebShopServer(url, goals=7000)
    state = remote.initial(remote.task(7))
    before = len(Handler.requests)
    after = step(remote, state, "click[buy now]").state
    assert (after.targets, after.step, after.page) == (state.targets, 1, state.page)
    assert len(Handler.requests) == before


def test_a_server_that_does_not_answer_is_an_infrastructure_fault() -> None:
    remote = WebShopServer("http://127.0.0.1:9", timeout_s=2.0)
    with pytest.raises(InfrastructureFault, match=r"running WebShop server at data.options.url"):
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
    older = "<div><h4>Instruction: buy a mug</h4><button class='btn'>Search</button></div>"
    page = WebShopPage(older, "http://x/s", ())
    assert (page.instruction, page.reward) == ("buy a mug", None)
    assert page.targets == (("search", "http://x/s", True),)
    with pytest.raises(DataFault, match="without an instruction"):
        WebShopPage("<h4>Not found</h4>", "http://x/s", ())
