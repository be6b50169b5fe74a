"""The shop of a running WebShop server as an environment, and the browser that reads the server's
HTML pages and follows their links, forms and options over HTTP. A state holds the actions so far;
another branch replays them in a new session."""

import asyncio
import re
import urllib.error
import urllib.parse
import urllib.request
import uuid
from html.parser import HTMLParser

import msgspec

from coppice.actors.environments.base import Task
from coppice.actors.environments.webshop.episode import Outcome, Pages, Shopping, Think
from coppice.actors.environments.webshop.goals import RELEASED_HELD_OUT
from coppice.actors.environments.webshop.pages import Piece, observation
from coppice.actors.environments.webshop.shop import BACK
from coppice.common.numbers import Count, Natural, Positive
from coppice.wire.faults import DataFault, InfrastructureFault

MOST_SESSIONS = 1000
"""How many sessions are kept open for the next action of their episodes."""
SCORE = "Your score (min 0.0, max 1.0)"
UNSEEN, VOID = {"style", "script", "head", "title"}, {"input", "img", "br", "hr", "link", "meta"}
IN_ADDRESS = "/:%?=&'()[]{},+~@!$*;"
"""The characters of a page's own addresses that are sent as they are."""


class State(msgspec.Struct, frozen=True):
    """An episode under way. actions: all that had an effect, in order. page, clickables: what the
    server shows after them."""

    goal: int
    task: str
    page: str
    clickables: tuple[str, ...]
    actions: tuple[str, ...] = ()
    step: int = 0
    past: tuple[tuple[str, str], ...] = ()


class WebShopServer(Shopping):
    """A server's shop. url: of the server. goals: how many goals it has; the first 500 are held
    out. The other options: ``Shopping``.

    timeout_s: seconds to wait for a page. A page that does not come is an InfrastructureFault, a
    replay that shows another page a DataFault.
    """

    name = "webshop_server"

    def __init__(
        self,
        url: str = "http://127.0.0.1:3000",
        goals: Count = 12_087,
        pages: Pages = "text",
        horizon: Count = 10,
        history: Natural = 2,
        outcome: Outcome = "success",
        think: Think = "required",
        timeout_s: Positive = 60.0,
    ):
        super().__init__(pages, horizon, history, outcome, think)
        if goals <= RELEASED_HELD_OUT:
            raise ValueError(
                f"goals = {goals}: expected more than the {RELEASED_HELD_OUT} that are held out"
            )
        self.url, self.timeout_s = url, timeout_s
        self.held_out, self.training = range(RELEASED_HELD_OUT), range(RELEASED_HELD_OUT, goals)
        self._sessions: dict[tuple[int, tuple[str, ...]], Browser] = {}

    def initial(self, task: Task) -> State:
        """Return the first page of a new session with the task's goal."""
        goal = int(task.id.rpartition("-")[2])
        browser = Browser(self.url, goal, self.timeout_s)
        self._keep((goal, ()), browser)
        page = browser.page
        return State(goal, page.instruction, page.shown(self.rich), tuple(page.targets))

    def instruction(self, state: State) -> str:
        return state.task

    def page(self, state: State) -> str:
        return state.page

    def clickables(self, state: State) -> list[str]:
        return list(state.clickables)

    def anchor(self, state: State) -> str:
        """Return the page. The rendering "text" does not show the chosen options."""
        return state.page

    async def go(self, state: State, query: str, name: str) -> tuple[State, float | None]:
        command = f"search[{query}]" if query else f"click[{name}]"
        actions = (*state.actions, command)
        page = await asyncio.to_thread(self._act, state, command)
        if page.reward is not None:
            return msgspec.structs.replace(state, actions=actions), page.reward
        shown, names = page.shown(self.rich), tuple(page.targets)
        return msgspec.structs.replace(state, actions=actions, page=shown, clickables=names), None

    def _act(self, state: State, command: str) -> "Page":
        """Take an action in the session that stands at ``state``. A session serves one branch, so
        every other branch replays the actions."""
        browser = self._sessions.pop((state.goal, state.actions), None) or self._replayed(state)
        page = browser.act(command)
        if page.reward is None:
            self._keep((state.goal, (*state.actions, command)), browser)
        return page

    def _replayed(self, state: State) -> "Browser":
        browser = Browser(self.url, state.goal, self.timeout_s)
        for command in state.actions:
            browser.act(command)
        if browser.page.shown(self.rich) != state.page:
            raise DataFault(
                f"webshop_server: goal {state.goal}: the server shows another page after {list(state.actions)}"
            )
        return browser

    def _keep(self, place: tuple[int, tuple[str, ...]], browser: "Browser") -> None:
        self._sessions[place] = browser
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)), None)


class Page(msgspec.Struct, frozen=True):
    """A page of the server. targets: for each name that can be clicked, in order, its address and
    whether it is posted."""

    pieces: list[Piece]
    targets: dict[str, tuple[str, bool]]

    @property
    def instruction(self) -> str:
        """The text that follows "Instruction:"."""
        texts = [piece.text for piece in self.pieces]
        if "Instruction:" not in texts[:-1]:
            raise DataFault(
                f"webshop_server: a page without an instruction, which begins with {texts[:3]}"
            )
        return texts[texts.index("Instruction:") + 1]

    def shown(self, rich: bool) -> str:
        """Return the page as the policy sees it. Raises DataFault for a page without an
        instruction."""
        return observation(self.pieces, rich) if self.instruction else ""

    @property
    def reward(self) -> float | None:
        """The score on the page that follows a purchase, None on every other page."""
        texts = [piece.text for piece in self.pieces]
        return float(texts[texts.index(SCORE) + 1]) if SCORE in texts else None


class Browser:
    """One session of a server. Every session has a goal, whose number ends the session's name, as
    the released server reads it."""

    def __init__(self, url: str, goal: int, timeout_s: float):
        self.timeout_s, self.visited = timeout_s, set[str]()
        self.start = f"{url.rstrip('/')}/fixed_{uuid.uuid4().hex}_{goal}"
        self.page = self._load(self.start)

    def act(self, command: str) -> "Page":
        """Take ``search[..]`` or ``click[..]`` and return the page that follows. Raises DataFault
        for what cannot be clicked."""
        kind, _, argument = command[:-1].partition("[")
        if kind == "search":
            self.page = self._load(self.start, {"search_query": argument})
            return self.page
        if argument not in self.page.targets:
            raise DataFault(
                f"webshop_server: {command} on a page that offers {list(self.page.targets)}"
            )
        address, posted = self.page.targets[argument]
        if argument == BACK:  # the released shop forgets the visited products there
            self.visited.clear()
        elif not posted:
            self.visited.add(argument)
        self.page = self._load(address, {} if posted else None)
        return self.page

    def _load(self, address: str, form: dict[str, str] | None = None) -> "Page":
        body = None if form is None else urllib.parse.urlencode(form).encode()
        try:
            request = urllib.request.Request(urllib.parse.quote(address, safe=IN_ADDRESS), body)
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return read_page(answer.read().decode(), answer.url, self.visited)
        except (urllib.error.URLError, OSError) as error:
            raise InfrastructureFault(
                f"webshop_server: {address}: {error}; expected a running WebShop server at data.options.url"
            ) from None


def read_page(html: str, address: str, visited: set[str]) -> "Page":
    """Return the page of ``html``. visited: what was clicked before, in lower case, for the marks
    of the rendering "text_rich"."""
    reader = _Reader(address, visited)
    reader.feed(html)
    reader.close()
    in_order = sorted(reader.targets, key=lambda target: target[0])  # button, link, option
    targets = {
        name: (urllib.parse.urljoin(address, to), kind == "button") for kind, name, to in in_order
    }
    return Page(reader.pieces, targets)


class _Reader(HTMLParser):
    """Collects the visible strings and what can be clicked: (kind, name, address)."""

    def __init__(self, address: str, visited: set[str]):
        super().__init__()
        self.address, self.visited = urllib.parse.unquote(address), visited
        self.pieces: list[Piece] = []
        self.targets: list[tuple[str, str, str]] = []
        self._open: list[tuple[str, dict[str, str]]] = []
        self._form = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._form = fields.get("action", "")
        if tag == "input" and fields.get("type") == "radio":
            self.targets.append(("option", fields["value"], fields.get("data-url", "")))
        if tag not in VOID:
            self._open.append((tag, fields))

    def handle_endtag(self, tag: str) -> None:
        tags = [name for name, _ in self._open]
        if tag in tags:
            del self._open[len(tags) - 1 - tags[::-1].index(tag) :]

    def handle_data(self, data: str) -> None:
        text = re.sub(r"\s+", " ", data).strip()
        if not text or UNSEEN & {tag for tag, _ in self._open}:
            return
        tag, fields = self._open[-1] if self._open else ("", {})
        if tag == "button":
            self.targets.append(("button", text.lower(), self._form))
            self.pieces.append(Piece(text, "button"))
        elif tag == "label":
            chosen = any(f"{mark}{text}{mark}" in self.address for mark in "\"'")
            self.pieces.append(Piece(text, "option", chosen))
        elif fields.get("class") == "product-link":
            self.targets.append(("link", text.lower(), fields.get("href", "")))
            self.pieces.append(Piece(text, "link", text.lower() in self.visited))
        elif text.startswith("Instruction: "):
            self.pieces += [Piece("Instruction:"), Piece(text.removeprefix("Instruction: "))]
        else:
            self.pieces.append(Piece(text))
