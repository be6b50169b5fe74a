"""Rows of a fine-tuning (--rows): prompts and completions as examples of token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from learner.fine_tune import Example
from scheduler.text import Text
from wire import jsonl


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _Pair(msgspec.Struct, forbid_unknown_fields=True):
    completion: str
    prompt: str = ""
    messages: list[_Message] = []
    group: str = ""


def read_pairs(path: Path, text: Text, end: Sequence[int] = ()) -> list[Example]:
    """Examples of a JSONL file (--rows) of {prompt or messages, completion}, in the chat format. end: tokens after each completion.

    Raises ValueError for no file, or with the line.
    """
    examples = []
    expected = "{prompt, completion} or {messages, completion} (docs/sft.md)"
    for number, pair in jsonl.lines(path, _Pair, expected, "--rows"):
        if bool(pair.prompt) == bool(pair.messages):
            raise ValueError(
                f"{path}:{number}: {'both' if pair.prompt else 'neither'} of prompt and messages; expected {expected}"
            )
        messages = msgspec.to_builtins(pair.messages) or [{"role": "user", "content": pair.prompt}]
        prompt, completion = (text.encode(part).tolist() for part in (text.prompt(messages), pair.completion))
        if not completion:
            raise ValueError(f"{path}:{number}: the completion is empty: expected a text to learn; remove that line")
        examples.append(Example(prompt + completion + list(end), len(prompt), pair.group))
    if not examples:
        raise ValueError(f"{path} holds no example: expected lines of {expected}")
    return examples
