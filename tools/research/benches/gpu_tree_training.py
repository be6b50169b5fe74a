"""On a GPU in bf16: a SLATE batch as one forest with FlexAttention against the same paths unshared, and the share of the peak reached.

tools/gpu_check runs this. tools/bench leaves it out, because it must run on any machine.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any

import numpy as np
import torch

from learner.config import LearnerConfig, LoraConfig
from learner.model import TreeModel
from learner.ranks import Ranks
from learner.trees import Path, pack
from tools.research.benches.slate_shape import random_copy
from tools.research.benches.tree_shapes import slate
from tools.research.benches.tree_training import forest, varlen

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "A100": 312.0}
"""Peak of dense bf16 products, from the vendor's data sheets."""
REPEATS = 5


def _seconds(work: Callable[..., None], model: TreeModel, paths: list[Path]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    work(model, paths)  # compiles the kernels
    begin.record()
    for _ in range(REPEATS):
        model.tower.zero_grad(set_to_none=True)
        work(model, paths)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1000 / REPEATS


def measure() -> dict[str, Any]:
    """Return the seconds of both, the speed-up against the token ratio, and the forest's share of the peak (matrix products only)."""
    with tempfile.TemporaryDirectory() as folder:
        random_copy(FilePath(folder))
        settings = LearnerConfig(dtype="bfloat16", kl_coef=0.0)
        model = TreeModel(str(FilePath(folder)), settings, LoraConfig(rank=0), 1.0, Ranks(60))
        rng = np.random.default_rng(0)
        paths = [p for _ in range(4) for p in slate(rng)]
        packed = pack(paths)
        shared, apart = _seconds(forest, model, paths), _seconds(varlen, model, paths)
    weights = sum(p.numel() for n, p in model.tower.named_parameters() if "layers" in n)
    name = torch.cuda.get_device_name()
    peak = next((v for key, v in PEAK_TFLOPS.items() if key in name), None)
    tflops = 6 * weights * packed.nodes / shared / 1e12
    return {
        "device": name,
        "packed_tokens": packed.nodes,
        "token_ratio": packed.token_ratio,
        "forest_s": shared,
        "unshared_s": apart,
        "speed_up": apart / shared,
        "share_of_token_ratio": apart / shared / packed.token_ratio,
        "tflops": tflops,
        "share_of_peak": None if peak is None else tflops / peak,
    }


if __name__ == "__main__":
    print(json.dumps(measure(), indent=1))
