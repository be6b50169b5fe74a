"""``sglang.bench_serving`` against a server that runs already, on requests that were made of it before.

The same as in those requests: the token ids of every prompt, the number of tokens sampled (so many as came back then; the end of the text is
ignored), temperature 1, log-probabilities of the sampled tokens. It takes token ids in no data set of its own, but passes unknown fields of
its "openai" one on in the request's body, where ``input_ids`` takes the place of the chat message that the data set insists on. What the
server says it was given and gave is compared with what was meant.

Not the same: each of a request's samples is a request of its own; they all come at once, while a tree's step waits for the one before, which
leaves a batch thinner than SGLang could fill it; no policy version salts the cache, which is empty at the start. Answers come whole, as ours
do. Its time ends with a question to the server for its state (milliseconds); loading, tokenizing and a pause of a second stand before it.
"""

import asyncio
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

LONGEST_S = 150.0
"""Of the whole process."""
_SHOWN = 3000
"""Characters of its output that an error quotes."""


class Server(msgspec.Struct, frozen=True):
    """Where it runs and what it serves. python, environment: of the process that measures. model: a folder with the tokenizer."""

    url: str
    key: str
    model: Path
    python: str
    environment: dict[str, str] = {}


class Wanted(msgspec.Struct, frozen=True):
    """One sample: its prompt, int32 [prompt], and how many tokens."""

    prompt: np.ndarray
    tokens: int


async def tokens_s(server: Server, wanted: Sequence[Wanted]) -> float:
    """Sampled tokens a second. Raises RuntimeError with the end of its output when it fails, or does other work than was asked for."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = [
            {"messages": [{"role": "user", "content": "-"}], "max_tokens": one.tokens, "input_ids": one.prompt.tolist()}
            for one in wanted
        ]
        (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        said = await _run(server, _command(server, _tokenizer(server.model, folder), folder, len(rows)), folder)
        try:
            found = json.loads((folder / "found.jsonl").read_text())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"sglang.bench_serving left no result ({error}):\n{said}") from None
    _check(found, wanted, said)
    return float(found["output_throughput"])


def _tokenizer(model: Path, folder: Path) -> Path:
    """The model's tokenizer with a chat template, which not every model has; nothing that it renders is sent."""
    made = folder / "tokenizer"
    made.mkdir()
    for path in [*model.glob("token*"), *model.glob("special*"), model / "config.json"]:
        (made / path.name).write_bytes(path.read_bytes())
    (made / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return made


def _command(server: Server, tokenizer: Path, folder: Path, count: int) -> list[str]:
    # A request to warm up would be the chat message alone, which /generate does not take.
    settings = {
        "backend": "sglang", "base-url": server.url, "model": tokenizer, "tokenizer": tokenizer,
        "dataset-name": "openai", "dataset-path": folder / "requests.jsonl", "num-prompts": count,
        "temperature": 1.0, "warmup-requests": 0, "output-file": folder / "found.jsonl",
    }  # fmt: skip
    switches = ["--return-logprob", "--disable-stream", "--disable-tqdm", "--flush-cache", "--output-details"]
    named = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [server.python, "-m", "sglang.bench_serving", *named, *switches]


async def _run(server: Server, command: list[str], folder: Path) -> str:
    """The end of its output. The key travels in a variable: command lines can be read by all."""
    environment = os.environ | server.environment | {"OPENAI_API_KEY": server.key, "PYTHONUNBUFFERED": "1"}
    printed = folder / "printed"
    with printed.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *command, cwd=folder, env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=out
        )
        try:
            status = await asyncio.wait_for(process.wait(), LONGEST_S)
        except TimeoutError:
            status = f"after {LONGEST_S:g} s, when it was ended"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    said = printed.read_text(errors="replace").replace(server.key or "\0", "(key)")[-_SHOWN:]
    if status != 0:
        raise RuntimeError(f"sglang.bench_serving failed (status {status}):\n{said}")
    return said


def _check(found: dict[str, Any], wanted: Sequence[Wanted], said: str) -> None:
    """Every request was answered, for the prompt and with the tokens that were meant. Raises RuntimeError."""
    if errors := [error for error in found["errors"] if error]:
        raise RuntimeError(
            f"sglang.bench_serving: {len(errors)} of {len(wanted)} requests failed, the first: {errors[0][-_SHOWN:]}"
        )
    for what, got, expected in (
        ("prompt lengths", found["input_lens"], [len(one.prompt) for one in wanted]),
        ("sampled tokens", found["output_lens"], [one.tokens for one in wanted]),
    ):
        if got != expected:
            raise RuntimeError(
                f"sglang.bench_serving: {what} {got[:8]}.. (in all {sum(got)}), expected {expected[:8]}.. ({sum(expected)}):"
                f" is it the one of sglang 0.5.23?\n{said}"
            )
