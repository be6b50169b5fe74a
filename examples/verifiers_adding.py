"""A taskset of verifiers 0.4 without files and without a download: sums, and a second chance for a
wrong one.

verifiers' own harnesses start a program with uv; the one here talks to the model in the process
that plays the episode.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import openai  # pyright: ignore[reportMissingImports]
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


class Sum(vf.TaskData):
    """What is added."""

    total: int


class SumTask(vf.Task[Sum]):
    """A sum, with the reward 1 for its total in the last reply."""

    @vf.reward
    async def right(self, trace: Any) -> float:
        return float(trace.last_reply.strip() == str(self.data.total))


class Sums(vf.Taskset[SumTask]):
    """Task i asks for i + (i + 1)."""

    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        for i in itertools.count():
            data = Sum(
                prompt=f"What is {i} + {i + 1}? Reply with the number alone.", total=2 * i + 1
            )
            yield SumTask(data, self.config.task)


class AddingChat(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks once more if the reply is wrong."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any,
        data: Any, **more: Any,
    ) -> Any:  # fmt: skip
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            reply = answer.choices[0].message.content or ""
            if reply.strip() == str(data.total):
                break
            messages += [
                {"role": "assistant", "content": reply},
                {"role": "user", "content": "That is wrong."},
            ]
        return vf.ProgramResult(0, "", "")


__all__ = ["AddingChat", "Sums"]
