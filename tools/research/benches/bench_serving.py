"""Runs ``sglang.bench_serving`` against a running server, on requests that the server has answered before.

The same as before are the token ids of every prompt, the number of sampled tokens (as many as came back then; the end of the text is
ignored), temperature 1, and the log-probabilities of the sampled tokens. bench_serving has no data set of token ids, but passes unknown
fields of its "openai" data set on in the request's body, where ``input_ids`` replaces the chat message that this data set requires. The
numbers of tokens that the server reports are compared with the intended ones.

There are three differences. Each sample is a request of its own. All requests come at once, while a step of a tree waits for the step before
and so leaves batches smaller than SGLang could run. No policy version salts the cache. The cache is empty at the start, and answers are whole.
The measured time ends with a query of the server's state (milliseconds) and begins after loading, tokenizing and a pause of one second.
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
"""Seconds after which the whole process is killed."""
_SHOWN = 3000
"""Characters of the process's output that an error quotes."""


class Server(msgspec.Struct, frozen=True):
    """A running server. model: a folder with its tokenizer. python, environment: interpreter and variables of the measuring process."""

    url: str
    key: str
    model: Path
    python: str
    environment: dict[str, str] = {}


class Wanted(msgspec.Struct, frozen=True):
    """One sample: its prompt, int32 [prompt], and its number of tokens."""

    prompt: np.ndarray
    tokens: int


async def tokens_s(server: Server, wanted: Sequence[Wanted]) -> float:
    """Return the sampled tokens per second. Raises RuntimeError, with the end of the output, if bench_serving fails or does other work."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        rows = [
            {"messages": [{"role": "user", "content": "-"}], "max_tokens": one.tokens, "input_ids": one.prompt.tolist()}
            for one in wanted
        ]
        (folder / "requests.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        output = await _run(server, _command(server, _tokenizer(server.model, folder), folder, len(rows)), folder)
        try:
            result = json.loads((folder / "found.jsonl").read_text())
        except (OSError, ValueError) as error:
            raise RuntimeError(f"sglang.bench_serving left no result ({error}):\n{output}") from None
    _check(result, wanted, output)
    return float(result["output_throughput"])


def _tokenizer(model: Path, folder: Path) -> Path:
    """Copy the model's tokenizer and add a chat template, which not every model has. Nothing that the template renders is sent."""
    copy = folder / "tokenizer"
    copy.mkdir()
    for path in [*model.glob("token*"), *model.glob("special*"), model / "config.json"]:
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    return copy


def _command(server: Server, tokenizer: Path, folder: Path, count: int) -> list[str]:
    # There are no warm-up requests: they would hold the chat message alone, which /generate does not accept.
    settings = {
        "backend": "sglang", "base-url": server.url, "model": tokenizer, "tokenizer": tokenizer,
        "dataset-name": "openai", "dataset-path": folder / "requests.jsonl", "num-prompts": count,
        "temperature": 1.0, "warmup-requests": 0, "output-file": folder / "found.jsonl",
    }  # fmt: skip
    switches = ["--return-logprob", "--disable-stream", "--disable-tqdm", "--flush-cache", "--output-details"]
    named = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [server.python, "-m", "sglang.bench_serving", *named, *switches]


async def _run(server: Server, command: list[str], folder: Path) -> str:
    """Run the command and return the end of its output. The key is passed in a variable, because everyone can read command lines."""
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
    output = printed.read_text(errors="replace").replace(server.key or "\0", "(key)")[-_SHOWN:]
    if status != 0:
        raise RuntimeError(f"sglang.bench_serving failed (status {status}):\n{output}")
    return output


def _check(result: dict[str, Any], wanted: Sequence[Wanted], output: str) -> None:
    """Raises RuntimeError unless every request was answered with the intended numbers of prompt tokens and sampled tokens."""
    if errors := [error for error in result["errors"] if error]:
        raise RuntimeError(
            f"sglang.bench_serving: {len(errors)} of {len(wanted)} requests failed, the first: {errors[0][-_SHOWN:]}"
        )
    for quantity, got, expected in (
        ("prompt lengths", result["input_lens"], [len(one.prompt) for one in wanted]),
        ("sampled tokens", result["output_lens"], [one.tokens for one in wanted]),
    ):
        if got != expected:
            raise RuntimeError(
                f"sglang.bench_serving: {quantity} {got[:8]}.. (in all {sum(got)}), expected {expected[:8]}.. ({sum(expected)}):"
                f" is it the one of sglang 0.5.23?\n{output}"
            )
