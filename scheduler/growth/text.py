"""Text becomes tokens once, when it enters the tree. This module never imports torch."""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from coppice.common import vision
from coppice.common.dialogue import ChatTemplate, Renderer
from coppice.common.jsonl import readable

RECENT = 64
"""The texts whose tokens are remembered: what an environment checks is encoded again when it enters
the tree, and prompts repeat their beginnings."""


class Shown(msgspec.Struct, frozen=True):
    """A part of a prompt: text with placeholders, and its pictures as PNG bytes."""

    text: str
    pictures: tuple[bytes, ...] = ()


def _embedded(folder: Path) -> int:
    """The rows of the model's embedding, at least the tokenizer's tokens; 0 if unknown."""
    settings = readable(folder / "config.json", dict[str, Any]) or {}
    return settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size", 0)


class Text:
    """Tokenizer and chat template of a folder. marks: special tokens that decoding keeps."""

    def __init__(self, folder: str, marks: Sequence[str] = ()):
        self.folder = path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            expected = "expected a Hugging Face model folder"
            raise FileNotFoundError(f"{path} has no tokenizer.json: {expected}")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        # one date for all prompts: at midnight what they share would change
        self._template = ChatTemplate(path, time.localtime())
        self._renderer = Renderer(self._template)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        said = self._special - {*marks}
        self._unsaid = {number for number, token in added.items() if token.content in said}
        self.vocabulary = _embedded(path)
        self._tokens = functools.lru_cache(RECENT)(self._tokenized)
        self.vision = vision.Vision.of(folder)

    def encode(self, text: str, pictures: Sequence[tuple[int, bytes]] = ()) -> np.ndarray:
        """int32 [tokens], without special tokens. pictures: number and bytes per placeholder."""
        tokens = self._tokens(text)
        if not pictures or self.vision is None:
            return tokens
        at = np.flatnonzero(tokens == self.vision.token)
        if len(at) != len(pictures):
            raise ValueError(
                f"a prompt of {len(pictures)} pictures has {len(at)} placeholders (token"
                f" {self.vision.token}): the text of the prompt must not contain the placeholder,"
                " and the model's chat template must write one for each picture"
            )
        pieces = np.split(tokens, np.sort(np.concatenate([at, at + 1])))
        pieces[1::2] = [vision.ids(n, math.prod(self.vision.grid(png))) for n, png in pictures]
        return np.concatenate(pieces)

    def _tokenized(self, text: str) -> np.ndarray:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids if text else []
        tokens = np.array(ids, np.int32)
        tokens.flags.writeable = False  # they are shared
        return tokens

    def decode(self, tokens: np.ndarray) -> str:
        """The text of ``tokens`` without special tokens other than ``marks``."""
        said = [token for token in tokens.tolist() if token not in self._unsaid]
        return self.tokenizer.decode(said, skip_special_tokens=False)

    def check_vision(self) -> None:
        """Raise ValueError if the model cannot read pictures in its chat format."""
        if self.vision is None or not self._template.available:
            raise ValueError(
                f"the environment shows pictures, which {self.folder} cannot read: expected a model"
                f" of type {' or '.join(vision.FAMILY)} with a chat template (model.name)"
            )

    def after(
        self, reply: np.ndarray, messages: Sequence[Mapping[str, Any]], thinking: bool = True
    ) -> str:
        """What follows a sampled reply, int32 [tokens], up to the model's next turn, where
        ``messages`` come next. A sampled end of the reply is not written again. thinking: as of
        ``prompt``. Raises ValueError if the template does not render these messages by themselves.
        """
        if not self._template.available:
            return "\n" + self.prompt(messages)
        switches = self._switches(thinking)
        text = self._renderer.after([dict(message) for message in messages], switches=switches)
        end = self.tokenizer.id_to_token(int(reply[-1])) if len(reply) else None
        return text.removeprefix(end) if end is not None and end in self._special else text

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], thinking: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:  # fmt: skip
        """The messages in the model's chat format, up to the model's turn; plain text without a
        template. tools: the functions that may be called. thinking: False asks a template that
        knows ``enable_thinking`` for no thinking block. Raises ValueError for pictures that the
        model cannot read."""
        parts = [list(vision.shown([message])) for message in messages]
        if not all(isinstance(part, str) for message in parts for part in message):
            self.check_vision()
            messages = [dict(message) for message in messages]
        else:
            texts = ["".join(map(str, texts)) for texts in parts]
            messages = [{**m, "content": t} for m, t in zip(messages, texts, strict=True)]
        if not self._template.available:
            plain = self._renderer.plain([dict(message) for message in messages], tools)
            return "\n".join(message["content"] for message in plain) + "\n"
        switches = self._switches(thinking)
        if tools or any(m.get("tool_calls") or m.get("role") == "tool" for m in messages):
            return self._renderer.whole([dict(message) for message in messages], tools, switches)
        return self._template.render(messages, switches)

    def _switches(self, thinking: bool) -> dict[str, bool]:
        knows = "enable_thinking" in self._template.variables
        return {"enable_thinking": thinking} if knows else {}
