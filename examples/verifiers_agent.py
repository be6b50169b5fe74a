"""Trains a policy in the environments of verifiers 0.4: copy this file. It plays one episode of a verifiers environment, whose model is the policy.

Install verifiers and the tasksets in a Python of their own, and name it in the run's configuration:

    data.environment = "agent"
    data.options.run = "/path/of/that/python -m examples.verifiers_agent"

The id of a task is TASKSET/INDEX, such as gsm8k-v1/17: a line {"id": "gsm8k-v1/17", "question": ""} of a task file. Modules beside this
file are found as tasksets too (verifiers_adding.py is one). An episode has one reward, so one role may learn: of several, set
``trainable`` to False for the others, as verifiers' own trainer asks.
"""

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils.loaders import (  # pyright: ignore[reportMissingImports]
    load_environment,
    resolve_env_config,
)

sys.path.append(str(Path(__file__).parent))
CONFIG = {"agent": {"runtime": {"type": "subprocess"}}}
"""The environment's configuration beside its taskset: the harness of the role "agent" runs on this machine, not in Prime's cloud."""


async def run(task: dict[str, Any]) -> float:
    """Play the episode of a task and return its reward. Raises RuntimeError if verifiers could not play it, which ends the episode as crashed."""
    taskset, _, index = task["id"].rpartition("/")
    environment = load_environment(resolve_env_config({**CONFIG, "taskset": {"id": taskset}}))
    (chosen,) = environment.taskset.skip(int(index)).take(1)
    gateway = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(chosen, vf.ModelContext(model="policy", client=gateway))
    if not episode.ok:
        raise RuntimeError([*episode.errors, *(error for trace in episode.traces for error in trace.errors)])
    (trace,) = [trace for trace in episode.traces if trace.agent.trainable]
    return trace.reward


def main() -> None:
    """Play the task of stdin and post its reward."""
    reward = asyncio.run(run(json.load(sys.stdin)))
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"reward": reward}).encode()
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/episode/reward", body, headers))


if __name__ == "__main__":
    main()
