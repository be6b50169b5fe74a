"""Versions that hold changes: applied, they are the whole weights bit by bit, whoever has what
before; a missing or damaged link is named; and the end of a rank is noticed at once."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coppice.actors.engines import weights
from coppice.actors.engines.decoder import PlainDecoder
from coppice.actors.engines.weights import verified
from coppice.common.deltas import SPAN, Delta, apply
from coppice.common.process import free_port
from coppice.wire.faults import InfrastructureFault
from coppice.wire.published import FILES
from tests.updates import process

ROOT = Path(__file__).parent.parent.parent
RANKS: dict[str, tuple[int, dict[str, object]]] = {
    "alone": (1, {}), "fsdp": (3, {"sharding": "fsdp"}),
    "hybrid": (4, {"sharding": "hybrid", "shard_ranks": 2}),
}  # fmt: skip


def run(folder: Path, model: Path, mode: str, count: int, **settings: object) -> list[str]:
    """The exit codes and logs of ranks."""
    made = process(model, folder, 0, dtype="bfloat16", keep=2, whole_every=4, **settings)
    (folder / "process.json").write_bytes(msgspec.json.encode(made))
    place = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": f"{ROOT}/src:{ROOT}", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.learner.publish_process", str(folder), mode, str(count)]
    subprocess.run(command, env=os.environ | place, cwd=ROOT, check=True, timeout=400)
    codes = json.loads((folder / "codes.json").read_text())
    return [f"{code} {(folder / f'log-{rank}').read_text()}" for rank, code in enumerate(codes)]


def shown(folder: Path) -> dict[int, list[str]]:
    return {int(key): row for key, row in json.loads((folder / "shown.json").read_text()).items()}


def model_of(llama: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)


def assert_bits(tensors: Mapping[str, torch.Tensor], folder: Path, version: int) -> None:
    truth = load_file(folder / f"truth-{version}.safetensors")
    assert truth.keys() == tensors.keys()
    for name, value in truth.items():
        assert torch.equal(value.view(torch.int16), tensors[name].detach().view(torch.int16)), name


@pytest.mark.second
def test_changes_of_some_elements_of_all_and_of_none_are_restored_bit_by_bit(
    tmp_path: Path,
) -> None:
    for share in (0.0, 1e-6, 0.01, 0.3, 1.0):
        old = torch.randn(3 * SPAN + 17).bfloat16()
        new = torch.where(torch.rand(len(old)) < share, torch.randn(len(old)).bfloat16(), old)
        new[0], old[0] = float("nan"), float("nan")
        delta, kept = Delta(), {"w": torch.cat([torch.zeros(5).bfloat16(), old])}
        delta.add("w", old, new, 5)
        assert bool(delta) == (not torch.equal(old.view(torch.int16), new.view(torch.int16)))
        delta.write(tmp_path / "delta")
        assert (tmp_path / "delta").stat().st_size < 200 + 4 * len(old) * share * 1.1 + 40
        apply(tmp_path / "delta", kept)
        assert torch.equal(kept["w"][5:].view(torch.int16), new.view(torch.int16))


@pytest.mark.slow
@pytest.mark.parametrize("name", RANKS)
def test_published_changes_are_the_whole_weights_bit_by_bit(
    tmp_path: Path, llama: Path, name: str
) -> None:
    count, settings = RANKS[name]
    told = run(tmp_path, llama, "publish", count, **settings)
    assert [one.split()[0] for one in told] == ["0"] * count, "\n".join(told)
    rows = shown(tmp_path)
    # whole: 1 and 6, because 3 changed nothing and whole weights are due at every fourth
    needed = [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4], [5], [5, 6], [5, 6, 7]]
    held = [[int(folder[1:]) for folder in row[2:]] for row in rows.values()]
    assert held[:4] == needed[:4] and held[5:] == needed[5:]
    assert rows[2][1] == rows[3][1]
    follower, digest = model_of(llama), ""
    PlainDecoder(follower, 64)  # as the engine, which stores weights transposed
    for version in (5, 6, 7):
        folder, proof = Path(rows[version][0]), rows[version][1]
        proven = verified(folder, proof, digest)
        assert proven.held == (version > 5)
        weights.apply(follower, llama, proven)
        late = model_of(llama)
        weights.apply(late, llama, verified(folder, proof))
        whole = load_file(weights.assembled(verified(folder, proof)) / FILES["full"])
        for held_ in (dict(follower.named_parameters()), dict(late.named_parameters()), whole):
            assert_bits(held_, tmp_path, version)
        digest = proof


@pytest.mark.slow
def test_a_damaged_or_missing_link_is_named_and_the_old_weights_stay(
    tmp_path: Path, llama: Path
) -> None:
    run(tmp_path, llama, "publish", 1)
    rows = shown(tmp_path)
    (middle, _), (last, proof) = rows[6][:2], rows[7][:2]
    (changes,) = Path(middle).glob("delta-*")
    content = bytearray(changes.read_bytes())
    content[-1] ^= 1
    changes.write_bytes(content)
    with pytest.raises(InfrastructureFault, match=r"v000006: digest .* the old weights stay"):
        verified(Path(last), proof)
    assert verified(Path(last), proof, rows[6][1]).held  # who has version 6 does not need it
    (Path(middle) / "manifest.json").unlink()
    with pytest.raises(InfrastructureFault, match=r"missing link .*learner\.whole_every"):
        verified(Path(last), proof)


@pytest.mark.slow
def test_a_learner_killed_between_whole_weights_and_changes_resumes(
    tmp_path: Path, llama: Path
) -> None:
    assert run(tmp_path, llama, "killed", 1)[0].startswith("-9")
    places = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert places == ["v000001", "v000002.draft"]
    before = shown(tmp_path)[1][1]
    run(tmp_path, llama, "publish", 1)
    rows = shown(tmp_path)
    assert rows[1][1] == before
    model = model_of(llama)
    weights.apply(model, llama, verified(Path(rows[7][0]), rows[7][1]))
    assert_bits(dict(model.named_parameters()), tmp_path, 7)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dies", "stops"])
def test_the_end_of_a_rank_outside_of_a_collective_ends_the_others_within_seconds(
    tmp_path: Path, llama: Path, mode: str
) -> None:
    told = run(tmp_path, llama, mode, 4)
    assert told[1].startswith("-9")
    for other in (told[0], *told[2:]):
        assert other.startswith("1 ") and "rank 1 of 4 is dead" in other, other
