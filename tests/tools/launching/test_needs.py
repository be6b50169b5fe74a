"""What a mistake gets at a launch: one line with the cause and the remedy, before anything is set
up, and a status that is not 0."""

import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from coppice.tools.defaults.models import ensure_model
from coppice.tools.launching import prepare
from coppice.tools.launching.command import main
from coppice.tools.launching.config import load

DEFAULT = Path("configs/slate-cpu.toml").resolve()
SGLANG = ["actors.engine=sglang", "actors.kv_cache_gib=null", "actors.dtype=null"]
NOWHERE = ["data.train=mine/nope.jsonl", "data.heldout=nope.parquet", "data.corpus=nope.jsonl"]


def line(capsys: pytest.CaptureFixture[str], *options: str, overrides: list[str]) -> str:
    """What a launch that is refused says: one line on stderr, nothing on stdout."""
    assert main([*options, *(word for override in overrides for word in ("--set", override))]) == 2
    out, said = capsys.readouterr()
    assert (out, said.count("\n")) == ("", 1)
    return said


@pytest.fixture
def unprepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "coppice.tools.launching.command.prepare", lambda config: pytest.fail("set up")
    )


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize("override", NOWHERE)
def test_a_wrong_data_path_is_refused_also_by_a_dry_run(
    override: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    key, _, value = override.partition("=")
    assert f"coppice launch: {key} = '{value}' does not exist: give a" in line(
        capsys, *options, overrides=[override]
    )


@pytest.mark.parametrize("name", ["smollm2-136m", "/nope/model"])
def test_a_wrong_model_is_refused_also_by_a_dry_run(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        "coppice.tools.launching.command.prepare",
        lambda config: ensure_model(config.model.name, tmp_path),
    )
    for options in ([], ["--dry-run"]):
        said = line(capsys, *options, overrides=[f"model.name={name}"])
        assert f"model.name = '{name}': expected 'smollm2-135m', " in said
        assert "a folder with a config.json, or a hub id owner/name\n" in said


def test_a_model_that_the_hub_does_not_give_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def absent(*given: object, **more: object) -> None:
        raise OSError("404\nsee the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", absent)
    with pytest.raises(FileNotFoundError, match="is no folder and the hub did not give it: 404"):
        ensure_model("nobody/nothing", tmp_path)


def test_weights_that_are_cut_short_are_named_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import numpy as np

    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1000, np.float32)}, weights)
    assert ensure_model(str(tmp_path), tmp_path) == tmp_path
    weights.write_bytes(weights.read_bytes()[:-100])
    monkeypatch.setattr(
        "coppice.tools.launching.command.prepare",
        lambda config: ensure_model(config.model.name, tmp_path),
    )
    said = line(capsys, overrides=[f"model.name={tmp_path}"])
    assert said.startswith(f"coppice launch: {weights} is cut short or damaged (")
    assert f"remove {tmp_path} if it is in the cache, and start again" in said


@pytest.mark.usefixtures("unprepared")
def test_a_config_for_a_gpu_is_refused_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.tools.launching.prepare.hardware.visible_gpus", lambda: [])
    said = line(capsys, overrides=SGLANG)
    assert (
        "coppice launch: actors.engine = 'sglang' needs a GPU, and nvidia-smi and CUDA_VISIBLE"
        in said
    )
    assert "or take configs/slate-cpu" in said


@pytest.mark.usefixtures("unprepared")
@pytest.mark.parametrize(
    ("python", "said"),
    [
        (sys.executable, f"{sys.executable} has no sglang: install it into an"),
        ("/nope/python", "actors.sglang.python = '/nope/python' cannot be started: No such file"),
    ],
)  # fmt: skip
def test_a_launch_without_sglang_is_refused_before_any_process_starts(
    python: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # also where SGLang is
    monkeypatch.setattr("coppice.tools.launching.prepare._HAS", "import sys; sys.exit(1)")
    cpu = 'actors.sglang.arguments={device = "cpu"}'
    assert said in line(capsys, overrides=[*SGLANG, cpu, f"actors.sglang.python={python}"])


@pytest.mark.usefixtures("unprepared")
def test_a_variable_for_the_agent_that_is_not_set_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = ["data.agent=cat", 'data.options={pass_env = ["NOT_SET_KEY"]}', "warm_start.steps=0"]
    data += ["scheduler.judge=none", "method=grpo"]
    assert "pass_env names 'NOT_SET_KEY', which is not set" in line(capsys, overrides=data)


@pytest.mark.parametrize(
    ("override", "refused"), [("actors.sglang.gpus=1", 0), ("actors.sglang.gpus=2", 1)]
)
def test_weights_are_not_broadcast_within_the_learners_gpus(
    override: str, refused: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.tools.launching.prepare.hardware.visible_gpus", lambda: ["0", "1"])
    monkeypatch.setattr("coppice.tools.launching.prepare._HAS", "")
    sets = [*SGLANG, override, "learner.count=1", "learner.lora.rank=0", "learner.publish=memory"]
    said = list(prepare.lacking_machine(load(DEFAULT, sets)))
    assert ["beside the learner's" in one for one in said] == [True] * refused
