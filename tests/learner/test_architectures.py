"""What each architecture can do, as docs/models.md promises: tiny random models train on forests,
are published under the names of their folders and are sampled from, or are refused at load."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from safetensors.torch import load_file

from coppice.actors.config import ActorsConfig
from coppice.actors.engines import weights
from coppice.actors.engines.cached import CachedBatch
from coppice.actors.engines.local import LocalEngine
from coppice.actors.engines.sglang_api import linear_layers
from coppice.common import vision
from coppice.learner.forest.selfcheck import PackingError, check
from coppice.learner.forest.trees import Path as TokenPath
from coppice.learner.model import model as model_module
from coppice.learner.model.model import TreeModel
from coppice.learner.model.publish import publish
from coppice.wire.messages import GenerateRequest, Sampling
from tests import tiny
from tests.learner.forests import forest
from tests.tiny import SHAPE
from tests.updates import trainer

SLIDING = ["sliding_attention", "full_attention"]
MOE: dict[str, Any] = {
    **SHAPE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip
ROUTED: dict[str, Any] = {
    **SHAPE, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
OLD: dict[str, Any] = {
    "vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 8, "ssm_state_size": 8,
    "n_groups": 1,
}  # fmt: skip
WIDTH: dict[str, Any] = {"head_dim": 8}
SHARED: dict[str, Any] = {"shared_expert_intermediate_size": 32}
CONFIGS: dict[str, Any] = {
    "llama": hf.LlamaConfig(**SHAPE),
    "mistral": hf.MistralConfig(**SHAPE),
    "qwen2": hf.Qwen2Config(**SHAPE),
    "qwen3": hf.Qwen3Config(**SHAPE, head_dim=8),
    "smollm3": hf.SmolLM3Config(**SHAPE),
    "phi3": hf.Phi3Config(**SHAPE),
    "olmo2": hf.Olmo2Config(**SHAPE),
    "olmo3": hf.Olmo3Config(**SHAPE, layer_types=SLIDING, sliding_window=6),
    "glm4": hf.Glm4Config(**SHAPE, head_dim=8),
    "granite": hf.GraniteConfig(**SHAPE),
    "seed_oss": hf.SeedOssConfig(**SHAPE, head_dim=8, residual_dropout=0.1),
    "gemma3_text": tiny.config("gemma3"),
    "gpt_neox": hf.GPTNeoXConfig(**OLD, intermediate_size=64),
    "qwen2_moe": hf.Qwen2MoeConfig(**MOE, **SHARED),
    "qwen3_moe": hf.Qwen3MoeConfig(**(MOE | WIDTH)),
    "mixtral": hf.MixtralConfig(**SHAPE, num_local_experts=4, router_jitter_noise=0.1),
    "olmoe": hf.OlmoeConfig(**SHAPE, num_experts=4, num_experts_per_tok=2),
    "granitemoe": hf.GraniteMoeConfig(**SHAPE, num_local_experts=4),
    "glm4_moe": hf.Glm4MoeConfig(**(ROUTED | WIDTH)),
    "deepseek_v3": hf.DeepseekV3Config(**(ROUTED | LATENT)),
    "qwen3_next": hf.Qwen3NextConfig(**MOE, **SHARED, **DELTA, head_dim=8),
    "qwen3_5_text": hf.Qwen3_5TextConfig(**SHAPE, **DELTA, head_dim=8),
    "qwen3_5_moe_text": hf.Qwen3_5MoeTextConfig(**MOE, **SHARED, **DELTA, head_dim=8),
    "olmo_hybrid": hf.OlmoHybridConfig(**SHAPE),
    "minimax": hf.MiniMaxConfig(**SHAPE, num_local_experts=4, head_dim=8),
    "lfm2": hf.Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"]),
    "falcon_h1": hf.FalconH1Config(
        **SHAPE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8
    ),
    "granitemoehybrid": hf.GraniteMoeHybridConfig(
        **SHAPE, layer_types=["mamba", "attention"], mamba_n_heads=8, mamba_d_state=8,
        num_local_experts=0, shared_intermediate_size=64,
    ),
    "nemotron_h": hf.NemotronHConfig(**(SHAPE | MAMBA)),
    "gpt_oss": hf.GptOssConfig(**SHAPE, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "gemma2": hf.Gemma2Config(**SHAPE, head_dim=8),
    "cohere": hf.CohereConfig(**SHAPE),
    "falcon": hf.FalconConfig(**OLD),
    "gpt2": hf.GPT2Config(vocab_size=260, n_embd=32, n_layer=2, n_head=4, bos_token_id=256),
}  # fmt: skip
PAGE = (Path(__file__).parent.parent.parent / "docs" / "models.md").read_text()
ROWS = {
    name: cells
    for names, *cells in re.findall(r"^\| (`.+`) \| (.+) \| (.+) \| (.+) \|$", PAGE, re.M)
    for name in re.findall(r"\w+", names)
}
"""For each architecture: what becomes of whole weights, of LoRA, and of the embedded engine."""


def made(folder: Path, kind: str) -> Path:
    return saved(folder, CONFIGS[kind])


def saved(folder: Path, config: Any) -> Path:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tiny.save_words(folder)
    return folder


def policy(folder: Path, rank: int = 0) -> TreeModel:
    return trainer(folder, folder, rank).policy


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(12)[None]).logits


@contextmanager
def promised(cell: str) -> Iterator[None]:
    """Expect what a cell of the page says: "yes", or a word of the refusal."""
    if cell.startswith("yes"):
        yield
    else:
        with pytest.raises(ValueError, match=cell):
            yield


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (hf.PhiConfig(**SHAPE), "its head has a bias"),
        (hf.FalconH1Config(**SHAPE, lm_head_multiplier=0.04), r"lm_head_multiplier = 0\.04"),
        (hf.DoryConfig(**SHAPE), "its head has the class DoryLMHead"),
    ],
)
def test_a_head_that_computes_more_than_a_product_is_refused(
    tmp_path: Path, config: Any, message: str
) -> None:
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        vision.load(tmp_path, torch.float32, "eager")


def test_the_page_has_a_row_for_each_architecture() -> None:
    assert ROWS.keys() == CONFIGS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("kind", CONFIGS)
def test_it_trains_and_is_published_or_is_refused(tmp_path: Path, kind: str, rank: int) -> None:
    folder = made(tmp_path / "model", kind)
    with promised(ROWS[kind][1 if rank else 0]):
        trained = policy(folder, rank)
        assert check(trained, forest(3, trees=1, steps=1))
        with torch.no_grad():
            for parameter in trained.trained().values():
                parameter.add_(0.05 * torch.randn_like(parameter))
        published = publish(trained, 1, tmp_path / "run", keep=2)
        proven = weights.verified(Path(published.path), published.digest)
        if rank:
            names = {name.split(".lora_")[0].split(".")[-1] for name in trained.trained()}
            assert names == set(linear_layers(folder))  # for which SGLang is started
        else:
            stored = folder / "model.safetensors"
            assert load_file(proven.path).keys() <= load_file(stored).keys()
        loaded = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        before = logits(loaded)
        weights.apply(loaded, folder, proven)
        torch.testing.assert_close(logits(loaded), logits(trained.model), atol=1e-4, rtol=1e-4)
        assert (logits(loaded) - before).abs().max() > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
async def test_the_embedded_engine_samples_from_it_or_refuses_it(tmp_path: Path, kind: str) -> None:
    folder = made(tmp_path, kind)
    with promised(ROWS[kind][2]):
        await samples_as_transformers_does(folder)


async def samples_as_transformers_does(folder: Path) -> LocalEngine:
    engine = LocalEngine(str(folder), ActorsConfig(dtype="float32", max_context=64))
    await engine.start()
    prompt = np.arange(12, dtype=np.int32)
    result = await engine.generate(GenerateRequest(prompt, 2, Sampling(8, seed=3)))
    await engine.close()
    model: Any = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for sample in result.samples:
        whole = torch.tensor(np.concatenate([prompt, sample.tokens]), dtype=torch.long)[None]
        with torch.inference_mode():
            rows = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = rows.gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()
        np.testing.assert_allclose(sample.logprobs, expected, atol=5e-5)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "others"),
    [
        (hf.MistralConfig(**SHAPE, sliding_window=6), "sliding windows"),
        (hf.PhimoeConfig(**SHAPE, sliding_window=6, num_local_experts=4), "sliding windows"),
        (hf.DogeConfig(**SHAPE), "attention_mask: expected none"),
        (hf.StableLmConfig(**SHAPE), "'plan'"),
        (hf.JetMoeConfig(**SHAPE), "heads of keys"),
    ],
    ids=lambda given: getattr(given, "model_type", None),
)
async def test_what_the_engine_does_not_compute_transformers_does(
    tmp_path: Path, config: Any, others: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await samples_as_transformers_does(saved(tmp_path, config))
    assert others in caplog.text and isinstance(engine.batch, CachedBatch)


def test_the_context_of_longrope_ends_with_its_short_angles() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    settings: Any = {"original_max_position_embeddings": 1024, "rope_scaling": scaling}
    assert vision.context_of(hf.Phi3Config(**SHAPE, **settings)) == 1024
    assert vision.context_of({**settings, "max_position_embeddings": 4096}) == 1024  # as stored
    assert vision.context_of(hf.Phi3Config(**SHAPE)) == 4096
    assert vision.context_of(CONFIGS["gpt2"]) == 1024  # which stores it as n_positions
    assert vision.context_of({}) == 2**31


def test_the_check_finds_a_leaking_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_module, "check_layers", lambda *_: False)
    leaking = policy(made(tmp_path, "lfm2"))
    paths = [TokenPath([10 * i + j for j in range(9)], 4) for i in range(6)]
    with pytest.raises(PackingError, match="log-probabilities"):
        check(leaking, paths)
