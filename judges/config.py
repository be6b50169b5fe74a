"""Settings of the judges and the retriever."""

from typing import Any

import msgspec

from coppice.common.numbers import Count, Natural, Positive

SERVED = "served"
"""An endpoint with this url asks the model of [judges.model]."""


class JudgeModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [judges.model]: a model that the run serves to its own judges, over the OpenAI
    protocol on the loopback."""

    name: str = "smollm2-135m"
    """A name as in [model], or "policy" for a frozen copy of the run's first policy."""
    threads: Count = 1
    """Compute threads."""
    max_context: Count = 4096
    """Tokens of prompt and reply."""
    max_batch: Count = 8
    """Replies generated together."""
    kv_cache_gib: Positive = 1.0
    """Memory of keys and values, running and cached."""
    wait_s: Positive = 300.0
    """Seconds that judges wait at the start until the model answers."""


class JudgesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [judges]. One process serves judges and speakers, another the built-in opponents."""

    use: dict[str, dict[str, Any]] = msgspec.field(
        default_factory=lambda: {"slate_rules": {}, "exact_match": {}}
    )
    """Constructor options by built-in name or "module:Class"."""
    outside: list[str] = []
    """Names of judges, opponents and speakers that the run needs and ``coppice serve`` serves."""
    model: JudgeModelConfig | None = None
    """The model that an endpoint with the url "served" asks; it has a process of its own."""


def uses_served_model(options: dict[str, Any]) -> bool:
    """Return whether a judge's options name the run's own model."""
    endpoint = options.get("endpoint")
    return isinstance(endpoint, dict) and endpoint.get("url") == SERVED


def with_served_model(options: dict[str, Any], url: str, model: JudgeModelConfig) -> dict[str, Any]:
    """Return a judge's options with the address of the run's own model instead of "served", and
    with defaults that suit that model. Raises ValueError when the endpoint names another model, or
    when its replies may be longer than the model's context."""
    if not uses_served_model(options):
        return options
    defaults = {
        "model": model.name,
        "constrain": "sglang",
        "concurrency": model.max_batch,
        "max_tokens": model.max_context // 4,
        "wait_s": model.wait_s,
    }
    endpoint = defaults | options["endpoint"] | {"url": url}
    limit = endpoint["max_tokens"]
    if (name := endpoint["model"]) != model.name:
        remedy = f"[judges.model] is {model.name!r}: remove endpoint.model"
        raise ValueError(f"endpoint.model = {name!r}: {remedy}")
    if isinstance(limit, int) and limit >= model.max_context:
        context = f"judges.model.max_context = {model.max_context}: raise max_context"
        raise ValueError(f"endpoint.max_tokens = {limit} leaves no room for a prompt in {context}")
    return options | {"endpoint": endpoint}


class RetrieverConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section [retriever] (docs/retrieval.md)."""

    backend: str = ""
    """An index folder, or URLs of Search-R1 servers with commas between them; "" builds an index of
    data.corpus."""
    encoder: str = "minilm"
    """The model of the embeddings: "minilm", a Hugging Face folder or a hub id."""
    threads: Count = 1
    """Compute threads."""
    search: str = ""
    """FAISS's search parameters, such as "nprobe=64"; "" for those of the index."""
    batch: Count = 32
    """Queries that wait are joined into searches of at most this many."""
    cache: Natural = 65536
    """Hot queries whose passages are kept."""
