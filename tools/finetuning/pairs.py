"""Reads the rows of a fine-tuning (--rows), prompts with completions, as examples of token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from coppice.common import jsonl
from coppice.learner.fine_tune import Example
from coppice.scheduler.growth.text import Text


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    completion: str
    prompt: str = ""
    messages: list[_Message] = []
    group: str = ""


def read_pairs(path: Path, text: Text, end: Sequence[int] = ()) -> list[Example]:
    """Read examples, in the chat format, from a JSONL file of {prompt or messages, completion}.
    end: tokens after each completion.

    Raises ValueError if there is no such file, or with the number of a bad line.
    """
    examples = []
    expected = "{prompt, completion} or {messages, completion} (docs/sft.md)"
    for number, pair in jsonl.lines(path, _Pair, expected, "--rows"):
        if bool(pair.prompt) == bool(pair.messages):
            raise ValueError(
                f"{path}:{number}: {'both' if pair.prompt else 'neither'} of prompt and messages; expected {expected}"
            )
        messages = msgspec.to_builtins(pair.messages) or [{"role": "user", "content": pair.prompt}]
        prompt, completion = (
            text.encode(part).tolist() for part in (text.prompt(messages), pair.completion)
        )
        if not completion:
            raise ValueError(
                f"{path}:{number}: the completion is empty: expected a text to learn; remove that line"
            )
        examples.append(Example(prompt + completion + list(end), len(prompt), pair.group))
    if not examples:
        raise ValueError(f"{path} holds no example: expected lines of {expected}")
    return examples
