"""What a mistake gets at a launch: one line with the cause and the remedy, before anything is set
up, and a status that is not 0."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coppice.tools.defaults.models import ensure_model
from coppice.tools.launching import prepare
from coppice.tools.launching.command import main
from coppice.tools.launching.config import load
from tests.tools.said import Patch, Said

DEFAULT = Path("configs/slate-cpu.toml").resolve()
SGLANG = ["actors.engine=sglang", "actors.kv_cache_gib=null", "actors.dtype=null"]
NOWHERE = ["data.train=mine/nope.jsonl", "data.heldout=nope.parquet", "data.corpus=nope.jsonl"]


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize("override", NOWHERE)
def test_a_wrong_data_path_is_refused(override: str, options: list[str], refused: Said) -> None:
    key, _, value = override.partition("=")
    told = refused(main, override, *options)
    assert f"coppice launch: {key} = '{value}' does not exist: give a" in told


@pytest.mark.parametrize("name", ["smollm2-136m", "/nope/model"])
def test_a_wrong_model_is_refused(name: str, refused: Said, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        ensure_model(name, tmp_path)
    for told in (str(raised.value), refused(main, f"model.name={name}", "--dry-run")):
        assert f"model.name = '{name}': expected 'smollm2-135m', " in told
        assert "a folder with a config.json, or a hub id owner/name" in told


def test_a_model_that_the_hub_does_not_give_is_one_line(monkeypatch: Patch, tmp_path: Path) -> None:
    def absent(*given: object, **more: object) -> None:
        raise OSError("404\nsee the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    with pytest.raises(FileNotFoundError, match="is no folder and the hub did not give it: 404"):
        ensure_model("nobody/nothing", tmp_path)


def test_weights_that_are_cut_short_are_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, weights)
    assert ensure_model(str(tmp_path), tmp_path) == tmp_path
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{weights} is cut short or damaged \(") as raised:
        ensure_model(str(tmp_path), tmp_path)
    assert f"remove {tmp_path} if it is in the cache, and start again" in str(raised.value)


@pytest.mark.usefixtures("nothing_made")
def test_a_config_for_a_gpu_is_refused_without_one(refused: Said, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    told = refused(main, *SGLANG)
    assert "actors.engine = 'sglang' needs a GPU, and nvidia-smi and CUDA_VISIBLE" in told
    assert "or take configs/slate-cpu" in told


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize(
    ("python", "told"),
    [
        ("/bin/false", "/bin/false has no sglang: install it into an"),
        ("/nope/python", "actors.sglang.python = '/nope/python' cannot be started: No such file"),
    ],
)
def test_a_launch_without_sglang_is_refused(python: str, told: str, refused: Said) -> None:
    cpu = 'actors.sglang.arguments={device = "cpu"}'
    assert told in refused(main, *SGLANG, cpu, f"actors.sglang.python={python}")


@pytest.mark.usefixtures("nothing_made")
def test_a_variable_for_the_agent_that_is_not_set_is_refused(refused: Said) -> None:
    data = ["data.agent=cat", 'data.options={pass_env = ["NOT_SET_KEY"]}', "warm_start.steps=0"]
    data += ["scheduler.judge=none", "method=grpo"]
    assert "pass_env names 'NOT_SET_KEY', which is not set" in refused(main, *data)


@pytest.mark.parametrize(
    ("override", "refused"), [("actors.sglang.gpus=1", 0), ("actors.sglang.gpus=2", 1)]
)
def test_weights_are_broadcast_to_other_gpus(
    override: str, refused: int, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    sets = [*SGLANG, override, "learner.count=1", "learner.lora.rank=0", "learner.publish=memory"]
    sets += ["actors.sglang.python=/bin/true"]
    said = list(prepare.lacking_machine(load(DEFAULT, sets)))
    assert ["beside the learner's" in one for one in said] == [True] * refused
