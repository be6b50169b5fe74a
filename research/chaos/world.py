"""The small world of a run of chaos: a policy that always searches, rules as judges, two actors and
two ranks, an update in a fraction of a second."""

import asyncio
import json
from pathlib import Path
from typing import Any

from coppice.actors.environments.base import Action, Tools, Transition
from coppice.actors.environments.search_qa.environment import SearchQA, State
from coppice.common.atomic import write_whole
from coppice.tools.defaults.index_corpus import ensure_index
from coppice.tools.defaults.tiny_board import make_tiny_policy
from coppice.tools.launching.assets import Assets

FACTS = {
    "Bulgaria": "Sofia",
    "Italy": "Rome",
    "Chile": "Santiago",
    "Japan": "Tokyo",
    "Kenya": "Nairobi",
    "Cuba": "Havana",
}
QUESTIONS, STALENESS = 2, 1
REPLACE_S = 8.0
PACE_S = 0.1
"""Seconds of each step of an episode, so that a run of many faults has no journal that nobody could
read."""
CONFIG = """
name = "chaos"
[model]
name = "{folder}/model"
dtype = "float32"
[data]
environment = "coppice.research.chaos.world:Searching"
train = "{folder}/tasks.jsonl"
heldout = "{folder}/tasks.jsonl"
corpus = "{folder}/corpus.jsonl"
[data.options]
prompt = "short"
topk = 1
[warm_start]
steps = 0
[scheduler]
strategy_options = {{ k = 3 }}
budget = 2
max_action_tokens = 8
updates = 1000000
questions_per_update = {questions}
shards = {schedulers}
max_staleness = {staleness}
generate_deadline_s = 20
judge_deadline_s = 20
watchdog_s = 20
stall_s = 45
[scheduler.evaluation]
questions = 0
[scheduler.dispatch]
heartbeat_s = 0.5
dead_after_s = 4
replace_after_s = {replace}
[actors]
count = 2
kv_cache_gib = 0.01
[learner]
count = 2
lr = 1e-3
kl_coef = 0.001
checkpoint_every = 2
collective_timeout_s = 30
lora = {{ rank = 4, alpha = 8.0 }}
"""


class Searching(SearchQA):
    """Every text that a policy with random weights writes is a search, so that the retriever is
    part of every tree."""

    def parse(self, text: str) -> Action:
        """Return a search for the text."""
        return Action("search", text, text[:20] or "capital", think="I look it up.")

    async def step(self, state: State, action: Action, tools: Tools) -> Transition:
        """As in every search, a little later."""
        await asyncio.sleep(PACE_S)
        return await super().step(state, action, tools)


def make(folder: Path, schedulers: int = 1) -> Path:
    """Write model, tasks, corpus, index and assets into ``folder``, and return the config of its
    runs."""
    make_tiny_policy(folder / "model", hidden=32, layers=2, heads=4, intermediate=64)
    corpus = [
        {"id": str(i), "contents": f'"{land}"\nCapital: {town}'}
        for i, (land, town) in enumerate(FACTS.items())
    ]
    tasks: list[dict[str, Any]] = [
        {"id": str(i), "question": f"What is the capital of {land}?", "golden_answers": [town]}
        for i, (land, town) in enumerate(FACTS.items())
    ]
    for name, rows in (("corpus", corpus), ("tasks", tasks)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    index = ensure_index(folder / "corpus.jsonl", "minilm", folder / "cache", 1)
    train = str(folder / "tasks.jsonl")
    write_whole(folder / "assets.json", Assets(str(folder / "model"), train, train, str(index)))
    config = folder / "chaos.toml"
    values = {
        "questions": QUESTIONS * schedulers,
        "schedulers": schedulers,
        "staleness": STALENESS,
        "replace": REPLACE_S,
    }
    config.write_text(CONFIG.format(folder=folder, **values))
    return config
