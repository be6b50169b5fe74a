"""The small worlds of whole runs: a tiny random policy, a few tasks, and a config over them. What a
test needs beyond it says at the launch: ``scheduler.updates=5``."""

import json
from pathlib import Path
from typing import Any

from tests import tiny

UPDATES, QUESTIONS = 3, 3
LANDS, TOWNS = "Bulgaria Italy Chile Japan Kenya Cuba", "Sofia Rome Santiago Tokyo Nairobi Havana"
FACTS = dict(zip(LANDS.split(), TOWNS.split(), strict=True))
_CONFIG = """
name = "test"
[model]
name = "{folder}/model"
dtype = "float32"
[data]
{data}
[warm_start]
steps = 0
[scheduler]
updates = {updates}
questions_per_update = {questions}
max_staleness = 1
{scheduler}
[scheduler.evaluation]
questions = 0
[actors]
count = 1
kv_cache_gib = 0.02
[learner]
count = 1
lr = 1e-3
{learner}
lora = {{ rank = 4, alpha = 8.0 }}
"""
_SEARCH = """
train = "{folder}/tasks.jsonl"
heldout = "{folder}/tasks.jsonl"
corpus = "{folder}/corpus.jsonl"
options = {{ prompt = "short", topk = 1 }}
"""
_SLATE = """
strategy_options = { k = 3 }
budget = 2
max_action_tokens = 12
"""
_ALWAYS = "kl_coef = 0.001\nentropy_coef = 0.01"
"""An untrained policy answers nothing right, so rewards alone would teach nothing."""


def search(folder: Path) -> Path:
    """The config of SLATE on questions about capitals; one of the task rows has no gold answer."""
    corpus = [
        {"id": str(i), "contents": f'"{land}"\nCapital: {town}'}
        for i, (land, town) in enumerate(FACTS.items())
    ]
    tasks: list[dict[str, Any]] = [
        {"id": str(i), "question": f"What is the capital of {land}?", "golden_answers": [town]}
        for i, (land, town) in enumerate([*FACTS.items()] * 2)
    ]
    for name, rows in (("corpus", corpus), ("tasks", [*tasks, {"question": "Nobody knows"}])):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    tiny.save(folder / "model")
    return _write(folder, _SEARCH.format(folder=folder), _SLATE, _ALWAYS)


def playing(folder: Path, environment: str, seeing: bool = False, **shape: Any) -> Path:
    """The config of a world that makes its own tasks. seeing: with a policy that reads pictures.
    shape: values of the policy's configuration."""
    if seeing:
        tiny.save_vision(folder / "model")
    else:
        tiny.save(folder / "model", **shape)
    return _write(folder, f'environment = "{environment}"')


def _write(folder: Path, data: str, scheduler: str = "", learner: str = "kl_coef = 0.0") -> Path:
    path = folder / "config.toml"
    parts = {"data": data, "scheduler": scheduler, "learner": learner}
    counts = {"updates": UPDATES, "questions": QUESTIONS}
    path.write_text(_CONFIG.format(folder=folder, **parts, **counts))
    return path
