"""What episodes of the embedded shop and of a server's shop share: prompts, replies, the horizon
and the outcome."""

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
from coppice.actors.environments.webshop.shop import SEARCH
from coppice.common.numbers import Count, Natural
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
    and its states have ``step`` and ``past``.

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
        """Return one user message: the rules and the task, then the earlier turns, the page and its
        actions."""
        head = PROMPT.format(task=self.instruction(state), horizon=self.horizon)
        page, clickables = self.page(state), self.clickables(state)
        tail = turn_text(page, clickables, state.step, state.past)
        if len(head) + len(tail) > LONGEST_PROMPT:
            tail = turn_text(page, clickables, state.step, ())
        return [{"role": "user", "content": f"{head}{SPLIT}{tail}"}]

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
        past = (*state.past, (self.page(state), command_of(action.text)))
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
        return msgspec.structs.replace(
            turn,
            question=self.instruction(state),
            think=action.think,
            query=action.argument,
            context=self.page(state),
        )


def turn_text(
    page: str, clickables: Sequence[str], step: int, past: Sequence[tuple[str, str]]
) -> str:
    """Return the changing part of a prompt: the last turns, the page and the actions that it
    offers."""
    lines = [f"\n\nActions taken: {step}"]
    for number, (seen, said) in enumerate(past, start=step - len(past) + 1):
        lines.append(f"[Observation {number}: {seen}, Action {number}: '{said}']")
    offered = [f"click[{name}]" for name in clickables if name != SEARCH]
    if SEARCH in clickables:
        offered.insert(0, "search[<your query>]")
    lines += [f"Current page: {page}", "Actions:", *(f"'{action}'," for action in offered), ""]
    return "\n".join(lines)


def command_of(text: str) -> str:
    """Return the first action block of a reply in lower case, "none" if there is none."""
    block = _BLOCK.search(text.lower())
    return block[1].strip() if block else "none"


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
    reachable = argument in clickables and argument != "search"
    move = (clickables.index(argument),) if reachable else None
    return Action("click", text, move=move, think=reason)
