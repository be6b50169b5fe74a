"""A scripted SGLang server that an actor starts. One file tells in which order it and the learner
held and released memory."""

import asyncio
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from coppice.common.process import die_with
from coppice.learner.update.trainer import Trainer
from tests.sglang_cpu.scripted import Server

FOLDER = "COPPICE_TEST_TURNS"


def note(what: str, pid: int = 0) -> None:
    with Path(os.environ[FOLDER], "log").open("ab", buffering=0) as file:
        file.write(f"{pid or os.getpid()} {what}\n".encode())


def note_ends() -> None:
    """A process that ended holds nothing, also one that was killed before it could say so."""
    lines = Path(os.environ[FOLDER], "log").read_text().splitlines()
    for pid in {int(line.split()[0]) for line in lines}:
        try:
            ended = psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            ended = True
        if ended:
            note("ends", pid)


def watch(update: Any = Trainer.update) -> None:
    """Note a learner's updates. While the file "gate" is there, each waits before its end."""

    def noted(*arguments: Any) -> Any:
        note_ends()
        note("holds learner")
        metrics = update(*arguments)
        while Path(os.environ[FOLDER], "gate").exists():
            time.sleep(0.02)
        note("releases learner")
        return metrics

    Trainer.update = noted  # pyright: ignore[reportAttributeAccessIssue]


class Child(Server):
    """Its samples are random letters, one after the other."""

    def occupy(self, holds: bool) -> None:
        super().occupy(holds)
        note(f"{'holds' if holds else 'releases'} server")

    async def sample(self, body: dict[str, Any]) -> web.Response:
        several, settings = isinstance(body["rid"], list), body["sampling_params"]
        each = [
            self.letters(one["max_new_tokens"]) for one in (settings if several else [settings])
        ]
        answers = await asyncio.gather(*each)
        return web.json_response(answers if several else answers[0])

    async def letters(self, count: int) -> dict[str, Any]:
        tokens = list[int]()
        for _ in range(count):
            await self.going.wait()
            tokens.append(random.randrange(97, 123) if self.holds and not self.fatal else -1)
            await asyncio.sleep(0.002)
        meta: dict[str, Any] = {"weight_version": self.named, "prompt_tokens": 3}
        meta["output_token_logprobs"] = [[-5.5, token, None] for token in tokens]
        return {"output_ids": tokens, "meta_info": meta | {"finish_reason": {"type": "length"}}}


async def main() -> None:
    server, end = Child(), asyncio.Event()
    server.port = json.load(sys.stdin)["port"]
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)
    await server.start()
    await end.wait()
    note("releases server")


if __name__ == "__main__":
    die_with(os.getppid())
    if os.getppid() != 1:  # else the actor was gone before that call
        asyncio.run(main())
