"""A browser of the original WebShop server: it reads the server's HTML pages and follows their
links, forms and options over HTTP."""

import re
import urllib.error
import urllib.parse
import urllib.request
import uuid
from html.parser import HTMLParser

import msgspec

from coppice.actors.environments.webshop.pages import Piece, observation
from coppice.actors.environments.webshop.shop import BACK
from coppice.wire.faults import DataFault, InfrastructureFault

SCORE = "Your score (min 0.0, max 1.0)"
UNSEEN, VOID = {"style", "script", "head", "title"}, {"input", "img", "br", "hr", "link", "meta"}
IN_ADDRESS = "/:%?=&'()[]{},+~@!$*;"
"""The characters of a page's own addresses that are sent as they are."""


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

    def act(self, command: str) -> Page:
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

    def _load(self, address: str, form: dict[str, str] | None = None) -> Page:
        body = None if form is None else urllib.parse.urlencode(form).encode()
        try:
            request = urllib.request.Request(urllib.parse.quote(address, safe=IN_ADDRESS), body)
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return read_page(answer.read().decode(), answer.url, self.visited)
        except (urllib.error.URLError, OSError) as error:
            raise InfrastructureFault(
                f"webshop_server: {address}: {error}; expected a running WebShop server at data.options.url"
            ) from None


def read_page(html: str, address: str, visited: set[str]) -> Page:
    """Return the page of ``html``. visited: what was clicked before, in lower case, for the marks
    of the rendering "text_rich"."""
    reader = _Reader(address, visited)
    reader.feed(html)
    reader.close()
    buttons, links, options = (
        [item for item in reader.targets if item[0] == kind]
        for kind in ("button", "link", "option")
    )
    targets = {
        name: (urllib.parse.urljoin(address, to), kind == "button")
        for kind, name, to in (*buttons, *links, *options)
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
            self.pieces.append(
                Piece(text, "option", f'"{text}"' in self.address or f"'{text}'" in self.address)
            )
        elif fields.get("class") == "product-link":
            self.targets.append(("link", text.lower(), fields.get("href", "")))
            self.pieces.append(Piece(text, "link", text.lower() in self.visited))
        elif text.startswith("Instruction: "):
            self.pieces += [Piece("Instruction:"), Piece(text.removeprefix("Instruction: "))]
        else:
            self.pieces.append(Piece(text))
