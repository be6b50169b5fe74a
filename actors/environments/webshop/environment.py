"""The WebShop environment: an episode is one purchase, and each turn is a fresh prompt that shows the page and the last turns."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from actors.environments.base import SPLIT, Action, Environment, Task, Tools, Transition
from actors.environments.webshop.goals import Goal, make_goals
from actors.environments.webshop.goals import split as parted
from actors.environments.webshop.invented import catalogue
from actors.environments.webshop.nouns import spacy_nouns
from actors.environments.webshop.pages import observation, pieces
from actors.environments.webshop.products import read_products
from actors.environments.webshop.replies import Think, read_reply
from actors.environments.webshop.reward import reward
from actors.environments.webshop.shop import BUY, SEARCH, Place, Shop
from wire.faults import DataFault
from wire.messages import JudgedTurn
from wire.numbers import Count, Natural

PROMPT = (Path(__file__).parent.parent / "prompts" / "webshop.txt").read_text().strip()
PERFECT = 10.0
"""The outcome of a perfect purchase."""
LONGEST_PROMPT = 13_000
"""The characters of a turn's prompt above which earlier turns are left out."""

HELD_OUT = range(2**30, 2_000_000_000)
"""The seeds of held-out tasks (``scheduler.tasks``). Training and warm starts draw the others."""

Outcome = Literal["success", "score"]


class State(msgspec.Struct, frozen=True):
    """An episode under way. goal: its index in the catalogue named by ``catalogue``. past: the last pages, each with the reply's action."""

    goal: int
    catalogue: str
    place: Place = Place()
    step: int = 0
    past: tuple[tuple[str, str], ...] = ()


class WebShop(Environment):
    """The shop. Without options it sells 1,000 invented products.

    pages: the rendering, "text" or "text_rich". horizon: the most actions. history: how many earlier turns the prompt shows. split: "products"
    (no product has training and held-out goals) or "released" (the first 500 goals are held out). products, attributes, human: paths of files
    in the original layout. human_goals: take the goals that people wrote. pipeline: of spaCy, for products without nouns. outcome: 10 for
    a perfect purchase and else 0 ("success"), or 10 times the reward ("score"). think: whether a reply must contain a thought.
    """

    name = "webshop"
    stop = ["</action>"]
    measured: Sequence[str] = ("success", "score")
    gives_step_rewards = True
    headline = "success"

    def __init__(
        self,
        pages: Literal["text", "text_rich"] = "text",
        horizon: Count = 10,
        history: Natural = 2,
        split: Literal["products", "released"] = "products",
        products: str = "",
        attributes: str = "",
        human: str = "",
        human_goals: bool = False,
        pipeline: str = "en_core_web_sm",
        outcome: Outcome = "success",
        think: Think = "required",
    ):
        self.rich, self.horizon, self.history = pages == "text_rich", horizon, history
        self.outcome: Outcome = outcome
        self.think: Think = think
        if bool(products) != bool(attributes) or (human and not products) or human_goals != bool(human):
            raise ValueError(
                f"products = {products!r}, attributes = {attributes!r}, human = {human!r}, human_goals = {human_goals}: expected the first two"
                " together, and a file `human` exactly if human_goals is on"
            )
        if products:
            found = read_products(products, attributes, human, lambda names: spacy_nouns(names, pipeline))
        else:
            found = catalogue()
        self.shop = Shop(found)
        self.goals = make_goals(found, human_goals)
        self.training, self.held_out = parted(self.goals, split)

    # ------------------------------------------------------------------------------------------ tasks and prompts

    def task(self, seed: int) -> Task:
        """Return the task of ``seed``. Seeds of held-out tasks give held-out goals, and consecutive ones give different goals."""
        goals = self.held_out if seed in HELD_OUT else self.training
        number = goals[(seed - HELD_OUT.start if seed in HELD_OUT else seed) % len(goals)]
        return Task(f"webshop-{number}", self.goals[number].instruction, seed=seed)

    def initial(self, task: Task) -> State:
        """Return the search page of the task's goal."""
        return State(int(task.id.rpartition("-")[2]), self.shop.digest)

    def goal(self, state: State) -> Goal:
        """Return the goal of an episode. Raises DataFault for a state of another catalogue."""
        if state.catalogue != self.shop.digest or not 0 <= state.goal < len(self.goals):
            raise DataFault(
                f"webshop: the state belongs to goal {state.goal} of catalogue {state.catalogue!r}, and this shop has {len(self.goals)} goals of"
                f" {self.shop.digest!r}; give the same products, attributes, human and human_goals"
            )
        return self.goals[state.goal]

    def page(self, state: State) -> str:
        """Return the page as the policy sees it, without the instruction."""
        shown = pieces(self.shop, state.place, self.goal(state).instruction)
        return observation(shown, self.rich)

    def prompt(self, task: Task, state: State) -> list[dict[str, str]]:
        """Return one user message: the rules and the task, then the earlier turns, the page and its actions."""
        head = PROMPT.format(task=self.goal(state).instruction, horizon=self.horizon)
        tail = turn_text(self.page(state), list(self.shop.clickables(state.place)), state.step, state.past)
        if len(head) + len(tail) > LONGEST_PROMPT:
            tail = turn_text(self.page(state), list(self.shop.clickables(state.place)), state.step, ())
        return [{"role": "user", "content": f"{head}{SPLIT}{tail}"}]

    def anchor(self, state: State) -> str:
        """Return the page with the chosen options, which the rendering "text" does not show."""
        return "\n".join([self.page(state), *map(" = ".join, sorted(state.place.options))])

    # ------------------------------------------------------------------------------------------ steps

    def read(self, state: State, text: str) -> Action:
        """Return the action of a reply (``replies.read_reply``)."""
        return read_reply(text, list(self.shop.clickables(state.place)), self.think)

    async def step(self, state: State, action: Action, tools: Tools) -> Transition:
        """Take an action. An invalid or impossible one leaves the page as it is and uses up a step."""
        name = self.clicked(state, action)
        if name == BUY:
            return self._bought(state)
        after = msgspec.structs.replace(
            state,
            place=self.after(state.place, action, name),
            step=state.step + 1,
            past=self._remembered(state, action),
        )
        if after.step >= self.horizon:
            return Transition(after, self.page(after), True, 0.0, {"success": 0.0, "score": 0.0}, 0.0)
        return Transition(after, self.page(after), False, reward=0.0)

    def clicked(self, state: State, action: Action) -> str:
        """Return the name that a valid click presses, "" for every other action."""
        return list(self.shop.clickables(state.place))[action.move[0]] if action.kind == "click" and action.move else ""

    def after(self, place: Place, action: Action, name: str) -> Place:
        """Return where an action that is no purchase leads. name: of ``clicked``."""
        if action.kind == "search" and action.query:
            return self.shop.searched(place, action.query)
        return self.shop.clicked(place, name) if name else place

    def _bought(self, state: State) -> Transition:
        value = reward(self.shop.products[state.place.asin], state.place.chosen, self.goal(state)).value
        outcome = PERFECT * (float(value == 1) if self.outcome == "success" else value)
        measures = {"success": float(value == 1), "score": 100 * value}
        after = msgspec.structs.replace(state, step=state.step + 1)
        return Transition(after, f"Thank you for your purchase. Reward: {value:.3f}", True, outcome, measures, outcome)

    def _remembered(self, state: State, action: Action) -> tuple[tuple[str, str], ...]:
        if not self.history:
            return ()
        said = (
            f"search[{action.query}]"
            if action.query
            else f"click[{self.clicked(state, action)}]"
            if action.move
            else "none"
        )
        return (*state.past, (self.page(state), said))[-self.history :]

    def judged(self, task: Task, state: State, action: Action, step: int, budget: int) -> JudgedTurn:
        """Return what a judge sees: the words of a search are the query, a click is a move, and the page is the context."""
        turn = super().judged(task, state, action, step, self.horizon)
        return msgspec.structs.replace(turn, think=action.think, query=action.query, context=self.page(state))


def turn_text(page: str, clickables: Sequence[str], step: int, past: Sequence[tuple[str, str]]) -> str:
    """Return the changing part of a prompt: the last turns, the page and the actions that it offers."""
    lines = [f"\n\nActions taken: {step}"]
    for number, (seen, said) in enumerate(past, start=step - len(past) + 1):
        lines.append(f"[Observation {number}: {seen}, Action {number}: '{said}']")
    offered = [f"click[{name}]" for name in clickables if name != SEARCH]
    if SEARCH in clickables:
        offered.insert(0, "search[<your query>]")
    return "\n".join([*lines, f"Current page: {page}", "Actions:", *(f"'{action}'," for action in offered)]) + "\n"
