"""Mixtures of experts, published by the learner and loaded by SGLang's own ``load_weights``: every
tensor arrives at its place, nothing in a version is skipped, and samples and their experts are the
learner's."""

import contextlib
import functools
import re
from collections import defaultdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from coppice.actors.config import ActorsConfig
from coppice.actors.engines.sglang import SGLangEngine
from coppice.common.routing import Routers
from coppice.learner.config import LearnerConfig
from coppice.learner.model import publish
from coppice.learner.model.model import TreeModel
from coppice.learner.model.publish import Publisher
from coppice.learner.model.weight_server import grouped
from coppice.wire.messages import GenerateRequest, LoadRequest, Sampling
from coppice.wire.published import FILES
from tests.actors.test_local_engine import TOLERANCE, forward, ids, worst
from tests.learner import test_architectures
from tests.learner.test_architectures import LATENT, ROUTED, ROWS, made, policy
from tests.sglang_cpu.scripted import giving
from tests.sglang_cpu.shared import LORA, config

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.long]

YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 1024,
}  # fmt: skip
RELEASED: dict[str, Any] = {
    "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
    "rope_parameters": YARN,
}  # fmt: skip
"""What SGLang reads of DeepSeek-V3's released configuration and transformers does not write."""
MODULES = {
    "qwen3_moe": "qwen3_moe", "mixtral": "mixtral", "glm4_moe": "glm4_moe",
    "deepseek_v3": "deepseek_v2",
}  # fmt: skip
JOINED = {
    "q_proj": ("qkv_proj", 0), "k_proj": ("qkv_proj", 1), "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1),
}  # fmt: skip
EXPERTS = {
    "gate_proj": ("w13_weight", 0), "up_proj": ("w13_weight", 1), "down_proj": ("w2_weight", 0),
    "w1": ("w13_weight", 0), "w3": ("w13_weight", 1), "w2": ("w2_weight", 0),
}  # fmt: skip
"""SGLang's tensor of each layer's weight, and its place there."""


def held(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a server holds of a version: projections are joined, experts follow one another."""
    parts: defaultdict[str, dict[tuple[int, int], torch.Tensor]] = defaultdict(dict)
    for name, tensor in stored.items():
        if expert := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name):
            joined, place = EXPERTS[expert[3]]
            parts[f"{expert[1]}.{joined}"][int(expert[2]), place] = tensor
        else:
            path, layer, last = f".{name}".rsplit(".", 2)
            joined, place = JOINED.get(layer, (layer, 0))
            parts[f"{path}.{joined}.{last}"[1:]][0, place] = tensor
    return {name: torch.cat([part[key] for key in sorted(part)]) for name, part in parts.items()}


def assert_arrived(stored: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    expected = held(stored)
    kept = {name for name in loaded if name.endswith("e_score_correction_bias")}  # never trained
    assert expected.keys() == loaded.keys() - kept
    for name, tensor in expected.items():
        rows = loaded[name].reshape(-1, *tensor.shape[1:])
        last = len(tensor) if "embed" in name or "lm_head" in name else None  # which are padded
        assert torch.equal(rows[:last], tensor), f"{name} did not arrive"


def moved(trained: TreeModel, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in trained.trained().values():
            parameter.add_(0.05 * torch.randn_like(parameter))


async def assert_sampled(
    engine: SGLangEngine, trained: TreeModel, result: Any, routers: Routers | None = None
) -> None:
    """Loaded weights give the log-probabilities of the learner's model, and its experts."""
    await engine.load(LoadRequest(result.version, result.path, result.digest))
    prompt, first = ids(result.version, 40), 25
    request = GenerateRequest(prompt, 3, Sampling(12, seed=1, experts_from=first))
    sampled = await engine.generate(request)
    assert worst(trained.model, (prompt, sampled)) < TOLERANCE
    if routers is None:
        return
    for sample in sampled.samples:
        assert sample.experts is not None
        forward(trained.model, prompt, sample.tokens)
        own = routers.rows()[first:-1].reshape(-1, routers.layers, 2)
        told = sample.experts.reshape(own.shape)  # of dense layers SGLang reports expert 0
        assert np.array_equal(np.sort(told)[own >= 0], np.sort(own)[own >= 0])


@pytest.mark.parametrize("kind", MODULES)
async def test_every_expert_arrives_by_file_and_broadcast_and_is_sampled_from(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deepseek = hf.DeepseekV3Config(**(ROUTED | LATENT | RELEASED))
    monkeypatch.setitem(test_architectures.CONFIGS, "deepseek_v3", deepseek)
    monkeypatch.setattr(publish, "grouped", functools.partial(grouped, most_bytes=1))
    folder, seen = made(tmp_path / "model", kind), tmp_path / "loaded.safetensors"
    variables = {"COPPICE_CPU_MODELS": MODULES[kind], "COPPICE_LOADED": str(seen)}
    adapts = ROWS[kind][1] == "yes"
    arguments = {"enable_return_routed_experts": True} | (LORA if adapts else {})
    settings = config(arguments=arguments, environment=variables)
    engine = SGLangEngine(str(folder), ActorsConfig(max_batch=8, max_context=512, sglang=settings))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(engine.close)
        await engine.start()
        giver, trained = stack.enter_context(giving()), policy(folder)
        if adapts:
            adapted = policy(folder, 4)
            moved(adapted, 1)
            await assert_sampled(engine, adapted, publish.publish(adapted, 1, tmp_path, keep=2))
        ways: dict[int, Literal["file", "memory"]] = {2: "file", 3: "memory"}
        routers = Routers(trained.causal)
        for version, how in ways.items():
            moved(trained, version)
            server = giver if how == "memory" else None
            publisher = Publisher(trained, tmp_path, LearnerConfig(publish=how), server)
            result: Any = publisher.publish(version)
            await assert_sampled(engine, trained, result, routers)
            stored = publisher._stored(trained.gathered())
            if how == "file":
                stored = load_file(Path(result.path) / FILES["full"])
            assert_arrived(stored, load_file(seen))
