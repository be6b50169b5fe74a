"""The estimate of a run's memory: what it adds up, and the warning."""

from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from coppice.common import hardware
from coppice.tools.launching import memory
from coppice.tools.launching.config import load
from coppice.tools.launching.memory import memory_gib, memory_warning
from tests.tools.said import Patch

ROOT = Path(__file__).parents[3]


def smol(folder: Path) -> Path:
    shape: dict[str, object] = {"hidden_size": 576, "intermediate_size": 1536}
    shape |= {"num_hidden_layers": 30, "dtype": "bfloat16"}
    (folder / "config.json").write_bytes(msgspec.json.encode(shape))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(269_060_552)
    return folder


WIDE = ["actors.dtype=float32", "learner.dtype=float32", "actors.count=4", "learner.count=4"]


def test_a_plan_beyond_the_free_memory_is_warned_of(tmp_path: Path, monkeypatch: Patch) -> None:
    config, model = load(ROOT / "configs" / "slate-cpu.toml", WIDE), smol(tmp_path)
    need = memory_gib(config, model)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def with_free(gib: float) -> str:
        free = SimpleNamespace(available=int(gib * 2**30))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
        return memory_warning(config, model)

    assert with_free(need + 0.01) == ""
    said = with_free(need - 0.01)
    assert said.startswith(f"warning: this plan needs about {need:.1f} GiB")
    assert "(4 actor of 1.3, 4 learner rank of " in said


def test_the_number_type_the_counts_and_the_forests_make_the_estimate(tmp_path: Path) -> None:
    model = smol(tmp_path)

    def gib(*more: str) -> float:
        return memory_gib(load(ROOT / "configs" / "slate-cpu.toml", [*WIDE, *more]), model)

    narrow, long = ("actors.dtype=bfloat16", "learner.dtype=bfloat16"), "learner.micro_tokens=1280"
    assert gib(*narrow) < gib() < gib(long) < gib("learner.lora={rank=0}", long)
    # weights, cache, libraries
    assert gib() - gib("actors.count=3") == pytest.approx(0.5 + 0.4 + 0.4, abs=0.02)


def test_what_a_gpu_cannot_hold_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu = [f"model.name={smol(tmp_path)}"]
    config, model = load(ROOT / "configs" / "slate-24gb.toml", one_gpu), tmp_path
    assert memory.gpu_lacks(config, model) == ""  # no GPU here
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ["3"])
    for room, refused in ((24.0, False), (4.0, True)):
        monkeypatch.setattr(hardware, "gpu_gib", lambda room=room: room)
        assert bool(said := memory.gpu_lacks(config, model)) == refused
    assert said.startswith("GPU 0 holds ")
    assert "actors' cache with weights 1.6" in said
    assert (
        "4.0 GiB are free: most is for actors' cache with weights; take a smaller actors." in said
    )
