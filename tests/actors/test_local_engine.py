"""The embedded engine against transformers itself."""

import asyncio
import gc
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from coppice.actors.config import ActorsConfig
from coppice.actors.engines import attend, cached, decoder, weights
from coppice.actors.engines.local import LocalEngine
from coppice.actors.engines.sampling import key, pick, uniforms
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Constraint, GenerateRequest, GenerateResult, LoadRequest, Sampling
from tests import tiny
from tests.actors.conftest import Local
from tests.sglang_cpu.scripted import published

TOLERANCE = 2e-5
"""Between the engine's log-probabilities and a full float32 forward."""


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pack the small weights of these models too; all other tests compute them plainly."""
    monkeypatch.setattr(decoder, "PACKED_FROM", 0)


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)


GREEDY = GenerateRequest(ids(12, 20), 1, Sampling(6, temperature=0.0))


def forward(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> torch.Tensor:
    """Logits [new, vocabulary] at which each token was sampled."""
    whole = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.long)[None]
    with torch.no_grad():
        return model(whole).logits[0, len(prompt) - 1 : -1]


def full_logprobs(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    rows = forward(model, prompt, tokens).float().log_softmax(-1)
    return rows[range(len(tokens)), tokens.tolist()].numpy()


def worst(model: Any, *done: tuple[np.ndarray, GenerateResult]) -> float:
    return max(
        float(np.abs(full_logprobs(model, prompt, s.tokens) - s.logprobs).max())
        for prompt, r in done
        for s in r.samples
    )


def tokens(result: GenerateResult) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in result.samples]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.8, "top_k": 6}])
def test_support_and_logprobs_are_those_of_an_enumeration(
    cut: dict[str, Any], temperature: float, dtype: torch.dtype
) -> None:
    rng = np.random.default_rng(7)
    logits = torch.tensor(rng.normal(0, 2, (200, 40)), dtype=torch.float32).to(dtype)
    logits[:50, 20:] = -torch.inf  # as a constraint leaves them
    sampling = Sampling(1, temperature, support=True, **cut)
    tokens, logprobs, _, support = pick(logits.clone(), [sampling] * 200, rng.random(200))
    for row, scores in enumerate(logits.double().numpy()):
        odds = np.exp(scores / temperature) / np.exp(scores / temperature).sum()
        most = np.sort(odds[odds > 0])[::-1][: cut.get("top_k", 40)]
        expected = most[(np.cumsum(most) - most) / most.sum() < cut.get("top_p", 1.0)]
        left = support[row] if len(support[row]) else np.arange(40)
        # Equal logits, which bfloat16 has, may stand for each other at the edge of the support.
        np.testing.assert_allclose(np.sort(odds[left])[::-1], expected, rtol=1e-12)
        assert len(support[row]) < 40
        assert tokens[row] in left
        assert abs(logprobs[row] - np.log(odds[tokens[row]] / odds[left].sum())) < 1e-6


@pytest.mark.parametrize("vocabulary", [3, 64, 130, 1000])
def test_a_draw_takes_the_token_where_the_cumulated_odds_pass_it(vocabulary: int) -> None:
    rng = np.random.default_rng(vocabulary)
    logits = torch.tensor(rng.normal(0, 3, (300, vocabulary)), dtype=torch.float32)
    logits[:, torch.tensor(rng.random(vocabulary) < 0.3)] = -torch.inf
    logits[:, 1] = 0.0
    draws = np.concatenate([rng.random(298), [0.0, 1 - 2**-53]])
    odds = logits.double().softmax(-1).numpy()
    tokens, logprobs, *_ = pick(logits.clone(), [Sampling(1)] * 300, draws)
    cumulated = odds.cumsum(-1) / odds.sum(-1, keepdims=True)
    for row, token in enumerate(tokens):
        assert odds[row, token] > 0
        below = cumulated[row, token - 1] if token else 0.0
        assert below - 1e-6 <= draws[row] <= cumulated[row, token] + 1e-6
    np.testing.assert_allclose(logprobs, np.log(odds[np.arange(300), tokens]), atol=2e-6)


async def test_requests_that_arrive_together_prefill_their_common_prefix_once(local: Local) -> None:
    engine = await local()
    common = ids(4, 30)
    prompts = [np.concatenate([common, ids(10 + i, 4)]) for i in range(4)]
    await asyncio.gather(*(engine.generate(GenerateRequest(p, 2, Sampling(4))) for p in prompts))
    assert engine.counts["prefilled_tokens"] == 30 + 4 * 4
    assert engine.counts["ideal_prefill_tokens"] == 30 + 4 * 4


async def test_a_seed_reproduces_whatever_else_runs(local: Local) -> None:
    engine = await local()
    request = GenerateRequest(ids(8, 12), 3, Sampling(10, seed=7))
    alone = await engine.generate(request)
    others = [engine.generate(GenerateRequest(ids(20 + i, 9), 2, Sampling(30))) for i in range(3)]
    together, *_ = await asyncio.gather(engine.generate(request), *others)
    assert tokens(alone) == tokens(together)


def noised(
    tmp_path: Path, source: Path, version: int, noise: float = 0.3
) -> tuple[LoadRequest, Any]:
    """A published full version, which is the source's weights with noise, and its model."""
    model = reference(source)
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter) * parameter.std())
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    return published(tmp_path, version, "full", tensors), model


async def test_a_model_that_does_not_fit_is_refused(llama: Path) -> None:
    with pytest.raises(MemoryError, match="kv_cache_gib"):
        await LocalEngine(str(llama), ActorsConfig(kv_cache_gib=1e6)).start()


async def test_layers_without_kernels_follow_updates(local: Local, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "gemma3", "gemma3")
    engine = await local(folder, max_batch=4)
    # one after the other, because each needs three of four places
    requests = [GenerateRequest(ids(i, 5 + i), 3, Sampling(12, seed=i)) for i in range(3)]
    asked = [asyncio.create_task(engine.generate(request)) for request in requests]
    await asyncio.sleep(0.01)
    asked[1].cancel()
    update, _ = noised(tmp_path, folder, 1)
    await engine.load(update)
    first, last = await asked[0], await asked[2]
    assert [len(first.samples), len(last.samples), engine.stats()["running"]] == [3, 3, 0]
    requests = [GenerateRequest(ids(2, 7), n, Sampling(12, seed=2)) for n in (1, 4)]
    one, more = [await engine.generate(request) for request in requests]
    assert set(one.samples[0].versions.tolist()) == {1}
    assert tokens(one)[0] == tokens(more)[0]


async def test_a_cancelled_load_leaves_it_serving(
    local: Local, tmp_path: Path, llama: Path
) -> None:
    engine = await local()
    update, _ = noised(tmp_path, llama, 1)
    task = asyncio.create_task(engine.load(update))
    await asyncio.sleep(0)  # it has reached the engine
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert len((await engine.generate(GREEDY)).samples) == 1


@pytest.mark.parametrize("name", ["zzz.weight", "model.norm.weight"])
async def test_weights_of_another_model_are_refused_before_any_tensor_changes(
    local: Local, tmp_path: Path, llama: Path, name: str
) -> None:
    engine = await local()
    tensors = {n: 2 * p.detach() for n, p in reference(llama).named_parameters()}
    other = published(tmp_path, 1, "full", tensors | {name: torch.zeros(5)})
    (before,) = (await engine.generate(GREEDY)).samples
    with pytest.raises(InfrastructureFault, match=name):
        await engine.load(other)
    engine.batch.memory.cache.clear()  # a prompt computed once would hide new weights
    (after,) = (await engine.generate(GREEDY)).samples
    assert set(after.versions.tolist()) == {0}
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


async def explored(
    engine: LocalEngine, seed: int, requests: int = 14, most: int = 8
) -> list[tuple[np.ndarray, GenerateResult]]:
    """Random trees: prompts of all lengths under common heads and behind earlier samples, of n up
    to ``most``, a few at a time."""
    rng = np.random.default_rng(seed)
    heads = [ids(100 + i, int(rng.integers(1, 60))) for i in range(3)]
    done, places = list[tuple[np.ndarray, GenerateResult]](), asyncio.Semaphore(5)

    def drawn(count: int, least: int = 0) -> int:
        return int(rng.integers(least, count))

    async def ask() -> None:
        async with places:
            head = heads[drawn(3)]
            if done and rng.random() < 0.5:
                prompt, result = done[drawn(len(done))]
                sample = result.samples[drawn(len(result.samples))]
                head = np.concatenate([prompt, sample.tokens[: drawn(len(sample.tokens) + 1)]])
            prompt = np.concatenate([head, ids(drawn(10**6), drawn(40))])[:200]
            request = GenerateRequest(prompt, drawn(most + 1, 1), Sampling(drawn(40, 1)))
            done.append((prompt, await engine.generate(request)))

    await asyncio.gather(*(ask() for _ in range(requests)))
    return done


def held_rows(engine: LocalEngine) -> int:
    shelves = [*engine.batch.memory.prefixes.values(), *engine.batch.memory.tails.values()]
    return sum(len(shelf.held) + shelf.promised for shelf in shelves)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_branches_of_prefixes_of_any_lengths_equal_a_full_forward(
    local: Local, tmp_path: Path, kind: str, seed: int
) -> None:
    folder = tiny.save(tmp_path / kind, kind, seed)
    engine = await local(folder, prefill_tokens=int(np.random.default_rng(seed).integers(5, 80)))
    done = await explored(engine, seed)
    await engine.close()
    assert worst(reference(folder), *done) < TOLERANCE
    memory = engine.batch.memory
    assert memory.running_bytes + memory.cache.bytes <= memory.budget
    assert held_rows(engine) == 0


async def test_samples_go_on_beside_the_chunks_of_a_long_prompt(local: Local) -> None:
    engine = await local(prefill_tokens=16)
    busy = engine.generate(GenerateRequest(ids(30, 5), 3, Sampling(200, seed=1)))
    running = asyncio.create_task(busy)
    while not engine.counts["decoded_tokens"]:
        await asyncio.sleep(0)
    before = engine.counts["decoded_tokens"]
    await engine.generate(GenerateRequest(ids(31, 150), 1, Sampling(1)))
    assert engine.counts["decoded_tokens"] - before >= 3 * 10  # the chunks took ten steps
    running.cancel()


async def test_the_support_comes_if_asked_for_and_where_something_was_cut(local: Local) -> None:
    engine = await local()
    greedy = Sampling(6, 0.0, 0.9, support=True)  # top-p cuts nothing
    for sampling, support in ((Sampling(6, 1.0, 0.9), None), (greedy, b"")):
        result = await engine.generate(GenerateRequest(ids(3, 9), 1, sampling))
        assert result.samples[0].support == support


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.second
@pytest.mark.parametrize(
    ("shape", "requests", "most"),
    [({"rope_parameters": DYNAMIC}, 14, 8), ({"hidden_act": "gelu"}, 9, 4), ({}, 30, 1)],
    ids=[
        "a model's own code",
        "another activation",
        "single samples, whose tails stand behind their prefixes",
    ],
)
async def test_the_other_decoder_and_other_tails_equal_a_full_forward(
    local: Local, tmp_path: Path, shape: dict[str, Any], requests: int, most: int
) -> None:
    folder = tiny.save(tmp_path / "model", **shape)
    engine = await local(folder, prefill_tokens=30)
    assert isinstance(engine.batch.decoder, decoder.WholeDecoder) == bool(shape)
    done = await explored(engine, 10, requests, most)
    assert worst(reference(folder), *done) < TOLERANCE
    assert most > 1 or all(shelf.capacity == 0 for shelf in engine.batch.memory.tails.values())


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("packed_from", [0, 2**18])
def test_a_product_and_what_follows_it(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, near: float, packed_from: int
) -> None:
    monkeypatch.setattr(decoder, "PACKED_FROM", packed_from)
    torch.manual_seed(0)
    linear = torch.nn.Linear(24, 40, dtype=dtype).requires_grad_(False)
    rows, other = torch.randn(5, 24).to(dtype), torch.randn(5, 40).to(dtype)
    wide = rows.double() @ linear.weight.double().t() + linear.bias.double()
    expected = {
        "none": wide, "swish": wide * wide.sigmoid(), "mul": wide * other, "add": wide + other
    }  # fmt: skip
    product = decoder.PackedLinear(linear)
    for then in ("none", "swish", "mul", "add"):
        given = other.clone() if then in ("mul", "add") else None
        torch.testing.assert_close(
            product(rows, then, given).double(), expected[then], rtol=near, atol=near
        )
        assert given is None or torch.equal(given, other)


def test_attention_by_products_is_that_of_the_cpus_kernel() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 7, 16)
    mask = torch.zeros(2, 1, 1, 7).masked_fill(torch.tensor([1, 0, 0, 1, 0, 1, 0]) > 0, -torch.inf)
    for given in (None, mask):
        plain = attend.by_products(query, key, value, given, 0.3)
        kernel = attend._attention(query, key, value, given, 0.3)
        torch.testing.assert_close(plain, tuple(kernel))


@pytest.mark.second
async def test_transformers_caches_stay_within_the_budget(local: Local, tmp_path: Path) -> None:
    token = 2 * 2 * 16 * 4  # bytes of the layer that sees everything; the other one has a window
    budget = 2 * 4 * (90 * token + 10_000)
    folder = tiny.save(tmp_path / "gemma", "gemma3")
    engine = await local(folder, kv_cache_gib=budget / 2**30)
    batch = engine.batch
    assert isinstance(batch, cached.CachedBatch)
    tasks = [
        asyncio.create_task(engine.generate(GenerateRequest(ids(i, 40), 4, Sampling(50))))
        for i in range(4)
    ]
    most = held = 0
    while not all(task.done() for task in tasks):
        most = max(most, len(batch.running()))
        held = max(held, sum(map(cached._bytes, list(batch._caches.values()))))
        await asyncio.sleep(0)
    assert 4 <= most <= 8
    assert 0 < held <= budget


@pytest.mark.second
async def test_running_samples_take_their_memory_from_the_budget(local: Local) -> None:
    token = 2 * 2 * 2 * 8 * 4  # bytes: layers, key and value, heads, head_dim, float32
    rows = 128 + 4 * 64
    engine = await local(kv_cache_gib=2 * rows * token / 2**30)
    assert engine.stats()["kv_capacity_tokens"] == 2 * rows
    for seed in range(4):  # the cache fills
        await engine.generate(GenerateRequest(ids(seed, 100), 1, Sampling(10)))
    requests = [GenerateRequest(ids(50 + i, 90), 4, Sampling(64)) for i in range(5)]
    asking, most = asyncio.gather(*map(engine.generate, requests)), 0
    while not asking.done():
        most = max(most, int(engine.stats()["running"]))
        await asyncio.sleep(0)
    assert [len(result.samples) for result in await asking] == [4] * 5
    assert 4 <= most <= 8 and engine.stats()["evicted_tokens"] > 0
    with pytest.raises(DataFault, match="kv_cache_gib"):
        await engine.generate(GenerateRequest(ids(60, 90), 12, Sampling(64)))


def held_bytes() -> int:
    """Of all tensors that can be keys and values of several tokens of the tiny model."""
    there = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.ndim in (5, 6)]
    storages = (one.untyped_storage() for one in there if one.shape[:2] == (2, 2))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


async def test_freed_keys_and_values_do_not_wait_for_a_garbage_collection(local: Local) -> None:
    budget = 3 * 256 * 256  # bytes: three rows of 256 tokens, of 256 bytes each
    engine = await local(kv_cache_gib=budget / 2**30)
    arena = engine.batch.memory.arena
    gc.collect()
    before = held_bytes()
    gc.disable()
    try:
        for seed, (prompt, samples, new) in enumerate([(90, 1, 60), (20, 4, 9), (150, 2, 5)] * 3):
            await engine.generate(GenerateRequest(ids(seed, prompt), samples, Sampling(new)))
            assert 0 < held_bytes() - before <= budget
        assert engine.stats()["evicted_tokens"] > 0
        await engine._thread.run(engine.batch.forget)
        assert held_bytes() - before == engine.stats()["kv_running_bytes"]
        await engine._thread.run(engine.batch.memory.clear)
        assert held_bytes() == before
        assert sum(end - start for start, end in arena._gaps + arena._returned) == budget
    finally:
        gc.enable()


async def test_the_last_layer_is_computed_for_the_rows_that_are_used(local: Local) -> None:
    engine = await local(prefill_tokens=32)
    layers, rows = engine.batch.decoder._layers, list[list[int]]()
    for layer in (layers[0], layers[-1]):
        counts, real = list[int](), layer.down
        rows.append(counts)
        layer.down = lambda x, *then, counts=counts, real=real: (
            counts.append(len(x)) or real(x, *then)
        )
    await engine.generate(GenerateRequest(ids(0, 70), 2, Sampling(3)))
    assert rows == [[32, 32, 6, 2, 2], [1, 1, 1, 2, 2]]


LETTERS = [ord(letter) - ord("!") for letter in "abc"]
"""Their ids: the tiny tokenizer's begin with "!"."""
PATTERN = Constraint("regex", "[ab]{2,5}c")


def expected_at(place: int, row: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Log-probabilities, float64 [vocabulary], after constraint, temperature and top-k, from a
    plain forward's logits."""
    allowed = LETTERS[:2] if place < 2 else LETTERS if place < 5 else LETTERS[2:]
    left = allowed if sampling.constraint else range(len(row))
    scores = torch.full_like(row, -torch.inf, dtype=torch.float64)
    scores[list(left)] = row[list(left)].double() / (sampling.temperature or 1.0)
    if sampling.temperature and sampling.top_k:
        scores[scores.argsort(descending=True)[sampling.top_k :]] = -torch.inf
    return scores.log_softmax(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(10, 0.0, 0.5, 2, seed=3, top_logprobs=7),  # greedy: top-p and top-k cut nothing
        Sampling(10, 1.3, 1.0, 3, seed=3, top_logprobs=5),  # fewer than asked for are left
        Sampling(10, 0.8, seed=3, constraint=PATTERN, top_logprobs=4),
        Sampling(10, 0.0, seed=3, constraint=PATTERN, top_logprobs=2),
    ],
    ids=str,
)
async def test_the_most_probable_tokens_are_those_of_the_distribution_sampled_from(
    local: Local, llama: Path, sampling: Sampling
) -> None:
    engine, prompts = await local(), [ids(90, 12), ids(91, 7)]
    requests = [
        GenerateRequest(prompts[0], 3, sampling),
        GenerateRequest(prompts[1], 2, Sampling(10, seed=4, top_logprobs=2)),
        GenerateRequest(prompts[1], 2, Sampling(10, seed=4)),
    ]
    result, other, plain = await asyncio.gather(*map(engine.generate, requests))
    assert [sample.top for sample in plain.samples] == [None, None]
    assert tokens(plain) == tokens(other)
    assert {len(top) for sample in other.samples for top in sample.top or []} == {2}
    for sample in result.samples:
        rows = forward(reference(llama), prompts[0], sample.tokens)
        assert sample.top is not None and len(sample.top) == len(rows)
        for place, top in enumerate(sample.top):
            expected = expected_at(place, rows[place], sampling)
            best = expected.topk(min(sampling.top_logprobs, int(expected.isfinite().sum()))).values
            for found in (list(top.values()), expected[list(top)]):  # so they descend
                np.testing.assert_allclose(found, best, rtol=0, atol=TOLERANCE)
            logprob = sample.logprobs[place]
            assert top.get(int(sample.tokens[place]), logprob) == logprob


async def test_overlapping_loads_are_done_in_the_order_in_which_they_were_asked_for(
    local: Local, tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await local()
    (one, _), (two, model) = [noised(tmp_path, llama, version) for version in (1, 2)]
    plain, first = weights.verified, threading.Event()

    def verified(folder: Path, expected: str, held: str) -> weights.Version:
        if str(folder) == one.path:
            # the first is slow to verify; were the second not to wait, it would set this
            first.wait(0.2)
        else:
            first.set()
        return plain(folder, expected, held)

    monkeypatch.setattr(weights, "verified", verified)
    await asyncio.gather(engine.load(one), engine.load(two))
    result = await engine.generate(GREEDY)
    assert {*result.samples[0].versions.tolist(), engine.version} == {2}
    assert worst(model, (GREEDY.tokens, result)) < TOLERANCE


@pytest.mark.parametrize("version", [0, 1])
async def test_a_swap_while_a_prompt_is_prefilled_computes_it_anew(
    local: Local, tmp_path: Path, llama: Path, version: int
) -> None:
    """Also if the new weights bear the number of those that the engine has."""
    engine = await local(prefill_tokens=4)
    update, model = noised(tmp_path, llama, version)
    prompt = ids(39, 200)
    task = asyncio.create_task(engine.generate(GenerateRequest(prompt, 2, Sampling(4))))
    while not engine.counts["prefilled_tokens"]:
        await asyncio.sleep(0)
    await engine.load(update)
    assert engine.counts["prefilled_tokens"] < 200  # the swap came between
    began = await task
    again = await engine.generate(GenerateRequest(prompt, 1, Sampling(5)))
    assert {*began.samples[0].versions.tolist()} == {version}
    assert again.cached_tokens >= 199
    assert worst(model, (prompt, began), (prompt, again)) < TOLERANCE


@pytest.mark.parametrize("setting", [{"rank_pattern": {"q_proj": 4}}, {"bias": "all"}])
async def test_an_adapter_that_is_no_plain_lora_is_refused(
    tmp_path: Path, llama: Path, setting: dict[str, Any]
) -> None:
    name = "model.layers.0.self_attn.q_proj"
    tensors = {f"base_model.model.{name}.lora_A.weight": torch.ones(2, 32)}
    tensors[f"base_model.model.{name}.lora_B.weight"] = torch.ones(32, 2)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 4, **setting}))
    version = weights.Version("lora", tmp_path / "adapter_model.safetensors", [])
    with pytest.raises(ValueError, match=next(iter(setting))):
        weights.apply(reference(llama), llama, version)


def test_draws_of_different_samples_and_places_are_uniform_and_apart() -> None:
    keys = [key(seed, index) for seed in range(20) for index in range(10)]
    draws = np.stack([uniforms(keys, [place] * 200) for place in range(50)])
    assert len(np.unique(draws)) == draws.size
    counts = np.histogram(draws, 20, (0, 1))[0]
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8  # chi-square, 19 degrees, 0.1%
    assert abs(np.corrcoef(draws)[np.triu_indices(50, 1)]).max() < 0.3
