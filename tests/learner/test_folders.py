"""What the learner leaves on disk: checkpoints and published weights, whole or not at all."""

import json
import resource
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from coppice.actors.engines import weights
from coppice.learner.config import LoraConfig
from coppice.learner.model import checkpoint
from coppice.learner.model.model import check_fits
from coppice.learner.model.publish import publish
from coppice.learner.model.ranks import Ranks
from coppice.wire.faults import InfrastructureFault
from tests.updates import batch, newest, trainer


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path)
    made.update(batch(0, 0))
    first = checkpoint.save(made, tmp_path, {1: 1}, 3)
    made.update(batch(1, 1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(checkpoint.CheckpointError, match="the one before is untouched"):
            checkpoint.save(made, tmp_path, {1: 1, 2: 1}, 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert newest(tmp_path) == first
    assert list((tmp_path / "checkpoints").iterdir()) == [first]
    assert checkpoint.restore(trainer(llama, tmp_path), first).groups() == {1: 1}


def test_a_run_folder_that_cannot_be_written_is_named(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file stands where the folder should be")
    with pytest.raises(checkpoint.CheckpointError, match="checkpoints/v000000"):
        checkpoint.save(trainer(llama, tmp_path), tmp_path, {}, 3)


@pytest.mark.parametrize(
    ("rank", "told"), [(0, "other parameters"), (8, r"another model.*learner\.lora\.rank")]
)
def test_a_checkpoint_of_another_parametrisation_is_refused_and_not_called_damage(
    tmp_path: Path, llama: Path, rank: int, told: str
) -> None:
    folder = checkpoint.save(trainer(llama, tmp_path, 4), tmp_path, {}, 3)
    with pytest.raises(checkpoint.CheckpointError, match=told):
        checkpoint.restore(trainer(llama, tmp_path, rank), folder)


def test_the_last_checkpoints_are_kept(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path)
    for version in range(4):
        made.version = version
        checkpoint.save(made, tmp_path, {}, 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["v000002", "v000003"]


def test_published_whole_weights_equal_the_policy(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path, 0)
    made.update(batch(3, 0))
    published = publish(made.policy, 1, tmp_path, 2)
    kind, path = weights.verified_file(Path(published.path), published.digest)
    assert kind == "full"
    actor = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    weights.apply(actor, llama, kind, path)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(actor(ids).logits, made.policy.causal(ids).logits)


def test_the_digest_changes_with_the_weights_and_proves_them(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path)
    first, again = publish(made.policy, 1, tmp_path, 9), publish(made.policy, 2, tmp_path, 9)
    assert first.digest == again.digest
    made.update(batch(3, 0))
    third = publish(made.policy, 3, tmp_path, 9)
    assert third.digest != first.digest
    path = Path(third.path) / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(InfrastructureFault, match="digest"):
        weights.verified_file(Path(third.path), third.digest)


def test_the_last_versions_are_kept_with_their_manifests(tmp_path: Path, llama: Path) -> None:
    made = trainer(llama, tmp_path)
    for version in range(1, 5):
        publish(made.policy, version, tmp_path, 2)
    assert sorted(p.name for p in (tmp_path / "weights").iterdir()) == ["v000003", "v000004"]
    manifest = json.loads((tmp_path / "weights" / "v000004" / "manifest.json").read_text())
    assert (manifest["version"], manifest["kind"]) == (4, "lora")


def test_a_model_too_large_is_refused_before_it_is_loaded(tmp_path: Path, llama: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match="safetensors"):
        check_fits(tmp_path, LoraConfig(), Ranks(60))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(2**42)  # sparse: takes no space
    with pytest.raises(MemoryError, match=r"learner\.count"):
        check_fits(tmp_path, LoraConfig(), Ranks(60))
