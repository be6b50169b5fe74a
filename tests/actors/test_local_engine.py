"""The embedded engine against transformers itself."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from coppice.actors.config import ActorsConfig
from coppice.actors.engines import attend, decoder, weights
from coppice.actors.engines.attend import Chunk
from coppice.actors.engines.local import LocalEngine
from coppice.actors.engines.samples import Running
from coppice.actors.engines.sampling import key, pick, uniforms
from coppice.wire import digest
from coppice.wire.faults import DataFault, InfrastructureFault
from coppice.wire.messages import Constraint, GenerateRequest, GenerateResult, LoadRequest, Sampling
from coppice.wire.published import Manifest
from tests import tiny

GREATEST_DIFFERENCE = 2e-5
"""Between the engine's log-probabilities and a full float32 forward."""


async def started(folder: Path, **settings: Any) -> LocalEngine:
    engine = LocalEngine(
        str(folder), ActorsConfig(**{"dtype": "float32", "max_context": 256, **settings})
    )
    await engine.start()
    return engine


def reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def ids(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count).astype(np.int32)


GREEDY = GenerateRequest(ids(12, 20), 1, Sampling(6, temperature=0.0))


def full_logprobs(model: Any, prompt: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    whole = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.long)[None]
    with torch.no_grad():
        rows = model(whole).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return rows.gather(1, whole[0, len(prompt) :, None])[:, 0].numpy()


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_greedy_equals_transformers_generate_token_for_token(
    tmp_path: Path, kind: str
) -> None:
    folder = tiny.save(tmp_path / kind, kind)
    engine, model = await started(folder), reference(folder)
    prompts = [ids(seed, 3 + 7 * seed) for seed in range(5)]
    requests = [GenerateRequest(p, 2, Sampling(16, temperature=0.0)) for p in prompts]
    results = await asyncio.gather(*(engine.generate(r) for r in requests))
    await engine.close()
    for prompt, result in zip(prompts, results, strict=True):
        whole = torch.tensor(prompt, dtype=torch.long)[None]
        with torch.no_grad():
            generated = model.generate(whole, max_new_tokens=16, do_sample=False)
        for sample in result.samples:
            assert sample.tokens.tolist() == generated[0, len(prompt) :].tolist()
    assert worst(model, list(zip(prompts, results, strict=True))) < GREATEST_DIFFERENCE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(
    "cut",
    [{"top_p": 0.9}, {"top_k": 5}, {"top_p": 0.8, "top_k": 6}, {"top_p": 0.05}, {"top_k": 40}],
)
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


async def test_only_a_request_that_asks_gets_the_support_and_only_where_something_was_cut(
    llama: Path,
) -> None:
    engine, found = await started(llama), list[Any]()
    for sampling in (
        Sampling(6, 1.0, 0.9, support=True),
        Sampling(6, 1.0, 0.9),
        Sampling(6, 0.0, 0.9, support=True),  # greedy: top-p cuts nothing
        Sampling(6, top_k=260, support=True),
    ):
        result = await engine.generate(GenerateRequest(ids(3, 9), 1, sampling))
        found.append(result.samples[0].support)
    await engine.close()
    assert found[0] and found[1:] == [None, b"", b""]


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


async def test_requests_that_arrive_together_prefill_their_common_prefix_once(llama: Path) -> None:
    engine = await started(llama)
    common = ids(4, 30)
    prompts = [np.concatenate([common, ids(10 + i, 4)]) for i in range(4)]
    await asyncio.gather(*(engine.generate(GenerateRequest(p, 2, Sampling(4))) for p in prompts))
    await engine.close()
    computed = engine.counts["prefilled_tokens"], engine.counts["ideal_prefill_tokens"]
    assert computed == (30 + 4 * 4, 30 + 4 * 4)


async def test_a_seed_reproduces_whatever_else_runs(llama: Path) -> None:
    engine = await started(llama)
    request = GenerateRequest(ids(8, 12), 3, Sampling(10, seed=7))
    alone = await engine.generate(request)
    others = [engine.generate(GenerateRequest(ids(20 + i, 9), 2, Sampling(30))) for i in range(3)]
    together, *_ = await asyncio.gather(engine.generate(request), *others)
    await engine.close()
    assert tokens(alone) == tokens(together)


def tokens(result: GenerateResult) -> list[list[int]]:
    return [sample.tokens.tolist() for sample in result.samples]


def version_folder(
    tmp_path: Path, source: Path, version: int, noise: float = 0.3
) -> tuple[Path, str, Any]:
    """A published full version: the source's weights with noise."""
    model = reference(source)
    torch.manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter) * parameter.std())
    tensors = {n: p.detach().clone() for n, p in model.named_parameters()}
    folder, proof = published(tmp_path / f"v{version}", version, tensors)
    return folder, proof, model


def published(folder: Path, version: int, tensors: dict[str, Any]) -> tuple[Path, str]:
    """A published full version of these tensors."""
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    proof = digest.safetensors_file(folder / "model.safetensors")
    Manifest(version, "full", proof).write(folder)
    return folder, proof


async def test_a_model_that_does_not_fit_is_refused(llama: Path) -> None:
    with pytest.raises(MemoryError, match="kv_cache_gib"):
        await started(llama, kv_cache_gib=1e6)


async def test_layers_without_kernels_share_the_places_and_follow_updates(tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "gemma3", "gemma3")
    engine = await started(folder, max_batch=4)
    asked = [
        asyncio.create_task(
            engine.generate(GenerateRequest(ids(i, 5 + i), 3, Sampling(12, seed=i)))
        )
        for i in range(3)
    ]  # one after the other, because each needs three of four places
    await asyncio.sleep(0.01)
    asked[1].cancel()
    update, proof, _ = version_folder(tmp_path, folder, 1)
    await engine.load(LoadRequest(1, str(update), proof))
    first, last = await asked[0], await asked[2]
    assert [len(first.samples), len(last.samples), engine.stats()["running"]] == [3, 3, 0]
    one, more = [
        await engine.generate(GenerateRequest(ids(2, 7), n, Sampling(12, seed=2))) for n in (1, 4)
    ]
    assert one.samples[0].versions.tolist() == [1] * len(one.samples[0].tokens)
    assert one.samples[0].tokens.tolist() == more.samples[0].tokens.tolist()
    await engine.close()


async def test_a_cancelled_load_leaves_the_engine_serving(tmp_path: Path, llama: Path) -> None:
    engine = await started(llama)
    folder, proof, _ = version_folder(tmp_path, llama, 1)
    task = asyncio.create_task(engine.load(LoadRequest(1, str(folder), proof)))
    await asyncio.sleep(0)  # it has reached the engine
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert len((await engine.generate(GenerateRequest(ids(0, 5), 1, Sampling(2)))).samples) == 1
    await engine.close()


@pytest.mark.parametrize("name", ["zzz.weight", "model.norm.weight"])
async def test_weights_of_another_model_are_refused_before_any_tensor_changes(
    tmp_path: Path, llama: Path, name: str
) -> None:
    engine = await started(llama)
    tensors = {n: 2 * p.detach() for n, p in reference(llama).named_parameters()}
    folder, proof = published(tmp_path / "other", 1, tensors | {name: torch.zeros(5)})
    (before,) = (await engine.generate(GREEDY)).samples
    with pytest.raises(InfrastructureFault, match=name):
        await engine.load(LoadRequest(1, str(folder), proof))
    engine.batch.memory.cache.clear()  # a prompt computed once would hide new weights
    (after,) = (await engine.generate(GREEDY)).samples
    await engine.close()
    assert set(after.versions.tolist()) == {0}
    np.testing.assert_array_equal(before.logprobs, after.logprobs)


async def explored(
    engine: LocalEngine, seed: int, requests: int = 14, most: int = 8
) -> list[tuple[np.ndarray, GenerateResult]]:
    """Random trees: prompts of all lengths under common heads and behind earlier samples, of n up
    to ``most``, a few at a time."""
    rng = np.random.default_rng(seed)
    heads = [ids(100 + i, int(rng.integers(1, 60))) for i in range(3)]
    done: list[tuple[np.ndarray, GenerateResult]] = []
    places = asyncio.Semaphore(5)

    async def ask() -> None:
        async with places:
            if done and rng.random() < 0.5:
                prompt, result = done[int(rng.integers(len(done)))]
                sample = result.samples[int(rng.integers(len(result.samples)))]
                head = np.concatenate(
                    [prompt, sample.tokens[: int(rng.integers(0, len(sample.tokens) + 1))]]
                )
            else:
                head = heads[int(rng.integers(3))]
            prompt = np.concatenate(
                [head, ids(int(rng.integers(10**6)), int(rng.integers(0, 40)))]
            )[:200]
            n, new = int(rng.integers(1, most + 1)), int(rng.integers(1, 40))
            done.append((prompt, await engine.generate(GenerateRequest(prompt, n, Sampling(new)))))

    await asyncio.gather(*(ask() for _ in range(requests)))
    return done


def worst(model: Any, done: list[tuple[np.ndarray, GenerateResult]]) -> float:
    return max(
        float(np.abs(full_logprobs(model, prompt, s.tokens) - s.logprobs).max())
        for prompt, r in done
        for s in r.samples
    )


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_branches_of_prefixes_of_any_lengths_equal_a_full_forward(
    tmp_path: Path, kind: str, seed: int
) -> None:
    folder = tiny.save(tmp_path / kind, kind, seed)
    engine = await started(folder, prefill_tokens=int(np.random.default_rng(seed).integers(5, 80)))
    done = await explored(engine, seed)
    await engine.close()
    assert worst(reference(folder), done) < GREATEST_DIFFERENCE
    assert (
        engine.batch.memory.running_bytes + engine.batch.memory.cache.bytes
        <= engine.batch.memory.budget
    )
    shelves = [*engine.batch.memory.prefixes.values(), *engine.batch.memory.tails.values()]
    assert sum(len(s.held) + s.promised for s in shelves) == 0  # all rows are free again


async def test_single_samples_beside_each_other_equal_a_full_forward(llama: Path) -> None:
    """Their tails stand behind their prefixes, in rows that move when others end."""
    engine = await started(llama, prefill_tokens=30)
    done = await explored(engine, 10, requests=30, most=1)
    await engine.close()
    assert all(shelf.capacity == 0 for shelf in engine.batch.memory.tails.values())
    assert worst(reference(llama), done) < GREATEST_DIFFERENCE


@pytest.mark.second
@pytest.mark.parametrize(
    ("module", "name", "value"),
    [(decoder, "PLAIN", ()), (attend, "_attention", attend.by_products)],
    ids=["a model's own code", "attention on a GPU"],
)
async def test_the_other_decoder_and_attention_equal_a_full_forward(
    llama: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, value: Any
) -> None:
    monkeypatch.setattr(module, name, value)
    engine = await started(llama)
    assert isinstance(engine.batch.decoder, decoder.WholeDecoder) == (module is decoder)
    done = await explored(engine, 7)
    await engine.close()
    assert worst(reference(llama), done) < GREATEST_DIFFERENCE


@pytest.mark.second
async def test_bfloat16_stays_near_a_bfloat16_forward(llama: Path) -> None:
    engine = await started(llama, dtype="bfloat16")
    done = await explored(engine, 8)
    await engine.close()
    model, exact, apart, own = reference(llama, torch.bfloat16), reference(llama), [], []
    for prompt, result in done:
        for sample in result.samples:
            expected = full_logprobs(exact, prompt, sample.tokens)
            apart.append(np.abs(expected - sample.logprobs).mean())
            own.append(np.abs(expected - full_logprobs(model, prompt, sample.tokens)).mean())
    # no further from float32 than transformers' own bfloat16
    assert np.mean(apart) < 1.5 * np.mean(own)


async def test_a_prompt_prefilled_in_chunks_beside_decoding_rows_equals_one_prefilled_whole(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, model = await started(llama, prefill_tokens=16), reference(llama)
    steps: list[tuple[int, int]] = []
    forward = engine.batch.forward

    def recorded(decoding: list[Running], chunks: list[Chunk]) -> torch.Tensor:
        steps.append((len(decoding), sum(chunk.count for chunk in chunks)))
        return forward(decoding, chunks)

    monkeypatch.setattr(engine.batch, "forward", recorded)
    running = asyncio.create_task(
        engine.generate(GenerateRequest(ids(30, 5), 3, Sampling(60, seed=1)))
    )
    while not engine.counts["decoded_tokens"]:
        await asyncio.sleep(0)
    prompt = ids(31, 150)
    late = await engine.generate(GenerateRequest(prompt, 4, Sampling(8, seed=2)))
    assert worst(model, [(ids(30, 5), await running), (prompt, late)]) < GREATEST_DIFFERENCE
    await engine.close()
    assert [chunk for _, chunk in steps if chunk] == [5] + [16] * 9 + [6]
    assert any(rows and chunk for rows, chunk in steps)
    whole = await started(llama)
    again = await whole.generate(GenerateRequest(prompt, 4, Sampling(8, seed=2)))
    await whole.close()
    assert tokens(again) == tokens(late)


async def test_a_repeated_prompt_needs_no_forward_of_its_own(llama: Path) -> None:
    engine, model = await started(llama), reference(llama)
    prompt = ids(32, 40)
    await engine.generate(GenerateRequest(prompt, 1, Sampling(3)))
    for longer in (prompt, np.concatenate([prompt, ids(33, 3)]), prompt[:20], prompt[:20]):
        result = await engine.generate(GenerateRequest(longer, 2, Sampling(1)))
        assert worst(model, [(longer, result)]) < GREATEST_DIFFERENCE
    await engine.close()
    # 3 new ones, and the last token of the shorter prompt, once.
    assert engine.counts["prefilled_tokens"] == 40 + 3 + 1
    assert result.cached_tokens == 20


@pytest.mark.second
async def test_running_samples_take_their_memory_from_the_budget(llama: Path) -> None:
    token = 2 * 2 * 2 * 8 * 4  # bytes: layers, key and value, heads, head_dim, float32
    rows = 128 + 4 * 64
    engine = await started(llama, kv_cache_gib=2 * rows * token / 2**30)
    assert engine.stats()["kv_capacity_tokens"] == 2 * rows
    for seed in range(4):  # the cache fills
        await engine.generate(GenerateRequest(ids(seed, 100), 1, Sampling(10)))
    most = held = 0
    tasks = [
        asyncio.create_task(engine.generate(GenerateRequest(ids(50 + i, 90), 4, Sampling(64))))
        for i in range(5)
    ]
    while not all(task.done() for task in tasks):
        most = max(most, int(engine.stats()["running"]))
        held = max(held, engine.batch.memory.running_bytes + engine.batch.memory.cache.bytes)
        await asyncio.sleep(0)
    results = [task.result() for task in tasks]
    with pytest.raises(DataFault, match="kv_cache_gib"):
        await engine.generate(GenerateRequest(ids(60, 90), 12, Sampling(64)))
    await engine.close()
    assert [len(r.samples) for r in results] == [4] * 5
    assert 4 <= most <= 8
    assert held <= 2 * rows * token
    assert engine.stats()["evicted_tokens"] > 0


@pytest.mark.parametrize("length", [1, 5, 40])
async def test_a_stop_string_of_any_length_is_found_where_it_ends(llama: Path, length: int) -> None:
    engine = await started(llama)
    free = await engine.generate(GenerateRequest(ids(36, 10), 1, Sampling(120, seed=4)))
    text = engine.tokenizer.decode(free.samples[0].tokens.tolist(), skip_special_tokens=False)
    stop = text[45 : 45 + length]
    stops = Sampling(120, seed=4, stop=["no such text", stop])
    (sample,) = (await engine.generate(GenerateRequest(ids(36, 10), 1, stops))).samples
    await engine.close()
    tokens, decode = sample.tokens.tolist(), engine.tokenizer.decode
    assert sample.finish == "stop"
    assert stop in decode(tokens, skip_special_tokens=False)
    assert stop not in decode(tokens[:-1], skip_special_tokens=False)


def distribution(row: torch.Tensor, sampling: Sampling, allowed: list[int]) -> torch.Tensor:
    """Log-probabilities, float64 [vocabulary], after constraint, temperature, top-k and top-p, from
    a plain forward's logits."""
    scores = torch.full_like(row, -torch.inf, dtype=torch.float64)
    scores[allowed] = row[allowed].double() / (sampling.temperature or 1.0)
    odds, order = scores.softmax(-1).sort(descending=True)
    if sampling.temperature and sampling.top_k:
        scores[order[sampling.top_k :]] = -torch.inf
    if sampling.temperature and sampling.top_p < 1:
        scores[order[int((odds.cumsum(0) - odds < sampling.top_p).sum()) :]] = -torch.inf
    return scores.log_softmax(-1)


LETTERS = [ord(letter) - ord("!") for letter in "abc"]
"""Their ids: the tiny tokenizer's begin with "!"."""
ANYTHING = list(range(260))


def allowed_at(place: int, sampling: Sampling) -> list[int]:
    """What ``[ab]{2,5}c`` leaves, or everything."""
    if sampling.constraint is None:
        return ANYTHING
    return LETTERS[:2] if place < 2 else LETTERS if place < 5 else LETTERS[2:]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(10, 0.0, 0.5, 2, top_logprobs=7),  # greedy: top-p and top-k cut nothing
        Sampling(10, 1.3, 1.0, 3, top_logprobs=5),  # fewer than asked for are left
        Sampling(10, 0.8, constraint=Constraint("regex", "[ab]{2,5}c"), top_logprobs=4),
        Sampling(10, 0.0, constraint=Constraint("regex", "[ab]{2,5}c"), top_logprobs=2),
    ],
    ids=str,
)
async def test_the_most_probable_tokens_are_those_of_the_distribution_sampled_from(
    llama: Path, sampling: Sampling
) -> None:
    engine, model = await started(llama), reference(llama)
    prompts = [ids(90, 12), ids(91, 7)]
    requests = [
        GenerateRequest(prompts[0], 3, msgspec.structs.replace(sampling, seed=3)),
        GenerateRequest(prompts[1], 2, Sampling(10, seed=4, top_logprobs=2)),
        GenerateRequest(prompts[1], 2, Sampling(10, seed=4)),
    ]
    result, other, plain = await asyncio.gather(*map(engine.generate, requests))
    await engine.close()
    assert [sample.top for sample in plain.samples] == [None, None]
    assert tokens(plain) == tokens(other)
    assert {len(top) for sample in other.samples for top in sample.top or []} == {2}
    for sample in result.samples:
        assert sample.top is not None
        whole = torch.tensor(np.concatenate([prompts[0], sample.tokens]), dtype=torch.long)[None]
        with torch.no_grad():
            rows = model(whole).logits[0, len(prompts[0]) - 1 : -1]
        for place, (row, token, top) in enumerate(
            zip(rows, sample.tokens.tolist(), sample.top, strict=True)
        ):
            expected = distribution(row, sampling, allowed_at(place, sampling))
            best = expected.topk(min(sampling.top_logprobs, int(expected.isfinite().sum()))).values
            # so they descend
            np.testing.assert_allclose(list(top.values()), best, rtol=0, atol=GREATEST_DIFFERENCE)
            np.testing.assert_allclose(expected[list(top)], best, rtol=0, atol=GREATEST_DIFFERENCE)
            assert top.get(token, sample.logprobs[place]) == sample.logprobs[place]


async def test_overlapping_loads_are_done_in_the_order_in_which_they_were_asked_for(
    tmp_path: Path, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await started(llama)
    folders = [version_folder(tmp_path, llama, version) for version in (1, 2)]
    plain, first = weights.verified, threading.Event()

    def verified(folder: Path, expected: str, held: str) -> weights.Version:
        if folder == folders[0][0]:
            # the first is slow to verify; were the second not to wait, it would set this
            first.wait(0.2)
        else:
            first.set()
        return plain(folder, expected, held)

    monkeypatch.setattr(weights, "verified", verified)
    loads = [
        engine.load(LoadRequest(i + 1, str(folder), proof))
        for i, (folder, proof, _) in enumerate(folders)
    ]
    await asyncio.gather(*loads)
    result = await engine.generate(GREEDY)
    await engine.close()
    assert {*result.samples[0].versions.tolist(), engine.version} == {2}
    assert worst(folders[1][2], [(GREEDY.tokens, result)]) < GREATEST_DIFFERENCE


async def test_a_swap_while_a_prompt_is_prefilled_keeps_its_mixed_keys_out_of_the_cache(
    tmp_path: Path, llama: Path
) -> None:
    engine = await started(llama, prefill_tokens=4)
    folder, proof, model = version_folder(tmp_path, llama, 1)
    prompt = ids(39, 200)
    task = asyncio.create_task(engine.generate(GenerateRequest(prompt, 1, Sampling(2))))
    while not engine.counts["prefilled_tokens"]:
        await asyncio.sleep(0)
    await engine.load(LoadRequest(1, str(folder), proof))
    assert engine.counts["prefilled_tokens"] < 200  # the swap came between
    await task
    again = await engine.generate(GenerateRequest(prompt, 1, Sampling(5)))
    await engine.close()
    assert again.cached_tokens == 0
    assert worst(model, [(prompt, again)]) < GREATEST_DIFFERENCE


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
