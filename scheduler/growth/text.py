"""Text becomes tokens once, when it enters the tree; sampled ids are never tokenized again. This
module never imports torch."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tokenizers

from coppice.common import vision
from coppice.common.chat_template import ChatTemplate
from coppice.common.dialogue import Renderer


class Shown(msgspec.Struct, frozen=True):
    """A part of a prompt: its text, in which the model's placeholder stands for each picture, and
    the pictures in order as PNG bytes."""

    text: str
    pictures: tuple[bytes, ...] = ()


def _embedded(folder: Path) -> int:
    """The rows of the model's embedding, which may be more than its tokenizer has tokens; 0 if
    config.json does not say."""
    try:
        settings = msgspec.json.decode((folder / "config.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return 0
    return settings.get("vocab_size") or settings.get("text_config", {}).get("vocab_size", 0)


class Text:
    """The tokenizer and the chat template of a Hugging Face folder. vocabulary: the rows of the
    model's embedding, 0 if unknown. marks: special tokens that decoding keeps."""

    def __init__(self, folder: str, marks: Sequence[str] = ()):
        self.folder = path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(
                f"{path} has no tokenizer.json: expected a Hugging Face model folder"
            )
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        self._template = ChatTemplate(path)
        self._renderer = Renderer(self._template)
        added = self.tokenizer.get_added_tokens_decoder()
        self._special = {token.content for token in added.values() if token.special}
        self._unsaid = {
            number
            for number, token in added.items()
            if token.special and token.content not in marks
        }
        self.vocabulary = _embedded(path)
        self.vision = vision.Vision.of(folder)

    def encode(self, text: str, pictures: Sequence[tuple[int, bytes]] = ()) -> np.ndarray:
        """int32 [tokens], without added special tokens. pictures: number and PNG bytes for each
        placeholder, in order (``common.vision``)."""
        tokens = np.array(
            self.tokenizer.encode(text, add_special_tokens=False).ids if text else [], np.int32
        )
        if not pictures or self.vision is None:
            return tokens
        at = np.flatnonzero(tokens == self.vision.token)
        if len(at) != len(pictures):
            raise ValueError(
                f"a prompt of {len(pictures)} pictures has {len(at)} placeholders (token {self.vision.token}): the text of the prompt must not"
                " contain the placeholder, and the model's chat template must write one for each picture"
            )
        pieces = np.split(tokens, np.sort(np.concatenate([at, at + 1])))
        sizes = [math.prod(self.vision.grid(png)) for _, png in pictures]
        pieces[1::2] = [
            vision.ids(number, size) for (number, _), size in zip(pictures, sizes, strict=True)
        ]
        return np.concatenate(pieces)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of ``tokens`` without special tokens other than ``marks``."""
        said = [token for token in tokens.tolist() if token not in self._unsaid]
        return self.tokenizer.decode(said, skip_special_tokens=False)

    def check_sight(self) -> None:
        """Raise ValueError if the model cannot read pictures in its chat format."""
        if self.vision is None or not self._template.available:
            raise ValueError(
                f"the environment shows pictures, which {self.folder} cannot read: expected a model of type {' or '.join(vision.FAMILY)} with"
                " a chat template (model.name)"
            )

    def after(self, reply: np.ndarray, messages: Sequence[Mapping[str, Any]]) -> str:
        """What follows a sampled reply, int32 [tokens], where ``messages`` come next, up to where
        the model's next turn begins. What ends a reply is left out if the model has sampled it.
        Raises ValueError if the template does not render these messages by themselves."""
        if not self._template.available:
            return "\n" + self.prompt(messages)
        text = self._renderer.after([dict(message) for message in messages])
        end = self.tokenizer.id_to_token(int(reply[-1])) if len(reply) else None
        return text.removeprefix(end) if end is not None and end in self._special else text

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        thinking: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The messages in the model's chat format, up to where the model's turn begins; plain text
        if the model has no template.

        tools: the functions that may be called. A content may be a text or a list of parts
        (``common.vision.shown``). thinking: False asks a template that knows ``enable_thinking``
        (Qwen3's) for an answer without a thinking block. Raises ValueError for pictures that the
        model cannot read.
        """
        parts = [list(vision.shown([message])) for message in messages]
        if not all(isinstance(part, str) for message in parts for part in message):
            self.check_sight()
            messages = [dict(message) for message in messages]
        else:
            messages = [
                {**m, "content": "".join(texts)} for m, texts in zip(messages, parts, strict=True)
            ]  # pyright: ignore
        if tools or any(
            message.get("tool_calls") or message.get("role") == "tool" for message in messages
        ):
            return self._renderer.whole([dict(message) for message in messages], tools)
        if not self._template.available:
            return "\n".join(message["content"] for message in messages) + "\n"
        switches = (
            {"enable_thinking": thinking} if "enable_thinking" in self._template.variables else {}
        )
        return self._template.render(messages, switches)
