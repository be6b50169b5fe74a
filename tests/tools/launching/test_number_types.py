"""The number type of a run: one key sets it, each room may override it, and a run says which it is
and why."""

import json
from pathlib import Path

import pytest

from coppice.common import hardware
from coppice.common.atomic import as_json
from coppice.tools.launching import processes
from coppice.tools.launching.config import load
from coppice.tools.launching.memory import number_type, typed
from coppice.tools.launching.settings import Assets
from tests.tools.said import Patch

DEFAULT = Path(__file__).parents[3] / "configs" / "slate-cpu.toml"


def test_the_number_type_and_its_reason_are_told(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    auto = ["model.dtype=auto", "learner.dtype=auto", "actors.dtype=auto"]
    assert number_type(load(DEFAULT, auto)) == (
        "number type bfloat16 (there is an NVIDIA GPU; --set model.dtype=float32 changes it)"
    )
    for alike in (["learner.dtype=float32", "actors.dtype=float32"], ["model.dtype=float32"]):
        plain = number_type(load(DEFAULT, [*auto, *alike]))
        assert plain == "number type float32 (as the config says)"
    said = number_type(load(DEFAULT, [*auto, "actors.dtype=float32"]))
    assert said.startswith("warning: the learner computes in bfloat16")
    assert "set model.dtype, and neither learner.dtype, actors.dtype nor" in said


def test_a_key_sets_the_number_type_and_each_room_may_override_it(tmp_path: Path) -> None:
    def written(*overrides: str) -> list[str]:
        config = load(DEFAULT, ["learner.dtype=auto", "actors.dtype=auto", *overrides])
        processes.make(config, Assets("M", "T", "H", "I"), tmp_path)
        files = [
            json.loads((tmp_path / "processes" / f"{name}.json").read_text())
            for name in ("actor-0", "learner")
        ]
        return [files[0]["actors"]["dtype"], files[1]["learner"]["dtype"]]

    assert written("model.dtype=bfloat16") == ["bfloat16", "bfloat16"]
    assert written("model.dtype=bfloat16", "actors.dtype=float32") == ["float32", "bfloat16"]
    assert written("model.dtype=float32", "learner.dtype=bfloat16") == ["float32", "bfloat16"]
    assert written("model.dtype=auto") == ["auto", "auto"]
    kept = as_json(load(DEFAULT, ["model.dtype=bfloat16"]))  # a resumed run may change the one key
    assert json.loads(kept)["learner"]["dtype"] == "auto"


def test_sglang_gets_the_number_type(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    sglang = ["model.dtype=auto", "actors.engine=sglang", "actors.kv_cache_gib=1.0"]

    def told(*overrides: str) -> str:
        return number_type(load(DEFAULT, [*sglang, *overrides]), tmp_path)

    assert "of the actors' servers is their own" in told()
    assert told("model.dtype=float32") == "number type float32 (as the config says)"
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
        ("AuthenticAMD avx2", "float32"),
    ],
)
def test_a_processor_computes_in_the_type_that_it_is_faster_in(
    tmp_path: Path, monkeypatch: Patch, processor: str, expected: str
) -> None:
    (tmp_path / "cpuinfo").write_text(processor)
    monkeypatch.setattr(hardware, "PROCESSOR", tmp_path / "cpuinfo")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.compute_dtype("auto") == expected
