"""Any agent as an environment: its calls to the policy are the turns, and whatever it does between
two calls is what the environment does.

An agent is a live process, and a state says how to come back to it: the task and the replies that
it was given. A state whose process is still waiting goes on at once; any other is reached by
replay, in which a new process is given the recorded replies to the requests that it makes again. So
every strategy works that works for games, also those that go back to an earlier turn, for agents
that ask the same when they are told the same.

The tree holds what the policy read and sampled, token by token: of a request that continues a
conversation, only what the agent has added after the sampled reply is rendered; a request that
continues none (another agent inside, a rewritten prompt) begins a branch.
"""

import asyncio
import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from coppice.actors.environments.agents.episode import Ended, Episode, Limits
from coppice.actors.environments.agents.gateway import Gateway
from coppice.actors.environments.agents.nursery import Nursery
from coppice.actors.environments.base import (
    Action,
    Diverged,
    Environment,
    Spent,
    Task,
    Tools,
    Transition,
    TurnedAway,
)
from coppice.actors.serving.asked import Asked
from coppice.actors.serving.protocol import Refused
from coppice.actors.serving.replies import Reply
from coppice.common.dialogue import Message, histories, until
from coppice.common.numbers import Count, NotNegative, Positive
from coppice.common.tool_calls import MARKS, ToolCall, opening, parse
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import JudgedTurn

OVER = "The budget of this episode is used up."
"""What a call beyond the budget is answered. It is no reply of the policy and in no tree."""
SHOWN = 300
"""Characters of a message of the agent that a judge's context shows."""
MOST_OVER = 16
"""Calls beyond the budget, one after the other, after which an agent is ended."""
PATIENCE_S = 5.0
"""Seconds for which a replay waits for a recorded request while another one waits: parallel calls
come in any order."""


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """A request and what its reply took. asked, after: digests of the conversation before and after
    the reply (``common.dialogue.histories``). The reply itself is in the tree, because every later
    state has the exchange."""

    asked: str
    after: str
    spent: Spent = Spent()


class Standing(msgspec.Struct, frozen=True):
    """A state: an agent that waits for a reply. asked: the digest of what it asks. offered: names
    of the tools; must_call: the reply must call one. most: tokens of the reply, 0 if the agent sets
    no limit. stop: strings that end it. messages, tools: the whole request where it begins a
    branch, otherwise empty."""

    task: dict[str, Any]
    record: tuple[Exchange, ...] = ()
    asked: str = ""
    offered: tuple[str, ...] = ()
    must_call: bool = False
    most: int = 0
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.asked, self.record))


class Agent(Environment):
    """run: "module:function", called with the task (id, question, golds, seed, and all columns of
    its row) in a process of its own, or a command line, which finds them as JSON in its stdin and
    in COPPICE_TASK. Both find the policy at OPENAI_BASE_URL with OPENAI_API_KEY, and at
    ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY. horizon: calls of an episode. outcome_judge: the
    judge that gives the outcome, read from the last reply; "" takes the reward that the function
    returns or the agent posts to /v1/episode/reward. retriever: whether it may ask the run's
    retriever, at /v1/retrieve. rewarded: "judge" takes a judge's column "reward", "slate" SLATE's
    composite of its columns think, query and answer. step_rewards: whether the agent posts a reward
    of every reply there, with its response_id and before it asks again; a reply without one is
    unscored. kept: waiting processes that are kept: of more, the one that waits longest is ended,
    and reached again by replay. seconds (without those in which it waits for replies), memory_gib,
    output_mib: limits of a process. family: how the model writes tool calls (``common.tool_calls``).
    open_calls: whether a reply that must call a tool begins with the opening of a call, which the
    policy does not sample. python: runs functions in the place of the run's own Python; it must be
    3.9 or newer, and needs none of the run's packages. pass_env: variables that agents get although
    their names tell of a secret (``common.process.without_secrets``)."""

    name = "agent"
    fresh = False
    marks = MARKS
    verbatim = True
    measured = ("crashed",)
    headline = "return"
    begins_with_prompt = False

    def __init__(
        self,
        run: str,
        horizon: Count = 20,
        outcome_judge: str = "",
        retriever: bool = False,
        rewarded: Literal["judge", "slate"] = "judge",
        step_rewards: bool = False,
        kept: Count = 256,
        seconds: Positive = 600.0,
        memory_gib: NotNegative = 0.0,
        output_mib: Positive = 4.0,
        family: str = "hermes",
        open_calls: bool = False,
        python: str = "",
        pass_env: Sequence[str] = (),
    ):
        plain = ":" in run and not any(character.isspace() for character in run)
        if python and not plain:
            raise ValueError(
                f"python = {python!r} has no effect on the command line {run!r}: name the Python in it"
            )
        if python and shutil.which(python) is None:
            raise ValueError(
                f"python = {python!r}: there is no such program; expected the path of a Python, such as venv/bin/python"
            )
        self.run = run
        self.nursery = Nursery(
            [] if plain else shlex.split(run),
            run if plain else "",
            python or sys.executable,
            pass_env,
        )
        self.horizon, self.outcome_judge, self.family = horizon, outcome_judge, family
        self.searches, self.rewarded_by_judge, self.gives_step_rewards = (
            retriever,
            rewarded == "judge",
            step_rewards,
        )
        self.kept, self.open_calls = kept, open_calls
        self.limits = Limits(seconds, memory_gib, output_mib)
        self.gateway = Gateway()
        self._started: asyncio.Task[None] | None = None
        self._waiting: list[tuple[Standing, Episode, Asked]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.replayed = 0
        """Replies that were given again."""

    def initial(self, task: Task) -> Standing:
        """Return the state before the agent has begun."""
        own = {"id": task.id, "question": task.question, "golds": task.golds, "seed": task.seed}
        return Standing({**task.row, **own})

    async def open(self, state: Standing, tools: Tools) -> Standing:
        """Start the agent, and return the state of its first request. Raises DataFault if it ends
        without one."""
        episode, asked = await self._begun(state, tools)
        first = _standing(state, (), asked, whole=True)
        self._keep(first, episode, asked)
        return first

    def prompt(self, task: Task, state: Standing) -> list[dict[str, Any]]:
        """Return the conversation of a request that begins a branch."""
        return list(state.messages)

    def tools(self, state: Standing) -> list[dict[str, Any]]:
        """Return the tools of a request that begins a branch."""
        return list(state.tools)

    def most(self, state: Standing) -> int:
        """Return the agent's own limit of a reply."""
        return state.most

    def stops(self, state: Standing) -> list[str]:
        """Return the agent's own strings that end a reply. They were sampled, so they are in the
        tree; the agent does not get them."""
        return list(state.stop)

    def beginning(self, state: Standing) -> str:
        """Return how a call begins, if the agent requires one and the run opens it."""
        return opening(self.family, state.offered) if self.open_calls and state.must_call else ""

    def read(self, state: Standing, text: str) -> Action:
        """Return the reply. Its tool calls must be readable and of tools that were offered, and
        there must be one if the agent requires one."""
        parsed = parse(until(text, state.stop), self.family, state.offered)
        invalid = parsed.problem or (state.must_call and not parsed.calls)
        kind = "invalid" if invalid else "search" if parsed.calls else "answer"
        return Action(kind, text, None if parsed.calls else parsed.text)

    async def step(self, state: Standing, action: Action, tools: Tools) -> Transition:
        """Give the agent a reply, and return what it asks next, or how its episode ended."""
        episode, asked = await self._stand(state, tools)
        reply = self._reply(action.text, asked, tools.spent())
        record = (*state.record, Exchange(state.asked, _digest(asked, reply), reply.spent))
        episode.session.check = partial(_check, tools, state, record)
        try:
            episode.answer(asked, reply)
            event = await episode.next()
            reward = episode.session.step_reward
            if isinstance(event, Asked) and len(record) >= self.horizon:
                event = await _told_that_it_is_over(episode)
        except BaseException:
            self._end(episode)
            raise
        if isinstance(event, Ended):
            self._end(episode)
            if event.fault and episode.session.refused:
                raise TurnedAway(f"the agent ended{_refused(episode)} ({event.told})")
            return msgspec.structs.replace(self._ended(state, record, event), reward=reward)
        transition = _asking(state, record, event)
        self._keep(transition.state, episode, event)
        return msgspec.structs.replace(transition, reward=reward)

    async def beside(self, state: Standing) -> AsyncIterator[tuple[str, Transition]]:
        """Yield the other calls of the agent that waits in ``state``, those that wait already and
        those that come, as long as the budget has room."""
        found = next(
            ((episode, asked) for waits, episode, asked in self._waiting if waits == state), None
        )
        if found is None:
            return
        episode, seen = found[0], {found[1].id}
        while len(seen) < self.horizon - len(state.record):
            new = [asked for asked in episode.asked() if asked.id not in seen]
            for asked in new[: self.horizon - len(state.record) - len(seen)]:
                seen.add(asked.id)
                yield asked.id, _asking(state, state.record, asked)
            if episode.over:
                return
            await episode.news()

    def outgrown(self, state: Standing) -> Transition:
        """Return the end of an episode whose conversation has no room: a failure."""
        return Transition(state, "", True, 0.0, {"crashed": 0.0})

    def judged(
        self, task: Task, state: Standing, action: Action, step: int, budget: int
    ) -> JudgedTurn:
        """Return what a judge sees of a reply: a query if it calls tools (the texts among their
        arguments), an answer if it does not."""
        reply = parse(until(action.text, state.stop), self.family, state.offered)
        return JudgedTurn(
            question=task.question or task.id,
            golds=task.golds,
            context="",
            response=action.text,
            step=step,
            budget=budget,
            think=reply.think or (reply.text if reply.calls else ""),
            query=_query(reply.calls) if reply.calls else None,
            answer=None if reply.calls else reply.text.strip(),
            evidence=task.evidence,
        )

    def recalled(
        self, turn: JudgedTurn, state: Standing, before: Sequence[tuple[str, str]]
    ) -> JudgedTurn:
        """Return the turn with the queries and what came back before it, and with the conversation
        as its context."""
        queries = [_query(parse(reply, self.family, state.offered).calls) for reply, _ in before]
        lines = [f"Question: {turn.question}"]
        for reply, seen in before:
            lines += [f"Reply: {reply}", f"Then: {seen.strip()[:SHOWN]}"]
        return msgspec.structs.replace(
            turn,
            context="\n".join(lines),
            past_queries=[query for query in queries if query],
            past_observations=[seen for _, seen in before],
        )

    def measures(self, task: Task, turns: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
        """Return the measures of an episode. Tasks of several hops have a return by hops too."""
        measures = super().measures(task, turns)
        by_hops = (
            {f"return_{task.hops}_hop": measures["return"]}
            if task.evidence and "return" in measures
            else {}
        )
        return measures | by_hops

    # ------------------------------------------------------------------------------------------
    # episodes

    async def _stand(self, state: Standing, tools: Tools) -> tuple[Episode, Asked]:
        """Return an agent that waits in ``state``, or another one that has been brought there."""
        place = next((i for i, (waits, _, _) in enumerate(self._waiting) if waits == state), None)
        if place is not None:
            return self._waiting.pop(place)[1:]
        episode, _ = await self._begun(state, tools)
        try:
            return episode, await self._brought(state, tools, episode)
        except BaseException:
            self._end(episode)
            raise

    async def _brought(self, state: Standing, tools: Tools, episode: Episode) -> Asked:
        """Give a new agent the recorded replies, in whatever order it asks for them, and return its
        request in ``state``. Raises Diverged."""
        left = list(zip(state.record, tools.replies(), strict=False)) if state.record else []
        while True:
            waiting = [
                (histories(asked.messages, asked.tools)[-1], asked) for asked in episode.asked()
            ]
            known = next(
                (
                    (asked, pair)
                    for digest, asked in waiting
                    for pair in left
                    if pair[0].asked == digest
                ),
                None,
            )
            if known is not None:
                asked, (exchange, text) = known
                left.remove((exchange, text))
                self.replayed += 1
                episode.answer(asked, self._reply(text, asked, exchange.spent))
                continue
            here = next((asked for digest, asked in waiting if state.asked in ("", digest)), None)
            if here is not None and not left:
                return here
            await self._patience(episode, bool(waiting), len(left), len(state.record))

    async def _patience(self, episode: Episode, waits: bool, left: int, of: int) -> None:
        """Wait until a replay gets another request. waits: whether one waits that is not recorded.
        left: of ``of`` replies. Raises Diverged."""
        if waits:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await episode.news()
                if not episode.over:
                    return
            where = (
                f"after {of - left} of {of} replies of a replay"
                if left
                else "at the end of a replay"
            )
            raise Diverged(
                f"the agent asks something else {where}: expected one that asks the same when it is told the same"
            )
        if isinstance(event := await episode.next(), Ended):
            raise Diverged(
                f"the agent ended in a replay where it had gone on before ({event.fault or 'without a fault'})"
            )

    def _reply(self, text: str, asked: Asked, spent: Spent) -> Reply:
        kept = until(text, asked.stop)
        ended = next((stop for stop in asked.stop if text.startswith(stop, len(kept))), "")
        parsed = parse(kept, self.family, asked.offered)
        return Reply(parsed.text, parsed.calls, spent, parsed.think, stop=ended)

    async def _begun(self, state: Standing, tools: Tools) -> tuple[Episode, Asked]:
        if self._started is None:
            self._started = asyncio.create_task(self.gateway.start())
        await asyncio.shield(self._started)
        episode = Episode(self.gateway, self.nursery, state.task, self.limits)
        episode.session.check = partial(_check, tools, state, state.record)
        episode.session.count = lambda asked: tools.count(asked.messages, asked.tools)
        if self.searches:
            episode.session.retrieve = tools.retrieve
        try:
            await episode.start()
            event = await episode.next()
        except OSError as error:
            raise InfrastructureFault(
                f"the agent {self.run!r} cannot be started: {error}"
            ) from None
        except BaseException:
            self._end(episode)
            raise
        if isinstance(event, Ended):
            self._end(episode)
            raise DataFault(
                f"the agent ended before it asked the policy{_refused(episode)} ({event.told})"
            )
        return episode, event

    def _ended(self, state: Standing, record: tuple[Exchange, ...], event: Ended) -> Transition:
        after = msgspec.structs.replace(state, record=record, asked="", messages=(), tools=())
        crashed = float(bool(event.fault))
        outcome = 0.0 if crashed else event.reward
        scored = None if self.outcome_judge and not crashed else outcome
        fault = f"{event.told}\n\nIts last output:\n{event.said}" if crashed else ""
        return Transition(after, "", True, scored, {"crashed": crashed}, fault=fault)

    def _keep(self, state: Standing, episode: Episode, asked: Asked) -> None:
        self._waiting.append((state, episode, asked))
        while len(self._waiting) > self.kept:
            self._end(self._waiting.pop(0)[1])

    def _end(self, episode: Episode) -> None:
        closing = asyncio.get_running_loop().create_task(episode.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """End all processes and the gateway."""
        for _, episode, _ in self._waiting:
            self._end(episode)
        self._waiting.clear()
        await asyncio.gather(*self._closing)
        await self.gateway.close()
        await self.nursery.close()


def _check(tools: Tools, before: Standing, record: tuple[Exchange, ...], asked: Asked) -> None:
    """Raise Refused unless the policy can be asked this after the replies of ``record``, and the
    journal can keep it."""
    try:
        tools.check(_asking(before, record, asked))
    # whatever fails, templates and tokenizers too, fails because of this request
    except Exception as error:
        reason = str(error).encode(errors="backslashreplace").decode()
        raise Refused(
            f"the policy cannot be asked this, or the journal cannot keep it: {type(error).__name__}: {reason}"
        ) from error


def _refused(episode: Episode) -> str:
    """What its last call was refused with, "" if it went on."""
    return (
        f" after the gateway had answered {episode.session.refused}"
        if episode.session.refused
        else ""
    )


def _query(calls: Sequence[ToolCall]) -> str:
    """The texts among the arguments of calls, in their order; their JSON if there are none."""
    values = [value for call in calls for value in json.loads(call.arguments).values()]
    return " ".join(value for value in values if isinstance(value, str)) or " ".join(
        call.arguments for call in calls
    )


def _standing(
    before: Standing, record: tuple[Exchange, ...], asked: Asked, whole: bool
) -> Standing:
    request = (tuple(asked.messages), tuple(asked.tools)) if whole else ((), ())
    limits = tuple(asked.offered), asked.must_call, asked.most
    return Standing(
        before.task,
        record,
        histories(asked.messages, asked.tools)[-1],
        *limits,
        *request,
        asked.stop,
    )


def _asking(before: Standing, record: tuple[Exchange, ...], asked: Asked) -> Transition:
    """What a request is after the replies of ``record``: the continuation of one of them, or a
    branch."""
    place, tail = _continued(record, asked)
    return Transition(
        _standing(before, record, asked, place is None), "", False, messages=tail, after=place
    )


def _digest(asked: Asked, reply: Reply) -> str:
    """The digest of a conversation with its reply, as an agent will send it back."""
    calls = [
        {"id": f"reply-{i}", "function": {"name": call.name, "arguments": call.arguments}}
        for i, call in enumerate(reply.calls)
    ]
    message: Message = {
        "role": "assistant",
        "content": reply.text,
        **({"tool_calls": calls} if calls else {}),
    }
    return histories([*asked.messages, message], asked.tools)[-1]


def _continued(record: tuple[Exchange, ...], asked: Asked) -> tuple[int | None, list[Message]]:
    """Return which reply of the record a request continues, and what the agent has added; None and
    nothing if it continues none."""
    after = {exchange.after: place for place, exchange in enumerate(record)}
    digests = histories(asked.messages, asked.tools)
    for length in range(len(asked.messages) - 1, 0, -1):
        if digests[length] in after:
            return after[digests[length]], asked.messages[length:]
    return None, []


async def _told_that_it_is_over(episode: Episode) -> Ended:
    """Answer all further calls that the budget is used up, those that wait at the same time at
    once, until the agent ends."""
    for _ in range(MOST_OVER):
        for asked in episode.asked():
            episode.answer(asked, Reply(OVER))
        event = await episode.next()
        if isinstance(event, Ended):
            return event
    return Ended(None, f"it went on asking {MOST_OVER} times after its budget of calls was used up")
