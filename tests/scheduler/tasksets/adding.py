"""A taskset of verifiers: task i asks for i + (i + 1), and once more after a wrong reply."""

import itertools
from collections.abc import Iterator
from typing import Any

import openai  # pyright: ignore[reportMissingImports]
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]


class Sum(vf.TaskData):
    total: int


class SumTask(vf.Task[Sum]):
    @vf.reward
    async def right(self, trace: Any) -> float:
        return float(trace.last_reply.strip() == str(self.data.total))


class Sums(vf.Taskset[SumTask]):
    INFINITE = True

    def load(self) -> Iterator[SumTask]:
        for i in itertools.count():
            yield SumTask(Sum(prompt=f"What is {i} + {i + 1}?", total=2 * i + 1), self.config.task)


class AddingChat(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any,
        data: Any,
    ) -> Any:  # fmt: skip
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages)
            reply = answer.choices[0].message.content or ""
            if reply.strip() == str(data.total):
                break
            messages += [{"role": "assistant", "content": reply}]
            messages += [{"role": "user", "content": "That is wrong."}]
        return vf.ProgramResult(0, "", "")


__all__ = ["AddingChat", "Sums"]
