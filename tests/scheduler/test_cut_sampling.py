"""Sampling with top-p: what the tree holds for the learner, by a real engine, and what happens with
an engine that does not report it."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.base import OnTokens
from coppice.actors.engines.local import LocalEngine
from coppice.actors.environments.base import Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.common.support import decode
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Node, Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating.in_process import InProcess
from coppice.wire.faults import DataFault
from coppice.wire.messages import GenerateRequest, GenerateResult


class Silent(LocalEngine):
    """An engine that does not report what it left."""

    async def generate(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, request: GenerateRequest, on_tokens: OnTokens | None = None
    ) -> GenerateResult:
        result = await super().generate(request, on_tokens)
        return msgspec.structs.replace(
            result,
            samples=[msgspec.structs.replace(sample, support=None) for sample in result.samples],
        )


async def actions(
    folder: Path,
    llama: Path,
    split: str = "train",
    kind: type[LocalEngine] = LocalEngine,
    **sampling: float,
) -> list[Node]:
    """Two candidates of one step, as they come back from the journal."""
    services: Any = InProcess(kind(str(llama), ActorsConfig(dtype="float32", max_context=512)), [])
    settings = SchedulerConfig(max_action_tokens=12, **sampling)  # pyright: ignore[reportArgumentType]
    journal = Journal(folder / "journal.sqlite")
    runtime = Runtime(
        services, journal, Text(str(llama)), SearchQA("short"), settings, Counter(), lambda *_: None
    )
    tree = Tree(0, "t", split)
    context = Context(runtime, Task("t", "Who?", ["me"]), tree, random.Random(0))
    await services.start()
    try:
        await context.plant()
        journal.start_tree(tree, 0, 0)
        context.save(await context.generate(await context.tip(), 2))
    finally:
        await services.close()
    (row,) = journal.trees()
    return [node for node in journal.tree(row).nodes.values() if node.kind == "action"]


async def test_trained_actions_keep_what_top_p_left(tmp_path: Path, llama: Path) -> None:
    for node in await actions(tmp_path, llama, top_p=0.8, top_k=9):
        support = decode(node.travels({}).support, len(node.tokens))
        assert support is not None
        assert support.has(node.tokens).all()
        assert support.counts.max() <= 9


async def test_an_engine_that_reports_no_support_is_refused(tmp_path: Path, llama: Path) -> None:
    with pytest.raises(DataFault, match=r"top_p = 0.8 and top_k = 0 .* expected Sample.support"):
        await actions(tmp_path, llama, kind=Silent, top_p=0.8)
    (tmp_path / "held-out").mkdir()
    assert len(await actions(tmp_path / "held-out", llama, "heldout", Silent, top_p=0.8)) == 2
