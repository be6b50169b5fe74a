"""Trains a policy in the environments of verifiers 0.4: copy this file. It plays one episode of a
verifiers environment, whose model is the policy.

Install verifiers and the tasksets in a Python of their own, and name it in the run's configuration:

    data.environment = "agent"
    data.options.run = "/path/of/that/python -m examples.verifiers_agent"

The id of a task is TASKSET/INDEX, such as gsm8k-v1/17: a line {"id": "gsm8k-v1/17", "question": ""}
of a task file. Modules beside this file are found as tasksets and harnesses too: "--harness
verifiers_chat" talks in this process, where verifiers' own harnesses start a program with uv.

An environment with several roles (a game, a judge) needs to know which one learns, because an
episode has one reward, and where the others ask:

    data.options.run = "/path/of/that/python -m examples.verifiers_agent --learns player0 --others
    http://127.0.0.1:8000/v1 start"

"--learns a,b" has both roles ask the policy. All their replies are trained with the reward of the
first, which is wrong where they play against each other.
"""

import argparse
import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path
from typing import Any

import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.agent import agent_config_fields  # pyright: ignore[reportMissingImports]
from verifiers.v1.utils import loaders  # pyright: ignore[reportMissingImports]

sys.path.append(str(Path(__file__).parent))
OTHERS_KEY = "COPPICE_OTHERS_KEY"
"""Variable with the key of the endpoint of the other roles. A run's agents get it if
``data.options.pass_env = ["COPPICE_OTHERS_KEY"]`` names it."""


def configured(taskset: str, options: argparse.Namespace) -> tuple[Any, list[str]]:
    """Return the configuration of an environment whose roles run on this machine, and the roles
    that learn. Raises SystemExit, which says what is missing."""
    roles = list(agent_config_fields(loaders.resolve_env_config({"taskset": {"id": taskset}})))
    learns = options.learns.split(",") if options.learns else roles
    if (len(learns) > 1 and not options.learns) or not set(learns) <= set(roles):
        known_roles = f"one of the roles of {taskset}, {', '.join(roles)}, or some with commas"
        sys.exit(f"--learns {options.learns}: expected {known_roles}")
    if not options.others and len(learns) < len(roles):
        others = ", ".join(sorted({*roles} - {*learns}))
        sys.exit(f"--learns {options.learns}: expected --others URL MODEL, which answers {others}")
    role: dict[str, Any] = {"runtime": {"type": "subprocess"}}
    if options.harness:
        role["harness"] = {"id": options.harness}
    other: dict[str, Any] = {}
    if options.others:
        os.environ.setdefault(OTHERS_KEY, "none")
        url, model = options.others
        client = {"type": "eval", "base_url": url, "api_key_var": OTHERS_KEY}
        other = {"model": model, "client": client}
    agents = {name: role if name in learns else role | other for name in roles}
    return loaders.resolve_env_config({**agents, "taskset": {"id": taskset}}), learns


async def run(task: dict[str, Any], options: argparse.Namespace) -> float:
    """Play the episode of a task and return its reward. Raises RuntimeError if verifiers could not
    play it, which ends the episode as crashed."""
    # several sources put theirs before an id
    taskset, _, index = task["id"].rpartition("#")[2].rpartition("/")
    config, learns = configured(taskset, options)
    environment = loaders.load_environment(config)
    (chosen,) = environment.taskset.skip(int(index)).take(1)
    gateway = vf.EvalClientConfig(
        base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY"
    )
    model = vf.ModelContext(model="policy", client=gateway)
    async with environment.serving():
        episode = await environment.run_episode(chosen, model)
    if not episode.ok:
        raise RuntimeError(
            [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        )
    traces = episode.traces
    (trace,) = [one for one in traces if len(traces) == 1 or one.agent.name == learns[0]]
    return trace.reward


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    learns = "roles that ask the policy; the first one's reward is the episode's"
    parser.add_argument("--learns", default="", metavar="ROLE[,ROLE]", help=learns)
    others = f"OpenAI-compatible endpoint of the other roles; its key is in {OTHERS_KEY}"
    parser.add_argument("--others", nargs=2, metavar=("URL", "MODEL"), help=others)
    harness = "harness of all roles, instead of those that the environment names"
    parser.add_argument("--harness", default="", metavar="ID", help=harness)
    return parser


def main() -> None:
    """Play the task of stdin and post its reward."""
    options = parser().parse_args()
    reward = asyncio.run(run(json.load(sys.stdin), options))
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"reward": reward}).encode()
    urllib.request.urlopen(
        urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/episode/reward", body, headers)
    )


if __name__ == "__main__":
    main()
