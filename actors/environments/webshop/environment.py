"""The shop as an environment: an episode is one purchase, and each turn is a fresh prompt with the
page and the last turns."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coppice.actors.environments import base
from coppice.actors.environments.base import Action, Environment, Task, Tools, Transition
from coppice.actors.environments.game import ACTION
from coppice.actors.environments.webshop import store
from coppice.actors.environments.webshop.goals import Goal, make_goals
from coppice.actors.environments.webshop.goals import split as parted
from coppice.actors.environments.webshop.invented import catalogue
from coppice.actors.environments.webshop.products import read_products
from coppice.actors.environments.webshop.reward import reward
from coppice.actors.environments.webshop.store import BUY, SEARCH, Store, StorePlace
from coppice.common.numbers import Count, Natural
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn

PROMPT = (Path(__file__).parent / "prompt.txt").read_text().strip()
PERFECT = 10.0
"""The outcome of a perfect purchase."""
LONGEST_PROMPT = 13_000
"""The characters of a prompt above which earlier turns are left out."""
Think = Literal["required", "optional"]

_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL | re.IGNORECASE)
_COMMAND = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
_CHINESE = re.compile("[\u4e00-\u9fff]")


class WebShopState(msgspec.Struct, frozen=True):
    """An episode under way. goal: its index in the catalogue named by ``catalogue``."""

    goal: int
    catalogue: str
    place: StorePlace = StorePlace()
    step: int = 0
    past: tuple[tuple[str, str], ...] = ()


class WebShop(Environment):
    """The shop. Without files it sells 1,000 invented products.

    pages: the rendering. horizon: the most actions. history: how many earlier turns the prompt
    shows. split: "products" (no product has training and held-out goals) or "released" (the first
    500 goals are held out). products, attributes: paths of files in the original layout. human: of
    the goals that people wrote, which are taken instead of the synthetic ones. outcome: 10 for a
    perfect purchase and else 0 ("success"), or 10 times the reward ("score"). think: whether a
    reply must contain a thought.
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
        outcome: Literal["success", "score"] = "success",
        think: Think = "required",
    ):
        if bool(products) != bool(attributes) or (human and not products):
            wish = "expected the first two together, and `human` only with them"
            raise ValueError(f"{products = }, {attributes = }, {human = }: {wish}")
        self.rich, self.horizon, self.history = pages == "text_rich", horizon, history
        self.outcome: Literal["success", "score"] = outcome
        self.think: Think = think
        goods = read_products(products, attributes, human) if products else catalogue()
        self.store = Store(goods)
        self.goals = make_goals(goods, bool(human))
        self.training, self.held_out = parted(self.goals, split)

    def task(self, seed: int) -> Task:
        """Return the task of ``seed``. Seeds of held-out tasks give held-out goals, and consecutive
        ones give different goals."""
        held_out = seed in base.HELD_OUT_SEEDS
        goals = self.held_out if held_out else self.training
        number = seed - base.HELD_OUT_SEEDS.start if held_out else seed
        return Task(f"{self.name}-{goals[number % len(goals)]}", seed=seed)

    def initial(self, task: Task) -> WebShopState:
        return WebShopState(int(task.id.rpartition("-")[2]), self.store.digest)

    def goal(self, state: WebShopState) -> Goal:
        """Return the goal of an episode. Raises DataFault for a state of another catalogue."""
        digest, count = self.store.digest, len(self.goals)
        if state.catalogue != digest or not 0 <= state.goal < count:
            raise DataFault(
                f"webshop: the state belongs to goal {state.goal} of catalogue {state.catalogue!r},"
                f" and this shop has {count} goals of {digest!r}; give the same product files"
            )
        return self.goals[state.goal]

    def page(self, state: WebShopState) -> str:
        """Return the page as the policy sees it, without the instruction."""
        return store.observation(store.pieces(self.store, state.place), self.rich)

    def offered(self, state: WebShopState, query: str) -> list[str]:
        """Return the actions of a page, its search with ``query``."""
        names = self.store.clickables(state.place)
        return [f"search[{query}]" if name == SEARCH else f"click[{name}]" for name in names]

    def prompt(self, task: Task, state: WebShopState) -> list[dict[str, str]]:
        head = PROMPT.format(task=self.goal(state).instruction, horizon=self.horizon)
        past = enumerate(state.past, state.step - len(state.past) + 1)
        shown = (f"\n[Observation {n}: {seen}, Action {n}: '{said}']" for n, (seen, said) in past)
        turns = "".join(shown)
        actions = "".join(f"'{action}',\n" for action in self.offered(state, "<your query>"))
        count = f"\n\nActions taken: {state.step}"
        tail = f"\nCurrent page: {self.page(state)}\nActions:\n{actions}"
        turns *= len(head + count + turns + tail) <= LONGEST_PROMPT
        return [{"role": "user", "content": f"{head}{base.SPLIT}{count}{turns}{tail}"}]

    def replies(self, state: WebShopState) -> list[str]:
        """Return a search for the whole instruction, where the page offers a search, and a click on
        every other name."""
        offered = self.offered(state, self.goal(state).instruction)
        return [f"<think>any</think><action>{action}</action>" for action in offered]

    def anchor(self, state: WebShopState) -> str:
        """Return the page with the chosen options, which the rendering "text" does not show."""
        return "\n".join([self.page(state), *map(" = ".join, sorted(state.place.options))])

    def read(self, state: WebShopState, text: str) -> Action:
        return read_reply(text, list(self.store.clickables(state.place)), self.think)

    async def step(self, state: WebShopState, action: Action, tools: Tools) -> Transition:
        """Take an action. An invalid or impossible one leaves the page as it is and uses up a step.

        The next prompt shows the page, so only the last step and one without effect have an
        observation.
        """
        place, paid, seen = state.place, None, ""
        name = list(self.store.clickables(place))[action.move[0]] if action.move else ""
        if name == BUY:
            paid = reward(self.store.products[place.asin], place.chosen, self.goal(state))
        elif action.kind == "search":
            place = self.store.searched(place, action.argument or "")
        elif name:
            place = self.store.clicked(place, name)
        else:
            seen = "This action does nothing here."
        block = ACTION.search(action.text.lower())
        past = (*state.past, (self.page(state), block[1].strip() if block else "none"))
        past = past[-self.history :] if self.history else ()
        after = msgspec.structs.replace(state, place=place, step=state.step + 1, past=past)
        if paid is None and after.step < self.horizon:
            return Transition(after, seen, False, reward=0.0)
        if paid is None:
            paid, seen = 0.0, "The actions are used up without a purchase."
        else:
            seen = f"The purchase is rewarded with {paid:.3f}."
        success = float(paid == 1)
        outcome = PERFECT * (success if self.outcome == "success" else paid)
        measures = {"success": success, "score": 100 * paid}
        return Transition(after, seen, True, outcome, measures, outcome)

    def judged(
        self, task: Task, state: WebShopState, action: Action, step: int, budget: int
    ) -> JudgedTurn:
        """Return what a judge sees: the words of a search are the query, a click is a move, and the
        page is the context."""
        turn = super().judged(task, state, action, step, self.horizon)
        question, context = self.goal(state).instruction, self.page(state)
        return msgspec.structs.replace(
            turn, question=question, context=context, think=action.think, query=action.argument
        )


def read_reply(text: str, clickables: list[str], think: Think) -> Action:
    """Return the action of ``<think> .. </think><action> search[..] or click[..] </action>``. Case
    does not matter, and the first action block counts.

    "search" has ``argument``, the words. "click" has ``move``, the place in ``clickables``, or no
    move if the name cannot be clicked: such an action is readable, but it does nothing. "invalid":
    no block, no thought where one is required, a Chinese character, or another form.
    """
    block, thought = ACTION.search(text.lower()), _THOUGHT.search(text)
    if block is None or (think == "required" and thought is None) or _CHINESE.search(text):
        return Action("invalid", text)
    reason, command = thought and thought[1].strip(), _COMMAND.fullmatch(block[1].strip())
    if command is None or not (argument := command[2].strip()):
        return Action("invalid", text, think=reason)
    if command[1] == "search":
        return Action("search", text, argument, think=reason)
    reachable = argument in clickables and argument != SEARCH
    move = (clickables.index(argument),) if reachable else None
    return Action("click", text, move=move, think=reason)
