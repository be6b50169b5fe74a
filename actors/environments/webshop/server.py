"""The shop of a running WebShop server as an environment. A state holds the actions so far; another
branch replays them in a new session."""

import asyncio

import msgspec

from coppice.actors.environments.base import Task
from coppice.actors.environments.webshop.browser import Browser, Page
from coppice.actors.environments.webshop.episode import Outcome, Pages, Shopping
from coppice.actors.environments.webshop.goals import RELEASED_HELD_OUT
from coppice.actors.environments.webshop.replies import Think
from coppice.common.numbers import Count, Natural, Positive
from coppice.wire.faults import DataFault

MOST_SESSIONS = 1000
"""How many sessions are kept open for the next action of their episodes."""


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
        """Return the goal's instruction."""
        return state.task

    def page(self, state: State) -> str:
        """Return the page as the policy sees it, without the instruction."""
        return state.page

    def clickables(self, state: State) -> list[str]:
        """Return the names that can be clicked."""
        return list(state.clickables)

    def anchor(self, state: State) -> str:
        """Return the page. The rendering "text" does not show the chosen options."""
        return state.page

    async def go(self, state: State, query: str, name: str) -> tuple[State, float | None]:
        """Return the state after a search or a click, and the reward if that was a purchase."""
        command = f"search[{query}]" if query else f"click[{name}]"
        actions = (*state.actions, command)
        page = await asyncio.to_thread(self._act, state, command)
        if page.reward is not None:
            return msgspec.structs.replace(state, actions=actions), page.reward
        shown, names = page.shown(self.rich), tuple(page.targets)
        return msgspec.structs.replace(state, actions=actions, page=shown, clickables=names), None

    def _act(self, state: State, command: str) -> Page:
        """Take an action in the session that stands at ``state``. A session serves one branch, so
        every other branch replays the actions."""
        browser = self._sessions.pop((state.goal, state.actions), None) or self._replayed(state)
        page = browser.act(command)
        if page.reward is None:
            self._keep((state.goal, (*state.actions, command)), browser)
        return page

    def _replayed(self, state: State) -> Browser:
        browser = Browser(self.url, state.goal, self.timeout_s)
        for command in state.actions:
            browser.act(command)
        if browser.page.shown(self.rich) != state.page:
            raise DataFault(
                f"webshop_server: goal {state.goal}: the server shows another page after {list(state.actions)}"
            )
        return browser

    def _keep(self, place: tuple[int, tuple[str, ...]], browser: Browser) -> None:
        self._sessions[place] = browser
        while len(self._sessions) > MOST_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)), None)
