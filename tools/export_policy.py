"""The command tools/export: the policy of a run as a Hugging Face folder that transformers and SGLang load."""

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoModelForCausalLM

from actors.engines import weights
from learner.config import LearnerProcess
from wire.faults import InfrastructureFault

BESIDE = ("*token*", "*.jinja", "generation_config.json", "vocab*", "merges*", "special*")
"""What else of the model folder belongs to the policy: tokenizer, chat template, generation settings."""


def export(run: Path, folder: Path, version: int | None = None, dtype: str = "float32") -> int:
    """Write the policy version (the newest by default) of ``run``; returns the version.

    Raises ValueError naming what is there when the version is not, InfrastructureFault for weights that fail their digest.
    """
    process = msgspec.json.decode((run / "processes" / "learner.json").read_bytes(), type=LearnerProcess)
    kept = {int(p.name[1:]): p for p in (run / "weights").glob("v??????")}
    if version is None:
        version = max(kept, default=0)
    if version and version not in kept:
        raise ValueError(f"{run} has no weights of version {version}: it keeps {sorted(kept)} (learner.keep), and 0")
    model: Any = AutoModelForCausalLM.from_pretrained(process.model, dtype=torch.float32)
    if version:
        digest = json.loads((kept[version] / "manifest.json").read_bytes())["digest"]
        weights.apply(model, Path(process.model), *weights.verified_file(kept[version], digest))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    for pattern in BESIDE:
        for path in Path(process.model).glob(pattern):
            shutil.copy(path, folder / path.name)
    return version


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="tools/export", description="A run's policy as a Hugging Face folder.")
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--version", type=int, help="policy version (default: the newest)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    given = parser.parse_args(arguments)
    try:
        version = export(given.run, given.out, given.version, given.dtype)
    except (OSError, ValueError, InfrastructureFault) as error:
        print(f"tools/export: {error}", file=sys.stderr)
        return 2
    print(f"policy version {version} is in {given.out}")
    return 0
