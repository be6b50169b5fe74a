"""What a run needs before its processes start: model, data, index, warm start; each made once and cached, with progress lines."""

import os
from pathlib import Path

import msgspec

from actors.environments.search_qa import SearchQA
from tools.bootstrap import ROOT
from tools.config import Config
from tools.facts import ensure_facts
from tools.index_corpus import ensure_index
from tools.model import ensure_model
from tools.warm_start import ensure_warm_start


class Assets(msgspec.Struct, frozen=True):
    """Resolved paths. retriever: an index folder or a URL."""

    model: str
    train: str
    heldout: str
    retriever: str


def cache_folder() -> Path:
    """COPPICE_CACHE, or .cache in the checkout."""
    return Path(os.environ.get("COPPICE_CACHE", ROOT / ".cache")).resolve()


def prepare(config: Config) -> Assets:
    """Make or find everything; raises FileNotFoundError, ValueError or MemoryError with the remedy."""
    cache = cache_folder()
    model = ensure_model(config.model.name, cache)
    facts = ensure_facts(cache) if "default" in (config.data.train, config.data.heldout, config.data.corpus) else None
    train, heldout = (
        str(facts / f"{split}.jsonl") if facts is not None and name == "default" else name
        for name, split in ((config.data.train, "train"), (config.data.heldout, "heldout"))
    )
    retriever = config.retriever.backend
    if not retriever:
        corpus = (
            facts / "corpus.jsonl"
            if facts is not None and config.data.corpus == "default"
            else Path(config.data.corpus)
        )
        if not corpus.is_file():
            raise FileNotFoundError(
                f"data.corpus {str(corpus)!r} does not exist: expected a JSONL file of {{id, contents}}"
            )
        retriever = str(ensure_index(corpus, config.retriever.encoder, cache, config.threads))
    if config.warm_start.steps and facts is not None:
        environment = SearchQA(config.data.prompt, config.scheduler.topk, config.scheduler.max_observation_characters)
        index = Path(retriever)
        model = ensure_warm_start(
            model, facts, index, config.retriever.encoder, environment, config.warm_start, cache, config.threads
        )
    return Assets(str(model), train, heldout, retriever)
