"""The rows of a table, from the command line. Each is a player with a method, checked before
anything is started or paid for."""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from coppice.actors.environments import registry
from coppice.scheduler.config import UNJUDGED, SchedulerConfig
from coppice.scheduler.growth import strategies
from coppice.tools.evaluating import players
from coppice.tools.evaluating.examination import Row
from coppice.tools.evaluating.in_process import config_of
from coppice.tools.evaluating.players import Player
from coppice.tools.evaluating.qa import methods
from coppice.tools.evaluating.qa.endpoint import ChatEngine, ChatText
from coppice.tools.evaluating.qa.methods import How
from coppice.tools.evaluating.qa.retrieval import identity_of

_OPTIONS = {"prompt": "search_r1", "topk": 3}
"""The environment's options of a player that is no run."""


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


class _Backend(msgspec.Struct, frozen=True):
    backend: str


class _Retriever(msgspec.Struct, frozen=True):
    """The only field of RUN/processes/retriever.json that is read."""

    retriever: _Backend


def read_rows(flags: argparse.Namespace) -> tuple[list[Row], str]:
    """The rows of the command line, and the retriever as a folder or URL ("" if no row retrieves).

    Raises ValueError, OSError or MemoryError with the remedy.
    """
    asked = list(dict.fromkeys((flags.method or "search").split(",")))
    retrieving = {name for name in asked if methods.load(name).retrieves}
    for flag in ("prompt", "forced"):
        if getattr(flags, flag) is not None and "search" not in asked:
            raise ValueError(f"--{flag} has no effect without the method search")
    if flags.topk is not None and not retrieving:
        raise ValueError("--topk has no effect: none of the methods retrieves")
    everyone = [players.of_model(name, flags) for name in flags.model]
    everyone += [_of_run(path, flags) for path in flags.run]
    if flags.endpoint:
        everyone.append(players.of_endpoint(flags, ChatEngine, ChatText))
    retriever = _retriever(flags) if retrieving else ""
    identity = identity_of(retriever) if retrieving else ""
    rows = [
        _row(flags, name, player, identity if name in retrieving else "")
        for player in everyone
        for name in asked
    ]
    names = [row.name for row in rows]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(
            f"two rows would be named {twice[0]}: measure models of the same name in folders of their own"
        )
    return rows, retriever


def _of_run(path: Path, flags: argparse.Namespace) -> Player:
    run = players.read_run(path, flags.version)
    if run.scheduler.environment != "search_qa":
        raise ValueError(
            f"--run {path} was trained on {run.scheduler.environment!r}: expected a run of 'search_qa'"
        )
    # Other methods have longer prompts than the run, so the run's own context is not a limit here.
    return players.of_run(path, run, flags, players.MAX_CONTEXT)


def _row(flags: argparse.Namespace, method: str, player: Player, identity: str) -> Row:
    search, run = method == "search", player.own
    own = run.scheduler if run is not None and search else None
    options = run.options | run.scheduler.evaluation.options if run is not None else _OPTIONS
    overrides = {"prompt": flags.prompt, "topk": flags.topk}
    options = options | {key: value for key, value in overrides.items() if value is not None}
    environment: Any = registry.load("search_qa", options)
    # as the held-out evaluation of a run with this strategy does
    forces = own is None or strategies.load(own.strategy).examined_by == "chain"
    forced = flags.forced if flags.forced is not None else forces
    budgets = dict(flags.budget)
    budget = budgets.pop("", 0) or (own.budget if own else How().budget)
    template = hashlib.sha256(environment.template.encode()).hexdigest()[:12]
    thinking = (run.scheduler if run is not None else SchedulerConfig()).thinking
    settings = RowSettings(
        method=method, options=options if search else {}, prompts=template if search else methods.digest(method),
        how=How(environment.topk, budget, forced and search), budgets=budgets, retriever=identity,
        **player.described,
        temperature=flags.temperature, top_p=flags.top_p, top_k=flags.top_k,
        max_tokens=flags.max_tokens or (own or SchedulerConfig()).max_action_tokens, max_context=player.max_context,
        thinking=thinking and not flags.no_thinking,
    )  # fmt: skip
    config = config_of(settings, UNJUDGED, budget=budget)
    return Row(f"{method}.{player.name}", settings, player, environment, config)


def _retriever(flags: argparse.Namespace) -> str:
    """The folder or URL of the retriever: the one of --retriever, else the runs' own, else the
    built-in corpus."""
    if flags.retriever not in (None, "default"):
        return flags.retriever
    files = [run / "processes" / "retriever.json" for run in flags.run]
    saved = [players.saved(file, _Retriever) for file in files if file.is_file()]
    backends = {one.retriever.backend for one in saved}
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
    corpus = ensure_facts(cache) / "corpus.jsonl"
    return str(ensure_index(corpus, "minilm", cache, flags.threads or 1))
