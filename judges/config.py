"""Settings of the judges and the retriever."""

from typing import Any

import msgspec


class JudgesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [judges]. use: built-in name or "module:Class" -> constructor options. One process serves them, another the
    built-in opponents."""

    use: dict[str, dict[str, Any]] = msgspec.field(default_factory=lambda: {"slate_rules": {}, "exact_match": {}})


class RetrieverConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [retriever]. backend: "" builds an index of data.corpus; else an index folder or the URL of a Search-R1 server."""

    backend: str = ""
    encoder: str = "minilm"
    threads: int = 1
