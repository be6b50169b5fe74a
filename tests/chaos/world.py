"""The world of a run of chaos: rules as judges, two actors and two ranks, quick updates."""

import asyncio

from coppice.actors.environments.base import Action, Tools, Transition
from coppice.actors.environments.search_qa.environment import SearchQA, SearchState

QUESTIONS = 2
PACE_S = 0.1
"""Seconds of each step of an episode, so that a run of many faults has a small journal."""
SETTINGS = """
data.environment=tests.chaos.world:Searching scheduler.updates=1000000
scheduler.max_action_tokens=8 scheduler.generate_deadline_s=20 scheduler.judge_deadline_s=20
scheduler.watchdog_s=20 scheduler.stall_s=45 actors.count=2 learner.count=2
scheduler.dispatch={heartbeat_s=0.5,dead_after_s=4.0,replace_after_s=8.0}
learner.checkpoint_every=2 learner.collective_timeout_s=30 learner.entropy_coef=0.0
"""


def settings(schedulers: int = 1) -> str:
    shards = f"scheduler.shards={schedulers}"
    return f"{SETTINGS} {shards} scheduler.questions_per_update={QUESTIONS * schedulers}"


class Searching(SearchQA):
    """Every text is a search, so that the retriever is part of every tree."""

    def read(self, state: SearchState | None, text: str) -> Action:
        return Action("search", text, text[:20] or "capital", think="I look it up.")

    async def step(self, state: SearchState, action: Action, tools: Tools) -> Transition:
        await asyncio.sleep(PACE_S)
        return await super().step(state, action, tools)
