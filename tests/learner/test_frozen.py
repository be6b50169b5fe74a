"""Frozen weights are held rounded and shared, and nothing that is computed from them changes by a
bit."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coppice.learner.forest.trees import Path as TokenPath
from coppice.learner.forest.trees import pack
from coppice.learner.model import checkpoint, loading
from coppice.learner.model.model import TreeModel
from tests.learner.conftest import two_ranks
from tests.learner.test_architectures import made as mixture
from tests.updates import changed, episodes, everything, trainer


def policy(folder: Path, dtype: str) -> TreeModel:
    """With adapters that already change what is computed."""
    made = trainer(folder, folder, dtype=dtype).policy
    with torch.no_grad():
        for name, parameter in made.trained().items():
            if "lora_B" in name:
                parameter.copy_(torch.linspace(-0.1, 0.1, parameter.numel()).view_as(parameter))
    return made


def read(made: TreeModel) -> list[torch.Tensor]:
    rng = np.random.default_rng(0)
    prefix = rng.integers(0, 250, 30).tolist()
    paths = [TokenPath(prefix + rng.integers(0, 250, 9).tolist(), 30) for _ in range(5)]
    logprobs = made.read(pack(paths))[0]
    logprobs.sum().backward()
    gradients = [p.grad for p in made.trained().values() if p.grad is not None]
    return [logprobs.detach(), made.initial.read(pack(paths), made.lora)[0].detach(), *gradients]


@pytest.mark.parametrize("settings", [{}, {"rank": 0}, {"critic": {}, "scheme": "gae"}])
def test_updates_and_a_resume_do_not_change_by_a_bit(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    settings = {"dtype": "bfloat16", "micro_tokens": 24} | settings
    made = trainer(llama, tmp_path, **settings)
    made.update(episodes(1, 0))
    folder = checkpoint.save(made, tmp_path, [], 3)
    made.update(episodes(2, 1))
    resumed = trainer(llama, tmp_path, **settings)
    checkpoint.restore(resumed, folder)
    resumed.update(episodes(2, 1))
    monkeypatch.setattr(loading, "narrow", lambda *_: None)
    wide = trainer(llama, tmp_path, **settings)
    for version in range(2):
        wide.update(episodes(version + 1, version))

    for one, sizes in ((made, {2, 4}), (wide, {4})):
        initial = one.policy.initial.tower.parameters()
        assert {p.itemsize for p in initial if not p.requires_grad} == sizes
    assert not changed(everything(wide), everything(made))
    assert not changed(everything(wide), everything(resumed))


def test_embeddings_and_trained_weights_stay_in_float32(llama: Path) -> None:
    types = {n: p.dtype for n, p in policy(llama, "bfloat16").model.named_parameters()}
    assert {d for n, d in types.items() if "proj.base_layer.weight" in n} == {torch.bfloat16}
    assert {d for n, d in types.items() if "proj.base_layer.weight" not in n} == {torch.float32}


def test_joined_experts_are_held_and_computed_in_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = mixture(tmp_path / "mixture", "qwen3_moe")
    narrow = policy(folder, "bfloat16")
    monkeypatch.setattr(loading, "narrow", lambda *_: None)
    wide = policy(folder, "bfloat16")
    for one, dtype in ((narrow, torch.bfloat16), (wide, torch.float32)):
        held = {n: p.dtype for n, p in one.model.named_parameters() if ".experts." in n}
        assert set(held.values()) == {dtype} and len(held) > 1
    assert all(torch.equal(a, b) for a, b in zip(read(narrow), read(wide), strict=True))
    monkeypatch.setattr(loading.moe, "_grouped_mm", loading._grouped_mm)
    assert not torch.equal(read(policy(folder, "bfloat16"))[0], read(narrow)[0]), "without autocast"


_RANK = """
import os, sys, torch
from pathlib import Path
from tests.learner.test_frozen import policy, read
for dtype in ("float32", "bfloat16"):
    made = policy(Path(sys.argv[1]), dtype)
    frozen = [p for p in made.model.parameters() if not p.requires_grad]
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split() for line in lines if "frozen-weights" in line]
    places = [[int(place, 16) for place in one[0].split("-")] for one in maps]
    own = [
        i for i, (start, end) in enumerate(places)
        if all(start <= p.data_ptr() and p.data_ptr() + p.nbytes <= end for p in frozen)
    ]
    assert len(own) == 1, "private weights"
    result = sum(float(t.double().abs().sum()) for t in read(made))
    shared = maps[own[0]]
    size = os.stat(f"/proc/self/map_files/{shared[0]}").st_size
    print("RESULT", shared[4], size, len(frozen), result)
    made.ranks.barrier()
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
def test_two_ranks_map_the_same_memory_and_compute_what_one_computes(llama: Path) -> None:
    said = two_ranks(_RANK, str(llama), MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    first, second = ([one for one in out.splitlines() if "RESULT" in one] for out in said)
    assert len(first) == 2 and first == second, said
    for line, dtype in zip(first, ("float32", "bfloat16"), strict=True):
        alone = sum(float(t.double().abs().sum()) for t in read(policy(llama, dtype)))
        assert float(line.split()[-1]) == pytest.approx(alone, rel=1e-12)
