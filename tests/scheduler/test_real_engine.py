"""A context over a real engine: replies in text, and an engine that does not say what top-p left."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.actors.environments.base import SPLIT, Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Node, Tree
from coppice.tools.evaluating.in_process import InProcess
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, GenerateResult
from tests.agent_stage import Staged

ASKED = [{"role": "user", "content": f"rules{SPLIT}now"}]


class Silent(LocalEngine):
    """An engine that does not report what it left."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        result = await super().generate(request)
        samples = [msgspec.structs.replace(sample, support=None) for sample in result.samples]
        return msgspec.structs.replace(result, samples=samples)


async def staged(
    folder: Path, llama: Path, kind: type[LocalEngine] = LocalEngine, **settings: Any
) -> Staged:
    """A stage whose policy is the tiny model, with its engine started."""
    engine = kind(str(llama), ActorsConfig(dtype="float32", max_context=512))
    services, task = InProcess(engine, []), Task("t", "Who?", ["me"])
    chosen = SchedulerConfig(max_action_tokens=12, **settings)
    world = Text(str(llama)), services, SearchQA("short"), task, chosen
    await services.start()
    return Staged(folder / f"journal-{random.getrandbits(60)}", *world)


async def test_the_policy_replies_as_its_seed_says(tmp_path: Path, llama: Path) -> None:
    stage = await staged(tmp_path, llama, temperature=0.9)
    tools = [stage.anew(seed=seed).services for seed in (1, 1, 2)]
    replies = [await each.say("policy", ASKED, 12, []) for each in tools]
    assert replies[0] == replies[1] != replies[2]
    assert not stage.tree.nodes
    assert stage.counts["spoken_replies"] == 3
    assert 0 < stage.counts["generated_tokens"] <= 36
    stop = replies[0][3]
    cut = await stage.anew(seed=1).services.say("policy", ASKED, 12, [stop])
    assert cut == replies[0][: replies[0].index(stop)]
    await stage.services.close()


async def actions(stage: Staged, split: str = "train") -> list[Node]:
    """Two candidates of one step, as they come back from the journal."""
    tree = Tree(1, "t", split)
    context = stage.anew(tree)
    try:
        await context.plant()
        stage.journal.start_tree(tree, 1, 0)
        context.save(await context.generate(await context.tip(), 2))
    finally:
        await stage.services.close()
    (row,) = stage.journal.trees("id=1")
    return [node for node in stage.journal.tree(row).nodes.values() if node.kind == "action"]


async def test_an_engine_that_reports_no_support_is_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(DataFault, match=r"top_p = 0.8 and top_k = 0 .* expected Sample.support"):
        await actions(await staged(tmp_path, llama, Silent, top_p=0.8))
    assert len(await actions(await staged(tmp_path, llama, Silent, top_p=0.8), "heldout")) == 2
