"""Text to tokens, once, when it enters the tree; sampled ids are never tokenized again. No torch here."""

import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np
import tokenizers


class Text:
    """Tokenizer and chat template of a Hugging Face folder."""

    def __init__(self, folder: str):
        path = Path(folder)
        if not (path / "tokenizer.json").is_file():
            raise FileNotFoundError(f"{path} has no tokenizer.json: expected a Hugging Face model folder")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        settings: dict[str, Any] = {}
        if (path / "tokenizer_config.json").is_file():
            settings = json.loads((path / "tokenizer_config.json").read_text())
        template = settings.get("chat_template")
        if (path / "chat_template.jinja").is_file():
            template = (path / "chat_template.jinja").read_text()
        self._special = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token")}
        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = sandbox.from_string(template) if isinstance(template, str) else None

    def encode(self, text: str) -> np.ndarray:
        """int32 [tokens], nothing added."""
        return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Text without special tokens."""
        return self.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def prompt(self, messages: list[dict[str, str]], thinking: bool = True) -> str:
        """Messages in the model's chat format, open for the model's turn; plain text for a model without template.

        thinking: False asks a template that knows ``enable_thinking`` (Qwen3's) for an answer without a thinking block.
        """
        if self._template is None:
            return "\n".join(message["content"] for message in messages) + "\n"
        return self._template.render(
            messages=messages, add_generation_prompt=True, enable_thinking=thinking, **self._special
        )


def _content(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token or ""
