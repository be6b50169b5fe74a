"""Any agent as an environment: its calls to the policy are the turns, and whatever it does between
two calls is what the environment does.

An agent is a live process. A state holds the task and the replies that the agent was given. A state
whose process still waits goes on at once; any other is reached by replay, in which a new process is
given the recorded replies to the requests that it makes again.

Of a request that continues a conversation, only what the agent has added after the sampled reply is
rendered; a request that continues none (another agent inside, a rewritten prompt) begins a branch.
"""

import asyncio
import contextlib
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import msgspec

from coppice.actors.environments import base
from coppice.actors.environments.agents.episode import Ended, Episode, ForkServer
from coppice.actors.environments.agents.gateway import Gateway
from coppice.actors.environments.base import Action, Diverged, Environment, Task, Tools, Transition
from coppice.actors.serving.conversations import Conversation
from coppice.actors.serving.protocol import RequestRefused
from coppice.actors.serving.replies import Reply
from coppice.common.dialogue import Message, histories, until
from coppice.common.numbers import Count, NotNegative, Positive
from coppice.common.tool_calls import MARKS, Parsed, ToolCall, opening, parse
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import JudgedTurn

OVER = "The budget of this episode is used up."
"""The answer to a call beyond the budget. It is no reply of the policy and in no tree."""
SHOWN = 300
"""Characters of an observation that a judge's context shows."""
MOST_OVER = 16
"""The most calls beyond the budget before an agent is ended."""
PATIENCE_S = 5.0
"""Seconds for which a replay waits for a recorded request: parallel calls come in any order."""


class Exchange(msgspec.Struct, frozen=True, array_like=True):
    """A request and its reply, which is in the tree. before, after: digests of the conversation
    without and with the reply."""

    before: str
    after: str
    spent: base.Spent = base.Spent()


class AgentState(msgspec.Struct, frozen=True):
    """An agent that waits for a reply. request: the digest of what it asks. offered, must_call: its
    tools. most: tokens of the reply, 0 for no limit. stop: strings that end it. messages, tools:
    the whole request where it begins a branch."""

    task: dict[str, Any]
    record: tuple[Exchange, ...] = ()
    request: str = msgspec.field(default="", name="asked")
    offered: tuple[str, ...] = ()
    must_call: bool = False
    most: int = 0
    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    stop: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash((self.request, self.record))


class AgentEnvironment(Environment):
    """run: "module:function", called with the task (id, question, golds, seed, and all columns of
    its row) in a process of its own, or a command line, which finds them as JSON in its stdin and
    in COPPICE_TASK. horizon: the most calls of an episode. outcome_judge: judges the last reply; ""
    takes the reward that the function returns or the agent posts. kept: waiting processes; beyond
    them the oldest is ended, and replayed when it is needed. python: runs functions in place of the
    run's own Python; it is 3.9 or newer. The other options stand in docs/agents.md."""

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
            reason = f"has no effect on the command line {run!r}: name the Python in it"
            raise ValueError(f"python = {python!r} {reason}")
        if python and shutil.which(python) is None:
            reason = "there is no such program; expected a path such as venv/bin/python"
            raise ValueError(f"python = {python!r}: {reason}")
        self.run = run
        command, function = ([], run) if plain else (shlex.split(run), "")
        self.fork_server = ForkServer(command, function, python or sys.executable, pass_env)
        self.horizon, self.outcome_judge, self.family = horizon, outcome_judge, family
        self.searches, self.rewarded_by_judge = retriever, rewarded == "judge"
        self.gives_step_rewards, self.kept, self.open_calls = step_rewards, kept, open_calls
        self.limits = seconds, memory_gib, output_mib
        self.gateway = Gateway()
        self._started: asyncio.Task[None] | None = None
        self._waiting: list[tuple[AgentState, Episode, Conversation]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self.replayed = 0
        """The number of replies that were given again in replays."""

    def initial(self, task: Task) -> AgentState:
        """Return the state before the agent has begun."""
        own = {"golds": task.golds, "seed": task.seed}  # unless its row has such columns
        return AgentState(own | task.row | {"id": task.id, "question": task.question})

    async def open(self, state: AgentState, tools: Tools) -> AgentState:
        """Start the agent; return its first request's state. Raises DataFault if it has none."""
        episode, request = await self._begun(state, tools)
        first = _asking(state, (), request).state
        self._keep(first, episode, request)
        return first

    def prompt(self, task: Task, state: AgentState) -> list[dict[str, Any]]:
        return list(state.messages)

    def tools(self, state: AgentState) -> list[dict[str, Any]]:
        return list(state.tools)

    def most(self, state: AgentState) -> int:
        return state.most

    def stops(self, state: AgentState) -> list[str]:
        """Return the agent's own stop strings. They are in the tree, but it does not get them."""
        return list(state.stop)

    def beginning(self, state: AgentState) -> str:
        """Return how a call begins, if the agent requires one and the run opens it."""
        return opening(self.family, state.offered) if self.open_calls and state.must_call else ""

    def read(self, state: AgentState, text: str) -> Action:
        """Return the reply: valid if its calls are readable, offered, and there where required."""
        parsed, _ = self._parsed(text, state)
        invalid = parsed.problem or (state.must_call and not parsed.calls)
        kind = "invalid" if invalid else "search" if parsed.calls else "answer"
        return Action(kind, text, None if parsed.calls else parsed.text)

    async def step(self, state: AgentState, action: Action, tools: Tools) -> Transition:
        """Give the agent a reply, and return what it asks next, or how its episode ended."""
        episode, request = await self._waiting_in(state, tools)
        reply = self._reply(action.text, request, tools.spent())
        record = (*state.record, Exchange(state.request, _digest(request, reply), reply.spent))
        episode.session.check = partial(_check, tools, state, record)
        try:
            episode.answer(request, reply)
            event = await episode.next()
            reward = episode.session.step_reward
            if len(record) >= self.horizon:
                event = await _end_of_budget(episode)
        except BaseException:
            self._end(episode)
            raise
        if isinstance(event, Ended):
            self._end(episode)
            if event.fault and episode.session.refused:
                raise base.TurnedAway(f"the agent ended{_refused(episode)} ({event.told})")
            after = msgspec.structs.replace(state, record=record, request="", messages=(), tools=())
            crashed = {"crashed": float(bool(event.fault))}
            outcome = None if self.outcome_judge else event.reward
            fault = f"{event.told}\n\nIts last output:\n{event.said}" if event.fault else ""
            outcome = 0.0 if event.fault else outcome
            transition = Transition(after, "", True, outcome, crashed, fault=fault)
        else:
            transition = _asking(state, record, event)
            self._keep(transition.state, episode, event)
        return msgspec.structs.replace(transition, reward=reward)

    def judged(
        self, task: Task, state: AgentState, action: Action, step: int, budget: int
    ) -> JudgedTurn:
        """Return what a judge sees: a query (the texts of the calls' arguments) or an answer."""
        reply, _ = self._parsed(action.text, state)
        return msgspec.structs.replace(
            super().judged(task, None, action, step, budget),
            think=reply.think or (reply.text if reply.calls else ""),
            query=_query(reply.calls) if reply.calls else None,
            answer=None if reply.calls else reply.text.strip(),
            evidence=task.evidence,
        )

    def recalled(
        self, turn: JudgedTurn, state: AgentState, before: Sequence[tuple[str, str]]
    ) -> JudgedTurn:
        """Return the turn with the queries and observations before it, and a context."""
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
        if task.evidence and "return" in measures:
            measures[f"return_{task.hops}_hop"] = measures["return"]
        return measures

    async def _waiting_in(self, state: AgentState, tools: Tools) -> tuple[Episode, Conversation]:
        """Return an agent that waits in ``state``, or another one that has been brought there."""
        for place, (waits, episode, request) in enumerate(self._waiting):
            if waits == state:
                del self._waiting[place]
                if not episode.over:
                    return episode, request
                self._end(episode)  # it did not wait for its reply: another one is told it at once
                break
        episode, _ = await self._begun(state, tools)
        try:
            return episode, await self._replay(state, tools, episode)
        except BaseException:
            self._end(episode)
            raise

    async def _replay(self, state: AgentState, tools: Tools, episode: Episode) -> Conversation:
        """Give a new agent the recorded replies; return its next request. Raises Diverged."""
        left = list(zip(state.record, tools.replies(), strict=False)) if state.record else []
        deadline = None  # since the last recorded reply: an agent may ask again and again
        while True:
            waiting = [(_digest(request), request) for request in episode.requests()]
            here = [request for digest, request in waiting if state.request in ("", digest)]
            pairs = ((r, one) for digest, r in waiting for one in left if one[0].before == digest)
            if recorded := next(pairs, None):
                request, (exchange, text) = recorded
                left.remove(recorded[1])
                deadline = None
                self.replayed += 1
                episode.answer(request, self._reply(text, request, exchange.spent))
            elif here and not left:
                return here[0]
            elif waiting:
                deadline = deadline or asyncio.get_running_loop().time() + PATIENCE_S
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(deadline):
                        await episode.news()
                    if not episode.over:
                        continue
                place = f"{len(state.record) - len(left)} of {len(state.record)} replies"
                wish = "expected one that asks the same when it is told the same"
                raise Diverged(f"the agent asks something else after {place} of a replay: {wish}")
            elif isinstance(event := await episode.next(), Ended):
                fault = event.fault or "without a fault"
                raise Diverged(f"the agent ended in a replay where it had gone on before ({fault})")

    def _reply(self, text: str, request: Conversation, spent: base.Spent) -> Reply:
        parsed, ended = self._parsed(text, request)
        return Reply(parsed.text, parsed.calls, spent, parsed.think, ended)

    def _parsed(self, text: str, place: AgentState | Conversation) -> tuple[Parsed, str]:
        """Return a reply up to its stop string, and that string."""
        kept, ended = until(text, place.stop)
        return parse(kept, self.family, place.offered), ended

    async def _begun(self, state: AgentState, tools: Tools) -> tuple[Episode, Conversation]:
        if self._started is None:
            self._started = asyncio.create_task(self.gateway.start())
        await asyncio.shield(self._started)
        episode = Episode(self.gateway, self.fork_server, state.task, *self.limits)
        episode.session.check = partial(_check, tools, state, state.record)
        episode.session.count = lambda request: tools.count(request.messages, request.tools)
        if self.searches:
            episode.session.retrieve = tools.retrieve
        try:
            await episode.start()
            event = await episode.next()
        except OSError as error:
            fault = f"the agent {self.run!r} cannot be started: {error}"
            raise InfrastructureFault(fault) from None
        except BaseException:
            self._end(episode)
            raise
        if isinstance(event, Ended):
            self._end(episode)
            end = f"{_refused(episode)} ({event.told})"
            raise DataFault(f"the agent ended before it asked the policy{end}")
        return episode, event

    def _keep(self, state: AgentState, episode: Episode, request: Conversation) -> None:
        self._waiting.append((state, episode, request))
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
        await self.fork_server.close()


def _check(
    tools: Tools, before: AgentState, record: tuple[Exchange, ...], request: Conversation
) -> None:
    """Raise RequestRefused unless the policy can be asked this and the journal can keep it."""
    try:
        tools.check(_asking(before, record, request))
    # whatever fails, templates and tokenizers too, fails because of this request
    except Exception as error:
        reason = str(error).encode(errors="backslashreplace").decode()
        fault = "the policy cannot be asked this, or the journal cannot keep it"
        raise RequestRefused(f"{fault}: {type(error).__name__}: {reason}") from error


def _refused(episode: Episode) -> str:
    """Say what the agent's last call was refused with, if it was."""
    refused = episode.session.refused
    return f" after the gateway had answered {refused}" if refused else ""


def _query(calls: Sequence[ToolCall]) -> str:
    """The texts among the arguments of calls, in their order; their JSON if there are none."""
    values = [value for call in calls for value in json.loads(call.arguments).values()]
    texts = [value for value in values if isinstance(value, str)]
    return " ".join(texts) or " ".join(call.arguments for call in calls)


def _asking(before: AgentState, record: tuple[Exchange, ...], request: Conversation) -> Transition:
    """Return a request that continues a reply of ``record`` or begins a branch."""
    ends = {exchange.after: place for place, exchange in enumerate(record)}
    digests = histories(request.messages, request.tools)
    lengths = range(len(request.messages) - 1, 0, -1)
    length = next((length for length in lengths if digests[length] in ends), 0)
    wanted = digests[-1], tuple(request.offered), request.must_call, request.most
    whole = ((), ()) if length else (tuple(request.messages), tuple(request.tools))
    state = AgentState(before.task, record, *wanted, *whole, request.stop)
    tail, after = (request.messages[length:], ends[digests[length]]) if length else ([], None)
    return Transition(state, "", False, messages=tail, after=after)


def _digest(request: Conversation, reply: Reply | None = None) -> str:
    """The digest of a conversation, with the reply as an agent will send it back."""
    messages = [*request.messages]
    if reply is not None:
        functions = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
        calls = [{"id": f"reply-{i}", "function": one} for i, one in enumerate(functions)]
        messages.append({"role": "assistant", "content": reply.text, "tool_calls": calls})
    return histories(messages, request.tools)[-1]


async def _end_of_budget(episode: Episode) -> Ended:
    """Answer all further calls that the budget is used up, until the agent ends."""
    for _ in range(MOST_OVER):
        for request in episode.requests():
            episode.answer(request, Reply(OVER))
        if isinstance(event := await episode.next(), Ended):
            return event
    return Ended(None, f"it went on asking {MOST_OVER} times after its budget of calls was used up")
