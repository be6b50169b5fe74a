"""The first updates of every config for GPUs, as its learner makes them there, over gloo: with its
sharding, checkpointing, bfloat16, adapters, second models and publishing, and a tiny random model
of its family."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coppice.actors.engines import weights
from coppice.common import vision
from coppice.common.process import free_port
from coppice.learner.config import LearnerProcess
from coppice.learner.main import pack_batch
from coppice.tools.launching import processes
from coppice.tools.launching.config import load
from coppice.tools.launching.settings import Assets
from coppice.wire.messages import Turn
from tests import tiny
from tests.learner.rank_process import Scenario
from tests.learner.test_picture_forests import pictured
from tests.learner.test_ranks import ROOT, run
from tests.updates import episodes, rescored

pytestmark = pytest.mark.slow

ALL = {path.stem: load(path, []) for path in sorted((ROOT / "configs").glob("*.toml"))}
CONFIGS = {name: config for name, config in ALL.items() if config.actors.own_gpus}
FAMILIES = {"Qwen2.5-VL": "qwen2_5_vl", "Qwen2.5": "qwen2", "Qwen3": "qwen3"}
SMALL = "model.dtype=bfloat16 learner.micro_tokens=64 learner.threads=1 learner.lr=1e-2".split()


def written(folder: Path, name: str) -> LearnerProcess:
    path = folder / name / "processes" / "learner.json"
    return msgspec.json.decode(path.read_bytes(), type=LearnerProcess)


def shrunken(folder: Path, name: str) -> LearnerProcess:
    """The learner of a config as the launcher starts it, with a tiny model, at most two ranks and
    minibatches, and few tokens at once."""
    w, full = CONFIGS[name].learner, CONFIGS[name].model.name
    kind = next(kind for begin, kind in FAMILIES.items() if f"/{begin}-" in full)
    model = folder / full.replace("/", "-")
    if kind == "qwen2_5_vl":
        tiny.save_vision(model, kind)
    else:
        tiny.save(model, kind, tie_word_embeddings="7B" not in full)
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).save_pretrained(model)
    few = {"count": min(w.count, 2), "minibatches": min(w.minibatches, 2), "warmup_updates": 0}
    changes = [*SMALL, *(f"learner.{key}={value}" for key, value in few.items())]
    config = load(ROOT / "configs" / f"{name}.toml", changes)
    processes.make(config, Assets(str(model), "T", "H", "I"), folder / name)
    return written(folder, name)


def scored(turn: Turn) -> dict[str, float]:
    return turn.scores | ({"f1": turn.scores["outcome"]} if "outcome" in turn.scores else {})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the versions that each config's ranks published, and their metrics."""
    folder = tmp_path_factory.mktemp("configs")
    for kind, batch in (("pictures", pictured(6, 0)), ("text", episodes(5, 0, trees=2))):
        (folder / kind).write_bytes(pack_batch(rescored(batch, scored)))
    scenarios = dict[str, Scenario]()
    for name in CONFIGS:
        process = shrunken(folder, name)
        kind, count = (
            "pictures" if vision.Vision.of(process.model) else "text",
            process.learner.count,
        )
        scenarios[name] = Scenario(process, kind, count, 2, free_port(), publishes=True)
    return run(folder, scenarios)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_configs_first_updates_are_checked_and_published(ran: Path, name: str) -> None:
    process = written(ran, name)
    codes = json.loads((ran / "codes.json").read_text())
    assert codes[name] == [0] * process.learner.count
    metrics = json.loads((ran / f"{name}-0.metrics").read_text())
    assert metrics["checked"] and metrics["learner/grad_norm"] > 0
    told = json.loads((ran / name / "learner.json").read_text())
    proven = weights.verified(Path(told["path"]), told["digest"])
    if process.learner.lora.rank:
        read = load_file(proven.path)
    else:
        assert proven.changes  # version 2 is what changed since version 1
        model: Any = vision.load(process.model, torch.bfloat16, None)
        weights.apply(model, Path(process.model), proven)
        read = {vision.stored(key): value for key, value in model.named_parameters()}
    for key, value in load_file(ran / f"{name}-0.safetensors").items():
        part, _, of = key.partition("/")
        if part == "policy":
            there = read[vision.stored(of.replace(".default", ""))]
            assert torch.equal(there, value.to(there.dtype)), key
