"""An agent is tried before a run starts anything else, so that a missing module costs seconds and
no set-up; ``--try-agent`` plays one whole episode."""

import asyncio
import os
import random

from coppice.actors.environments import registry
from coppice.actors.environments.agents.environment import AgentEnvironment
from coppice.actors.environments.base import Task, Tools
from coppice.actors.environments.task_files import listed, load_tasks
from coppice.common.process import in_subprocess
from coppice.tools.launching.config import Config
from coppice.wire.faults import Fault
from coppice.wire.messages import Passage

PATIENCE_S = 20.0
"""Seconds that an agent has for its first call in a trial. A slower one is no fault: a run gives it
``data.options.seconds``."""
TASKS = 3
"""An agent may ask nothing about a task; one that asks nothing about the first few is refused."""
DEFAULT = Task(
    "trial",
    QUESTION := "What is the capital of Peru?",
    ["Lima"],
    row={"question": QUESTION, "golden_answers": ["Lima"]},
)
"""Stands for the default questions, which the set-up makes."""


class _Rehearsal(Tools):
    """The services of a trial: passages that say what they are."""

    rng = random.Random(0)

    async def retrieve(self, query: str, topk: int) -> list[Passage]:
        said = f"No corpus is searched in a trial: {query}"
        return [Passage(str(i), "A trial", said, 0.0) for i in range(topk)]


# an agent's episode has no opponent and no speaker
REHEARSAL = _Rehearsal()  # pyright: ignore[reportAbstractUsage]


def check(config: Config) -> None:
    """Refuse a run whose agent cannot begin, in a process of its own. Raises ValueError, with what
    the agent wrote. A run without an agent passes."""
    if config.data.environment == "agent" and not config.cluster.on:
        in_subprocess(_check, config)


def show(config: Config, reply: str) -> bool:
    """Play one episode on the first task, with ``reply`` in the place of every reply of a policy,
    and print it. Return False if it failed. Raises ValueError if there is no agent."""
    if config.data.environment != "agent":
        remedy = "name one (docs/agents.md)"
        raise ValueError(f"--try-agent has no effect without [data] agent: {remedy}")
    return in_subprocess(_show, config, reply)


def _check(config: Config) -> None:
    for name in config.data.options.get("pass_env", ()):
        if name not in os.environ:
            variable = f"data.options.pass_env names {name!r}, which is not set"
            raise ValueError(f"{variable}: export it, or leave it out")
    asyncio.run(_first_calls(config))


async def _first_calls(config: Config) -> None:
    environment, faults = _agent(config), []
    try:
        for task in _tasks(config):
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await environment.open(environment.initial(task), REHEARSAL)
                return
            except TimeoutError:
                slow = f"the agent has not asked within {PATIENCE_S:g} s in a trial"
                print(f"{slow}; the run goes on", flush=True)
                return
            except Fault as fault:
                faults.append(fault)
    finally:
        await environment.close()
    raise ValueError(
        f"data.agent = {environment.run!r}, tried on {len(faults)} tasks: {faults[-1]}. Mend the"
        " agent and try it with --try-agent, which shows all that it writes; what another Python"
        " has installed is there with data.options.python"
    )


def _show(config: Config, reply: str) -> bool:
    return asyncio.run(_episode(config, reply))


async def _episode(config: Config, reply: str) -> bool:
    environment, calls = _agent(config), 0
    try:
        state = await environment.open(environment.initial(_tasks(config)[0]), REHEARSAL)
        messages = list(state.messages)
        while True:
            calls += 1
            offered = f"   tools: {', '.join(state.offered)}" if state.offered else ""
            print(f"call {calls}: {messages[-1]['role']}: {messages[-1].get('content')}{offered}")
            print(f"  reply: {reply}", flush=True)
            step = await environment.step(state, environment.read(state, reply), REHEARSAL)
            if step.done:
                break
            state, messages = step.state, step.messages or list(step.state.messages)
    except Fault as fault:
        print(fault)
        return False
    finally:
        await environment.close()
    reward = "no reward of its own" if step.outcome is None else f"reward {step.outcome:g}"
    print(f"the episode ended after {calls} calls: {step.fault or reward}")
    return not step.fault


def _agent(config: Config) -> AgentEnvironment:
    environment = registry.load(config.data.environment, config.data.options)
    assert isinstance(environment, AgentEnvironment)
    return environment


def _tasks(config: Config) -> list[Task]:
    sources = [source for source in listed(config.data.train) if source != "default"]
    return load_tasks(sources[0], verbatim=True)[0][:TASKS] if sources else [DEFAULT]
