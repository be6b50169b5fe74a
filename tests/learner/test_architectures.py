"""Architectures beyond plain Llama: mixtures of experts train and are published as model folders
name their weights, and what cannot follow a tree is refused when the model is loaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconH1Config,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    MixtralConfig,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
)

from coppice.actors.engines import weights
from coppice.learner.config import LearnerConfig, LoraConfig
from coppice.learner.forest.selfcheck import PackingError, check
from coppice.learner.forest.trees import Path as TokenPath
from coppice.learner.model import model as model_module
from coppice.learner.model.model import Policy
from coppice.learner.model.publish import publish
from coppice.learner.model.ranks import Ranks
from tests import tiny
from tests.learner.forests import forest

CONFIGS: dict[str, Any] = {
    "qwen3_moe": Qwen3MoeConfig(
        **tiny.SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "mixtral": MixtralConfig(**tiny.SHAPE, num_local_experts=4),
    "seed_oss": SeedOssConfig(**tiny.SHAPE, head_dim=8, residual_dropout=0.1),
    "qwen3_next": Qwen3NextConfig(
        **tiny.SHAPE, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_value_heads=4, linear_num_key_heads=2,
        linear_key_head_dim=8, linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
    "lfm2": Lfm2Config(**tiny.SHAPE, layer_types=["conv", "full_attention"]),
    "falcon_h1": FalconH1Config(
        **tiny.SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
    "granitemoehybrid": GraniteMoeHybridConfig(
        **tiny.SHAPE, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_state=8,
        num_local_experts=0, shared_intermediate_size=64,
    ),
    "gpt_oss": GptOssConfig(**tiny.SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "falcon": FalconConfig(
        vocab_size=260, hidden_size=32, num_hidden_layers=2, num_attention_heads=4
    ),
}  # fmt: skip


def made(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def policy(folder: Path, rank: int = 0) -> Policy:
    config = LearnerConfig(dtype="float32", lora=LoraConfig(rank))
    return Policy(str(folder), config, 1.0, Ranks(60))


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(12)[None]).logits


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_trained_experts_are_published_under_the_names_that_engines_load(
    tmp_path: Path, kind: str, rank: int
) -> None:
    folder = made(tmp_path / "model", kind)
    trained = policy(folder, rank)
    assert check(trained, forest(3))
    with torch.no_grad():
        for parameter in trained.trained().values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    published = publish(trained, 1, tmp_path / "run", keep=2)
    kind_of_weights, path = weights.verified_file(Path(published.path), published.digest)
    if rank == 0:
        names = [
            set(safe_open(file, framework="pt").keys())
            for file in (path, folder / "model.safetensors")
        ]
        assert names[0] == names[1]
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = logits(loaded)
    weights.apply(loaded, folder, kind_of_weights, path)
    torch.testing.assert_close(logits(loaded), logits(trained.model), atol=1e-4, rtol=1e-4)
    assert (logits(loaded) - before).abs().max() > 0.01


def test_dropout_of_every_kind_is_off(tmp_path: Path) -> None:
    assert check(policy(made(tmp_path, "seed_oss")), forest(3))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("qwen3_next", "linear_attention"),
        ("lfm2", "conv"),
        ("falcon_h1", "convolution"),
        ("granitemoehybrid", "convolution"),
        ("gpt_oss", "attention sinks"),
        ("falcon", "attention interface"),
    ],
)
def test_what_cannot_follow_a_tree_is_refused_at_load(
    tmp_path: Path, kind: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=rf"{kind}.*{reason}"):
        policy(made(tmp_path / "model", kind))


def test_the_check_finds_a_state_that_leaks_between_paths_that_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "check_layers", lambda *_: None)
    leaking = policy(made(tmp_path, "lfm2"))
    paths = [TokenPath([10 * i + j for j in range(9)], 4) for i in range(6)]
    with pytest.raises(PackingError, match="log-probabilities"):
        check(leaking, paths)
