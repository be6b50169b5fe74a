"""The estimate of a run's memory: what it adds up, and the warning."""

from pathlib import Path

import msgspec
import pytest

from coppice.common import hardware
from coppice.tools.launching import memory
from coppice.tools.launching.config import load
from coppice.tools.launching.memory import memory_gib, memory_warning

ROOT = Path(__file__).parents[3]


def smol(folder: Path) -> Path:
    shape = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_bytes(msgspec.json.encode(shape))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(269_060_552)
    return folder


WIDE = ["actors.dtype=float32", "learner.dtype=float32", "actors.count=4", "learner.count=4"]


def test_a_plan_beyond_the_free_memory_is_warned_of_with_what_each_process_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = load(ROOT / "configs" / "slate-cpu.toml", WIDE), smol(tmp_path)
    need = memory_gib(config, model)
    monkeypatch.setattr(hardware, "visible_gpus", list)
    monkeypatch.setattr(memory, "free_gib", lambda: need + 0.01)
    assert memory_warning(config, model) == ""
    monkeypatch.setattr(memory, "free_gib", lambda: need - 0.01)
    said = memory_warning(config, model)
    assert said.startswith(f"warning: this plan needs about {need:.1f} GiB")
    assert "(4 actor of 1.3, 4 learner rank of " in said


def test_the_number_type_the_counts_and_the_forests_make_the_estimate(tmp_path: Path) -> None:
    model = smol(tmp_path)

    def gib(*more: str) -> float:
        return memory_gib(load(ROOT / "configs" / "slate-cpu.toml", [*WIDE, *more]), model)

    narrow = ("actors.dtype=bfloat16", "learner.dtype=bfloat16")
    assert (
        gib(*narrow)
        < gib()
        < gib("learner.micro_tokens=1280")
        < gib("learner.lora={rank=0}", "learner.micro_tokens=1280")
    )
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
