"""A mistake at a launch gets one line with the cause and the remedy, before anything is set up."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coppice.tools.defaults.models import ensure_model
from coppice.tools.launching import prepare, set_up
from coppice.tools.launching.command import main
from coppice.tools.launching.config import DEFAULT_CONFIG, load
from tests.tools.said import Patch, Said

SGLANG = ["actors.engine=sglang", "actors.kv_cache_gib=null", "actors.dtype=null"]
SERVED = [*SGLANG, 'actors.sglang.arguments={device = "cpu"}']
KEYLESS = ["data.agent=cat", 'data.options={pass_env = ["NOT_SET_KEY"]}', "warm_start.steps=0"]
KEYLESS += ["scheduler.judge=none", "method=grpo"]


def test_of_several_set_ups_at_once_each_waits_for_the_others(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("COPPICE_CACHE", str(tmp_path / "cache"))
    inside, seen, said, waits = list[int](), list[int](), set[str](), threading.Event()

    def say(text: str, **_: object) -> None:
        said.add(text)
        waits.set()

    def work(*_: object) -> None:
        inside.append(0)
        assert waits.wait(60)
        seen.append(len(inside))
        inside.pop()

    monkeypatch.setattr(set_up, "_all", work)
    monkeypatch.setattr(set_up, "print", say, raising=False)
    with ThreadPoolExecutor(4) as starts:
        list(starts.map(set_up.prepare, [load(DEFAULT_CONFIG, [])] * 4))
    assert seen == [1] * 4
    assert said == {"waiting for the set-up of another start"}


@pytest.mark.usefixtures("nothing_made")
@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["data.train=mine/nope.jsonl"], "data.train = 'mine/nope.jsonl' does not exist: give a"),
        (["data.heldout=nope.parquet"], "data.heldout = 'nope.parquet' does not exist: give a"),
        (["data.corpus=no.jsonl", "--dry-run"], "data.corpus = 'no.jsonl' does not exist: give a"),
        (["model.name=smollm2-136m", "--dry-run"], "'smollm2-136m': expected 'smollm2-135m', "),
        (["model.name=/nope/model"], "model.name = '/nope/model': expected 'smollm2-135m', "),
        (SGLANG, "actors.engine = 'sglang' needs a GPU, and nvidia-smi"),
        ([*SERVED, "actors.sglang.python=/bin/false"], "/bin/false has no sglang: install it into"),
        ([*SERVED, "actors.sglang.python=/no/python"], "'/no/python' cannot be started: No such"),
        (KEYLESS, "pass_env names 'NOT_SET_KEY', which is not set"),
    ],
)
def test_what_a_run_lacks_is_told(
    overrides: list[str], told: str, refused: Said, monkeypatch: Patch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert told in refused(main, *overrides)


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
    with pytest.raises(ValueError, match=rf"{weights} is cut short or damaged \("):
        ensure_model(str(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("override", "refused"), [("actors.sglang.gpus=1", 0), ("actors.sglang.gpus=2", 1)]
)
def test_weights_are_sent_to_other_gpus(override: str, refused: int, monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    sets = [*SGLANG, override, "learner.count=1", "learner.lora.rank=0", "learner.publish=memory"]
    sets += ["actors.sglang.python=/bin/true"]
    said = list(prepare.lacking_machine(load(DEFAULT_CONFIG, sets)))
    assert ["beside the learner's" in one for one in said] == [True] * refused


def test_two_ranks_take_no_gpu_twice(monkeypatch: Patch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    (refused,) = prepare.lacking_machine(load(DEFAULT_CONFIG, ["learner.count=2"]))
    assert refused.startswith("learner.count = 2: expected at most a rank per GPU (1 here)")
    assert not [*prepare.lacking_machine(load(DEFAULT_CONFIG, ["learner.count=1"]))]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not [*prepare.lacking_machine(load(DEFAULT_CONFIG, ["learner.count=2"]))]
