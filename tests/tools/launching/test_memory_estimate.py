"""The estimate of a run's memory, and its number type."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest

from coppice.common import hardware
from coppice.common.atomic import as_json
from coppice.learner.model.memory import sizes
from coppice.tools.launching import memory, processes
from coppice.tools.launching.config import load
from coppice.tools.launching.memory import memory_gib, memory_warning, number_type, typed
from coppice.tools.launching.settings import Assets
from tests.tools.said import Patch

CONFIGS = Path(__file__).parents[3] / "configs"
DEFAULT = CONFIGS / "slate-cpu.toml"


def smol(folder: Path) -> Path:
    shape: dict[str, object] = {"hidden_size": 576, "intermediate_size": 1536}
    shape |= {"num_hidden_layers": 30, "dtype": "bfloat16"}
    (folder / "config.json").write_bytes(msgspec.json.encode(shape))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(269_060_552)
    return folder


WIDE = ["actors.dtype=float32", "learner.dtype=float32", "actors.count=4", "learner.count=4"]


def test_a_plan_beyond_the_free_memory_is_warned_of(tmp_path: Path, monkeypatch: Patch) -> None:
    config, model = load(DEFAULT, WIDE), smol(tmp_path)
    need = memory_gib(config, model)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def with_free(gib: float) -> str:
        free = SimpleNamespace(available=int(gib * 2**30))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
        return memory_warning(config, model)

    assert with_free(need + 0.01) == ""
    said = with_free(need - 0.01)
    assert said.startswith(f"warning: this plan needs about {need:.1f} GiB")


def test_the_number_type_the_counts_and_the_forests_make_the_estimate(tmp_path: Path) -> None:
    model = smol(tmp_path)

    def gib(*more: str) -> float:
        return memory_gib(load(DEFAULT, [*WIDE, *more]), model)

    narrow, long = ("actors.dtype=bfloat16", "learner.dtype=bfloat16"), "learner.micro_tokens=1280"
    assert gib(*narrow) < gib() < gib(long) < gib("learner.lora={rank=0}", long)
    # weights, cache, libraries
    assert gib() - gib("actors.count=3") == pytest.approx(0.5 + 0.4 + 0.4, abs=0.02)


def test_what_a_gpu_cannot_hold_is_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    one_gpu = [f"model.name={smol(tmp_path)}"]
    config, model = load(CONFIGS / "slate-24gb.toml", one_gpu), tmp_path
    assert memory.gpu_lacks(config, model) == ""  # no GPU here
    monkeypatch.setattr(hardware, "visible_gpus", lambda: ["3"])
    for room, refused in ((24.0, False), (4.0, True)):
        monkeypatch.setattr(hardware, "gpu_gib", lambda room=room: room)
        assert bool(said := memory.gpu_lacks(config, model)) == refused
    assert "4.0 GiB are free: most is for actors' cache with weights; take a smaller" in said


def test_on_shared_gpus_the_larger_of_both_turns_counts(tmp_path: Path, monkeypatch: Patch) -> None:
    model, gpus = smol(tmp_path), list("0123")
    own = ["learner.count=2", "learner.lora={rank=0}", f"model.name={model}", "actors.count=2"]

    def parts(share: float, *more: str) -> list[dict[str, float]]:
        memory_share = f"actors.sglang.arguments.mem_fraction_static={share}"
        config = load(CONFIGS / "slate-24gb.toml", [*own, memory_share, *more])
        return memory.gpu_parts(config, *sizes(model), gpus, 24.0)

    turns, both = "actors.sglang.colocated=true", {"CUDA": 2 * memory.CUDA_GIB}
    assert parts(0.01, turns)[1] == parts(0.01)[1] | both
    generating = parts(0.8, turns, "learner.offload_optimizer=true")[1]
    assert generating["actors' cache with weights"] == pytest.approx(0.8 * 24)
    assert generating["policy in training"] == pytest.approx(4 * sizes(model)[1] / 2**30)
    assert "optimizer step" not in generating
    config = load(CONFIGS / "slate-24gb.toml", [*own, turns])
    for count, judges in ((4, "2,3"), (2, None)):  # judges have those that nobody was given
        monkeypatch.setattr(hardware, "visible_gpus", lambda count=count: gpus[:count])
        plan = processes.make(config, Assets("M", "T", "H", "I"), tmp_path)
        shown = {one.name: one.environment.get("CUDA_VISIBLE_DEVICES") for one in plan}
        assert (shown["actor-0"], shown["actor-1"], shown["judges"]) == ("0", "1", judges)


def test_the_number_type_and_its_reason_are_told(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    auto = ["model.dtype=auto", "learner.dtype=auto", "actors.dtype=auto"]
    told = number_type(load(DEFAULT, auto))
    assert told.startswith("number type bfloat16 (there is an NVIDIA GPU; --set model.dtype=")
    plain = number_type(load(DEFAULT, [*auto, "model.dtype=float32"]))
    assert plain == "number type float32 (as the config says)"
    said = number_type(load(DEFAULT, [*auto, "actors.dtype=float32"]))
    assert said.startswith("warning: the learner computes in bfloat16")


def test_a_key_sets_the_number_type_and_each_room_may_override_it(tmp_path: Path) -> None:
    def written(*overrides: str) -> list[str]:
        config = load(DEFAULT, ["learner.dtype=auto", "actors.dtype=auto", *overrides])
        processes.make(config, Assets("M", "T", "H", "I"), tmp_path)
        actor = json.loads((tmp_path / "processes" / "actor-0.json").read_text())
        learner = json.loads((tmp_path / "processes" / "learner.json").read_text())
        return [actor["actors"]["dtype"], learner["learner"]["dtype"]]

    assert written("model.dtype=bfloat16", "actors.dtype=float32") == ["float32", "bfloat16"]
    assert written("model.dtype=float32", "learner.dtype=bfloat16") == ["float32", "bfloat16"]
    kept = as_json(load(DEFAULT, ["model.dtype=bfloat16"]))  # a resumed run may change the one key
    assert json.loads(kept)["learner"]["dtype"] == "auto"


def test_sglang_gets_the_number_type(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sglang = ["model.dtype=auto", "actors.engine=sglang", "actors.kv_cache_gib=1.0"]

    def told(*overrides: str) -> str:
        return number_type(load(DEFAULT, [*sglang, *overrides]), tmp_path)

    assert "of the actors' servers is their own" in told()
    (tmp_path / "config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    assert "the actors in float16 (SGLang's choice for weights stored in float32)" in told()
    arguments = typed(load(DEFAULT, [*sglang, "model.dtype=bfloat16"])).actors.sglang.arguments
    assert arguments["dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ("GenuineIntel avx512_bf16 amx_bf16", "bfloat16"),
        ("AuthenticAMD avx512_bf16", "bfloat16"),
        ("GenuineIntel avx512_bf16", "float32"),
    ],
)
def test_a_processor_computes_in_the_type_that_it_is_faster_in(
    tmp_path: Path, monkeypatch: Patch, processor: str, expected: str
) -> None:
    (tmp_path / "cpuinfo").write_text(processor)
    monkeypatch.setattr(hardware, "PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.compute_dtype("auto") == expected
