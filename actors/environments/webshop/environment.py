"""The shops as environments: prompts, replies, the horizon and the outcome, and the embedded shop.
An episode is one purchase, and each turn is a fresh prompt with the page and the last turns."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from coppice.actors.environments.base import (
    HELD_OUT_SEEDS,
    SPLIT,
    Action,
    Environment,
    Task,
    Tools,
    Transition,
)
from coppice.actors.environments.webshop.goals import Goal, make_goals
from coppice.actors.environments.webshop.goals import split as parted
from coppice.actors.environments.webshop.invented import catalogue
from coppice.actors.environments.webshop.products import read_products
from coppice.actors.environments.webshop.reward import reward
from coppice.actors.environments.webshop.store import (
    BUY,
    SEARCH,
    Store,
    StorePlace,
    observation,
    pieces,
)
from coppice.common.numbers import Count, Natural
from coppice.wire.faults import DataFault
from coppice.wire.messages import JudgedTurn

PROMPT = (Path(__file__).parent / "prompt.txt").read_text().strip()
PERFECT = 10.0
"""The outcome of a perfect purchase."""
LONGEST_PROMPT = 13_000
"""The characters of a prompt above which earlier turns are left out."""
Pages = Literal["text", "text_rich"]
Outcome = Literal["success", "score"]
Think = Literal["required", "optional"]

_BLOCK = re.compile(r"<action>(.*?)</action>", re.DOTALL)
_THOUGHT = re.compile(r"<think>(.*?)</think>", re.DOTALL | re.IGNORECASE)
_COMMAND = re.compile(r"(search|click)\[(.+)\]", re.DOTALL)
_CHINESE = re.compile("[\u4e00-\u9fff]")


class Shopping(Environment):
    """Base of the shops. A subclass writes ``page``, ``clickables``, ``instruction`` and ``go``,
    and its states have ``step`` and ``past``: the last pages, each with the reply's action.

    pages: the rendering. horizon: the most actions. history: how many earlier turns the prompt
    shows. outcome: 10 for a perfect purchase and else 0 ("success"), or 10 times the reward
    ("score"). think: whether a reply must contain a thought.
    """

    name = ""
    stop = ["</action>"]
    measured: Sequence[str] = ("success", "score")
    gives_step_rewards = True
    headline = "success"
    training: Sequence[int]
    held_out: Sequence[int]

    def __init__(
        self, pages: Pages, horizon: Count, history: Natural, outcome: Outcome, think: Think
    ):
        self.rich, self.horizon, self.history = pages == "text_rich", horizon, history
        self.outcome: Outcome = outcome
        self.think: Think = think

    # -------------------------------------------------------------------------------- of each shop

    def page(self, state: Any) -> str:
        """Return the page as the policy sees it, without the instruction."""
        raise NotImplementedError

    def clickables(self, state: Any) -> list[str]:
        """Return the names that can be clicked, in lower case and in order."""
        raise NotImplementedError

    def instruction(self, state: Any) -> str:
        """Return what the episode asks for."""
        raise NotImplementedError

    async def go(self, state: Any, query: str, name: str) -> tuple[Any, float | None]:
        """Return the state after a search for ``query``, or else a click on ``name``, and the
        reward (0 to 1) if that was a purchase."""
        raise NotImplementedError

    # -------------------------------------------------------------------------------- the contract

    def task(self, seed: int) -> Task:
        """Return the task of ``seed``. Seeds of held-out tasks give held-out goals, and consecutive
        ones give different goals."""
        held_out = seed in HELD_OUT_SEEDS
        goals = self.held_out if held_out else self.training
        number = seed - HELD_OUT_SEEDS.start if held_out else seed
        return Task(f"{self.name}-{goals[number % len(goals)]}", seed=seed)

    def prompt(self, task: Task, state: Any) -> list[dict[str, str]]:
        head = PROMPT.format(task=self.instruction(state), horizon=self.horizon)
        first = state.step - len(state.past) + 1
        turns = "".join(
            f"\n[Observation {number}: {seen}, Action {number}: '{said}']"
            for number, (seen, said) in enumerate(state.past, first)
        )
        names = self.clickables(state)
        offered = ["search[<your query>]"] * (SEARCH in names)
        offered += [f"click[{name}]" for name in names if name != SEARCH]
        actions = "".join(f"'{action}',\n" for action in offered)
        count = f"\n\nActions taken: {state.step}"
        tail = f"\nCurrent page: {self.page(state)}\nActions:\n{actions}"
        turns *= len(head + count + turns + tail) <= LONGEST_PROMPT
        return [{"role": "user", "content": f"{head}{SPLIT}{count}{turns}{tail}"}]

    def read(self, state: Any, text: str) -> Action:
        return read_reply(text, self.clickables(state), self.think)

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition:
        """Take an action. An invalid or impossible one leaves the page as it is and uses up a step.

        The next prompt shows the page, so only the last step and one without effect have an
        observation.
        """
        query = (action.argument or "") if action.kind == "search" else ""
        name = self.clickables(state)[action.move[0]] if action.move else ""
        after, reward = await self.go(state, query, name) if query or name else (state, None)
        block = _BLOCK.search(action.text.lower())
        past = (*state.past, (self.page(state), block[1].strip() if block else "none"))
        past = past[-self.history :] if self.history else ()
        after = msgspec.structs.replace(after, step=state.step + 1, past=past)
        if reward is None and after.step < self.horizon:
            seen = "" if query or name else "This action does nothing here."
            return Transition(after, seen, False, reward=0.0)
        if reward is None:
            reward, seen = 0.0, "The actions are used up without a purchase."
        else:
            seen = f"The purchase is rewarded with {reward:.3f}."
        success = float(reward == 1)
        outcome = PERFECT * (success if self.outcome == "success" else reward)
        measures = {"success": success, "score": 100 * reward}
        return Transition(after, seen, True, outcome, measures, outcome)

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn:
        """Return what a judge sees: the words of a search are the query, a click is a move, and the
        page is the context."""
        turn = super().judged(task, state, action, step, self.horizon)
        task_and_page = {"question": self.instruction(state), "context": self.page(state)}
        return msgspec.structs.replace(
            turn, think=action.think, query=action.argument, **task_and_page
        )


def read_reply(text: str, clickables: list[str], think: Think) -> Action:
    """Return the action of ``<think> .. </think><action> search[..] or click[..] </action>``. Case
    does not matter, and the first action block counts.

    "search" has ``argument``, the words. "click" has ``move``, the place in ``clickables``, or no
    move if the name cannot be clicked: such an action is readable, but it does nothing. "invalid":
    no block, no thought where one is required, a Chinese character, or another form.
    """
    block, thought = _BLOCK.search(text.lower()), _THOUGHT.search(text)
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


# ---------------------------------------------------------------------------- the embedded shop


class WebShopState(msgspec.Struct, frozen=True):
    """An episode under way. goal: its index in the catalogue named by ``catalogue``."""

    goal: int
    catalogue: str
    place: StorePlace = StorePlace()
    step: int = 0
    past: tuple[tuple[str, str], ...] = ()


class WebShop(Shopping):
    """The embedded shop. Without options it sells 1,000 invented products. The other options are
    those of ``Shopping``.

    split: "products" (no product has training and held-out goals) or "released" (the first 500
    goals are held out). products, attributes, human: paths of files in the original layout.
    human_goals: take the goals that people wrote. pipeline: of spaCy, for products without nouns.
    """

    name = "webshop"

    def __init__(
        self,
        pages: Pages = "text",
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
        super().__init__(pages, horizon, history, outcome, think)
        paired = bool(products) == bool(attributes)
        if not paired or (human and not products) or human_goals != bool(human):
            raise ValueError(
                f"{products = }, {attributes = }, {human = }, {human_goals = }: expected the first"
                " two together, and a file `human` exactly if human_goals is on"
            )
        goods = catalogue()
        if products:
            goods = read_products(products, attributes, human, pipeline)
        self.store = Store(goods)
        self.goals = make_goals(goods, human_goals)
        self.training, self.held_out = parted(self.goals, split)

    def initial(self, task: Task) -> WebShopState:
        return WebShopState(int(task.id.rpartition("-")[2]), self.store.digest)

    def goal(self, state: WebShopState) -> Goal:
        """Return the goal of an episode. Raises DataFault for a state of another catalogue."""
        digest, count = self.store.digest, len(self.goals)
        if state.catalogue != digest or not 0 <= state.goal < count:
            raise DataFault(
                f"webshop: the state belongs to goal {state.goal} of catalogue {state.catalogue!r},"
                f" and this shop has {count} goals of {digest!r}; give the same products,"
                " attributes, human and human_goals"
            )
        return self.goals[state.goal]

    def instruction(self, state: WebShopState) -> str:
        return self.goal(state).instruction

    def page(self, state: WebShopState) -> str:
        return observation(pieces(self.store, state.place), self.rich)

    def clickables(self, state: WebShopState) -> list[str]:
        return list(self.store.clickables(state.place))

    def replies(self, state: WebShopState) -> list[str]:
        """Return a search for the whole instruction, where the page offers a search, and a click on
        every other name."""
        names = self.clickables(state)
        commands = [f"search[{self.instruction(state)}]"] if SEARCH in names else []
        commands += [f"click[{name}]" for name in names if name != SEARCH]
        return [f"<think>any</think><action>{command}</action>" for command in commands]

    def anchor(self, state: WebShopState) -> str:
        """Return the page with the chosen options, which the rendering "text" does not show."""
        return "\n".join([self.page(state), *map(" = ".join, sorted(state.place.options))])

    async def go(
        self, state: WebShopState, query: str, name: str
    ) -> tuple[WebShopState, float | None]:
        store, place = self.store, state.place
        if name == BUY:
            return state, reward(store.products[place.asin], place.chosen, self.goal(state))
        place = store.searched(place, query) if query else store.clicked(place, name)
        return msgspec.structs.replace(state, place=place), None
