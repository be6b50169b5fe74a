"""The first updates of every config for GPUs, as its learner makes them there, over gloo: with its
sharding, checkpointing, bfloat16, adapters, second models and publishing, and a tiny random model
of its family."""

import json
import os
import subprocess
import sys
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
from coppice.tools.launching.config import Config, load
from coppice.tools.launching.settings import Assets
from coppice.wire.messages import Turn
from tests import tiny
from tests.learner.rank_process import Scenario
from tests.learner.test_picture_forests import pictured
from tests.updates import episodes, rescored

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SMALL = (
    "model.dtype=bfloat16", "learner.micro_tokens=64", "learner.threads=1", "learner.lr=1e-2",
    "learner.warmup_updates=0",
)  # fmt: skip
RANKS = 2


def configs() -> dict[str, Config]:
    """The configs whose policy a server on GPUs samples from."""
    found = {path.stem: load(path, []) for path in sorted((ROOT / "configs").glob("*.toml"))}
    return {name: config for name, config in found.items() if config.actors.own_gpus}


CONFIGS = configs()


def shrunken(folder: Path, name: str) -> LearnerProcess:
    """The learner of a config as the launcher starts it, with a tiny model, few ranks and few
    tokens at once."""
    config, run = CONFIGS[name], folder / name
    family = {"Qwen2.5-VL": "qwen2_5_vl", "Qwen2.5": "qwen2", "Qwen3": "qwen3"}
    kind = next(kind for begin, kind in family.items() if f"/{begin}-" in config.model.name)
    model = folder / config.model.name.replace("/", "-")
    if not model.exists():
        if kind == "qwen2_5_vl":
            tiny.save_vision(model, kind)
        else:
            tiny.save(model, kind, tie_word_embeddings="7B" not in config.model.name)
            narrow = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
            narrow.save_pretrained(model)
    w = config.learner
    few = {"count": min(w.count, RANKS), "minibatches": min(w.minibatches, 2)}
    changes = [*SMALL, *(f"learner.{key}={value}" for key, value in few.items())]
    small = load(ROOT / "configs" / f"{name}.toml", changes)
    processes.make(small, Assets(str(model), "T", "H", "I"), run)
    return msgspec.json.decode(
        (run / "processes" / "learner.json").read_bytes(), type=LearnerProcess
    )


def scored(turn: Turn) -> dict[str, float]:
    return turn.scores | ({"f1": turn.scores["outcome"]} if "outcome" in turn.scores else {})


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the versions that each config's ranks published, and their metrics."""
    folder = tmp_path_factory.mktemp("configs")
    (folder / "pictures").write_bytes(pack_batch(rescored(pictured(6, 0), scored)))
    (folder / "text").write_bytes(pack_batch(rescored(episodes(5, 0, trees=2), scored)))
    scenarios = dict[str, Scenario]()
    for name in CONFIGS:
        process = shrunken(folder, name)
        batch = "pictures" if vision.Vision.of(process.model) else "text"
        scenarios[name] = Scenario(
            process, batch, process.learner.count, 2, free_port(), publishes=True
        )
    (folder / "scenarios.json").write_bytes(msgspec.json.encode(scenarios))
    place = {
        "MASTER_ADDR": "127.0.0.1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.learner.rank_process", str(folder)]
    subprocess.run(command, env=os.environ | place, check=True, timeout=900, cwd=ROOT)
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_gpu_configs_first_updates_are_checked_and_published(ran: Path, name: str) -> None:
    count = min(CONFIGS[name].learner.count, RANKS)
    assert json.loads((ran / "codes.json").read_text())[name] == [0] * count
    metrics = json.loads((ran / f"{name}-0.metrics").read_text())
    assert metrics["checked"] and metrics["learner/grad_norm"] > 0
    process = msgspec.json.decode(
        (ran / name / "processes" / "learner.json").read_bytes(), type=LearnerProcess
    )
    told: dict[str, Any] = json.loads((ran / name / "learner.json").read_text())
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
