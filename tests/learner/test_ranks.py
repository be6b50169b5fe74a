"""Real processes over gloo: any number of ranks, replicated or sharded, gives the same update; a
dead rank does not hang the others."""

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

from coppice.common.process import free_port
from coppice.learner.main import pack_batch, unpack_batch
from coppice.learner.model import checkpoint
from tests.learner.planted import FAULTS
from tests.learner.rank_process import Scenario
from tests.learner.test_architectures import made as delta
from tests.updates import batch, episodes, everything, few, process, steady, trainer

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent.parent
UPDATES = 2

ALL_MODELS: dict[str, object] = {
    "scheme": "oprl", "scheme_options": {"base": "ppo"}, "kl_coef": 0.01, "entropy_coef": 0.01,
    "correction": "tis", "correction_options": {"level": "sequence"}, "minibatches": 2, "epochs": 2,
    "critic": {"lr": 1e-2}, "prm": {"lr": 1e-2},
}  # fmt: skip
"""Policy, critic and reward model, reference and proximal passes, two epochs of two minibatches."""

FEW: dict[str, object] = {
    "kl_coef": 0.05, "correction": "icepop", "correction_options": {"level": "turn"},
}  # fmt: skip
"""Forests of one sampled token or none, a batch of one turn, one of no sampled token: some ranks
have nothing to forward."""

HYBRID: dict[str, object] = {"sharding": "hybrid", "shard_ranks": 2}
"""Two copies of the model, each on two ranks."""

SCENARIOS: dict[str, tuple[int, int, dict[str, object]]] = {
    "lora": (4, 4, {}), "full": (4, 0, {}), "all": (4, 4, ALL_MODELS), "sharded_lora": (4, 4, {"sharding": "fsdp"}),
    "sharded_full": (4, 0, {"sharding": "fsdp", "gradient_checkpointing": True}),
    "hybrid_all": (4, 4, ALL_MODELS | HYBRID), "few": (4, 4, FEW), "turn": (4, 4, FEW), "none": (4, 4, FEW),
    "sharded_offloaded": (2, 0, {"sharding": "fsdp", "offload_optimizer": True}),
    "sharded_few": (4, 4, FEW | {"sharding": "fsdp"}), "hybrid_turn": (4, 4, FEW | HYBRID),
    "sharded_none": (4, 4, FEW | {"sharding": "fsdp"}),
    "sharded_delta": (2, 4, {"sharding": "fsdp", "gradient_checkpointing": True}),
    "sharded_delta_full": (2, 0, {"sharding": "fsdp", "gradient_checkpointing": True}),
}  # fmt: skip
"""Ranks, LoRA rank (0: every weight), settings. "delta": a tiny Qwen3.5, half of whose layers are
gated DeltaNet."""

AGAIN: dict[str, object] = {
    "dtype": "bfloat16", "sharding": "fsdp", "gradient_checkpointing": True,
}  # fmt: skip
CHECKED: dict[str, tuple[int, int, dict[str, object]]] = {
    "checked_float32": (2, 4, {}), "checked_checkpointing_lora": (2, 4, AGAIN),
    "checked_checkpointing_full": (2, 0, AGAIN), "checked_checkpointing_full_alone": (1, 0, AGAIN),
}  # fmt: skip
"""Ranks that check planted faults, LoRA rank (0: every weight), settings."""


def run(folder: Path, scenarios: dict[str, Scenario]) -> Path:
    (folder / "scenarios.json").write_bytes(msgspec.json.encode(scenarios))
    place = {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.learner.rank_process", str(folder)]
    subprocess.run(command, env=os.environ | place, check=True, timeout=900, cwd=ROOT)
    return folder


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    """A folder with the outcome of every scenario: codes.json, checkpoints, and the trained weights
    of each rank."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "slate").write_bytes(pack_batch(batch(5, 0)))
    (folder / "few.batch").write_bytes(pack_batch(few([True], [False, False], [True], [True] * 3)))
    (folder / "turn.batch").write_bytes(pack_batch(few([True])))
    (folder / "none.batch").write_bytes(pack_batch(few([False], [False, False])))
    (folder / "all.batch").write_bytes(pack_batch(episodes(5, 0)))
    made: dict[str, Scenario] = {}
    delta(folder / "delta", "qwen3_5_text")
    for name, (count, rank, settings) in SCENARIOS.items():
        model = folder / "delta" if "delta" in name else llama
        own = process(model, folder, rank, micro_tokens=16, **settings)
        made[name] = Scenario(own, _batch(name), count, UPDATES, free_port())

    def add(name: str, like: str, **changes: Any) -> None:
        made[name] = msgspec.structs.replace(made[like], port=free_port(), **changes)

    narrow = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    narrow.save_pretrained(folder / "narrow")
    mixed, dead, dead_hybrid = (
        process(folder / "narrow", folder, 4, micro_tokens=16, **settings)
        for settings in ({"sharding": "fsdp", "dtype": "bfloat16"}, {}, HYBRID)
    )
    add("mixed", "sharded_lora", process=mixed)
    add("dead", "lora", process=dead, dies=2)
    add("dead_hybrid", "dead", process=dead_hybrid)
    add("full_disk", "sharded_lora", full_disk=1, updates=1)
    resume = str(folder / "sharded_full" / "checkpoints" / f"v{UPDATES:06d}")
    add("fewer", "sharded_full", count=3, updates=1, resume=resume)
    hybrid = process(llama, folder, 0, micro_tokens=16, **HYBRID)
    add("copies", "fewer", process=hybrid, count=4)
    for name, (count, rank, settings) in CHECKED.items():
        own = process(llama, folder, rank, **settings)
        add(name, "lora", process=own, count=count, faults=True)
    return run(folder, made)


def _batch(name: str) -> str:
    last = name.rpartition("_")[2]
    return f"{last}.batch" if last in ("few", "turn", "none", "all") else "slate"


def alone(
    folder: Path, llama: Path, run: Path, name: str, updates: int = UPDATES
) -> dict[str, torch.Tensor]:
    """The same updates by one rank."""
    _, rank, settings = SCENARIOS[name]
    settings = {key: value for key, value in settings.items() if not key.startswith("shard")}
    made = steady(trainer(llama, run, rank, micro_tokens=16, **settings))
    for _ in range(updates):
        some = unpack_batch((folder / _batch(name)).read_bytes())
        made.update(msgspec.structs.replace(some, version=made.version))
    return everything(made)


@pytest.mark.parametrize("name", SCENARIOS)
def test_ranks_give_one_ranks_update(ran: Path, tmp_path: Path, llama: Path, name: str) -> None:
    count = SCENARIOS[name][0]
    assert json.loads((ran / "codes.json").read_text())[name] == [0] * count
    expected = alone(ran, ran / "delta" if "delta" in name else llama, tmp_path, name)
    first = load_file(ran / f"{name}-0.safetensors")
    assert first.keys() == expected.keys()
    for rank in range(count):
        for key, value in load_file(ran / f"{name}-{rank}.safetensors").items():
            assert torch.equal(value, first[key]), f"rank {rank} differs from rank 0 in {key}"
            torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4)


def test_sharded_bfloat16_ranks_move_as_float32(ran: Path, tmp_path: Path, llama: Path) -> None:
    start = everything(trainer(llama, tmp_path, 4))
    exact, mixed = alone(ran, llama, tmp_path, "lora"), load_file(ran / "mixed-0.safetensors")
    assert {value.dtype for value in mixed.values()} == {torch.float32}
    steps = [
        torch.cat([(made[key] - start[key]).reshape(-1) for key in start])
        for made in (exact, mixed)
    ]
    assert torch.cosine_similarity(steps[0], steps[1], dim=0) > 0.9


@pytest.mark.parametrize("name", CHECKED)
def test_all_ranks_refuse_each_planted_fault_and_no_healthy_forest(ran: Path, name: str) -> None:
    count = CHECKED[name][0]
    assert json.loads((ran / "codes.json").read_text())[name] == [0] * count
    for rank in range(count):
        found = json.loads((ran / f"{name}-{rank}.faults").read_text())
        assert found.pop("") == ""
        assert set(found) == set(FAULTS)
        assert all("in float32" in sentence for sentence in found.values()), found


def test_any_number_of_ranks_reads_a_sharded_state(ran: Path, tmp_path: Path, llama: Path) -> None:
    folder = ran / "sharded_full" / "checkpoints" / f"v{UPDATES:06d}"
    assert len(list(folder.glob("policy-*.safetensors"))) == 4
    made = trainer(llama, tmp_path, 0, micro_tokens=16)
    assert checkpoint.restore(made, folder).groups() == {1: 1, 2: 1}
    for key, value in load_file(ran / "sharded_full-0.safetensors").items():
        assert torch.equal(everything(made)[key], value), key
    expected = alone(ran, llama, tmp_path, "sharded_full", UPDATES + 1)
    for name, count in (("fewer", 3), ("copies", 4)):
        assert json.loads((ran / "codes.json").read_text())[name] == [0] * count
        for key, value in load_file(ran / f"{name}-0.safetensors").items():
            torch.testing.assert_close(value, expected[key], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("name", "shards"), [("mixed", 4), ("dead_hybrid", 2), ("dead", 1)])
def test_a_sharded_rank_loads_and_holds_its_part_alone(ran: Path, name: str, shards: int) -> None:
    # in float32, but for the frozen layers of a learner that computes in bfloat16
    stored = [
        (1 if name == "mixed" and "proj" in key else 2) * tensor.nbytes
        for key, tensor in load_file(ran / "narrow" / "model.safetensors").items()
    ]
    for rank in range(4):
        loaded, held = json.loads((ran / f"{name}-{rank}.bytes").read_text())
        if shards == 1:
            assert loaded == held > sum(stored)
        else:  # adapters alone have values before the model is sharded
            assert loaded < 0.25 * sum(stored)
        assert sum(stored) / shards <= held < 1.3 * sum(stored) / shards


@pytest.mark.parametrize("name", ["dead", "dead_hybrid"])
def test_a_rank_that_dies_in_an_update_ends_the_others_with_an_error(ran: Path, name: str) -> None:
    # of the collective that fails, or of what looks out for dead ranks
    codes = json.loads((ran / "codes.json").read_text())[name]
    assert codes.pop(2) == 9 and set(codes) <= {1, 3}


def test_one_ranks_full_disk_stops_all_with_the_reason(ran: Path) -> None:
    assert json.loads((ran / "codes.json").read_text())["full_disk"] == [4] * 4
    assert "No space left" in (ran / "full_disk-1.error").read_text()
    assert "another rank failed" in (ran / "full_disk-0.error").read_text()
    assert not list((ran / "full_disk" / "checkpoints").iterdir())
