"""What episodes of the embedded shop and of a server's shop share: prompts, replies, the horizon
and the outcome."""

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
from coppice.actors.environments.webshop.replies import Think, command_of, read_reply
from coppice.actors.environments.webshop.shop import SEARCH
from coppice.common.numbers import Count, Natural
from coppice.wire.messages import JudgedTurn

PROMPT = (Path(__file__).parent.parent / "prompts" / "webshop.txt").read_text().strip()
PERFECT = 10.0
"""The outcome of a perfect purchase."""
LONGEST_PROMPT = 13_000
"""The characters of a prompt above which earlier turns are left out."""
Pages = Literal["text", "text_rich"]
Outcome = Literal["success", "score"]


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

    def __init__(
        self, pages: Pages, horizon: Count, history: Natural, outcome: Outcome, think: Think
    ):
        self.rich, self.horizon, self.history = pages == "text_rich", horizon, history
        self.outcome: Outcome = outcome
        self.think: Think = think
        self.training: Sequence[int] = ()
        self.held_out: Sequence[int] = ()

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

    # ------------------------------------------------------------------------------------------ the
    # contract

    def task(self, seed: int) -> Task:
        """Return the task of ``seed``. Seeds of held-out tasks give held-out goals, and consecutive
        ones give different goals."""
        goals = self.held_out if seed in HELD_OUT_SEEDS else self.training
        number = goals[
            (seed - HELD_OUT_SEEDS.start if seed in HELD_OUT_SEEDS else seed) % len(goals)
        ]
        return Task(f"{self.name}-{number}", seed=seed)

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
        """Return the action of a reply (``replies.read_reply``)."""
        return read_reply(text, self.clickables(state), self.think)

    async def step(self, state: Any, action: Action, tools: Tools) -> Transition:
        """Take an action. An invalid or impossible one leaves the page as it is and uses up a step.

        The next prompt shows the page, so only the last step and one without effect have an
        observation.
        """
        name = (
            self.clickables(state)[action.move[0]] if action.kind == "click" and action.move else ""
        )
        query = (action.query or "") if action.kind == "search" else ""
        after, reward = await self.go(state, query, name) if query or name else (state, None)
        past = (
            (*state.past, (self.page(state), command_of(action.text)))[-self.history :]
            if self.history
            else ()
        )
        after = msgspec.structs.replace(after, step=state.step + 1, past=past)
        if reward is not None:
            outcome = PERFECT * (float(reward == 1) if self.outcome == "success" else reward)
            measures = {"success": float(reward == 1), "score": 100 * reward}
            return Transition(
                after,
                f"The purchase is rewarded with {reward:.3f}.",
                True,
                outcome,
                measures,
                outcome,
            )
        if after.step >= self.horizon:
            nothing = {"success": 0.0, "score": 0.0}
            return Transition(
                after, "The actions are used up without a purchase.", True, 0.0, nothing, 0.0
            )
        return Transition(
            after, "" if query or name else "This action does nothing here.", False, reward=0.0
        )

    def judged(self, task: Task, state: Any, action: Action, step: int, budget: int) -> JudgedTurn:
        """Return what a judge sees: the words of a search are the query, a click is a move, and the
        page is the context."""
        turn = super().judged(task, state, action, step, self.horizon)
        question, page = self.instruction(state), self.page(state)
        return msgspec.structs.replace(
            turn, question=question, think=action.think, query=action.query, context=page
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
    return (
        "\n".join(
            [*lines, f"Current page: {page}", "Actions:", *(f"'{action}'," for action in offered)]
        )
        + "\n"
    )
