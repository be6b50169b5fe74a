"""``Context.say``: replies in text of the policy, by a real engine, and of a served speaker."""

import random
from collections import Counter
from pathlib import Path

import msgspec

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.local import LocalEngine
from coppice.actors.environments.base import SPLIT, Task
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.judges.base import Speaker
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth.context import Context
from coppice.scheduler.growth.services import Runtime
from coppice.scheduler.growth.text import Text
from coppice.scheduler.growth.tree import Tree
from coppice.scheduler.ledger.journal import Journal
from coppice.tools.evaluating.in_process import InProcess
from coppice.wire.messages import SpeakRequest

ASKED = [{"role": "user", "content": f"rules{SPLIT}now"}]


class Echo(Speaker):
    """Says back the request."""

    name = "echo"

    async def speak(self, request: SpeakRequest) -> str:
        return msgspec.json.encode(request).decode()


class Stage:
    """A context whose policy is the tiny model in a real engine."""

    def __init__(self, folder: Path, llama: Path, seed: int = 0):
        self.services = InProcess(
            LocalEngine(str(llama), ActorsConfig(dtype="float32", max_context=256)), [Echo()]
        )
        self.counts: Counter[str] = Counter()
        self.settings = SchedulerConfig(temperature=0.9)
        self.runtime = Runtime(
            self.services,  # pyright: ignore[reportArgumentType]
            Journal(folder / f"journal-{seed}"), Text(str(llama)), SearchQA("short"), self.settings, self.counts, lambda *_: None,
        )  # fmt: skip
        self.tree = Tree(0, "t")
        self.context = Context(
            self.runtime, Task("t", "Who?", ["me"]), self.tree, random.Random(seed)
        )


async def test_the_policy_replies_as_its_seed_says(tmp_path: Path, llama: Path) -> None:
    replies: list[str] = []
    for seed in (1, 1, 2):
        folder = tmp_path / str(len(replies))
        folder.mkdir()
        stage = Stage(folder, llama, seed)
        await stage.services.start()
        replies.append(await stage.context.services.say("policy", ASKED, 12, []))
        assert not stage.tree.nodes
        assert stage.counts["spoken_replies"] == 1
        assert 0 < stage.counts["generated_tokens"] <= 12
        await stage.services.close()
    assert replies[0] == replies[1] != replies[2]


async def test_a_stop_string_ends_the_reply(tmp_path: Path, llama: Path) -> None:
    stage = Stage(tmp_path, llama)
    await stage.services.start()
    whole = await stage.context.services.say("policy", ASKED, 12, [])
    stop = whole[3]
    again = Context(stage.runtime, stage.context.task, stage.tree, random.Random(0))
    assert await again.services.say("policy", ASKED, 12, [stop]) == whole[: whole.index(stop)]
    await stage.services.close()


async def test_a_served_speaker_gets_messages_without_the_split(
    tmp_path: Path, llama: Path
) -> None:
    stage = Stage(tmp_path, llama)
    echoed = msgspec.json.decode(
        await stage.context.services.say("echo", ASKED, 5, ["x"]), type=SpeakRequest
    )
    assert echoed.messages == [{"role": "user", "content": "rulesnow"}]
    assert (echoed.max_tokens, echoed.temperature, echoed.stop) == (5, 0.9, ["x"])
    assert ASKED[0]["content"] == f"rules{SPLIT}now"
    assert stage.counts == {"spoken_replies": 1}
