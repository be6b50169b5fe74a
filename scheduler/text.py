"""Text becomes tokens once, when it enters the tree; sampled ids are never tokenized again. This module never imports torch."""

from pathlib import Path

import numpy as np
import tokenizers

from wire.chat_template import ChatTemplate


class Text:
    """The tokenizer and the chat template of a Hugging Face folder."""

    def __init__(self, folder: str):
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{path} has no tokenizer.json: expected a Hugging Face model folder")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        self._template = ChatTemplate(path)

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens], without added special tokens."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of ``tokens`` without special tokens."""
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def prompt(self, messages: list[dict[str, str]], thinking: bool = True) -> str:
        """The messages in the model's chat format, up to where the model's turn begins; plain text if the model has no template.

        thinking: False asks a template that knows ``enable_thinking`` (Qwen3's) for an answer without a thinking block.
        """
        if not self._template.available:
            return "\n".join(message["content"] for message in messages) + "\n"
        switches = {"enable_thinking": thinking} if "enable_thinking" in self._template.variables else {}
        return self._template.render(messages, switches)
