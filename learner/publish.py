"""Weights of a version as a folder of safetensors with a digest: written whole, renamed into place, proven at every actor."""

import json
import shutil
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from learner.model import Policy
from wire import digest


class Published(msgspec.Struct, frozen=True):
    """The newest weights; ``RUN/learner.json`` holds one. path and digest are empty for version 0 (the model folder)."""

    version: int
    path: str
    digest: str


def publish(
    policy: Policy, version: int, run: Path, keep: int, whole: dict[str, torch.Tensor] | None = None
) -> Published:
    """Write ``RUN/weights/vNNNNNN``: adapters in the PEFT format, or all weights. Older folders beyond ``keep`` go.

    whole: the gathered parameters, where the ranks are sharded and have gathered them together.
    """
    whole = policy.gathered() if whole is None else whole
    folder = run / "weights" / f"v{version:06d}"
    draft = folder.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    if policy.lora:
        kind, name = "lora", "adapter_model.safetensors"
        tensors = {n.replace(".default", ""): p for n, p in whole.items()}
        settings = policy.model.peft_config["default"].to_dict()
        settings["target_modules"] = sorted(settings["target_modules"])
        (draft / "adapter_config.json").write_text(json.dumps(settings, default=str, indent=1))
    else:
        kind, name = "full", "model.safetensors"
        tensors = {n: p.to(policy.compute) for n, p in whole.items()}
    save_file(tensors, draft / name, metadata={"format": "pt"})
    proof = digest.safetensors_file(draft / name)
    (draft / "manifest.json").write_text(json.dumps({"version": version, "kind": kind, "digest": proof}))
    shutil.rmtree(folder, ignore_errors=True)
    draft.rename(folder)
    made = Published(version, str(folder), proof)
    announce(run, made)
    for old in sorted(folder.parent.glob("v??????"))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return made


def announce(run: Path, published: Published) -> None:
    """Write ``RUN/learner.json``, which a resumed scheduler reads."""
    draft = run / "learner.json.draft"
    draft.write_bytes(msgspec.json.encode(published))
    draft.rename(run / "learner.json")
