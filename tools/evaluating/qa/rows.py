"""The rows of a table, from the command line. Each is a player with a method, checked before
anything is started or paid for."""

import argparse
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.base import Engine
from coppice.actors.environments import registry
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.scheduler.config import SchedulerConfig
from coppice.scheduler.growth import strategies
from coppice.scheduler.growth.text import Text
from coppice.tools.evaluating import players
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.endpoint import ChatEngine, ChatText
from coppice.tools.evaluating.qa.methods import How
from coppice.tools.evaluating.qa.retrieval import identity_of
from coppice.wire.messages import LoadRequest

_NO_SEARCH = {"prompt": "search", "forced": "search"}
"""Flags that affect only one method, with that method."""


class RowSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the questions on which a row's result depends, saved as
    OUT/ROW/evaluation.json.

    source: model folder, run or URL. weights: their digest, "" for an endpoint. options: the
    environment's, for the method search. prompts: digest of the method's prompts. budgets: the
    budgets of sets that differ from how.budget. retriever: what answers the method's queries, "" if
    it has none.
    """

    method: str
    player: str
    source: str
    model: str = ""
    version: int = 0
    weights: str = ""
    fields: dict[str, Any] = {}
    options: dict[str, Any]
    prompts: str
    how: How
    budgets: dict[str, int] = {}
    retriever: str
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    max_context: int
    thinking: bool


class Player(msgspec.Struct, frozen=True):
    """The one who answers. name: a short name for the table. make: makes the engine. own: a run's
    scheduler settings, else None."""

    name: str
    described: dict[str, Any]
    text: Text
    make: Callable[[], Engine]
    options: dict[str, Any]
    max_context: int
    own: SchedulerConfig | None = None
    load: LoadRequest | None = None


class _Backend(msgspec.Struct, frozen=True):
    """The only field of RUN/processes/retriever.json that is read."""

    backend: str


class Row(msgspec.Struct, frozen=True):
    """A row of the table. Its folder is OUT/name."""

    name: str
    settings: RowSettings
    player: Player
    environment: SearchQA


def read_rows(flags: argparse.Namespace) -> tuple[list[Row], str]:
    """The rows of the command line, and the retriever as a folder or URL ("" if no row retrieves).

    Raises ValueError, OSError or MemoryError with the remedy.
    """
    asked = flags.method.split(",") if flags.method else ["search"]
    loaded = {name: methods.load(name) for name in asked}
    for name, method in _NO_SEARCH.items():
        if getattr(flags, name) is not None and method not in asked:
            raise ValueError(f"{players.flag(name)} has no effect without the method {method}")
    if flags.topk is not None and not any(module.RETRIEVES for module in loaded.values()):
        raise ValueError("--topk has no effect: none of the methods retrieves")
    everyone = [_of_model(name, flags) for name in flags.model]
    everyone += [_of_run(path, flags) for path in flags.run]
    everyone += [_of_endpoint(flags)] if flags.endpoint else []
    retriever = identity = ""
    if any(module.RETRIEVES for module in loaded.values()):
        retriever = _retriever(flags)
        identity = identity_of(retriever)
    rows = [
        _row(flags, name, player, identity if loaded[name].RETRIEVES else "")
        for player in everyone
        for name in loaded
    ]
    names = [row.name for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"two rows would be named {twice[0]}: measure models of the same name in folders of their own"
        )
    return rows, retriever


def _row(flags: argparse.Namespace, method: str, player: Player, identity: str) -> Row:
    own = player.own if method == "search" else None
    overrides = {"prompt": flags.prompt, "topk": flags.topk}
    options = player.options | {key: value for key, value in overrides.items() if value is not None}
    environment: Any = registry.load("search_qa", options)
    forced = flags.forced if flags.forced is not None else own is None or _forces(own.strategy)
    budgets = dict(flags.budget)
    budget = budgets.pop("", 0) or (own.budget if own else How().budget)
    how = How(environment.topk, budget, forced and method == "search")
    prompts = (
        hashlib.sha256(environment.template.encode()).hexdigest()[:12]
        if method == "search"
        else methods.digest(method)
    )
    settings = RowSettings(
        method=method, options=options if method == "search" else {}, prompts=prompts, how=how, budgets=budgets, retriever=identity,
        **player.described,
        temperature=flags.temperature, top_p=flags.top_p, top_k=flags.top_k,
        max_tokens=flags.max_tokens or (own or SchedulerConfig()).max_action_tokens, max_context=player.max_context,
        thinking=(player.own or SchedulerConfig()).thinking and not flags.no_thinking,
    )  # fmt: skip
    return Row(f"{method}.{player.name}", settings, player, environment)


def _forces(strategy: str) -> bool:
    """Whether the held-out evaluation of a run with this strategy forces an answer, as the one by
    chains does."""
    return strategies.load(strategy).examined_by == "chain"


# ----------------------------------------------------------------------------------------------
# players


def _of_model(name: str, flags: argparse.Namespace) -> Player:
    folder = players.model_folder(name)
    config = ActorsConfig(max_context=flags.max_context or players.MAX_CONTEXT)
    return Player(
        _short(Path(name).name or Path(folder).resolve().name),
        {"player": "model", "source": folder, "weights": players.weights_digest(folder)}, Text(folder),
        lambda: players.local_engine(folder, config, flags), {"prompt": "search_r1", "topk": 3}, config.max_context,
    )  # fmt: skip


def _of_run(path: Path, flags: argparse.Namespace) -> Player:
    run = players.read_run(path, flags.version)
    if run.scheduler.environment != "search_qa":
        raise ValueError(
            f"--run {path} was trained on {run.scheduler.environment!r}: expected a run of 'search_qa'"
        )
    folder = run.actor.model
    # Other methods have longer prompts than the run, so the run's own context is not a limit here.
    room = flags.max_context or max(run.actor.actors.max_context, players.MAX_CONTEXT)
    config = msgspec.structs.replace(run.actor.actors, max_context=room)
    own = run.scheduler.scheduler
    described = {
        "player": "run", "source": str(path.resolve()), "model": folder, "version": run.version, "weights": run.weights,
    }  # fmt: skip
    return Player(
        _short(f"{path.resolve().name}-v{run.version}"), described, Text(folder),
        lambda: players.local_engine(folder, config, flags), run.scheduler.options | own.evaluation.options, room,
        own, run.load,
    )  # fmt: skip


def _of_endpoint(flags: argparse.Namespace) -> Player:
    players.check_url(flags.endpoint)
    endpoint = players.endpoint_of(flags)
    described = {
        "player": "endpoint",
        "source": flags.endpoint,
        "model": endpoint.model,
        "fields": endpoint.fields,
    }
    text: Any = ChatText()
    options = {"prompt": "search_r1", "topk": 3}
    return Player(_short(endpoint.model), described, text, lambda: ChatEngine(endpoint), options, 0)


def _short(name: str) -> str:
    return re.sub(r"[^\w.-]+", "_", name)


def _retriever(flags: argparse.Namespace) -> str:
    """The folder or URL of the retriever: the one of --retriever, else the runs' own, else the
    built-in corpus."""
    if flags.retriever not in (None, "default"):
        return flags.retriever
    files = [run / "processes" / "retriever.json" for run in flags.run]
    backends = {players.saved(file, _Backend).backend for file in files if file.is_file()}
    if flags.retriever is None and backends:
        if len(backends) > 1:
            raise ValueError(
                f"the runs searched in {sorted(backends)}: say with --retriever which one all rows use"
            )
        return backends.pop()
    from coppice.tools.defaults.facts import ensure_facts
    from coppice.tools.defaults.index_corpus import ensure_index
    from coppice.tools.defaults.settings import cache_folder

    cache = cache_folder()
    return str(
        ensure_index(ensure_facts(cache) / "corpus.jsonl", "minilm", cache, flags.threads or 1)
    )
