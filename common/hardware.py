"""What this machine has: the number type in which it computes, its GPUs and its free memory. The
engine and the learner must agree on the number type, so both ask here."""

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

PROCESSOR = Path("/proc/cpuinfo")
_OWN_GROUPS, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def compute_dtype(setting: str) -> str:
    """Return "float32" or "bfloat16" for ``setting``, see ``dtype_and_reason``."""
    return dtype_and_reason(setting)[0]


def dtype_and_reason(setting: str) -> tuple[str, str]:
    """Return the number type for ``setting``, and the reason. "auto" is bfloat16 with an NVIDIA GPU
    or a processor that is faster in bfloat16.

    A processor without bfloat16 instructions emulates them, and Intel's with AVX-512 but no matrix
    units (AMX) are slower in bfloat16 than in float32 (docs/engines.md).
    """
    if setting in ("float32", "bfloat16"):
        return setting, "as the config says"
    if setting != "auto":
        raise ValueError(f"dtype {setting!r}: expected auto, float32 or bfloat16")
    if visible_gpus():
        return "bfloat16", "there is an NVIDIA GPU"
    processor = PROCESSOR.read_text() if PROCESSOR.exists() else ""
    if "amx_bf16" in processor or ("avx512_bf16" in processor and "AuthenticAMD" in processor):
        return "bfloat16", "this processor is made for it"
    return "float32", "this processor is slower in bfloat16"


def cores() -> int:
    """Return the number of cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def visible_gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs that this process may use, as CUDA_VISIBLE_DEVICES names
    them. No tensor library is loaded."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if shown is not None:
        return [gpu for gpu in shown.split(",") if gpu and gpu != "-1"]
    listed = said("nvidia-smi", "--list-gpus").splitlines()
    return [str(i) for i, line in enumerate(listed) if line.startswith("GPU ")]


def gpu_gib() -> float:
    """Return the GiB of the smallest GPU of this machine, 0 if unknown."""
    total = ("--query-gpu=memory.total", "--format=csv,noheader,nounits")
    sizes = [float(line) for line in said("nvidia-smi", *total).split() if line.isdigit()]
    return min(sizes, default=0.0) / 1024


def gpu_software() -> dict[str, str]:
    """Return versions on which GPU code depends, "" where unknown: "driver" and the newest "CUDA"
    for which it is made, "torch's CUDA", and "nvcc", by which SGLang compiles kernels at its first
    start. No tensor library is loaded."""
    torch = importlib.util.find_spec("torch")
    version = Path(torch.origin).with_name("version.py") if torch and torch.origin else Path()
    made = version.read_text() if version.is_file() else ""
    found = {
        "driver": (r"Driver Version: *([\d.]+)", banner := said("nvidia-smi")),
        "CUDA": (r"CUDA(?: UMD)? Version: *([\d.]+)", banner),
        "torch's CUDA": (r"cuda\b.*= '([\d.]+)'", made),
        "nvcc": (r"release ([\d.]+)", said("nvcc", "--version")),
    }
    matches = {name: re.search(*search) for name, search in found.items()}
    return {name: match[1] if match else "" for name, match in matches.items()}


def said(*command: str) -> str:
    """Return what a program prints, "" if it is not here, fails or takes a minute."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if ended.returncode else ended.stdout


def torch_device() -> str:
    """Return "cuda" or "cpu", where torch computes. Raises ValueError if there are GPUs that torch
    cannot use: training on the CPU instead would take months without a word."""
    import torch

    gpus = [] if torch.cuda.is_available() else visible_gpus()
    if gpus:
        raise ValueError(
            f"torch {torch.__version__} (CUDA {torch.version.cuda}) cannot use the GPUs {gpus}:"
            " update the driver, install a torch for its CUDA version (nvidia-smi shows both), or"
            " set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    return "cuda" if torch.cuda.is_available() else "cpu"


def wide_product(left: "Tensor", right: "Tensor", out: "Tensor | None" = None) -> "Tensor":
    """Return left @ right in float32, which rounds nothing of narrower numbers. ``out`` is
    overwritten."""
    import torch

    if left.is_cuda and left.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32, out=out)
    return torch.mm(left.float(), right.float(), out=out)


def free_memory() -> int:
    """Return the bytes of main memory that this process may still take: the machine's, or what a
    container's or service's limit leaves if less."""
    # not at the top: tools/bootstrap.py imports this module before packages are installed
    import psutil

    return min([psutil.virtual_memory().available, *_left_in_groups()])


def _left_in_groups() -> Iterator[int]:
    """Yield what each control group around this process leaves (version 2 or 1). Pages of files are
    given back when memory is short. Inside a container the limit may stand at the root."""
    for line in _OWN_GROUPS.read_text().splitlines() if _OWN_GROUPS.exists() else []:
        _, controllers, path = line.split(":", 2)
        root, limit, used, files = _GROUPS, "memory.max", "memory.current", "inactive_file"
        if controllers:
            root, files = root / "memory", "total_inactive_file"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        inner = root / path.lstrip("/")
        for group in (inner, *inner.parents) if controllers in ("", "memory") else ():
            there = all((group / name).is_file() for name in (limit, used, "memory.stat"))
            if not (there and group.is_relative_to(root)):
                continue
            allowed, taken = ((group / name).read_text().strip() for name in (limit, used))
            if allowed.isdigit():
                kept = dict(row.split() for row in (group / "memory.stat").read_text().splitlines())
                yield max(0, int(allowed) - int(taken) + int(kept.get(files, 0)))
