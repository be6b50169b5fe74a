"""The client of a WebShop server, against a real HTTP server that serves the embedded shop with the
original's markup: as there, an address holds the place, and a session its goal alone."""

import html
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
from coppice.actors.environments.webshop.store import BUY, Piece, StorePlace, pieces
from coppice.wire.faults import DataFault, InfrastructureFault
from tests import games

EMBEDDED = WebShop(split="released")
STORE = EMBEDDED.store


class Handler(BaseHTTPRequestHandler):
    """The search page of a session is /SESSION, another place is /at/SESSION/PLACE, and a purchase
    /done/SESSION/PLACE."""

    sessions: set[str] = set()
    requests: list[str] = []

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        form = urllib.parse.parse_qs(self.rfile.read(length).decode())
        if "search_query" not in form:
            self.do_GET()
            return
        place = STORE.searched(StorePlace(), form["search_query"][0])
        self.send_response(302)
        self.send_header("Location", self._address(self.path.strip("/"), place))
        self.end_headers()

    def do_GET(self) -> None:
        self.requests.append(self.path)
        parts = [urllib.parse.unquote(part) for part in self.path.strip("/").split("/")]
        kind, session, plain = parts if len(parts) == 3 else ("at", parts[0], "{}")
        if len(parts) == 1:
            self.sessions.add(session)
        if session not in self.sessions:
            self.send_error(500)  # as the original after a restart
            return
        place = msgspec.json.decode(plain, type=StorePlace)
        goal = EMBEDDED.goals[int(session.split("_")[-1])]
        self.send_response(200)
        self.end_headers()
        if kind == "done":
            value = reward(STORE.products[place.asin], place.chosen, goal)
            body = f'<pre>CODE</pre><h3 id="reward">Your score (min 0.0, max 1.0)<pre>{value}</pre>'
        else:
            body = (
                "<html><head><title>WebShop</title><script>var x = '<b>';</script></head><body>"
                f"<!-- note --><h4>Instruction: <br>{html.escape(goal.instruction)}</h4>"
            )
            body += "".join(self._shown(piece, session, place) for piece in pieces(STORE, place))
        self.wfile.write(body.encode())

    def _address(self, session: str, place: StorePlace, kind: str = "at") -> str:
        if place == StorePlace():
            return f"/{session}"
        return f"/{kind}/{session}/{urllib.parse.quote(msgspec.json.encode(place), safe='')}"

    def _shown(self, piece: Piece, session: str, place: StorePlace) -> str:
        text, name = html.escape(piece.text), piece.text.lower()
        if piece.kind == "text":
            return f"<h4>{text}</h5>\n"
        kind = "done" if name == BUY else "at"
        address = html.escape(self._address(session, STORE.clicked(place, name), kind))
        return {
            "button": f'<form action="{address}"><button class="btn"><i></i>{text}</button></form>',
            "link": f'<h4><a class="product-link" href="{address}">{text}</a></h4>',
            "option": f'<input type="radio" value="{text}" data-url="{address}">'
            f"<label>{text}</label>",
        }[piece.kind]


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
    return games.play(environment, state, command)[-1]


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
