"""A model's chat template, rendered in a sandbox as the transformers library would render it."""

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.sandbox

_OURS = "messages add_generation_prompt bos_token eos_token raise_exception strftime_now".split()
"""The variables and functions of a template that a caller may not replace."""


class ChatTemplate:
    """The chat template of one model folder. ``available``: whether the folder has one. ``source``:
    its text. ``variables``: the switches that it reads."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer_config.json"
        settings = json.loads(path.read_text()) if path.is_file() else {}
        self._special = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token")}
        source, path = settings.get("chat_template"), folder / "chat_template.jinja"
        if path.is_file():
            source = path.read_text()
        sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        sandbox.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
        sandbox.globals |= {"raise_exception": _raise, "strftime_now": time.strftime}
        self.available = isinstance(source, str)
        self.source = source if isinstance(source, str) else ""
        self._template = sandbox.from_string(self.source)
        read = jinja2.meta.find_undeclared_variables(sandbox.parse(self.source))
        self.variables = read.difference(_OURS)

    def render(self, messages: Sequence[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Return the prompt. variables: the template's switches. Raises ValueError when the
        template refuses the messages or lacks a switch."""
        if unknown := sorted(set(variables) - self.variables):
            raise ValueError(
                f"`chat_template_kwargs`: {unknown}: this model's template reads"
                f" {sorted(self.variables) or 'none'}"
            )
        try:
            return self._template.render(
                **self._special, **variables, messages=list(messages), add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(str(error)) from None


def _content(token: Any) -> str:
    return (token.get("content") if isinstance(token, dict) else token) or ""


def _raise(reason: str) -> NoReturn:
    """Templates call this function to refuse a conversation."""
    raise jinja2.TemplateError(reason)
