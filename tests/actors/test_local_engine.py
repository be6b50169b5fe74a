"""The embedded engine against transformers itself."""

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from actors.config import ActorsConfig
from actors.engines.local import LocalEngine
from actors.engines.sampling import pick, restrict
from tests import tiny
from wire import digest
from wire.faults import DataFault, InfrastructureFault
from wire.messages import GenerateRequest, GenerateResult, LoadRequest, Sampling, ScoreRequest

GREATEST_DIFFERENCE = 2e-5
"""Between the engine's log-probabilities and a full float32 forward."""


async def started(folder: Path, **settings: Any) -> LocalEngine:
    engine = LocalEngine(str(folder), ActorsConfig(dtype="float32", **{"max_context": 256, **settings}))
    await engine.start()
    return engine


def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)


def full_logprobs(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    whole = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.long)[None]
    with torch.no_grad():
        rows = model(whole).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_greedy_equals_transformers_generate_token_for_token(tmp_path: Path, kind: str) -> None:
    folder = tiny.save(tmp_path / kind, kind)
    engine, model = await started(folder), reference(folder)
    prompts = [ids(seed, 3 + 7 * seed) for seed in range(5)]
    requests = [GenerateRequest(p, 2, Sampling(16, temperature=0.0)) for p in prompts]
    results = await asyncio.gather(*(engine.generate(r) for r in requests))
    await engine.close()
    for prompt, result in zip(prompts, results, strict=True):
        whole = torch.tensor(prompt, dtype=torch.long)[None]
        with torch.no_grad():
            expected = model.generate(whole, max_new_tokens=16, do_sample=False)[0, len(prompt) :].tolist()
        for sample in result.samples:
            assert sample.tokens.tolist() == expected
            assert np.abs(full_logprobs(model, prompt, sample.tokens) - sample.logprobs).max() < GREATEST_DIFFERENCE


async def test_sampled_logprobs_equal_a_full_forward_at_the_sampling_temperature(llama: Path) -> None:
    engine, model = await started(llama), reference(llama)
    prompt = ids(1, 20)
    result = await engine.generate(GenerateRequest(prompt, 4, Sampling(12, temperature=0.7)))
    await engine.close()
    for sample in result.samples:
        whole = torch.tensor(np.concatenate([prompt, sample.tokens]), dtype=torch.long)[None]
        with torch.no_grad():
            rows = (model(whole).logits[0, len(prompt) - 1 : -1] / 0.7).log_softmax(-1)
        expected = rows.gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()
        assert np.abs(expected - sample.logprobs).max() < GREATEST_DIFFERENCE


def test_restricted_distribution_is_renormalised_over_what_top_p_and_top_k_leave() -> None:
    logprobs = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    np.testing.assert_allclose(restrict(logprobs, 0.79, 0).exp(), [0.625, 0.375, 0, 0], atol=1e-6)
    np.testing.assert_allclose(restrict(logprobs, 1.0, 3).exp(), np.array([0.5, 0.3, 0.15, 0]) / 0.95, atol=1e-6)


def test_draws_follow_the_distribution() -> None:
    odds = np.array([0.5, 0.3, 0.15, 0.05])
    uniforms = np.random.default_rng(0).random(4000).tolist()
    logits = torch.tensor(odds).log().repeat(4000, 1)
    tokens, _ = pick(logits, [Sampling(1)] * 4000, uniforms)
    counts = np.bincount(tokens, minlength=4)
    assert float(((counts - 4000 * odds) ** 2 / (4000 * odds)).sum()) < 16.27  # chi-square, 3 degrees, 0.1%


async def test_a_prefix_is_prefilled_once_for_all_samples_and_children(llama: Path) -> None:
    engine = await started(llama)
    prompt = ids(2, 40)
    first = await engine.generate(GenerateRequest(prompt, 4, Sampling(8)))
    assert engine.counts["prefilled_tokens"] == 40
    child = np.concatenate([prompt, first.samples[0].tokens, ids(3, 5)])
    second = await engine.generate(GenerateRequest(child, 4, Sampling(8)))
    await engine.close()
    # Of the sampled action only the last token was never forwarded.
    assert second.cached_tokens == len(child) - 6
    assert engine.counts["prefilled_tokens"] == engine.counts["ideal_prefill_tokens"] == 46


async def test_requests_that_arrive_together_prefill_their_common_prefix_once(llama: Path) -> None:
    engine = await started(llama)
    common = ids(4, 30)
    prompts = [np.concatenate([common, ids(10 + i, 4)]) for i in range(4)]
    await asyncio.gather(*(engine.generate(GenerateRequest(p, 2, Sampling(4))) for p in prompts))
    await engine.close()
    assert engine.counts["prefilled_tokens"] == 30 + 4 * 4


async def test_eviction_under_a_small_budget_keeps_answers_right(llama: Path) -> None:
    engine, model = await started(llama, kv_cache_gib=60_000 / 2**30), reference(llama)
    for round in range(3):
        for seed in range(4):
            prompt = ids(seed, 50)
            result = await engine.generate(GenerateRequest(prompt, 1, Sampling(10, seed=round)))
            got = result.samples[0]
            assert np.abs(full_logprobs(model, prompt, got.tokens) - got.logprobs).max() < GREATEST_DIFFERENCE
    await engine.close()
    assert engine.cache.evicted_tokens > 0
    assert engine.cache.bytes <= 60_000


async def test_a_stop_string_ends_a_sample_and_its_tokens_are_kept(llama: Path) -> None:
    engine = await started(llama)
    free = await engine.generate(GenerateRequest(ids(5, 10), 1, Sampling(20, seed=3)))
    text = engine.tokenizer.decode(free.samples[0].tokens.tolist())
    stop = text[4:6]
    stopped = await engine.generate(GenerateRequest(ids(5, 10), 1, Sampling(20, seed=3, stop=[stop])))
    await engine.close()
    sample = stopped.samples[0]
    assert sample.finish == "stop"
    assert stop in engine.tokenizer.decode(sample.tokens.tolist())
    assert stop not in engine.tokenizer.decode(sample.tokens.tolist()[:-1])
    assert free.samples[0].tokens.tolist()[: len(sample.tokens)] == sample.tokens.tolist()


async def test_cancelling_frees_the_slots(llama: Path) -> None:
    engine = await started(llama)
    task = asyncio.create_task(engine.generate(GenerateRequest(ids(6, 10), 8, Sampling(200))))
    while not engine.counts["decoded_tokens"]:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    result = await engine.generate(GenerateRequest(ids(7, 10), 24, Sampling(2)))  # needs every slot
    await engine.close()
    assert len(result.samples) == 24


async def test_a_seed_reproduces_whatever_else_runs(llama: Path) -> None:
    engine = await started(llama)
    request = GenerateRequest(ids(8, 12), 3, Sampling(10, seed=7))
    alone = await engine.generate(request)
    others = [engine.generate(GenerateRequest(ids(20 + i, 9), 2, Sampling(30))) for i in range(3)]
    together, *_ = await asyncio.gather(engine.generate(request), *others)
    await engine.close()
    assert [s.tokens.tolist() for s in alone.samples] == [s.tokens.tolist() for s in together.samples]


@pytest.mark.parametrize(("n", "prompt", "most"), [(0, 5, 5), (99, 5, 5), (1, 250, 20), (1, 0, 5)])
async def test_a_request_that_can_never_fit_is_a_data_fault(llama: Path, n: int, prompt: int, most: int) -> None:
    engine = await started(llama)
    with pytest.raises(DataFault, match="expected"):
        await engine.generate(GenerateRequest(ids(0, prompt), n, Sampling(most)))
    await engine.close()


def version_folder(tmp_path: Path, source: Path, version: int, noise: float = 0.3) -> tuple[Path, str, Any]:
    """A published full version: the source's weights with noise."""
    model = reference(source)
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter) * parameter.std())
    folder = tmp_path / f"v{version}"
    folder.mkdir(parents=True)
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, folder / "model.safetensors")
    proof = digest.safetensors_file(folder / "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps({"version": version, "kind": "full", "digest": proof}))
    return folder, proof, model


async def test_an_update_between_two_tokens_labels_each_token_with_its_version(tmp_path: Path, llama: Path) -> None:
    engine = await started(llama)
    folder, proof, _ = version_folder(tmp_path, llama, 1)
    task = asyncio.create_task(engine.generate(GenerateRequest(ids(9, 10), 2, Sampling(200, temperature=1.0))))
    while engine.counts["decoded_tokens"] < 6:
        await asyncio.sleep(0)
    loaded = await engine.load(LoadRequest(1, str(folder), proof))
    result: GenerateResult = await task
    await engine.close()
    assert loaded.digest == proof
    longest = max(result.samples, key=lambda s: len(s.tokens))
    versions = longest.versions.tolist()
    assert versions == sorted(versions)
    assert set(versions) == {0, 1}


async def test_no_request_reads_another_versions_cache(tmp_path: Path, llama: Path) -> None:
    engine = await started(llama)
    prompt = ids(11, 30)
    await engine.generate(GenerateRequest(prompt, 1, Sampling(5)))
    folder, proof, model = version_folder(tmp_path, llama, 1)
    await engine.load(LoadRequest(1, str(folder), proof))
    result = await engine.generate(GenerateRequest(prompt, 1, Sampling(5)))
    await engine.close()
    assert result.cached_tokens == 0
    sample = result.samples[0]
    assert np.abs(full_logprobs(model, prompt, sample.tokens) - sample.logprobs).max() < GREATEST_DIFFERENCE


async def test_weights_whose_digest_disagrees_are_refused_and_the_old_ones_stay(tmp_path: Path, llama: Path) -> None:
    engine = await started(llama)
    folder, _, _ = version_folder(tmp_path, llama, 1)
    before = await engine.score(ScoreRequest(ids(12, 20)))
    with pytest.raises(InfrastructureFault, match="digest"):
        await engine.load(LoadRequest(1, str(folder), "0" * 64))
    after = await engine.score(ScoreRequest(ids(12, 20)))
    await engine.close()
    assert after.version == 0
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


async def test_score_equals_a_full_forward(llama: Path) -> None:
    engine = await started(llama)
    tokens = ids(13, 25)
    scored = await engine.score(ScoreRequest(tokens))
    await engine.close()
    assert scored.logprobs[0] == 0
    expected = full_logprobs(reference(llama), tokens[:1], tokens[1:])
    assert np.abs(expected - scored.logprobs[1:]).max() < GREATEST_DIFFERENCE


def test_a_model_that_does_not_fit_is_refused_before_loading(llama: Path) -> None:
    with pytest.raises(MemoryError, match="kv_cache_gib"):
        asyncio.run(LocalEngine(str(llama), ActorsConfig(kv_cache_gib=1e6)).start())


def test_a_model_with_sliding_layers_is_refused(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "gemma3", "gemma3")
    with pytest.raises(ValueError, match="sliding_attention"):
        asyncio.run(LocalEngine(str(folder)).start())


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(2, top_p=0.0),
        Sampling(2, top_p=1.1),
        Sampling(2, temperature=-1.0),
        Sampling(2, temperature=1e-300),
        Sampling(2, temperature=math.nan),
    ],
)
async def test_sampling_that_has_no_distribution_is_a_data_fault(llama: Path, sampling: Sampling) -> None:
    engine = await started(llama)
    with pytest.raises(DataFault, match="expected"):
        await engine.generate(GenerateRequest(ids(0, 5), 1, sampling))
    await engine.close()


async def test_token_ids_of_another_vocabulary_are_a_data_fault_and_the_engine_goes_on(llama: Path) -> None:
    engine = await started(llama)
    for tokens in (np.array([1, 260], np.int32), np.array([-1], np.int32)):
        with pytest.raises(DataFault, match="0 to 259"):
            await engine.generate(GenerateRequest(tokens, 1, Sampling(2)))
        with pytest.raises(DataFault, match="0 to 259"):
            await engine.score(ScoreRequest(tokens))
    with pytest.raises(DataFault, match="0 tokens"):
        await engine.score(ScoreRequest(np.array([], np.int32)))
    assert len((await engine.generate(GenerateRequest(ids(0, 5), 1, Sampling(2)))).samples) == 1
    await engine.close()


async def test_a_cancelled_score_or_load_leaves_the_engine_serving(tmp_path: Path, llama: Path) -> None:
    engine = await started(llama)
    folder, proof, _ = version_folder(tmp_path, llama, 1)
    for work in (engine.score(ScoreRequest(ids(1, 200))), engine.load(LoadRequest(1, str(folder), proof))):
        task = asyncio.create_task(work)
        await asyncio.sleep(0)  # it has reached the engine
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
    assert len((await engine.generate(GenerateRequest(ids(0, 5), 1, Sampling(2)))).samples) == 1
    await engine.close()


async def test_closing_fails_what_is_open(llama: Path) -> None:
    engine = await started(llama)
    tasks = [asyncio.create_task(engine.generate(GenerateRequest(ids(i, 10), 24, Sampling(200)))) for i in range(2)]
    while not engine.counts["decoded_tokens"]:
        await asyncio.sleep(0)
    await engine.close()
    for task in tasks:  # one runs, one waits for its slots
        with pytest.raises(InfrastructureFault, match="closed"):
            await task


@pytest.mark.parametrize("name", ["zzz.weight", "model.norm.weight"])
async def test_weights_of_another_model_are_refused_before_any_tensor_changes(
    tmp_path: Path, llama: Path, name: str
) -> None:
    engine = await started(llama)
    folder = tmp_path / "other"
    folder.mkdir()
    tensors = {n: 2 * p.detach() for n, p in reference(llama).named_parameters()} | {name: torch.zeros(5)}
    save_file(tensors, folder / "model.safetensors")
    proof = digest.safetensors_file(folder / "model.safetensors")
    (folder / "manifest.json").write_text(json.dumps({"version": 1, "kind": "full", "digest": proof}))
    before = await engine.score(ScoreRequest(ids(12, 20)))
    with pytest.raises(InfrastructureFault, match=name):
        await engine.load(LoadRequest(1, str(folder), proof))
    after = await engine.score(ScoreRequest(ids(12, 20)))
    await engine.close()
    assert after.version == 0
    np.testing.assert_array_equal(before.logprobs, after.logprobs)
