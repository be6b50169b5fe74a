"""The set-up of a run: model, data, index and warm start. Each is made once and cached, with
progress lines. This module imports torch."""

import fcntl
import os
from pathlib import Path

import msgspec

from coppice.actors.environments import registry
from coppice.actors.environments.agents.environment import AgentEnvironment
from coppice.actors.environments.base import POLICY
from coppice.actors.environments.bfcl.environment import Bfcl
from coppice.actors.environments.game import Game
from coppice.actors.environments.others.mutable import Mutable
from coppice.actors.environments.search_qa.environment import SearchQA
from coppice.actors.environments.task_files import listed
from coppice.common.vision import context_of
from coppice.learner.model.memory import model_shape
from coppice.scheduler.evaluation.evaluation import lists_replies
from coppice.tools.defaults import search_play, tiny
from coppice.tools.defaults.facts import ensure_facts
from coppice.tools.defaults.index_corpus import ensure_index
from coppice.tools.defaults.legal_play import ensure_legal_play
from coppice.tools.defaults.models import DEFAULT, check_weights, ensure_model
from coppice.tools.defaults.references import ensure_references
from coppice.tools.defaults.settings import cache_folder
from coppice.tools.defaults.warm_start import ensure_warm_start
from coppice.tools.launching.config import Config
from coppice.tools.launching.settings import Assets, setting


def prepare(config: Config) -> Assets:
    """Make, in this process, every asset that is not cached yet; of two starts at a time one waits
    for the other. Raises FileNotFoundError, ValueError or MemoryError with the remedy."""
    cache = cache_folder()
    held = os.open(next(path for path in cache.parents if path.is_dir()), os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("waiting for the set-up of another start", flush=True)
            fcntl.flock(held, fcntl.LOCK_EX)
        return _all(config, cache)
    finally:
        os.close(held)


def _all(config: Config, cache: Path) -> Assets:
    assets = _prepare(config, ensure_model(config.model.name, cache), cache)
    check_weights(Path(assets.model))  # a warm start's folder is cached too
    most, context = context_of(model_shape(Path(assets.model))), config.actors.max_context
    if context > most:
        limit = f"at most the {most} positions of {config.model.name!r}"
        raise ValueError(f"{setting(config, 'actors.max_context')}: expected {limit}")
    if config.judges.model is None:
        return assets
    try:
        name = config.judges.model.name
        folder = assets.model if name == POLICY else ensure_model(name, cache)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"judges.{error}") from None  # the message begins with "model.name"
    return msgspec.structs.replace(assets, judge_model=str(folder))


def _prepare(config: Config, model: Path, cache: Path) -> Assets:
    environment = registry.load(config.data.environment, config.data.options)
    if config.warm_start.skill and not isinstance(environment, Game | Mutable):
        skill = setting(config, "warm_start.skill")
        raise ValueError(f"{skill}: only a game has good moves; set it to 0")
    if isinstance(environment, SearchQA | AgentEnvironment):
        return _for_questions(config, environment, model, cache)
    options, warm = config.data.options, config.warm_start
    if isinstance(environment, Game | Mutable) and lists_replies(environment):
        model = ensure_legal_play(model, environment, options, warm, cache, config.threads)
        return Assets(str(model), "", "", "")
    if isinstance(environment, Bfcl) and not environment.fresh:
        model = ensure_references(model, environment, options, warm, cache, config.threads)
    elif config.warm_start.steps:
        steps, named = setting(config, "warm_start.steps"), config.data.environment
        raise ValueError(f"{steps}: there is no warm start for {named!r}; set it to 0")
    if environment.searches and not config.retriever.backend:
        indexed = "indexes are built for search_qa and agents alone"
        raise ValueError(
            f"{config.data.environment!r} searches, and {indexed}: set retriever.backend"
        )
    return Assets(str(model), config.data.train, config.data.heldout, config.retriever.backend)


def _for_questions(
    config: Config, environment: SearchQA | AgentEnvironment, model: Path, cache: Path
) -> Assets:
    data, warm, threads = config.data, config.warm_start, config.threads
    encoder = config.retriever.encoder
    read = [*listed(data.train), *listed(data.heldout)]
    read += [data.corpus] if environment.searches else []
    facts = ensure_facts(cache) if "default" in read else None
    train, heldout = _files(data.train, facts, "train"), _files(data.heldout, facts, "heldout")
    retriever = config.retriever.backend if environment.searches else ""
    if environment.searches and not retriever:
        corpus = facts / "corpus.jsonl" if facts and data.corpus == "default" else Path(data.corpus)
        if not corpus.is_file():
            expected = "expected a JSONL file of {id, contents}"
            raise FileNotFoundError(f"data.corpus {str(corpus)!r} does not exist: {expected}")
        retriever = str(ensure_index(corpus, encoder, cache, threads))
    searches = isinstance(environment, SearchQA)
    if config.model.name == (tiny.SEARCH if searches else tiny.AGENT):
        if environment.searches and data.corpus != "default":
            raise ValueError(
                f"{setting(config, 'model.name', 'data.corpus')}: this policy reads the words of"
                f" the default corpus alone: expected {DEFAULT!r} or a model's folder"
            )
        corpus = ensure_facts(cache) / "corpus.jsonl"
        notation = search_play.tags(environment) if searches else search_play.calls()
        model = search_play.ensure_search_play(model, corpus, notation, warm, cache, threads)
    elif warm.steps and not searches:
        raise ValueError(
            f"warm_start.steps = {warm.steps}: agents have a warm start for model.name ="
            f" {tiny.AGENT!r} alone; set it to 0 (coppice sft trains a model on conversations)"
        )
    elif warm.steps:
        assert isinstance(environment, SearchQA)
        sources, index = listed(_files(data.train, facts, "warm")), Path(retriever)
        model = ensure_warm_start(model, sources, index, encoder, environment, warm, cache, threads)
    return Assets(str(model), train, heldout, retriever)


def _files(sources: str | list[str], facts: Path | None, split: str) -> str | list[str]:
    own = str(facts / f"{split}.jsonl") if facts else "default"
    files = [own if source == "default" else source for source in listed(sources)]
    return files[0] if isinstance(sources, str) else files
