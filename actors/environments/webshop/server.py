"""The shop of a running WebShop server as an environment. The addresses in the server's HTML pages
hold the place, the query and the chosen options. So a state holds where each click leads, and
branches and resumed runs follow these addresses in one session per goal."""

import asyncio
import re
import urllib.error
import urllib.parse
import urllib.request
from html.parser import HTMLParser

import msgspec

from coppice.actors.environments.base import Task
from coppice.actors.environments.webshop.environment import Outcome, Pages, Shopping, Think
from coppice.actors.environments.webshop.goals import RELEASED_HELD_OUT
from coppice.actors.environments.webshop.store import BACK, Piece, observation
from coppice.common.numbers import Count, Natural, Positive
from coppice.wire.faults import DataFault, InfrastructureFault

SCORE = "Your score (min 0.0, max 1.0)"
UNSEEN, MEANT = {"style", "script", "title"}, {"button", "label", "a"}
"""Tags whose text is not visible, and tags whose text can be clicked."""
IN_ADDRESS = "/:%?=&'()[]{},+~@!$*;"
"""The characters of a page's own addresses that are sent as they are."""


class WebShopServerState(msgspec.Struct, frozen=True):
    """An episode under way. page: what the server shows. targets: for each name that can be
    clicked, in order, its address and whether it is posted. visited: the names of the links that
    were followed since the last return to the search page."""

    goal: int
    task: str
    page: str
    targets: tuple[tuple[str, str, bool], ...]
    visited: tuple[str, ...] = ()
    step: int = 0
    past: tuple[tuple[str, str], ...] = ()


class WebShopServer(Shopping):
    """A server's shop. url: of the server. goals: how many goals it has; the first 500 are held
    out. The other options: ``Shopping``.

    timeout_s: seconds to wait for a page. A page that does not come is an InfrastructureFault.
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
        self.url, self.timeout_s = url.rstrip("/"), timeout_s
        self.held_out, self.training = range(RELEASED_HELD_OUT), range(RELEASED_HELD_OUT, goals)

    def initial(self, task: Task) -> WebShopServerState:
        """Return the search page of the task's goal."""
        goal = int(task.id.rpartition("-")[2])
        page = WebShopPage(*self._get(self._start(goal)), ())
        shown = observation(page.pieces, self.rich)
        return WebShopServerState(goal, page.instruction, shown, page.targets)

    def instruction(self, state: WebShopServerState) -> str:
        return state.task

    def page(self, state: WebShopServerState) -> str:
        return state.page

    def clickables(self, state: WebShopServerState) -> list[str]:
        return [name for name, *_ in state.targets]

    def anchor(self, state: WebShopServerState) -> str:
        """Return the page. The rendering "text" does not show the chosen options."""
        return state.page

    async def go(
        self, state: WebShopServerState, query: str, name: str
    ) -> tuple[WebShopServerState, float | None]:
        address, form, visited = self._start(state.goal), {"search_query": query}, state.visited
        if not query:
            address, posted = next(target[1:] for target in state.targets if target[0] == name)
            form = {} if posted else None
            # the released shop forgets the visited products where it goes back to the search
            visited = () if name == BACK else visited if posted else (*visited, name)
        try:
            answer = await asyncio.to_thread(self._get, address, form)
        except InfrastructureFault:  # a server that was restarted must see the session's start
            await asyncio.to_thread(self._get, self._start(state.goal))
            answer = await asyncio.to_thread(self._get, address, form)
        page = WebShopPage(*answer, visited)
        if page.reward is None:
            changes = {"targets": page.targets, "visited": visited}
            shown = observation(page.pieces, self.rich)
            state = msgspec.structs.replace(state, page=shown, **changes)
        return state, page.reward

    def _start(self, goal: int) -> str:
        """Return the first address of a session. The server reads the goal from its end."""
        return f"{self.url}/fixed_coppice_{goal}"

    def _get(self, address: str, form: dict[str, str] | None = None) -> tuple[str, str]:
        """Return a page and its address."""
        body = None if form is None else urllib.parse.urlencode(form).encode()
        try:
            request = urllib.request.Request(urllib.parse.quote(address, safe=IN_ADDRESS), body)
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return answer.read().decode(), answer.url
        except (urllib.error.URLError, OSError) as error:
            raise InfrastructureFault(
                f"webshop_server: {address}: {error}; expected a running WebShop server at"
                " data.options.url"
            ) from None


class WebShopPage(HTMLParser):
    """A page of the server. instruction: what the episode asks for. pieces: what follows it.
    targets: as in the state. reward: the score on the page that follows a purchase, None on every
    other page.

    visited: links that were followed, in lower case, for the marks of the rendering "text_rich".
    Raises DataFault for a page without an instruction.
    """

    def __init__(self, html: str, address: str, visited: tuple[str, ...]):
        super().__init__()
        self._address, self._visited, self._form = urllib.parse.unquote(address), visited, ""
        self._tag, self._fields = "", dict[str, str]()
        self._clickable: list[tuple[str, str, str]] = []
        self.pieces: list[Piece] = []
        self.feed(html)
        self.close()
        texts = [piece.text for piece in self.pieces]
        self.reward = float(texts[texts.index(SCORE) + 1]) if SCORE in texts else None
        if self.reward is None and "Instruction:" not in texts[:-1]:
            raise DataFault(
                f"webshop_server: a page without an instruction, which begins with {texts[:3]}"
            )
        first = 0 if self.reward is not None else texts.index("Instruction:") + 1
        self.instruction, self.pieces = texts[first], self.pieces[first + 1 :]
        targets = {
            name: (name, urllib.parse.urljoin(address, to), kind == "button")
            for kind, name, to in sorted(self._clickable, key=lambda one: one[0])
        }  # buttons, links, options
        self.targets = tuple(targets.values())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = {name: value or "" for name, value in attrs}
        if tag == "form":
            self._form = fields.get("action", "")
        if tag == "input" and fields.get("type") == "radio":
            self._clickable.append(("option", fields["value"], fields.get("data-url", "")))
        if tag in MEANT or tag in UNSEEN:
            self._tag, self._fields = tag, fields

    def handle_endtag(self, tag: str) -> None:
        if tag == self._tag:
            self._tag = ""

    def handle_data(self, data: str) -> None:
        text = re.sub(r"\s+", " ", data).strip()
        if not text or self._tag in UNSEEN:
            return
        if self._tag == "button":
            self._clickable.append(("button", text.lower(), self._form))
            self.pieces.append(Piece(text, "button"))
        elif self._tag == "label":
            chosen = any(f"{mark}{text}{mark}" in self._address for mark in "\"'")
            self.pieces.append(Piece(text, "option", chosen))
        elif self._tag == "a" and self._fields.get("class") == "product-link":
            self._clickable.append(("link", text.lower(), self._fields.get("href", "")))
            self.pieces.append(Piece(text, "link", text.lower() in self._visited))
        elif text.startswith("Instruction: "):
            self.pieces += [Piece("Instruction:"), Piece(text.removeprefix("Instruction: "))]
        else:
            self.pieces.append(Piece(text))
